//! Storage types of tokens in `.bin` files.

use crate::{Error, Result};

/// Storage type of a token, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenType {
    /// Code 1.
    U8,
    /// Code 2.
    I8,
    /// Code 3.
    I16,
    /// Code 4.
    I32,
    /// Code 5.
    I64,
    /// Code 6.
    F64,
    /// Code 7.
    F32,
    /// Code 8.
    U16,
}

impl TokenType {
    /// All types.
    pub const ALL: [Self; 8] =
        [Self::U8, Self::I8, Self::I16, Self::I32, Self::I64, Self::F64, Self::F32, Self::U16];

    /// The usual type for a vocabulary: u16 below 65500 entries, else i32.
    pub fn for_vocab(vocab: u64) -> Self {
        if vocab < 65500 { Self::U16 } else { Self::I32 }
    }

    /// The code in the index file.
    pub fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::I8 => 2,
            Self::I16 => 3,
            Self::I32 => 4,
            Self::I64 => 5,
            Self::F64 => 6,
            Self::F32 => 7,
            Self::U16 => 8,
        }
    }

    /// The type of a code; `None` for unknown codes.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.code() == code)
    }

    /// Bytes per token.
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// True for floating-point types, which cannot hold token ids.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }

    /// Its numpy name.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F64 => "float64",
            Self::F32 => "float32",
            Self::U16 => "uint16",
        }
    }

    /// Appends the integer tokens in `bytes` to `out`. Callers refuse floating-point types, which would be truncated.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut Vec<i64>) {
        match self {
            Self::U8 => out.extend(bytes.iter().map(|&b| i64::from(b))),
            Self::I8 => out.extend(bytes.iter().map(|&b| i64::from(b as i8))),
            Self::I16 => out.extend(arrays(bytes).map(|b| i64::from(i16::from_le_bytes(b)))),
            Self::U16 => out.extend(arrays(bytes).map(|b| i64::from(u16::from_le_bytes(b)))),
            Self::I32 => out.extend(arrays(bytes).map(|b| i64::from(i32::from_le_bytes(b)))),
            Self::I64 => out.extend(arrays(bytes).map(i64::from_le_bytes)),
            Self::F32 => out.extend(arrays(bytes).map(|b| f32::from_le_bytes(b) as i64)),
            Self::F64 => out.extend(arrays(bytes).map(|b| f64::from_le_bytes(b) as i64)),
        }
    }

    /// The values in `bytes` as f64; exact except for i64 beyond 2⁵³.
    pub(crate) fn decode_f64(self, bytes: &[u8]) -> Vec<f64> {
        match self {
            Self::F32 => arrays(bytes).map(|b| f64::from(f32::from_le_bytes(b))).collect(),
            Self::F64 => arrays(bytes).map(f64::from_le_bytes).collect(),
            _ => {
                let mut ints = Vec::with_capacity(bytes.len() / self.size());
                self.decode(bytes, &mut ints);
                ints.into_iter().map(|v| v as f64).collect()
            }
        }
    }

    /// Appends `value` to `out`; fails if this type cannot hold it.
    pub(crate) fn encode(self, value: i64, out: &mut Vec<u8>) -> Result<()> {
        let refuse = |_| Error::Invalid(format!("token {value} does not fit {}", self.name()));
        match self {
            Self::U8 => out.push(u8::try_from(value).map_err(refuse)?),
            Self::I8 => out.extend(i8::try_from(value).map_err(refuse)?.to_le_bytes()),
            Self::I16 => out.extend(i16::try_from(value).map_err(refuse)?.to_le_bytes()),
            Self::U16 => out.extend(u16::try_from(value).map_err(refuse)?.to_le_bytes()),
            Self::I32 => out.extend(i32::try_from(value).map_err(refuse)?.to_le_bytes()),
            Self::I64 => out.extend(value.to_le_bytes()),
            Self::F32 => out.extend((value as f32).to_le_bytes()),
            Self::F64 => out.extend((value as f64).to_le_bytes()),
        }
        Ok(())
    }

    /// Appends floats to `out`, rounded to this type; an integer type takes none.
    pub(crate) fn encode_floats(self, values: &[f64], out: &mut Vec<u8>) -> Result<()> {
        match self {
            Self::F32 => out.extend(values.iter().flat_map(|v| (*v as f32).to_le_bytes())),
            Self::F64 => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
            _ => {
                let name = self.name();
                return Err(Error::Invalid(format!("a file of {name} takes token ids, not floats")));
            }
        }
        Ok(())
    }
}

/// Splits bytes into arrays of `N`, ignoring an incomplete end.
fn arrays<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}
