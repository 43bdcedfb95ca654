//! The order of an epoch, computed for one sample at a time: no list of it is held in memory.

use ferrotron_kernels::philox::philox4x32;

/// Domain separation from other draws of the same seed.
const DOMAIN: u32 = 0x6570_6f63;
/// More than the four that make a Feistel network a pseudorandom permutation, because few samples have few bits to mix.
const ROUNDS: u32 = 8;

/// The sample at position `index` of an epoch of `count` samples: a permutation of `0..count` for every seed and epoch.
///
/// A Feistel network permutes the numbers below the next power of four; one that lands outside of `0..count` is permuted
/// again until it is inside, at most four times on average.
pub(super) fn shuffled(index: u64, count: u32, seed: u32, epoch: u64) -> u64 {
    let count = u64::from(count);
    let half = (u64::BITS - count.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1 << half) - 1;
    let mut x = index;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..ROUNDS {
            let counter = [right as u32, round, epoch as u32, (epoch >> 32) as u32];
            let [word, ..] = philox4x32(counter, [seed, DOMAIN]);
            (left, right) = (right, left ^ (u64::from(word) & mask));
        }
        x = left << half | right;
        if x < count {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_is_another_permutation() {
        for count in (1..70).chain([100, 255, 256, 257, 1000, 4096, 10_007]) {
            let order = |seed, epoch| -> Vec<u64> {
                (0..u64::from(count)).map(|i| shuffled(i, count, seed, epoch)).collect()
            };
            let orders = [order(1234, 1), order(1234, 2), order(1235, 1), order(1234, 1 << 32)];
            for order in &orders {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert!(sorted.into_iter().eq(0..u64::from(count)), "{count}: {order:?}");
            }
            if count > 20 {
                assert!(orders.iter().enumerate().all(|(i, a)| !orders[..i].contains(a)), "{count}");
                // Few samples stay where they were, and few neighbours stay neighbours.
                let [first, ..] = &orders;
                let fixed = first.iter().zip(0..).filter(|(a, b)| *a == b).count();
                let neighbours = first.windows(2).filter(|w| w[1] == w[0] + 1).count();
                assert!(fixed < 8 && neighbours < 8, "{count}: {fixed}, {neighbours}");
            }
        }
    }

    #[test]
    fn the_largest_counts_stay_inside() {
        for count in [u32::MAX, u32::MAX - 1, 1 << 31, (1 << 31) + 1] {
            for index in [0, 1, u64::from(count) - 1] {
                assert!(shuffled(index, count, 7, 3) < u64::from(count));
            }
        }
    }
}
