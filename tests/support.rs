//! Helpers for the tests.

use std::{
    collections::HashMap,
    hash::Hasher,
    io::Write,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Result, Tensor, safetensors};

// Paths are relative to the repository's root, where cargo runs tests, so that the test binary also
// runs on another machine.

/// The folder of the built-in model.
pub const MINILM: &str = "weights/all-MiniLM-L6-v2";

/// The path of a golden file or folder.
pub fn golden(name: &str) -> PathBuf {
    let path = Path::new("tests/golden").join(name);
    let script = if name.starts_with("architectures") { "architectures" } else { "generate" };
    assert!(
        path.exists(),
        "{} is missing: create it with `python tests/golden/{script}.py`",
        path.display()
    );
    path
}

/// A temporary folder. WebAssembly has no default place for it.
pub fn temp_dir() -> std::io::Result<tempfile::TempDir> {
    if cfg!(target_family = "wasm") { tempfile::tempdir_in("/tmp") } else { tempfile::tempdir() }
}

/// A temporary folder with copies of these files of a golden folder.
pub fn golden_copy(folder: &str, files: &[&str]) -> std::io::Result<tempfile::TempDir> {
    let dir = temp_dir()?;
    for file in files {
        std::fs::copy(golden(folder).join(file), dir.path().join(file))?;
    }
    Ok(dir)
}

/// Copies the files of a folder and of its subfolders.
pub fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            std::fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// The tensors of a golden file.
pub struct Golden(HashMap<String, Tensor>);

impl Golden {
    pub fn open(name: &str) -> Result<Self> {
        Ok(Self(safetensors::load(golden(name), &Device::Cpu)?))
    }

    pub fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("the golden file has no tensor {name}"))
    }

    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    pub fn tensors(&self) -> HashMap<String, Tensor> {
        self.0.clone()
    }
}

/// The maximum absolute difference between two tensors of the same shape; infinite if a difference
/// is NaN.
pub fn max_difference(got: &Tensor, expected: &Tensor) -> Result<f64> {
    Ok(largest(got, expected)?.0)
}

/// Fails if an element of `got` differs from `expected` by more than `tolerance`, with the position
/// and the values of the largest difference.
#[track_caller]
pub fn assert_close(name: &str, got: &Tensor, expected: &Tensor, tolerance: f64) {
    record_digest(name, got).unwrap();
    let (difference, at, got, expected) = largest(got, expected).unwrap();
    println!("{name}: largest difference {difference:.1e}");
    assert!(
        difference <= tolerance,
        "{name}: differs by {difference:e} at {at:?}, tolerance {tolerance:e}: \
         got {got}, expected {expected}"
    );
}

/// The file to which [`record_digest`] writes, if the environment variable is set.
fn digests() -> Option<PathBuf> {
    std::env::var_os("RESULT_DIGESTS").map(PathBuf::from)
}

/// Whether digests of results are recorded.
pub fn is_recording() -> bool {
    digests().is_some()
}

/// Appends the name of the test, `name` and a digest of the bits of `x` to the file that
/// `RESULT_DIGESTS` names, if it is set. Equal sorted files show that two instruction sets or machines
/// compute the same bits.
pub fn record_digest(name: &str, x: &Tensor) -> Result<()> {
    let Some(file) = digests() else { return Ok(()) };
    let values = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    let mut digest = twox_hash::XxHash64::with_seed(0);
    values.iter().for_each(|value| digest.write_u64(value.to_bits()));
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    let line = format!("{test}, {name}: {:016x}\n", digest.finish());
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
    Ok(file.write_all(line.as_bytes())?)
}

/// The largest difference, its position, and the two values there.
fn largest(got: &Tensor, expected: &Tensor) -> Result<(f64, Vec<usize>, f64, f64)> {
    assert_eq!(got.dims(), expected.dims());
    let values = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (x, y) = (values(got)?, values(expected)?);
    let difference = |i: usize| match (x[i] - y[i]).abs() {
        d if d.is_nan() => f64::INFINITY,
        d => d,
    };
    let worst = (0..x.len()).max_by(|&i, &j| difference(i).total_cmp(&difference(j)));
    let worst = worst.expect("the tensors are not empty");
    let (mut at, mut rest) = (vec![], worst);
    for &dim in got.dims().iter().rev() {
        at.insert(0, rest % dim);
        rest /= dim;
    }
    Ok((difference(worst), at, x[worst], y[worst]))
}
