//! The arguments that choose the device, the precision and the number of threads.

use anyhow::{Result, anyhow, bail};
use candle_core::{DType, Device, Tensor};
use clap::{Args, builder::BoolishValueParser};
use encoder::{LoadOptions, PackedCache, Precision};

use crate::{
    arguments::{choice, positive},
    messages,
};

#[derive(Args, Clone)]
pub struct Compute {
    #[command(flatten)]
    machine: Machine,

    /// Number format of matrix products [default: f32 on a CPU, f16 on a GPU]
    #[arg(long, value_parser = choice::<Precision>())]
    dtype: Option<Precision>,
}

/// The arguments of [`Compute`] without the precision.
#[derive(Args, Clone)]
pub struct Machine {
    /// Device: cpu, cuda (the first GPU), cuda:N (GPU N, from 0), or auto (the first GPU if it
    /// works, otherwise the CPU; the CPU for --dtype int8)
    #[arg(
        long,
        env = "ENCODLE_DEVICE",
        default_value = "auto",
        value_name = "DEVICE",
        value_parser = parse_device,
    )]
    device: DeviceChoice,

    /// Number of threads, at most 4 per CPU [default: the environment variable RAYON_NUM_THREADS,
    /// or the number of CPUs available to the process (affinity and cgroup limit)]
    #[arg(long, env = "ENCODLE_THREADS", value_name = "N", value_parser = positive::<usize>)]
    threads: Option<usize>,

    /// Do not use packed weights on disk. By default, the weights of a model are packed once for
    /// this CPU and --dtype and written to a file, which later runs map into memory; see encodle cache
    /// --help
    #[arg(long, env = "ENCODLE_NO_CACHE", value_parser = BoolishValueParser::new())]
    no_cache: bool,
}

/// The value of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceChoice {
    Auto,
    Cpu,
    Cuda(usize),
}

fn parse_device(name: &str) -> Result<DeviceChoice, String> {
    let gpu = match name {
        "auto" => return Ok(DeviceChoice::Auto),
        "cpu" => return Ok(DeviceChoice::Cpu),
        "cuda" => Some(0),
        _ => name.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
    };
    gpu.map(DeviceChoice::Cuda).ok_or_else(|| "expected cpu, cuda, cuda:N or auto".to_string())
}

impl Compute {
    /// Sets the number of threads of the process, and returns how to load a model.
    pub fn start(&self) -> Result<LoadOptions> {
        self.machine.start_threads()?;
        self.machine.options(self.dtype, messages::print)
    }
}

impl Machine {
    /// How to load a model: with the precision `dtype`, by default that of the device, and with the
    /// cache of packed weights unless `--no-cache` is given. `report` as for [`Self::device`].
    pub fn options(&self, dtype: Option<Precision>, report: impl Fn(&str)) -> Result<LoadOptions> {
        let device = self.device(dtype == Some(Precision::Int8), report)?;
        let default = if device.is_cuda() { Precision::F16 } else { Precision::F32 };
        let cache = PackedCache::from_env().filter(|_| !self.no_cache);
        Ok(LoadOptions::default()
            .with_precision(dtype.unwrap_or(default))
            .with_device(&device)
            .with_cache(cache.map(|cache| cache.with_warnings(messages::print))))
    }

    /// Sets the number of threads of the process.
    pub fn start_threads(&self) -> Result<()> {
        let threads = encoder::threads(self.threads, messages::print);
        Ok(rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?)
    }

    /// The device of `--device`. For int8, which GPUs do not support, `auto` is the CPU. If `auto`
    /// tries a GPU, `report` is called with a message that names the chosen device and, if it is
    /// the CPU, the reason.
    fn device(&self, is_int8: bool, report: impl Fn(&str)) -> Result<Device> {
        match self.device {
            DeviceChoice::Cpu => Ok(Device::Cpu),
            DeviceChoice::Cuda(number) => gpu(number),
            DeviceChoice::Auto if is_int8 || !cfg!(feature = "cuda") => Ok(Device::Cpu),
            DeviceChoice::Auto => match gpu(0) {
                Ok(device) => {
                    report("using cuda:0");
                    Ok(device)
                }
                Err(error) => {
                    report(&format!("{error}; using the CPU"));
                    Ok(Device::Cpu)
                }
            },
        }
    }
}

/// Opens a GPU, and runs a kernel on it to check that it works.
fn gpu(number: usize) -> Result<Device> {
    if !cfg!(feature = "cuda") {
        bail!(
            "this binary was built without CUDA support: expected --device cpu or auto; rebuild it \
             with --features cuda to use a GPU"
        );
    }
    let open = || -> candle_core::Result<Device> {
        let device = Device::new_cuda(number)?;
        // Fails if the kernels were built for newer GPUs, or with a newer CUDA than the driver's.
        Tensor::zeros(1, DType::F32, &device)?.affine(1.0, 1.0)?.to_vec1::<f32>()?;
        Ok(device)
    };
    open().map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        anyhow!(
            "GPU {number} cannot be used: expected an NVIDIA driver and a GPU {number} that runs \
             the kernels of this build ({first})"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed() {
        assert_eq!(parse_device("auto"), Ok(DeviceChoice::Auto));
        assert_eq!(parse_device("cpu"), Ok(DeviceChoice::Cpu));
        assert_eq!(parse_device("cuda"), Ok(DeviceChoice::Cuda(0)));
        assert_eq!(parse_device("cuda:3"), Ok(DeviceChoice::Cuda(3)));
        for other in ["", "gpu", "cuda:", "cuda:x", "cpu:0", "auto:1", "cuda:-1"] {
            assert!(parse_device(other).is_err(), "{other}");
        }
    }
}
