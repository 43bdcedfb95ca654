use super::{CpuKernels, floats};
use crate::cpu::random::fill_normal_rows;
use crate::cpu::router as r;
use crate::philox::RandomStream;
use crate::router::check;
use crate::{AuxLoss, ExpertChoice, RngKey, RouterKernels, RouterParams};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl RouterKernels for CpuKernels {
    fn top_k(&self, s: &Stream, scores: &Tensor, minus: Option<&Tensor>, index: &Tensor) -> Result<()> {
        const OP: &str = "top_k";
        let z = check::top_k(OP, scores, minus, index)?;
        s.launch(OP, &[read(scores), write(index), read(minus.unwrap_or(scores))], |l| {
            let minus = minus.map(|_| l.slice(2)).transpose()?;
            r::top_k(l.threads(), l.slice(0)?, minus, z.experts, z.k, l.slice_mut(1)?);
            Ok(())
        })
    }

    fn route(
        &self,
        s: &Stream,
        how: RouterParams,
        choice: ExpertChoice,
        logits: &Tensor,
        index: &Tensor,
        probs: &Tensor,
    ) -> Result<()> {
        const OP: &str = "route";
        let z = check::route(OP, how, choice, logits, index, probs)?;
        let (given, bias) = match choice {
            ExpertChoice::Given => (true, None),
            ExpertChoice::TopK { bias } => (false, bias),
        };
        let chosen = if given { read(index) } else { write(index) };
        s.launch(OP, &[read(logits), chosen, write(probs), read(bias.unwrap_or(logits))], |l| {
            let bias = bias.map(|_| l.slice(3)).transpose()?;
            floats!(OP, logits.dtype(), T => {
                let x = l.slice::<T>(0)?;
                let index: &[i32] = if given {
                    l.slice(1)?
                } else {
                    let index = l.slice_mut(1)?;
                    r::choose(l.threads(), how, bias, x, z.experts, z.k, index);
                    index
                };
                r::probabilities(l.threads(), how, x, z.experts, z.k, index, l.slice_mut(2)?)
            })
        })
    }

    fn route_backward(
        &self,
        s: &Stream,
        how: RouterParams,
        logits: &Tensor,
        index: &Tensor,
        dprobs: &Tensor,
        dlogits: &Tensor,
    ) -> Result<()> {
        const OP: &str = "route_backward";
        let z = check::route_backward(OP, logits, index, dprobs, dlogits)?;
        s.launch(OP, &[read(logits), read(index), read(dprobs), write(dlogits)], |l| {
            floats!(OP, logits.dtype(), T => r::probabilities_backward::<T>(
                l.threads(), how, l.slice(0)?, z.experts, z.k, l.slice(1)?, l.slice(2)?, l.slice_mut(3)?,
            ))
        })
    }

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

    fn aux_loss_weights(
        &self,
        s: &Stream,
        factor: f32,
        k: usize,
        sums: &Tensor,
        counts: &Tensor,
        steps: Option<&Tensor>,
        weights: &Tensor,
        loss: &Tensor,
    ) -> Result<()> {
        const OP: &str = "aux_loss_weights";
        let [_, experts] = check::aux_loss_weights(OP, k, [sums, counts, weights, loss], steps)?;
        let args = [read(sums), read(counts), write(weights), write(loss), read(steps.unwrap_or(sums))];
        s.launch(OP, &args, |l| {
            let steps = steps.map(|_| l.slice::<f32>(4)).transpose()?.map(|s| s[0]);
            let (sums, counts, weights) = (l.slice(0)?, l.slice(1)?, l.slice_mut(2)?);
            l.slice_mut::<f32>(3)?[0] +=
                r::aux_loss_weights(factor, k, experts, sums, counts, steps, weights);
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

    fn z_loss_backward(
        &self,
        s: &Stream,
        factor: f32,
        rows: &Tensor,
        logits: &Tensor,
        segments: &Tensor,
        dlogits: &Tensor,
    ) -> Result<()> {
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

    fn drop_over_capacity(
        &self,
        s: &Stream,
        capacity: usize,
        experts: usize,
        by_probability: bool,
        index: &Tensor,
        probs: &Tensor,
        dropped: &Tensor,
    ) -> Result<()> {
        const OP: &str = "drop_over_capacity";
        check::drop_over_capacity(OP, experts, index, probs, dropped)?;
        s.launch(OP, &[write(index), write(probs), write(dropped)], |l| {
            let (index, probs) = (l.slice_mut(0)?, l.slice_mut(1)?);
            let n = r::drop_over_capacity(l.threads(), capacity, experts, by_probability, index, probs)?;
            l.slice_mut::<i64>(2)?[0] += n;
            Ok(())
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

    fn sinkhorn(&self, s: &Stream, logits: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "sinkhorn";
        let [_, experts] = check::sinkhorn(OP, logits, out)?;
        s.launch(OP, &[read(logits), write(out)], |l| {
            floats!(OP, logits.dtype(), T => {
                r::sinkhorn::<T>(l.threads(), l.slice(0)?, experts, l.slice_mut(1)?);
                Ok(())
            })
        })
    }

    fn quantiles(
        &self,
        s: &Stream,
        k: usize,
        logits: &Tensor,
        beta: &Tensor,
        estimate: &Tensor,
    ) -> Result<()> {
        const OP: &str = "quantiles";
        let (_, place) = check::quantiles(OP, k, logits, beta, estimate)?;
        s.launch(OP, &[read(logits), read(beta), write(estimate)], |l| {
            floats!(OP, logits.dtype(), T => {
                r::quantiles::<T>(l.threads(), k, place, l.slice(0)?, l.slice(1)?, l.slice_mut(2)?);
                Ok(())
            })
        })
    }

    fn gate_f64(&self, s: &Stream, x: &Tensor, w: &Tensor, logits: &Tensor) -> Result<()> {
        const OP: &str = "gate_f64";
        let [_, experts, h] = check::gate(OP, x, w, logits)?;
        s.launch(OP, &[read(x), read(w), write(logits)], |l| {
            floats!(OP, x.dtype(), T => {
                let sizes = [experts, h];
                r::gate::<T>(l.threads(), self.isa, l.slice(0)?, l.slice(1)?, sizes, l.slice_mut(2)?);
                Ok(())
            })
        })
    }

    fn gate_f64_backward(
        &self,
        s: &Stream,
        x: &Tensor,
        w: &Tensor,
        dlogits: &Tensor,
        dx: &Tensor,
        dw: &Tensor,
        accumulate: bool,
    ) -> Result<()> {
        const OP: &str = "gate_f64_backward";
        let [_, experts, h] = check::gate_backward(OP, x, w, dlogits, dx, dw)?;
        s.launch(OP, &[read(x), read(w), read(dlogits), write(dx), write(dw)], |l| {
            floats!(OP, x.dtype(), T => {
                let (t, sizes, dlogits) = (l.threads(), [experts, h], l.slice(2)?);
                r::gate_dx::<T>(t, self.isa, l.slice(1)?, dlogits, sizes, l.slice_mut(3)?);
                r::gate_dw::<T>(t, self.isa, l.slice(0)?, dlogits, sizes, l.slice_mut(4)?, accumulate);
                Ok(())
            })
        })
    }

    fn fill_normal_logits(&self, s: &Stream, key: RngKey, rows: &Tensor, logits: &Tensor) -> Result<()> {
        const OP: &str = "fill_normal_logits";
        let [_, experts] = check::normal(OP, rows, logits)?;
        let stream = RandomStream::routing(key);
        s.launch(OP, &[read(rows), write(logits)], |l| {
            fill_normal_rows(l.threads(), self.isa, stream, l.slice(0)?, experts, l.slice_mut(1)?)
        })
    }
}
