//! What to compute in, and on how many threads.

use anyhow::Result;
use clap::{Args, ValueEnum};
use encoder::Precision;

#[derive(Args)]
pub struct Compute {
    /// What to multiply in; less is faster, and less exact
    #[arg(long, value_enum, default_value_t)]
    dtype: Dtype,

    /// Threads to compute on; as many as there are cores, or as RAYON_NUM_THREADS says, where not
    /// given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

impl Compute {
    /// Sets the number of threads, once for the program.
    pub fn start(&self) -> Result<Precision> {
        if let Some(threads) = self.threads {
            rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global()?;
        }
        Ok(self.dtype.into())
    }
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Dtype {
    /// Exact
    #[default]
    F32,
    /// Cosine to f32 at least 0.9999
    Bf16,
    /// 8-bit integers; cosine to f32 at least 0.998
    Int8,
}

impl From<Dtype> for Precision {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
            Dtype::Int8 => Self::Int8,
        }
    }
}
