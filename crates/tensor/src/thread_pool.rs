//! The compute pool: CPU threads that kernels share their work over.
//!
//! Work is always cut into pieces whose number depends on the problem only, never on the number of threads,
//! and every piece writes its own output. So results do not depend on how many threads there are.

use crate::{Error, Result};
use rayon::prelude::*;
use std::sync::Arc;

/// A shared set of worker threads. Cloning shares it. Threads that call into it block; they never wait inside it.
#[derive(Clone)]
pub struct Threads {
    pool: Option<Arc<rayon::ThreadPool>>,
    count: usize,
}

impl Threads {
    /// A pool of `count` threads; 0 means one for each core this process may use.
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
                what: format!("{count} compute threads could not be started ({e}); ask for fewer"),
            })?;
        Ok(Threads { pool: Some(Arc::new(pool)), count })
    }

    /// How many threads there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Run `work(i)` for every `i` in `0..pieces`, in any order and on any thread, and return when all are done.
    pub fn parallel_for(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        match &self.pool {
            Some(pool) if pieces > 1 => {
                pool.install(|| (0..pieces).into_par_iter().with_max_len(1).for_each(work))
            }
            _ => (0..pieces).for_each(work),
        }
    }

    /// Cut `0..len` into pieces of `grain` (the last may be shorter) and run `work(start..end)` on each.
    pub fn parallel_ranges(&self, len: usize, grain: usize, work: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let grain = grain.max(1);
        self.parallel_for(len.div_ceil(grain), &|i| work(i * grain..((i + 1) * grain).min(len)));
    }

    /// Cut `out` into chunks of `chunk` elements and run `work(i, chunk_i)` on each.
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
