//! Stacks of matrices made bytes of at once: the weights of experts.

use crate::checks::{contiguous, dtypes};
use crate::quant::check::one;
use crate::{BLOCK, Fp8Tensor, ScaleSource, ScalingMode};
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// Quantizes a stack `x [E, n, k]` (f32 or bf16, contiguous), once read, into up to two stacks of factors, each matrix as
/// [`crate::Quantize`] would.
///
/// With [`ScalingMode::PerTensor`] scales are f32 `[E]`: from magnitudes f32 `[E]` ([`ScaleSource::Amax`]), or one that all matrices share
/// ([`ScaleSource::Given`], f32 `[1]`). With [`ScalingMode::Block128x128`] they are those of one matrix, and n and k are multiples of 128.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeStack<'a> {
    /// `[E, n, k]`
    pub x: &'a Tensor,
    /// Where scales come from.
    pub range: ScaleSource<'a>,
    /// The matrices as they are stored: `[E·n, k]`.
    pub rows: Option<&'a Fp8Tensor>,
    /// Each of them transposed: `[E·k, n]`.
    pub cols: Option<&'a Fp8Tensor>,
}

/// E, n, k of a stack.
fn sizes(op: &'static str, x: &Tensor) -> Result<[usize; 3]> {
    contiguous(op, &[x])?;
    if !matches!(x.dtype(), DType::F32 | DType::BF16) {
        return Err(Error::DType { op, found: x.dtype(), wanted: DType::BF16 });
    }
    match x.shape() {
        [e, n, k] => Ok([*e, *n, *k]),
        _ => shape_error(op, format!("{x:?} where a stack [E, n, k] belongs")),
    }
}

/// Is it a number for each matrix?
fn each(op: &'static str, t: &Tensor, count: usize) -> Result<()> {
    dtypes(op, DType::F32, &[t])?;
    if t.shape() != [count] || !t.is_contiguous() {
        return shape_error(op, format!("{t:?} where a number for each of {count} matrices belongs"));
    }
    Ok(())
}

/// Checks of [`QuantizeStackKernels::amax_stack`].
pub(crate) fn amax_sizes(op: &'static str, x: &Tensor, amax: &Tensor) -> Result<[usize; 3]> {
    let found = sizes(op, x)?;
    each(op, amax, found[0])?;
    Ok(found)
}

/// Is it the bytes of `count` matrices, `shape` in all?
fn check_bytes(op: &'static str, count: usize, bytes: &Fp8Tensor, shape: [usize; 2]) -> Result<()> {
    if bytes.scaling != ScalingMode::PerTensor {
        return bytes.check(op, shape);
    }
    each(op, &bytes.scale_inv, count)?;
    let one = bytes.scale_inv.narrow(0, 0, count.min(1))?;
    if count == 0 { Ok(()) } else { Fp8Tensor { scale_inv: one, ..bytes.clone() }.check(op, shape) }
}

/// Checks of [`QuantizeStackKernels::transpose_stack`]: gives n and k.
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
        return shape_error(
            op,
            "both must be of one format, with one scale for each matrix or those of tiles",
        );
    }
    if tiles && !(n.is_multiple_of(BLOCK) && k.is_multiple_of(BLOCK)) {
        return shape_error(op, format!("matrices [{n}, {k}] do not divide into tiles of {BLOCK}"));
    }
    Ok([n, k])
}

impl QuantizeStack<'_> {
    /// Checks shapes, types and scales; gives E, n, k, how numbers share scales, and the format.
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
                return shape_error(op, format!("matrices [{n}, {k}] do not divide into tiles of {BLOCK}"));
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
                return shape_error(op, "both uses of a matrix have one format");
            }
        }
        Ok(([e, n, k], scaling, format))
    }
}
