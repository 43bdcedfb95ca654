//! Counter-based random numbers: Philox4x32-10 (Salmon et al., 2011). Value `i` of a stream depends only on the stream and
//! `i`, so that every parallel layout draws the same values.

use crate::RngKey;
use crate::normal::pair;

/// Philox4x32-10 of one counter.
#[inline(always)]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k, mut l]) = (counter, key);
    for _ in 0..10 {
        let (p, q) = (u64::from(a) * 0xd251_1f53, u64::from(c) * 0xcd9e_8d57);
        (a, b, c, d) = ((q >> 32) as u32 ^ b ^ k, q as u32, (p >> 32) as u32 ^ d ^ l, p as u32);
        (k, l) = (k.wrapping_add(0x9e37_79b9), l.wrapping_add(0xbb67_ae85));
    }
    [a, b, c, d]
}

/// Domain separation between initial values, dropout masks and random routing of one seed.
const DOMAIN_INIT: u32 = 0x696e_6974;
pub(crate) const DOMAIN_DROPOUT: u32 = 0x6472_6f70;
pub(crate) const DOMAIN_ROUTING: u32 = 0x726f_7574;

/// A stream of random words: words `4i..4i+4` are Philox of the counter `(i, lane)` under `key`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomStream {
    /// Philox key.
    pub key: [u32; 2],
    /// Upper half of the counter.
    pub lane: [u32; 2],
}

fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

impl RandomStream {
    /// Stream of the initial values of parameter `name`.
    pub fn named(seed: u64, name: &str) -> RandomStream {
        let mut state = [halves(name.len() as u64), [DOMAIN_INIT, 0]];
        let mut key = halves(seed);
        for block in name.as_bytes().chunks(8).chain([&[][..]]) {
            let mut bytes = [0u8; 8];
            bytes[..block.len()].copy_from_slice(block);
            let word = halves(u64::from_le_bytes(bytes));
            let counter = [state[0][0] ^ word[0], state[0][1] ^ word[1], state[1][0], state[1][1]];
            let [a, b, c, d] = philox4x32(counter, key);
            (key, state) = ([a, b], [[c, d], state[0]]);
        }
        RandomStream { key, lane: state[0] }
    }

    /// Stream of one dropout mask.
    pub fn dropout(key: RngKey) -> RandomStream {
        RandomStream::of_step(key, DOMAIN_DROPOUT)
    }

    /// Stream of one router's random logits.
    pub fn routing(key: RngKey) -> RandomStream {
        RandomStream::of_step(key, DOMAIN_ROUTING)
    }

    fn of_step(key: RngKey, domain: u32) -> RandomStream {
        let [step, step_high] = halves(key.step);
        let [a, b, c, d] = philox4x32([step, step_high, key.layer, key.site], halves(key.seed));
        let [a, b, c, d] = philox4x32([c, d, domain, 0], [a, b]);
        RandomStream { key: [a, b], lane: [c, d] }
    }

    /// Words `4·block..4·block + 4`.
    #[inline(always)]
    pub fn block(&self, block: u64) -> [u32; 4] {
        philox4x32([block as u32, (block >> 32) as u32, self.lane[0], self.lane[1]], self.key)
    }

    /// Word `index`.
    pub fn word(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// Uniform in `[0, 1)`: a multiple of 2⁻²⁴.
    pub fn uniform(&self, index: u64) -> f32 {
        (self.word(index) >> 8) as f32 / 16_777_216.0
    }

    /// Standard normal value, by the Box-Muller transform of the word pair that contains `index`; the same bits on every device.
    pub fn normal(&self, index: u64) -> f64 {
        normals(self.block(index / 4))[(index % 4) as usize]
    }
}

/// Four normal values from four words.
#[inline(always)]
pub fn normals([a, b, c, d]: [u32; 4]) -> [f64; 4] {
    let ([p, q], [r, s]) = (pair(a, b), pair(c, d));
    [p, q, r, s]
}
