//! The scores, of whole sequences or of this rank's tokens of them.

use super::context_parallel::{self, ContextParallel, ContextParallelSaved, Gradients, Inputs};
use super::{KvCache, Layout, fp8};
use crate::{Declarations, Init, ParamId, Part, Saved, SavedTensor, Split, StepContext, WeightGrad};
use ferrotron_kernels::{AttentionBackward, AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

/// Core attention, `softmax(scale·q·kᵀ + mask)·v`: the part that all attention variants share.
pub(super) struct CoreAttention {
    scores: AttentionParams,
    /// Query and key/value heads of this rank.
    heads: usize,
    kv_heads: usize,
    /// `[heads]`: attention sink, one more logit per head in the softmax denominator.
    sink: Option<ParamId>,
}

/// Activations that backward needs. `K` is what the module recovers q, k and v from.
#[expect(clippy::large_enum_variant, reason = "handles of a few words, once a layer")]
pub(super) enum CoreAttentionSaved<K> {
    /// Without context parallelism: log-sum-exp, and for FP8 attention the amax of q, k and v, so that backward
    /// quantizes identically.
    Full { kept: K, lse: SavedTensor, amax: Option<SavedTensor> },
    /// With context parallelism.
    ContextParallel(ContextParallelSaved),
}

impl<K: Saved> Saved for CoreAttentionSaved<K> {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        match self {
            CoreAttentionSaved::Full { kept, lse, amax } => {
                kept.tensors(f);
                f(lse);
                amax.iter_mut().for_each(f);
            }
            CoreAttentionSaved::ContextParallel(saved) => saved.tensors(f),
        }
    }
}

/// Output, output gradient, and where backward writes dq, dk and dv.
pub(super) struct CoreAttentionGrads<'a> {
    /// `[rows, n·d_v]`
    pub(super) out: &'a Tensor,
    /// `[rows, n·d_v]`
    pub(super) dout: &'a Tensor,
    /// `[rows, heads, channels]` each; padding rows at the end are not written.
    pub(super) dqkv: [&'a Tensor; 3],
}

impl CoreAttention {
    /// `heads` and `kv_heads` are the model's; this rank gets its tensor-parallel share. With `sink` (a standard
    /// deviation), declares `<name>.sink`.
    pub(super) fn declare(
        d: &mut Declarations,
        name: &str,
        scores: AttentionParams,
        [heads, kv_heads]: [usize; 2],
        sink: Option<f32>,
    ) -> Result<CoreAttention> {
        let t = d.place().size;
        // With fewer key/value heads than tensor-parallel ranks, neighbouring ranks replicate one.
        if !heads.is_multiple_of(t) || !(kv_heads.is_multiple_of(t) || t.is_multiple_of(kv_heads)) {
            return shape_error(
                "attention",
                format!(
                    "{heads} query and {kv_heads} key heads do not divide over {t} ranks; take a tp that divides both"
                ),
            );
        }
        let part = |std| Part {
            name: format!("{name}.sink"),
            shape: vec![heads],
            init: Init::Normal(std),
            split: Split::Rows { unit: 1 },
        };
        let sink = sink.map(|std| d.declare(vec![part(std)])).transpose()?;
        let scores = AttentionParams { fp8: scores.fp8 || d.quantizes_attention(name), ..scores };
        Ok(CoreAttention { scores, heads: heads / t, kv_heads: (kv_heads / t).max(1), sink })
    }

    /// Query heads of this rank.
    pub(super) fn heads(&self) -> usize {
        self.heads
    }

    /// Key/value heads of this rank.
    pub(super) fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// `q [rows, n, d_k]`, `k [rows, g, d_k]`, `v [rows, g, d_v]` → `out [rows, n·d_v]`; padding rows become zero.
    pub(super) fn forward<K>(
        &self,
        p: &StepContext,
        layout: &Layout,
        qkv: [&Tensor; 3],
        out: &Tensor,
        keep: impl FnOnce() -> K,
    ) -> Result<CoreAttentionSaved<K>> {
        zero_padding(p, layout, out)?;
        let sink = self.sink(p)?;
        let amax = match self.scores.fp8 {
            true => Some(fp8::amax(p, self.real(p, layout, qkv)?.each_ref())?),
            false => None,
        };
        let (sink, out) = (sink.as_ref(), &self.by_heads(p, layout, out)?);
        let (s, kernels, sequences) = (&p.rank.compute, &p.rank.kernels, layout.sequences(p.captured));
        let rounded = || self.operands(p, layout, qkv, amax.as_ref());
        if p.rank.cp.size() > 1 {
            let [q, k, v] = &rounded()?;
            return Ok(CoreAttentionSaved::ContextParallel(
                self.context(p, layout)?.forward(&Inputs { q, k, v, sink }, out)?,
            ));
        }
        let lse = &p.rank.activation(&layout.lse_shape(self.heads), DType::F32)?;
        let done = match &amax {
            Some(m) => {
                let qkv = self.shaped(p, layout, qkv)?;
                kernels.attention_fp8(s, &self.scores, sequences, &pass(&qkv, sink, out, lse), m)?
            }
            None => false,
        };
        if !done {
            kernels.attention_forward(s, &self.scores, sequences, &pass(&rounded()?, sink, out, lse))?;
        }
        let amax = amax.as_ref().map(SavedTensor::activation);
        Ok(CoreAttentionSaved::Full { kept: keep(), lse: SavedTensor::activation(lse), amax })
    }

    /// Writes dq, dk and dv and returns the sink's gradient; `recompute` recovers q, k and v from what was saved.
    pub(super) fn backward<K>(
        &self,
        p: &StepContext,
        layout: &Layout,
        saved: CoreAttentionSaved<K>,
        y: &CoreAttentionGrads,
        recompute: impl FnOnce(&K) -> Result<[Tensor; 3]>,
    ) -> Result<WeightGrad> {
        let sink = self.sink(p)?;
        let new = |_| p.rank.compute.zeros(&[self.heads], DType::F32, Category::Activations);
        let dsink = self.sink.map(new).transpose()?;
        let (sink, dsink) = (sink.as_ref(), dsink.as_ref());
        let [dq, dk, dv] = &self.shaped(p, layout, y.dqkv)?;
        let (out, dout) = (&self.by_heads(p, layout, y.out)?, &self.by_heads(p, layout, y.dout)?);
        match saved {
            CoreAttentionSaved::Full { kept, lse, amax } => {
                let qkv = recompute(&kept)?;
                let [q, k, v] = &self.operands(p, layout, qkv.each_ref(), amax.as_deref())?;
                let forward = AttentionForward { q, k, v, sink, out, lse: &lse };
                let a = AttentionBackward { forward, dout, dq, dk, dv, dsink };
                p.rank.kernels.attention_backward(
                    &p.rank.compute,
                    &self.scores,
                    layout.sequences(p.captured),
                    &a,
                )?;
            }
            CoreAttentionSaved::ContextParallel(saved) => {
                let y = Gradients { out, dout, sink, dq, dk, dv, dsink };
                self.context(p, layout)?.backward(saved, &y)?;
            }
        }
        match self.sink.zip(dsink) {
            // dsink is already summed over tokens: one row.
            Some((id, d)) => Ok(WeightGrad::column_sums(id, &d.view(&[1, self.heads])?)),
            None => Ok(WeightGrad::default()),
        }
    }

    /// Appends new tokens `[tokens, heads, channels]` to the KV cache and attends over it, into `out [rows, n·d_v]`;
    /// padding rows become zero. `layout` is sequences of equal length.
    pub(super) fn decode(
        &self,
        p: &StepContext,
        layout: &Layout,
        cache: &mut KvCache,
        [q, k, v]: [&Tensor; 3],
        out: &Tensor,
    ) -> Result<()> {
        zero_padding(p, layout, out)?;
        let (batch, new) = cache.room(layout)?;
        let rows = |t: &Tensor| t.narrow(0, 0, batch * new)?.view(&[batch, new, t.shape()[1], t.shape()[2]]);
        let (keys, values) = cache.put(p, &rows(k)?, &rows(v)?)?;
        let lse = p.rank.activation(&[batch, self.heads, new], DType::F32)?;
        let (width, sink) = (out.shape()[1] / self.heads.max(1), self.sink(p)?);
        let a = AttentionForward {
            q: &rows(q)?,
            k: &keys,
            v: &values,
            sink: sink.as_ref(),
            out: &rows(&out.view(&[out.shape()[0], self.heads, width])?)?,
            lse: &lse,
        };
        // Decoding runs in the model's dtype: the amax of a single token would give another FP8 scale at every step.
        let scores = AttentionParams { align: MaskAlign::BottomRight, fp8: false, ..self.scores };
        p.rank.kernels.attention_forward(&p.rank.compute, &scores, Sequences::Batch, &a)
    }

    /// The sink in f32, as kernels expect it.
    fn sink(&self, p: &StepContext) -> Result<Option<Tensor>> {
        let Some(id) = self.sink else { return Ok(None) };
        let weight = p.weight(id)?;
        if weight.dtype() == DType::F32 {
            return Ok(Some((*weight).clone()));
        }
        let sink = p.rank.activation(weight.shape(), DType::F32)?;
        p.rank.kernels.copy(&p.rank.compute, &weight, &sink)?;
        Ok(Some(sink))
    }

    /// The context-parallel algorithm for this model.
    fn context<'a>(&'a self, p: &StepContext<'a>, layout: &'a Layout) -> Result<ContextParallel<'a>> {
        let (variant, _) =
            context_parallel::choose(&self.scores, self.heads, self.kv_heads, p.rank.cp.size())?;
        ContextParallel::new(p.rank, &self.scores, layout, variant)
    }

    /// q, k and v without padding rows.
    fn real(&self, p: &StepContext, layout: &Layout, all: [&Tensor; 3]) -> Result<[Tensor; 3]> {
        let [q, k, v] = all.map(|t| t.narrow(0, 0, held(p, layout)));
        Ok([q?, k?, v?])
    }

    /// q, k and v in the shape that kernels expect, rounded to E4M3 where `amax` is given.
    fn operands(
        &self,
        p: &StepContext,
        layout: &Layout,
        qkv: [&Tensor; 3],
        amax: Option<&Tensor>,
    ) -> Result<[Tensor; 3]> {
        let Some(amax) = amax else { return self.shaped(p, layout, qkv) };
        let real = self.real(p, layout, qkv)?;
        let rounded = fp8::rounded(p, real.each_ref(), amax)?;
        self.shaped(p, layout, rounded.each_ref())
    }

    /// Drops padding rows of `[rows, heads, channels]` and restores the batch axis where kernels expect one.
    fn shaped(&self, p: &StepContext, layout: &Layout, all: [&Tensor; 3]) -> Result<[Tensor; 3]> {
        let [q, k, v] = all.map(|t| {
            let real = t.narrow(0, 0, held(p, layout))?;
            if p.rank.cp.size() > 1 { Ok(real) } else { layout.shaped(&real) }
        });
        Ok([q?, k?, v?])
    }

    /// Views `[rows, n·d_v]` by head, without padding rows.
    fn by_heads(&self, p: &StepContext, layout: &Layout, t: &Tensor) -> Result<Tensor> {
        let width = t.shape()[1] / self.heads.max(1);
        let real = t.narrow(0, 0, held(p, layout))?;
        let real = real.view(&[real.shape()[0], self.heads, width])?;
        if p.rank.cp.size() > 1 { Ok(real) } else { layout.shaped(&real) }
    }
}

fn pass<'a>(
    [q, k, v]: &'a [Tensor; 3],
    sink: Option<&'a Tensor>,
    out: &'a Tensor,
    lse: &'a Tensor,
) -> AttentionForward<'a> {
    AttentionForward { q, k, v, sink, out, lse }
}

/// Rows of this rank that hold tokens, without padding rows.
fn held(p: &StepContext, layout: &Layout) -> usize {
    layout.tokens() / p.rank.cp.size()
}

/// Zeroes the padding rows of `t`: attention does not write them, the following GEMM reads them.
pub(super) fn zero_padding(p: &StepContext, layout: &Layout, t: &Tensor) -> Result<()> {
    let held = held(p, layout);
    match t.shape()[0].checked_sub(held) {
        None | Some(0) => Ok(()),
        Some(rest) => p.rank.compute.zero(&t.narrow(0, held, rest)?),
    }
}
