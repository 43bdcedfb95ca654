//! Several kernels in one. Each is by default the composition of its parts, which is also its meaning.

use crate::{Act, ActivationKernels, ElementwiseKernels, Gemm, GemmKernels};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, shape_error};

/// `h = x·wᵀ (+ bias)`, `y = act(h)`; `x [rows, k]`, `w [n, k]`, `bias [n]`, `h`, `y` `[rows, n]`.
#[derive(Clone, Copy)]
pub struct LinearAct<'a> {
    /// The non-linearity, plain.
    pub act: Act,
    /// `[rows, k]`
    pub x: &'a Tensor,
    /// `[n, k]`
    pub w: &'a Tensor,
    /// `[n]`
    pub bias: Option<&'a Tensor>,
    /// Input of the non-linearity, `[rows, n]`, contiguous. It may be rounded after the non-linearity has seen it.
    pub h: &'a Tensor,
    /// `[rows, n]`, contiguous.
    pub y: &'a Tensor,
}

/// `dh = (dy·w)·act'(h)`, the way back through a linear map and the non-linearity before it; `dy [rows, k]`,
/// `w [k, n]`, `h`, `dh` `[rows, n]`.
#[derive(Clone, Copy)]
pub struct LinearActBackward<'a> {
    /// The non-linearity, plain.
    pub act: Act,
    /// `[rows, k]`
    pub dy: &'a Tensor,
    /// `[k, n]`
    pub w: &'a Tensor,
    /// Input of the non-linearity, `[rows, n]`, contiguous.
    pub h: &'a Tensor,
    /// `[rows, n]`, contiguous.
    pub dh: &'a Tensor,
    /// f32 `[parts, n]`: gets parts of the column sums of `dh`, see [`FusedKernels::act_backward_dbias`].
    pub sums: Option<&'a Tensor>,
}

/// `dw (+)= dyᵀ·x`, `db (+)= Σ_r dy[r]`; `dy [rows, n]`, `x [rows, k]`, `dw` f32 `[n, k]`, `db` f32 `[n]`.
#[derive(Clone, Copy)]
pub struct LinearWgrad<'a> {
    /// `[rows, n]`
    pub dy: &'a Tensor,
    /// `[rows, k]`
    pub x: &'a Tensor,
    /// `[n, k]`, and whether to add to what it holds.
    pub dw: (&'a Tensor, bool),
    /// `[n]`, and whether to add to what it holds.
    pub db: (&'a Tensor, bool),
}

impl<'a> LinearAct<'a> {
    /// The product, into `c`.
    pub(crate) fn product(&self, c: &'a Tensor) -> Gemm<'a> {
        Gemm { a: self.x, trans_a: false, b: self.w, trans_b: true, bias: self.bias, accumulate: false, c }
    }
}

impl<'a> LinearActBackward<'a> {
    /// The product, into `c`.
    pub(crate) fn product(&self, c: &'a Tensor) -> Gemm<'a> {
        Gemm { a: self.dy, trans_a: false, b: self.w, trans_b: false, bias: None, accumulate: false, c }
    }
}

impl<'a> LinearWgrad<'a> {
    /// The product, into `c`.
    pub(crate) fn product(&self, c: &'a Tensor) -> Gemm<'a> {
        let accumulate = self.dw.1;
        Gemm { a: self.dy, trans_a: true, b: self.x, trans_b: false, bias: None, accumulate, c }
    }
}

/// Shape `[rows, n]` of `x` if `sums` are so many parts of its column sums, without gaps.
pub(crate) fn check_parts(
    op: &'static str,
    x: &Tensor,
    sums: &Tensor,
    parts: impl FnOnce(usize, usize) -> usize,
) -> Result<[usize; 2]> {
    match x.shape() {
        [rows, n] if sums.shape() == [parts(*rows, *n), *n] && sums.is_contiguous() => Ok([*rows, *n]),
        _ => shape_error(op, format!("{x:?} has no column sums in {sums:?}; ask how many parts there are")),
    }
}

/// Fused kernels.
pub trait FusedKernels: GemmKernels + ActivationKernels + ElementwiseKernels {
    /// See [`LinearAct`].
    fn linear_act_forward(&self, s: &Stream, f: &LinearAct) -> Result<()> {
        self.gemm(s, &f.product(f.h))?;
        self.act_forward(s, f.act, false, f.h, f.y)
    }

    /// See [`LinearActBackward`].
    fn linear_act_backward(&self, s: &Stream, f: &LinearActBackward) -> Result<()> {
        let dy = Tensor::empty(s, f.h.shape(), f.h.dtype(), Category::Activations)?;
        self.gemm(s, &f.product(&dy))?;
        match f.sums {
            Some(sums) => self.act_backward_dbias(s, f.act, f.h, &dy, f.dh, sums),
            None => self.act_backward(s, f.act, false, f.h, &dy, f.dh),
        }
    }

    /// Parts of the sums that [`FusedKernels::act_backward_dbias`] leaves; they depend on the shape only.
    fn act_partials(&self, _dtype: DType, _rows: usize, _n: usize) -> usize {
        1
    }

    /// [`ActivationKernels::act_backward`] of a plain non-linearity of `x [rows, n]`; and `sums`, f32 `[parts, n]`, get
    /// the column sums of `dx` as it is stored, each of some rows.
    fn act_backward_dbias(
        &self,
        s: &Stream,
        act: Act,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        sums: &Tensor,
    ) -> Result<()> {
        let [_, n] = check_parts("act_backward", x, sums, |_, _| 1)?;
        self.act_backward(s, act, false, x, dy, dx)?;
        self.column_sum(s, dx, false, &sums.view(&[n])?)
    }

    /// See [`LinearWgrad`].
    fn linear_wgrad(&self, s: &Stream, f: &LinearWgrad) -> Result<()> {
        self.gemm(s, &f.product(f.dw.0))?;
        self.column_sum(s, f.dy, f.db.1, f.db.0)
    }
}
