use super::{CpuKernels, floats};
use crate::attention::merge::check_merge;
use crate::attention::mla::check_keys;
use crate::attention::plan::{AttentionPlan, gradients, plan, strides};
use crate::cpu::attention::{
    self as a, AttentionGradients, AttentionInputs, AttentionOutputs, Heads, HeadsMut,
};
use crate::cpu::attention_merge::merge;
use crate::cpu::mla;
use crate::{AttentionBackward, AttentionForward, AttentionKernels, AttentionParams, Sequences};
use ferrotron_tensor::{Element, Launch, Result, Stream, Tensor, read, write};

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
        scores: &AttentionParams,
        sequences: Sequences,
        f: &AttentionForward,
    ) -> Result<()> {
        const OP: &str = "attention_forward";
        let AttentionPlan { shape, spans, gaps, .. } = plan(scores, sequences, f)?;
        let mut args = vec![read(f.q), read(f.k), read(f.v), write(f.out), write(f.lse)];
        args.extend(f.sink.map(read));
        s.launch(OP, &args, |l| {
            floats!(OP, f.q.dtype(), T => {
                if gaps {
                    zero::<T>(l, 3, f.out)?;
                }
                let inputs = AttentionInputs::<T> {
                    q: heads(l, 0, f.q)?,
                    k: heads(l, 1, f.k)?,
                    v: heads(l, 2, f.v)?,
                    sink: f.sink.map(|_| l.slice(5)).transpose()?,
                };
                let out = heads_mut(l, 3, f.out)?;
                a::forward(self.context(l), &shape, &spans, inputs, &out, l.slice_mut(4)?)
            })
        })
    }

    fn attention_backward(
        &self,
        s: &Stream,
        scores: &AttentionParams,
        sequences: Sequences,
        b: &AttentionBackward,
    ) -> Result<()> {
        const OP: &str = "attention_backward";
        let f = &b.forward;
        let AttentionPlan { shape, spans, gaps, .. } = plan(scores, sequences, f)?;
        gradients(b)?;
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
                let inputs = AttentionInputs::<T> {
                    q: heads(l, 0, f.q)?,
                    k: heads(l, 1, f.k)?,
                    v: heads(l, 2, f.v)?,
                    sink: sink.map(|i| l.slice(i)).transpose()?,
                };
                let (out, dout) = (heads(l, 3, f.out)?, heads(l, 4, b.dout)?);
                let gradients = AttentionGradients {
                    dq: &heads_mut(l, 6, b.dq)?,
                    dk: &heads_mut(l, 7, b.dk)?,
                    dv: &heads_mut(l, 8, b.dv)?,
                    dsink: dsink.map(|i| l.slice_mut(i)).transpose()?,
                };
                let outputs = AttentionOutputs { out, dout, lse: l.slice(5)? };
                a::backward(self.context(l), &shape, &spans, inputs, outputs, gradients)
            })
        })
    }

    fn merge_attention(
        &self,
        s: &Stream,
        out: &Tensor,
        lse: &Tensor,
        part: &Tensor,
        part_lse: &Tensor,
    ) -> Result<()> {
        const OP: &str = "merge_attention";
        let [_, width] = check_merge(OP, out, lse, part, part_lse)?;
        s.launch(OP, &[write(out), write(lse), read(part), read(part_lse)], |l| {
            floats!(OP, part.dtype(), T => merge::<T>(
                self.context(l), width, l.slice_mut(0)?, l.slice_mut(1)?, l.slice(2)?, l.slice(3)?,
            ))
        })
    }

    fn mla_concat_keys(&self, s: &Stream, own: &Tensor, shared: &Tensor, k: &Tensor) -> Result<()> {
        const OP: &str = "mla_concat_keys";
        let [own_rows, shared_rows, k_rows] = check_keys(OP, own, shared, k)?;
        s.launch(OP, &[read(own), read(shared), write(k)], |a| {
            floats!(OP, k.dtype(), T => mla::mla_concat_keys::<T>(
                a.threads(), (a.slice(0)?, own_rows), (a.slice(1)?, shared_rows), (a.slice_mut(2)?, k_rows),
            ))
        })
    }

    fn mla_split_keys(&self, s: &Stream, k: &Tensor, own: &Tensor, shared: &Tensor) -> Result<()> {
        const OP: &str = "mla_split_keys";
        let [own_rows, shared_rows, k_rows] = check_keys(OP, own, shared, k)?;
        s.launch(OP, &[read(k), write(own), write(shared)], |a| {
            floats!(OP, k.dtype(), T => mla::mla_split_keys::<T>(
                a.threads(), (a.slice(0)?, k_rows), (a.slice_mut(1)?, own_rows), (a.slice_mut(2)?, shared_rows),
            ))
        })
    }
}
