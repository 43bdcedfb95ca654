//! What every CPU kernel needs besides its operands.

use super::Isa;
use ferrotron_tensor::Threads;

/// Execution context of a CPU kernel: the pool that its work is split over, and the instruction-set level.
#[derive(Clone, Copy)]
pub struct CpuContext<'a> {
    /// Thread pool.
    pub threads: &'a Threads,
    /// Instruction-set level, from [`Isa::detect`] or [`Isa::all`].
    pub isa: Isa,
}
