//! DoRA: rows of `V = W + s·B·A` are scaled to the lengths m, so that a linear computes `y = c ⊙ (x·Vᵀ)` with `c = m / ‖V‖`.
//!
//! The squared norm of a row needs no V: `‖V‖² = ‖W‖² + 2s·(W·Aᵀ)·B + s²·B·(A·Aᵀ)·B`. Both new terms vanish with B, so that f32
//! resolves a small update beside a large weight.

use crate::Segments;
use crate::checks::{contiguous, dtypes, same_contiguous};
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// What the update adds to the squared norms: `out[g, o] = Σᵢ b[g, o, i]·(2s·u[g, o, i] + s²·Σⱼ gram[g, i, j]·b[g, o, j])`.
#[derive(Clone, Copy)]
pub struct DoraUpdate<'a> {
    /// f32 `[groups, n, r]`: `W·Aᵀ`
    pub u: &'a Tensor,
    /// `[groups, n, r]`: B, with any stride between groups.
    pub b: &'a Tensor,
    /// f32 `[groups, r, r]`: `A·Aᵀ`
    pub gram: &'a Tensor,
    /// s
    pub scale: f32,
    /// f32 `[groups, n]`
    pub out: &'a Tensor,
}

/// Factors of rows from their squared norms. With `w = √base`, `v = √(base + update)` and r(w), w rounded to the type of m:
/// `norm = r(w)·(v / w)`, `factor = m / norm`, `inv_norm = 1 / norm`; both are 0 where the norm is.
///
/// m begins as w, rounded like any parameter, and r cancels that rounding: without an update the factor is exactly 1.
/// Matrices have any stride between rows.
#[derive(Clone, Copy)]
pub struct DoraFactor<'a> {
    /// f32 `[groups, n]`: squared norms of the rows of W.
    pub base: &'a Tensor,
    /// f32 `[groups, n]`: what the update adds.
    pub update: &'a Tensor,
    /// `[groups, n]`
    pub m: &'a Tensor,
    /// f32 `[groups, n]`
    pub factor: &'a Tensor,
    /// f32 `[groups, n]`
    pub inv_norm: &'a Tensor,
}

/// `y[t, j] = x[t, j]·factor[j] (+ bias[j])`, with segments `factor[e, j]` for the rows t of segment e.
/// Rows in no segment become zero.
#[derive(Clone, Copy)]
pub struct ScaleColumns<'a> {
    /// `[tokens, n]`
    pub x: &'a Tensor,
    /// f32 `[n]`, or `[E, n]` with segments.
    pub factor: &'a Tensor,
    /// Segments of the rows.
    pub segments: Option<Segments<'a>>,
    /// `[n]`; none with segments.
    pub bias: Option<&'a Tensor>,
    /// `[tokens, n]`
    pub y: &'a Tensor,
}

/// Gradients of [`ScaleColumns`]: `dx = dy·factor`, and `products = dy·x·inv_norm`, whose column sums are the gradient of m.
/// Rows in no segment become zero.
#[derive(Clone, Copy)]
pub struct ScaleColumnsBackward<'a> {
    /// `[tokens, n]`
    pub dy: &'a Tensor,
    /// `[tokens, n]`: input of the forward pass.
    pub x: &'a Tensor,
    /// f32 `[n]`, or `[E, n]` with segments.
    pub factor: &'a Tensor,
    /// Like `factor`.
    pub inv_norm: &'a Tensor,
    /// Segments of the rows.
    pub segments: Option<Segments<'a>>,
    /// `[tokens, n]`
    pub dx: &'a Tensor,
    /// `[tokens, n]`
    pub products: &'a Tensor,
}

/// Kernels of DoRA. Tensors are contiguous unless stated.
pub trait DoraKernels {
    /// `out[r] = Σ_c x[r, c]²` in f32; `x [n, k]`, `out` f32 `[n]`.
    fn row_squares(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()>;

    /// See [`DoraUpdate`].
    fn dora_update(&self, s: &Stream, d: &DoraUpdate) -> Result<()>;

    /// See [`DoraFactor`].
    fn dora_factor(&self, s: &Stream, d: &DoraFactor) -> Result<()>;

    /// See [`ScaleColumns`].
    fn scale_columns(&self, s: &Stream, c: &ScaleColumns) -> Result<()>;

    /// See [`ScaleColumnsBackward`].
    fn scale_columns_backward(&self, s: &Stream, c: &ScaleColumnsBackward) -> Result<()>;
}

/// Checks [`DoraKernels::row_squares`]; returns n and k.
pub(crate) fn check_squares(x: &Tensor, out: &Tensor) -> Result<[usize; 2]> {
    const OP: &str = "row_squares";
    contiguous(OP, &[x, out])?;
    dtypes(OP, DType::F32, &[out])?;
    match (x.shape(), out.shape()) {
        ([n, k], [m]) if n == m => Ok([*n, *k]),
        (x, out) => shape_error(OP, format!("squared norms of the rows of {x:?} do not fit {out:?}")),
    }
}

impl DoraUpdate<'_> {
    /// Checks shapes and types; returns groups, n, r and the stride between the groups of b.
    pub(crate) fn sizes(&self) -> Result<[usize; 4]> {
        const OP: &str = "dora_update";
        let &DoraUpdate { u, b, gram, out, .. } = self;
        contiguous(OP, &[u, gram, out])?;
        dtypes(OP, DType::F32, &[u, gram, out])?;
        let shapes = || [u, b, gram, out].map(|t| t.shape().to_vec());
        let (&[groups, n, r], &[stride, row, column]) = (b.shape(), b.strides()) else {
            return shape_error(OP, format!("{:?} must be [groups, n, r]", b.shape()));
        };
        let fits = u.shape() == b.shape() && gram.shape() == [groups, r, r] && out.shape() == [groups, n];
        let dense = (row == r || n <= 1) && (column == 1 || r <= 1) && (stride >= n * r || groups <= 1);
        match fits && dense {
            true => Ok([groups, n, r, if groups > 1 { stride } else { n * r }]),
            false => shape_error(OP, format!("u, b, gram and out {:?} have inconsistent shapes", shapes())),
        }
    }
}

impl DoraFactor<'_> {
    /// Checks shapes and types; returns groups, n, and the row strides of base, update, m, factor and inv_norm.
    pub(crate) fn sizes(&self) -> Result<([usize; 2], [usize; 5])> {
        const OP: &str = "dora_factor";
        let all = [self.base, self.update, self.m, self.factor, self.inv_norm];
        dtypes(OP, DType::F32, &[self.base, self.update, self.factor, self.inv_norm])?;
        let wrong = || {
            let shapes = all.map(|t| t.shape().to_vec());
            shape_error(OP, format!("{shapes:?} must be equal, [groups, n], with contiguous rows"))
        };
        let &[groups, n] = self.base.shape() else { return wrong() };
        let mut strides = [n; 5];
        for (t, stride) in all.into_iter().zip(&mut strides) {
            match *t.strides() {
                [row, column] if t.shape() == [groups, n] && (column == 1 || n <= 1) => {
                    *stride = if groups > 1 { row } else { n };
                }
                _ => return wrong(),
            }
        }
        Ok(([groups, n], strides))
    }
}

/// Checks rows of equal shape and type and their factors; returns tokens, n and the number of segments.
pub(crate) fn check_columns(
    op: &'static str,
    rows: &[&Tensor],
    factors: &[&Tensor],
    segments: Option<Segments>,
    bias: Option<&Tensor>,
) -> Result<[usize; 3]> {
    same_contiguous(op, rows)?;
    contiguous(op, factors)?;
    dtypes(op, DType::F32, factors)?;
    let x = rows[0];
    dtypes(op, x.dtype(), rows)?;
    let wrong = |what: &str| {
        let shapes: Vec<_> = rows.iter().chain(factors).map(|t| t.shape()).collect();
        shape_error(op, format!("rows and factors {shapes:?}: {what}"))
    };
    let &[tokens, n] = x.shape() else { return wrong("rows must be [tokens, n]") };
    if rows.iter().any(|t| t.shape() != x.shape()) {
        return wrong("rows differ in shape");
    }
    if i32::try_from(n).is_err() || i32::try_from(tokens).is_err() {
        return wrong("too large");
    }
    if let Some(bias) = bias {
        contiguous(op, &[bias])?;
        dtypes(op, x.dtype(), &[bias])?;
        if bias.shape() != [n] || segments.is_some() {
            return wrong("a bias must be [n], without segments");
        }
    }
    let Some(Segments { offsets, counts }) = segments else {
        return if factors.iter().all(|f| f.shape() == [n]) {
            Ok([tokens, n, 0])
        } else {
            wrong("must be [n]")
        };
    };
    contiguous(op, &[offsets, counts])?;
    dtypes(op, DType::I32, &[offsets, counts])?;
    let experts = counts.numel();
    match counts.shape() == [experts]
        && offsets.shape() == [experts + 1]
        && factors.iter().all(|f| f.shape() == [experts, n])
    {
        true => Ok([tokens, n, experts]),
        false => wrong("factors must be [experts, n], offsets [experts + 1], counts [experts]"),
    }
}
