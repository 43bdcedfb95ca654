//! FP8 quantization of a stack of matrices: the weights of an MoE layer's experts.

use crate::checks::{contiguous, dtypes};
use crate::quant::check::one;
use crate::{BLOCK, Fp8Tensor, ScaleSource, ScalingMode};
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// Quantizes a stack `x [E, n, k]` (f32 or bf16, contiguous) into up to two stacks of operands, reading it once; each matrix is
/// quantized as by [`crate::Quantize`].
///
/// With [`ScalingMode::PerTensor`] scales are f32 `[E]`, from an amax f32 `[E]` ([`ScaleSource::Amax`]) or one scale that all
/// matrices share ([`ScaleSource::Given`], f32 `[1]`). With [`ScalingMode::Block128x128`] the stack is scaled as one matrix, and n
/// and k are multiples of 128.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeStack<'a> {
    /// `[E, n, k]`
    pub x: &'a Tensor,
    /// Source of the scales.
    pub range: ScaleSource<'a>,
    /// Row-wise output: the matrices as stored, `[E·n, k]`.
    pub rows: Option<&'a Fp8Tensor>,
    /// Column-wise output: each matrix transposed, `[E·k, n]`.
    pub cols: Option<&'a Fp8Tensor>,
}

/// Checks a stack; returns E, n and k.
fn sizes(op: &'static str, x: &Tensor) -> Result<[usize; 3]> {
    contiguous(op, &[x])?;
    if !matches!(x.dtype(), DType::F32 | DType::BF16) {
        return Err(Error::DType { op, found: x.dtype(), wanted: DType::BF16 });
    }
    match x.shape() {
        [e, n, k] => Ok([*e, *n, *k]),
        _ => shape_error(op, format!("{x:?} must be a stack [E, n, k]")),
    }
}

/// Checks that it is f32 `[count]`.
fn each(op: &'static str, t: &Tensor, count: usize) -> Result<()> {
    dtypes(op, DType::F32, &[t])?;
    if t.shape() != [count] || !t.is_contiguous() {
        return shape_error(op, format!("{t:?} must hold one value for each of {count} matrices"));
    }
    Ok(())
}

/// Checks of [`crate::QuantKernels::amax_stack`].
pub(crate) fn amax_sizes(op: &'static str, x: &Tensor, amax: &Tensor) -> Result<[usize; 3]> {
    let found = sizes(op, x)?;
    each(op, amax, found[0])?;
    Ok(found)
}

/// Checks FP8 data of `count` matrices, `shape` together.
fn check_bytes(op: &'static str, count: usize, bytes: &Fp8Tensor, shape: [usize; 2]) -> Result<()> {
    if bytes.scaling != ScalingMode::PerTensor {
        return bytes.check(op, shape);
    }
    each(op, &bytes.scale_inv, count)?;
    let one = bytes.scale_inv.narrow(0, 0, count.min(1))?;
    if count == 0 { Ok(()) } else { Fp8Tensor { scale_inv: one, ..bytes.clone() }.check(op, shape) }
}

/// Checks of [`crate::QuantKernels::transpose_stack`]: returns n and k.
pub(crate) fn check_transpose(
    op: &'static str,
    count: usize,
    rows: &Fp8Tensor,
    cols: &Fp8Tensor,
) -> Result<[usize; 2]> {
    let (n, k) = (cols.cols, rows.cols);
    check_bytes(op, count, rows, [count * n, k])?;
    check_bytes(op, count, cols, [count * k, n])?;
    let tiles = rows.scaling == ScalingMode::Block128x128;
    if rows.scaling != cols.scaling
        || rows.scaling == ScalingMode::Block1x128
        || rows.data.dtype() != cols.data.dtype()
    {
        return shape_error(op, "both must have one FP8 format and one scale per matrix or 128x128 blocks");
    }
    if tiles && !(n.is_multiple_of(BLOCK) && k.is_multiple_of(BLOCK)) {
        return shape_error(op, format!("matrices [{n}, {k}] are not multiples of {BLOCK} blocks"));
    }
    Ok([n, k])
}

impl QuantizeStack<'_> {
    /// Checks shapes, types and scales; returns E, n and k, the scaling mode, and the FP8 format.
    pub(crate) fn check(&self, op: &'static str) -> Result<([usize; 3], ScalingMode, Option<DType>)> {
        let [e, n, k] = sizes(op, self.x)?;
        let scaling = match self.range {
            ScaleSource::Amax { amax, .. } => each(op, amax, e).map(|()| ScalingMode::PerTensor)?,
            ScaleSource::Given { scale, amax } => {
                [scale, amax].into_iter().try_for_each(|t| one(op, t))?;
                ScalingMode::PerTensor
            }
            ScaleSource::Blocks { .. } if n.is_multiple_of(BLOCK) && k.is_multiple_of(BLOCK) => {
                ScalingMode::Block128x128
            }
            ScaleSource::Blocks { .. } => {
                return shape_error(op, format!("matrices [{n}, {k}] are not multiples of {BLOCK} blocks"));
            }
        };
        let mut format = None;
        let outputs = [self.rows.map(|b| (b, [e * n, k])), self.cols.map(|b| (b, [e * k, n]))];
        for (bytes, shape) in outputs.into_iter().flatten() {
            if bytes.scaling != scaling {
                return shape_error(op, format!("{:?} scales from {:?}", bytes.scaling, self.range));
            }
            check_bytes(op, e, bytes, shape)?;
            let found = bytes.data.dtype();
            if *format.get_or_insert(found) != found {
                return shape_error(op, "both orientations must have one FP8 format");
            }
        }
        Ok(([e, n, k], scaling, format))
    }
}
