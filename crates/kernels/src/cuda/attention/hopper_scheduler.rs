//! Tile scheduling of the attention kernels: which heads are processed together.

use super::problem::blocks;
use super::tile_table::TileSchedule;
use ferrotron_tensor::Result;

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

/// How many (batch, key head) pairs of `tiles` tiles are scheduled together, in sections of nearly equal size that have at
/// least so many tiles.
fn even_section(pairs: usize, tiles: usize, least: usize) -> usize {
    let sections = (pairs / least.div_ceil(tiles.max(1))).max(1);
    pairs.div_ceil(sections).max(1)
}

/// How a kernel's blocks share the tiles of all (batch, head) pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Scheduling {
    /// So many blocks to a tile.
    Blocks(usize),
    /// Persistent `blocks` take tiles of queries in waves: see [`section`], whose arguments these are.
    Waves { pairs: usize, group: usize, bytes: usize, blocks: usize },
    /// Tiles of keys, each of a cluster of so many blocks: see [`shared_section`].
    Keys { pairs: usize, cluster: usize },
    /// A block to a tile of keys, in sections of so many tiles at least.
    Sections { pairs: usize, least: usize },
}

impl Scheduling {
    /// Blocks, or (batch, head) pairs, to a tile.
    pub(super) fn pairs(self) -> usize {
        match self {
            Scheduling::Blocks(pairs)
            | Scheduling::Waves { pairs, .. }
            | Scheduling::Keys { pairs, .. }
            | Scheduling::Sections { pairs, .. } => pairs,
        }
    }

    /// The schedule of so many tiles of every pair.
    pub(super) fn schedule(self, tiles: usize) -> Result<TileSchedule> {
        let pairs = self.pairs();
        let (section, mut section_tiles, mut total) = match self {
            Scheduling::Blocks(_) => (pairs, pairs * tiles, pairs * tiles),
            Scheduling::Waves { group, bytes, blocks, .. } => {
                let part = section(pairs, group, tiles, bytes, blocks);
                (part, part * tiles, pairs * tiles)
            }
            Scheduling::Keys { cluster, .. } => {
                let part = shared_section(pairs, tiles.max(1) * cluster);
                (part, part * tiles.max(1), pairs * tiles)
            }
            Scheduling::Sections { least, .. } => {
                let part = even_section(pairs, tiles, least);
                (part, part * tiles.max(1), pairs * tiles)
            }
        };
        if let Scheduling::Waves { blocks, .. } = self
            && section < pairs
        {
            // Every section starts with a full wave of blocks.
            section_tiles = section_tiles.next_multiple_of(blocks);
            total = pairs.div_ceil(section) * section_tiles;
        }
        let [tiles, total, section, section_tiles] = [tiles, total, section, section_tiles].map(blocks);
        Ok(TileSchedule {
            tiles: tiles? as i32,
            total: total? as i32,
            section: section? as i32,
            section_tiles: section_tiles? as i32,
            pad: [0; 4],
        })
    }
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

    #[test]
    fn even_sections_have_enough_tiles_and_equal_size() {
        assert_eq!(
            [even_section(8, 128, 256), even_section(16, 64, 256), even_section(32, 64, 1024)],
            [2, 4, 16]
        );
        // One section where there are few tiles; 5 and 4 of 9 pairs.
        assert_eq!(
            [even_section(3, 7, 256), even_section(9, 64, 256), even_section(1, 4096, 256)],
            [3, 5, 1]
        );
    }

    #[test]
    fn schedules_number_the_tiles_of_all_pairs() {
        let of = |s: Scheduling, tiles| {
            let TileSchedule { tiles, total, section, section_tiles, .. } = s.schedule(tiles).unwrap();
            [tiles, total, section, section_tiles]
        };
        assert_eq!(of(Scheduling::Blocks(6), 7), [7, 42, 6, 42]);
        assert_eq!(of(Scheduling::Blocks(6), 0), [0, 0, 6, 0]);
        // All keys fit; two of eight key heads at a time, in full waves.
        let waves = |bytes| Scheduling::Waves { pairs: 32, group: 4, bytes, blocks: 132 };
        assert_eq!(of(waves(1 << 10), 256), [256, 32 * 256, 32, 32 * 256]);
        assert_eq!(of(waves(32768 * 128 * 4), 256), [256, 4 * 2112, 8, 2112]);
        assert_eq!(of(Scheduling::Keys { pairs: 256, cluster: 1 }, 8), [8, 2048, 37, 296]);
        assert_eq!(of(Scheduling::Keys { pairs: 256, cluster: 2 }, 4), [4, 1024, 37, 148]);
        assert_eq!(of(Scheduling::Sections { pairs: 9, least: 256 }, 64), [64, 576, 5, 320]);
        assert!(Scheduling::Blocks(1 << 20).schedule(1 << 20).is_err());
    }
}
