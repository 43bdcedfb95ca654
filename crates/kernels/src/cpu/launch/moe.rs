use super::{CpuKernels, floats};
use crate::moe::{check, matrix};
use crate::philox::RandomStream;
use crate::{MoeKernels, RngKey};
use ferrotron_tensor::{DType, Float, Result, Stream, Tensor, bf16, read, write};

impl MoeKernels for CpuKernels {
    fn mask_padding(&self, s: &Stream, segments: &Tensor, index: &Tensor, probs: &Tensor) -> Result<()> {
        const OP: &str = "mask_padding";
        let [t, k] = matrix(OP, index)?;
        check(OP, &[(segments, DType::I32, t), (index, DType::I32, t * k), (probs, DType::F32, t * k)])?;
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
        let [t, k] = matrix(OP, index)?;
        check(OP, &[(index, DType::I32, t * k), (wide, DType::I32, t * k * copies)])?;
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

    fn jitter(&self, s: &Stream, eps: f32, key: RngKey, rows: &Tensor, x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "jitter";
        let [t, h] = matrix(OP, x)?;
        check(OP, &[(rows, DType::I32, t), (y, x.dtype(), t * h)])?;
        let stream = RandomStream::dropout(key);
        s.launch(OP, &[read(rows), read(x), write(y)], |l| {
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
        let [t, n] = matrix(OP, x)?;
        check(OP, &[(x, DType::F32, t * n), (out, DType::BF16, 2 * t * n)])?;
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
        let [t, n] = matrix(OP, x)?;
        check(OP, &[(x, DType::F32, t * n), (bias, bias.dtype(), n)])?;
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

    fn accumulate_counts(&self, s: &Stream, counts: &Tensor, total: &Tensor, steps: &Tensor) -> Result<()> {
        const OP: &str = "accumulate_counts";
        let n = counts.numel();
        check(OP, &[(counts, DType::I64, n), (total, DType::I64, n), (steps, DType::F32, 1)])?;
        s.launch(OP, &[read(counts), write(total), write(steps)], |l| {
            let (counts, total) = (l.slice::<i64>(0)?, l.slice_mut::<i64>(1)?);
            total.iter_mut().zip(counts).for_each(|(t, c)| *t += c);
            l.slice_mut::<f32>(2)?[0] += 1.0;
            Ok(())
        })
    }

    fn accumulate_f64(&self, s: &Stream, x: &Tensor, total: &Tensor) -> Result<()> {
        const OP: &str = "accumulate_f64";
        check(OP, &[(x, DType::F64, x.numel()), (total, DType::F64, x.numel())])?;
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
        check(OP, &[(found, DType::F32, n), (beta, DType::F32, n)])?;
        s.launch(OP, &[read(found), write(beta)], |l| {
            let (found, beta) = (l.slice::<f32>(0)?, l.slice_mut::<f32>(1)?);
            beta.iter_mut().zip(found).for_each(|(b, f)| *b = keep * *b + (1.0 - keep) * mean * f);
            let middle = beta.iter().map(|b| f64::from(*b)).sum::<f64>() / n.max(1) as f64;
            beta.iter_mut().for_each(|b| *b -= middle as f32);
            Ok(())
        })
    }
}

/// A word of 32 bits as a factor from 1 - eps to 1 + eps.
fn around_one(word: u32, eps: f32) -> f32 {
    let unit = (word >> 8) as f32 / (1u32 << 24) as f32;
    1.0 - eps + 2.0 * eps * unit
}
