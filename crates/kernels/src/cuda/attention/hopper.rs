//! Attention on Hopper cards: what the kernels built on its own instructions can do, and how they are launched.
//!
//! Backward: bounds of keys and values, then numbers of each query, then one kernel for dk, dv and the sums of dq in
//! fixed point, then dq. Where there are enough heads, a block has all keys of one and needs neither bounds nor sums.

use super::job::{Args, Job, blocks};
use crate::cuda::tensor_map::{TensorMap, tensor_map};
use crate::cuda::{CudaKernels, Grid, Kernel};
use ferrotron_tensor::{DType, Launch, Result, Tensor};

/// Multiprocessors of the cards these kernels are for. Blocks stay and take one tile after another; the number is the
/// same on every card, so that nothing depends on it.
const BLOCKS: usize = 132;
/// Bytes that the L2 cache keeps for sure.
const CACHE: usize = 48 << 20;
/// Rows of the tiles of packed sequences, of key tiles, and of what is done for each query.
const ROWS: usize = 128;
/// Average number of keys below which tiles are so short that two blocks share a multiprocessor.
const SHORT: usize = 800;
/// Views that a forward or a backward pass reads or writes in 16-byte pieces: bits of `wide`.
const FORWARD_VIEWS: u32 = 0x0f;
const BACKWARD_VIEWS: u32 = 0xff;

/// The kernels of a backward pass in their order, for heads of up to 64 and 128 channels.
const NAMES: [[&str; 4]; 2] = [
    [
        "attention_hopper_bounds_64_bf16",
        "attention_hopper_prepare_64_bf16",
        "attention_hopper_backward_64_bf16",
        "attention_hopper_finish_64_bf16",
    ],
    [
        "attention_hopper_bounds_128_bf16",
        "attention_hopper_prepare_128_bf16",
        "attention_hopper_backward_128_bf16",
        "attention_hopper_finish_128_bf16",
    ],
];
/// The second and third where a block has all keys of a head.
const OWN_NAMES: [&str; 2] =
    ["attention_hopper_prepare_own_64_bf16", "attention_hopper_backward_own_64_bf16"];

/// `Mapped` of hopper_common.cuh.
#[repr(C, align(64))]
#[derive(Clone, Copy, Default)]
struct Mapped {
    /// q, k, v, dout.
    maps: [TensorMap; 4],
    args: Args,
    sums: u64,
    bounds: u64,
    next: u64,
    total: i32,
    section: i32,
    pairs: i32,
    padded: i32,
    chunks: i32,
    k_from: i32,
    k_to: i32,
    spare: [i32; 11],
}

// The source says the same.
const _: () = assert!(size_of::<Mapped>() == 1024);

/// An instance for heads of up to `width` channels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hopper {
    width: usize,
    /// A block has all keys of a head.
    own: bool,
    /// Rows of a head in the scratch space.
    padded: usize,
    chunks: usize,
}

/// Where the parts of the scratch space start, and how many 4-byte numbers it has.
struct Space {
    rows: usize,
    bounds: usize,
    next: usize,
    all: usize,
}

/// The kernels for a job, if they can do it once its views turn out to be aligned.
pub(super) fn hopper(kernels: &CudaKernels, job: &Job, dtype: DType) -> Option<Hopper> {
    let (shape, a) = (&job.shape, &job.args);
    let width = if shape.d_qk.max(shape.d_v) <= 64 { 64 } else { 128 };
    let instance = job.instance;
    let fits = dtype == DType::BF16
        && shape.d_qk.max(shape.d_v) <= width
        && shape.d_qk.is_multiple_of(8)
        && shape.d_v.is_multiple_of(8)
        && shape.softcap.is_none()
        && shape.scale > 0.0
        && shape.heads > 0
        && a.batches > 0
        && job.tokens.iter().all(|n| *n > 0)
        && [instance.forward, instance.keys, instance.queries].iter().all(|s| s.rows == ROWS)
        && kernels.has("attention_hopper_forward");
    if !fits {
        return None;
    }
    let tokens = job.tokens[0];
    let (pairs, group) = (job.pairs(shape.kv_heads), shape.heads / shape.kv_heads);
    // Packed sequences each start on a tile of their own.
    let padded = if job.packed { tokens / ROWS + job.spans.len() + 1 } else { tokens.div_ceil(ROWS) } * ROWS;
    let own = !job.packed
        && width == 64
        // The blocks are all busy to the end, nearly; what they keep stays in the cache.
        && pairs.div_ceil(BLOCKS) * BLOCKS * 10 <= pairs * 11
        && BLOCKS.min(pairs) * group * padded * width * 4 <= CACHE
        // All queries see some key.
        && (a.bottom == 0 || a.k_len >= a.q_len)
        && (shape.window.0.is_none() || a.k_len >= a.q_len);
    let chunks = (job.inside[1][1] - job.inside[1][0]).div_ceil(ROWS);
    Some(Hopper { width, own, padded, chunks })
}

impl Hopper {
    /// Can these kernels read and write the views?
    pub(super) fn forward_fits(&self, job: &Job) -> bool {
        job.args.wide & FORWARD_VIEWS == FORWARD_VIEWS
    }

    /// The same for the backward pass.
    pub(super) fn backward_fits(&self, job: &Job) -> bool {
        job.args.wide & BACKWARD_VIEWS == BACKWARD_VIEWS
    }

    /// A map of view `at` for tiles of `rows` tokens.
    fn map(&self, job: &Job, at: usize, rows: usize) -> Result<TensorMap> {
        let shape = &job.shape;
        let keys = at == 1 || at == 2;
        let channels = if at < 2 { shape.d_qk } else { shape.d_v };
        let heads = if keys { shape.kv_heads } else { shape.heads };
        let (address, [batch, token, head]) = job.args.view(at);
        let sizes = [channels, job.tokens[usize::from(keys)], heads, job.args.batches as usize];
        tensor_map(address, sizes, [token, head, batch], rows as u32)
    }

    /// Arguments for tiles of `rows` queries or keys of `heads`, and how many tiles there are.
    fn tiles(
        &self,
        job: &Job,
        l: &Launch,
        heads: usize,
        (len, rows): (i32, usize),
        items: Option<(usize, &Tensor)>,
    ) -> Result<(Mapped, usize)> {
        let mut m = Mapped { args: job.args, ..Mapped::default() };
        let pairs = job.pairs(heads);
        let total = match items {
            _ if job.packed => job.table(l, items, &mut m.args)? * heads,
            _ => {
                m.args.tiles = (len as usize).div_ceil(rows) as i32;
                m.args.tiles as usize * pairs
            }
        };
        (m.total, m.pairs, m.section) = (blocks(total)? as i32, pairs as i32, pairs as i32);
        m.padded = self.padded as i32;
        m.chunks = self.chunks as i32;
        [m.k_from, m.k_to] = job.inside[1].map(|x| x as i32);
        Ok((m, total))
    }

    /// Queues the forward kernel; `items` is the argument with the table of query tiles.
    pub(super) fn forward(
        &self,
        kernels: &CudaKernels,
        job: &Job,
        l: &Launch,
        items: Option<(usize, &Tensor)>,
    ) -> Result<()> {
        let (shape, a) = (&job.shape, &job.args);
        // [warpgroups, keys of a tile, tiles in shared memory]: as in hopper_forward.cu.
        let (name, [groups, keys, stages]) = if self.width == 128 {
            ("attention_hopper_forward_128_bf16", [2, 128, 2])
        } else if job.packed || job.reach() < SHORT {
            ("attention_hopper_forward_short_64_bf16", [4, 64, 4])
        } else {
            ("attention_hopper_forward_64_bf16", [3, 128, 3])
        };
        let rows = groups * 64;
        let (mut m, total) = self.tiles(job, l, shape.heads, (a.q_len, rows), items)?;
        m.maps = [self.map(job, 0, rows)?, self.map(job, 1, keys)?, self.map(job, 2, keys)?, m.maps[3]];
        m.section =
            section(job.pairs(shape.heads), shape.heads / shape.kv_heads, job.tokens[1] * self.width * 4)
                as i32;
        let grid = Grid {
            blocks: [total.min(BLOCKS) as u32, 1, 1],
            threads: (groups * 128 + 128) as u32,
            shared: (1024 + (2 * rows + 2 * stages * keys) * self.width * 2) as u32,
        };
        kernels.queue(l, Kernel { source: "attention_hopper_forward", name }, grid, &m)
    }

    fn space(&self, job: &Job) -> Space {
        let (pairs, heads) = (job.pairs(job.shape.kv_heads), job.pairs(job.shape.heads));
        let sums =
            if self.own { BLOCKS.min(pairs) * heads / pairs } else { heads } * self.padded * self.width;
        let bounds = sums + heads * self.padded * 3;
        let next = bounds + (pairs * self.chunks * 2).next_multiple_of(4);
        Space { rows: sums, bounds, next, all: next + 4 }
    }

    /// How many f32 of scratch space the backward pass needs.
    pub(super) fn scratch(&self, job: &Job) -> usize {
        self.space(job).all
    }

    /// Queues the backward kernels; `scratch` is the argument with the scratch space, `keys` and `queries` those with
    /// the tables of tiles.
    pub(super) fn backward(
        &self,
        kernels: &CudaKernels,
        job: &Job,
        l: &Launch,
        scratch: usize,
        [keys, queries]: [Option<(usize, &Tensor)>; 2],
    ) -> Result<()> {
        let (shape, a) = (&job.shape, &job.args);
        let (start, space) = (l.address(scratch)?, self.space(job));
        let named = |m: Mapped| {
            let at = |n: usize| start + n as u64 * 4;
            let mut m = Mapped { sums: start, bounds: at(space.bounds), next: at(space.next), ..m };
            m.args.weights = at(space.rows);
            m
        };
        let (m, row_tiles) = self.tiles(job, l, shape.heads, (a.q_len, ROWS), queries)?;
        let by_row = named(m);
        let (m, key_tiles) = self.tiles(job, l, shape.kv_heads, (a.k_len, ROWS), keys)?;
        let mut by_key = named(m);
        let tile = 8192 / self.width;
        by_key.maps = [
            self.map(job, 0, tile)?,
            self.map(job, 1, ROWS)?,
            self.map(job, 2, ROWS)?,
            self.map(job, 4, tile)?,
        ];
        let pairs = job.pairs(shape.kv_heads);
        // Blocks that run at the same time share as many queries as can be.
        by_key.section = BLOCKS.div_ceil(by_key.args.tiles.max(1) as usize).min(pairs) as i32;

        let rows = |name| Kernel { source: "attention_hopper_rows", name };
        let each = |n: usize| Ok(Grid { blocks: [blocks(n)?, 1, 1], threads: 256, shared: 0 });
        let [bounds, mut prepare, mut backward, finish] = NAMES[usize::from(self.width == 128)];
        if self.own {
            [prepare, backward] = OWN_NAMES;
        }
        if !self.own {
            kernels.queue(l, rows(bounds), each(pairs * self.chunks)?, &by_key)?;
        }
        kernels.queue(l, rows(prepare), each(row_tiles)?, &by_row)?;
        let kernel = Kernel { source: "attention_hopper_backward", name: backward };
        let grid = Grid {
            blocks: [BLOCKS.min(if self.own { pairs } else { key_tiles }) as u32, 1, 1],
            threads: 384,
            shared: backward_shared(self.width),
        };
        kernels.queue(l, kernel, grid, &by_key)?;
        if !self.own {
            kernels.queue(l, rows(finish), each(row_tiles)?, &by_row)?;
        }
        Ok(())
    }
}

/// `BYTES` of hopper_backward.cu.
fn backward_shared(width: usize) -> u32 {
    let (rows, stages) = (8192 / width, 3);
    let head = (256 + 3 * stages * rows * 4).next_multiple_of(1024);
    (head + 2 * ROWS * width * 2 + 2 * stages * rows * width * 2 + 2 * ROWS * rows * 2) as u32
}

/// How many (batch, head) pairs take their turns together, where `group` of them share `bytes` of keys and values:
/// all if these fit into the cache, or else as many as do and split the pairs, or the blocks, evenly.
fn section(pairs: usize, group: usize, bytes: usize) -> usize {
    let most = (CACHE / bytes.max(1)).max(1) * group;
    if most >= pairs {
        pairs
    } else if most >= BLOCKS {
        most / BLOCKS * BLOCKS
    } else {
        (1..=most / group).rev().map(|n| n * group).find(|n| pairs.is_multiple_of(*n)).unwrap_or(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_fit_the_cache_and_split_the_work() {
        // All keys fit; the blocks set the size; 2 of 8 key heads at a time.
        assert_eq!(section(128, 4, 4096 * 64 * 4), 128);
        assert_eq!(section(768, 1, 1024 * 64 * 4), 132);
        assert_eq!(section(32, 4, 32768 * 128 * 4), 8);
        assert_eq!(section(3, 1, 1 << 30), 1);
    }

    #[test]
    fn shared_memory_of_a_block_is_within_the_cards_limit() {
        for width in [64, 128] {
            assert!(backward_shared(width) <= 227 << 10);
        }
    }
}
