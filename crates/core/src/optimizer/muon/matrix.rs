//! Matrices that Muon orthogonalizes, and what tensor-parallel ranks do about those they share.

use super::{MuonRule, matrix_shape};
use crate::config::MuonTpMode;
use crate::{Error, Result};
use ferrotron_comm::{Communicator, ReduceOp};
use ferrotron_engine::data_parallel::group_rank;
use ferrotron_engine::{GroupRank, ParamSpec, Part, Rank, Shard};
use ferrotron_kernels::{
    GramSide, NewtonSchulz, SumOverRanks, newton_schulz, newton_schulz_batched, newton_schulz_bytes,
};
use ferrotron_tensor::{Category, DType, Tensor};
use std::ops::Range;

impl MuonRule {
    /// The logical tensors of a parameter by the matrices that are orthogonalized: each by itself, or q, k and v as one.
    pub(crate) fn matrices(&self, spec: &ParamSpec) -> Vec<Range<usize>> {
        let n = spec.parts.len();
        if !self.split_qkv && is_fused_qkv(&spec.parts) {
            return std::iter::once(0..n).collect();
        }
        (0..n).map(|i| i..i + 1).collect()
    }

    /// What tensor-parallel ranks do about a matrix of these logical tensors.
    pub(crate) fn tp_mode_of(&self, parts: &[Part], here: GroupRank) -> TpMode {
        let shared = parts.iter().any(|p| p.shared(here.size));
        match self.tp_mode {
            _ if parts.iter().all(|p| p.holders(here).len() == here.size) => TpMode::Whole,
            // Ranks that hold the same heads would update them differently beside different ones.
            MuonTpMode::Blockwise if !shared || parts.len() == 1 => TpMode::Blockwise,
            // Ranks that hold the same heads would be summed twice.
            MuonTpMode::Distributed if !shared => TpMode::Distributed,
            _ => TpMode::Duplicated,
        }
    }
}

/// How a matrix is orthogonalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TpMode {
    /// Every rank has all of it.
    Whole,
    /// Gathered, and orthogonalized on every rank alike.
    Duplicated,
    /// In shards, whose norms and Gram matrices are summed.
    Distributed,
    /// Each shard by itself.
    Blockwise,
}

/// Whether logical tensors are q, k and v of one attention layer.
fn is_fused_qkv(parts: &[Part]) -> bool {
    let module =
        |(part, last): (&Part, &str)| part.name.strip_suffix(&format!(".{last}.weight")).map(String::from);
    let mut modules = parts.iter().zip(["q", "k", "v"]).map(module);
    let first = modules.next().flatten();
    parts.len() == 3 && first.is_some() && modules.all(|m| m == first)
}

/// A matrix that is orthogonalized by itself: a logical tensor, or several stacked by rows.
pub(super) struct Matrix<'a> {
    parts: &'a [Part],
    shards: &'a [Shard],
    /// Rows and columns of the whole.
    shape: [usize; 2],
    /// f32 update of this rank's shards, `[rows, cols]`.
    local: Tensor,
    /// Tensor-parallel ranks of the parameter.
    group: &'a Communicator,
    mode: TpMode,
    /// The whole, gathered from the shards of all ranks.
    gathered: Option<Tensor>,
}

impl<'a> Matrix<'a> {
    /// The logical tensors `which` of a parameter, whose update is `update`; and their range in it.
    pub(super) fn new(
        rule: &MuonRule,
        spec: &'a ParamSpec,
        which: Range<usize>,
        update: &Tensor,
        group: &'a Communicator,
    ) -> Result<(Matrix<'a>, Range<usize>)> {
        let (parts, shards) = (&spec.parts[which.clone()], &spec.shards[which.clone()]);
        let ranges: Vec<Range<usize>> =
            spec.held().map(|(_, _, r)| r).skip(which.start).take(which.len()).collect();
        let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else {
            return Err(Error::Invalid("Muon: a parameter without a tensor".into()));
        };
        let (shape, held) = stacked_shapes(parts, shards)?;
        let range = first.start..last.end;
        let local = update.narrow(0, range.start, range.len())?.view(&held)?;
        let mode = rule.tp_mode_of(parts, group_rank(group));
        Ok((Matrix { parts, shards, shape, local, group, mode, gathered: None }, range))
    }

    /// The communication before the iterations, and those iterations that need it throughout. Collective.
    pub(super) fn begin(&mut self, rank: &Rank, rule: &MuonRule) -> Result<()> {
        match self.mode {
            TpMode::Whole | TpMode::Blockwise => Ok(()),
            TpMode::Distributed => self.distributed(rank, rule),
            TpMode::Duplicated => {
                self.gathered = Some(self.gather(rank)?);
                Ok(())
            }
        }
    }

    /// What is left to orthogonalize on this rank.
    pub(super) fn operand(&self) -> Option<&Tensor> {
        match self.mode {
            TpMode::Distributed => None,
            _ => Some(self.gathered.as_ref().unwrap_or(&self.local)).filter(|x| x.numel() > 0),
        }
    }

    /// Puts this rank's shard of a gathered matrix back. Returns the factor on the update.
    pub(super) fn finish(&self, rank: &Rank, rule: &MuonRule) -> Result<f64> {
        if let Some(whole) = &self.gathered {
            self.copy_shards(rank, whole, self.shards, &self.local, Direction::ToShards)?;
        }
        let shape = match self.mode {
            TpMode::Blockwise => matrix_shape(&self.parts[0].name, self.local.shape())?,
            _ => self.shape,
        };
        Ok(rule.scale.factor(shape) * rule.extra_scale)
    }

    /// The whole matrix.
    fn gather(&self, rank: &Rank) -> Result<Tensor> {
        let (s, n) = (&rank.compute, self.group.size());
        let new = |shape: &[usize]| Tensor::empty(s, shape, DType::F32, Category::Workspace);
        let shards: Vec<Vec<Shard>> = (0..n)
            .map(|rank| self.parts.iter().map(|p| p.cut(GroupRank { rank, size: n })).collect())
            .collect();
        let held = |shards: &Vec<Shard>| -> [usize; 2] {
            let shapes = shards.iter().zip(self.parts).map(|(c, p)| c.shape(&p.shape));
            shapes.fold([0; 2], |[rows, _], shape| [rows + shape[0], shape[1]])
        };
        let shapes: Vec<[usize; 2]> = shards.iter().map(held).collect();
        let counts: Vec<usize> = shapes.iter().map(|[rows, cols]| rows * cols).collect();
        let all = new(&[counts.iter().sum()])?;
        let mine = self.local.view(&[self.local.numel()])?;
        self.group.all_gather_v(s, &mine, &all, &counts, "updates of Muon")?;
        let whole = new(&self.shape)?;
        let mut at = 0;
        for ((shards, shape), count) in shards.iter().zip(&shapes).zip(&counts) {
            let from = all.narrow(0, at, *count)?.view(shape)?;
            self.copy_shards(rank, &whole, shards, &from, Direction::ToWhole)?;
            at += count;
        }
        Ok(whole)
    }

    /// Copies between the whole matrix and a rank's shards, stacked by rows.
    fn copy_shards(
        &self,
        rank: &Rank,
        whole: &Tensor,
        shards: &[Shard],
        stacked: &Tensor,
        direction: Direction,
    ) -> Result<()> {
        let (mut row, mut at) = (0, 0);
        for (part, shard) in self.parts.iter().zip(shards) {
            let (all, held) = (part.shape[0], shard.shape(&part.shape)[0]);
            let place =
                whole.narrow(0, row, all)?.narrow(shard.axis, shard.range.start, shard.range.len())?;
            let mine = stacked.narrow(0, at, held)?;
            (row, at) = (row + all, at + held);
            if mine.numel() == 0 {
                continue;
            }
            match direction {
                Direction::ToWhole => rank.kernels.copy(&rank.compute, &mine, &place)?,
                Direction::ToShards => rank.kernels.copy(&rank.compute, &place, &mine)?,
            }
        }
        Ok(())
    }

    /// Iterates on the shards, with norms and Gram matrices summed over the ranks.
    fn distributed(&self, rank: &Rank, rule: &MuonRule) -> Result<()> {
        let sum = |t: &Tensor| -> ferrotron_tensor::Result<()> {
            Ok(self.group.all_reduce(&rank.compute, t, ReduceOp::Sum, "Gram matrix of Muon")?)
        };
        let sum: &SumOverRanks = &sum;
        let gram = gram_of_shards(self.shards);
        let coefficients = &rule.coefficients.schedule(rule.steps);
        let ns = NewtonSchulz { coefficients, bf16: rule.bf16, gram, sum: Some(sum) };
        Ok(newton_schulz(&*rank.kernels, &rank.compute, &ns, &self.local)?)
    }
}

/// Rows and columns of logical tensors stacked by rows: of the whole, and of this rank's shards.
fn stacked_shapes(parts: &[Part], shards: &[Shard]) -> Result<([usize; 2], [usize; 2])> {
    let (mut whole, mut held) = ([0; 2], [0; 2]);
    for (part, shard) in parts.iter().zip(shards) {
        let [rows, cols] = matrix_shape(&part.name, &part.shape)?;
        whole = [whole[0] + rows, cols];
        let [rows, cols] = matrix_shape(&part.name, &shard.shape(&part.shape))?;
        held = [held[0] + rows, cols];
    }
    Ok((whole, held))
}

/// The side of a matrix that no rank has a part of.
fn gram_of_shards(shards: &[Shard]) -> GramSide {
    match shards.first() {
        Some(shard) if shard.axis == 0 => GramSide::Columns,
        _ => GramSide::Rows,
    }
}

#[derive(Clone, Copy)]
enum Direction {
    ToWhole,
    ToShards,
}

/// Most bytes besides the updates that a step on some parameters takes at a time.
pub(super) fn workspace_bytes(
    rule: &MuonRule,
    specs: &[&ParamSpec],
    tp: impl Fn(bool) -> GroupRank,
) -> Result<usize> {
    const F32: usize = DType::F32.size();
    // Gathered matrices are held until all are orthogonalized.
    let (mut gathered, mut most) = (0, 0);
    let mut stacks: Vec<([usize; 2], usize)> = Vec::new();
    for spec in specs {
        let here = tp(spec.experts);
        for which in rule.matrices(spec) {
            let (parts, shards) = (&spec.parts[which.clone()], &spec.shards[which]);
            let (whole, local) = stacked_shapes(parts, shards)?;
            let shape = match rule.tp_mode_of(parts, here) {
                TpMode::Whole | TpMode::Blockwise => local,
                TpMode::Distributed => {
                    let how = (gram_of_shards(shards), rule.bf16);
                    most = most.max(gathered + newton_schulz_bytes(how, local, 1));
                    continue;
                }
                TpMode::Duplicated => {
                    let held = |rank: usize| -> usize {
                        let shard = |p: &Part| p.cut(GroupRank { rank, ..here }).shape(&p.shape);
                        parts.iter().map(|p| shard(p).iter().product::<usize>()).sum()
                    };
                    gathered += F32 * whole[0] * whole[1];
                    most = most.max(gathered + F32 * (0..here.size).map(held).sum::<usize>());
                    whole
                }
            };
            if shape[0] * shape[1] > 0 {
                match stacks.iter_mut().find(|(s, _)| *s == shape) {
                    Some((_, count)) => *count += 1,
                    None => stacks.push((shape, 1)),
                }
            }
        }
    }
    let stack = |(shape, count): &([usize; 2], usize)| {
        newton_schulz_bytes((GramSide::shorter(*shape), rule.bf16), *shape, *count)
    };
    Ok(most.max(gathered + stacks.iter().map(stack).max().unwrap_or(0)))
}

/// Orthogonalizes matrices, each by itself, those of one shape together as batched GEMMs.
pub(super) fn orthogonalize(rank: &Rank, rule: &MuonRule, xs: &[&Tensor]) -> Result<()> {
    let coefficients = &rule.coefficients.schedule(rule.steps);
    let mut shapes: Vec<[usize; 2]> = Vec::new();
    for x in xs {
        let shape = matrix_shape("an update", x.shape())?;
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    for shape in shapes {
        let alike: Vec<&Tensor> = xs.iter().copied().filter(|x| x.shape() == shape).collect();
        let ns = NewtonSchulz { coefficients, bf16: rule.bf16, gram: GramSide::shorter(shape), sum: None };
        newton_schulz_batched(&*rank.kernels, &rank.compute, &ns, &alike)?;
    }
    Ok(())
}
