//! The map from dense to sparse vectors of a sparse autoencoder.

use candle_core::{DType, Device, Tensor};
use ops::{ComputeType, Linear, Weights};
use serde::Deserialize;

use crate::{
    ConfigError, Error, Result, SparseVector,
    load::{self, ModelFolder, Read},
};

/// `SparseAutoEncoder` of sentence-transformers: `max(W·(x − p) + b, 0)`, of which the largest
/// values are kept.
///
/// # Source
/// CSR: Wen et al. 2025, <https://arxiv.org/abs/2503.01776>.
#[derive(Clone, Debug)]
pub(crate) struct SparseAutoEncoder {
    map: Linear,
    /// p
    pre_bias: Tensor,
    /// b
    latent_bias: Tensor,
    /// Number of dimensions of the sparse vectors.
    dimension: usize,
    /// Number of values that are kept.
    count: usize,
    /// Whether the dense vectors are normalised to mean 0 and standard deviation 1.
    normalizes: bool,
}

/// The keys of the module's `config.json`.
#[derive(Deserialize)]
struct Config {
    input_dim: usize,
    #[serde(default = "hidden_dim")]
    hidden_dim: usize,
    #[serde(default = "k")]
    k: usize,
    #[serde(default)]
    normalize: bool,
}

fn hidden_dim() -> usize {
    512
}

fn k() -> usize {
    8
}

impl SparseAutoEncoder {
    /// Loads the module's folder. `width` is the length of the dense vectors.
    ///
    /// # Errors
    /// [`crate::FileError`] for a missing or damaged file; [`crate::ConfigError::Width`] if
    /// `input_dim` is not `width`; [`crate::CheckpointError::Tensors`] for missing tensors.
    pub(crate) fn from_files(files: &ModelFolder, width: usize, device: &Device) -> Result<Self> {
        let json = files.need_json("config.json", "the sizes of the SparseAutoEncoder")?;
        let Config { input_dim, hidden_dim, k, normalize } = json.to()?;
        if input_dim != width {
            let (path, got, expected) = (json.path().to_string(), input_dim, width);
            return Err(ConfigError::Width { path, got, expected }.into());
        }
        if !(1..=hidden_dim).contains(&k) {
            return Err(Error::unsupported(json.path(), "k", "1 to hidden_dim", k));
        }
        load::module(files, Read::All, device, |weights: Weights| {
            // The decoder has the encoder's matrix: a file stores it under one of both names.
            let names = ["encoder", "decoder.linear"];
            let stored =
                names.into_iter().find(|name| weights.contains_tensor(&format!("{name}.weight")));
            let matrix = weights.pp(stored.unwrap_or("encoder"));
            Ok(Self {
                map: Linear::load(ComputeType::F32, width, hidden_dim, false, matrix)?,
                pre_bias: weights.get(width, "pre_bias")?.map_err(ops::Error::from)?,
                latent_bias: weights.get(hidden_dim, "latent_bias")?.map_err(ops::Error::from)?,
                dimension: hidden_dim,
                count: k,
                normalizes: normalize,
            })
        })
    }

    pub(crate) fn dimension(&self) -> usize {
        self.dimension
    }

    /// The number of values that are kept if the caller does not limit them.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The values above 0 of each row of `x`, `(B, width)`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Vec<SparseVector>> {
        let x = if self.normalizes {
            let rows = x.to_dtype(DType::F32)?.to_vec2::<f32>()?;
            let normalised: Vec<f32> = rows.iter().flat_map(|row| normalised(row)).collect();
            Tensor::from_vec(normalised, x.dims2()?, x.device())?
        } else {
            x.clone()
        };
        let latents = self.map.forward(&x.broadcast_sub(&self.pre_bias)?)?;
        let latents = latents.broadcast_add(&self.latent_bias)?.to_device(&Device::Cpu)?;
        latents.to_vec2::<f32>()?.iter().map(|row| SparseVector::from_dense(row)).collect()
    }
}

/// `(x − mean) / (σ + 10⁻⁵)` with the standard deviation σ of a sample. In f64 and in order, so that
/// the bits do not depend on the CPU.
fn normalised(row: &[f32]) -> impl Iterator<Item = f32> {
    let count = row.len() as f64;
    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let squares: f64 = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    let deviation = (squares / (count - 1.0)).sqrt() + 1e-5;
    row.iter().map(move |&x| ((f64::from(x) - mean) / deviation) as f32)
}
