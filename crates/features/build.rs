//! Does nothing: a package with build dependencies has a build script.

fn main() {}
