//! LayerNorm and RMSNorm forward, plain and fused with a residual addition. Arithmetic is in f32.
//!
//! LayerNorm: `y = (x − µ)·r·g + b`, `r = 1/√(var + eps)`; RMSNorm: `y = x·r·g`, `r = 1/√(mean(x²) + eps)`.
//! The gain `g` is γ, or `1 + γ` for zero-centered gamma.

use super::math::{LANES, fold};
use super::rows::{Rows, check_len};
use super::{CpuContext, multiversion};
use ferrotron_tensor::{Float, Result};

/// Affine part of a norm; weights are `[width]`.
#[derive(Clone, Copy, Debug)]
pub struct Affine<'a, W> {
    /// γ
    pub gamma: &'a [W],
    /// β, LayerNorm only.
    pub beta: Option<&'a [W]>,
    /// Added to the variance.
    pub eps: f32,
    /// The gain is `1 + γ`.
    pub zero_centred: bool,
}

impl<W: Float> Affine<'_, W> {
    /// The norm of a row. Weights are converted to f32 once for all rows, and the 1 is added in f32.
    fn row_norm(&self, kind: NormKind) -> RowNorm {
        let bias = self.beta.unwrap_or_default().iter().map(|b| b.to_f32()).collect();
        RowNorm { kind, gain: gain(self.gamma, self.zero_centred), bias, eps: self.eps }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NormKind {
    LayerNorm,
    RmsNorm,
}

/// Norm of a row, with weights in f32; `bias` is empty where there is none.
struct RowNorm {
    kind: NormKind,
    gain: Vec<f32>,
    bias: Vec<f32>,
    eps: f32,
}

/// Statistics of rows that the backward pass needs, f32 `[rows]`; `mean` is empty for RMSNorm.
struct Stats<'a> {
    mean: &'a mut [f32],
    rstd: &'a mut [f32],
}

impl Stats<'_> {
    #[inline(always)]
    fn store(&mut self, row: usize, (mean, rstd): (f32, f32)) {
        self.rstd[row] = rstd;
        if let Some(to) = self.mean.get_mut(row) {
            *to = mean;
        }
    }
}

/// Gain of the normalized row.
pub(super) fn gain<W: Float>(gamma: &[W], zero_centred: bool) -> Vec<f32> {
    let one = if zero_centred { 1.0 } else { 0.0 };
    gamma.iter().map(|g| g.to_f32() + one).collect()
}

/// Input and output rows, whose strides may differ.
#[derive(Debug)]
pub struct InOut<'a, T> {
    /// Input.
    pub x: &'a [T],
    /// Rows of `x`.
    pub x_rows: Rows,
    /// Output.
    pub y: &'a mut [T],
    /// Rows of `y`.
    pub y_rows: Rows,
}

impl<'a, T> InOut<'a, T> {
    /// Contiguous `[rows, width]` input and output.
    pub fn dense(x: &'a [T], y: &'a mut [T], rows: usize, width: usize) -> InOut<'a, T> {
        let dense = Rows::dense(rows, width);
        InOut { x, x_rows: dense, y, y_rows: dense }
    }
}

/// LayerNorm of every row; `mean` and `rstd` are f32 `[rows]`, saved for the backward pass.
pub fn layer_norm<T: Float, W: Float>(
    cpu: CpuContext,
    io: InOut<'_, T>,
    affine: Affine<'_, W>,
    mean: &mut [f32],
    rstd: &mut [f32],
) -> Result<()> {
    check_len("layer_norm", "mean", mean.len(), io.x_rows.count())?;
    run("layer_norm", cpu, NormKind::LayerNorm, io, affine, Stats { mean, rstd })
}

/// RMSNorm of every row; `rstd` is f32 `[rows]`, saved for the backward pass.
pub fn rms_norm<T: Float, W: Float>(
    cpu: CpuContext,
    io: InOut<'_, T>,
    affine: Affine<'_, W>,
    rstd: &mut [f32],
) -> Result<()> {
    check_len("rms_norm", "beta", affine.beta.map_or(0, <[W]>::len), 0)?;
    run("rms_norm", cpu, NormKind::RmsNorm, io, affine, Stats { mean: &mut [], rstd })
}

fn run<T: Float, W: Float>(
    op: &'static str,
    cpu: CpuContext,
    kind: NormKind,
    io: InOut<'_, T>,
    affine: Affine<'_, W>,
    stats: Stats<'_>,
) -> Result<()> {
    let InOut { x, x_rows, y, y_rows } = io;
    let Stats { mean, rstd } = stats;
    x_rows.check(op, "x", x.len())?;
    y_rows.check_like(op, "y", y.len(), &x_rows)?;
    check_affine(op, &affine, x_rows.width)?;
    check_len(op, "rstd", rstd.len(), x_rows.count())?;
    if x_rows.elements() == 0 {
        return Ok(());
    }
    let norm = affine.row_norm(kind);
    let grain = x_rows.grain();
    let rows = grain * x_rows.inner;
    let mut means = mean.chunks_mut(rows);
    let mut pieces: Vec<_> = x_rows
        .cut(x, grain)
        .zip(y_rows.cut_mut(y, grain))
        .zip(rstd.chunks_mut(rows))
        .map(|((x, y), rstd)| {
            (InOut { x, x_rows, y, y_rows }, Stats { mean: means.next().unwrap_or_default(), rstd })
        })
        .collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, piece| {
        for (io, stats) in piece {
            norm_rows(cpu.isa, &norm, io, stats);
        }
    });
    Ok(())
}

fn check_affine<W>(op: &'static str, affine: &Affine<'_, W>, width: usize) -> Result<()> {
    check_len(op, "gamma", affine.gamma.len(), width)?;
    affine.beta.map_or(Ok(()), |b| check_len(op, "beta", b.len(), width))
}

/// Operands of the fused residual addition and norm, all `[rows, width]` and contiguous.
#[derive(Debug)]
pub struct AddNorm<'a, T> {
    /// Output of the block.
    pub x: &'a [T],
    /// Residual stream before the block.
    pub residual: &'a [T],
    /// Output: `x + residual`, rounded to the element type.
    pub sum: &'a mut [T],
    /// Output: the norm of that rounded sum.
    pub y: &'a mut [T],
}

/// `sum = x + residual`, `y = layer_norm(sum)` in one pass, with the same bits as the two kernels in sequence.
pub fn add_layer_norm<T: Float, W: Float>(
    cpu: CpuContext,
    io: AddNorm<'_, T>,
    affine: Affine<'_, W>,
    mean: &mut [f32],
    rstd: &mut [f32],
) -> Result<()> {
    check_len("add_layer_norm", "mean", mean.len(), rstd.len())?;
    run_add("add_layer_norm", cpu, NormKind::LayerNorm, io, affine, Stats { mean, rstd })
}

/// `sum = x + residual`, `y = rms_norm(sum)` in one pass, with the same bits as the two kernels in sequence.
pub fn add_rms_norm<T: Float, W: Float>(
    cpu: CpuContext,
    io: AddNorm<'_, T>,
    affine: Affine<'_, W>,
    rstd: &mut [f32],
) -> Result<()> {
    check_len("add_rms_norm", "beta", affine.beta.map_or(0, <[W]>::len), 0)?;
    run_add("add_rms_norm", cpu, NormKind::RmsNorm, io, affine, Stats { mean: &mut [], rstd })
}

fn run_add<T: Float, W: Float>(
    op: &'static str,
    cpu: CpuContext,
    kind: NormKind,
    io: AddNorm<'_, T>,
    affine: Affine<'_, W>,
    stats: Stats<'_>,
) -> Result<()> {
    let AddNorm { x, residual, sum, y } = io;
    let Stats { mean, rstd } = stats;
    let all = Rows::dense(rstd.len(), affine.gamma.len());
    for (name, len) in [("x", x.len()), ("residual", residual.len()), ("sum", sum.len()), ("y", y.len())] {
        check_len(op, name, len, all.elements())?;
    }
    check_affine(op, &affine, all.width)?;
    if all.elements() == 0 {
        return Ok(());
    }
    let norm = affine.row_norm(kind);
    let rows = all.grain();
    let mut means = mean.chunks_mut(rows);
    let mut pieces: Vec<_> = (all.cut(x, rows).zip(all.cut(residual, rows)))
        .zip(all.cut_mut(sum, rows).zip(all.cut_mut(y, rows)))
        .zip(rstd.chunks_mut(rows))
        .map(|(((x, residual), (sum, y)), rstd)| {
            (AddNorm { x, residual, sum, y }, Stats { mean: means.next().unwrap_or_default(), rstd })
        })
        .collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, piece| {
        for (io, stats) in piece {
            add_norm_rows(cpu.isa, &norm, io, stats);
        }
    });
    Ok(())
}

multiversion! {
    fn norm_rows<T: Float>(norm: &RowNorm, io: &mut InOut<'_, T>, stats: &mut Stats<'_>) {
        for i in 0..stats.rstd.len() {
            stats.store(i, norm_row(norm, io.x_rows.row(io.x, i), io.y_rows.row_mut(io.y, i)));
        }
    }
}

multiversion! {
    fn add_norm_rows<T: Float>(norm: &RowNorm, io: &mut AddNorm<'_, T>, stats: &mut Stats<'_>) {
        let rows = Rows::dense(stats.rstd.len(), norm.gain.len());
        for i in 0..stats.rstd.len() {
            let sum = rows.row_mut(io.sum, i);
            for ((s, x), r) in sum.iter_mut().zip(rows.row(io.x, i)).zip(rows.row(io.residual, i)) {
                *s = T::from_f32(x.to_f32() + r.to_f32());
            }
            stats.store(i, norm_row(norm, sum, rows.row_mut(io.y, i)));
        }
    }
}

/// Normalizes one row; returns its mean (0 for RMSNorm) and reciprocal standard deviation.
#[inline(always)]
fn norm_row<T: Float>(norm: &RowNorm, x: &[T], y: &mut [T]) -> (f32, f32) {
    let width = x.len() as f32;
    let mean = if norm.kind == NormKind::LayerNorm { sum(x) / width } else { 0.0 };
    let r = 1.0 / (sum_squares(x, mean) / width + norm.eps).sqrt();
    if norm.bias.is_empty() {
        for ((y, x), g) in y.iter_mut().zip(x).zip(&norm.gain) {
            *y = T::from_f32((x.to_f32() - mean) * r * g);
        }
    } else {
        for (((y, x), g), b) in y.iter_mut().zip(x).zip(&norm.gain).zip(&norm.bias) {
            *y = T::from_f32((x.to_f32() - mean) * r * g + b);
        }
    }
    (mean, r)
}

/// Columns summed per lane before the lanes are added up, which keeps sums over wide rows accurate.
const BLOCK: usize = 4096;

#[inline(always)]
fn sum<T: Float>(x: &[T]) -> f32 {
    let mut total = 0.0;
    for part in x.chunks(BLOCK) {
        let mut lanes = [0.0; LANES];
        let (blocks, rest) = part.as_chunks::<LANES>();
        for block in blocks {
            for (lane, x) in lanes.iter_mut().zip(block) {
                *lane += x.to_f32();
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += x.to_f32();
        }
        total += fold(lanes);
    }
    total
}

#[inline(always)]
fn sum_squares<T: Float>(x: &[T], mean: f32) -> f32 {
    let mut total = 0.0;
    for part in x.chunks(BLOCK) {
        let mut lanes = [0.0; LANES];
        let (blocks, rest) = part.as_chunks::<LANES>();
        for block in blocks {
            for (lane, x) in lanes.iter_mut().zip(block) {
                let d = x.to_f32() - mean;
                *lane += d * d;
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            let d = x.to_f32() - mean;
            *lane += d * d;
        }
        total += fold(lanes);
    }
    total
}
