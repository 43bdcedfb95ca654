//! Block alignment of packed moments: every block of elements that share a scale must lie on one rank, where kernels expect it.
//!
//! Blocks follow the row-major order of the logical tensor, so that they, and all bits of a run, are equal in every layout.
//! Kernels count blocks from the first element of a rank's shard. The two agree where every contiguous range begins at a
//! multiple of the block size, in the tensor and in memory, and ends at one or with the parameter. Nearly all layouts
//! satisfy this; the others are refused.

use crate::{Error, Result};
use ferrotron_engine::ParamSpec;
use ferrotron_engine::data_parallel::ParamShard;
use ferrotron_kernels::moments::BLOCK;

/// Checks this rank's shard of each parameter whose moments are `packed`.
pub(super) fn check(
    specs: &[ParamSpec],
    pieces: &[ParamShard],
    packed: impl Fn(&ParamSpec) -> bool,
) -> Result<()> {
    for (spec, piece) in specs.iter().zip(pieces).filter(|(spec, _)| packed(spec)) {
        let mut at = piece.param_range.start;
        for (part, runs) in spec.runs(&piece.param_range) {
            for run in runs {
                let fits = |n: usize| n.is_multiple_of(BLOCK);
                let end = at + run.len();
                if !fits(run.start) || !fits(at) || !(fits(end) || end == spec.numel()) {
                    return Err(Error::Invalid(format!(
                        "optimizer.state_dtype: a rank has elements {run:?} of {}, which cut a block of {BLOCK} that share a scale; use \"bf16\", or sizes and a parallel.tp whose parts are multiples of {BLOCK}",
                        part.name
                    )));
                }
                at = end;
            }
        }
    }
    Ok(())
}
