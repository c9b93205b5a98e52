//! How a model is loaded.

use candle_core::Device;

use crate::{PackedCache, Precision};

/// How to load a model: the precision, the device, and the cache of packed weights. By default: f32
/// on a CPU, without a cache.
///
/// # Examples
/// ```
/// use encoder::{Embedder, LoadOptions, Precision};
///
/// let dir = "../../weights/all-MiniLM-L6-v2";
/// let exact = Embedder::from_dir(dir, &LoadOptions::default())?.embed(&["I love AI"])?;
/// let options = LoadOptions::default().with_precision(Precision::Bf16);
/// let rounded = Embedder::from_dir(dir, &options)?.embed(&["I love AI"])?;
/// let cosine = (exact * rounded)?.sum_all()?.to_scalar::<f32>()?;
/// assert!(cosine > 0.9999 && cosine < 1.0);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The precision of the computation.
    pub precision: Precision,
    /// The device of the weights.
    pub device: Device,
    /// The cache in which the weights of an encoder and its head are stored, packed for the CPU
    /// kernels. It is used for hidden states in f32 on a CPU.
    pub cache: Option<PackedCache>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { precision: Precision::default(), device: Device::Cpu, cache: None }
    }
}

impl LoadOptions {
    /// Sets the precision.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// Sets the device.
    pub fn with_device(self, device: &Device) -> Self {
        Self { device: device.clone(), ..self }
    }

    /// Sets the cache of packed weights, or none.
    pub fn with_cache(self, cache: impl Into<Option<PackedCache>>) -> Self {
        Self { cache: cache.into(), ..self }
    }
}
