//! In which order the Hopper kernels' blocks take their tiles: which heads take their turns together.

/// Multiprocessors of the cards these kernels are for. Blocks stay and take one tile after another; the number is the
/// same on every card, so that nothing depends on it.
pub(super) const BLOCKS: usize = 132;
/// Bytes that the L2 cache keeps for sure.
pub(super) const CACHE: usize = 48 << 20;
/// How many (batch, head) pairs of `tiles` tiles take their turns together, where `group` of them share `bytes` of keys
/// and values: all if these fit into the cache, or else as many as do and fill the last round of the blocks best.
pub(super) fn section(pairs: usize, group: usize, tiles: usize, bytes: usize) -> usize {
    let most = (CACHE / bytes.max(1)).max(1) * group;
    if most >= pairs {
        return pairs;
    }
    if most >= BLOCKS {
        return most / BLOCKS * BLOCKS;
    }
    // Idle places of the last round, in thousandths of all.
    let idle = |n: usize| {
        let all = (n * tiles).next_multiple_of(BLOCKS).max(1);
        (all - n * tiles) * 1000 / all
    };
    let (mut best, mut least) = (group, idle(group));
    for n in (2..=most / group).map(|n| n * group) {
        if idle(n) <= least + 5 {
            (best, least) = (n, least.min(idle(n)));
        }
    }
    best
}

/// The same for keys, whose blocks share queries: about two rounds of the blocks, all of a size, so that no long tiles
/// are left for the end.
pub(super) fn shared_section(pairs: usize, tiles: usize) -> usize {
    let least = BLOCKS.div_ceil(tiles.max(1)).min(pairs).max(1);
    pairs.div_ceil((pairs / (2 * least)).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_fit_the_cache_and_fill_the_blocks() {
        // All keys fit; the blocks set the size; 2 of 8 key heads at a time; one where none fits.
        assert_eq!(section(128, 4, 32, 4096 * 64 * 4), 128);
        assert_eq!(section(768, 1, 4, 1024 * 64 * 4), 132);
        assert_eq!(section(32, 4, 256, 32768 * 128 * 4), 8);
        assert_eq!(section(3, 1, 7, 1 << 30), 1);
        // 66 pairs of 8 tiles are four rounds.
        assert_eq!(section(512, 1, 8, 1024 * 128 * 4), 66);
    }

    #[test]
    fn sections_of_keys_are_alike_and_end_together() {
        for pairs in 1..200 {
            for tiles in [1, 7, 12, 64, 300] {
                let part = shared_section(pairs, tiles);
                let last = (pairs - 1) % part + 1;
                assert!(part <= pairs && (pairs < 40 || last * 3 >= part), "{pairs} {tiles}: {part}, {last}");
            }
        }
        assert_eq!(shared_section(24, 12), 24);
        assert_eq!(shared_section(256, 8), 37);
    }
}
