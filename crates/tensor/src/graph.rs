//! CUDA graphs: the work of one or more streams captured once and replayed with a single launch.

use crate::cuda::GraphExec;
use crate::{Error, Result, Stream};

/// A captured graph. It runs on the memory it was captured with: tensors allocated before the capture, which its
/// owner keeps alive and in place, and an arena for everything allocated inside.
pub struct Graph {
    stream: Stream,
    work: GraphExec,
    arena: u64,
}

/// What happens to the memory of a graph between replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphMemory {
    /// Other work on its stream may use it; the graph can be replayed when it is given back.
    Lent,
    /// Nobody else uses it, so that the graph can always be replayed.
    Reserved,
}

impl Stream {
    /// Captures what `work` gives to this stream, without running it. Each [`Graph::replay`] runs it on the current
    /// contents of the same memory, so `work` must not depend on host state in any other way. Tensors allocated by
    /// `work` must be dropped before it returns; results go into tensors allocated before.
    ///
    /// Fails, without side effects, if the device cannot capture or if `work` waits, copies from or to memory that is no
    /// tensor, or uses other streams.
    pub fn capture<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.capture_with(GraphMemory::Lent, &[], work)
    }

    /// [`Stream::capture`] with a choice of what happens to the graph's memory between replays, and with the work of
    /// `others`: streams that this one is ordered with by events, and on which `work` allocates nothing.
    pub fn capture_with<E: From<Error>>(
        &self,
        memory: GraphMemory,
        others: &[&Stream],
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        const OP: &str = "capture";
        let refuse = |what: &str| E::from(Error::Unsupported { op: OP, what: what.into() });
        let Some(cuda) = self.cuda() else {
            return Err(refuse("only a CUDA device can capture; the CPU runs work immediately"));
        };
        if self.device().is_instrumented() {
            return Err(refuse(
                "launches are instrumented one by one; leave out --check, --profile and --trace",
            ));
        }
        let inner = &self.device().inner;
        let arena = inner.next_id();
        let others: Vec<_> = others.iter().filter_map(|s| s.cuda()).collect();
        cuda.begin_capture(&others)?;
        inner.pool.open_arena(arena, self.id(), memory == GraphMemory::Lent);
        let done = work();
        let ended = cuda.end_capture(&others, done.is_ok());
        let graph = done.and_then(|()| {
            let work = ended?.ok_or_else(|| refuse("no graph was captured"))?;
            Ok(Graph { stream: self.clone(), work, arena })
        });
        match graph {
            Ok(graph) => match inner.pool.seal_arena(arena) {
                Ok(()) => Ok(graph),
                Err(why) => Err(refuse(why)),
            },
            Err(e) => {
                inner.pool.dissolve_arena(arena);
                Err(e)
            }
        }
    }
}

impl Graph {
    /// True if the graph can be replayed now: none of its memory is lent to other work.
    pub fn is_ready(&self) -> bool {
        self.stream.device().inner.pool.is_unused(self.arena)
    }

    /// Launches the graph after the work given to its stream so far. Fails unless [`Graph::is_ready`].
    pub fn replay(&self) -> Result<()> {
        match self.stream.cuda() {
            Some(cuda) if self.is_ready() => cuda.replay(&self.work),
            _ => Err(Error::Unsupported { op: "replay", what: "a tensor still uses its memory".into() }),
        }
    }

    /// Number of kernels, copies and memsets in the graph.
    pub fn nodes(&self) -> usize {
        self.work.nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // The driver must not destroy a graph that is still running.
        self.stream.cuda().inspect(|q| q.drain());
        self.stream.device().inner.pool.dissolve_arena(self.arena);
    }
}
