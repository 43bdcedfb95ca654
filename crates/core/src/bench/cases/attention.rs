//! Attention.

use super::{KernelCase, Sizes, case, empty, random};
use crate::Result;
use crate::bench::KernelWork;
use ferrotron_engine::Rank;
use ferrotron_kernels::{AttentionBackward, AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{DType, Tensor};

/// Core attention of global layers, and of local ones with a window where the model has them.
pub(super) fn cases(z: &Sizes) -> Vec<KernelCase> {
    let m = &z.model;
    let local = (0..m.layers).filter(|i| m.is_local(*i)).count();
    let mut kinds = Vec::new();
    if local < m.layers {
        kinds.push(("attention", None));
    }
    if local > 0 {
        kinds.push(("attention.window", m.window));
    }
    let mut out = Vec::new();
    for (name, window) in kinds {
        let scores = AttentionParams {
            scale: m.attn_scale,
            softcap: m.attn_softcap,
            causal: true,
            align: MaskAlign::TopLeft,
            left: window.map(|w| w.saturating_sub(1)),
            right: None,
            fp8: false,
        };
        let seen: f64 = (1..=z.seq).map(|t| t.min(window.unwrap_or(usize::MAX)) as f64).sum();
        let flops = 2.0 * (z.batch * m.heads * (m.head_dim + m.value_dim())) as f64 * seen;
        let mut shape = format!("{}x{}x{}({})x{}", z.batch, z.seq, m.heads, m.kv_heads, m.head_dim);
        if m.mla.is_some() {
            shape += &format!("/{}", m.value_dim());
        }
        for (kind, work) in
            [("forward", KernelWork::Flops(flops)), ("backward", KernelWork::Flops(2.5 * flops))]
        {
            let z = z.clone();
            out.push(case(format!("{name}.{kind}"), shape.clone(), work, move |rank| {
                let heads = AttentionBuffers::new(rank, &z)?;
                heads.forward(rank, &scores)?;
                let backward = kind == "backward";
                Ok(Box::new(move |rank| match backward {
                    true => heads.backward(rank, &scores),
                    false => heads.forward(rank, &scores),
                }))
            }));
        }
        if z.dtype == DType::BF16 {
            let (z, scores) = (z.clone(), AttentionParams { fp8: true, ..scores });
            out.push(case(format!("fp8.{name}.forward"), shape, KernelWork::Flops(flops), move |rank| {
                let (heads, amax) = (AttentionBuffers::new(rank, &z)?, empty(rank, &[3], DType::F32)?);
                Ok(Box::new(move |rank| heads.forward_fp8(rank, &scores, &amax)))
            }));
        }
    }
    out
}

/// q, k and v side by side in one buffer, as the projection writes them, and their gradients likewise.
struct AttentionBuffers {
    qkv: [Tensor; 3],
    dqkv: [Tensor; 3],
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
}

impl AttentionBuffers {
    fn new(rank: &Rank, z: &Sizes) -> Result<AttentionBuffers> {
        let (n, g, d, v) = (z.model.heads, z.model.kv_heads, z.model.head_dim, z.model.value_dim());
        let split = |t: Tensor| -> Result<[Tensor; 3]> {
            let part = |start: usize, heads: usize, d: usize| {
                t.narrow(1, start, heads * d)?.view(&[z.batch, z.seq, heads, d])
            };
            Ok([part(0, n, d)?, part(n * d, g, d)?, part((n + g) * d, g, v)?])
        };
        let shape = [z.tokens, (n + g) * d + g * v];
        Ok(AttentionBuffers {
            qkv: split(random(rank, &shape, z.dtype)?)?,
            dqkv: split(empty(rank, &shape, z.dtype)?)?,
            out: empty(rank, &[z.batch, z.seq, n, v], z.dtype)?,
            dout: random(rank, &[z.batch, z.seq, n, v], z.dtype)?,
            lse: empty(rank, &[z.batch, n, z.seq], DType::F32)?,
        })
    }

    fn operands(&self) -> AttentionForward<'_> {
        let [q, k, v] = &self.qkv;
        AttentionForward { q, k, v, sink: None, out: &self.out, lse: &self.lse }
    }

    fn forward(&self, rank: &Rank, scores: &AttentionParams) -> Result<()> {
        Ok(rank.kernels.attention_forward(&rank.compute, scores, Sequences::Batch, &self.operands())?)
    }

    /// Forward in FP8, amax and casts included; on devices without FP8 attention, forward with rounded softmax weights
    /// alone.
    fn forward_fp8(&self, rank: &Rank, scores: &AttentionParams, amax: &Tensor) -> Result<()> {
        let (k, s) = (&rank.kernels, &rank.compute);
        for (i, t) in self.qkv.iter().enumerate() {
            let [batch, tokens, heads, d] = [0, 1, 2, 3].map(|axis| t.shape()[axis]);
            k.amax(s, &t.view(&[batch * tokens, heads * d])?, &amax.narrow(0, i, 1)?)?;
        }
        match k.attention_fp8(s, scores, Sequences::Batch, &self.operands(), amax)? {
            true => Ok(()),
            false => self.forward(rank, scores),
        }
    }

    fn backward(&self, rank: &Rank, scores: &AttentionParams) -> Result<()> {
        let [dq, dk, dv] = &self.dqkv;
        let a = AttentionBackward { forward: self.operands(), dout: &self.dout, dq, dk, dv, dsink: None };
        Ok(rank.kernels.attention_backward(&rank.compute, scores, Sequences::Batch, &a)?)
    }
}
