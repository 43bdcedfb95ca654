//! NaN and infinite weights, which no trained model has: training diverged, or the file is damaged.

use crate::error::{Error, Result};
use ferrotron_tensor::DType;

/// Number of NaN and infinite values among little-endian f32, bf16 or f16 values.
pub(crate) fn count(dtype: DType, bytes: &[u8]) -> u64 {
    // All exponent bits are set.
    let half = |mask: u16| {
        let all = bytes.as_chunks::<2>().0.iter();
        all.map(|b| u64::from(u16::from_le_bytes(*b) & mask == mask)).sum()
    };
    match dtype {
        DType::BF16 => half(0x7f80),
        DType::F16 => half(0x7c00),
        _ => {
            let mask = 0x7f80_0000;
            let all = bytes.as_chunks::<4>().0.iter();
            all.map(|b| u64::from(u32::from_le_bytes(*b) & mask == mask)).sum()
        }
    }
}

/// Fails if a tensor has NaN or infinite values.
pub(crate) fn check(name: &str, dtype: DType, bytes: &[u8]) -> Result<()> {
    match count(dtype, bytes) {
        0 => Ok(()),
        count => {
            let total = (bytes.len() / dtype.size().max(1)) as u64;
            Err(Error::NonFinite { name: name.into(), count, total, dtype })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_infinity_are_counted_and_large_values_are_not() {
        let f32s: Vec<u8> =
            [0.0, -0.0, f32::MAX, f32::MIN_POSITIVE, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN]
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect();
        assert_eq!(count(DType::F32, &f32s), 4);
        let halves = |bits: &[u16]| bits.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(count(DType::BF16, &halves(&[0x7f7f, 0xff7f, 0, 0x7f80, 0xff80, 0x7fc0])), 3);
        assert_eq!(count(DType::F16, &halves(&[0x7bff, 0xfbff, 0, 0x7c00, 0xfc00, 0x7e01])), 3);
        assert!(check("x", DType::F32, &f32s[..8]).is_ok());
        let e = check("x", DType::F32, &f32s).unwrap_err().to_string();
        assert!(e.contains("\"x\"") && e.contains("4 of its 8 f32 values"), "{e}");
    }
}
