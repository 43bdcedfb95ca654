//! What every CPU kernel needs besides its operands.

use super::Isa;
use ferrotron_tensor::Threads;

/// Execution context of a CPU kernel: the pool that its work is split over, and the instruction-set level.
#[derive(Clone, Copy)]
pub struct CpuContext<'a> {
    /// Thread pool.
    pub threads: &'a Threads,
    /// Instruction-set level, never above [`Isa::detect`].
    pub(crate) isa: Isa,
}

impl<'a> CpuContext<'a> {
    /// A context at `isa`, or at the highest level of this machine if that is lower.
    pub fn new(threads: &'a Threads, isa: Isa) -> CpuContext<'a> {
        CpuContext { threads, isa: isa.min(Isa::detect()) }
    }
}
