use super::{CpuKernels, floats};
use crate::cpu::router as r;
use crate::router::check;
use crate::{AuxLoss, AuxLossWeights, LoadBalancingKernels, ZLossBackward};
use ferrotron_tensor::{DType, Result, Stream, Tensor, read, write};

impl LoadBalancingKernels for CpuKernels {
    fn aux_loss_stats(&self, s: &Stream, b: &AuxLoss, sums: &Tensor, counts: &Tensor) -> Result<()> {
        const OP: &str = "aux_loss_stats";
        let (z, _) = check::balance(OP, b, sums)?;
        check::statistics(OP, sums, counts)?;
        s.launch(OP, &[read(b.logits), read(b.segments), write(sums), write(counts)], |l| {
            floats!(OP, b.logits.dtype(), T => {
                let (logits, segments) = (l.slice::<T>(0)?, l.slice(1)?);
                let of = r::Statistics { logits, segments, experts: z.experts, k: z.k, score: b.score };
                r::balance(l.threads(), of, l.slice_mut(2)?, l.slice_mut(3)?)
            })
        })
    }

    fn aux_loss_backward(&self, s: &Stream, b: &AuxLoss, weights: &Tensor, dlogits: &Tensor) -> Result<()> {
        const OP: &str = "aux_loss_backward";
        let (z, _) = check::balance(OP, b, weights)?;
        check::exactly(OP, "gradients of logits", dlogits, b.logits.dtype(), b.logits.shape())?;
        s.launch(OP, &[read(b.logits), read(b.segments), read(weights), write(dlogits)], |l| {
            floats!(OP, b.logits.dtype(), T => {
                let (logits, segments) = (l.slice::<T>(0)?, l.slice(1)?);
                let of = r::Statistics { logits, segments, experts: z.experts, k: z.k, score: b.score };
                r::aux_loss_backward(l.threads(), of, l.slice(2)?, l.slice_mut(3)?)
            })
        })
    }

    fn aux_loss_weights(&self, s: &Stream, a: &AuxLossWeights) -> Result<()> {
        const OP: &str = "aux_loss_weights";
        let [_, experts] = check::aux_loss_weights(OP, a)?;
        let &AuxLossWeights { coefficient, k, sums, counts, steps, by_tokens, weights, loss } = a;
        let args = [read(sums), read(counts), write(weights), write(loss), read(steps.unwrap_or(sums))];
        s.launch(OP, &args, |l| {
            let steps = steps.map(|_| l.slice::<f32>(4)).transpose()?.map(|s| s[0]);
            let stats = r::ExpertStats { sums: l.slice(0)?, counts: l.slice(1)?, experts, steps, by_tokens };
            l.slice_mut::<f32>(3)?[0] += r::aux_loss_weights(coefficient, k, stats, l.slice_mut(2)?);
            Ok(())
        })
    }

    fn z_loss(&self, s: &Stream, logits: &Tensor, segments: &Tensor, sums: &Tensor) -> Result<()> {
        const OP: &str = "z_loss";
        let [_, experts] = check::z_loss(OP, logits, segments, sums, None)?;
        s.launch(OP, &[read(logits), read(segments), write(sums)], |l| {
            floats!(OP, logits.dtype(), T => {
                let more = r::z_loss::<T>(l.threads(), l.slice(0)?, l.slice(1)?, experts);
                l.slice_mut::<f64>(2)?.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
                Ok(())
            })
        })
    }

    fn z_loss_backward(&self, s: &Stream, z: &ZLossBackward) -> Result<()> {
        let &ZLossBackward { coefficient: factor, sums: rows, logits, segments, dlogits } = z;
        const OP: &str = "z_loss_backward";
        let [_, experts] = check::z_loss(OP, logits, segments, rows, Some(dlogits))?;
        s.launch(OP, &[read(logits), read(segments), read(rows), write(dlogits)], |l| {
            let scale = (f64::from(factor) / l.slice::<f64>(2)?[1].max(1.0)) as f32;
            floats!(OP, logits.dtype(), T => {
                let (x, segments) = (l.slice::<T>(0)?, l.slice(1)?);
                r::z_loss_backward(l.threads(), scale, x, segments, experts, l.slice_mut(3)?);
                Ok(())
            })
        })
    }

    fn count_tokens(&self, s: &Stream, index: &Tensor, segments: &Tensor, counts: &Tensor) -> Result<()> {
        const OP: &str = "count_tokens";
        let z = check::count_tokens(OP, index, segments, counts)?;
        s.launch(OP, &[read(index), read(segments), write(counts)], |l| {
            r::count_tokens(l.slice(0)?, z.k, l.slice(1)?, l.slice_mut(2)?)
        })
    }

    fn update_expert_bias(&self, s: &Stream, rate: f32, counts: &Tensor, bias: &Tensor) -> Result<()> {
        const OP: &str = "update_expert_bias";
        check::update_expert_bias(OP, counts, bias)?;
        s.launch(OP, &[write(counts), write(bias)], |l| {
            r::update_expert_bias(rate, l.slice_mut(0)?, l.slice_mut(1)?);
            Ok(())
        })
    }

    fn accumulate_counts(&self, s: &Stream, counts: &Tensor, total: &Tensor, steps: &Tensor) -> Result<()> {
        const OP: &str = "accumulate_counts";
        let n = counts.numel();
        check::elements(OP, &[(counts, DType::I64, n), (total, DType::I64, n), (steps, DType::F32, 1)])?;
        s.launch(OP, &[read(counts), write(total), write(steps)], |l| {
            let (counts, total) = (l.slice::<i64>(0)?, l.slice_mut::<i64>(1)?);
            total.iter_mut().zip(counts).for_each(|(t, c)| *t += c);
            l.slice_mut::<f32>(2)?[0] += 1.0;
            Ok(())
        })
    }

    fn accumulate_f64(&self, s: &Stream, x: &Tensor, total: &Tensor) -> Result<()> {
        const OP: &str = "accumulate_f64";
        check::elements(OP, &[(x, DType::F64, x.numel()), (total, DType::F64, x.numel())])?;
        s.launch(OP, &[read(x), write(total)], |l| {
            let (x, total) = (l.slice::<f64>(0)?, l.slice_mut::<f64>(1)?);
            total.iter_mut().zip(x).for_each(|(t, x)| *t += x);
            Ok(())
        })
    }

    fn update_quantiles(
        &self,
        s: &Stream,
        keep: f32,
        mean: f32,
        found: &Tensor,
        beta: &Tensor,
    ) -> Result<()> {
        const OP: &str = "update_quantiles";
        let n = beta.numel();
        check::elements(OP, &[(found, DType::F32, n), (beta, DType::F32, n)])?;
        s.launch(OP, &[read(found), write(beta)], |l| {
            let (found, beta) = (l.slice::<f32>(0)?, l.slice_mut::<f32>(1)?);
            if found.iter().any(|f| !f.is_finite()) {
                return Ok(());
            }
            beta.iter_mut().zip(found).for_each(|(b, f)| *b = keep * *b + (1.0 - keep) * mean * f);
            let middle = beta.iter().map(|b| f64::from(*b)).sum::<f64>() / n.max(1) as f64;
            beta.iter_mut().for_each(|b| *b -= middle as f32);
            Ok(())
        })
    }
}
