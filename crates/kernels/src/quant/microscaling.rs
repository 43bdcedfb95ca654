//! Microscaling formats (MXFP8, NVFP4). Blackwell tensor cores multiply them ([`MicroscaledGemm`]). Elsewhere they are
//! emulated: values are quantized and dequantized, and bf16 GEMMs run on the result.

pub(crate) mod gemm;
mod operand;
pub(crate) mod over_host;

pub use gemm::{MicroscaledGemm, MicroscalingKernels};
pub use operand::{DEPTH, MicroscaledTensor};

use super::check::matrix;
use crate::cpu::quant::emulate as on_host;
use crate::cpu::rows::{Rows, RowsView};
use crate::cpu::{CpuContext, Isa};
use crate::philox::RandomStream;
use ferrotron_tensor::{DType, Element, Error, Float, Result, Stream, Tensor, bf16, f16, shape_error};

/// Axis of a matrix `[r, c]` along which values share a scale: the contracted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockAxis {
    /// Blocks along rows (row-wise orientation).
    Rows,
    /// Blocks along columns (column-wise orientation: the matrix is used transposed).
    Cols,
}

/// A microscaling format, and how a matrix is quantized to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmulatedFormat {
    /// MXFP8: a power-of-two (E8M0) scale per 32 values.
    Mxfp8 {
        /// E4M3 or E5M2.
        format: DType,
        /// Axis of a block.
        along: BlockAxis,
        /// 32x32 blocks, so that both orientations of a weight have the same values.
        square: bool,
    },
    /// NVFP4: E2M1 with an E4M3 scale per 16 values and one f32 scale per tensor.
    Nvfp4 {
        /// Axis of a block.
        along: BlockAxis,
        /// 16x16 blocks (weights).
        square: bool,
        /// Apply the 16-point random Hadamard transform along the axis before rounding, and its inverse after.
        hadamard: bool,
        /// Stochastic rounding: element `i` of the matrix uses byte `i` of this random stream.
        stochastic: Option<RandomStream>,
    },
}

impl EmulatedFormat {
    /// Checks that the options go together.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        match *self {
            EmulatedFormat::Mxfp8 { format, .. } => super::scale::largest(op, format).map(|_| ()),
            EmulatedFormat::Nvfp4 { square: true, hadamard: true, .. } => shape_error(
                op,
                "16x16 blocks serve both orientations, but the Hadamard transform applies to one of them only",
            ),
            EmulatedFormat::Nvfp4 { .. } => Ok(()),
        }
    }
}

/// Checks `x` and `out`; returns the rows of `x`.
pub(crate) fn check(op: &'static str, how: EmulatedFormat, x: &Tensor, out: &Tensor) -> Result<Rows> {
    how.check(op)?;
    let rows = matrix(op, x)?;
    if out.shape() != x.shape() || out.dtype() != x.dtype() || !out.is_contiguous() {
        return shape_error(op, format!("{out:?} must be contiguous and have the shape and type of {x:?}"));
    }
    Ok(rows)
}

/// Emulation on the host, for devices without a kernel for it.
pub(crate) fn emulate_over_host(s: &Stream, how: EmulatedFormat, x: &Tensor, out: &Tensor) -> Result<()> {
    const OP: &str = "emulate";
    let rows = check(OP, how, x, out)?;
    if s.device().is_meta() {
        return Ok(());
    }
    fn run<T: Float + Element>(
        s: &Stream,
        how: EmulatedFormat,
        x: &Tensor,
        out: &Tensor,
        [r, c]: [usize; 2],
    ) -> Result<()> {
        let values = s.download::<T>(x)?;
        let mut rounded = vec![T::zeroed(); values.len()];
        let dense = RowsView::dense(&values, r, c);
        s.launch(OP, &[], |l| {
            let cpu = CpuContext { threads: l.threads(), isa: Isa::detect() };
            on_host(cpu, how, dense, &mut rounded)
        })?;
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
