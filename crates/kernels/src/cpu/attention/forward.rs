//! Forward pass with an online softmax. A task is up to 256 queries of one head of one sequence, processed against blocks of
//! visible keys.

use super::block_gemm::{self, Engine, EngineKind, Left, Output, Plain, Right};
use super::check::{self, Side};
use super::mask::{Mask, MaskCoverage};
use super::scratch::{Buffer, Pool};
use super::softmax::{self, ScoreBlock};
use super::softmax_state::{OnlineSoftmax, VisibleRange};
use super::tiles::store_scaled;
use super::transpose::transpose;
use super::view::TokenHead;
use super::{AttentionInputs, AttentionShape, HeadsMut, KEYS, QUERIES, Span, padded};
use crate::cpu::{CpuContext, Isa};
use ferrotron_tensor::{Float, Result, Threads};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// Blocks of queries that share each packed block of keys.
const BLOCKS: usize = 4;
/// Blocks of queries worked on together.
const TOGETHER: usize = 2;

/// `out` and `lse` of every span; see the [module](super) for the maths.
///
/// The sink is included in `lse`. A query without a visible key gets `out` 0 and `lse` -inf, or the
/// sink's logit.
pub fn forward<T: Float>(
    cpu: CpuContext,
    shape: &AttentionShape,
    spans: &[Span],
    inputs: AttentionInputs<'_, T>,
    out: &HeadsMut<'_, T>,
    lse: &mut [f32],
) -> Result<()> {
    let AttentionInputs { q, k, v, sink } = inputs;
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
    let job = Job { isa: cpu.isa, shape, spans, inputs, out, lse };
    match block_gemm::best::<T>(cpu.isa) {
        #[cfg(target_arch = "x86_64")]
        EngineKind::Matrix => run::<T, super::block_gemm_amx::Matrix>(cpu.threads, &job),
        EngineKind::Plain => run::<T, Plain>(cpu.threads, &job),
    }
    Ok(())
}

/// Arguments of the pass.
struct Job<'a, T> {
    isa: Isa,
    shape: &'a AttentionShape,
    spans: &'a [Span],
    inputs: AttentionInputs<'a, T>,
    out: &'a HeadsMut<'a, T>,
    lse: &'a [AtomicU32],
}

/// Scratch of one thread.
struct Scratch<E: Engine> {
    tile: Buffer<E::E>,
    k: Buffer<E::E>,
    v: Buffer<E::E>,
    q: Buffer<E::E>,
    p: [Buffer<E::E>; TOGETHER],
    s: [Buffer<f32>; TOGETHER],
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
            p: [(); TOGETHER].map(|()| Buffer::new(if E::COPIES { KEYS * QUERIES } else { 0 })),
            s: [(); TOGETHER].map(|()| Buffer::new(KEYS * QUERIES)),
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
    threads.parallel_for(pieces.len(), &|i| {
        let (span, head, queries) = &pieces[i];
        pool.with(|scratch| attend::<T, E>(job, span, *head, queries, scratch));
    });
}

/// State of one block of queries.
struct Block {
    /// Index among the blocks of the task.
    at: usize,
    queries: Range<usize>,
    visible: VisibleRange,
    past: OnlineSoftmax,
    /// Whether it has seen no key yet.
    fresh: bool,
    /// Visibility of the current keys.
    cover: MaskCoverage,
}

impl Block {
    fn lanes(&self) -> usize {
        padded(self.queries.len())
    }

    fn sees(&self) -> bool {
        self.cover != MaskCoverage::None
    }
}

fn attend<T: Float, E: Engine>(
    job: &Job<'_, T>,
    span: &Span,
    head: usize,
    queries: &Range<usize>,
    scratch: &mut Scratch<E>,
) {
    let (shape, isa, inputs, batch) = (job.shape, job.isa, &job.inputs, span.batch);
    let engine = E::start(isa);
    let mask = Mask::new(shape, span);
    let (d, dv) = (padded(shape.d_qk), padded(shape.d_v));
    let kv_head = head / (shape.heads / shape.kv_heads);
    let Scratch { tile, k, v, q, p, s, out, rows } = scratch;
    let mut blocks: [Option<Block>; BLOCKS] = Default::default();
    for (at, from) in queries.clone().step_by(QUERIES).enumerate() {
        let queries = from..queries.end.min(from + QUERIES);
        let src = inputs.q.from(TokenHead { batch, token: span.q_start + from, head });
        engine.stage(src, inputs.q.token, queries.len(), shape.d_qk, tile);
        engine.right_transposed(queries.len(), d, tile, &mut q[at * d * QUERIES..][..d * QUERIES]);
        let visible = VisibleRange::new(&mask, &queries);
        blocks[at] = Some(Block {
            at,
            queries,
            visible,
            past: OnlineSoftmax::new(),
            fresh: true,
            cover: MaskCoverage::None,
        });
    }
    let seen = mask.keys(queries);
    for first in (seen.start / KEYS * KEYS..seen.end).step_by(KEYS) {
        let keys = first..span.k_len.min(first + KEYS);
        let rows = padded(keys.len());
        let at = TokenHead { batch, token: span.k_start + first, head: kv_head };
        engine.stage(inputs.k.from(at), inputs.k.token, keys.len(), shape.d_qk, k);
        engine.stage(inputs.v.from(at), inputs.v.token, keys.len(), shape.d_v, tile);
        engine.transpose_left(keys.len(), dv, tile, v);
        // Blocks are interleaved: a GEMM right after the stores of its operand would stall on them.
        for some in blocks.chunks_mut(TOGETHER) {
            for (block, s) in some.iter_mut().flatten().zip(s.iter_mut()) {
                block.cover = mask.cover(&block.queries, &keys);
                if block.sees() {
                    let q = &q[block.at * d * QUERIES..][..d * QUERIES];
                    let (k, q) = (Left { data: k, ld: d }, Right { data: q, rows: d, cols: QUERIES });
                    engine.multiply((rows, d, block.lanes()), k, q, Output { data: s, ld: QUERIES }, false);
                }
            }
            for (block, s) in some.iter_mut().flatten().zip(s.iter_mut()).filter(|(b, _)| b.sees()) {
                let ragged = rows != keys.len() || block.lanes() != block.queries.len();
                let scores = ScoreBlock {
                    scale: shape.scale,
                    softcap: shape.softcap,
                    masked: block.cover == MaskCoverage::Part || ragged,
                    first_key: first as i32,
                    keys: rows,
                };
                softmax::absorb(isa, scores, s, &block.visible, &mut block.past);
                if shape.fp8 {
                    softmax::round_to_e4m3(isa, &mut s[..rows * QUERIES]);
                }
                if !block.fresh && block.past.needs_rescale() {
                    let out = &mut out[block.at * dv * QUERIES..][..dv * QUERIES];
                    softmax::scale_lanes(isa, out, &block.past.rescale);
                }
            }
            let mut weights = [None; TOGETHER];
            let operands = s.iter().zip(p.iter_mut()).zip(&mut weights);
            for (block, ((s, p), weights)) in some.iter().flatten().zip(operands) {
                *weights = block.sees().then(|| engine.block_right(rows, s, p));
            }
            for (block, weights) in some.iter_mut().flatten().zip(weights) {
                let Some(weights) = weights else { continue };
                let out = &mut out[block.at * dv * QUERIES..][..dv * QUERIES];
                let (size, v) = ((dv, rows, block.lanes()), Left { data: v, ld: KEYS });
                engine.multiply(size, v, weights, Output { data: out, ld: QUERIES }, !block.fresh);
                block.fresh = false;
            }
        }
    }
    for block in blocks.iter().flatten() {
        finish(job, span, head, block, &out[block.at * dv * QUERIES..][..dv * QUERIES], rows);
    }
}

/// Transposes a block's weighted sums `[d_v, QUERIES]` into rows of `out` and writes its log-sum-exps.
fn finish<T: Float>(
    job: &Job<'_, T>,
    span: &Span,
    head: usize,
    block: &Block,
    sums: &[f32],
    rows: &mut [f32],
) {
    let (shape, dv) = (job.shape, padded(job.shape.d_v));
    if !block.fresh {
        let (sums, rows) = (bytemuck::cast_slice(sums), bytemuck::cast_slice_mut(rows));
        transpose(job.isa, [dv, block.lanes()], sums, QUERIES, rows, dv);
    }
    let (mut lse, mut factor) = ([0.0; QUERIES], [0.0; QUERIES]);
    let sink = job.inputs.sink.map_or(f32::NEG_INFINITY, |s| s[head]);
    softmax::conclude(job.isa, &block.past, sink, &mut lse, &mut factor);
    for (lane, i) in block.queries.clone().enumerate() {
        let at = span.lse_base + head * shape.lse_head + i * shape.lse_token;
        job.lse[at].store(lse[lane].to_bits(), Ordering::Relaxed);
        let at = TokenHead { batch: span.batch, token: span.q_start + i, head };
        // SAFETY: `check` found the row inside the buffer and in no other span, and this piece alone has it.
        let to = unsafe { job.out.row(at, shape.d_v) };
        if block.fresh || block.visible.is_masked(lane) {
            to.fill(T::from_f32(0.0));
        } else {
            store_scaled(job.isa, &rows[lane * dv..][..shape.d_v], factor[lane], to);
        }
    }
}
