//! Each `cuda/*.cu` to PTX, with the nvcc that candle's `cuda` feature needs anyway: PTX runs on
//! this generation of GPUs and all later ones, and needs no compiler where the program runs.

use std::{env, fs, path::Path, process::Command};

/// Ampere: the first with tensor cores for bf16.
const ARCHITECTURE: &str = "compute_80";

fn main() {
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let nvcc = env::var("NVCC").unwrap_or_else(|_| "nvcc".to_string());
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-changed=cuda");
    for entry in fs::read_dir("cuda").expect("a folder of kernels") {
        let source = entry.expect("an entry").path();
        if source.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        let name = source.file_stem().expect("a name").to_string_lossy().into_owned();
        let ptx = Path::new(&out).join(format!("{name}.ptx"));
        let arguments = ["-O3", "-std=c++17", "--ptx", "-arch", ARCHITECTURE, "-o"];
        let done = Command::new(&nvcc).args(arguments).arg(&ptx).arg(&source).status();
        match done {
            Ok(status) if status.success() => {}
            Ok(status) => panic!("{nvcc} {}: {status}", source.display()),
            Err(error) => {
                panic!("{nvcc} cannot be run: {error}; put nvcc in PATH, or its path in NVCC")
            }
        }
    }
}
