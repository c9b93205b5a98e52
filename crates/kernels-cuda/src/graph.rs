//! CUDA graphs: sequences of kernel launches that are captured once and replayed with one call.

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

/// A captured sequence of kernel launches with their arguments. A graph belongs to the thread that
/// captured it, like the stream and cublasLt's workspace.
pub struct Graph {
    graph: CudaGraph,
    _workspace: Option<Arc<CudaSlice<u8>>>,
}

impl Graph {
    /// Captures the GPU work that `work` launches.
    ///
    /// `work` is called twice: first to run, then to be captured without running. It must not copy
    /// between CPU and GPU, except for the kernel arguments that candle copies itself. It must free
    /// all memory that it allocates. All other memory that it reads or writes must be valid
    /// whenever the graph is launched.
    ///
    /// # Errors
    /// The errors of `work`; candle's error if the device lacks asynchronous allocation or uses
    /// several streams, if `work` launches nothing, or if the driver reports an error, for example
    /// because the work cannot be captured.
    pub fn record(device: &CudaDevice, work: impl Fn() -> Result<()>) -> Result<Self> {
        let stream = device.cuda_stream();
        let context = stream.context();
        if !context.has_async_alloc() || context.is_managing_stream_synchronization() {
            bail!("CUDA graphs need asynchronous allocation and a single stream");
        }
        // candle copies kernel arguments such as shapes to the GPU. With this cache the first call
        // copies them, and the captured call finds them on the GPU.
        let _cache = device.enable_cuda_graph_htod_cache();
        work()?;
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        let capture = Capture(&stream);
        let result = work();
        let graph = capture.end();
        match (result, graph) {
            (Ok(()), Ok(Some(graph))) => Ok(Self { graph, _workspace: workspace(device) }),
            (result, graph) => {
                let _ = context.check_err(); // see `end_capture`
                result?;
                graph?;
                bail!("the captured work launches nothing on the GPU")
            }
        }
    }

    /// Launches the graph on its stream, after all work that was launched earlier on this stream.
    ///
    /// # Errors
    /// candle's error if the driver reports one.
    pub fn launch(&self) -> Result<()> {
        self.graph.launch().w()
    }
}

/// A stream in capture mode. Dropping it, for example in a panic, ends the capture.
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
    // After a failed capture, freeing memory fails too. The context stores this error; it must be
    // cleared, or it would be reported by the next call.
    let _ = stream.context().check_err();
    stream.end_capture(CUgraphInstantiate_flags(0)).w()
}
