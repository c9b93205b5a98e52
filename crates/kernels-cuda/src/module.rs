//! Modules of kernels, loaded on each GPU when they are first used.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{
    CudaDevice, Result,
    cuda_backend::{
        WrapErr,
        cudarc::{
            driver::{CudaFunction, CudaModule, CudaStream, LaunchArgs},
            nvrtc::Ptx,
        },
    },
};

/// The kernels of a file in `cuda/`, as a fat binary.
pub(crate) struct Module {
    image: &'static [u8],
    /// The module on each GPU that was used, by the number of the GPU.
    loaded: Mutex<Vec<(usize, Arc<CudaModule>)>>,
}

impl Module {
    pub(crate) const fn new(image: &'static [u8]) -> Self {
        Self { image, loaded: Mutex::new(vec![]) }
    }

    /// The kernel with this name, on the stream of the device.
    ///
    /// # Errors
    /// candle's error if the driver reports one.
    pub(crate) fn kernel(&self, device: &CudaDevice, name: &str) -> Result<Kernel> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let number = context.ordinal();
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let found = loaded.iter().find(|(of, _)| *of == number).map(|(_, module)| module.clone());
        let module = match found {
            Some(module) => module,
            None => {
                let module = context.load_module(Ptx::from_binary(self.image.to_vec())).w()?;
                loaded.push((number, module.clone()));
                module
            }
        };
        drop(loaded);
        Ok(Kernel { function: module.load_function(name).w()?, stream })
    }
}

/// A kernel and the stream that it is launched on.
pub(crate) struct Kernel {
    pub(crate) function: CudaFunction,
    stream: Arc<CudaStream>,
}

impl Kernel {
    /// The launch of the kernel, without arguments.
    pub(crate) fn builder(&self) -> LaunchArgs<'_> {
        self.stream.launch_builder(&self.function)
    }
}
