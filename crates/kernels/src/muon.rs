//! Muon: momentum, adaptive scaling of the orthogonalized update, and the step. [`crate::newton_schulz`] orthogonalizes.

use crate::checks::{dtypes, same_contiguous};
use crate::optimizer::check_total;
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};

/// Momentum of Muon: `buf = µ·buf + (1−µ)·g`, with `g` the clipped gradient; the update is `buf`, or with nesterov
/// `(1−µ)·g + µ·buf`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonMomentum {
    /// µ
    pub momentum: f32,
    /// Nesterov momentum.
    pub nesterov: bool,
}

/// Momentum of one parameter. All tensors are contiguous and of equal size.
pub struct MomentumUpdate<'a> {
    /// f32 gradient.
    pub grad: &'a Tensor,
    /// f32 or bf16 momentum.
    pub momentum: &'a Tensor,
    /// f32 master weight, whose decay `wd·p` is added to the gradient (L2 regularization); none with other decay.
    pub l2: Option<&'a Tensor>,
    /// Factor on the weight decay.
    pub wd_mult: f32,
    /// f32: the update, to be orthogonalized.
    pub update: &'a Tensor,
}

/// Where weight decay enters a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDecay {
    /// `p *= 1 − lr·wd` before the update.
    Decoupled,
    /// `p *= 1 − wd` before the update.
    Independent,
    /// Inside the gradient, where the step has none left to apply.
    L2,
}

/// A parameter and its finished update.
pub struct ApplyUpdate<'a> {
    /// f32 master weight, or i16 low halves; see [`crate::ParamUpdate::master`].
    pub master: &'a Tensor,
    /// bf16 or f16 model weight, written in the same pass.
    pub weight: Option<&'a Tensor>,
    /// f32 update.
    pub update: &'a Tensor,
    /// Factor on the learning rate.
    pub lr_mult: f32,
    /// Factor on the weight decay.
    pub wd_mult: f32,
}

/// Constants of adaptive Muon: `v = β2·v + (1−β2)·x`, without bias correction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveScale {
    /// β2
    pub beta2: f32,
    /// Added to the square root, or the least second moment.
    pub eps: f32,
}

/// Kernels of Muon. Where they take the step scalars, a step whose `scalars[GRAD_NORM]` is not finite changes no state.
pub trait MuonKernels {
    /// Updates momenta and writes the updates; see [`MuonMomentum`].
    fn muon_momentum(
        &self,
        s: &Stream,
        m: MuonMomentum,
        scalars: &Tensor,
        list: &[MomentumUpdate],
    ) -> Result<()>;

    /// `p = keep·p − lr·update`, `keep` by [`WeightDecay`].
    fn apply_update(
        &self,
        s: &Stream,
        decay: WeightDecay,
        scalars: &Tensor,
        list: &[ApplyUpdate],
    ) -> Result<()>;

    /// `out = x / max(√square, eps)` with x f32, out f32 or bf16, `square` f64 `[1]`.
    fn normalize(&self, s: &Stream, x: &Tensor, square: &Tensor, eps: f32, out: &Tensor) -> Result<()>;

    /// `x = α·x + β·y` with x f32 or bf16, y f32.
    fn combine(&self, s: &Stream, factors: [f32; 2], x: &Tensor, y: &Tensor) -> Result<()>;

    /// Completes symmetric matrices `x [count, m, m]`, f32 or bf16: rows before `from` take their columns from `from` on from
    /// the columns before `from` of the rows below.
    fn mirror(&self, s: &Stream, x: &Tensor, from: usize) -> Result<()>;

    /// AdaMuon: `v = EMA(o²)`, `o /= √v + ε`; both f32, of equal size.
    fn adamuon(&self, s: &Stream, a: AdaptiveScale, scalars: &Tensor, o: &Tensor, v: &Tensor) -> Result<()>;

    /// NorMuon on `o [rows, cols]` f32: `v = EMA(mean o²)` over columns where rows ≥ cols (`v [rows]`), else over rows
    /// (`v [cols]`); `o *= rsqrt(max(v, ε))`, rescaled to the norm it had.
    fn normuon(&self, s: &Stream, a: AdaptiveScale, scalars: &Tensor, o: &Tensor, v: &Tensor) -> Result<()>;
}

/// Entries of NorMuon's second moment for a matrix: one for each row where rows ≥ cols, else one for each column.
pub fn normuon_lines([rows, cols]: [usize; 2]) -> usize {
    rows.max(cols)
}

/// Checks one momentum.
pub(crate) fn check_momentum(op: &'static str, u: &MomentumUpdate) -> Result<()> {
    same_contiguous(op, &[u.grad, u.momentum, u.update])?;
    dtypes(op, DType::F32, &[u.grad, u.update])?;
    f32_or_bf16(op, u.momentum)?;
    let Some(master) = u.l2 else { return Ok(()) };
    same_contiguous(op, &[u.grad, master])?;
    dtypes(op, DType::F32, &[master])
}

/// Checks one finished update.
pub(crate) fn check_apply(op: &'static str, u: &ApplyUpdate) -> Result<()> {
    let mut all = vec![u.master, u.update];
    all.extend(u.weight);
    same_contiguous(op, &all)?;
    dtypes(op, DType::F32, &[u.update])?;
    let split = u.master.dtype() == DType::I16;
    if !split {
        dtypes(op, DType::F32, &[u.master])?;
    }
    match u.weight {
        Some(w) if w.dtype() == DType::F16 && !split => Ok(()),
        Some(w) => dtypes(op, DType::BF16, &[w]),
        None if split => shape_error(op, "split masters need the bf16 weights, their high halves"),
        None => Ok(()),
    }
}

fn f32_or_bf16(op: &'static str, t: &Tensor) -> Result<()> {
    match t.dtype() {
        DType::F32 | DType::BF16 => Ok(()),
        found => Err(Error::DType { op, found, wanted: DType::F32 }),
    }
}

/// Checks the operands of [`MuonKernels::normalize`].
pub(crate) fn check_normalize(op: &'static str, x: &Tensor, square: &Tensor, out: &Tensor) -> Result<()> {
    check_total(op, square)?;
    same_contiguous(op, &[x, out])?;
    dtypes(op, DType::F32, &[x])?;
    f32_or_bf16(op, out)
}

/// Checks the operands of [`MuonKernels::combine`].
pub(crate) fn check_combine(op: &'static str, x: &Tensor, y: &Tensor) -> Result<()> {
    same_contiguous(op, &[x, y])?;
    dtypes(op, DType::F32, &[y])?;
    f32_or_bf16(op, x)
}

/// Checks the operands of [`MuonKernels::mirror`]; returns the number of matrices and their side.
pub(crate) fn check_mirror(op: &'static str, x: &Tensor, from: usize) -> Result<[usize; 2]> {
    same_contiguous(op, &[x])?;
    f32_or_bf16(op, x)?;
    match *x.shape() {
        [count, rows, cols] if rows == cols && from <= rows => Ok([count, rows]),
        ref shape => shape_error(op, format!("{shape:?} has no symmetric matrices to complete from {from}")),
    }
}

/// Checks the operands of [`MuonKernels::normuon`]; returns rows and columns.
pub(crate) fn check_normuon(op: &'static str, o: &Tensor, v: &Tensor) -> Result<[usize; 2]> {
    same_contiguous(op, &[o])?;
    dtypes(op, DType::F32, &[o, v])?;
    match *o.shape() {
        [rows, cols] if v.shape() == [normuon_lines([rows, cols])] && v.is_contiguous() => Ok([rows, cols]),
        ref shape => shape_error(op, format!("{shape:?} needs one second moment per line, not {v:?}")),
    }
}
