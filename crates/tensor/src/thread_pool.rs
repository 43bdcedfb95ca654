//! The thread pool of CPU kernels.
//!
//! Work is split into pieces by problem size alone, never by the number of threads, and every piece writes its own
//! output. Results therefore do not depend on the number of threads.

use crate::{Error, Result};
use rayon::prelude::*;
use std::sync::Arc;

/// A shared pool of worker threads; clones share it. Callers block until their work is done and never wait for
/// anything else inside the pool.
#[derive(Clone)]
pub struct Threads {
    pool: Option<Arc<rayon::ThreadPool>>,
    count: usize,
}

impl Threads {
    /// Creates a pool of `count` threads; 0 means one for each available core.
    pub fn new(count: usize) -> Result<Threads> {
        let available = std::thread::available_parallelism().map_or(1, |n| n.get());
        let count = if count == 0 { available } else { count };
        if count == 1 {
            return Ok(Threads { pool: None, count });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|i| format!("compute-{i}"))
            .build()
            .map_err(|e| Error::Unsupported {
                op: "threads",
                what: format!("{count} compute threads could not be started ({e}); use fewer"),
            })?;
        Ok(Threads { pool: Some(Arc::new(pool)), count })
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Runs `work(i)` for every `i` in `0..pieces`, in any order on any thread, and returns when all are done.
    pub fn parallel_for(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        match &self.pool {
            Some(pool) if pieces > 1 => {
                pool.install(|| (0..pieces).into_par_iter().with_max_len(1).for_each(work))
            }
            _ => (0..pieces).for_each(work),
        }
    }

    /// Splits `0..len` into ranges of `grain` (the last may be shorter) and runs `work(start..end)` on each.
    pub fn parallel_ranges(&self, len: usize, grain: usize, work: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let grain = grain.max(1);
        self.parallel_for(len.div_ceil(grain), &|i| work(i * grain..((i + 1) * grain).min(len)));
    }

    /// Splits `out` into chunks of `chunk` elements and runs `work(i, chunk_i)` on each.
    pub fn parallel_chunks<T: Send>(
        &self,
        out: &mut [T],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        let chunk = chunk.max(1);
        match &self.pool {
            Some(pool) if out.len() > chunk => pool.install(|| {
                out.par_chunks_mut(chunk).with_max_len(1).enumerate().for_each(|(i, c)| work(i, c))
            }),
            _ => out.chunks_mut(chunk).enumerate().for_each(|(i, c)| work(i, c)),
        }
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Threads({})", self.count)
    }
}
