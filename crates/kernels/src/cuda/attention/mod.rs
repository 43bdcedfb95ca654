//! Attention launches.
//!
//! The forward pass is one kernel over tiles of queries. Hopper has kernels of its own: see `hopper.rs`. Elsewhere the
//! backward pass of bf16 heads of up to 128 channels is one kernel over tiles of keys, which adds up dq in fixed point:
//! see `fused.rs`. All others are deterministic without atomics: a per-row kernel for `Σ dout·out`, one over tiles of
//! keys for dk and dv, one over tiles of queries for dq.

mod captured;
#[cfg(test)]
mod captured_tests;
mod fixed_point;
mod fused;
pub(super) mod hopper;
pub(super) mod hopper_fp8;
mod hopper_scheduler;
mod hopper_variants;
mod instances;
mod lru_cache;
pub(super) mod problem;
#[cfg(test)]
mod sm_count_tests;
pub(super) mod tile_table;

use super::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::attention::plan::gradients;
use crate::checks::dtypes;
use crate::{AttentionBackward, AttentionForward, AttentionKernels, AttentionParams, Sequences};
pub use captured::CapturedSequences;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, write};
use fused::fused;
use hopper::{Hopper, hopper};
use hopper_scheduler::Scheduling;
use hopper_variants::Forward;
use instances::Instance;
use problem::{blocks, one_each, problem};
use tile_table::Side;
pub(super) use tile_table::TileTables;

impl AttentionKernels for CudaKernels {
    fn attention_forward(
        &self,
        s: &Stream,
        scores: &AttentionParams,
        sequences: Sequences,
        f: &AttentionForward,
    ) -> Result<()> {
        const OP: &str = "attention_forward";
        let mut problem = problem(OP, scores, sequences, f)?;
        let mut step = problem.instance.forward;
        if scores.fp8 {
            step.kernel = step.kernel.with_fp8_probs();
        }
        let zero_gaps = typed!(OP, f.q.dtype(), "attention/backward_preprocess", "attention_zero_gaps")?;
        let views = [f.q, f.k, f.v, f.out];
        problem.find_aligned(&views)?;
        let hopper = hopper(self, &problem, f.q.dtype()).filter(|h| h.forward_fits(&problem));
        let portable = Scheduling::Blocks(problem.shape.heads * step.parts);
        let launches: Vec<_> = match hopper {
            Some(h) => h.forwards(&problem).into_iter().map(|(f, only)| (Some((h, f)), only)).collect(),
            None => vec![(None, None)],
        };
        let table = |(hopper, only): &(Option<(Hopper, Forward)>, _)| {
            let tiling = hopper.map_or((step.rows, portable), |(h, f)| h.forward_tiles(&problem, &f));
            problem.table(&self.tables, s, (Side::Query, tiling.0), tiling.1, *only)
        };
        let tables = launches.iter().map(table).collect::<Result<Vec<_>>>()?;
        let mut args = vec![read(f.q), read(f.k), read(f.v), write(f.out), write(f.lse)];
        args.extend(f.sink.map(read));
        let first_table = args.len();
        args.extend(tables.iter().flatten().map(|t| read(&t.memory)));
        s.launch(OP, &args, |l| {
            for (i, t) in views.into_iter().enumerate() {
                problem.view(l, i, t, i)?;
            }
            problem.args.lse = l.address(4)?;
            problem.args.sink = f.sink.map_or(Ok(0), |_| l.address(5))?;
            problem.zero_gaps(self, l, zero_gaps, (3, f.out, Side::Query))?;
            for (i, ((hopper, _), table)) in launches.iter().zip(&tables).enumerate() {
                let table = table.as_ref().map(|t| (first_table + i, t));
                match hopper {
                    Some((h, f)) => h.forward(self, &problem, l, f, table)?,
                    None => problem.launch_kernel(self, l, &step, Side::Query, table)?,
                }
            }
            Ok(())
        })
    }

    fn attention_fp8(
        &self,
        s: &Stream,
        scores: &AttentionParams,
        sequences: Sequences,
        f: &AttentionForward,
        amax: &Tensor,
    ) -> Result<bool> {
        self.launch_attention_fp8(s, scores, sequences, f, amax)
    }

    fn attention_backward(
        &self,
        s: &Stream,
        scores: &AttentionParams,
        sequences: Sequences,
        b: &AttentionBackward,
    ) -> Result<()> {
        const OP: &str = "attention_backward";
        // The argument with the scratch space of dq in fixed point.
        const SPACE: usize = 11;
        let f = &b.forward;
        let mut problem = problem(OP, scores, sequences, f)?;
        gradients(b)?;
        dtypes(OP, f.q.dtype(), &[b.dout, b.dq, b.dk, b.dv])?;
        if let Some(dsink) = b.dsink {
            dtypes(OP, DType::F32, &[dsink])?;
            one_each(OP, &problem.shape, "the sink's gradient", dsink)?;
        }
        let Instance { keys, queries, .. } = problem.instance;
        let zero_gaps = typed!(OP, f.q.dtype(), "attention/backward_preprocess", "attention_zero_gaps")?;
        let delta = typed!(OP, f.q.dtype(), "attention/backward_preprocess", "attention_delta")?;
        let rows = problem.args.batches as usize * problem.args.tokens as usize * problem.shape.heads;
        let scratch = [(); 2].map(|()| Tensor::empty(s, &[rows], DType::F32, Category::Workspace));
        let [weights, deltas] = scratch;
        let (weights, deltas) = (weights?, deltas?);
        let views = [f.q, f.k, f.v, f.out, b.dout, b.dq, b.dk, b.dv];
        problem.find_aligned(&views)?;
        let hopper = hopper(self, &problem, f.q.dtype());
        let fused = if hopper.is_none() { fused(&problem, f.q.dtype()) } else { None };
        let hopper = hopper.filter(|h| h.backward_fits(&problem));
        let fused = fused.filter(|f| f.fits(&problem));
        let space = match (hopper, fused) {
            (Some(h), _) => h.scratch(&problem),
            (None, Some(f)) => f.scratch(&problem),
            (None, None) => 0,
        };
        let space = Tensor::empty(s, &[space], DType::F32, Category::Workspace)?;
        let [key_tiling, query_tiling] = match (hopper, fused) {
            (Some(h), _) => h.backward_tiles(&problem),
            (None, Some(f)) => f.tiles(&problem),
            (None, None) => [
                (keys.rows, Scheduling::Blocks(problem.shape.kv_heads * keys.parts)),
                (queries.rows, Scheduling::Blocks(problem.shape.heads * queries.parts)),
            ],
        };
        let tables = [
            problem.table(&self.tables, s, (Side::Key, key_tiling.0), key_tiling.1, None)?,
            problem.table(&self.tables, s, (Side::Query, query_tiling.0), query_tiling.1, None)?,
        ];

        let mut args: Vec<_> = views[..5].iter().map(|t| read(t)).collect();
        args.extend(views[5..].iter().map(|t| write(t)));
        args.extend([read(f.lse), write(&weights), write(&deltas), write(&space)]);
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
                args.push(read(&t.memory));
                (args.len() - 1, t)
            })
        });
        s.launch(OP, &args, |l| {
            for (i, t) in views.into_iter().enumerate() {
                problem.view(l, i, t, i)?;
            }
            problem.args.lse = l.address(8)?;
            problem.args.lse_log2 = l.address(9)?;
            problem.args.delta = l.address(10)?;
            problem.args.sink = sink.map_or(Ok(0), |i| l.address(i))?;
            problem.args.dsink = dsink.map_or(Ok(0), |i| l.address(i))?;
            for (at, t, side) in [(5, b.dq, Side::Query), (6, b.dk, Side::Key), (7, b.dv, Side::Key)] {
                problem.zero_gaps(self, l, zero_gaps, (at, t, side))?;
            }
            let inside = (problem.inside[0][1] - problem.inside[0][0])
                * problem.args.batches as usize
                * problem.shape.heads;
            // Eight threads to a row.
            let grid = LaunchConfig { blocks: [blocks(inside.div_ceil(32))?, 1, 1], threads: 256, shared: 0 };
            if (hopper.is_none() && fused.is_none()) || dsink.is_some() {
                self.launch_kernel(l, delta, grid, &problem.args)?;
            }
            if dsink.is_some() {
                let kernel = Kernel::new("attention/backward_preprocess", "attention_dsink_f32");
                let grid =
                    LaunchConfig { blocks: [blocks(problem.shape.heads)?, 1, 1], threads: 256, shared: 0 };
                self.launch_kernel(l, kernel, grid, &problem.args)?;
            }
            if let Some(h) = hopper {
                return h.backward(self, &problem, l, SPACE, [key_table, query_table]);
            }
            if let Some(f) = fused {
                return f.backward(self, &problem, l, SPACE, [key_table, query_table]);
            }
            problem.launch_kernel(self, l, &keys, Side::Key, key_table)?;
            problem.launch_kernel(self, l, &queries, Side::Query, query_table)
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
        self.launch_merge_attention(s, out, lse, part, part_lse)
    }

    fn mla_concat_keys(&self, s: &Stream, own: &Tensor, shared: &Tensor, k: &Tensor) -> Result<()> {
        self.launch_mla_concat_keys(s, own, shared, k)
    }

    fn mla_split_keys(&self, s: &Stream, k: &Tensor, own: &Tensor, shared: &Tensor) -> Result<()> {
        self.launch_mla_split_keys(s, k, own, shared)
    }
}
