//! Cross-entropy over rows of logits, on the whole vocabulary or a shard of it. Arithmetic is in f32.
//!
//! With target weights `on` at the label and `off` everywhere (see [`LabelSmoothing`]):
//! `loss = lse − on·x_label − off·Σx`, `dlogits = (softmax − off − on·1[label])·w` with a weight per row.

use super::CpuContext;
use super::math::{Baseline, Fma, LANES, exp, fold, multiversion_fma};
use super::rows::{Rows, check_len};
use super::vocab::{Id, Shard, check_ids};
use crate::LabelSmoothing;
use ferrotron_tensor::{Float, Result, Threads};

/// Softmax statistics of a row, or of a rank's columns of it; they combine by [`RowStats::merge`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowStats {
    /// Largest logit.
    pub max: f32,
    /// `Σ exp(x − max)`
    pub sum_exp: f32,
    /// Logit of the label; 0 where another rank holds it.
    pub label: f32,
    /// `Σ x`, for label smoothing.
    pub sum: f32,
}

impl RowStats {
    /// Statistics of no columns.
    pub const EMPTY: RowStats = RowStats { max: f32::NEG_INFINITY, sum_exp: 0.0, label: 0.0, sum: 0.0 };

    /// Statistics of the columns of both.
    pub fn merge(self, other: RowStats) -> RowStats {
        let max = if self.max > other.max { self.max } else { other.max };
        let part =
            |s: RowStats| if s.sum_exp == 0.0 { 0.0 } else { s.sum_exp * exp::<Baseline>(s.max - max) };
        RowStats {
            max,
            sum_exp: part(self) + part(other),
            label: self.label + other.label,
            sum: self.sum + other.sum,
        }
    }

    /// As a row of a statistics tensor.
    pub fn to_array(self) -> [f32; 4] {
        [self.max, self.sum_exp, self.label, self.sum]
    }

    /// From a row of a statistics tensor.
    pub fn from_array([max, sum_exp, label, sum]: [f32; 4]) -> RowStats {
        RowStats { max, sum_exp, label, sum }
    }

    /// `log Σ eˣ`
    pub fn lse(self) -> f32 {
        self.max + libm::logf(self.sum_exp)
    }

    /// Loss, from statistics over the whole vocabulary.
    pub fn loss(self, smoothing: LabelSmoothing, vocab: usize) -> f32 {
        let log_sum = libm::logf(self.sum_exp);
        let plain = log_sum - (self.label - self.max);
        let share = Target::new(smoothing, vocab).spread;
        if share == 0.0 {
            return plain;
        }
        (1.0 - share) * plain + share * (log_sum - (self.sum / vocab as f32 - self.max))
    }
}

/// `target = (1 − spread)·onehot + spread/V`
#[derive(Clone, Copy)]
struct Target {
    spread: f32,
    off: f32,
}

impl Target {
    fn new(smoothing: LabelSmoothing, vocab: usize) -> Target {
        let (spread, off) = smoothing.target(vocab);
        Target { spread, off }
    }
}

/// Labels of rows of logits, and how they enter the loss.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'a, I> {
    /// `[rows]`: ids in the whole vocabulary, or `ignore`.
    pub ids: &'a [I],
    /// Rows with this label have loss and gradient 0.
    pub ignore: i64,
    /// Label smoothing.
    pub smoothing: LabelSmoothing,
    /// Vocabulary shard of the logits' columns; columns from `shard.len` on are padding.
    pub shard: Shard,
}

impl<I: Id> Labels<'_, I> {
    fn check(&self, threads: &Threads, op: &'static str, rows: &Rows, len: usize) -> Result<()> {
        rows.check(op, "logits", len)?;
        self.shard.check(op)?;
        check_len(op, "labels", self.ids.len(), rows.count())?;
        if self.shard.len > rows.width {
            check_len(op, "logits row", rows.width, self.shard.len)?;
        }
        check_ids(threads, op, self.ids, self.shard.total, Some(self.ignore))
    }
}

/// Statistics of each row over this shard, or of no columns where it is ignored. Merged over ranks, they give
/// [`RowStats::loss`] and [`cross_entropy_backward`].
pub fn row_stats<T: Float, I: Id>(
    cpu: CpuContext,
    logits: &[T],
    rows: Rows,
    labels: Labels<'_, I>,
    stats: &mut [RowStats],
) -> Result<()> {
    stats_of(cpu, logits, rows, labels, true, stats)
}

fn stats_of<T: Float, I: Id>(
    cpu: CpuContext,
    logits: &[T],
    rows: Rows,
    labels: Labels<'_, I>,
    with_sum: bool,
    stats: &mut [RowStats],
) -> Result<()> {
    labels.check(cpu.threads, "row_stats", &rows, logits.len())?;
    check_len("row_stats", "stats", stats.len(), rows.count())?;
    // Rows without columns are in no chunk.
    stats.fill(RowStats::EMPTY);
    let grain = rows.grain();
    let per = grain * rows.inner;
    let mut pieces: Vec<_> =
        rows.cut(logits, grain).zip(labels.ids.chunks(per)).zip(stats.chunks_mut(per)).collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, pieces| {
        for ((x, ids), stats) in pieces {
            stats_rows(cpu.isa, x, rows, Labels { ids, ..labels }, with_sum, stats);
        }
    });
    Ok(())
}

/// Loss and log-sum-exp of each row over the whole vocabulary, f32 `[rows]`, both 0 where ignored.
pub fn cross_entropy<T: Float, I: Id>(
    cpu: CpuContext,
    logits: &[T],
    rows: Rows,
    labels: Labels<'_, I>,
    loss: &mut [f32],
    lse: &mut [f32],
) -> Result<()> {
    check_len("cross_entropy", "loss", loss.len(), rows.count())?;
    check_len("cross_entropy", "lse", lse.len(), rows.count())?;
    check_len("cross_entropy", "vocabulary", labels.shard.len, labels.shard.total)?;
    let mut stats = vec![RowStats::EMPTY; rows.count()];
    let with_sum = labels.smoothing != LabelSmoothing::None;
    stats_of(cpu, logits, rows, labels, with_sum, &mut stats)?;
    for (((loss, lse), stats), id) in loss.iter_mut().zip(lse).zip(stats).zip(labels.ids) {
        let counts = (*id).into() != labels.ignore;
        *loss = if counts { stats.loss(labels.smoothing, labels.shard.total) } else { 0.0 };
        *lse = if counts { stats.lse() } else { 0.0 };
    }
    Ok(())
}

/// Loss of each row; the logits are overwritten by its gradient times `weights` `[rows]`, rounded once.
pub fn cross_entropy_with_gradient<T: Float, I: Id>(
    cpu: CpuContext,
    logits: &mut [T],
    rows: Rows,
    labels: Labels<'_, I>,
    weights: &[f32],
    loss: &mut [f32],
) -> Result<()> {
    const OP: &str = "cross_entropy_with_gradient";
    labels.check(cpu.threads, OP, &rows, logits.len())?;
    check_len(OP, "weights", weights.len(), rows.count())?;
    check_len(OP, "loss", loss.len(), rows.count())?;
    check_len(OP, "vocabulary", labels.shard.len, labels.shard.total)?;
    let grain = rows.grain();
    let per = grain * rows.inner;
    let mut pieces: Vec<_> = rows
        .cut_mut(logits, grain)
        .zip(labels.ids.chunks(per).zip(weights.chunks(per)))
        .zip(loss.chunks_mut(per))
        .collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, pieces| {
        for ((x, (ids, weights)), loss) in pieces {
            fused_rows(cpu.isa, x, rows, Labels { ids, ..labels }, weights, loss);
        }
    });
    Ok(())
}

/// Overwrites the logits by their gradient, from statistics over the whole vocabulary and the gradient `dloss` of each row's
/// loss, both `[rows]`; zeros in padding columns.
pub fn cross_entropy_backward<T: Float, I: Id>(
    cpu: CpuContext,
    logits: &mut [T],
    rows: Rows,
    labels: Labels<'_, I>,
    stats: &[RowStats],
    dloss: &[f32],
) -> Result<()> {
    const OP: &str = "cross_entropy_backward";
    labels.check(cpu.threads, OP, &rows, logits.len())?;
    check_len(OP, "stats", stats.len(), rows.count())?;
    check_len(OP, "dloss", dloss.len(), rows.count())?;
    let grain = rows.grain();
    let per = grain * rows.inner;
    let mut pieces: Vec<_> = rows
        .cut_mut(logits, grain)
        .zip(labels.ids.chunks(per))
        .zip(stats.chunks(per).zip(dloss.chunks(per)))
        .collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, pieces| {
        for ((x, ids), (stats, dloss)) in pieces {
            backward_rows(cpu.isa, x, rows, Labels { ids, ..labels }, stats, dloss);
        }
    });
    Ok(())
}

multiversion_fma! {
    fn stats_rows<F: Fma, T: Float, I: Id>(
        x: &[T], rows: Rows, labels: Labels<'_, I>, with_sum: bool, stats: &mut [RowStats],
    ) {
        for (i, (id, stats)) in labels.ids.iter().zip(stats).enumerate() {
            let id = (*id).into();
            *stats = if id == labels.ignore {
                RowStats::EMPTY
            } else {
                let columns = &rows.row(x, i)[..labels.shard.len];
                stats_row::<F, T>(columns, labels.shard.local(id), with_sum)
            };
        }
    }
}

multiversion_fma! {
    fn fused_rows<F: Fma, T: Float, I: Id>(
        x: &mut [T], rows: Rows, labels: Labels<'_, I>, weights: &[f32], loss: &mut [f32],
    ) {
        let Labels { ids, ignore, smoothing, shard } = labels;
        let target = Target::new(smoothing, shard.total);
        for (i, ((id, w), loss)) in ids.iter().zip(weights).zip(loss).enumerate() {
            let (id, row) = ((*id).into(), rows.row_mut(x, i));
            if id == ignore {
                *loss = 0.0;
                row.fill(T::from_f32(0.0));
                continue;
            }
            let (row, padding) = row.split_at_mut(shard.len);
            let label = shard.local(id);
            let stats = stats_row::<F, T>(row, label, smoothing != LabelSmoothing::None);
            *loss = stats.loss(smoothing, shard.total);
            gradient_row::<F, T>(row, label, target, stats.max, 1.0 / stats.sum_exp, *w);
            padding.fill(T::from_f32(0.0));
        }
    }
}

multiversion_fma! {
    fn backward_rows<F: Fma, T: Float, I: Id>(
        x: &mut [T], rows: Rows, labels: Labels<'_, I>, stats: &[RowStats], dloss: &[f32],
    ) {
        let Labels { ids, ignore, smoothing, shard } = labels;
        let target = Target::new(smoothing, shard.total);
        for (i, (id, (stats, w))) in ids.iter().zip(stats.iter().zip(dloss)).enumerate() {
            let (id, row) = ((*id).into(), rows.row_mut(x, i));
            if id == ignore {
                row.fill(T::from_f32(0.0));
                continue;
            }
            let (row, padding) = row.split_at_mut(shard.len);
            gradient_row::<F, T>(row, shard.local(id), target, stats.max, 1.0 / stats.sum_exp, *w);
            padding.fill(T::from_f32(0.0));
        }
    }
}

/// Columns summed in f32 before the sum continues in f64, which keeps sums over large vocabularies accurate.
const BLOCK: usize = 4096;

#[inline(always)]
fn stats_row<F: Fma, T: Float>(x: &[T], label: Option<usize>, with_sum: bool) -> RowStats {
    let mut maxima = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for (m, x) in maxima.iter_mut().zip(block) {
            let x = x.to_f32();
            *m = if x > *m { x } else { *m };
        }
    }
    for (m, x) in maxima.iter_mut().zip(rest) {
        let x = x.to_f32();
        *m = if x > *m { x } else { *m };
    }
    let max = maxima.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
    // −∞ − (−∞) would be NaN, although another rank may hold finite logits.
    let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let (mut sum_exp, mut sum) = (0f64, 0f64);
    for part in x.chunks(BLOCK) {
        let (mut exps, mut sums) = ([0.0; LANES], [0.0; LANES]);
        let (blocks, rest) = part.as_chunks::<LANES>();
        for block in blocks {
            for (lane, x) in exps.iter_mut().zip(block) {
                *lane += exp::<F>(x.to_f32() - shift);
            }
        }
        for (lane, x) in exps.iter_mut().zip(rest) {
            *lane += exp::<F>(x.to_f32() - shift);
        }
        sum_exp += f64::from(fold(exps));
        if with_sum {
            for block in blocks {
                for (lane, x) in sums.iter_mut().zip(block) {
                    *lane += x.to_f32();
                }
            }
            for (lane, x) in sums.iter_mut().zip(rest) {
                *lane += x.to_f32();
            }
            sum += f64::from(fold(sums));
        }
    }
    let label = label.map_or(0.0, |at| x[at].to_f32());
    RowStats { max, sum_exp: sum_exp as f32, label, sum: sum as f32 }
}

/// `x ← (factor·exp(x − shift) − off − on·1[label])·w`
#[inline(always)]
fn gradient_row<F: Fma, T: Float>(
    x: &mut [T],
    label: Option<usize>,
    target: Target,
    shift: f32,
    factor: f32,
    w: f32,
) {
    let at_label = label.map(|at| {
        let p = factor * exp::<F>(x[at].to_f32() - shift);
        (at, T::from_f32((p - target.off - (1.0 - target.spread)) * w))
    });
    for x in x.iter_mut() {
        *x = T::from_f32((factor * exp::<F>(x.to_f32() - shift) - target.off) * w);
    }
    if let Some((at, gradient)) = at_label {
        x[at] = gradient;
    }
}
