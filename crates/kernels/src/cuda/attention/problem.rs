//! A validated attention problem: the kernels' arguments, and launches over its tiles.

use super::captured::CapturedSequences;
use super::instances::{Instance, Step, instance};
use super::tile_table::{Side, TableArg};
use crate::attention::plan::{AttentionPlan, plan, strides};
use crate::checks::dtypes;
use crate::cpu::attention::{AttentionShape, MaskAlign, Span, check_shape, per_head};
use crate::cuda::args::kernel_args;
use crate::cuda::{CudaKernels, Kernel, LaunchConfig};
use crate::{AttentionForward, AttentionParams, Sequences};
use ferrotron_tensor::{DType, Launch, Result, Tensor, shape_error};
use std::cmp::Ordering;
use std::f32::consts::LOG2_E;

/// Sequences up to this length keep every sum of positions within 32 bits.
const MAX_SEQUENCE: usize = 1 << 28;
/// Rows of a tile in the Hopper kernels' scratch space.
const TILE_ROWS: usize = 128;
/// An unbounded window.
pub(super) const UNBOUNDED: i32 = 1 << 29;

kernel_args! {
    header "args/attention.cuh", includes [];

    /// A `[batch, tokens, heads, channels]` tensor with contiguous channels.
    #[derive(Default)]
    pub(super) struct View {
        pub(super) data: u64,
        /// Strides in elements.
        pub(super) batch: i64,
        pub(super) token: i64,
        pub(super) head: i64,
    }

    /// Arguments of every attention kernel; views and addresses that a kernel does not use are 0.
    #[derive(Default)]
    pub(super) struct AttentionArgs {
        q: View,
        k: View,
        v: View,
        out: View,
        dout: View,
        dq: View,
        dk: View,
        dv: View,
        /// f32 log-sum-exp of each query, with its strides in elements.
        pub(super) lse: u64,
        lse_batch: i64,
        lse_head: i64,
        lse_token: i64,
        /// f32 `[heads]`, or 0: the attention sink's logits.
        pub(super) sink: u64,
        /// f32 `[heads]`, or 0: their gradient, which is added to.
        pub(super) dsink: u64,
        /// f32 scratch `[batch, heads, tokens]`: lse·log2 e; -inf (no key seen) becomes +inf.
        pub(super) lse_log2: u64,
        /// f32 scratch `[batch, heads, tokens]`: Σ dout·out of a query.
        pub(super) delta: u64,
        /// A `TileSchedule`, then a `TileItem` for each tile of packed sequences; or 0: every batch entry is one sequence.
        pub(super) items: u64,
        /// Query tokens of a batch entry.
        pub(super) tokens: i64,
        /// Query tokens `q_from..q_to` belong to a sequence.
        q_from: i64,
        q_to: i64,
        pub(super) batches: i32,
        heads: i32,
        /// Query heads that share a key head.
        group: i32,
        d_qk: i32,
        d_v: i32,
        /// Queries, keys and tiles of each batch entry, where there are no items.
        pub(super) q_len: i32,
        pub(super) k_len: i32,
        pub(super) tiles: i32,
        /// Sliding window: keys before and after the diagonal that a query sees; `1 << 29` is unbounded.
        pub(super) left: i32,
        pub(super) right: i32,
        /// The diagonal ends at the last key instead of starting at the first.
        pub(super) bottom: i32,
        /// Bit i: rows of view i (in the order above) lie on 16-byte boundaries.
        pub(super) vectorized: u32,
        scale: f32,
        /// A product x becomes a logit times log2 e: `outer·tanh(inner·x)` with a soft cap, `inner·x` where outer is 0.
        inner: f32,
        outer: f32,
        /// What the forward softmax multiplies by after taking maxima: `inner`, or 1 where logits were mapped before.
        factor: f32,
    }

    /// Zeroes the rows of tokens outside `from..to`, which belong to no packed sequence.
    struct ZeroGapsArgs {
        x: View,
        tokens: i64,
        from: i64,
        to: i64,
        heads: i32,
        channels: i32,
    }
}

impl AttentionArgs {
    /// View `at` of q, k, v, out, dout, dq, dk, dv.
    fn view_mut(&mut self, at: usize) -> &mut View {
        match at {
            0 => &mut self.q,
            1 => &mut self.k,
            2 => &mut self.v,
            3 => &mut self.out,
            4 => &mut self.dout,
            5 => &mut self.dq,
            6 => &mut self.dk,
            _ => &mut self.dv,
        }
    }

    fn view_at(mut self, at: usize) -> View {
        *self.view_mut(at)
    }

    /// Address of a view, and its strides of batch, token and head in elements.
    pub(super) fn view(&self, at: usize) -> (u64, [usize; 3]) {
        let View { data, batch, token, head } = self.view_at(at);
        (data, [batch, token, head].map(|x| x as usize))
    }
}

/// A validated problem.
pub(super) struct AttentionProblem<'a> {
    pub(super) shape: AttentionShape,
    pub(super) spans: Vec<Span>,
    pub(super) instance: Instance,
    pub(super) args: AttentionArgs,
    pub(super) packed: bool,
    /// Packed sequences that differ from replay to replay; `spans` then stands for all of them.
    pub(super) captured: Option<&'a CapturedSequences>,
    /// Tokens of queries and of keys, per batch entry.
    pub(super) tokens: [usize; 2],
    gaps: bool,
    /// Tokens `from..to` that belong to sequences, of queries and of keys.
    pub(super) inside: [[usize; 2]; 2],
}

/// Validates the arguments.
pub(super) fn problem<'a>(
    op: &'static str,
    scores: &AttentionParams,
    sequences: Sequences<'a>,
    f: &AttentionForward,
) -> Result<AttentionProblem<'a>> {
    let AttentionPlan { shape, spans, gaps, lse_batch } = plan(scores, sequences, f)?;
    check_shape(&shape)?;
    dtypes(op, f.q.dtype(), &[f.k, f.v, f.out])?;
    dtypes(op, DType::F32, &[f.lse])?;
    if let Some(sink) = f.sink {
        dtypes(op, DType::F32, &[sink])?;
        one_each(op, &shape, "the sink", sink)?;
    }
    if spans.iter().any(|s| s.q_len > MAX_SEQUENCE || s.k_len > MAX_SEQUENCE) {
        return shape_error(
            op,
            format!("a sequence of more than {MAX_SEQUENCE} tokens is too long; split it"),
        );
    }
    let instance = instance(op, f.q.dtype(), shape.d_qk, shape.d_v)?;
    let heads = count(op, "heads", shape.heads)?;
    let (packed, batches, tokens) = match f.q.shape() {
        [b, t, ..] if matches!(sequences, Sequences::Batch) => (false, *b, *t),
        [t, ..] => (true, 1, *t),
        [] => (true, 0, 0),
    };
    let k_tokens = match f.k.shape() {
        [_, t, _, _] | [t, _, _] => *t,
        _ => 0,
    };
    let batches = count(op, "batch entries", batches)?;
    // In scratch space every packed sequence starts on a tile of its own.
    count(op, "tokens", tokens.max(k_tokens) + (spans.len() + 1) * TILE_ROWS)?;
    let first = spans.first();
    let inside = match sequences.offsets() {
        None => [[0, tokens], [0, first.map_or(0, |s| s.k_len)]],
        Some(both) => both.map(|o| [o.first(), o.last()].map(|x| x.map_or(0, |x| *x as usize))),
    };
    let captured = match sequences {
        Sequences::Captured(c) => Some(c),
        _ => None,
    };
    let bound = |n: Option<usize>| n.map_or(UNBOUNDED, |n| n.min(UNBOUNDED as usize) as i32);
    let inner = shape.softcap.map_or(shape.scale * LOG2_E, |cap| shape.scale / cap);
    let mapped = shape.softcap.is_some() || shape.scale.partial_cmp(&0.0) != Some(Ordering::Greater);
    let args = AttentionArgs {
        lse_batch: lse_batch as i64,
        lse_head: shape.lse_head as i64,
        lse_token: shape.lse_token as i64,
        tokens: tokens as i64,
        q_from: inside[0][0] as i64,
        q_to: inside[0][1] as i64,
        batches,
        heads,
        group: (shape.heads / shape.kv_heads) as i32,
        d_qk: shape.d_qk as i32,
        d_v: shape.d_v as i32,
        q_len: first.map_or(0, |s| s.q_len) as i32,
        k_len: first.map_or(0, |s| s.k_len) as i32,
        left: bound(shape.window.0),
        right: if shape.causal { 0 } else { bound(shape.window.1) },
        bottom: i32::from(shape.align == MaskAlign::BottomRight),
        scale: shape.scale,
        inner,
        outer: shape.softcap.map_or(0.0, |cap| cap * LOG2_E),
        factor: if mapped { 1.0 } else { inner },
        ..AttentionArgs::default()
    };
    let tokens = [tokens, k_tokens];
    Ok(AttentionProblem { shape, spans, instance, args, packed, captured, tokens, gaps, inside })
}

/// Requires one contiguous f32 per head.
pub(super) fn one_each(op: &'static str, shape: &AttentionShape, what: &str, t: &Tensor) -> Result<()> {
    per_head(shape, what, Some(t.numel()))?;
    if t.rank() != 1 || !t.is_contiguous() {
        return shape_error(op, format!("{what} {t:?} must be one contiguous axis"));
    }
    Ok(())
}

impl AttentionProblem<'_> {
    /// Notes which of the first views the kernels may access in 16 bytes.
    pub(super) fn find_aligned(&mut self, views: &[&Tensor]) -> Result<()> {
        for (at, t) in views.iter().enumerate() {
            let [batch, token, head] = strides(t)?;
            let [b, n, h] = match t.shape() {
                [b, n, h, _] => [*b, *n, *h],
                [n, h, _] => [1, *n, *h],
                _ => [0; 3],
            };
            // The stride of an axis of size 1 is not used.
            let steps = [(b, batch), (n, token), (h, head)];
            let even = steps.iter().all(|(n, step)| *n <= 1 || (step * t.dtype().size()).is_multiple_of(16));
            if even && t.alignment() >= 16 {
                self.args.vectorized |= 1 << at;
            }
        }
        Ok(())
    }

    /// Sets view `at` of the kernels to argument `i` of the launch.
    pub(super) fn view(&mut self, l: &Launch, i: usize, t: &Tensor, at: usize) -> Result<()> {
        let [batch, token, head] = strides(t)?.map(|x| x as i64);
        *self.args.view_mut(at) = View { data: l.address(i)?, batch, token, head };
        Ok(())
    }

    /// Batch entries times heads.
    pub(super) fn pairs(&self, heads: usize) -> usize {
        self.args.batches as usize * heads
    }

    /// Launches a kernel over the tiles of one side.
    pub(super) fn launch_kernel(
        &self,
        kernels: &CudaKernels,
        l: &Launch,
        step: &Step,
        side: Side,
        table: TableArg,
    ) -> Result<()> {
        let (len, heads) = match side {
            Side::Query => (self.args.q_len, self.shape.heads),
            Side::Key => (self.args.k_len, self.shape.kv_heads),
        };
        let mut args = self.args;
        let tiles = if self.packed {
            self.set_table(l, table, &mut args)?
        } else {
            args.tiles = (len as usize).div_ceil(step.rows) as i32;
            args.tiles as usize * args.batches as usize
        };
        let grid = LaunchConfig {
            blocks: [blocks(tiles * heads * step.parts)?, 1, 1],
            threads: step.threads,
            shared: step.shared,
        };
        kernels.launch_kernel(l, step.kernel, grid, &args)
    }

    /// Zeroes the rows of a view that belong to no sequence.
    pub(super) fn zero_gaps(
        &self,
        kernels: &CudaKernels,
        l: &Launch,
        kernel: Kernel,
        (at, t, side): (usize, &Tensor, Side),
    ) -> Result<()> {
        let [from, to] = self.inside[usize::from(side == Side::Key)];
        let ([tokens, heads, channels], true) = (t.shape(), self.gaps) else { return Ok(()) };
        let elements = (tokens - (to - from)) * heads * channels;
        let args = ZeroGapsArgs {
            x: self.args.view_at(at),
            tokens: *tokens as i64,
            from: from as i64,
            to: to as i64,
            heads: *heads as i32,
            channels: *channels as i32,
        };
        let grid = LaunchConfig {
            blocks: [blocks(elements.div_ceil(256).min(1 << 16))?, 1, 1],
            threads: 256,
            shared: 0,
        };
        kernels.launch_kernel(l, kernel, grid, &args)
    }
}

/// A size that the kernels count in 32 bits.
fn count(op: &'static str, what: &str, n: usize) -> Result<i32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => {
            shape_error(op, format!("{n} {what} are more than the {} of a launch; split them", i32::MAX))
        }
    }
}

/// A number of blocks that the kernels can count in 32 bits.
pub(super) fn blocks(n: usize) -> Result<u32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n as u32),
        Err(_) => shape_error("attention", format!("{n} blocks exceed a CUDA grid; use smaller batches")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_32_bits_are_refused_not_wrapped() {
        assert_eq!(count("attention_forward", "heads", i32::MAX as usize).unwrap(), i32::MAX);
        let error = count("attention_forward", "heads", (1 << 32) + 4).unwrap_err().to_string();
        assert!(error.contains("attention_forward") && error.contains("4294967300 heads"), "{error}");
        assert!(blocks(1 << 31).is_err() && blocks((1 << 32) + 1).is_err());
    }
}
