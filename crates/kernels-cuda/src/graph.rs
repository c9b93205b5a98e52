//! Work that a GPU is told of once, and does as often as it is asked to.

use candle_core::{
    CudaDevice, Result, bail,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{
            CudaGraph, sys::CUgraphInstantiate_flags,
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        },
    },
};

/// Kernels with their arguments, in the memory that these name. It is of the thread that recorded it,
/// as are the stream and cublasLt's workspace.
pub struct Graph(CudaGraph);

impl Graph {
    /// Records what `work` has a GPU do, which must read and write nothing of a CPU's, and free what it
    /// allocates. It is done once before, and not while it is recorded. What it reads and writes and
    /// does not allocate must be there whenever the graph is launched.
    ///
    /// # Errors
    /// Those of `work`; what the driver says, also to what cannot be recorded.
    pub fn record(device: &CudaDevice, work: impl Fn() -> Result<()>) -> Result<Self> {
        // What candle sends its kernels is sent before they are recorded, and stays there.
        let _cache = device.enable_cuda_graph_htod_cache();
        work()?;
        let stream = device.cuda_stream();
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        let done = work();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).w(); // whatever came of it
        match (done, graph) {
            (Ok(()), Ok(Some(graph))) => Ok(Self(graph)),
            (done, graph) => {
                // What could not be freed while it was not recorded is nothing to tell a later call.
                let _ = stream.context().check_err();
                done?;
                graph?;
                bail!("nothing was recorded")
            }
        }
    }

    /// Has the GPU do it again, after what it was asked for before.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch(&self) -> Result<()> {
        self.0.launch().w()
    }
}
