//! Instances of the Hopper attention kernels, as listed in their sources.

use crate::cuda::Kernel;

/// `HOPPER_FORWARD(name, channels.., warpgroups, keys, key stages, query stages, ..)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forward {
    pub(super) kernel: Kernel,
    /// Channels of queries and keys, and of values.
    channels: [usize; 2],
    /// Consumer warpgroups, of 64 queries each.
    groups: usize,
    /// Keys of a tile.
    pub(super) keys: usize,
    /// Stages of keys, and of values.
    stages: usize,
    /// Stages of queries.
    tiles: usize,
}

/// `HOPPER_BACKWARD(name, channels, queries, ..)`, `HOPPER_BACKWARD_WIDE(name, channels.., query stages, ..)`, or the
/// kernel of hopper_backward_pair.cu.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backward {
    pub(super) kernel: Kernel,
    channels: [usize; 2],
    /// Queries and keys of a tile.
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Stages of queries.
    stages: usize,
    /// Bytes of a hand-off buffer between warpgroups.
    passed: usize,
    /// Blocks of a cluster, which share the keys of a tile and load each its part of the queries.
    pub(super) cluster: usize,
    /// Consumer warpgroups.
    groups: usize,
}

/// The kernels for heads of up to so many channels.
#[derive(Clone, Copy, Debug)]
pub(super) struct KernelVariant {
    /// Channels of queries and keys, and of values.
    channels: [usize; 2],
    capped: bool,
    /// Channels of dq in scratch space.
    pub(super) width: usize,
    pub(super) forward: Forward,
    /// Faster where a query sees fewer keys than this on average: where the sequence fills its tiles, and where it does not.
    pub(super) short: Option<([usize; 2], Forward)>,
    pub(super) backward: Backward,
    /// Per-query kernels: bounds, preprocess, convert_dq.
    pub(super) rows: [&'static str; 3],
}

/// Bytes of a row in shared memory: columns of 64 channels, two bytes each.
const fn row_bytes(channels: [usize; 2]) -> usize {
    (channels[0].div_ceil(64) + channels[1].div_ceil(64)) * 128
}

impl Forward {
    /// Queries of a tile.
    pub(super) const fn rows(&self) -> usize {
        self.groups * 64
    }

    pub(super) const fn threads(&self) -> u32 {
        (self.groups * 128 + 128) as u32
    }

    /// `BYTES` of hopper_forward_load.cuh.
    pub(super) const fn shared(&self) -> u32 {
        let queries = self.tiles * self.rows() * self.channels[0].div_ceil(64) * 128;
        (1024 + queries + self.stages * self.keys * row_bytes(self.channels)) as u32
    }
}

impl Backward {
    pub(super) const fn threads(&self) -> u32 {
        (self.groups * 128 + 128) as u32
    }

    /// `BYTES` of hopper_backward_load.cuh, or of hopper_backward_pair_load.cuh.
    pub(super) const fn shared(&self) -> u32 {
        let head = (304 + 3 * self.stages * self.queries * 4).next_multiple_of(1024);
        let tiles = (self.keys / self.cluster + self.stages * self.queries) * row_bytes(self.channels);
        // Two columns of 64 channels of the other block's keys.
        let other = (self.cluster - 1) * self.keys / self.cluster * 256;
        (head + tiles + other + 2 * self.keys * self.queries * 2 + 2 * self.passed) as u32
    }

    /// The same with two stages of keys, for the kernel whose blocks have all keys of a head.
    pub(super) const fn shared_per_head(&self) -> u32 {
        self.shared() + (self.keys * self.channels[0] * 2) as u32
    }

    /// Queries and keys of a TMA box.
    pub(super) const fn boxes(&self) -> [usize; 2] {
        [self.queries / self.cluster, self.keys / self.cluster]
    }
}

const fn forward(
    wide_heads: bool,
    name: &'static str,
    channels: [usize; 2],
    [groups, keys, stages, tiles]: [usize; 4],
) -> Forward {
    let source = if wide_heads { "attention/hopper_forward_wide" } else { "attention/hopper_forward" };
    Forward { kernel: Kernel::new(source, name), channels, groups, keys, stages, tiles }
}

const fn backward(name: &'static str, channels: usize, queries: usize) -> Backward {
    let kernel = Kernel::new("attention/hopper_backward", name);
    Backward {
        kernel,
        channels: [channels; 2],
        queries,
        keys: 128,
        stages: 3,
        passed: 0,
        cluster: 1,
        groups: 2,
    }
}

const fn backward_wide(name: &'static str, channels: [usize; 2], stages: usize) -> Backward {
    let kernel = Kernel::new("attention/hopper_backward_wide", name);
    Backward { kernel, channels, queries: 64, keys: 64, stages, passed: 8192, cluster: 1, groups: 2 }
}

const fn backward_pair(name: &'static str, channels: [usize; 2]) -> Backward {
    let kernel = Kernel::new("attention/hopper_backward_pair", name);
    Backward { kernel, channels, queries: 64, keys: 128, stages: 3, passed: 8192, cluster: 2, groups: 3 }
}

macro_rules! rows {
    ($bounds:literal, $width:literal) => {
        [
            concat!("attention_hopper_bounds_", $bounds, "_bf16"),
            concat!("attention_hopper_preprocess_", $width, "_bf16"),
            concat!("attention_hopper_convert_dq_", $width, "_bf16"),
        ]
    };
}

/// Narrowest heads first.
const VARIANTS: [KernelVariant; 7] = [
    KernelVariant {
        channels: [64; 2],
        capped: false,
        width: 64,
        forward: forward(false, "attention_hopper_forward_64_bf16", [64; 2], [3, 128, 3, 2]),
        short: Some((
            [800; 2],
            forward(false, "attention_hopper_forward_short_64_bf16", [64; 2], [4, 64, 4, 2]),
        )),
        backward: backward("attention_hopper_backward_64_bf16", 64, 128),
        rows: rows!(64, 64),
    },
    KernelVariant {
        channels: [96; 2],
        capped: false,
        width: 128,
        forward: forward(false, "attention_hopper_forward_96_bf16", [96; 2], [3, 96, 3, 1]),
        short: None,
        backward: backward("attention_hopper_backward_96_bf16", 96, 64),
        rows: rows!(128, 128),
    },
    KernelVariant {
        channels: [128; 2],
        capped: false,
        width: 128,
        forward: forward(false, "attention_hopper_forward_128_bf16", [128; 2], [2, 128, 2, 2]),
        short: Some((
            [1100, 400],
            forward(false, "attention_hopper_forward_short_128_bf16", [128; 2], [3, 64, 3, 1]),
        )),
        backward: backward("attention_hopper_backward_128_bf16", 128, 64),
        rows: rows!(128, 128),
    },
    KernelVariant {
        channels: [192, 128],
        capped: false,
        width: 192,
        forward: forward(true, "attention_hopper_forward_192_bf16", [192, 128], [2, 128, 2, 1]),
        short: None,
        backward: backward_pair("attention_hopper_backward_192_bf16", [192, 128]),
        rows: rows!(256, 192),
    },
    KernelVariant {
        channels: [256; 2],
        capped: false,
        width: 256,
        forward: forward(true, "attention_hopper_forward_256_bf16", [256; 2], [2, 64, 2, 1]),
        short: None,
        backward: backward_wide("attention_hopper_backward_256_bf16", [256; 2], 2),
        rows: rows!(256, 256),
    },
    KernelVariant {
        channels: [128; 2],
        capped: true,
        width: 128,
        forward: forward(true, "attention_hopper_forward_capped_128_bf16", [128; 2], [2, 128, 2, 2]),
        short: None,
        backward: backward_wide("attention_hopper_backward_capped_128_bf16", [128; 2], 3),
        rows: rows!(128, 128),
    },
    KernelVariant {
        channels: [256; 2],
        capped: true,
        width: 256,
        forward: forward(true, "attention_hopper_forward_capped_256_bf16", [256; 2], [2, 64, 2, 1]),
        short: None,
        backward: backward_wide("attention_hopper_backward_capped_256_bf16", [256; 2], 2),
        rows: rows!(256, 256),
    },
];

/// Where a block has all keys of a head: preprocess, and backward, otherwise as the first variant.
pub(super) const PER_HEAD_KERNELS: [&str; 2] =
    ["attention_hopper_preprocess_per_head_64_bf16", "attention_hopper_backward_per_head_64_bf16"];

/// The variant with the fewest channels that holds the heads.
pub(super) fn variant(d_qk: usize, d_v: usize, capped: bool) -> Option<&'static KernelVariant> {
    VARIANTS.iter().find(|k| k.capped == capped && d_qk <= k.channels[0] && d_v <= k.channels[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parameters of an instance in a source.
    fn listed<'a>(source: &'a str, macro_name: &str, kernel: &Kernel) -> Vec<&'a str> {
        let start = format!("{macro_name}({}, ", kernel.name);
        let line = source.lines().find_map(|l| l.strip_prefix(&start)).unwrap();
        line.trim_end_matches(')').split(", ").collect()
    }

    fn words(numbers: &[usize], flag: bool) -> Vec<String> {
        numbers.iter().map(ToString::to_string).chain([flag.to_string()]).collect()
    }

    #[test]
    fn the_variants_match_their_sources() {
        for variant in &VARIANTS {
            for f in [Some(variant.forward), variant.short.map(|s| s.1)].into_iter().flatten() {
                let source = match f.kernel.source {
                    "attention/hopper_forward" => include_str!("hopper_forward.cu"),
                    _ => include_str!("hopper_forward_wide.cu"),
                };
                let [d_qk, d_v] = f.channels;
                let numbers = [d_qk, d_v, f.groups, f.keys, f.stages, f.tiles];
                assert_eq!(listed(source, "HOPPER_FORWARD", &f.kernel), words(&numbers, variant.capped));
                assert!(f.shared() <= 227 << 10);
            }
            let b = variant.backward;
            assert_eq!(b.channels, variant.channels);
            if b.cluster == 2 {
                let source = include_str!("hopper_backward_pair.cu");
                assert!(source.contains(&format!(" {}(", b.kernel.name)) && source.contains("PairLoad<3>"));
                assert!(source.contains(&format!("__launch_bounds__({}, 1)", b.threads())));
                assert_eq!((b.channels, b.stages, b.shared()), ([192, 128], 3, 227 << 10));
            } else if b.passed == 0 {
                let all = listed(include_str!("hopper_backward.cu"), "HOPPER_BACKWARD", &b.kernel);
                assert_eq!(all[..2], words(&[b.channels[0], b.queries], false)[..2]);
            } else {
                let all = listed(include_str!("hopper_backward_wide.cu"), "HOPPER_BACKWARD_WIDE", &b.kernel);
                assert_eq!(all, words(&[b.channels[0], b.channels[1], b.stages], variant.capped));
            }
            assert!(b.shared() <= 227 << 10);
            for name in variant.rows {
                assert!(
                    include_str!("hopper_backward_preprocess.cu").contains(&format!("({name}, ")),
                    "{name}"
                );
            }
        }
        assert!(
            include_str!("hopper_backward_preprocess.cu").contains(&format!("({}, ", PER_HEAD_KERNELS[0]))
        );
        assert!(include_str!("hopper_backward.cu").contains(&format!("({}, 64, 128, ", PER_HEAD_KERNELS[1])));
        assert!(VARIANTS[0].width == 64 && VARIANTS[0].backward.shared_per_head() <= 227 << 10);
    }

    #[test]
    fn the_variant_with_the_fewest_channels_is_chosen() {
        let width = |d_qk, d_v, capped| variant(d_qk, d_v, capped).map(|k| (k.channels, k.capped));
        assert_eq!(width(64, 64, false), Some(([64; 2], false)));
        assert_eq!(width(96, 72, false), Some(([96; 2], false)));
        assert_eq!(width(192, 128, false), Some(([192, 128], false)));
        assert_eq!(width(128, 192, false), Some(([256; 2], false)));
        assert_eq!(width(64, 64, true), Some(([128; 2], true)));
        assert_eq!(width(192, 128, true), Some(([256; 2], true)));
        assert_eq!(width(264, 64, false), None);
    }
}
