use super::{CpuKernels, floats};
use crate::cpu::random::fill_normal_rows;
use crate::cpu::router as r;
use crate::philox::RandomStream;
use crate::router::check;
use crate::{
    CapacityDrop, ExpertSelection, GateBackward, Jitter, Route, RouteBackward, RouterKernels, StepKey,
};
use ferrotron_tensor::{DType, Float, Result, Stream, Tensor, bf16, read, write};

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

    fn route(&self, s: &Stream, r: &Route) -> Result<()> {
        let &Route { params: how, selection, logits, index, probs } = r;
        const OP: &str = "route";
        let z = check::route(OP, how, selection, logits, index, probs)?;
        let (given, bias) = match selection {
            ExpertSelection::Given => (true, None),
            ExpertSelection::TopK { bias } => (false, bias),
        };
        let router = r::Router { params: how, experts: z.experts, topk: z.k };
        let chosen = if given { read(index) } else { write(index) };
        s.launch(OP, &[read(logits), chosen, write(probs), read(bias.unwrap_or(logits))], |l| {
            let bias = bias.map(|_| l.slice(3)).transpose()?;
            floats!(OP, logits.dtype(), T => {
                let x = l.slice::<T>(0)?;
                let index: &[i32] = if given {
                    l.slice(1)?
                } else {
                    let index = l.slice_mut(1)?;
                    r::choose(l.threads(), router, bias, x, index);
                    index
                };
                r::probabilities(l.threads(), router, x, index, l.slice_mut(2)?)
            })
        })
    }

    fn route_backward(&self, s: &Stream, r: &RouteBackward) -> Result<()> {
        let &RouteBackward { params: how, logits, index, dprobs, dlogits } = r;
        const OP: &str = "route_backward";
        let z = check::route_backward(OP, logits, index, dprobs, dlogits)?;
        let router = r::Router { params: how, experts: z.experts, topk: z.k };
        s.launch(OP, &[read(logits), read(index), read(dprobs), write(dlogits)], |l| {
            floats!(OP, logits.dtype(), T => r::probabilities_backward::<T>(
                l.threads(), router, l.slice(0)?, l.slice(1)?, l.slice(2)?, l.slice_mut(3)?,
            ))
        })
    }

    fn drop_over_capacity(&self, s: &Stream, d: &CapacityDrop) -> Result<()> {
        let &CapacityDrop { capacity, experts, by_probability, index, probs, dropped } = d;
        const OP: &str = "drop_over_capacity";
        check::drop_over_capacity(OP, experts, index, probs, dropped)?;
        s.launch(OP, &[write(index), write(probs), write(dropped)], |l| {
            let (index, probs) = (l.slice_mut(0)?, l.slice_mut(1)?);
            let n = r::drop_over_capacity(l.threads(), capacity, experts, by_probability, index, probs)?;
            l.slice_mut::<i64>(2)?[0] += n;
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
                r::gate::<T>(self.context(l), l.slice(0)?, l.slice(1)?, sizes, l.slice_mut(2)?);
                Ok(())
            })
        })
    }

    fn gate_f64_backward(&self, s: &Stream, g: &GateBackward) -> Result<()> {
        let &GateBackward { x, w, dlogits, dx, dw, accumulate } = g;
        const OP: &str = "gate_f64_backward";
        let [_, experts, h] = check::gate_backward(OP, x, w, dlogits, dx, dw)?;
        s.launch(OP, &[read(x), read(w), read(dlogits), write(dx), write(dw)], |l| {
            floats!(OP, x.dtype(), T => {
                let (cpu, sizes, dlogits) = (self.context(l), [experts, h], l.slice(2)?);
                r::gate_dx::<T>(cpu, l.slice(1)?, dlogits, sizes, l.slice_mut(3)?);
                r::gate_dw::<T>(cpu, l.slice(0)?, dlogits, sizes, l.slice_mut(4)?, accumulate);
                Ok(())
            })
        })
    }

    fn fill_normal_logits(&self, s: &Stream, key: StepKey, rows: &Tensor, logits: &Tensor) -> Result<()> {
        const OP: &str = "fill_normal_logits";
        let [_, experts] = check::normal(OP, rows, logits)?;
        key.check(OP)?;
        let args: Vec<_> = [read(rows), write(logits)].into_iter().chain(key.step.map(read)).collect();
        s.launch(OP, &args, |l| {
            let stream = RandomStream::routing(key.at(key.step.map(|_| l.slice(2)).transpose()?));
            fill_normal_rows(self.context(l), stream, l.slice(0)?, experts, l.slice_mut(1)?)
        })
    }

    fn mask_padding(&self, s: &Stream, segments: &Tensor, index: &Tensor, probs: &Tensor) -> Result<()> {
        const OP: &str = "mask_padding";
        let [t, k] = check::matrix(OP, index)?;
        check::elements(
            OP,
            &[(segments, DType::I32, t), (index, DType::I32, t * k), (probs, DType::F32, t * k)],
        )?;
        s.launch(OP, &[read(segments), write(index), write(probs)], |l| {
            let (segments, index, probs) =
                (l.slice::<i32>(0)?, l.slice_mut::<i32>(1)?, l.slice_mut::<f32>(2)?);
            for (i, _) in segments.iter().enumerate().filter(|(_, s)| **s < 0) {
                index[i * k..][..k].fill(-1);
                probs[i * k..][..k].fill(0.0);
            }
            Ok(())
        })
    }

    fn expand_topk(
        &self,
        s: &Stream,
        index: &Tensor,
        own: usize,
        copies: usize,
        wide: &Tensor,
    ) -> Result<()> {
        const OP: &str = "expand_topk";
        let [t, k] = check::matrix(OP, index)?;
        check::elements(OP, &[(index, DType::I32, t * k), (wide, DType::I32, t * k * copies)])?;
        s.launch(OP, &[read(index), write(wide)], |l| {
            let (index, wide) = (l.slice::<i32>(0)?, l.slice_mut::<i32>(1)?);
            let (own, copies) = (own as i32, copies as i32);
            for (e, slots) in index.iter().zip(wide.chunks_mut(copies as usize)) {
                for (a, slot) in (0..).zip(slots) {
                    *slot = if *e < 0 { -1 } else { (e / own * copies + a) * own + e % own };
                }
            }
            Ok(())
        })
    }

    fn jitter(&self, s: &Stream, j: &Jitter) -> Result<()> {
        let &Jitter { eps, key, rows, x, y } = j;
        const OP: &str = "jitter";
        let [t, h] = check::matrix(OP, x)?;
        check::elements(OP, &[(rows, DType::I32, t), (y, x.dtype(), t * h)])?;
        key.check(OP)?;
        let args: Vec<_> = [read(rows), read(x), write(y)].into_iter().chain(key.step.map(read)).collect();
        s.launch(OP, &args, |l| {
            let stream = RandomStream::dropout(key.at(key.step.map(|_| l.slice(3)).transpose()?));
            let rows = l.slice::<i32>(0)?;
            floats!(OP, x.dtype(), T => {
                let (x, y) = (l.slice::<T>(1)?, l.slice_mut::<T>(2)?);
                for (r, (x, y)) in rows.iter().zip(x.chunks(h.max(1)).zip(y.chunks_mut(h.max(1)))) {
                    for (c, (x, y)) in x.iter().zip(y).enumerate() {
                        let word = stream.word(u64::from(*r as u32) * h as u64 + c as u64);
                        *y = T::from_f32(x.to_f32() * around_one(word, eps));
                    }
                }
                Ok(())
            })
        })
    }

    fn split_bf16x2(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "split_bf16x2";
        let [t, n] = check::matrix(OP, x)?;
        check::elements(OP, &[(x, DType::F32, t * n), (out, DType::BF16, 2 * t * n)])?;
        s.launch(OP, &[read(x), write(out)], |l| {
            let (x, out) = (l.slice::<f32>(0)?, l.slice_mut::<bf16>(1)?);
            for (x, out) in x.chunks(n.max(1)).zip(out.chunks_mut(2 * n.max(1))) {
                let (high, low) = out.split_at_mut(n);
                for (x, (high, low)) in x.iter().zip(high.iter_mut().zip(low)) {
                    *high = bf16::from_f32(*x);
                    *low = bf16::from_f32(x - high.to_f32());
                }
            }
            Ok(())
        })
    }

    fn add_router_bias(&self, s: &Stream, bias: &Tensor, x: &Tensor) -> Result<()> {
        const OP: &str = "add_router_bias";
        let [t, n] = check::matrix(OP, x)?;
        check::elements(OP, &[(x, DType::F32, t * n), (bias, bias.dtype(), n)])?;
        s.launch(OP, &[read(bias), write(x)], |l| {
            floats!(OP, bias.dtype(), T => {
                let (bias, x) = (l.slice::<T>(0)?, l.slice_mut::<f32>(1)?);
                for row in x.chunks_mut(n.max(1)) {
                    row.iter_mut().zip(bias).for_each(|(x, b)| *x += b.to_f32());
                }
                Ok(())
            })
        })
    }
}

/// Maps a 32-bit word to a factor in [1 − eps, 1 + eps].
fn around_one(word: u32, eps: f32) -> f32 {
    let unit = (word >> 8) as f32 / (1u32 << 24) as f32;
    1.0 - eps + 2.0 * eps * unit
}
