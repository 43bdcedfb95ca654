//! The forward pass: a piece of work is up to 256 queries of one head of one sequence, which meet the keys they
//! see block by block with an online softmax.

use super::check::{self, Side};
use super::engine::{self, Engine, Kind, Left, Plain, Right};
use super::lanes::{Past, Sight};
use super::mask::{Cover, Mask};
use super::scratch::{Buffer, Pool};
use super::softmax::{self, Scores};
use super::tiles::narrow;
use super::transpose::transpose;
use super::{AttentionShape, Heads, HeadsMut, KEYS, QUERIES, Span, padded};
use crate::cpu::Isa;
use ferrotron_tensor::{Float, Result, Threads};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// Blocks of queries that share each packed block of keys.
const BLOCKS: usize = 4;

/// `out` and `lse` of every span; see the [module](super) for the maths.
///
/// `sink` is one logit a head. `lse` includes it. A query that sees no key gets `out` 0 and the `lse` of nothing:
/// -inf, or the sink's logit where there is one.
pub fn forward<T: Float>(
    threads: &Threads,
    isa: Isa,
    shape: &AttentionShape,
    spans: &[Span],
    q: Heads<'_, T>,
    k: Heads<'_, T>,
    v: Heads<'_, T>,
    sink: Option<&[f32]>,
    out: &HeadsMut<'_, T>,
    lse: &mut [f32],
) -> Result<()> {
    check::shape(shape)?;
    check::per_head(shape, "the sink", sink.map(<[f32]>::len))?;
    check::reads("q", Side::Query, spans, &q, shape.heads, shape.d_qk)?;
    check::reads("k", Side::Key, spans, &k, shape.kv_heads, shape.d_qk)?;
    check::reads("v", Side::Key, spans, &v, shape.kv_heads, shape.d_v)?;
    check::writes("out", Side::Query, spans, out, shape.heads, shape.d_v)?;
    check::lse(shape, spans, lse.len())?;
    // SAFETY: same size and alignment, borrowed exclusively for as long as the view lives. Atomics only because
    // strides a caller chose could make two queries share an element.
    let lse = unsafe { std::slice::from_raw_parts(lse.as_mut_ptr().cast::<AtomicU32>(), lse.len()) };
    let job = Job { isa, shape, spans, q, k, v, sink, out, lse };
    match engine::best::<T>(isa) {
        #[cfg(target_arch = "x86_64")]
        Kind::Matrix => run::<T, super::matrix::Matrix>(threads, &job),
        Kind::Plain => run::<T, Plain>(threads, &job),
    }
    Ok(())
}

/// The arguments.
struct Job<'a, T> {
    isa: Isa,
    shape: &'a AttentionShape,
    spans: &'a [Span],
    q: Heads<'a, T>,
    k: Heads<'a, T>,
    v: Heads<'a, T>,
    sink: Option<&'a [f32]>,
    out: &'a HeadsMut<'a, T>,
    lse: &'a [AtomicU32],
}

/// Buffers of one thread.
struct Scratch<E: Engine> {
    tile: Buffer<E::E>,
    k: Buffer<E::E>,
    v: Buffer<E::E>,
    q: Buffer<E::E>,
    p: Buffer<E::E>,
    s: Buffer<f32>,
    out: Buffer<f32>,
    rows: Buffer<f32>,
}

impl<E: Engine> Scratch<E> {
    fn new(shape: &AttentionShape) -> Scratch<E> {
        let (d, dv) = (padded(shape.d_qk), padded(shape.d_v));
        Scratch {
            tile: Buffer::new(QUERIES.max(KEYS) * d.max(dv)),
            k: Buffer::new(KEYS * d),
            v: Buffer::new(dv * KEYS),
            q: Buffer::new(BLOCKS * d * QUERIES),
            p: Buffer::new(if E::COPIES { KEYS * QUERIES } else { 0 }),
            s: Buffer::new(KEYS * QUERIES),
            out: Buffer::new(BLOCKS * dv * QUERIES),
            rows: Buffer::new(QUERIES * dv),
        }
    }
}

fn run<T: Float, E: Engine>(threads: &Threads, job: &Job<'_, T>) {
    let piece = BLOCKS * QUERIES;
    let mut pieces = Vec::new();
    for span in job.spans {
        for head in 0..job.shape.heads {
            let starts = (0..span.q_len).step_by(piece);
            pieces.extend(starts.map(|from| (span, head, from..span.q_len.min(from + piece))));
        }
    }
    let pool = Pool::new(|| Scratch::<E>::new(job.shape));
    threads.each(pieces.len(), &|i| {
        let (span, head, queries) = &pieces[i];
        pool.with(|scratch| attend::<T, E>(job, span, *head, queries, scratch));
    });
}

/// One block of queries under way.
struct Block {
    queries: Range<usize>,
    sight: Sight,
    past: Past,
    fresh: bool,
}

fn attend<T: Float, E: Engine>(
    job: &Job<'_, T>,
    span: &Span,
    head: usize,
    queries: &Range<usize>,
    scratch: &mut Scratch<E>,
) {
    let (shape, isa) = (job.shape, job.isa);
    let engine = E::start(isa);
    let mask = Mask::new(shape, span);
    let (d, dv) = (padded(shape.d_qk), padded(shape.d_v));
    let kv_head = head / (shape.heads / shape.kv_heads);
    let Scratch { tile, k, v, q, p, s, out, rows } = scratch;
    let mut blocks: [Option<Block>; BLOCKS] = Default::default();
    for (b, from) in queries.clone().step_by(QUERIES).enumerate() {
        let queries = from..queries.end.min(from + QUERIES);
        let src = job.q.from(span.batch, span.q_start + from, head);
        engine.stage(src, job.q.token, queries.len(), shape.d_qk, tile);
        engine.right_turned(queries.len(), d, tile, &mut q[b * d * QUERIES..][..d * QUERIES]);
        let sight = Sight::new(&mask, &queries);
        blocks[b] = Some(Block { queries, sight, past: Past::new(), fresh: true });
    }
    let seen = mask.keys(queries);
    for first in (seen.start / KEYS * KEYS..seen.end).step_by(KEYS) {
        let keys = first..span.k_len.min(first + KEYS);
        let rows = padded(keys.len());
        let src = job.k.from(span.batch, span.k_start + first, kv_head);
        engine.stage(src, job.k.token, keys.len(), shape.d_qk, k);
        let src = job.v.from(span.batch, span.k_start + first, kv_head);
        engine.stage(src, job.v.token, keys.len(), shape.d_v, tile);
        engine.turn(keys.len(), dv, tile, v);
        for (b, block) in blocks.iter_mut().enumerate() {
            let Some(block) = block else { break };
            let cover = mask.cover(&block.queries, &keys);
            if cover == Cover::None {
                continue;
            }
            let lanes = padded(block.queries.len());
            let right = Right { data: &q[b * d * QUERIES..][..d * QUERIES], rows: d, cols: QUERIES };
            engine.multiply((rows, d, lanes), Left { data: k, ld: d }, right, s, QUERIES, false);
            let scores = Scores {
                scale: shape.scale,
                softcap: shape.softcap,
                masked: cover == Cover::Part || rows != keys.len() || lanes != block.queries.len(),
                first_key: first as i32,
                keys: rows,
            };
            softmax::absorb(isa, scores, s, &block.sight, &mut block.past);
            let out = &mut out[b * dv * QUERIES..][..dv * QUERIES];
            if !block.fresh && block.past.moved() {
                softmax::scale_lanes(isa, out, &block.past.shrink);
            }
            let right = engine.block_right(rows, s, p);
            engine.multiply((dv, rows, lanes), Left { data: v, ld: KEYS }, right, out, QUERIES, !block.fresh);
            block.fresh = false;
        }
    }
    for (b, block) in blocks.iter().enumerate() {
        let Some(block) = block else { break };
        finish(job, span, head, block, &mut out[b * dv * QUERIES..][..dv * QUERIES], rows);
    }
}

/// Turn the weighted sums `[d_v, QUERIES]` of a block into rows of `out`, and write its log-sum-exps.
fn finish<T: Float>(
    job: &Job<'_, T>,
    span: &Span,
    head: usize,
    block: &Block,
    sums: &mut [f32],
    rows: &mut [f32],
) {
    let (shape, dv) = (job.shape, padded(job.shape.d_v));
    if !block.fresh {
        transpose(
            job.isa,
            dv,
            padded(block.queries.len()),
            bytemuck::cast_slice(sums),
            QUERIES,
            bytemuck::cast_slice_mut(rows),
            dv,
        );
    }
    for (lane, i) in block.queries.clone().enumerate() {
        let (lse, factor) = block.past.finish(lane, job.sink.map(|s| s[head]));
        let at = span.lse_base + head * shape.lse_head + i * shape.lse_token;
        job.lse[at].store(lse.to_bits(), Ordering::Relaxed);
        // SAFETY: `check` found the row inside the buffer and in no other span, and this piece alone has it.
        let to = unsafe { job.out.row(span.batch, span.q_start + i, head, shape.d_v) };
        if block.fresh || block.sight.blind(lane) {
            to.fill(T::from_f32(0.0));
        } else {
            narrow(job.isa, &rows[lane * dv..][..shape.d_v], factor, to);
        }
    }
}
