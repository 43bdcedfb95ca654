//! Attention on Hopper: which problems the TMA and WGMMA kernels take, and their launches.
//!
//! The backward pass is four kernels: bounds of k and v; preprocessing of each query; dk, dv and dq in fixed point; dq
//! converted to bf16. With enough heads, a block has all keys of one head and needs neither bounds nor fixed point.

use super::fixed_point::{ROWS, Scratch, key_chunks, padded_rows};
use super::hopper_scheduler::{CACHE, Scheduling, USUAL_BLOCKS};
use super::hopper_variants::{Forward, KernelVariant, PER_HEAD_KERNELS, variant};
use super::problem::{AttentionArgs, AttentionProblem, blocks};
use super::tile_table::{TableArg, VisibleKeys, mean_visible_keys};
use crate::cuda::args::kernel_args;
use crate::cuda::tensor_map::{TensorMap, tensor_map};
use crate::cuda::{CudaKernels, Kernel, LaunchConfig};
use ferrotron_tensor::{DType, Launch, Result};

/// Views that the forward and the backward pass access in 16 bytes: bits of `vectorized`.
const FORWARD_VIEWS: u32 = 0x0f;
const BACKWARD_VIEWS: u32 = 0xff;

kernel_args! {
    header "args/attention_hopper.cuh", includes ["args/attention.cuh", "args/tensor_map.cuh"];

    /// Arguments of the Hopper attention kernels.
    #[derive(Default)]
    pub(super) struct HopperArgs align(64) {
        /// TMA boxes [64 channels, tile's tokens, 1, 1] of (channel, token, head, batch). FP8: 128 channels wide, and v's box
        /// is of (token, channel, head, batch).
        pub(super) q: TensorMap,
        pub(super) k: TensorMap,
        pub(super) v: TensorMap,
        pub(super) dout: TensorMap,
        pub(super) a: AttentionArgs,
        /// i32 `[batch, heads, padded, channels]`: dq in fixed point, tile by tile in the accumulators' register order.
        pub(super) dq_accum: u64,
        /// f32 `[batch, kv heads, chunks, 2]`: largest |k| and largest |v|² of 128 tokens. FP8 forward: f32 `[3]`, amax of q, k, v.
        pub(super) bounds: u64,
        /// i32: tiles that blocks of the backward kernel have taken so far.
        pub(super) next_tile: u64,
        /// As in `TileSchedule`; that of packed sequences is in their table.
        total: i32,
        section: i32,
        /// All (batch, head) pairs.
        pairs: i32,
        /// Rows of a head in `dq_accum`, and in `lse_log2`, which here holds 64 rows of it, then 64 deltas, then 64 steps: the
        /// inverse, a power of two, of what a one in `dq_accum` stands for.
        pub(super) padded: i32,
        /// Chunks of 128 tokens in `bounds`.
        pub(super) chunks: i32,
        /// Key tokens `k_from..k_to` belong to a sequence.
        k_from: i32,
        k_to: i32,
        /// As in `TileSchedule`.
        section_tiles: i32,
        pad: [i32; 10],
    }
}

impl HopperArgs {
    /// Arguments for tiles of so many queries or keys of sequences of `len`, and how many tiles there are at most.
    pub(super) fn over(
        problem: &AttentionProblem,
        l: &Launch,
        len: i32,
        (rows, scheduling): (usize, Scheduling),
        table: TableArg,
    ) -> Result<(HopperArgs, usize)> {
        let mut m = HopperArgs { a: problem.args, ..HopperArgs::default() };
        let tiles = if problem.packed {
            problem.set_table(l, table, &mut m.a)?
        } else {
            (len as usize).div_ceil(rows)
        };
        let s = scheduling.schedule(tiles)?;
        (m.a.tiles, m.total, m.section, m.section_tiles) = (s.tiles, s.total, s.section, s.section_tiles);
        m.pairs = scheduling.pairs() as i32;
        [m.k_from, m.k_to] = problem.inside[1].map(|x| x as i32);
        Ok((m, tiles * scheduling.pairs()))
    }
}

/// The kernels for a problem.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hopper {
    variant: &'static KernelVariant,
    /// A block has all keys of a head.
    per_head: bool,
    /// Rows of a head in scratch space.
    padded: usize,
    chunks: usize,
    /// Persistent blocks: multiprocessors of the GPU.
    blocks: usize,
}

/// The kernels for a problem, if they support it, provided that its views turn out to be aligned.
pub(super) fn hopper(kernels: &CudaKernels, problem: &AttentionProblem, dtype: DType) -> Option<Hopper> {
    let (shape, a) = (&problem.shape, &problem.args);
    let variant = variant(shape.d_qk, shape.d_v, shape.softcap.is_some())?;
    let fits = dtype == DType::BF16
        && shape.d_qk.is_multiple_of(8)
        && shape.d_v.is_multiple_of(8)
        && shape.scale > 0.0
        && shape.heads > 0
        && a.batches > 0
        && problem.tokens.iter().all(|n| *n > 0)
        && kernels.has("attention/hopper_forward");
    if !fits {
        return None;
    }
    let (pairs, group) = (problem.pairs(shape.kv_heads), shape.heads / shape.kv_heads);
    let padded = padded_rows(problem);
    let per_head = !problem.packed
        && variant.width == 64
        // Blocks are nearly all busy to the end, and their scratch fits into the L2 cache.
        && pairs.div_ceil(USUAL_BLOCKS) * USUAL_BLOCKS * 10 <= pairs * 11
        && USUAL_BLOCKS.min(pairs) * group * padded * variant.width * 4 <= CACHE
        // Every query sees some key.
        && (a.bottom == 0 || a.k_len >= a.q_len)
        && (shape.window.0.is_none() || a.k_len >= a.q_len);
    let chunks = key_chunks(problem);
    let blocks = kernels.multiprocessors().max(1) as usize;
    Some(Hopper { variant, per_head, padded, chunks, blocks })
}

/// Whether at most 2 % of the rows of a forward kernel's tiles are past the end of the sequence. Taken for granted of
/// packed sequences, on which the choice was not measured.
fn fills(problem: &AttentionProblem, forward: &Forward) -> bool {
    let rows = problem.args.q_len as usize;
    problem.packed || rows.next_multiple_of(forward.rows()) * 50 <= rows * 51
}

impl Hopper {
    /// Whether the forward kernel can access the views.
    pub(super) fn forward_fits(&self, problem: &AttentionProblem) -> bool {
        problem.args.vectorized & FORWARD_VIEWS == FORWARD_VIEWS
    }

    /// Whether the backward kernels can.
    pub(super) fn backward_fits(&self, problem: &AttentionProblem) -> bool {
        problem.args.vectorized & BACKWARD_VIEWS == BACKWARD_VIEWS
    }

    /// TMA map of view `at` for tiles of `rows` tokens.
    fn map(&self, problem: &AttentionProblem, at: usize, rows: usize) -> Result<TensorMap> {
        let shape = &problem.shape;
        let keys = at == 1 || at == 2;
        let channels = if at < 2 { shape.d_qk } else { shape.d_v };
        let heads = if keys { shape.kv_heads } else { shape.heads };
        let (address, [batch, token, head]) = problem.args.view(at);
        let sizes = [channels, problem.tokens[usize::from(keys)], heads, problem.args.batches as usize];
        tensor_map(address, sizes, [token, head, batch], rows as u32)
    }

    /// The forward kernels to launch, each with the sequences it is for: the one that suits the sequences, or both where these
    /// are filled in later.
    pub(super) fn forwards(&self, problem: &AttentionProblem) -> Vec<(Forward, Option<VisibleKeys>)> {
        let Some((below, short)) = self.variant.short else { return vec![(self.variant.forward, None)] };
        let limit = below[usize::from(!fills(problem, &short))];
        if problem.captured.is_some() {
            let only = |fewer| Some(VisibleKeys { limit, fewer });
            return vec![(self.variant.forward, only(false)), (short, only(true))];
        }
        let fewer = mean_visible_keys(&problem.spans, problem.args.left, problem.args.right) < limit;
        vec![(if fewer { short } else { self.variant.forward }, None)]
    }

    /// Queries of a forward tile, and how tiles are scheduled.
    pub(super) fn forward_tiles(&self, problem: &AttentionProblem, f: &Forward) -> (usize, Scheduling) {
        let shape = &problem.shape;
        let scheduling = Scheduling::Waves {
            pairs: problem.pairs(shape.heads),
            group: shape.heads / shape.kv_heads,
            bytes: problem.tokens[1] * (shape.d_qk + shape.d_v) * 2,
            blocks: self.blocks,
        };
        (f.rows(), scheduling)
    }

    /// Keys of a backward tile, and queries of a block of the per-query kernels; and how both are scheduled.
    pub(super) fn backward_tiles(&self, problem: &AttentionProblem) -> [(usize, Scheduling); 2] {
        let (backward, pairs) = (&self.variant.backward, problem.pairs(problem.shape.kv_heads));
        [
            (backward.keys, Scheduling::Keys { pairs, cluster: backward.cluster }),
            (ROWS, Scheduling::Blocks(problem.pairs(problem.shape.heads))),
        ]
    }

    /// Launches a forward kernel.
    pub(super) fn forward(
        &self,
        kernels: &CudaKernels,
        problem: &AttentionProblem,
        l: &Launch,
        f: &Forward,
        table: TableArg,
    ) -> Result<()> {
        let tiling = self.forward_tiles(problem, f);
        let (mut m, total) = HopperArgs::over(problem, l, problem.args.q_len, tiling, table)?;
        (m.q, m.k, m.v) =
            (self.map(problem, 0, f.rows())?, self.map(problem, 1, f.keys)?, self.map(problem, 2, f.keys)?);
        let grid = LaunchConfig {
            blocks: [total.min(self.blocks) as u32, 1, 1],
            threads: f.threads(),
            shared: f.shared(),
        };
        let kernel = if problem.shape.fp8 { f.kernel.with_fp8_probs() } else { f.kernel };
        kernels.launch_kernel(l, kernel, grid, &m)
    }

    fn space(&self, problem: &AttentionProblem) -> Scratch {
        let (pairs, heads) = (problem.pairs(problem.shape.kv_heads), problem.pairs(problem.shape.heads));
        let sums = if self.per_head { self.blocks.min(pairs) * heads / pairs } else { heads }
            * self.padded
            * self.variant.width;
        Scratch::new(problem, sums)
    }

    /// Scratch space of the backward pass, in f32.
    pub(super) fn scratch(&self, problem: &AttentionProblem) -> usize {
        self.space(problem).words()
    }

    /// Launches the backward kernels; `scratch` is the argument with the scratch space, `keys` and `queries` those
    /// with the tile tables.
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
        let named = |m: HopperArgs| space.set(m, start);
        let [key_tiling, row_tiling] = self.backward_tiles(problem);
        let (m, row_tiles) = HopperArgs::over(problem, l, a.q_len, row_tiling, queries)?;
        let by_row = named(m);
        let variant = &self.variant.backward;
        let (m, key_tiles) = HopperArgs::over(problem, l, a.k_len, key_tiling, keys)?;
        let mut by_key = named(m);
        let [query_box, key_box] = variant.boxes();
        by_key.q = self.map(problem, 0, query_box)?;
        by_key.k = self.map(problem, 1, key_box)?;
        by_key.v = self.map(problem, 2, key_box)?;
        by_key.dout = self.map(problem, 4, query_box)?;
        let pairs = problem.pairs(problem.shape.kv_heads);

        let rows = |name| Kernel::new("attention/hopper_backward_preprocess", name);
        let each = |n: usize| Ok(LaunchConfig { blocks: [blocks(n)?, 1, 1], threads: 256, shared: 0 });
        let ([bounds, mut preprocess, convert_dq], mut kernel) = (self.variant.rows, variant.kernel);
        if self.per_head {
            [preprocess, kernel.name] = PER_HEAD_KERNELS;
        }
        if !self.per_head {
            kernels.launch_kernel(l, rows(bounds), each(pairs * self.chunks)?, &by_key)?;
        }
        kernels.launch_kernel(l, rows(preprocess), each(row_tiles)?, &by_row)?;
        let tasks = if self.per_head { pairs } else { key_tiles };
        // Without any key dq is zero, and the counter of tiles was not set.
        if tasks > 0 {
            let clusters = (self.blocks / variant.cluster).clamp(1, tasks);
            let grid = LaunchConfig {
                blocks: [(clusters * variant.cluster) as u32, 1, 1],
                threads: variant.threads(),
                shared: if self.per_head { variant.shared_per_head() } else { variant.shared() },
            };
            kernels.launch_kernel(l, kernel, grid, &by_key)?;
        }
        if !self.per_head {
            kernels.launch_kernel(l, rows(convert_dq), each(row_tiles)?, &by_row)?;
        }
        Ok(())
    }
}
