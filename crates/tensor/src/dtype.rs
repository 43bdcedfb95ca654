//! Element types: [`DType`] as a value, [`Element`] as a Rust type.

use crate::fp8::{E4m3, E5m2};
use half::{bf16, f16};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 64-bit float, for reference computations.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit float with 8 exponent bits.
    BF16,
    /// 16-bit float with 5 exponent bits.
    F16,
    /// 8-bit float, 4 exponent bits, largest value 448, no infinity.
    E4M3,
    /// 8-bit float, 5 exponent bits, largest finite value 57344.
    E5M2,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 16-bit signed integer.
    I16,
    /// Byte.
    U8,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 | DType::I16 => 2,
            DType::E4M3 | DType::E5M2 | DType::U8 | DType::Bool => 1,
        }
    }

    /// The name users write in recipes and see in messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I16 => "i16",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// True for floating-point types.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::I64 | DType::I32 | DType::I16 | DType::U8 | DType::Bool)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that can be a tensor element.
pub trait Element: bytemuck::Pod + Send + Sync + std::fmt::Debug + PartialEq + 'static {
    /// The corresponding [`DType`].
    const DTYPE: DType;
}

/// A floating-point element. Arithmetic is done in f32 (f64 in reference computations); conversion to a smaller type
/// rounds to nearest, ties to even.
pub trait Float: Element {
    /// Converts to f32; exact except from f64.
    fn to_f32(self) -> f32;
    /// Rounds to this type.
    fn from_f32(x: f32) -> Self;
    /// Converts to f64; always exact.
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
element!(f64 => F64, f32 => F32, bf16 => BF16, f16 => F16, E4m3 => E4M3, E5m2 => E5M2, i64 => I64, i32 => I32, i16 => I16, u8 => U8);

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Float for f64 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f64 {
        f64::from(x)
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// Branch-free so that loops over it vectorize; NaN stays a quiet NaN.
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
    }
}

impl Float for f16 {
    /// Branch-free like [`Float::from_f32`]. The exponent bias differs by a power of two, so one multiplication
    /// corrects it, for subnormals too.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        let number = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
        // All exponent bits set: infinity or NaN.
        let number = if bits & 0x7c00 == 0x7c00 { magnitude | 0x7f80_0000 } else { number };
        f32::from_bits(number | (bits & 0x8000) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        let bits = x.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let normal = (magnitude + 0xfff + (magnitude >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
        // Below 2^-14 all values are multiples of 2^-24, the unit in the last place of 0.5, so adding 0.5 rounds to
        // it.
        let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let number = if magnitude < 0x3880_0000 { small } else { normal.min(0x7c00) };
        let number = if magnitude > 0x7f80_0000 { 0x7e00 | (magnitude >> 13 & 0x3ff) } else { number };
        f16::from_bits((number | (bits >> 16 & 0x8000)) as u16)
    }
}

impl Float for E4m3 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.decode()
    }
    #[inline(always)]
    fn from_f32(x: f32) -> E4m3 {
        E4m3::encode(x)
    }
}

impl Float for E5m2 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.decode()
    }
    #[inline(always)]
    fn from_f32(x: f32) -> E5m2 {
        E5m2::encode(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_matches_half_for_every_value_and_around_every_tie() {
        for bits in 0..=u16::MAX {
            let h = f16::from_bits(bits);
            let (ours, theirs) = (Float::to_f32(h), f16::to_f32(h));
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#x}");
            // The value itself, the tie above it and their neighbours; and f32 values with these upper bits.
            for lo in [0u32, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2fff, 0x3000, 0x3001] {
                for x in [
                    f32::from_bits(ours.to_bits().wrapping_add(lo)),
                    f32::from_bits(u32::from(bits) << 16 | lo),
                ] {
                    let (ours, theirs) = (<f16 as Float>::from_f32(x), f16::from_f32(x));
                    let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
                    assert!(same, "{x:?} {:#x}: {ours} {theirs}", x.to_bits());
                }
            }
        }
    }

    #[test]
    fn bf16_rounding_matches_half_for_every_upper_half_and_tie() {
        for hi in 0..=u16::MAX {
            for lo in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(hi) << 16 | lo);
                let (ours, theirs) = (<bf16 as Float>::from_f32(x), bf16::from_f32(x));
                assert!(ours == theirs || (x.is_nan() && ours.is_nan()), "{x:?} {:#x}", x.to_bits());
            }
        }
    }
}
