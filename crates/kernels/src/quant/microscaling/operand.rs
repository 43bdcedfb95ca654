//! GEMM operands in a microscaling format.

use super::{BlockAxis, EmulatedFormat};
use crate::cpu::quant::{MX_BLOCK, NV_BLOCK};
use crate::cpu::rows::Rows;
use crate::quant::check::{matrix, one};
use ferrotron_tensor::{Category, DType, Error, Result, Stream, Tensor, shape_error};

/// Lines of operands are zero-padded to a multiple of this many values: whole scaling blocks, and 16 bytes of FP4.
pub const DEPTH: usize = 32;

/// A GEMM operand `[r, k]` in MXFP8 or NVFP4, contracted along k: a matrix as stored, or the transpose of a matrix `[k, r]`.
#[derive(Clone, Debug)]
pub struct MicroscaledTensor {
    /// MXFP8: E4M3 or E5M2 `[r, d]`. NVFP4: u8 `[r, d/2]`, two E2M1 codes per byte, the first in the low half.
    /// d is k rounded up to a multiple of 32.
    pub data: Tensor,
    /// u8, row-major. MXFP8: E8M0 `[r, d/32]`. NVFP4: E4M3 `[r, d/16]`, relative to the per-tensor scale.
    pub scales: Tensor,
    /// NVFP4: f32 `[1]`, the amax that the per-tensor scale follows from.
    pub amax: Option<Tensor>,
    /// k, without padding.
    pub cols: usize,
    /// Axis of the matrix that is contracted; along columns the operand is its transpose.
    pub along: BlockAxis,
    /// The values are those of the Hadamard transform along k, which cancels in a GEMM of two such operands.
    pub hadamard: bool,
}

impl EmulatedFormat {
    /// Axis of a block.
    pub fn along(&self) -> BlockAxis {
        match *self {
            EmulatedFormat::Mxfp8 { along, .. } | EmulatedFormat::Nvfp4 { along, .. } => along,
        }
    }
}

impl MicroscaledTensor {
    /// Allocates the operand that a matrix `[rows, cols]` is quantized to.
    pub fn empty(
        s: &Stream,
        how: EmulatedFormat,
        [rows, cols]: [usize; 2],
        category: Category,
    ) -> Result<MicroscaledTensor> {
        let along = how.along();
        let [r, k] = if along == BlockAxis::Rows { [rows, cols] } else { [cols, rows] };
        let d = k.next_multiple_of(DEPTH);
        let make = |cols, dtype| Tensor::empty(s, &[r, cols], dtype, category);
        let (data, scales, amax, hadamard) = match how {
            EmulatedFormat::Mxfp8 { format, .. } => {
                (make(d, format)?, make(d / MX_BLOCK, DType::U8)?, None, false)
            }
            EmulatedFormat::Nvfp4 { hadamard, .. } => {
                let amax = Tensor::empty(s, &[1], DType::F32, category)?;
                (make(d / 2, DType::U8)?, make(d / NV_BLOCK, DType::U8)?, Some(amax), hadamard)
            }
        };
        Ok(MicroscaledTensor { data, scales, amax, cols: k, along, hadamard })
    }

    /// Rows r.
    pub fn rows(&self) -> usize {
        self.data.shape()[0]
    }

    /// Whether it is NVFP4, or else MXFP8.
    pub fn is_fp4(&self) -> bool {
        self.amax.is_some()
    }

    /// d: k with padding.
    pub fn depth(&self) -> usize {
        self.cols.next_multiple_of(DEPTH)
    }

    /// Shape of the matrix that was quantized.
    pub fn matrix_shape(&self) -> [usize; 2] {
        match self.along {
            BlockAxis::Rows => [self.rows(), self.cols],
            BlockAxis::Cols => [self.cols, self.rows()],
        }
    }

    /// A range of rows.
    pub fn narrow(&self, start: usize, len: usize) -> Result<MicroscaledTensor> {
        let part = |t: &Tensor| t.narrow(0, start, len);
        Ok(MicroscaledTensor { data: part(&self.data)?, scales: part(&self.scales)?, ..self.clone() })
    }

    /// Checks types, shapes and contiguity.
    pub fn check(&self, op: &'static str) -> Result<()> {
        let (d, r) = (self.depth(), self.rows());
        let found = self.data.dtype();
        let (wanted, width, block) = match &self.amax {
            Some(amax) => {
                one(op, amax)?;
                (found == DType::U8, d / 2, NV_BLOCK)
            }
            None => (matches!(found, DType::E4M3 | DType::E5M2), d, MX_BLOCK),
        };
        if !wanted {
            return Err(Error::DType {
                op,
                found,
                wanted: if self.is_fp4() { DType::U8 } else { DType::E4M3 },
            });
        }
        if self.scales.dtype() != DType::U8 {
            return Err(Error::DType { op, found: self.scales.dtype(), wanted: DType::U8 });
        }
        let fits = self.data.shape() == [r, width]
            && self.scales.shape() == [r, d / block]
            && self.data.is_contiguous()
            && self.scales.is_contiguous();
        if !fits {
            let (data, scales) = (self.data.shape(), self.scales.shape());
            let what =
                format!("data {data:?} with scales {scales:?} does not fit an operand [{r}, {}]", self.cols);
            return shape_error(op, what);
        }
        Ok(())
    }

    /// Checks that `x [r, c]` is quantized to it; returns the rows of `x`.
    pub(crate) fn check_quantize(&self, op: &'static str, how: EmulatedFormat, x: &Tensor) -> Result<Rows> {
        how.check(op)?;
        self.check(op)?;
        let rows = matrix(op, x)?;
        let fits = match how {
            EmulatedFormat::Mxfp8 { format, .. } => self.data.dtype() == format,
            EmulatedFormat::Nvfp4 { hadamard, .. } => self.is_fp4() && self.hadamard == hadamard,
        };
        if !fits || self.along != how.along() || [rows.outer, rows.width] != self.matrix_shape() {
            return shape_error(op, format!("{x:?} quantized as {how:?} does not fit {self:?}"));
        }
        Ok(rows)
    }

    /// Checks that it is dequantized to `out`.
    pub(crate) fn check_dequantize(&self, op: &'static str, out: &Tensor) -> Result<()> {
        self.check(op)?;
        if out.shape() != self.matrix_shape() || !out.is_contiguous() {
            let what = format!("{out:?} must be contiguous and have the shape {:?}", self.matrix_shape());
            return shape_error(op, what);
        }
        Ok(())
    }
}
