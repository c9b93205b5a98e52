//! Where to compute, in what, and on how many threads.

use anyhow::{Result, anyhow};
use candle_core::Device;
use clap::{Args, ValueEnum};
use encoder::Precision;

/// Most threads for each core.
const THREADS_PER_CORE: usize = 4;

#[derive(Args)]
pub struct Compute {
    /// cpu, cuda or cuda:N for the GPU of that number, or auto: a GPU if one works, else the CPU
    #[arg(long, env = "BERT_DEVICE", default_value = "cpu", value_name = "DEVICE", value_parser = place)]
    device: Place,

    /// What to multiply in; less is faster, and less exact; f32 on the CPU and f16 on a GPU where not
    /// given
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,

    /// Threads to compute on, at most 4 for each core [default: RAYON_NUM_THREADS, or the number of
    /// cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

/// What `--device` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Auto,
    Cpu,
    Cuda(usize),
}

fn place(name: &str) -> std::result::Result<Place, String> {
    let number = match name.split_once(':') {
        None => Some(0),
        Some((_, number)) => number.parse().ok(),
    };
    match (name.split(':').next(), number) {
        (Some("auto"), _) if name == "auto" => Ok(Place::Auto),
        (Some("cpu"), _) if name == "cpu" => Ok(Place::Cpu),
        (Some("cuda"), Some(number)) => Ok(Place::Cuda(number)),
        _ => Err("expected cpu, cuda, cuda:N or auto".to_string()),
    }
}

impl Compute {
    /// Sets the number of threads, once for the program; tells where it computes, and in what.
    pub fn start(&self) -> Result<(Precision, Device)> {
        if let Some(threads) = self.threads() {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
        }
        let device = match self.device {
            Place::Cpu => Device::Cpu,
            Place::Cuda(number) => gpu(number)?,
            Place::Auto if self.dtype == Some(Dtype::Int8) => Device::Cpu, // where alone it is
            Place::Auto => self.best(),
        };
        let default = if device.is_cuda() { Precision::F16 } else { Precision::F32 };
        Ok((self.dtype.map_or(default, Into::into), device))
    }

    /// The number of threads asked for, at most [`THREADS_PER_CORE`] for each core: idle threads
    /// spin, so many more threads than cores slow each other down.
    fn threads(&self) -> Option<usize> {
        let from_environment = || std::env::var("RAYON_NUM_THREADS").ok()?.parse().ok();
        let asked = self.threads.map(usize::from).or_else(from_environment)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let most = cores * THREADS_PER_CORE;
        if asked > most {
            eprintln!(
                "bert: computing on {most} threads instead of {asked}: {THREADS_PER_CORE} for each of {cores} cores"
            );
        }
        Some(asked.min(most))
    }

    /// The first GPU, if one works; which of both is told, if there is a choice.
    fn best(&self) -> Device {
        if !cfg!(feature = "cuda") {
            return Device::Cpu;
        }
        match gpu(0) {
            Ok(device) => {
                eprintln!("bert: computing on cuda:0");
                device
            }
            Err(error) => {
                eprintln!("bert: {error}; computing on the CPU");
                Device::Cpu
            }
        }
    }
}

fn gpu(number: usize) -> Result<Device> {
    if !cfg!(feature = "cuda") {
        return Err(anyhow!(
            "this bert knows no GPUs: expected --device cpu or auto; build it with --features cuda"
        ));
    }
    Device::new_cuda(number).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        anyhow!("GPU {number} cannot be used: expected a driver and such a GPU ({first})")
    })
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Dtype {
    /// Exact
    F32,
    /// 11 bits of mantissa; slow on a CPU
    F16,
    /// Cosine to f32 at least 0.9999
    Bf16,
    /// 8-bit integers; cosine to f32 at least 0.998; on a CPU only
    Int8,
}

impl From<Dtype> for Precision {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
            Dtype::Int8 => Self::Int8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_everywhere() {
        assert_eq!(place("auto"), Ok(Place::Auto));
        assert_eq!(place("cpu"), Ok(Place::Cpu));
        assert_eq!(place("cuda"), Ok(Place::Cuda(0)));
        assert_eq!(place("cuda:3"), Ok(Place::Cuda(3)));
        for other in ["", "gpu", "cuda:", "cuda:x", "cpu:0", "auto:1", "cuda:-1"] {
            assert!(place(other).is_err(), "{other}");
        }
    }
}
