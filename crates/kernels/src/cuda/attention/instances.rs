//! Which instance of the attention kernels runs, and what it needs: the mirror of the instances at the end of each
//! source.

use crate::cuda::Kernel;
use crate::cuda::sources::f16_source;
use ferrotron_tensor::{DType, Error, Result, shape_error};

/// One kernel instance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) kernel: Kernel,
    /// Queries (keys, for their gradients) of a block.
    pub(super) rows: usize,
    /// Blocks that share the channels of the same rows.
    pub(super) parts: usize,
    pub(super) threads: u32,
    /// Bytes of shared memory.
    pub(super) shared: u32,
}

/// The instances for one pair of head sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instance {
    pub(super) forward: Step,
    pub(super) keys: Step,
    pub(super) queries: Step,
}

/// The widest head there is an instance for.
const WIDEST: usize = 256;
/// Bytes before the tiles of the tensor-core instances, as in common.cuh.
const PLACE: usize = 128;

/// A tensor-core instance: `resident` rows of `[d_qk, d_v]` (or of `d_qk` alone) stay in shared memory, two tiles of
/// `streamed` rows and `extra` bytes pass through it.
const fn matrix(
    source: &'static str,
    name: &'static str,
    [warps, tiles, parts]: [usize; 3],
    resident: usize,
    streamed: usize,
    both: usize,
    extra: usize,
) -> Step {
    let rows = warps * tiles * 16;
    let shared = PLACE + rows * resident * 2 + 2 * (streamed * both * 2 + extra);
    Step { kernel: Kernel { source, name }, rows, parts, threads: warps as u32 * 32, shared: shared as u32 }
}

/// `FORWARD(name, d_qk, d_v, tiles, streamed, warps, ..)` of forward.cu.
const fn forward(name: &'static str, d: [usize; 2], tiles: usize, streamed: usize, warps: usize) -> Step {
    matrix("attention_forward", name, [warps, tiles, 1], d[0], streamed, d[0] + d[1], 0)
}

/// `KEYS(name, d_qk, d_v, tiles, streamed, warps, parts, ..)` of backward_keys.cu.
const fn keys(
    name: &'static str,
    d: [usize; 2],
    tiles: usize,
    streamed: usize,
    warps: usize,
    parts: usize,
) -> Step {
    let both = d[0] + d[1];
    matrix("attention_backward_keys", name, [warps, tiles, parts], both, streamed, both, streamed * 8)
}

/// `QUERIES(name, d_qk, d_v, tiles, streamed, warps, ..)` of backward_queries.cu.
const fn queries(name: &'static str, d: [usize; 2], tiles: usize, streamed: usize, warps: usize) -> Step {
    let both = d[0] + d[1];
    matrix("attention_backward_queries", name, [warps, tiles, 1], both, streamed, both, 0)
}

/// `PLAIN(d, tile)` of plain.cu.
const fn plain(names: [&'static str; 3], d: usize, tile: usize) -> Instance {
    let (rows, block) = (tile * (d + 4) * 4, tile * (tile + 1) * 4);
    let [forward, keys, queries] = names;
    Instance {
        forward: simple(forward, tile, 3 * rows + block),
        keys: simple(keys, tile, 4 * rows + 2 * block),
        queries: simple(queries, tile, 4 * rows + block),
    }
}

const fn simple(name: &'static str, rows: usize, shared: usize) -> Step {
    let kernel = Kernel { source: "attention_generic", name };
    Step { kernel, rows, parts: 1, threads: 128, shared: shared as u32 }
}

/// bf16, narrowest first: `(d_qk, d_v, instance)`.
const BF16: [(usize, usize, Instance); 4] = [
    (
        64,
        64,
        Instance {
            forward: forward("attention_forward_64_bf16", [64, 64], 2, 128, 4),
            keys: keys("attention_backward_keys_64_bf16", [64, 64], 2, 32, 4, 1),
            queries: queries("attention_backward_queries_64_bf16", [64, 64], 2, 32, 4),
        },
    ),
    (
        128,
        128,
        Instance {
            forward: forward("attention_forward_128_bf16", [128, 128], 2, 64, 4),
            keys: keys("attention_backward_keys_128_bf16", [128, 128], 1, 64, 8, 1),
            queries: queries("attention_backward_queries_128_bf16", [128, 128], 2, 32, 4),
        },
    ),
    (
        192,
        128,
        Instance {
            forward: forward("attention_forward_192_bf16", [192, 128], 2, 32, 4),
            keys: keys("attention_backward_keys_192_bf16", [192, 128], 1, 32, 4, 1),
            queries: queries("attention_backward_queries_192_bf16", [192, 128], 1, 32, 4),
        },
    ),
    (
        256,
        256,
        Instance {
            forward: forward("attention_forward_256_bf16", [256, 256], 1, 32, 4),
            keys: keys("attention_backward_keys_256_bf16", [256, 256], 1, 32, 4, 2),
            queries: queries("attention_backward_queries_256_bf16", [256, 256], 1, 32, 4),
        },
    ),
];

macro_rules! plain_names {
    ($d:literal) => {
        [
            concat!("attention_forward_", $d, "_f32"),
            concat!("attention_backward_keys_", $d, "_f32"),
            concat!("attention_backward_queries_", $d, "_f32"),
        ]
    };
}

/// f32, narrowest first.
const F32: [(usize, usize, Instance); 3] = [
    (64, 64, plain(plain_names!("64"), 64, 32)),
    (128, 128, plain(plain_names!("128"), 128, 32)),
    (256, 256, plain(plain_names!("256"), 256, 16)),
];

/// The narrowest instance that holds the heads.
pub(super) fn instance(op: &'static str, dtype: DType, d_qk: usize, d_v: usize) -> Result<Instance> {
    let all: &[(usize, usize, Instance)] = match dtype {
        DType::F32 => &F32,
        DType::BF16 | DType::F16 => &BF16,
        found => return Err(Error::DType { op, found, wanted: DType::BF16 }),
    };
    match all.iter().find(|(q, v, _)| d_qk <= *q && d_v <= *v) {
        // Those of f16 are the same, of the sources compiled with f16 numbers.
        Some((.., i)) if dtype == DType::F16 => {
            let half =
                |s: Step| Step { kernel: Kernel { source: f16_source(s.kernel.source), ..s.kernel }, ..s };
            Ok(Instance { forward: half(i.forward), keys: half(i.keys), queries: half(i.queries) })
        }
        Some((.., instance)) => Ok(*instance),
        None => shape_error(
            op,
            format!("heads of {d_qk} (q, k) and {d_v} (v) channels: on CUDA they have at most {WIDEST}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers in the brackets after a name.
    fn numbers(source: &str, macro_name: &str, kernel: &str) -> Vec<usize> {
        let start = format!("{macro_name}({kernel}, ");
        let line = source.lines().find_map(|l| l.strip_prefix(&start)).unwrap();
        line.trim_end_matches(')').split(", ").map(|n| n.parse().unwrap()).collect()
    }

    #[test]
    fn the_table_says_what_the_sources_say() {
        for (d_qk, d_v, i) in BF16 {
            let [dq, dv, tiles, streamed, warps, _] =
                numbers(include_str!("forward.cu"), "FORWARD", i.forward.kernel.name)[..]
            else {
                panic!("forward {d_qk}")
            };
            assert_eq!((dq, dv, warps * tiles * 16), (d_qk, d_v, i.forward.rows));
            assert_eq!(i.forward.threads as usize, warps * 32);
            let bytes = PLACE + 2 * (i.forward.rows * dq + 2 * streamed * (dq + dv));
            assert_eq!(i.forward.shared as usize, bytes);

            let [dq, dv, tiles, streamed, warps, parts, _] =
                numbers(include_str!("backward_keys.cu"), "KEYS", i.keys.kernel.name)[..]
            else {
                panic!("keys {d_qk}")
            };
            assert_eq!((dq, dv, warps * tiles * 16, parts), (d_qk, d_v, i.keys.rows, i.keys.parts));
            assert_eq!(i.keys.threads as usize, warps * 32);
            let bytes = PLACE + 2 * (i.keys.rows + 2 * streamed) * (dq + dv) + 2 * streamed * 8;
            assert_eq!(i.keys.shared as usize, bytes);

            let [dq, dv, tiles, streamed, warps, _] =
                numbers(include_str!("backward_queries.cu"), "QUERIES", i.queries.kernel.name)[..]
            else {
                panic!("queries {d_qk}")
            };
            assert_eq!((dq, dv, warps * tiles * 16), (d_qk, d_v, i.queries.rows));
            assert_eq!(i.queries.threads as usize, warps * 32);
            assert_eq!(i.queries.shared as usize, PLACE + 2 * (i.queries.rows + 2 * streamed) * (dq + dv));
        }
        for (d, _, i) in F32 {
            assert!(
                include_str!("generic.cu").contains(&format!("GENERIC_ATTENTION({d}, {})", i.forward.rows))
            );
        }
    }
}
