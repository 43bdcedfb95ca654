use super::{CpuKernels, floats};
use crate::cpu::attention::{self as a, AttentionShape, Heads, HeadsMut, Span};
use crate::{Align, AttentionBackward, AttentionForward, AttentionKernels, Scores, Sequences};
use ferrotron_tensor::{Element, Launch, Result, Stream, Tensor, read, shape_error, write};

/// Steps of batch, token and head, whether or not there is a batch axis.
fn strides(t: &Tensor) -> Result<[usize; 3]> {
    match (t.shape(), t.strides()) {
        ([.., d], [.., c]) if *d > 1 && *c != 1 => shape_error("attention", "channels must be contiguous"),
        (_, [batch, token, head, _]) => Ok([*batch, *token, *head]),
        (_, [token, head, _]) => Ok([0, *token, *head]),
        _ => shape_error("attention", format!("{t:?} has neither 3 nor 4 axes")),
    }
}

fn heads<'a, T: Element>(l: &Launch<'a>, i: usize, t: &Tensor) -> Result<Heads<'a, T>> {
    let [batch, token, head] = strides(t)?;
    Ok(Heads { data: l.slice(i)?, batch, token, head })
}

fn heads_mut<'a, T: Element>(l: &Launch<'a>, i: usize, t: &Tensor) -> Result<HeadsMut<'a, T>> {
    let [batch, token, head] = strides(t)?;
    let (ptr, len) = l.pointer_mut(i)?;
    // SAFETY: the launch declared the argument written and checked that no other argument shares an element
    // with it; the view's own strides come from a tensor, whose elements are distinct.
    Ok(unsafe { HeadsMut::new(ptr, len, batch, token, head) })
}

/// Tokens that are in no sequence.
struct Plan {
    shape: AttentionShape,
    spans: Vec<Span>,
    gaps: bool,
}

fn plan(scores: &Scores, sequences: Sequences, f: &AttentionForward) -> Result<Plan> {
    const OP: &str = "attention";
    let bad = || {
        shape_error(
            OP,
            format!(
                "q {:?}, k {:?}, v {:?}, out {:?}, lse {:?} do not belong together",
                f.q.shape(),
                f.k.shape(),
                f.v.shape(),
                f.out.shape(),
                f.lse.shape()
            ),
        )
    };
    // [batch, tokens, heads, channels] of each, batch 1 where there is no such axis.
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
    let spans = match sequences {
        Sequences::Batch => (0..q[0])
            .map(|b| Span {
                batch: b,
                q_start: 0,
                q_len: q[1],
                k_start: 0,
                k_len: k[1],
                lse_base: b * lse_batch,
            })
            .collect(),
        Sequences::Packed { q: oq, k: ok } => {
            let inside = |o: &[i32], n: usize| {
                o.first().is_some_and(|x| *x >= 0)
                    && o.windows(2).all(|w| w[0] <= w[1])
                    && o.last().is_some_and(|x| *x as usize <= n)
            };
            if oq.len() != ok.len() || !inside(oq, q[1]) || !inside(ok, k[1]) {
                return shape_error(OP, "sequence offsets must ascend within the tokens, alike for q and k");
            }
            oq.windows(2)
                .zip(ok.windows(2))
                .map(|(q, k)| Span {
                    batch: 0,
                    q_start: q[0] as usize,
                    q_len: (q[1] - q[0]) as usize,
                    k_start: k[0] as usize,
                    k_len: (k[1] - k[0]) as usize,
                    lse_base: q[0] as usize * lse_token,
                })
                .collect::<Vec<_>>()
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
            Align::TopLeft => a::Align::TopLeft,
            Align::BottomRight => a::Align::BottomRight,
        },
        window: (scores.left, scores.right),
        lse_head,
        lse_token,
    };
    Ok(Plan { shape, spans, gaps })
}

/// Zeroes a view whose tokens are not all in a sequence, row by row: other views may share its buffer.
fn zero<T: Element>(l: &Launch, i: usize, t: &Tensor) -> Result<()> {
    let [batch, token, head] = strides(t)?;
    let (ptr, len) = l.pointer_mut::<T>(i)?;
    let (b, n, h, d) = match t.shape() {
        [b, n, h, d] => (*b, *n, *h, *d),
        [n, h, d] => (1, *n, *h, *d),
        _ => return Ok(()),
    };
    for row in (0..b * n * h).map(|r| (r / (n * h)) * batch + (r / h % n) * token + (r % h) * head) {
        debug_assert!(row + d <= len);
        // SAFETY: rows of the view lie inside it; all-zero bytes are a value of every element type.
        unsafe { std::ptr::write_bytes(ptr.add(row), 0, d) };
    }
    Ok(())
}

impl AttentionKernels for CpuKernels {
    fn attention_forward(
        &self,
        s: &Stream,
        scores: &Scores,
        sequences: Sequences,
        f: &AttentionForward,
    ) -> Result<()> {
        const OP: &str = "attention_forward";
        let Plan { shape, spans, gaps } = plan(scores, sequences, f)?;
        let mut args = vec![read(f.q), read(f.k), read(f.v), write(f.out), write(f.lse)];
        args.extend(f.sink.map(read));
        s.launch(OP, &args, |l| {
            floats!(OP, f.q.dtype(), T => {
                if gaps {
                    zero::<T>(l, 3, f.out)?;
                }
                let (q, k, v) = (heads::<T>(l, 0, f.q)?, heads(l, 1, f.k)?, heads(l, 2, f.v)?);
                let sink = f.sink.map(|_| l.slice(5)).transpose()?;
                let out = heads_mut(l, 3, f.out)?;
                a::forward(l.threads(), self.isa, &shape, &spans, q, k, v, sink, &out, l.slice_mut(4)?)
            })
        })
    }

    fn attention_backward(
        &self,
        s: &Stream,
        scores: &Scores,
        sequences: Sequences,
        b: &AttentionBackward,
    ) -> Result<()> {
        const OP: &str = "attention_backward";
        let f = &b.forward;
        let Plan { shape, spans, gaps } = plan(scores, sequences, f)?;
        for (x, like) in [(b.dout, f.out), (b.dq, f.q), (b.dk, f.k), (b.dv, f.v)] {
            if x.shape() != like.shape() {
                return shape_error(OP, format!("gradient {:?} of {:?}", x.shape(), like.shape()));
            }
        }
        if b.dsink.is_some() && f.sink.is_none() {
            return shape_error(OP, "a gradient of the sink is asked for, but there is no sink");
        }
        let mut args = vec![read(f.q), read(f.k), read(f.v), read(f.out), read(b.dout), read(f.lse)];
        args.extend([write(b.dq), write(b.dk), write(b.dv)]);
        let sink = f.sink.map(|t| {
            args.push(read(t));
            args.len() - 1
        });
        let dsink = b.dsink.map(|t| {
            args.push(write(t));
            args.len() - 1
        });
        s.launch(OP, &args, |l| {
            floats!(OP, f.q.dtype(), T => {
                if gaps {
                    [(6, b.dq), (7, b.dk), (8, b.dv)].iter().try_for_each(|(i, t)| zero::<T>(l, *i, t))?;
                }
                a::backward(
                    l.threads(),
                    self.isa,
                    &shape,
                    &spans,
                    heads::<T>(l, 0, f.q)?,
                    heads(l, 1, f.k)?,
                    heads(l, 2, f.v)?,
                    heads(l, 3, f.out)?,
                    heads(l, 4, b.dout)?,
                    l.slice(5)?,
                    sink.map(|i| l.slice(i)).transpose()?,
                    &heads_mut(l, 6, b.dq)?,
                    &heads_mut(l, 7, b.dk)?,
                    &heads_mut(l, 8, b.dv)?,
                    dsink.map(|i| l.slice_mut(i)).transpose()?,
                )
            })
        })
    }
}
