//! No code: the dependencies of this crate enable features, so that the command, its tests and the
//! Python package use the same builds of their dependencies.
