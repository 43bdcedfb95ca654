//! Tile scheduling of the Hopper attention kernels: which heads are processed together.

/// Multiprocessors (SMs) of an H100 SXM or H200. What decides the order of a sum is planned for as many, so that results
/// do not depend on the GPU; persistent blocks are as many as the GPU has.
pub(super) const USUAL_BLOCKS: usize = 132;
/// Bytes that the L2 cache holds reliably.
pub(super) const CACHE: usize = 48 << 20;
/// Bytes of keys and values that stay in L2 while queries and outputs stream through: with 44 MiB a forward pass was
/// 15 % slower than with 32.
const KV_CACHE: usize = 34 << 20;

/// How many (batch, head) pairs of `tiles` tiles are scheduled together, where `group` of them share `bytes` of keys
/// and values: all if these fit into L2, otherwise as many as do and fill the last wave of `blocks` best.
pub(super) fn section(pairs: usize, group: usize, tiles: usize, bytes: usize, blocks: usize) -> usize {
    let most = (KV_CACHE / bytes.max(1)).max(1) * group;
    if most >= pairs {
        return pairs;
    }
    if most >= blocks {
        return most / blocks * blocks;
    }
    // Idle slots of the sections' last waves, in thousandths of all tiles.
    let idle = |n: usize| {
        let of = |n: usize| (n * tiles).next_multiple_of(blocks) - n * tiles;
        (of(n) * (pairs / n) + of(pairs % n)) * 1000 / (pairs * tiles).max(1)
    };
    let (mut best, mut least) = (group, idle(group));
    for n in (2..=most / group).map(|n| n * group) {
        if idle(n) <= least + 5 {
            (best, least) = (n, least.min(idle(n)));
        }
    }
    best
}

/// The same for tiles of keys, whose blocks share queries: at least two waves, in sections of equal size, so that no
/// long tiles are left for the end.
pub(super) fn shared_section(pairs: usize, tiles: usize) -> usize {
    let least = USUAL_BLOCKS.div_ceil(tiles.max(1)).min(pairs).max(1);
    let most = (pairs / (2 * least)).max(1);
    // What the last section lacks, in thousandths of one.
    let lacks = |part: usize| (pairs.next_multiple_of(part) - pairs) * 1000 / part;
    let mut parts = (most.div_ceil(2)..=most).rev().map(|n| pairs.div_ceil(n).max(1));
    let best = parts.clone().min_by_key(|part| lacks(*part)).unwrap_or(1);
    // The smallest that is good enough: what they share stays in L2.
    parts.find(|part| lacks(*part) <= 250).unwrap_or(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_fit_l2_and_fill_waves() {
        // All keys fit; the blocks set the size; 2 of 8 key heads at a time; one where none fits.
        assert_eq!(section(128, 4, 32, 4096 * 64 * 4, 132), 128);
        assert_eq!(section(768, 1, 4, 1024 * 64 * 4, 132), 132);
        assert_eq!(section(32, 4, 256, 32768 * 128 * 4, 132), 8);
        assert_eq!(section(3, 1, 7, 1 << 30, 132), 1);
        // 66 pairs of 6 tiles are three waves.
        assert_eq!(section(512, 1, 6, 1024 * 128 * 4, 132), 66);
        // An H20 has fewer multiprocessors, an H100 PCIe others: 39 pairs of 6 tiles are three waves of 78, 57 of 114.
        assert_eq!(section(512, 1, 6, 1024 * 128 * 4, 78) * 6 % 78, 0);
        assert_eq!(section(512, 1, 6, 1024 * 128 * 4, 114) * 6 % 114, 0);
    }

    #[test]
    fn sections_of_keys_have_equal_size() {
        for pairs in 1..200 {
            for tiles in [1, 7, 12, 64, 300] {
                let part = shared_section(pairs, tiles);
                let last = (pairs - 1) % part + 1;
                let alike = last * 2 > part || pairs > 6 * part;
                assert!(part <= pairs && alike, "{pairs} {tiles}: {part}, {last}");
            }
        }
        assert_eq!(shared_section(24, 12), 24);
        assert_eq!(shared_section(256, 8), 37);
    }
}
