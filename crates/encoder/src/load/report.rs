//! The report of loading a checkpoint: every problem, not only the first.

use std::fmt;

use serde::Serialize;

/// The tensors that were loaded from a checkpoint, and the tensors that do not match the config.
///
/// # Examples
/// A checkpoint in f16, of which every tensor is loaded:
/// ```
/// use encoder::{Embedder, LoadOptions};
///
/// let dir = "../../weights/all-MiniLM-L6-v2";
/// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
/// let report = embedder.report();
/// assert!(report.is_complete());
/// assert_eq!((report.parameters, report.loaded.len()), (22_713_216, 103));
/// assert_eq!(report.dtypes, ["f16"]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// The weights file, or the index of shards.
    pub path: String,
    /// The prefix of the encoder's tensor names, such as `bert.`; empty if there is none.
    pub prefix: String,
    /// The dtypes of the loaded tensors in the file.
    pub dtypes: Vec<String>,
    /// Number of values loaded.
    pub parameters: usize,
    /// Tensors that were loaded; those in `mismatched` are not among them.
    pub loaded: Vec<String>,
    /// Loaded tensors that the model uses a second time.
    pub tied: Vec<String>,
    /// Tensors that the model needs and the file lacks.
    pub missing: Vec<Missing>,
    /// Tensors that the file has with another shape, or with an unsupported dtype.
    pub mismatched: Vec<Mismatched>,
    /// Tensors in the file that the model does not use, except those in `ignored`.
    pub unexpected: Vec<String>,
    /// Unused tensors that are known to be unneeded, such as buffers and heads.
    pub ignored: Vec<String>,
}

/// A tensor that a file lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// The tensor's name in the file's naming scheme.
    pub tensor: String,
    /// The expected shape.
    pub expected: Vec<usize>,
    /// The config keys or other sizes that determine the dimensions, with their values:
    /// `vocab_size = 30522`. Empty if none is known.
    pub sizes: Vec<String>,
    /// The most similar name among the unexpected tensors.
    pub nearest: Option<String>,
}

/// A tensor whose shape does not match the config, or whose dtype is not supported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mismatched {
    /// The tensor's name.
    pub tensor: String,
    /// The expected shape.
    pub expected: Vec<usize>,
    /// The config keys or other sizes that determine the dimensions, with their values:
    /// `vocab_size = 30522`. Empty if none is known.
    pub sizes: Vec<String>,
    /// The shape in the file.
    pub got: Vec<usize>,
    /// The dtype in the file.
    pub dtype: String,
}

impl LoadReport {
    /// Whether no tensor is missing, mismatched or unexpected.
    pub fn is_complete(&self) -> bool {
        self.has_all() && self.unexpected.is_empty()
    }

    /// Whether no tensor is missing or mismatched.
    pub(crate) fn has_all(&self) -> bool {
        self.missing.is_empty() && self.mismatched.is_empty()
    }

    /// One sentence for each missing, mismatched or unexpected tensor.
    pub(crate) fn problems(&self) -> Vec<String> {
        let path = &self.path;
        let missing = self.missing.iter().map(|m| {
            let hint = match &m.nearest {
                Some(nearest) => format!("; the most similar name is {nearest:?}"),
                None => String::new(),
            };
            format!(
                "tensor {:?} is missing from {path}: expected shape {:?}{}, got none{hint}",
                m.tensor,
                m.expected,
                in_brackets(&m.sizes)
            )
        });
        let mismatched = self.mismatched.iter().map(|m| {
            let readable = "f32, f16, bf16 or f64";
            let (tensor, dtype) = (&m.tensor, &m.dtype);
            if m.expected == m.got {
                return format!("tensor {tensor:?} in {path}: expected {readable}, got {dtype}");
            }
            let (and_dtype, got) = if ["f32", "f16", "bf16", "f64"].contains(&dtype.as_str()) {
                (String::new(), format!("{:?}", m.got))
            } else {
                let got = format!("shape {:?} and dtype {dtype}", m.got);
                (format!(" and dtype {readable}"), got)
            };
            format!(
                "tensor {tensor:?} in {path}: expected shape {:?}{}{and_dtype}, got {got}",
                m.expected,
                in_brackets(&m.sizes)
            )
        });
        let unexpected = self.unexpected.iter().map(|tensor| {
            format!("tensor {tensor:?} in {path} is unexpected: the model does not use it")
        });
        missing.chain(mismatched).chain(unexpected).collect()
    }
}

/// The sizes, to be appended to a shape.
fn in_brackets(sizes: &[String]) -> String {
    if sizes.is_empty() { String::new() } else { format!(" ({})", sizes.join(", ")) }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.problems();
        match problems.len() {
            0 => write!(
                f,
                "{}: {} tensors loaded ({:.1} M parameters of {}), {} ignored",
                self.path,
                self.loaded.len(),
                self.parameters as f64 / 1e6,
                self.dtypes.join(" and "),
                self.ignored.len()
            ),
            1 => write!(f, "{}", problems[0]),
            n => write!(
                f,
                "{} does not fit its config, {n} problems: {}",
                self.path,
                problems.join("; ")
            ),
        }
    }
}

impl std::error::Error for LoadReport {}
