//! Launches of the attention kernels.
//!
//! Forward is one kernel over tiles of queries. Backward is deterministic without atomics: a row kernel for
//! `Σ dout·out`, one over tiles of keys for dk and dv, one over tiles of queries for dq.

mod instances;

use super::{CudaKernels, Grid, Kernel, typed};
use crate::attention_plan::{Plan, gradients, plan, strides};
use crate::checks::dtypes;
use crate::cpu::attention::{Align, AttentionShape, Span, check_shape, per_head};
use crate::{AttentionBackward, AttentionForward, AttentionKernels, Scores, Sequences};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, shape_error, write};
use instances::{Instance, Step, instance};
use std::cmp::{Ordering, Reverse};
use std::f32::consts::LOG2_E;

/// Sequences up to this length keep every sum of positions within 32 bits.
const LONGEST: usize = 1 << 28;
/// A window without bound.
const UNBOUNDED: i32 = 1 << 29;
/// Numbers of a row of the table of tiles.
const ITEM: usize = 8;

/// `View` of common.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct View {
    data: u64,
    batch: i64,
    token: i64,
    head: i64,
}

/// `Attention` of common.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Args {
    /// q, k, v, out, dout, dq, dk, dv.
    views: [View; 8],
    lse: u64,
    lse_batch: i64,
    lse_head: i64,
    lse_token: i64,
    sink: u64,
    dsink: u64,
    weights: u64,
    delta: u64,
    items: u64,
    tokens: i64,
    q_from: i64,
    q_to: i64,
    batches: i32,
    heads: i32,
    group: i32,
    d_qk: i32,
    d_v: i32,
    q_len: i32,
    k_len: i32,
    tiles: i32,
    left: i32,
    right: i32,
    bottom: i32,
    wide: u32,
    scale: f32,
    inner: f32,
    outer: f32,
    factor: f32,
}

/// `Blank` of rows.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Blank {
    view: View,
    tokens: i64,
    from: i64,
    to: i64,
    heads: i32,
    channels: i32,
}

/// Which side of the scores the tiles of a kernel cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Query,
    Key,
}

/// A checked launch.
struct Job {
    shape: AttentionShape,
    spans: Vec<Span>,
    instance: Instance,
    args: Args,
    packed: bool,
    gaps: bool,
    /// Tokens of the sequences, as `from..to`, of queries and of keys.
    inside: [[usize; 2]; 2],
}

fn job(op: &'static str, scores: &Scores, sequences: Sequences, f: &AttentionForward) -> Result<Job> {
    let Plan { shape, spans, gaps, lse_batch } = plan(scores, sequences, f)?;
    check_shape(&shape)?;
    dtypes(op, f.q.dtype(), &[f.k, f.v, f.out])?;
    dtypes(op, DType::F32, &[f.lse])?;
    if let Some(sink) = f.sink {
        dtypes(op, DType::F32, &[sink])?;
        one_each(op, &shape, "the sink", sink)?;
    }
    if spans.iter().any(|s| s.q_len > LONGEST || s.k_len > LONGEST) {
        return shape_error(op, format!("a sequence of more than {LONGEST} tokens is too long; split it"));
    }
    let instance = instance(op, f.q.dtype(), shape.d_qk, shape.d_v)?;
    let (packed, batches, tokens) = match f.q.shape() {
        [b, t, ..] if matches!(sequences, Sequences::Batch) => (false, *b, *t),
        [t, ..] => (true, 1, *t),
        [] => (true, 0, 0),
    };
    let first = spans.first();
    let inside = match sequences {
        Sequences::Batch => [[0, tokens], [0, first.map_or(0, |s| s.k_len)]],
        Sequences::Packed { q, k } => {
            [q, k].map(|o| [o.first(), o.last()].map(|x| x.map_or(0, |x| *x as usize)))
        }
    };
    let bound = |n: Option<usize>| n.map_or(UNBOUNDED, |n| n.min(UNBOUNDED as usize) as i32);
    let inner = shape.softcap.map_or(shape.scale * LOG2_E, |cap| shape.scale / cap);
    let mapped = shape.softcap.is_some() || shape.scale.partial_cmp(&0.0) != Some(Ordering::Greater);
    let args = Args {
        lse_batch: lse_batch as i64,
        lse_head: shape.lse_head as i64,
        lse_token: shape.lse_token as i64,
        tokens: tokens as i64,
        q_from: inside[0][0] as i64,
        q_to: inside[0][1] as i64,
        batches: batches as i32,
        heads: shape.heads as i32,
        group: (shape.heads / shape.kv_heads) as i32,
        d_qk: shape.d_qk as i32,
        d_v: shape.d_v as i32,
        q_len: first.map_or(0, |s| s.q_len) as i32,
        k_len: first.map_or(0, |s| s.k_len) as i32,
        left: bound(shape.window.0),
        right: if shape.causal { 0 } else { bound(shape.window.1) },
        bottom: i32::from(shape.align == Align::BottomRight),
        scale: shape.scale,
        inner,
        outer: shape.softcap.map_or(0.0, |cap| cap * LOG2_E),
        factor: if mapped { 1.0 } else { inner },
        ..Args::default()
    };
    Ok(Job { shape, spans, instance, args, packed, gaps, inside })
}

/// One contiguous f32 a head?
fn one_each(op: &'static str, shape: &AttentionShape, what: &str, t: &Tensor) -> Result<()> {
    per_head(shape, what, Some(t.numel()))?;
    if t.rank() != 1 || !t.is_contiguous() {
        return shape_error(op, format!("{what} {t:?} must be one contiguous axis"));
    }
    Ok(())
}

impl Job {
    /// Where argument `i` of the launch lies; it is the view `at` of the kernels.
    fn view(&mut self, l: &Launch, i: usize, t: &Tensor, at: usize) -> Result<()> {
        let [batch, token, head] = strides(t)?;
        let data = l.address(i)?;
        let [b, n, h] = match t.shape() {
            [b, n, h, _] => [*b, *n, *h],
            [n, h, _] => [1, *n, *h],
            _ => [0; 3],
        };
        // The step of an axis with one element is never taken.
        let steps = [(b, batch), (n, token), (h, head)];
        let aligned = steps.iter().all(|(n, step)| *n <= 1 || (step * t.dtype().size()).is_multiple_of(16));
        if aligned && data.is_multiple_of(16) {
            self.args.wide |= 1 << at;
        }
        self.args.views[at] = View { data, batch: batch as i64, token: token as i64, head: head as i64 };
        Ok(())
    }

    /// The tiles of packed sequences, those with the most work first. `None` where the kernels count for themselves.
    fn items(&self, s: &Stream, step: &Step, side: Side) -> Result<Option<Tensor>> {
        if !self.packed {
            return Ok(None);
        }
        let (left, right) = (i64::from(self.args.left), i64::from(self.args.right));
        let mut tiles = Vec::new();
        for span in &self.spans {
            let (q_len, k_len) = (span.q_len as i64, span.k_len as i64);
            let off = if self.args.bottom == 1 { k_len - q_len } else { 0 };
            let len = if side == Side::Query { span.q_len } else { span.k_len };
            for first in (0..len).step_by(step.rows) {
                let (from, to) = (first as i64, (len.min(first + step.rows) - 1) as i64);
                let seen = match side {
                    Side::Query => (to + off + right).min(k_len - 1) - (from + off - left).max(0),
                    Side::Key => (to - off + left).min(q_len - 1) - (from - off - right).max(0),
                };
                tiles.push((seen, span, first));
            }
        }
        tiles.sort_by_key(|(seen, ..)| Reverse(*seen));
        let row = |(_, s, first): &(i64, &Span, usize)| {
            [s.q_start, s.q_len, s.k_start, s.k_len, *first, 0, 0, 0].map(|x| x as i32)
        };
        let table: Vec<i32> = tiles.iter().flat_map(row).collect();
        Ok(Some(s.upload(&table, &[table.len()], Category::Workspace)?))
    }

    /// Queues a kernel over the tiles of one side; `items` is the argument that holds its table.
    fn queue(
        &self,
        kernels: &CudaKernels,
        l: &Launch,
        step: &Step,
        side: Side,
        items: Option<(usize, &Tensor)>,
    ) -> Result<()> {
        let (len, heads) = match side {
            Side::Query => (self.args.q_len, self.shape.heads),
            Side::Key => (self.args.k_len, self.shape.kv_heads),
        };
        let mut args = self.args;
        let tiles = match items {
            Some((_, t)) if t.numel() == 0 => 0,
            Some((i, t)) => {
                args.items = l.address(i)?;
                t.numel() / ITEM
            }
            None if self.packed => 0,
            None => {
                args.tiles = (len as usize).div_ceil(step.rows) as i32;
                args.tiles as usize * args.batches as usize
            }
        };
        let grid = Grid {
            blocks: [blocks(tiles * heads * step.parts)?, 1, 1],
            threads: step.threads,
            shared: step.shared,
        };
        kernels.queue(l, step.kernel, grid, &args)
    }

    /// Zeroes the rows of a view that belong to no sequence.
    fn blank(
        &self,
        kernels: &CudaKernels,
        l: &Launch,
        kernel: Kernel,
        at: usize,
        t: &Tensor,
        side: Side,
    ) -> Result<()> {
        let [from, to] = self.inside[usize::from(side == Side::Key)];
        let ([tokens, heads, channels], true) = (t.shape(), self.gaps) else { return Ok(()) };
        let numbers = (tokens - (to - from)) * heads * channels;
        let args = Blank {
            view: self.args.views[at],
            tokens: *tokens as i64,
            from: from as i64,
            to: to as i64,
            heads: *heads as i32,
            channels: *channels as i32,
        };
        let grid =
            Grid { blocks: [blocks(numbers.div_ceil(256).min(1 << 16))?, 1, 1], threads: 256, shared: 0 };
        kernels.queue(l, kernel, grid, &args)
    }
}

fn blocks(n: usize) -> Result<u32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n as u32),
        Err(_) => shape_error("attention", format!("{n} blocks of work are too many; use smaller batches")),
    }
}

impl AttentionKernels for CudaKernels {
    fn attention_forward(
        &self,
        s: &Stream,
        scores: &Scores,
        sequences: Sequences,
        f: &AttentionForward,
    ) -> Result<()> {
        const OP: &str = "attention_forward";
        let mut job = job(OP, scores, sequences, f)?;
        let step = job.instance.forward;
        let blank = typed!(OP, f.q.dtype(), "attention_rows", "attention_blank")?;
        let items = job.items(s, &step, Side::Query)?;
        let mut args = vec![read(f.q), read(f.k), read(f.v), write(f.out), write(f.lse)];
        args.extend(f.sink.map(read));
        let table = items.as_ref().map(|t| (args.len(), t));
        args.extend(items.as_ref().map(read));
        s.launch(OP, &args, |l| {
            for (i, t) in [f.q, f.k, f.v, f.out].into_iter().enumerate() {
                job.view(l, i, t, i)?;
            }
            job.args.lse = l.address(4)?;
            job.args.sink = f.sink.map_or(Ok(0), |_| l.address(5))?;
            job.blank(self, l, blank, 3, f.out, Side::Query)?;
            job.queue(self, l, &step, Side::Query, table)
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
        let mut job = job(OP, scores, sequences, f)?;
        gradients(b)?;
        dtypes(OP, f.q.dtype(), &[b.dout, b.dq, b.dk, b.dv])?;
        if let Some(dsink) = b.dsink {
            dtypes(OP, DType::F32, &[dsink])?;
            one_each(OP, &job.shape, "the sink's gradient", dsink)?;
        }
        let Instance { keys, queries, .. } = job.instance;
        let blank = typed!(OP, f.q.dtype(), "attention_rows", "attention_blank")?;
        let delta = typed!(OP, f.q.dtype(), "attention_rows", "attention_delta")?;
        let rows = job.args.batches as usize * job.args.tokens as usize * job.shape.heads;
        let scratch = [(); 2].map(|()| Tensor::empty(s, &[rows], DType::F32, Category::Workspace));
        let [weights, deltas] = scratch;
        let (weights, deltas) = (weights?, deltas?);
        let tables = [job.items(s, &keys, Side::Key)?, job.items(s, &queries, Side::Query)?];

        let views = [f.q, f.k, f.v, f.out, b.dout, b.dq, b.dk, b.dv];
        let mut args: Vec<_> = views[..5].iter().map(|t| read(t)).collect();
        args.extend(views[5..].iter().map(|t| write(t)));
        args.extend([read(f.lse), write(&weights), write(&deltas)]);
        let sink = f.sink.map(|t| {
            args.push(read(t));
            args.len() - 1
        });
        let dsink = b.dsink.map(|t| {
            args.push(write(t));
            args.len() - 1
        });
        let [key_table, query_table] = [&tables[0], &tables[1]].map(|table| {
            table.as_ref().map(|t| {
                args.push(read(t));
                (args.len() - 1, t)
            })
        });
        s.launch(OP, &args, |l| {
            for (i, t) in views.into_iter().enumerate() {
                job.view(l, i, t, i)?;
            }
            job.args.lse = l.address(8)?;
            job.args.weights = l.address(9)?;
            job.args.delta = l.address(10)?;
            job.args.sink = sink.map_or(Ok(0), |i| l.address(i))?;
            job.args.dsink = dsink.map_or(Ok(0), |i| l.address(i))?;
            for (at, t, side) in [(5, b.dq, Side::Query), (6, b.dk, Side::Key), (7, b.dv, Side::Key)] {
                job.blank(self, l, blank, at, t, side)?;
            }
            let inside = (job.inside[0][1] - job.inside[0][0]) * job.args.batches as usize * job.shape.heads;
            // Eight threads a row.
            let grid = Grid { blocks: [blocks(inside.div_ceil(32))?, 1, 1], threads: 256, shared: 0 };
            self.queue(l, delta, grid, &job.args)?;
            if dsink.is_some() {
                let kernel = Kernel { source: "attention_rows", name: "attention_sink_f32" };
                let grid = Grid { blocks: [blocks(job.shape.heads)?, 1, 1], threads: 256, shared: 0 };
                self.queue(l, kernel, grid, &job.args)?;
            }
            job.queue(self, l, &keys, Side::Key, key_table)?;
            job.queue(self, l, &queries, Side::Query, query_table)
        })
    }
}
