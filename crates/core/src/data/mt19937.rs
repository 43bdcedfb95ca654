//! The Mersenne Twister of numpy's `RandomState` and torch's CPU generator, with their shuffles.

const N: usize = 624;
const M: usize = 397;

/// MT19937 with 32-bit outputs.
#[derive(Clone, Debug)]
pub struct Mt19937 {
    key: [u32; N],
    next: usize,
}

impl Mt19937 {
    /// Seeds the state as both libraries do.
    pub fn new(seed: u32) -> Self {
        let mut key = [0u32; N];
        let mut last = seed;
        for (i, k) in key.iter_mut().enumerate() {
            if i > 0 {
                last = (last ^ (last >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
            }
            *k = last;
        }
        Self { key, next: N }
    }

    fn refill(&mut self) {
        for i in 0..N {
            let y = (self.key[i] & 0x8000_0000) | (self.key[(i + 1) % N] & 0x7fff_ffff);
            let twist = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.key[i] = self.key[(i + M) % N] ^ (y >> 1) ^ twist;
        }
        self.next = 0;
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.next == N {
            self.refill();
        }
        let mut y = self.key[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// A number in `0..=max` by masked rejection sampling (numpy's `random_interval`).
    fn interval(&mut self, max: u64) -> u64 {
        let mask = u64::MAX.checked_shr(max.leading_zeros()).unwrap_or(0);
        loop {
            let mut draw = u64::from(self.next_u32());
            if max > u64::from(u32::MAX) {
                draw = draw << 32 | u64::from(self.next_u32());
            }
            if draw & mask <= max {
                return draw & mask;
            }
        }
    }

    /// `numpy.random.RandomState.shuffle` of a one-dimensional array.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            let j = self.interval(i as u64) as usize;
            values.swap(i, j);
        }
    }

    /// `torch.randperm(n)` for n below 2³² / 20; torch uses another algorithm from there on.
    pub fn torch_randperm(&mut self, n: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n).collect();
        for i in 0..n.saturating_sub(1) {
            let z = self.next_u32() % (n - i);
            order.swap(i as usize, (i + z) as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_thousandth_output_is_the_published_one() {
        // The C++ standard specifies the 10000th output for the default seed 5489.
        let mut g = Mt19937::new(5489);
        let last = (0..10_000).map(|_| g.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn intervals_reach_both_ends_and_no_further() {
        let mut g = Mt19937::new(1);
        for max in [1u64, 2, 5, 7, 8, 1 << 33] {
            let drawn: Vec<u64> = (0..2000).map(|_| g.interval(max)).collect();
            assert!(drawn.iter().all(|&d| d <= max));
            if max < 10 {
                assert!((0..=max).all(|v| drawn.contains(&v)));
            }
        }
    }
}
