//! FP8 attention: q, k and v are quantized to E4M3 with one scale per tensor.
//!
//! `attention_fp8` multiplies FP8 operands where the device has that kernel. Elsewhere, and in backward, q, k and v are
//! quantized and dequantized to the model's dtype: scales are powers of two, so dequantization is exact and the emulated
//! operands equal the FP8 operands.

use crate::StepContext;
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::{Fp8Tensor, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

/// amax of q, k and v `[rows, heads, channels]` → f32 `[3]`, all-reduced over the tp and cp groups.
pub(super) fn amax(p: &StepContext, qkv: [&Tensor; 3]) -> Result<Tensor> {
    let s = &p.rank.compute;
    let all = s.zeros(&[3], DType::F32, Category::Activations)?;
    for (i, t) in qkv.into_iter().enumerate() {
        p.rank.kernels.amax(s, &matrix(t)?, &all.narrow(0, i, 1)?)?;
    }
    p.rank.tp.all_reduce(s, &all, ReduceOp::Max, "amax of q, k, v over tp")?;
    p.rank.cp.all_reduce(s, &all, ReduceOp::Max, "amax of q, k, v over cp")?;
    Ok(all)
}

/// q, k and v rounded to E4M3 with the scales that `amax` gives, in the model's dtype.
pub(super) fn rounded(p: &StepContext, qkv: [&Tensor; 3], amax: &Tensor) -> Result<[Tensor; 3]> {
    let round = |i: usize| {
        let (s, k, x) = (&p.rank.compute, &p.rank.kernels, matrix(qkv[i])?);
        let amax = &amax.narrow(0, i, 1)?;
        let bytes = Fp8Tensor::empty(
            s,
            [x.shape()[0], x.shape()[1]],
            DType::E4M3,
            ScalingMode::PerTensor,
            Category::Workspace,
        )?;
        let range = ScaleSource::Amax { amax, pow2: true };
        k.quantize(s, &Quantize { x: &x, range, rows: Some(&bytes), cols: None, sums: None })?;
        let out = p.empty(x.shape())?;
        k.dequantize(s, &bytes, &out)?;
        out.view(qkv[i].shape())
    };
    Ok([round(0)?, round(1)?, round(2)?])
}

/// Views `[rows, heads, channels]` as a matrix: one row per token where its heads are contiguous, else per head.
fn matrix(t: &Tensor) -> Result<Tensor> {
    let [rows, heads, channels] = *t.shape() else {
        return shape_error("attention", format!("{t:?} is not [rows, heads, channels]"));
    };
    t.view(&[rows, heads * channels]).or_else(|_| t.view(&[rows * heads, channels]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::super::Layout;
    use super::super::core_attention::{CoreAttention, CoreAttentionGrads, CoreAttentionSaved};
    use super::*;
    use crate::{Declarations, GradBuffer, Params, Rank, Saved, SavedTensor, StepState};
    use ferrotron_kernels::{AttentionBackward, AttentionForward, AttentionParams, MaskAlign};
    use ferrotron_tensor::fp8::E4m3;
    use ferrotron_tensor::{Float, bf16};

    const TOKENS: usize = 50;
    const LAYOUT: Layout = Layout::Rows { count: 2, len: 24 };

    /// Values of several magnitudes, zeros and one outlier.
    fn numbers(seed: usize, n: usize) -> Vec<bf16> {
        let size = [1.0, 1e-3, 0.0, 0.05];
        let x = |i: usize| ((i * 37 + seed * 101) % 211) as f32 / 105.0 - 1.0;
        (0..n).map(|i| if i == 7 { 9.0 } else { x(i) * size[i % 4] }).map(bf16::from_f32).collect()
    }

    /// q and k in one buffer, v a strided view.
    fn operands(rank: &Rank) -> [Tensor; 3] {
        let up = |seed, shape: &[usize]| {
            let x = numbers(seed, shape.iter().product());
            rank.compute.upload(&x, shape, Category::Activations).unwrap()
        };
        let qk = up(1, &[TOKENS, 6 * 8]);
        let q = qk.narrow(1, 0, 4 * 8).unwrap().view(&[TOKENS, 4, 8]).unwrap();
        let k = qk.narrow(1, 4 * 8, 2 * 8).unwrap().view(&[TOKENS, 2, 8]).unwrap();
        [q, k, up(2, &[TOKENS, 2, 12]).narrow(2, 3, 8).unwrap()]
    }

    fn host(rank: &Rank, t: &Tensor) -> Vec<f64> {
        rank.compute.download::<bf16>(t).unwrap().into_iter().map(|x| x.to_f64()).collect()
    }

    #[test]
    fn operands_are_rounded_to_e4m3_with_power_of_two_scales() {
        let rank = Rank::cpu(1, 1).unwrap();
        let params = Params::allocate(&rank, Declarations::default().finish(), DType::BF16).unwrap();
        let state = StepState::new(&rank, &params, &[]).unwrap();
        let (p, qkv) = (StepContext::new(&rank, &params, &state), operands(&rank));
        let amax = amax(&p, qkv.each_ref()).unwrap();
        let found = rank.compute.download::<f32>(&amax).unwrap();
        let rounded = rounded(&p, qkv.each_ref(), &amax).unwrap();
        for (i, (t, ours)) in qkv.iter().zip(&rounded).enumerate() {
            let x = host(&rank, t);
            let most = x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            assert_eq!(f64::from(found[i]), most);
            let scale = (448.0 / most).log2().floor().exp2();
            let wanted: Vec<f64> =
                x.iter().map(|x| <E4m3 as Float>::from_f32((x * scale) as f32).to_f64() / scale).collect();
            let ours = host(&rank, ours);
            assert!(ours == wanted && ours != x, "operand {i}");
        }
    }

    struct SavedQkv([SavedTensor; 3]);

    impl Saved for SavedQkv {
        fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
            self.0.iter_mut().for_each(f);
        }
    }

    /// Forward rounds q, k, v and the softmax weights; backward rounds q, k, v alone. The sink and padding rows are
    /// unaffected.
    #[test]
    fn forward_and_backward_match_rounded_operands() {
        let rank = Rank::cpu(1, 1).unwrap();
        let scores = AttentionParams {
            scale: 0.7,
            softcap: None,
            causal: true,
            align: MaskAlign::TopLeft,
            left: None,
            right: None,
            fp8: true,
        };
        let mut d = Declarations::default();
        let core = CoreAttention::declare(&mut d, "layers.0.attn", scores, [4, 2], Some(0.5)).unwrap();
        let params = Params::allocate(&rank, d.finish(), DType::BF16).unwrap();
        let sink: Vec<bf16> = [0.5, -1.0, 0.25, 2.0].map(bf16::from_f32).to_vec();
        rank.compute.upload_into(&params.values()[0], &sink).unwrap();
        let state = StepState::new(&rank, &params, &[]).unwrap();
        let (p, qkv) = (StepContext::new(&rank, &params, &state), operands(&rank));
        let new = |shape: &[usize]| rank.activation(shape, DType::BF16).unwrap();
        let (out, dout) = (new(&[TOKENS, 32]), new(&[TOKENS, 32]));
        rank.compute.upload_into(&dout, &numbers(5, TOKENS * 32)).unwrap();
        let keep = || SavedQkv(qkv.each_ref().map(SavedTensor::activation));
        let saved = core.forward(&p, &LAYOUT, qkv.each_ref(), &out, keep).unwrap();
        let CoreAttentionSaved::Full { lse, .. } = &saved else { panic!("cp is 1") };
        let lse = rank.compute.download::<f32>(lse).unwrap();

        let real = qkv.each_ref().map(|t| t.narrow(0, 0, 48).unwrap());
        let by = amax(&p, real.each_ref()).unwrap();
        let rounded = rounded(&p, real.each_ref(), &by).unwrap();
        let shaped = |t: &Tensor| t.view(&[2, 24, t.shape()[1], t.shape()[2]]).unwrap();
        let [q, k, v] = &rounded.each_ref().map(shaped);
        let sink: Vec<f32> = sink.iter().map(|x| x.to_f32()).collect();
        let sink = &rank.compute.upload(&sink, &[4], Category::Activations).unwrap();
        let (want, want_lse) = (new(&[2, 24, 4, 8]), rank.activation(&[2, 4, 24], DType::F32).unwrap());
        let forward = || AttentionForward { q, k, v, sink: Some(sink), out: &want, lse: &want_lse };
        let (kernels, s) = (&rank.kernels, &rank.compute);
        kernels.attention_forward(s, &scores, LAYOUT.sequences(None), &forward()).unwrap();
        assert_eq!(host(&rank, &out.narrow(0, 0, 48).unwrap()), host(&rank, &want));
        assert!(host(&rank, &out.narrow(0, 48, 2).unwrap()).iter().all(|x| *x == 0.0));
        assert_eq!(lse, rank.compute.download::<f32>(&want_lse).unwrap());
        let whole = new(&[2, 24, 4, 8]);
        let f = AttentionForward { out: &whole, ..forward() };
        kernels
            .attention_forward(s, &AttentionParams { fp8: false, ..scores }, LAYOUT.sequences(None), &f)
            .unwrap();
        assert_ne!(host(&rank, &whole), host(&rank, &want));
        kernels.attention_forward(s, &scores, LAYOUT.sequences(None), &forward()).unwrap();

        let grads = [new(&[TOKENS, 4, 8]), new(&[TOKENS, 2, 8]), new(&[TOKENS, 2, 8])];
        let y = CoreAttentionGrads { out: &out, dout: &dout, dqkv: grads.each_ref() };
        let recompute = |kept: &SavedQkv| Ok(kept.0.each_ref().map(|t| Tensor::clone(t)));
        let work = core.backward(&p, &LAYOUT, saved, &y, recompute).unwrap();
        let [dq, dk, dv] = &[new(&[2, 24, 4, 8]), new(&[2, 24, 2, 8]), new(&[2, 24, 2, 8])];
        let dout = &dout.narrow(0, 0, 48).unwrap().view(&[2, 24, 4, 8]).unwrap();
        let dsink = &rank.compute.zeros(&[4], DType::F32, Category::Activations).unwrap();
        let b = AttentionBackward { forward: forward(), dout, dq, dk, dv, dsink: Some(dsink) };
        kernels.attention_backward(s, &scores, LAYOUT.sequences(None), &b).unwrap();
        for (ours, wanted) in grads.iter().zip([dq, dk, dv]) {
            assert_eq!(host(&rank, &ours.narrow(0, 0, 48).unwrap()), host(&rank, wanted));
        }
        let mut buffer = GradBuffer::new(params.specs());
        work.run(&rank, &mut buffer).unwrap();
        let [ours, wanted] =
            [&buffer.finish(&rank).unwrap()[0], dsink].map(|t| rank.compute.download::<f32>(t).unwrap());
        assert_eq!(ours, wanted);
    }
}
