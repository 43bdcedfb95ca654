//! Graphs of the driver: work of a queue, captured once and launched whole.

use super::{CudaContext, CudaStream, check};
use crate::Result;
use cudarc::driver::sys::{self, CUresult};
use std::sync::Arc;

/// Captured work, ready to be launched.
pub(crate) struct GraphExec {
    context: Arc<CudaContext>,
    raw: sys::CUgraphExec,
    /// Kernels, copies and fills in it.
    pub(crate) nodes: usize,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for GraphExec {}
// SAFETY: as above; launches only read it.
unsafe impl Sync for GraphExec {}

impl CudaStream {
    /// What is queued from now on is noted, not run.
    pub(crate) fn begin_capture(&self) -> Result<()> {
        self.context().enter()?;
        // Relaxed: memory is allocated meanwhile, which is no work of the queue.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a live stream.
        check("begin a capture", unsafe { sys::cuStreamBeginCapture_v2(self.raw(), mode) })?;
        self.set_capturing(true);
        Ok(())
    }

    /// Ends the capture; what was noted, unless `keep` is false.
    pub(crate) fn end_capture(&self, keep: bool) -> Result<Option<GraphExec>> {
        const OP: &str = "end a capture";
        self.set_capturing(false);
        self.context().enter()?;
        let (mut graph, mut raw, mut nodes) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: a live stream and places for handles and a number; the graph is destroyed once, after its use.
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
            // A capture that failed ends in whatever state it is in.
            return Ok(None);
        }
        check(OP, status)?;
        Ok(Some(GraphExec { context: self.shared_context().clone(), raw, nodes }))
    }

    /// Queues all of it.
    pub(crate) fn replay(&self, work: &GraphExec) -> Result<()> {
        self.context().enter()?;
        // SAFETY: live handles; whoever captured it vouches for the memory.
        check("replay", unsafe { sys::cuGraphLaunch(work.raw, self.raw()) })
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `end_capture`; its owner waited for the last launch.
            let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
