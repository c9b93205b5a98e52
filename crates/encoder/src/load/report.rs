//! What loading found: everything, not the first thing that is wrong.

use std::fmt;

use serde::Serialize;

/// What of a checkpoint was loaded, and what does not fit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// The file.
    pub path: String,
    /// What stands before `embeddings.` and `encoder.` in its names.
    pub prefix: String,
    /// The dtypes of what was loaded, as the file has them.
    pub dtypes: Vec<String>,
    /// Number of values loaded.
    pub parameters: usize,
    /// Tensors that the config asks for and the file has.
    pub loaded: Vec<String>,
    /// Tensors that were loaded already and serve a second time.
    pub tied: Vec<String>,
    /// Tensors that the config asks for and the file lacks.
    pub missing: Vec<Missing>,
    /// Tensors that the config asks for and the file has otherwise.
    pub mismatched: Vec<Mismatched>,
    /// Tensors that the file has and nothing asks for.
    pub unexpected: Vec<String>,
    /// Tensors that the file has and the encoder is known to do without: buffers, heads.
    pub ignored: Vec<String>,
}

/// A tensor that a file lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Its name as the file would spell it.
    pub tensor: String,
    /// Its shape.
    pub expected: Vec<usize>,
    /// The sizes of the config that make the shape.
    pub why: String,
    /// The unexpected tensor of the file whose name is most like its.
    pub nearest: Option<String>,
}

/// A tensor that a file has otherwise than the config asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mismatched {
    /// Its name.
    pub tensor: String,
    /// The shape it should have.
    pub expected: Vec<usize>,
    /// The sizes of the config that make the shape.
    pub why: String,
    /// The shape it has.
    pub got: Vec<usize>,
    /// The dtype it has.
    pub dtype: String,
}

impl LoadReport {
    /// Whether everything asked for was loaded, and nothing is left over.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.mismatched.is_empty() && self.unexpected.is_empty()
    }

    /// What does not fit, a sentence each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let path = &self.path;
        let missing = self.missing.iter().map(|m| {
            let hint = match &m.nearest {
                Some(nearest) => format!("; the nearest name there is {nearest:?}"),
                None => String::new(),
            };
            format!(
                "tensor {:?} is missing from {path}: expected shape {:?}{}, got none{hint}",
                m.tensor, m.expected, m.why
            )
        });
        let mismatched = self.mismatched.iter().map(|m| {
            if m.expected == m.got {
                let readable = "f32, f16, bf16 or f64";
                let (tensor, dtype) = (&m.tensor, &m.dtype);
                return format!("tensor {tensor:?} in {path}: expected {readable}, got {dtype}");
            }
            format!(
                "tensor {:?} in {path}: expected shape {:?}{}, got {:?}",
                m.tensor, m.expected, m.why, m.got
            )
        });
        let unexpected = self.unexpected.iter().map(|tensor| {
            format!("tensor {tensor:?} in {path} is unexpected: the config does not ask for it")
        });
        missing.chain(mismatched).chain(unexpected).collect()
    }
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
