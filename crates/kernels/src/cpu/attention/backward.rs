//! The backward pass. With `p = exp(s - lse)`, `dp = dout·v` and `delta = Σ_c dout_c out_c` of each query:
//! ```text
//! ds = p (dp - delta)            (softcap: times 1 - tanh²)
//! dv_j = Σ_i p_ij dout_i         dk_j = scale Σ_i ds_ij q_i         dq_i = scale Σ_j ds_ij k_j
//! dsink = -Σ_i exp(sink - lse_i) delta_i
//! ```
//! A task is one key head of one sequence, or every n-th chunk of its keys where there are too few heads to occupy all
//! threads; then partial sums of `dq` are kept per task in f32 and added in order at the end.

use super::block_gemm::{self, Engine, EngineKind, Left, Output, Plain, Right};
use super::check::{self, Side};
use super::mask::{Mask, MaskCoverage};
use super::scratch::{Buffer, Pool};
use super::softmax::{self, ScoreBlock};
use super::softmax_state::{SavedQueries, VisibleRange};
use super::tiles::{accumulate, dot, store_scaled};
use super::transpose::transpose;
use super::view::TokenHead;
use super::{
    AttentionGradients, AttentionInputs, AttentionOutputs, AttentionShape, HeadsMut, KEYS, QUERIES, Span,
    padded,
};
use crate::cpu::{CpuContext, Isa};
use ferrotron_tensor::{Float, Result, Threads};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Blocks of keys whose gradients are summed up at a time.
const BLOCKS: usize = 4;
/// Keys of a chunk.
const CHUNK: usize = BLOCKS * KEYS;
/// Sequences are split until there are this many tasks, if they are long enough.
const PIECES: usize = 32;

/// `dq`, `dk`, `dv` (overwritten, gradients of GQA groups summed in the order of the heads) and `dsink` (added to)
/// from the inputs and outputs of [`forward`](super::forward). Queries without a visible key have no gradient.
pub fn backward<T: Float>(
    cpu: CpuContext,
    shape: &AttentionShape,
    spans: &[Span],
    inputs: AttentionInputs<'_, T>,
    outputs: AttentionOutputs<'_, T>,
    gradients: AttentionGradients<'_, T>,
) -> Result<()> {
    let AttentionInputs { q, k, v, sink } = inputs;
    let AttentionOutputs { out, dout, lse } = outputs;
    let AttentionGradients { dq, dk, dv, dsink } = gradients;
    check::shape(shape)?;
    check::per_head(shape, "the sink", sink.map(<[f32]>::len))?;
    check::per_head(shape, "the sink's gradient", dsink.as_ref().map(|d| d.len()))?;
    check::reads("q", Side::Query, spans, &q, shape.heads, shape.d_qk)?;
    check::reads("k", Side::Key, spans, &k, shape.kv_heads, shape.d_qk)?;
    check::reads("v", Side::Key, spans, &v, shape.kv_heads, shape.d_v)?;
    check::reads("out", Side::Query, spans, &out, shape.heads, shape.d_v)?;
    check::reads("dout", Side::Query, spans, &dout, shape.heads, shape.d_v)?;
    check::lse(shape, spans, lse.len())?;
    check::writes("dq", Side::Query, spans, dq, shape.heads, shape.d_qk)?;
    check::writes("dk", Side::Key, spans, dk, shape.kv_heads, shape.d_qk)?;
    check::writes("dv", Side::Key, spans, dv, shape.kv_heads, shape.d_v)?;

    let rows = spans.iter().map(|s| s.q_len * shape.heads).sum();
    let mut delta = vec![0.0f32; rows];
    let job = Job { isa: cpu.isa, shape, inputs, outputs, dq, dk, dv };
    deltas(cpu.threads, &job, spans, &mut delta, dsink);
    match block_gemm::best::<T>(cpu.isa) {
        #[cfg(target_arch = "x86_64")]
        EngineKind::Matrix => run::<T, super::block_gemm_amx::Matrix>(cpu.threads, &job, spans, &delta),
        EngineKind::Plain => run::<T, Plain>(cpu.threads, &job, spans, &delta),
    }
    Ok(())
}

/// Arguments of the pass.
struct Job<'a, T> {
    isa: Isa,
    shape: &'a AttentionShape,
    inputs: AttentionInputs<'a, T>,
    outputs: AttentionOutputs<'a, T>,
    dq: &'a HeadsMut<'a, T>,
    dk: &'a HeadsMut<'a, T>,
    dv: &'a HeadsMut<'a, T>,
}

impl<T> Job<'_, T> {
    /// Saved log-sum-exp of query `i`.
    fn lse(&self, span: &Span, head: usize, i: usize) -> f32 {
        self.outputs.lse[span.lse_base + head * self.shape.lse_head + i * self.shape.lse_token]
    }
}

/// `delta` of every query, `[heads, q_len]` span after span, and the gradient of the sink.
fn deltas<T: Float>(
    threads: &Threads,
    job: &Job<'_, T>,
    spans: &[Span],
    delta: &mut [f32],
    dsink: Option<&mut [f32]>,
) {
    struct DeltaTask<'a> {
        span: &'a Span,
        head: usize,
        delta: &'a mut [f32],
        dsink: f64,
    }
    let mut pieces = Vec::with_capacity(spans.len() * job.shape.heads);
    let mut rest = delta;
    for span in spans {
        for head in 0..job.shape.heads {
            let (delta, tail) = rest.split_at_mut(span.q_len);
            rest = tail;
            pieces.push(DeltaTask { span, head, delta, dsink: 0.0 });
        }
    }
    threads.parallel_chunks(&mut pieces, 1, &|_, piece| {
        for DeltaTask { span, head, delta, dsink } in piece {
            let sink = job.inputs.sink.map(|s| s[*head]);
            for (i, delta) in delta.iter_mut().enumerate() {
                let at = TokenHead { batch: span.batch, token: span.q_start + i, head: *head };
                let out = &job.outputs.out.from(at)[..job.shape.d_v];
                let dout = &job.outputs.dout.from(at)[..job.shape.d_v];
                *delta = dot(job.isa, out, dout);
                let lse = job.lse(span, *head, i);
                if let Some(sink) = sink
                    && lse != f32::NEG_INFINITY
                {
                    *dsink -= f64::from((sink - lse).exp() * *delta);
                }
            }
        }
    });
    if let Some(dsink) = dsink {
        for (head, to) in dsink.iter_mut().enumerate() {
            let sum: f64 = pieces.iter().filter(|p| p.head == head).map(|p| p.dsink).sum();
            *to += sum as f32;
        }
    }
}

/// Scratch of one thread. `k`, `v`, `transposed` and the gradients hold a chunk, block after block.
struct Scratch<E: Engine> {
    k: Buffer<E::E>,
    v: Buffer<E::E>,
    transposed: Buffer<E::E>,
    q_tile: Buffer<E::E>,
    q_right: Buffer<E::E>,
    q_transposed: Buffer<E::E>,
    dout_tile: Buffer<E::E>,
    dout_right: Buffer<E::E>,
    dout_transposed: Buffer<E::E>,
    p_left: Buffer<E::E>,
    ds_left: Buffer<E::E>,
    ds_right: Buffer<E::E>,
    s: Buffer<f32>,
    dp: Buffer<f32>,
    dq: Buffer<f32>,
    dk: Buffer<f32>,
    dv: Buffer<f32>,
    rows: Buffer<f32>,
}

impl<E: Engine> Scratch<E> {
    fn new(shape: &AttentionShape) -> Scratch<E> {
        let (d, dv) = (padded(shape.d_qk), padded(shape.d_v));
        let copy = |n| if E::COPIES { n } else { 0 };
        Scratch {
            k: Buffer::new(CHUNK * d),
            v: Buffer::new(CHUNK * dv),
            transposed: Buffer::new(CHUNK * d),
            q_tile: Buffer::new(QUERIES * d),
            q_right: Buffer::new(copy(QUERIES * d)),
            q_transposed: Buffer::new(QUERIES * d),
            dout_tile: Buffer::new(QUERIES * dv),
            dout_right: Buffer::new(copy(QUERIES * dv)),
            dout_transposed: Buffer::new(QUERIES * dv),
            p_left: Buffer::new(copy(KEYS * QUERIES)),
            ds_left: Buffer::new(copy(KEYS * QUERIES)),
            ds_right: Buffer::new(copy(KEYS * QUERIES)),
            s: Buffer::new(KEYS * QUERIES),
            dp: Buffer::new(KEYS * QUERIES),
            dq: Buffer::new(d * QUERIES),
            dk: Buffer::new(CHUNK * d),
            dv: Buffer::new(CHUNK * dv),
            rows: Buffer::new(QUERIES * d),
        }
    }
}

/// One key head of a span, or part of its keys.
struct KeyHeadTask<'a> {
    span: &'a Span,
    /// `[heads, q_len]`.
    delta: &'a [f32],
    kv_head: usize,
    part: usize,
    parts: usize,
    /// Partial sums of dq, `[heads of the group, q_len, padded(d_qk)]`; empty where the task has all keys in one chunk and
    /// writes dq itself.
    share: &'a mut [f32],
}

fn run<T: Float, E: Engine>(threads: &Threads, job: &Job<'_, T>, spans: &[Span], delta: &[f32]) {
    let shape = job.shape;
    let (group, d) = (shape.heads / shape.kv_heads, padded(shape.d_qk));
    let wanted = PIECES.div_ceil((spans.len() * shape.kv_heads).max(1));
    let parts = |span: &Span| span.k_len.div_ceil(CHUNK).clamp(1, wanted);
    let share = |span: &Span| if span.k_len <= CHUNK { 0 } else { group * span.q_len * d };
    let size = |span: &Span| shape.kv_heads * parts(span) * share(span);
    let mut shares = vec![0.0f32; spans.iter().map(size).sum()];

    let mut pieces = Vec::new();
    let (mut rest, mut delta) = (shares.as_mut_slice(), delta);
    for span in spans {
        let (here, later) = delta.split_at(span.q_len * shape.heads);
        delta = later;
        for kv_head in 0..shape.kv_heads {
            for part in 0..parts(span) {
                let (share, tail) = rest.split_at_mut(share(span));
                rest = tail;
                pieces.push(KeyHeadTask { span, delta: here, kv_head, part, parts: parts(span), share });
            }
        }
    }
    let pool = Pool::new(|| Scratch::<E>::new(shape));
    threads.parallel_chunks(&mut pieces, 1, &|_, pieces| {
        for piece in pieces {
            pool.with(|scratch| differentiate::<T, E>(job, piece, scratch));
        }
    });
    drop(pieces);

    let mut from = 0;
    for span in spans {
        if share(span) > 0 {
            let (parts, per_head) = (parts(span), span.q_len * d);
            let shares = &shares[from..from + size(span)];
            threads.parallel_ranges(shape.heads * span.q_len, QUERIES, &|rows| {
                let mut sum = vec![0.0f32; d];
                for row in rows {
                    let (head, i) = (row / span.q_len, row % span.q_len);
                    sum.fill(0.0);
                    for part in 0..parts {
                        let piece = (head / group * parts + part) * group + head % group;
                        accumulate(job.isa, &shares[piece * per_head + i * d..][..d], &mut sum);
                    }
                    let at = TokenHead { batch: span.batch, token: span.q_start + i, head };
                    write(job.isa, job.dq, at, shape.scale, &sum[..shape.d_qk]);
                }
            });
        }
        from += size(span);
    }
}

/// `to[at] = row * factor`.
fn write<T: Float>(isa: Isa, to: &HeadsMut<'_, T>, at: TokenHead, factor: f32, row: &[f32]) {
    // SAFETY: `check` found the row inside its buffer and in one span only; one task has each span's rows.
    store_scaled(isa, row, factor, unsafe { to.row(at, row.len()) });
}

fn differentiate<T: Float, E: Engine>(
    job: &Job<'_, T>,
    piece: &mut KeyHeadTask<'_>,
    scratch: &mut Scratch<E>,
) {
    let (shape, span, isa) = (job.shape, piece.span, job.isa);
    let engine = E::start(isa);
    let mask = Mask::new(shape, span);
    let (d, dv) = (padded(shape.d_qk), padded(shape.d_v));
    let group = shape.heads / shape.kv_heads;
    let heads = piece.kv_head * group..(piece.kv_head + 1) * group;
    if span.k_len == 0 {
        for head in heads.clone() {
            zero_queries(job, span, &QueryBlock { head, queries: 0..span.q_len });
        }
    }
    for chunk in (piece.part * CHUNK..span.k_len).step_by(piece.parts * CHUNK) {
        let chunk = chunk..span.k_len.min(chunk + CHUNK);
        for (b, first) in chunk.clone().step_by(KEYS).enumerate() {
            let len = (chunk.end - first).min(KEYS);
            let at = TokenHead { batch: span.batch, token: span.k_start + first, head: piece.kv_head };
            let k = &mut scratch.k[b * KEYS * d..][..KEYS * d];
            engine.stage(job.inputs.k.from(at), job.inputs.k.token, len, shape.d_qk, k);
            engine.transpose_left(len, d, k, &mut scratch.transposed[b * KEYS * d..][..KEYS * d]);
            let v = &mut scratch.v[b * KEYS * dv..][..KEYS * dv];
            engine.stage(job.inputs.v.from(at), job.inputs.v.token, len, shape.d_v, v);
        }
        scratch.dk[..padded(chunk.len()) * d].fill(0.0);
        scratch.dv[..padded(chunk.len()) * dv].fill(0.0);
        for head in heads.clone() {
            for from in (0..span.q_len).step_by(QUERIES) {
                let block = QueryBlock { head, queries: from..span.q_len.min(from + QUERIES) };
                if mask.cover(&block.queries, &chunk) == MaskCoverage::None {
                    if piece.share.is_empty() {
                        zero_queries(job, span, &block);
                    }
                    continue;
                }
                differentiate_block(job, &engine, piece, &block, &chunk, scratch);
            }
        }
        for (row, j) in chunk.clone().enumerate() {
            let at = TokenHead { batch: span.batch, token: span.k_start + j, head: piece.kv_head };
            write(isa, job.dk, at, shape.scale, &scratch.dk[row * d..][..shape.d_qk]);
            write(isa, job.dv, at, 1.0, &scratch.dv[row * dv..][..shape.d_v]);
        }
    }
}

/// Queries of one query head.
struct QueryBlock {
    head: usize,
    queries: Range<usize>,
}

/// Queries that see no key have no gradient.
fn zero_queries<T: Float>(job: &Job<'_, T>, span: &Span, block: &QueryBlock) {
    for i in block.queries.clone() {
        let at = TokenHead { batch: span.batch, token: span.q_start + i, head: block.head };
        // SAFETY: as in `write`; a task without a share is the only one of its span and heads.
        unsafe { job.dq.row(at, job.shape.d_qk) }.fill(T::from_f32(0.0));
    }
}

/// Gradients between one block of queries and a chunk of keys.
fn differentiate_block<T: Float, E: Engine>(
    job: &Job<'_, T>,
    engine: &E,
    piece: &mut KeyHeadTask<'_>,
    block: &QueryBlock,
    chunk: &Range<usize>,
    scratch: &mut Scratch<E>,
) {
    let (shape, span, isa) = (job.shape, piece.span, job.isa);
    let QueryBlock { head, ref queries } = *block;
    let (mask, inputs, dout) = (&Mask::new(shape, span), &job.inputs, &job.outputs.dout);
    let (d, dv, count) = (padded(shape.d_qk), padded(shape.d_v), queries.len());
    let lanes = padded(count);
    let member = head % (shape.heads / shape.kv_heads);
    let x = scratch;
    let at = TokenHead { batch: span.batch, token: span.q_start + queries.start, head };
    engine.stage(inputs.q.from(at), inputs.q.token, count, shape.d_qk, &mut x.q_tile);
    engine.right_transposed(count, d, &x.q_tile, &mut x.q_transposed);
    let q = engine.right(count, d, &x.q_tile, &mut x.q_right);
    engine.stage(dout.from(at), dout.token, count, shape.d_v, &mut x.dout_tile);
    engine.right_transposed(count, dv, &x.dout_tile, &mut x.dout_transposed);
    let dout = engine.right(count, dv, &x.dout_tile, &mut x.dout_right);

    let visible = VisibleRange::new(mask, queries);
    let mut saved = SavedQueries { lse: [0.0; QUERIES], delta: [0.0; QUERIES] };
    for (lane, i) in queries.clone().enumerate() {
        let lse = job.lse(span, head, i);
        // A query whose scores were all -inf has zero probabilities.
        saved.lse[lane] = if lse == f32::NEG_INFINITY { f32::INFINITY } else { lse * LOG2_E };
        saved.delta[lane] = piece.delta[head * span.q_len + i];
    }
    let mut fresh = true;
    for (b, first) in chunk.clone().step_by(KEYS).enumerate() {
        let keys = first..chunk.end.min(first + KEYS);
        let cover = mask.cover(queries, &keys);
        if cover == MaskCoverage::None {
            continue;
        }
        let rows = padded(keys.len());
        let k = Left { data: &x.k[b * KEYS * d..][..KEYS * d], ld: d };
        let right = Right { data: &x.q_transposed, rows: d, cols: QUERIES };
        engine.multiply((rows, d, lanes), k, right, Output { data: &mut x.s, ld: QUERIES }, false);
        let v = Left { data: &x.v[b * KEYS * dv..][..KEYS * dv], ld: dv };
        let right = Right { data: &x.dout_transposed, rows: dv, cols: QUERIES };
        engine.multiply((rows, dv, lanes), v, right, Output { data: &mut x.dp, ld: QUERIES }, false);
        let scores = ScoreBlock {
            scale: shape.scale,
            softcap: shape.softcap,
            masked: cover == MaskCoverage::Part || rows != keys.len() || lanes != count,
            first_key: first as i32,
            keys: rows,
        };
        softmax::differentiate(isa, scores, &mut x.s, &mut x.dp, &visible, &saved);
        // Stage all operands first: a GEMM right after the stores of its operand would stall on them.
        let p = engine.block_left(rows, &x.s, &mut x.p_left);
        let ds = engine.block_left(rows, &x.dp, &mut x.ds_left);
        let ds_right = engine.block_right(rows, &x.dp, &mut x.ds_right);
        let dv_block = Output { data: &mut x.dv[b * KEYS * dv..][..KEYS * dv], ld: dv };
        engine.multiply((rows, lanes, dv), p, dout, dv_block, true);
        let dk_block = Output { data: &mut x.dk[b * KEYS * d..][..KEYS * d], ld: d };
        engine.multiply((rows, lanes, d), ds, q, dk_block, true);
        let k = Left { data: &x.transposed[b * KEYS * d..][..KEYS * d], ld: KEYS };
        engine.multiply((d, rows, lanes), k, ds_right, Output { data: &mut x.dq, ld: QUERIES }, !fresh);
        fresh = false;
    }
    let (sums, rows) = (bytemuck::cast_slice(&x.dq), bytemuck::cast_slice_mut(&mut x.rows));
    transpose(isa, [d, lanes], sums, QUERIES, rows, d);
    for (lane, i) in queries.clone().enumerate() {
        let row = &x.rows[lane * d..][..d];
        if piece.share.is_empty() {
            let at = TokenHead { batch: span.batch, token: span.q_start + i, head };
            write(isa, job.dq, at, shape.scale, &row[..shape.d_qk]);
        } else {
            accumulate(isa, row, &mut piece.share[(member * span.q_len + i) * d..][..d]);
        }
    }
}
