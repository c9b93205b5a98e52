//! Compiles each `cuda/*.cu` to PTX with nvcc, which candle's `cuda` feature needs too. PTX runs on
//! GPUs of `ARCHITECTURE` and later; the driver compiles it when the program runs.

use std::{env, fs, path::Path, process::Command};

/// Ampere, the first architecture with tensor cores for bf16.
const ARCHITECTURE: &str = "compute_80";

fn main() {
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let nvcc = env::var("NVCC").unwrap_or_else(|_| "nvcc".to_string());
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-changed=cuda");
    for entry in fs::read_dir("cuda").expect("the folder cuda is readable") {
        let source = entry.expect("the folder cuda is readable").path();
        if source.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        let name =
            source.file_stem().expect("a .cu file has a name").to_string_lossy().into_owned();
        let ptx = Path::new(&out).join(format!("{name}.ptx"));
        let arguments = ["-O3", "-std=c++17", "--ptx", "-arch", ARCHITECTURE, "-o"];
        let status = Command::new(&nvcc).args(arguments).arg(&ptx).arg(&source).status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => panic!(
                "{nvcc} failed to compile {} ({status}); see its messages above",
                source.display()
            ),
            Err(error) => {
                panic!("cannot run {nvcc}: {error}; put nvcc in PATH or set NVCC to its path")
            }
        }
    }
}
