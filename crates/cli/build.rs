//! Sets the cfg `builtin_model` if the weights of the default model are beside the manifest. They are
//! in a clone of the repository; the registry takes no package of their size.

use std::path::Path;

fn main() {
    let weights = "weights/all-MiniLM-L6-v2/model.safetensors";
    println!("cargo::rustc-check-cfg=cfg(builtin_model)");
    println!("cargo::rerun-if-changed={weights}");
    if Path::new(weights).exists() {
        println!("cargo::rustc-cfg=builtin_model");
    }
}
