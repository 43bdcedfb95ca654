//! LayerNorm and RMSNorm, backward.
//!
//! With `ŷ = (x − µ)·r` (µ = 0 for RMSNorm) and `d = dy·g`:
//! `dx = r·(d − [mean(d)] − ŷ·mean(d·ŷ)) (+ residual gradient)`, the bracket for LayerNorm only;
//! `dγ = Σ dy·ŷ`, `dβ = Σ dy` over rows: first within fixed chunks of rows, then over chunks in order.

use super::math::{LANES, fold};
use super::norm::gain;
use super::reduce::{part_grain, sum_parts};
use super::rows::{Rows, check_len};
use super::{CpuContext, multiversion};
use ferrotron_tensor::{Float, Result, shape_error};

/// Saved tensors of the forward pass, the output gradient, and the gradients to write.
#[derive(Debug)]
pub struct NormGrad<'a, T, W> {
    /// Input of the forward pass.
    pub x: &'a [T],
    /// Its rows.
    pub x_rows: Rows,
    /// LayerNorm: `[rows]`, RMSNorm: none.
    pub mean: Option<&'a [f32]>,
    /// `[rows]`
    pub rstd: &'a [f32],
    /// γ `[width]`
    pub gamma: &'a [W],
    /// The gain was `1 + γ`.
    pub zero_centred: bool,
    /// Gradient of the output, laid out by its rows. None: `dx` holds it and is overwritten.
    pub dy: Option<(&'a [T], Rows)>,
    /// Added to the input gradient, laid out like `dx`: the gradient that went around the block.
    pub residual: Option<&'a [T]>,
    /// Written: gradient of the input.
    pub dx: &'a mut [T],
    /// Its rows.
    pub dx_rows: Rows,
    /// Written or added to: f32 `[width]`.
    pub dgamma: Option<&'a mut [f32]>,
    /// Written or added to: f32 `[width]`.
    pub dbeta: Option<&'a mut [f32]>,
    /// Add to `dgamma` and `dbeta` instead of overwriting them.
    pub accumulate: bool,
}

/// The gradients of [`rms_norm`](super::norm::rms_norm) (no `mean`) or
/// [`layer_norm`](super::norm::layer_norm) (with it).
pub fn norm_backward<T: Float, W: Float>(cpu: CpuContext, args: NormGrad<'_, T, W>) -> Result<()> {
    const OP: &str = "norm_backward";
    let NormGrad { x, x_rows, mean, rstd, gamma, zero_centred, dy, residual, .. } = args;
    let NormGrad { dx, dx_rows, dgamma, dbeta, accumulate, .. } = args;
    let width = x_rows.width;
    x_rows.check(OP, "x", x.len())?;
    dx_rows.check_like(OP, "dx", dx.len(), &x_rows)?;
    if let Some((dy, rows)) = dy {
        rows.check_like(OP, "dy", dy.len(), &x_rows)?;
    }
    if let Some(residual) = residual {
        dx_rows.check(OP, "residual gradient", residual.len())?;
    }
    check_len(OP, "gamma", gamma.len(), width)?;
    check_len(OP, "rstd", rstd.len(), x_rows.count())?;
    check_len(OP, "mean", mean.map_or(rstd.len(), <[f32]>::len), rstd.len())?;
    for (name, grad) in [("dgamma", &dgamma), ("dbeta", &dbeta)] {
        check_len(OP, name, grad.as_ref().map_or(width, |g| g.len()), width)?;
    }
    if dbeta.is_some() && mean.is_none() {
        return shape_error(OP, "RMSNorm has no bias: give no dbeta");
    }
    let grads = [dgamma, dbeta];
    if x_rows.elements() == 0 {
        for grad in grads.into_iter().flatten().filter(|_| !accumulate) {
            grad.fill(0.0);
        }
        return Ok(());
    }

    let gain = gain(gamma, zero_centred);
    let grain = part_grain(&x_rows);
    let rows = grain * x_rows.inner;
    let count = x_rows.outer.div_ceil(grain);
    let [want_gamma, want_beta] = [grads[0].is_some(), grads[1].is_some()];
    let mut gamma_parts = vec![0f32; if want_gamma { count * width } else { 0 }];
    let mut beta_parts = vec![0f32; if want_beta { count * width } else { 0 }];
    let mut means = mean.unwrap_or_default().chunks(rows);
    let mut dys = dy.map(|(dy, view)| (view.cut(dy, grain), view));
    let mut residuals = residual.map(|r| dx_rows.cut(r, grain));
    let mut gammas = gamma_parts.chunks_mut(width);
    let mut betas = beta_parts.chunks_mut(width);
    let mut pieces: Vec<_> = x_rows
        .cut(x, grain)
        .zip(dx_rows.cut_mut(dx, grain))
        .zip(rstd.chunks(rows))
        .map(|((x, dx), rstd)| GradChunk {
            x,
            mean: means.next().unwrap_or_default(),
            rstd,
            dy: dys.as_mut().and_then(|(cut, view)| Some((cut.next()?, *view))),
            residual: residuals.as_mut().and_then(Iterator::next),
            dx,
            dgamma: gammas.next().unwrap_or_default(),
            dbeta: betas.next().unwrap_or_default(),
        })
        .collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, pieces| {
        let mut scratch = vec![0f32; width];
        for piece in pieces {
            backward_rows(cpu.isa, piece, x_rows, dx_rows, &gain, &mut scratch);
        }
    });
    drop(pieces);
    for (grad, parts) in grads.into_iter().zip([gamma_parts, beta_parts]) {
        if let Some(grad) = grad {
            sum_parts(cpu, &parts, grad, accumulate);
        }
    }
    Ok(())
}

struct GradChunk<'a, T> {
    x: &'a [T],
    mean: &'a [f32],
    rstd: &'a [f32],
    dy: Option<(&'a [T], Rows)>,
    residual: Option<&'a [T]>,
    dx: &'a mut [T],
    dgamma: &'a mut [f32],
    dbeta: &'a mut [f32],
}

multiversion! {
    fn backward_rows<T: Float>(
        piece: &mut GradChunk<'_, T>, x_rows: Rows, dx_rows: Rows, gain: &[f32], scratch: &mut [f32],
    ) {
        let width = x_rows.width as f32;
        for i in 0..piece.rstd.len() {
            let (x, r) = (x_rows.row(piece.x, i), piece.rstd[i]);
            let centred = !piece.mean.is_empty();
            let mean = if centred { piece.mean[i] } else { 0.0 };
            let dx = dx_rows.row_mut(piece.dx, i);
            // dy is copied out first because it may live in dx.
            let dy = match piece.dy {
                Some((dy, rows)) => rows.row(dy, i),
                None => &*dx,
            };
            for (s, dy) in scratch.iter_mut().zip(dy) {
                *s = dy.to_f32();
            }
            for ((acc, dy), x) in piece.dgamma.iter_mut().zip(&*scratch).zip(x) {
                *acc += dy * ((x.to_f32() - mean) * r);
            }
            for (acc, dy) in piece.dbeta.iter_mut().zip(&*scratch) {
                *acc += dy;
            }
            for (s, g) in scratch.iter_mut().zip(gain) {
                *s *= g;
            }
            let (total, along) = sums(scratch, x, mean, r);
            let (total, along) = (if centred { total / width } else { 0.0 }, along / width);
            match piece.residual {
                Some(residual) => {
                    let residual = dx_rows.row(residual, i);
                    for (((dx, d), x), res) in dx.iter_mut().zip(&*scratch).zip(x).zip(residual) {
                        let hat = (x.to_f32() - mean) * r;
                        *dx = T::from_f32(r * (d - total - hat * along) + res.to_f32());
                    }
                }
                None => {
                    for ((dx, d), x) in dx.iter_mut().zip(&*scratch).zip(x) {
                        let hat = (x.to_f32() - mean) * r;
                        *dx = T::from_f32(r * (d - total - hat * along));
                    }
                }
            }
        }
    }
}

/// `Σ d` and `Σ d·ŷ` of one row.
#[inline(always)]
fn sums<T: Float>(d: &[f32], x: &[T], mean: f32, r: f32) -> (f32, f32) {
    let (mut totals, mut alongs) = ([0.0; LANES], [0.0; LANES]);
    let ((d_blocks, d_rest), (x_blocks, x_rest)) = (d.as_chunks::<LANES>(), x.as_chunks::<LANES>());
    for (d, x) in d_blocks.iter().zip(x_blocks) {
        for l in 0..LANES {
            totals[l] += d[l];
            alongs[l] += d[l] * ((x[l].to_f32() - mean) * r);
        }
    }
    for (l, (d, x)) in d_rest.iter().zip(x_rest).enumerate() {
        totals[l] += d;
        alongs[l] += d * ((x.to_f32() - mean) * r);
    }
    (fold(totals), fold(alongs))
}
