//! LayerNorm and RMSNorm over the last axis. Arithmetic is in f32.

use crate::checks::{dtypes, rows_of};
use crate::cpu::rows::Rows;
use crate::{ElementwiseKernels, QuantKernels};
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// The kind of norm and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Subtract the mean: LayerNorm. Otherwise RMSNorm.
    pub subtract_mean: bool,
    /// Added to the variance (or mean square).
    pub eps: f32,
    /// Zero-centered gamma: the gain is `1 + gamma`.
    pub zero_centred: bool,
}

/// `y = (x − mean)·rstd·gain + beta` over the last axis. `x` and `y` may be strided views `[rows, h]` or
/// `[rows, heads, d]` whose last axis is contiguous.
pub struct NormForward<'a> {
    /// Input.
    pub x: &'a Tensor,
    /// `[h]`
    pub gamma: &'a Tensor,
    /// `[h]`, LayerNorm only.
    pub beta: Option<&'a Tensor>,
    /// Output, of the shape of `x`.
    pub y: &'a Tensor,
    /// f32, one per row; LayerNorm only.
    pub mean: Option<&'a Tensor>,
    /// f32, one per row: `1/sqrt(var + eps)`.
    pub rstd: &'a Tensor,
}

/// A residual connection before a norm: `sum = x + residual`, all contiguous and of equal shape.
#[derive(Clone, Copy)]
pub struct ResidualAdd<'a> {
    /// Added to the input of the norm.
    pub residual: &'a Tensor,
    /// The sum, which the norm reads and the next residual connection needs.
    pub sum: &'a Tensor,
}

/// Gradient of a norm. With ŷ = (x − mean)·rstd and dŷ = dy·gain:
/// `dx = rstd·(dŷ − mean(dŷ) − ŷ·mean(dŷ·ŷ)) (+ residual)`; RMSNorm has no `mean(dŷ)` term.
pub struct NormBackward<'a> {
    /// Input of the forward pass.
    pub x: &'a Tensor,
    /// `[h]`
    pub gamma: &'a Tensor,
    /// From the forward pass.
    pub mean: Option<&'a Tensor>,
    /// From the forward pass.
    pub rstd: &'a Tensor,
    /// Gradient of the output.
    pub dy: &'a Tensor,
    /// Gradient of `x` from a residual connection, added to `dx`.
    pub residual: Option<&'a Tensor>,
    /// Gradient of the input.
    pub dx: &'a Tensor,
    /// f32 `[norm_partials, h]` ([`NormKernels::norm_partials`]): partial sums of `Σ dy·ŷ`.
    pub dgamma: &'a Tensor,
    /// f32 `[norm_partials, h]`: partial sums of `Σ dy`; LayerNorm only.
    pub dbeta: Option<&'a Tensor>,
}

fn check_kind(op: &'static str, norm: Norm, has_mean: bool, has_beta: bool) -> Result<()> {
    if norm.subtract_mean != has_mean || norm.subtract_mean != has_beta {
        return shape_error(op, "LayerNorm has a mean and a bias, RMSNorm neither");
    }
    Ok(())
}

/// Checks that weights and statistics are contiguous and hold `len` elements of `dtype`.
fn check_vectors(op: &'static str, dtype: DType, len: usize, vectors: &[&Tensor]) -> Result<()> {
    dtypes(op, dtype, vectors)?;
    match vectors.iter().find(|t| t.numel() != len || !t.is_contiguous()) {
        None => Ok(()),
        Some(t) => shape_error(op, format!("{t:?} must be contiguous and hold {len} elements")),
    }
}

impl NormForward<'_> {
    /// Checks types, weights and statistics of a norm over `rows` rows of `width` elements.
    pub(crate) fn check(&self, op: &'static str, norm: Norm, rows: usize, width: usize) -> Result<()> {
        check_kind(op, norm, self.mean.is_some(), self.beta.is_some())?;
        dtypes(op, self.x.dtype(), &[self.y])?;
        check_vectors(op, self.x.dtype(), width, &[self.gamma, self.beta.unwrap_or(self.gamma)])?;
        check_vectors(op, DType::F32, rows, &[self.rstd, self.mean.unwrap_or(self.rstd)])
    }
}

impl NormBackward<'_> {
    /// Checks all arguments and returns the rows of `x`, `dy` and `dx`. The residual must have the strides of `dx`.
    /// `partials` gives the number of partial sums for rows and width.
    pub(crate) fn check(
        &self,
        op: &'static str,
        norm: Norm,
        partials: impl FnOnce(usize, usize) -> usize,
    ) -> Result<[Rows; 3]> {
        check_kind(op, norm, self.mean.is_some(), self.dbeta.is_some())?;
        let residual = self.residual.unwrap_or(self.dx);
        let [x, dy, dx, _] = rows_of(op, [self.x, self.dy, self.dx, residual])?;
        if residual.strides() != self.dx.strides() {
            return shape_error(op, "the residual gradient must be laid out like dx");
        }
        dtypes(op, self.x.dtype(), &[self.dy, self.dx, residual])?;
        check_vectors(op, self.x.dtype(), x.width, &[self.gamma])?;
        check_vectors(op, DType::F32, x.count(), &[self.rstd, self.mean.unwrap_or(self.rstd)])?;
        let sums = partials(x.count(), x.width) * x.width;
        check_vectors(op, DType::F32, sums, &[self.dgamma, self.dbeta.unwrap_or(self.dgamma)])?;
        Ok([x, dy, dx])
    }
}

/// Norm kernels.
///
/// The `_amax` variants also take the largest magnitude of `n.y` `[rows, h]`, as it is stored: `amax` f32 `[1]` becomes
/// the larger of itself and that magnitude. Their results are bit for bit those of the plain kernels.
pub trait NormKernels: ElementwiseKernels + QuantKernels {
    /// See [`NormForward`].
    fn norm_forward(&self, s: &Stream, norm: Norm, n: &NormForward) -> Result<()>;

    /// [`NormKernels::norm_forward`] and the amax of its output.
    fn norm_forward_amax(&self, s: &Stream, norm: Norm, n: &NormForward, amax: &Tensor) -> Result<()> {
        self.norm_forward(s, norm, n)?;
        self.amax(s, n.y, amax)
    }

    /// `add.sum = n.x + add.residual`, then the norm of that sum.
    fn add_norm_forward(&self, s: &Stream, norm: Norm, add: &ResidualAdd, n: &NormForward) -> Result<()> {
        self.add(s, n.x, add.residual, add.sum)?;
        self.norm_forward(s, norm, &NormForward { x: add.sum, ..*n })
    }

    /// [`NormKernels::add_norm_forward`] and the amax of its output.
    fn add_norm_forward_amax(
        &self,
        s: &Stream,
        norm: Norm,
        add: &ResidualAdd,
        n: &NormForward,
        amax: &Tensor,
    ) -> Result<()> {
        self.add_norm_forward(s, norm, add, n)?;
        self.amax(s, n.y, amax)
    }

    /// Rows of partial sums that [`NormBackward`] writes of dgamma and dbeta for `rows` rows of type `dtype`. The caller
    /// adds them up with [`column_sum`](ElementwiseKernels::column_sum), which also accumulates into the gradient.
    fn norm_partials(&self, dtype: DType, rows: usize, width: usize) -> usize;

    /// See [`NormBackward`].
    fn norm_backward(&self, s: &Stream, norm: Norm, n: &NormBackward) -> Result<()>;
}
