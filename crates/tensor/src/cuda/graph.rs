//! CUDA graphs: the work of a stream, captured once and launched as a whole.

use super::memory::PinnedMemory;
use super::{CudaContext, CudaEvent, CudaStream, check};
use crate::Result;
use cudarc::driver::sys::{self, CUresult};
use std::sync::Arc;

/// An instantiated graph.
pub(crate) struct GraphExec {
    context: Arc<CudaContext>,
    raw: sys::CUgraphExec,
    /// Number of kernels, copies and memsets.
    pub(crate) nodes: usize,
    /// Host memory that it reads.
    _constants: Vec<PinnedMemory>,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for GraphExec {}
// SAFETY: as above; launching does not modify it.
unsafe impl Sync for GraphExec {}

impl CudaStream {
    /// Captures what is given to this stream and to `others` from now on instead of running it.
    pub(crate) fn begin_capture(&self, others: &[&CudaStream]) -> Result<()> {
        self.context().enter()?;
        // Relaxed mode: allocations are allowed during the capture; they are no work of the stream.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a live stream.
        check("begin graph capture", unsafe { sys::cuStreamBeginCapture_v2(self.raw(), mode) })?;
        self.set_capturing(true);
        // A stream joins the capture when it waits for captured work.
        let join = |other: &&CudaStream| {
            other.set_capturing(true);
            other.wait(&CudaEvent::record(self)?)
        };
        let joined = others.iter().try_for_each(join);
        if joined.is_err() {
            self.end_capture(others, false)?;
        }
        joined
    }

    /// Ends the capture and instantiates the graph, or discards it if `keep` is false.
    pub(crate) fn end_capture(&self, others: &[&CudaStream], keep: bool) -> Result<Option<GraphExec>> {
        const OP: &str = "end graph capture";
        // The graph is complete when the work of all its streams is.
        let wait = |other: &&CudaStream| self.wait(&CudaEvent::record(other)?);
        let complete = if keep { others.iter().try_for_each(wait) } else { Ok(()) };
        others.iter().chain(&[self]).for_each(|stream| stream.set_capturing(false));
        let constants = std::mem::take(&mut *self.constants());
        self.context().enter()?;
        let (mut graph, mut raw, mut nodes) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: a live stream and out-pointers to locals; the graph is destroyed once, after its last use.
        let status = unsafe {
            let ended = sys::cuStreamEndCapture(self.raw(), &mut graph);
            let status = match ended {
                CUresult::CUDA_SUCCESS if keep => {
                    let _ = sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes);
                    sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0)
                }
                ended => ended,
            };
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
            status
        };
        if !keep {
            // The capture failed already; its status adds nothing.
            return Ok(None);
        }
        check(OP, status)?;
        complete?;
        Ok(Some(GraphExec { context: self.shared_context().clone(), raw, nodes, _constants: constants }))
    }

    /// Launches the graph on this stream.
    pub(crate) fn replay(&self, work: &GraphExec) -> Result<()> {
        self.context().enter()?;
        // SAFETY: live handles; the owner of the graph keeps its memory allocated.
        check("launch graph", unsafe { sys::cuGraphLaunch(work.raw, self.raw()) })
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created in `end_capture`; the owner has synchronized with the last launch.
            let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
