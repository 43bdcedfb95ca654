//! Instances of the mma.sync and generic attention kernels, as listed in their sources, and their launch parameters.

use crate::cuda::Kernel;
use ferrotron_tensor::{DType, Error, Result, shape_error};

/// Launch parameters of one kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) kernel: Kernel,
    /// Queries (keys, for their gradients) of a block.
    pub(super) rows: usize,
    /// Blocks that share the channels of the same rows.
    pub(super) parts: usize,
    pub(super) threads: u32,
    /// Dynamic shared memory in bytes.
    pub(super) shared: u32,
}

/// The kernels for one pair of head sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instance {
    pub(super) forward: Step,
    pub(super) keys: Step,
    pub(super) queries: Step,
}

/// Channels of a head at most.
const MAX_CHANNELS: usize = 256;
/// Bytes before the tiles in shared memory, as in common.cuh.
const TILE_INFO: usize = 128;

/// What a tensor-core instance keeps in shared memory.
struct Tiles {
    /// Rows of a warp, in tiles of 16; blocks that share the channels of the same rows.
    warps: usize,
    tiles: usize,
    parts: usize,
    /// Channels of the rows that stay resident, and of those that are streamed through two buffers.
    resident: usize,
    channels: usize,
    /// Rows of a streamed tile, and bytes that each of its buffers holds besides.
    streamed: usize,
    extra: usize,
}

impl Tiles {
    const fn step(&self, kernel: Kernel) -> Step {
        let rows = self.warps * self.tiles * 16;
        let buffers = 2 * (self.streamed * self.channels * 2 + self.extra);
        let shared = (TILE_INFO + rows * self.resident * 2 + buffers) as u32;
        Step { kernel, rows, parts: self.parts, threads: self.warps as u32 * 32, shared }
    }
}

/// `FORWARD(name, d_qk, d_v, tiles, streamed, warps, ..)` of forward.cu.
const fn forward(kernel: Kernel, d: [usize; 2], [tiles, streamed, warps]: [usize; 3]) -> Step {
    let (resident, channels) = (d[0], d[0] + d[1]);
    Tiles { warps, tiles, parts: 1, resident, channels, streamed, extra: 0 }.step(kernel)
}

/// `KEYS(name, d_qk, d_v, tiles, streamed, warps, parts, ..)` of backward_keys.cu.
const fn keys(kernel: Kernel, d: [usize; 2], [tiles, streamed, warps, parts]: [usize; 4]) -> Step {
    let both = d[0] + d[1];
    Tiles { warps, tiles, parts, resident: both, channels: both, streamed, extra: streamed * 8 }.step(kernel)
}

/// `QUERIES(name, d_qk, d_v, tiles, streamed, warps, ..)` of backward_queries.cu.
const fn queries(kernel: Kernel, d: [usize; 2], [tiles, streamed, warps]: [usize; 3]) -> Step {
    let both = d[0] + d[1];
    Tiles { warps, tiles, parts: 1, resident: both, channels: both, streamed, extra: 0 }.step(kernel)
}

/// `GENERIC_ATTENTION(d, tile)` of generic.cu.
const fn generic(names: [&'static str; 3], d: usize, tile: usize) -> Instance {
    let (rows, block) = (tile * (d + 4) * 4, tile * (tile + 1) * 4);
    let [forward, keys, queries] = names;
    Instance {
        forward: simple(forward, tile, 3 * rows + block),
        keys: simple(keys, tile, 4 * rows + 2 * block),
        queries: simple(queries, tile, 4 * rows + block),
    }
}

const fn simple(name: &'static str, rows: usize, shared: usize) -> Step {
    let kernel = Kernel::new("attention/generic", name);
    Step { kernel, rows, parts: 1, threads: 128, shared: shared as u32 }
}

/// Kernels of a 16-bit dtype, narrowest heads first: `(d_qk, d_v, instance)`.
macro_rules! element_instances {
    ($kernel:path, $suffix:literal) => {
        [
            (
                64,
                64,
                Instance {
                    forward: forward(element!($kernel, "forward", "_64_", $suffix), [64, 64], [2, 128, 4]),
                    keys: keys(element!($kernel, "backward_keys", "_64_", $suffix), [64, 64], [2, 32, 4, 1]),
                    queries: queries(
                        element!($kernel, "backward_queries", "_64_", $suffix),
                        [64, 64],
                        [2, 32, 4],
                    ),
                },
            ),
            (
                128,
                128,
                Instance {
                    forward: forward(element!($kernel, "forward", "_128_", $suffix), [128, 128], [2, 64, 4]),
                    keys: keys(
                        element!($kernel, "backward_keys", "_128_", $suffix),
                        [128, 128],
                        [1, 64, 4, 1],
                    ),
                    queries: queries(
                        element!($kernel, "backward_queries", "_128_", $suffix),
                        [128, 128],
                        [2, 32, 4],
                    ),
                },
            ),
            (
                192,
                128,
                Instance {
                    forward: forward(element!($kernel, "forward", "_192_", $suffix), [192, 128], [2, 32, 4]),
                    keys: keys(
                        element!($kernel, "backward_keys", "_192_", $suffix),
                        [192, 128],
                        [1, 32, 4, 1],
                    ),
                    queries: queries(
                        element!($kernel, "backward_queries", "_192_", $suffix),
                        [192, 128],
                        [1, 32, 4],
                    ),
                },
            ),
            (
                256,
                256,
                Instance {
                    forward: forward(element!($kernel, "forward", "_256_", $suffix), [256, 256], [1, 32, 4]),
                    keys: keys(
                        element!($kernel, "backward_keys", "_256_", $suffix),
                        [256, 256],
                        [1, 16, 4, 2],
                    ),
                    queries: queries(
                        element!($kernel, "backward_queries", "_256_", $suffix),
                        [256, 256],
                        [1, 16, 4],
                    ),
                },
            ),
        ]
    };
}

/// A kernel of `attention/<file>.cu`.
macro_rules! element {
    ($kernel:path, $file:literal, $width:literal, $suffix:literal) => {
        $kernel(concat!("attention/", $file), concat!("attention_", $file, $width, $suffix))
    };
}

type Instances<const N: usize> = [(usize, usize, Instance); N];

const BF16: Instances<4> = element_instances!(Kernel::new, "bf16");
const F16: Instances<4> = element_instances!(Kernel::f16, "f16");

macro_rules! generic_names {
    ($d:literal) => {
        [
            concat!("attention_forward_", $d, "_f32"),
            concat!("attention_backward_keys_", $d, "_f32"),
            concat!("attention_backward_queries_", $d, "_f32"),
        ]
    };
}

/// f32, narrowest heads first.
const F32: Instances<3> = [
    (64, 64, generic(generic_names!("64"), 64, 32)),
    (128, 128, generic(generic_names!("128"), 128, 32)),
    (256, 256, generic(generic_names!("256"), 256, 16)),
];

/// The instance with the fewest channels that holds the heads.
pub(super) fn instance(op: &'static str, dtype: DType, d_qk: usize, d_v: usize) -> Result<Instance> {
    let all: &[(usize, usize, Instance)] = match dtype {
        DType::F32 => &F32,
        DType::BF16 => &BF16,
        DType::F16 => &F16,
        found => return Err(Error::DType { op, found, wanted: DType::BF16 }),
    };
    match all.iter().find(|(q, v, _)| d_qk <= *q && d_v <= *v) {
        Some((.., instance)) => Ok(*instance),
        None => shape_error(
            op,
            format!(
                "heads of {d_qk} (q, k) and {d_v} (v) channels: on CUDA they have at most {MAX_CHANNELS}"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parameters of an instance in a source.
    fn numbers(source: &str, macro_name: &str, kernel: &str) -> Vec<usize> {
        let name = kernel.trim_end_matches("_bf16").trim_end_matches("_f16");
        let start = format!("{macro_name}({name}, ");
        let line = source.lines().find_map(|l| l.strip_prefix(&start)).unwrap();
        line.trim_end_matches(')').split(", ").map(|n| n.parse().unwrap()).collect()
    }

    /// The smallest of the cards that kernels compile for (sm_86, sm_89, sm_120) give a block 99 KiB.
    #[test]
    fn every_instance_fits_the_shared_memory_of_every_card() {
        for (d_qk, d_v, i) in BF16.into_iter().chain(F16).chain(F32) {
            for step in [i.forward, i.keys, i.queries] {
                assert!(
                    step.shared <= 99 << 10,
                    "{} ({d_qk}, {d_v}): {} bytes",
                    step.kernel.name,
                    step.shared
                );
            }
        }
    }

    #[test]
    fn the_instances_match_their_sources() {
        for (d_qk, d_v, i) in BF16.into_iter().chain(F16) {
            let [dq, dv, tiles, streamed, warps, _, _] =
                numbers(include_str!("forward.cu"), "FORWARD", i.forward.kernel.name)[..]
            else {
                panic!("forward {d_qk}")
            };
            assert_eq!((dq, dv, warps * tiles * 16), (d_qk, d_v, i.forward.rows));
            assert_eq!(i.forward.threads as usize, warps * 32);
            let bytes = TILE_INFO + 2 * (i.forward.rows * dq + 2 * streamed * (dq + dv));
            assert_eq!(i.forward.shared as usize, bytes);

            let [dq, dv, tiles, streamed, warps, parts, _] =
                numbers(include_str!("backward_keys.cu"), "KEYS", i.keys.kernel.name)[..]
            else {
                panic!("keys {d_qk}")
            };
            assert_eq!((dq, dv, warps * tiles * 16, parts), (d_qk, d_v, i.keys.rows, i.keys.parts));
            assert_eq!(i.keys.threads as usize, warps * 32);
            let bytes = TILE_INFO + 2 * (i.keys.rows + 2 * streamed) * (dq + dv) + 2 * streamed * 8;
            assert_eq!(i.keys.shared as usize, bytes);

            let [dq, dv, tiles, streamed, warps, _] =
                numbers(include_str!("backward_queries.cu"), "QUERIES", i.queries.kernel.name)[..]
            else {
                panic!("queries {d_qk}")
            };
            assert_eq!((dq, dv, warps * tiles * 16), (d_qk, d_v, i.queries.rows));
            assert_eq!(i.queries.threads as usize, warps * 32);
            assert_eq!(
                i.queries.shared as usize,
                TILE_INFO + 2 * (i.queries.rows + 2 * streamed) * (dq + dv)
            );
        }
        for (d, _, i) in F32 {
            assert!(
                include_str!("generic.cu").contains(&format!("GENERIC_ATTENTION({d}, {})", i.forward.rows))
            );
        }
    }
}
