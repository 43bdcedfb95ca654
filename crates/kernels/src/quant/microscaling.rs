//! Formats with a scale for every few numbers, which newer cards multiply and we emulate: numbers are rounded to the
//! format and back, and products are those of the rounded numbers.

use super::check::matrix;
use crate::cpu::Isa;
use crate::cpu::quant::emulate as on_host;
use crate::cpu::rows::Rows;
use crate::philox::RandomStream;
use ferrotron_tensor::{DType, Element, Error, Float, Result, Stream, Tensor, bf16, f16, shape_error};

/// Along which axis of a matrix `[r, c]` numbers share a scale: the one a product contracts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockAxis {
    /// Along rows: neighbours of a row (the matrix used as it is stored).
    Rows,
    /// Along columns: neighbours of a column (the matrix used transposed).
    Cols,
}

/// A format to emulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmulatedFormat {
    /// MXFP8: a power of two for every 32 numbers.
    Mxfp8 {
        /// E4M3 or E5M2.
        format: DType,
        /// Of a block.
        along: BlockAxis,
        /// Blocks of 32 x 32 instead (weights: the same numbers in both uses).
        square: bool,
    },
    /// NVFP4: E2M1, with an E4M3 scale for every 16 numbers and one f32 scale for all.
    Nvfp4 {
        /// Of a block.
        along: BlockAxis,
        /// Blocks of 16 x 16 instead (weights).
        square: bool,
        /// Turn every 16 numbers along the axis by the random Hadamard matrix before rounding, and back after.
        hadamard: bool,
        /// Round up or down at random, in proportion: element `i` of the matrix takes byte `i` of this stream.
        stochastic: Option<RandomStream>,
    },
}

impl EmulatedFormat {
    /// Can it be done?
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        match *self {
            EmulatedFormat::Mxfp8 { format, .. } => super::scale::largest(op, format).map(|_| ()),
            EmulatedFormat::Nvfp4 { square: true, hadamard: true, .. } => {
                shape_error(op, "blocks of 16 x 16 serve both uses, and only one use can be turned")
            }
            EmulatedFormat::Nvfp4 { .. } => Ok(()),
        }
    }
}

/// Can `x` be rounded into `out` so? The rows of `x`.
pub(crate) fn check(op: &'static str, how: EmulatedFormat, x: &Tensor, out: &Tensor) -> Result<Rows> {
    how.check(op)?;
    let rows = matrix(op, x)?;
    if out.shape() != x.shape() || out.dtype() != x.dtype() || !out.is_contiguous() {
        return shape_error(op, format!("{x:?} into {out:?}, which must be like it and contiguous"));
    }
    Ok(rows)
}

/// The emulation of a home without a kernel for it: over the host and back.
pub(crate) fn emulate_over_host(s: &Stream, how: EmulatedFormat, x: &Tensor, out: &Tensor) -> Result<()> {
    const OP: &str = "emulate";
    let rows = check(OP, how, x, out)?;
    fn run<T: Float + Element>(
        s: &Stream,
        how: EmulatedFormat,
        x: &Tensor,
        out: &Tensor,
        [r, c]: [usize; 2],
    ) -> Result<()> {
        let values = s.download::<T>(x)?;
        let mut rounded = vec![T::zeroed(); values.len()];
        let dense = Rows::dense(r, c);
        s.launch(OP, &[], |l| on_host(l.threads(), Isa::detect(), how, &values, dense, &mut rounded))?;
        s.upload_into(out, &rounded)
    }
    let shape = [rows.outer, rows.width];
    match x.dtype() {
        DType::F32 => run::<f32>(s, how, x, out, shape),
        DType::BF16 => run::<bf16>(s, how, x, out, shape),
        DType::F16 => run::<f16>(s, how, x, out, shape),
        found => Err(Error::DType { op: OP, found, wanted: DType::F32 }),
    }
}
