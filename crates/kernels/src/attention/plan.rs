//! Checks of attention arguments and the layout of their sequences, shared by all devices.

use crate::cpu::attention::{AttentionShape, MaskAlign as PlanAlign, Span};
use crate::{AttentionBackward, AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// Strides of batch, token and head; the batch stride is 0 without a batch axis.
pub(crate) fn strides(t: &Tensor) -> Result<[usize; 3]> {
    match (t.shape(), t.strides()) {
        ([.., d], [.., c]) if *d > 1 && *c != 1 => shape_error("attention", "channels must be contiguous"),
        (_, [batch, token, head, _]) => Ok([*batch, *token, *head]),
        (_, [token, head, _]) => Ok([0, *token, *head]),
        _ => shape_error("attention", format!("{t:?} has neither 3 nor 4 axes")),
    }
}

/// Shapes and sequences of one launch.
pub(crate) struct AttentionPlan {
    /// Sizes, mask and score parameters.
    pub(crate) shape: AttentionShape,
    /// One span per sequence.
    pub(crate) spans: Vec<Span>,
    /// Whether some tokens belong to no sequence.
    pub(crate) gaps: bool,
    /// Stride of `lse` between batch entries.
    pub(crate) lse_batch: usize,
}

/// Checks the tensors of a forward pass and lays out its sequences.
pub(crate) fn plan(
    scores: &AttentionParams,
    sequences: Sequences,
    f: &AttentionForward,
) -> Result<AttentionPlan> {
    const OP: &str = "attention";
    let bad = || {
        shape_error(
            OP,
            format!(
                "q {:?}, k {:?}, v {:?}, out {:?}, lse {:?} have inconsistent shapes",
                f.q.shape(),
                f.k.shape(),
                f.v.shape(),
                f.out.shape(),
                f.lse.shape()
            ),
        )
    };
    if scores.fp8 && !matches!(f.q.dtype(), DType::F32 | DType::BF16) {
        return Err(Error::DType { op: OP, found: f.q.dtype(), wanted: DType::BF16 });
    }
    // [batch, tokens, heads, channels], with batch 1 for packed sequences.
    let dims = |t: &Tensor| match t.shape() {
        [b, t, h, d] => Some([*b, *t, *h, *d]),
        [t, h, d] => Some([1, *t, *h, *d]),
        _ => None,
    };
    let (Some(q), Some(k), Some(v), Some(o)) = (dims(f.q), dims(f.k), dims(f.v), dims(f.out)) else {
        return bad();
    };
    let fits = k[..3] == v[..3] && q[3] == k[3] && o == [q[0], q[1], q[2], v[3]] && q[0] == k[0];
    let (lse_batch, lse_head, lse_token, lse_fits) = match (f.lse.shape(), f.lse.strides()) {
        ([b, h, t], [sb, sh, st]) => (*sb, *sh, *st, [*b, *t, *h] == q[..3]),
        ([t, h], [st, sh]) => (0, *sh, *st, [1, *t, *h] == q[..3]),
        _ => return bad(),
    };
    let rank = if matches!(sequences, Sequences::Batch) { 4 } else { 3 };
    if !fits || !lse_fits || f.q.rank() != rank {
        return bad();
    }
    let spans = match sequences.offsets() {
        None => (0..q[0])
            .map(|b| Span {
                batch: b,
                q_start: 0,
                q_len: q[1],
                k_start: 0,
                k_len: k[1],
                lse_base: b * lse_batch,
            })
            .collect(),
        Some([oq, ok]) => {
            let inside = |o: &[i32], n: usize| {
                o.first().is_some_and(|x| *x >= 0)
                    && o.windows(2).all(|w| w[0] <= w[1])
                    && o.last().is_some_and(|x| *x as usize <= n)
            };
            if oq.len() != ok.len() || !inside(oq, q[1]) || !inside(ok, k[1]) {
                return shape_error(
                    OP,
                    "sequence offsets must ascend, stay within the tokens, and be equally many for q and k",
                );
            }
            packed_spans(oq, ok, lse_token)
        }
    };
    let covered = |len: fn(&Span) -> usize| spans.iter().map(len).sum::<usize>();
    let gaps = covered(|s| s.q_len) < q[0] * q[1] || covered(|s| s.k_len) < k[0] * k[1];
    let shape = AttentionShape {
        heads: q[2],
        kv_heads: k[2],
        d_qk: q[3],
        d_v: v[3],
        scale: scores.scale,
        softcap: scores.softcap,
        causal: scores.causal,
        align: match scores.align {
            MaskAlign::TopLeft => PlanAlign::TopLeft,
            MaskAlign::BottomRight => PlanAlign::BottomRight,
        },
        window: (scores.left, scores.right),
        fp8: scores.fp8,
        lse_head,
        lse_token,
    };
    Ok(AttentionPlan { shape, spans, gaps, lse_batch })
}

/// Packed sequences by the offsets of queries and keys, which ascend from 0 or more; log-sum-exps of neighbouring tokens are
/// so many elements apart.
pub(crate) fn packed_spans(q: &[i32], k: &[i32], lse_token: usize) -> Vec<Span> {
    let span = |(q, k): (&[i32], &[i32])| Span {
        batch: 0,
        q_start: q[0] as usize,
        q_len: (q[1] - q[0]) as usize,
        k_start: k[0] as usize,
        k_len: (k[1] - k[0]) as usize,
        lse_base: q[0] as usize * lse_token,
    };
    q.windows(2).zip(k.windows(2)).map(span).collect()
}

/// Checks that each gradient has the shape of its tensor.
pub(crate) fn gradients(b: &AttentionBackward) -> Result<()> {
    const OP: &str = "attention_backward";
    let f = &b.forward;
    for (x, like) in [(b.dout, f.out), (b.dq, f.q), (b.dk, f.k), (b.dv, f.v)] {
        if x.shape() != like.shape() {
            return shape_error(OP, format!("gradient {:?} of a tensor {:?}", x.shape(), like.shape()));
        }
    }
    if b.dsink.is_some() && f.sink.is_none() {
        return shape_error(OP, "dsink is given but there is no sink");
    }
    Ok(())
}
