//! Element types of the safetensors format.

use ferrotron_tensor::{DType, bf16};

macro_rules! file_dtypes {
    ($($variant:ident $name:literal $bits:literal $doc:literal,)*) => {
        /// An element type of the safetensors format, in the format's own order (increasing alignment): the official
        /// writer lays tensors out by it, largest first.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum FileDType {
            $(#[doc = $doc] $variant,)*
        }

        impl FileDType {
            /// All types, in the order of the format.
            pub const ALL: &[FileDType] = &[$(FileDType::$variant),*];

            /// The name in the header.
            pub const fn name(self) -> &'static str {
                match self { $(FileDType::$variant => $name,)* }
            }

            /// Bits per element; a few types are smaller than a byte.
            pub const fn bits(self) -> u64 {
                match self { $(FileDType::$variant => $bits,)* }
            }
        }
    };
}

file_dtypes! {
    Bool "BOOL" 8 "One byte, 0 or 1.",
    F4 "F4" 4 "4-bit float E2M1.",
    F6E2M3 "F6_E2M3" 6 "6-bit float, 2 exponent bits.",
    F6E3M2 "F6_E3M2" 6 "6-bit float, 3 exponent bits.",
    U8 "U8" 8 "Byte.",
    I8 "I8" 8 "Signed byte.",
    E5M2 "F8_E5M2" 8 "8-bit float, 5 exponent bits.",
    E4M3 "F8_E4M3" 8 "8-bit float, 4 exponent bits, no infinity.",
    E8M0 "F8_E8M0" 8 "Power of two, 8 exponent bits.",
    E4M3Fnuz "F8_E4M3FNUZ" 8 "8-bit float, 4 exponent bits, no negative zero.",
    E5M2Fnuz "F8_E5M2FNUZ" 8 "8-bit float, 5 exponent bits, no negative zero.",
    I16 "I16" 16 "16-bit signed integer.",
    U16 "U16" 16 "16-bit unsigned integer.",
    F16 "F16" 16 "16-bit float with 5 exponent bits.",
    BF16 "BF16" 16 "16-bit float with 8 exponent bits.",
    I32 "I32" 32 "32-bit signed integer.",
    U32 "U32" 32 "32-bit unsigned integer.",
    F32 "F32" 32 "32-bit float.",
    C64 "C64" 64 "Complex of two 32-bit floats.",
    F64 "F64" 64 "64-bit float.",
    I64 "I64" 64 "64-bit signed integer.",
    U64 "U64" 64 "64-bit unsigned integer.",
}

impl FileDType {
    /// The type that the header calls `name`.
    pub fn from_name(name: &str) -> Option<FileDType> {
        FileDType::ALL.iter().copied().find(|d| d.name() == name)
    }

    /// The corresponding [`DType`]; `None` for types that can only be read as raw bytes.
    pub const fn native(self) -> Option<DType> {
        Some(match self {
            FileDType::F64 => DType::F64,
            FileDType::F32 => DType::F32,
            FileDType::BF16 => DType::BF16,
            FileDType::F16 => DType::F16,
            FileDType::E4M3 => DType::E4M3,
            FileDType::E5M2 => DType::E5M2,
            FileDType::I64 => DType::I64,
            FileDType::I32 => DType::I32,
            FileDType::I16 => DType::I16,
            FileDType::U8 => DType::U8,
            FileDType::Bool => DType::Bool,
            _ => return None,
        })
    }

    /// Size in bytes of a tensor of this shape, or why it has none.
    pub fn tensor_bytes(self, shape: &[usize]) -> Result<u64, String> {
        // A zero axis makes the product zero whatever the others are, but the official readers multiply in order and
        // refuse on overflow. Do the same, so that both accept the same files.
        let mut bits = 1u64;
        for &n in shape {
            bits = u64::try_from(n)
                .ok()
                .and_then(|n| bits.checked_mul(n))
                .ok_or_else(|| format!("shape {shape:?} has more elements than can be counted"))?;
        }
        let bits = bits
            .checked_mul(self.bits())
            .ok_or_else(|| format!("shape {shape:?} of {self} has more bytes than can be counted"))?;
        if bits % 8 != 0 {
            return Err(format!("shape {shape:?} of {self} does not end on a whole byte"));
        }
        Ok(bits / 8)
    }
}

impl From<DType> for FileDType {
    fn from(d: DType) -> FileDType {
        match d {
            DType::F64 => FileDType::F64,
            DType::F32 => FileDType::F32,
            DType::BF16 => FileDType::BF16,
            DType::F16 => FileDType::F16,
            DType::E4M3 => FileDType::E4M3,
            DType::E5M2 => FileDType::E5M2,
            DType::I64 => FileDType::I64,
            DType::I32 => FileDType::I32,
            DType::I16 => FileDType::I16,
            DType::U8 => FileDType::U8,
            DType::Bool => FileDType::Bool,
        }
    }
}

impl std::fmt::Display for FileDType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Converts little-endian bytes of f32 or bf16 values to f32.
pub fn to_f32(dtype: DType, bytes: &[u8]) -> crate::Result<Vec<f32>> {
    match dtype {
        DType::F32 => {
            Ok(bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
        }
        DType::BF16 => Ok(bytes
            .chunks_exact(2)
            .map(|c| bf16::from_bits(u16::from_le_bytes([c[0], c[1]])).to_f32())
            .collect()),
        other => Err(crate::Error::Invalid(format!(
            "weights of type {other} cannot be loaded here; use f32 or bf16"
        ))),
    }
}
