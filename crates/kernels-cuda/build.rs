//! Compiles each `cuda/*.cu` with nvcc, which candle's `cuda` feature needs too. A fat binary has
//! machine code for each of `ARCHITECTURES`, and PTX, which the driver of a later GPU compiles when
//! the program runs.

use std::{
    env, fs,
    path::Path,
    process::{Child, Command},
};

/// Machine code of an architecture runs on GPUs of the same major version: 80 also on 8.6 and 8.9.
const ARCHITECTURES: [&str; 4] = ["80", "90", "100", "120"];

/// Ampere, the first architecture with tensor cores for bf16.
const PTX: &str = "80";

fn main() {
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let nvcc = env::var("NVCC").unwrap_or_else(|_| "nvcc".to_string());
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-changed=cuda");
    let codes = supported(&nvcc).into_iter().map(|n| format!("arch=compute_{n},code=sm_{n}"));
    let codes: Vec<String> =
        codes.chain([format!("arch=compute_{PTX},code=compute_{PTX}")]).collect();
    let mut running: Vec<(String, Child)> = vec![];
    for entry in fs::read_dir("cuda").expect("the folder cuda is readable") {
        let source = entry.expect("the folder cuda is readable").path();
        if source.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        let name =
            source.file_stem().expect("a .cu file has a name").to_string_lossy().into_owned();
        let mut command = Command::new(&nvcc);
        command.args(["-O3", "-std=c++17", "-fatbin"]);
        command.args(codes.iter().flat_map(|code| ["-gencode", code]));
        command.arg("-o").arg(Path::new(&out).join(format!("{name}.fatbin"))).arg(&source);
        match command.spawn() {
            Ok(child) => running.push((source.display().to_string(), child)),
            Err(error) => {
                panic!("cannot run {nvcc}: {error}; put nvcc in PATH or set NVCC to its path")
            }
        }
    }
    for (source, mut child) in running {
        let status = child.wait().expect("the process is a child of this one");
        if !status.success() {
            panic!("{nvcc} failed to compile {source} ({status}); see its messages above");
        }
    }
}

/// The members of [`ARCHITECTURES`] that this nvcc supports; all of them if nvcc lists none.
fn supported(nvcc: &str) -> Vec<&'static str> {
    let listed = Command::new(nvcc).arg("--list-gpu-code").output();
    let listed = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let listed = listed.unwrap_or_default();
    let is_listed = |n: &&str| listed.lines().any(|line| line == format!("sm_{n}"));
    let found: Vec<_> = ARCHITECTURES.into_iter().filter(is_listed).collect();
    if found.is_empty() { ARCHITECTURES.to_vec() } else { found }
}
