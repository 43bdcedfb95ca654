//! The fused backward pass of cards without Hopper's instructions: which problems it takes, and its launches.
//!
//! Four kernels, as on Hopper: bounds of k and v; preprocessing of each query; dk, dv and dq in fixed point (mma.sync);
//! dq converted to bf16. Other problems take two kernels that compute the scores twice: see `instances.rs`.

use super::fixed_point::{ROWS, Scratch, padded_rows};
use super::hopper::HopperArgs;
use super::hopper_scheduler::Scheduling;
use super::problem::{AttentionProblem, blocks};
use super::tile_table::TableArg;
use crate::cuda::{CudaKernels, Kernel, LaunchConfig};
use ferrotron_tensor::{DType, Launch, Result};

/// Views that the kernels access in 16 bytes: bits of `vectorized`.
const VIEWS: u32 = 0xff;

/// `FUSED(name, channels, queries, pairs, stages, ..)` of backward_fused.cu.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fused {
    channels: usize,
    kernel: Kernel,
    /// Queries of a tile.
    queries: usize,
    /// Pairs of warps, of 32 keys each.
    pairs: usize,
    /// Buffers of dout.
    stages: usize,
    /// Key tiles that are scheduled together, at least: enough to keep all blocks busy to the end, few enough that the
    /// queries and dq of their heads stay in the L2 cache.
    together: usize,
    /// Per-query kernels: bounds, preprocess, convert_dq.
    rows: [&'static str; 3],
}

macro_rules! fused {
    ($channels:literal, $queries:literal, $pairs:literal, $stages:literal, $together:literal) => {
        Fused {
            channels: $channels,
            kernel: Kernel::new(
                "attention/backward_fused",
                concat!("attention_backward_fused_", $channels, "_bf16"),
            ),
            queries: $queries,
            pairs: $pairs,
            stages: $stages,
            together: $together,
            rows: [
                concat!("attention_hopper_bounds_", $channels, "_bf16"),
                concat!("attention_hopper_preprocess_", $channels, "_bf16"),
                concat!("attention_hopper_convert_dq_", $channels, "_bf16"),
            ],
        }
    };
}

/// Narrowest heads first.
const INSTANCES: [Fused; 2] = [fused!(64, 64, 2, 2, 1024), fused!(128, 64, 2, 1, 256)];

/// The kernel for a problem, if one supports it, provided that its views turn out to be aligned.
pub(super) fn fused(problem: &AttentionProblem, dtype: DType) -> Option<Fused> {
    let shape = &problem.shape;
    let fits = dtype == DType::BF16
        && shape.softcap.is_none()
        && shape.d_qk.is_multiple_of(8)
        && shape.d_v.is_multiple_of(8)
        && shape.heads > 0
        && problem.args.batches > 0
        && problem.tokens.iter().all(|n| *n > 0);
    let width = shape.d_qk.max(shape.d_v);
    INSTANCES.into_iter().find(|i| fits && width <= i.channels)
}

impl Fused {
    /// Whether the kernels can access the views.
    pub(super) fn fits(&self, problem: &AttentionProblem) -> bool {
        problem.args.vectorized & VIEWS == VIEWS
    }

    /// Keys of a tile, and queries of a block of the per-query kernels; and how both are scheduled.
    pub(super) fn tiles(&self, problem: &AttentionProblem) -> [(usize, Scheduling); 2] {
        let pairs = problem.pairs(problem.shape.kv_heads);
        [
            (self.keys(), Scheduling::Sections { pairs, least: self.together }),
            (ROWS, Scheduling::Blocks(problem.pairs(problem.shape.heads))),
        ]
    }

    const fn keys(&self) -> usize {
        self.pairs * 32
    }

    /// `BYTES` of backward_fused.cu.
    const fn shared(&self) -> u32 {
        let tiles = (2 * self.keys() + (2 + self.stages) * self.queries) * self.channels * 2;
        (128 + tiles + 2 * self.keys() * self.queries * 2 + 3 * self.queries * 12) as u32
    }

    fn space(&self, problem: &AttentionProblem) -> Scratch {
        let sums = problem.pairs(problem.shape.heads) * padded_rows(problem) * self.channels;
        Scratch::new(problem, sums)
    }

    /// Scratch space, in f32.
    pub(super) fn scratch(&self, problem: &AttentionProblem) -> usize {
        self.space(problem).words()
    }

    /// Launches the kernels; `scratch` is the argument with the scratch space, `keys` and `queries` those with the tile
    /// tables.
    pub(super) fn backward(
        &self,
        kernels: &CudaKernels,
        problem: &AttentionProblem,
        l: &Launch,
        scratch: usize,
        [keys, queries]: [TableArg; 2],
    ) -> Result<()> {
        let a = &problem.args;
        let (start, space) = (l.address(scratch)?, self.space(problem));
        let [key_tiling, row_tiling] = self.tiles(problem);
        let (m, row_tiles) = HopperArgs::over(problem, l, a.q_len, row_tiling, queries)?;
        let by_row = space.set(m, start);
        let (m, key_tiles) = HopperArgs::over(problem, l, a.k_len, key_tiling, keys)?;
        let by_key = space.set(m, start);
        let pairs = problem.pairs(problem.shape.kv_heads);

        let rows = |name| Kernel::new("attention/hopper_backward_preprocess", name);
        let each = |n: usize| Ok(LaunchConfig { blocks: [blocks(n)?, 1, 1], threads: 256, shared: 0 });
        let [bounds, preprocess, convert_dq] = self.rows.map(rows);
        kernels.launch_kernel(l, bounds, each(pairs * by_key.chunks as usize)?, &by_key)?;
        kernels.launch_kernel(l, preprocess, each(row_tiles)?, &by_row)?;
        let grid = LaunchConfig {
            blocks: [blocks(key_tiles)?, 1, 1],
            threads: self.pairs as u32 * 64,
            shared: self.shared(),
        };
        kernels.launch_kernel(l, self.kernel, grid, &by_key)?;
        kernels.launch_kernel(l, convert_dq, each(row_tiles)?, &by_row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_match_their_source_and_fit_the_shared_memory_of_every_card() {
        let source = include_str!("backward_fused.cu");
        let rows = include_str!("hopper_backward_preprocess.cu");
        for i in INSTANCES {
            let Fused { channels, queries, pairs, stages, .. } = i;
            let name = i.kernel.name.trim_end_matches("_bf16");
            let line = format!("\nFUSED({name}, {channels}, {queries}, {pairs}, {stages}, ");
            assert!(source.contains(&line), "{line}");
            assert!(i.shared() <= 99 << 10, "{name}: {} bytes", i.shared());
            for kernel in i.rows {
                assert!(rows.contains(&format!("({kernel}, ")), "{kernel}");
            }
        }
    }
}
