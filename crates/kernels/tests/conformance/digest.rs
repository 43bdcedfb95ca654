//! Digests of tensors: every device gives the bits of the definition, and every change of bits is seen.

use super::devices::*;
use ferrotron_kernels::digest_of_bytes;
use ferrotron_tensor::{Category, DType};

/// The definition, word by word in 128-bit arithmetic.
fn oracle(bytes: &[u8]) -> u64 {
    const MODULUS: u128 = 1 << 64;
    let product = |a: u128, b: u128| (a * b) % MODULUS;
    let mix = |x: u128| {
        let x = product(x ^ (x >> 30), 0xbf58_476d_1ce4_e5b9);
        let x = product(x ^ (x >> 27), 0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let mut sum = mix(bytes.len() as u128);
    for i in 0..bytes.len().div_ceil(8) {
        let byte = |b: usize| u128::from(*bytes.get(8 * i + b).unwrap_or(&0));
        let word: u128 = (0..8).map(|b| byte(b) << (8 * b)).sum();
        sum += mix((word + product(i as u128 + 1, 0x9e37_79b9_7f4a_7c15)) % MODULUS);
    }
    (sum % MODULUS) as u64
}

fn bytes_of(n: usize, seed: u64) -> Vec<u8> {
    numbers(DType::F32, seed, n).iter().map(|x| (x * 1e6) as i64 as u8).collect()
}

/// The digest of part `start..end` of a buffer of bytes on a device.
fn on(h: &TestDevice, bytes: &[u8], start: usize, end: usize) -> u64 {
    let whole = h.s.upload(bytes, &[bytes.len()], Category::Workspace).unwrap();
    let slots = h.s.upload(&[-1i64; 3], &[3], Category::Workspace).unwrap();
    let out = slots.narrow(0, 1, 1).unwrap();
    h.k.digest(&h.s, &whole.narrow(0, start, end - start).unwrap(), &out).unwrap();
    let slots = h.s.download::<i64>(&slots).unwrap();
    assert_eq!((slots[0], slots[2]), (-1, -1), "{}: written outside its slot", h.name);
    slots[1] as u64
}

#[test]
fn digests_are_the_same_on_every_device() {
    for h in devices() {
        // Sizes around words, pairs of words, the piece of a CPU thread and the grid of a GPU; aligned or not.
        for n in [0, 1, 7, 8, 9, 15, 16, 17, 4096, 4099, (1 << 18) - 1, (1 << 18) + 13, 1_000_003, 40 << 20] {
            let bytes = bytes_of(n, 3);
            let starts: &[usize] = if n > 10_000_000 { &[0] } else { &[0, 1, 5, 8, 16] };
            for start in starts.iter().filter(|s| **s <= n) {
                let found = on(&h, &bytes, *start, n);
                assert_eq!(found, oracle(&bytes[*start..]), "{}: {n} bytes from {start}", h.name);
                assert_eq!(found, digest_of_bytes(&bytes[*start..]));
            }
        }
    }
}

#[test]
fn digests_take_any_dtype_and_see_every_bit_and_position() {
    for h in devices() {
        let n = 40;
        let bytes = bytes_of(n, 5);
        let whole = on(&h, &bytes, 0, n);
        for dtype in [DType::F32, DType::BF16, DType::I64, DType::E4M3] {
            let t = h.s.upload(&bytes, &[n], Category::Workspace).unwrap().with_dtype(dtype).unwrap();
            let out = h.s.upload(&[0i64], &[1], Category::Workspace).unwrap();
            h.k.digest(&h.s, &t, &out).unwrap();
            assert_eq!(h.s.download::<i64>(&out).unwrap()[0] as u64, whole, "{} {dtype}", h.name);
        }
        for bit in 0..8 * n {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(on(&h, &other, 0, n), whole, "{}: bit {bit}", h.name);
        }
        let mut swapped = bytes.clone();
        swapped.rotate_left(8);
        assert_ne!(on(&h, &swapped, 0, n), whole, "{}: words in another order", h.name);
        assert_ne!(on(&h, &[0; 16], 0, 16), on(&h, &[0; 16], 0, 8), "{}: trailing zeros", h.name);
    }
}

#[test]
fn digests_refuse_what_they_cannot_read() {
    for h in devices() {
        let out = h.s.upload(&[0i64, 0], &[2], Category::Workspace).unwrap();
        let x = h.tensor(DType::F32, &[4, 4], &[1.0; 16]);
        refused(&h, "an output of two elements", h.k.digest(&h.s, &x, &out));
        let one = out.narrow(0, 0, 1).unwrap();
        refused(&h, "columns", h.k.digest(&h.s, &x.narrow(1, 0, 2).unwrap(), &one));
        let float = h.tensor(DType::F32, &[1], &[0.0]);
        refused(&h, "an output of f32", h.k.digest(&h.s, &x, &float));
    }
}
