//! Attention.

use super::{Case, Sizes, case, empty, random};
use crate::Result;
use crate::bench::Work;
use ferrotron_engine::Rank;
use ferrotron_kernels::{Align, AttentionBackward, AttentionForward, Scores, Sequences};
use ferrotron_tensor::{DType, Tensor};

/// Scores, softmax and values: of full layers, and of windowed ones where the model has both or only those.
pub(super) fn cases(z: &Sizes) -> Vec<Case> {
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
        let scores = Scores {
            scale: m.attn_scale,
            softcap: m.attn_softcap,
            causal: true,
            align: Align::TopLeft,
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
        for (kind, work) in [("forward", Work::Flops(flops)), ("backward", Work::Flops(2.5 * flops))] {
            let z = z.clone();
            out.push(case(format!("{name}.{kind}"), shape.clone(), work, move |rank| {
                let heads = Heads::new(rank, &z)?;
                heads.forward(rank, &scores)?;
                let backward = kind == "backward";
                Ok(Box::new(move |rank| match backward {
                    true => heads.backward(rank, &scores),
                    false => heads.forward(rank, &scores),
                }))
            }));
        }
        if z.dtype == DType::BF16 {
            let (z, scores) = (z.clone(), Scores { fp8: true, ..scores });
            out.push(case(format!("fp8.{name}.forward"), shape, Work::Flops(flops), move |rank| {
                let (heads, magnitudes) = (Heads::new(rank, &z)?, empty(rank, &[3], DType::F32)?);
                Ok(Box::new(move |rank| heads.narrow(rank, &scores, &magnitudes)))
            }));
        }
    }
    out
}

/// q, k, v side by side in one buffer, as the projection leaves them, and the same for their gradients.
struct Heads {
    qkv: [Tensor; 3],
    dqkv: [Tensor; 3],
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
}

impl Heads {
    fn new(rank: &Rank, z: &Sizes) -> Result<Heads> {
        let (n, g, d, v) = (z.model.heads, z.model.kv_heads, z.model.head_dim, z.model.value_dim());
        let split = |t: Tensor| -> Result<[Tensor; 3]> {
            let part = |start: usize, heads: usize, d: usize| {
                t.narrow(1, start, heads * d)?.view(&[z.batch, z.seq, heads, d])
            };
            Ok([part(0, n, d)?, part(n * d, g, d)?, part((n + g) * d, g, v)?])
        };
        let whole = [z.tokens, (n + g) * d + g * v];
        Ok(Heads {
            qkv: split(random(rank, &whole, z.dtype)?)?,
            dqkv: split(empty(rank, &whole, z.dtype)?)?,
            out: empty(rank, &[z.batch, z.seq, n, v], z.dtype)?,
            dout: random(rank, &[z.batch, z.seq, n, v], z.dtype)?,
            lse: empty(rank, &[z.batch, n, z.seq], DType::F32)?,
        })
    }

    fn operands(&self) -> AttentionForward<'_> {
        let [q, k, v] = &self.qkv;
        AttentionForward { q, k, v, sink: None, out: &self.out, lse: &self.lse }
    }

    fn forward(&self, rank: &Rank, scores: &Scores) -> Result<()> {
        Ok(rank.kernels.attention_forward(&rank.compute, scores, Sequences::Batch, &self.operands())?)
    }

    /// Forward with products of bytes, largest magnitudes and casts counted; where there are none, with rounded weights of
    /// values alone.
    fn narrow(&self, rank: &Rank, scores: &Scores, magnitudes: &Tensor) -> Result<()> {
        let (k, s) = (&rank.kernels, &rank.compute);
        for (i, t) in self.qkv.iter().enumerate() {
            let [batch, tokens, heads, d] = [0, 1, 2, 3].map(|axis| t.shape()[axis]);
            k.amax(s, &t.view(&[batch * tokens, heads * d])?, &magnitudes.narrow(0, i, 1)?)?;
        }
        match k.attention_of_bytes(s, scores, Sequences::Batch, &self.operands(), magnitudes)? {
            true => Ok(()),
            false => self.forward(rank, scores),
        }
    }

    fn backward(&self, rank: &Rank, scores: &Scores) -> Result<()> {
        let [dq, dk, dv] = &self.dqkv;
        let a = AttentionBackward { forward: self.operands(), dout: &self.dout, dq, dk, dv, dsink: None };
        Ok(rank.kernels.attention_backward(&rank.compute, scores, Sequences::Batch, &a)?)
    }
}
