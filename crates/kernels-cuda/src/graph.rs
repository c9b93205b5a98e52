//! Work that a GPU is told of once, and does as often as it is asked to.

use std::sync::Arc;

use candle_core::{
    CudaDevice, Result, bail,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{
            CudaGraph, CudaSlice, CudaStream, sys::CUgraphInstantiate_flags,
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        },
    },
};

use crate::linear::workspace;

/// Kernels with their arguments, in the memory that these name. It is of the thread that recorded it,
/// as are the stream and cublasLt's workspace.
pub struct Graph {
    graph: CudaGraph,
    _workspace: Option<Arc<CudaSlice<u8>>>,
}

impl Graph {
    /// Records what `work` has a GPU do, which must read and write nothing of a CPU's, and free what it
    /// allocates. It is done once before, and not while it is recorded. What it reads and writes and
    /// does not allocate must be there whenever the graph is launched.
    ///
    /// # Errors
    /// Those of `work`; what the driver says, also to what cannot be recorded.
    pub fn record(device: &CudaDevice, work: impl Fn() -> Result<()>) -> Result<Self> {
        let stream = device.cuda_stream();
        let context = stream.context();
        if !context.has_async_alloc() || context.is_managing_stream_synchronization() {
            bail!("memory and other streams that cannot be recorded");
        }
        // What candle sends its kernels is sent before they are recorded, and stays there.
        let _cache = device.enable_cuda_graph_htod_cache();
        work()?;
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        let capture = Capture(&stream);
        let done = work();
        let graph = capture.end();
        match (done, graph) {
            (Ok(()), Ok(Some(graph))) => Ok(Self { graph, _workspace: workspace(device) }),
            (done, graph) => {
                let _ = context.check_err(); // as in `end`
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
        self.graph.launch().w()
    }
}

/// A stream that records, until this is dropped: a panic leaves none that does.
struct Capture<'a>(&'a Arc<CudaStream>);

impl Capture<'_> {
    fn end(self) -> Result<Option<CudaGraph>> {
        let graph = end_capture(self.0);
        std::mem::forget(self);
        graph
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let _ = end_capture(self.0);
    }
}

fn end_capture(stream: &Arc<CudaStream>) -> Result<Option<CudaGraph>> {
    // A recording that failed can free nothing. What is remembered of that would keep it from being
    // ended here, and fail a later call.
    let _ = stream.context().check_err();
    stream.end_capture(CUgraphInstantiate_flags(0)).w()
}
