//! Casts between f32, bf16 and f16 in little-endian bytes: exact when widening, round to nearest even otherwise.

use ferrotron_tensor::{DType, Float, bf16, f16};

/// True for the dtypes that weights are read and written in.
pub(crate) const fn is_castable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Writes the elements of `from` to `to`, which has room for exactly as many. Both types must be is_castable.
pub(crate) fn cast(from: &[u8], from_type: DType, to: &mut [u8], to_type: DType) {
    use DType::{BF16, F16, F32};
    let read_bf16 = |b| Float::to_f32(bf16::from_le_bytes(b));
    let read_f16 = |b| Float::to_f32(f16::from_le_bytes(b));
    let write_bf16 = |x| <bf16 as Float>::from_f32(x).to_le_bytes();
    let write_f16 = |x| <f16 as Float>::from_f32(x).to_le_bytes();
    match (from_type, to_type) {
        (F32, BF16) => each(from, to, |b| write_bf16(f32::from_le_bytes(b))),
        (F32, F16) => each(from, to, |b| write_f16(f32::from_le_bytes(b))),
        (BF16, F32) => each(from, to, |b| read_bf16(b).to_le_bytes()),
        (F16, F32) => each(from, to, |b| read_f16(b).to_le_bytes()),
        (BF16, F16) => each(from, to, |b| write_f16(read_bf16(b))),
        (F16, BF16) => each(from, to, |b| write_bf16(read_f16(b))),
        _ => {
            let n = from.len().min(to.len());
            to[..n].copy_from_slice(&from[..n]);
        }
    }
}

fn each<const A: usize, const B: usize>(from: &[u8], to: &mut [u8], f: impl Fn([u8; A]) -> [u8; B]) {
    for (a, b) in from.as_chunks::<A>().0.iter().zip(to.as_chunks_mut::<B>().0) {
        *b = f(*a);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bf16 and f16 value through f32 and back, and half-way values against their exact neighbours.
    #[test]
    fn casts_are_exact_up_and_to_nearest_even_down() {
        let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for narrow in [DType::BF16, DType::F16] {
            let mut wide = vec![0; halves.len() * 2];
            cast(&halves, narrow, &mut wide, DType::F32);
            let mut back = vec![0; halves.len()];
            cast(&wide, DType::F32, &mut back, narrow);
            let value = |bits: u16| match narrow {
                DType::BF16 => bf16::from_bits(bits).to_f64(),
                _ => f16::from_bits(bits).to_f64(),
            };
            for i in 0..=u16::MAX {
                let at = usize::from(i);
                let x = f32::from_le_bytes(wide[4 * at..4 * at + 4].try_into().unwrap());
                let bits = u16::from_le_bytes(back[2 * at..2 * at + 2].try_into().unwrap());
                if value(i).is_nan() {
                    assert!(x.is_nan() && value(bits).is_nan());
                    continue;
                }
                assert_eq!(f64::from(x), value(i));
                assert_eq!(bits, i);
                // Half-way to the next one up rounds to the even of the two.
                let next = value(i.wrapping_add(1));
                if i & 0x7fff < 0x7c00 && next.is_finite() {
                    let half_way = ((value(i) + next) / 2.0) as f32;
                    let mut rounded = [0; 2];
                    cast(&half_way.to_le_bytes(), DType::F32, &mut rounded, narrow);
                    let even = if i % 2 == 0 { i } else { i + 1 };
                    assert_eq!(value(u16::from_le_bytes(rounded)), value(even), "{half_way}");
                }
            }
        }
    }
}
