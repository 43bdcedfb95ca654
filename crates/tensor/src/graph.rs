//! Work of a stream captured once and replayed: hundreds of launches for the price of one.

use crate::cuda::GraphExec;
use crate::{Error, Result, Stream};

/// Captured work. It runs on the memory it was captured with: tensors from before the capture, which its owner keeps
/// alive and in place, and an arena of its own for what was allocated inside.
pub struct Graph {
    stream: Stream,
    work: GraphExec,
    arena: u64,
}

impl Stream {
    /// Notes what `work` gives to this stream instead of running it. The work runs at each [`Graph::replay`], on what
    /// the memory then holds: it must not depend on the host in any other way. Tensors that it makes must be gone when
    /// it returns; results go into tensors from before.
    ///
    /// An error where the device cannot, or where the work waits, talks to the host or to other streams. Nothing has
    /// happened then.
    pub fn capture<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        const OP: &str = "capture";
        let refuse = |what: &str| E::from(Error::Unsupported { op: OP, what: what.into() });
        let Some(cuda) = self.cuda() else { return Err(refuse("the host runs work at once; use a card")) };
        if self.device().is_instrumented() {
            return Err(refuse("launches are watched one by one; leave out --check, --profile and --trace"));
        }
        let inner = &self.device().inner;
        let arena = inner.next_id();
        cuda.begin_capture()?;
        inner.pool.open_arena(arena, self.id());
        let done = work();
        let ended = cuda.end_capture(done.is_ok());
        let made = done.and_then(|()| {
            let work = ended?.ok_or_else(|| refuse("nothing was captured"))?;
            Ok(Graph { stream: self.clone(), work, arena })
        });
        match made {
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
    /// Can it be replayed now? Not while something else is in its memory.
    pub fn is_ready(&self) -> bool {
        self.stream.device().inner.pool.is_whole(self.arena)
    }

    /// Queues all of it, after the work given to its stream so far. An error unless it is ready.
    pub fn replay(&self) -> Result<()> {
        match self.stream.cuda() {
            Some(cuda) if self.is_ready() => cuda.replay(&self.work),
            _ => Err(Error::Unsupported { op: "replay", what: "its memory is in use".into() }),
        }
    }

    /// Kernels, copies and fills in it.
    pub fn nodes(&self) -> usize {
        self.work.nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // The driver must not lose a graph that still runs.
        self.stream.cuda().inspect(|q| q.drain());
        self.stream.device().inner.pool.dissolve_arena(self.arena);
    }
}
