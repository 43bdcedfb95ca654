//! Does every block of elements that share a scale lie on one rank, whole and where the kernels look for it?
//!
//! Blocks are counted in the row-major order of the logical tensor, so that they are the same in every layout, and
//! with them every bit of a run. Kernels count from the first element a rank has of a parameter. The two agree where
//! every run of consecutive elements begins at a multiple of a block, in the tensor and in memory, and ends at one or
//! with the parameter. Nearly all layouts do; the others are refused.

use crate::{Error, Result};
use ferrotron_engine::ParamSpec;
use ferrotron_engine::data_parallel::ParamShard;
use ferrotron_kernels::moments::BLOCK;

/// Checks what this rank has of each parameter.
pub(super) fn check(specs: &[ParamSpec], pieces: &[ParamShard]) -> Result<()> {
    for (spec, piece) in specs.iter().zip(pieces) {
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
