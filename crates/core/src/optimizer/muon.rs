//! Muon on this rank's parameters: momentum, orthogonalization of every logical matrix by itself, and the step.
//!
//! A parameter may stack several matrices (q, k, v; gate, up; experts): each is orthogonalized and scaled alone. A matrix
//! that tensor-parallel ranks share is treated as [`MuonTpMode`] says.

use super::{GroupRule, Optimizer, UpdateRule};
use crate::config::{
    MuonAdaptive, MuonCoefficients, MuonDecay, MuonProducts, MuonScale, MuonSettings, MuonTpMode,
};
use crate::{Error, Result};
use ferrotron_comm::{Communicator, ReduceOp};
use ferrotron_engine::data_parallel::group_rank;
use ferrotron_engine::{GradBuffer, GroupRank, ParamId, ParamSpec, Params, Part, Rank, Shard};
use ferrotron_kernels::{
    AdaptiveScale, ApplyUpdate, CoefficientSet, GramSide, MomentumUpdate, MuonMomentum, NewtonSchulz,
    ScaleMode, SumOverRanks, WeightDecay, newton_schulz, normuon_lines,
};
use ferrotron_tensor::{Category, DType, Tensor};

/// Constants of Muon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonRule {
    /// Momentum.
    pub momentum: MuonMomentum,
    /// Where weight decay enters.
    pub decay: WeightDecay,
    /// Coefficients of the iterations.
    pub coefficients: CoefficientSet,
    /// Number of iterations.
    pub steps: usize,
    /// Products of bf16 operands.
    pub bf16: bool,
    /// Factor on the update by shape.
    pub scale: ScaleMode,
    /// A further factor.
    pub extra_scale: f64,
    /// Kind of second moment.
    pub adaptive: MuonAdaptive,
    /// Its constants.
    pub second: AdaptiveScale,
    /// Matrices that tensor-parallel ranks share.
    pub tp_mode: MuonTpMode,
}

impl MuonRule {
    /// The rule of a recipe.
    pub fn of(m: &MuonSettings) -> MuonRule {
        MuonRule {
            momentum: MuonMomentum { momentum: m.momentum as f32, nesterov: m.nesterov },
            decay: match m.weight_decay {
                MuonDecay::Decoupled => WeightDecay::Decoupled,
                MuonDecay::Independent => WeightDecay::Independent,
                MuonDecay::L2 => WeightDecay::L2,
            },
            coefficients: match m.coefficients {
                MuonCoefficients::Simple => CoefficientSet::Simple,
                MuonCoefficients::Quintic => CoefficientSet::Quintic,
                MuonCoefficients::PolarExpress => CoefficientSet::PolarExpress,
                MuonCoefficients::Cans => CoefficientSet::Cans,
                MuonCoefficients::Aol => CoefficientSet::Aol,
                MuonCoefficients::DeepseekV4 => CoefficientSet::DeepseekV4,
                MuonCoefficients::Cubic5 => CoefficientSet::Cubic5,
            },
            steps: m.steps,
            bf16: m.products == MuonProducts::Bf16,
            scale: match m.scale {
                MuonScale::Spectral => ScaleMode::Spectral,
                MuonScale::ShapeScaling => ScaleMode::ShapeScaling,
                MuonScale::UnitRmsNorm => ScaleMode::UnitRmsNorm,
            },
            extra_scale: m.extra_scale,
            adaptive: m.adaptive,
            second: AdaptiveScale { beta2: m.beta2 as f32, eps: m.eps as f32 },
            tp_mode: m.tp_mode,
        }
    }
}

/// Second moments of NorMuon, f32, one for each logical matrix that this rank updates.
pub struct LineMoments {
    /// Parameter, part of it, and its moments.
    lines: Vec<(usize, usize, Tensor)>,
}

impl LineMoments {
    /// Zeros for the parameters `owned` that NorMuon updates.
    pub(super) fn new(
        rank: &Rank,
        specs: &[ParamSpec],
        rules: &[GroupRule],
        owned: impl Fn(usize) -> bool,
    ) -> Result<LineMoments> {
        let mut lines = Vec::new();
        for (i, spec) in specs.iter().enumerate().filter(|(i, _)| owned(*i)) {
            let rule = rules.get(spec.group.index);
            if !rule.is_some_and(|r| !r.frozen && is_normuon(&r.rule)) {
                continue;
            }
            for (k, part) in spec.parts.iter().enumerate() {
                let n = normuon_lines(matrix_shape(&part.name, &part.shape)?);
                lines.push((i, k, rank.compute.zeros(&[n], DType::F32, Category::Optimizer)?));
            }
        }
        Ok(LineMoments { lines })
    }

    /// Their parameter, name in checkpoints, and moments.
    pub(super) fn named<'a>(
        &'a self,
        specs: &'a [ParamSpec],
    ) -> impl Iterator<Item = (&'a ParamSpec, String, &'a Tensor)> {
        self.lines.iter().map(|(i, k, v)| (&specs[*i], line_name(&specs[*i].parts[*k].name), v))
    }

    fn of(&self, param: usize, part: usize) -> Option<&Tensor> {
        self.lines.iter().find(|(i, k, _)| (*i, *k) == (param, part)).map(|(_, _, v)| v)
    }
}

/// Name of NorMuon's second moments of a logical tensor in checkpoints.
pub(crate) fn line_name(part: &str) -> String {
    format!("normuon.v/{part}")
}

/// Whether a rule keeps [`LineMoments`].
pub(crate) fn is_normuon(rule: &UpdateRule) -> bool {
    matches!(rule, UpdateRule::Muon(m) if m.adaptive == MuonAdaptive::Normuon)
}

fn matrix_shape(name: &str, shape: &[usize]) -> Result<[usize; 2]> {
    match *shape {
        [rows, cols] => Ok([rows, cols]),
        _ => Err(Error::Invalid(format!("Muon updates matrices, which {name} of shape {shape:?} is not"))),
    }
}

/// A logical matrix of a parameter on this rank.
struct Matrix<'a> {
    part: &'a Part,
    shard: &'a Shard,
    /// f32 update of this rank's shard, `[rows, cols]`.
    local: Tensor,
    /// Tensor-parallel ranks of the parameter.
    group: &'a Communicator,
    /// Second moments of NorMuon.
    lines: Option<&'a Tensor>,
}

impl Matrix<'_> {
    fn place(&self) -> GroupRank {
        group_rank(self.group)
    }

    /// Whether every rank has all of it.
    fn is_whole(&self) -> bool {
        self.part.holders(self.place()).len() == self.group.size()
    }

    /// Orthogonalizes a whole matrix, or a shard as if it were one.
    fn alone(&self, rank: &Rank, rule: &MuonRule, scalars: &Tensor, x: &Tensor) -> Result<()> {
        let shape = matrix_shape(&self.part.name, x.shape())?;
        let coefficients = &rule.coefficients.schedule(rule.steps);
        let gram = GramSide::shorter(shape);
        let ns = NewtonSchulz { coefficients, bf16: rule.bf16, gram, sum: None };
        newton_schulz(&*rank.kernels, &rank.compute, &ns, x)?;
        if let Some(lines) = self.lines {
            rank.kernels.normuon(&rank.compute, rule.second, scalars, x, lines)?;
        }
        Ok(())
    }

    /// Gathers the whole matrix, orthogonalizes it on every rank alike, and keeps this rank's shard.
    fn duplicated(&self, rank: &Rank, rule: &MuonRule, scalars: &Tensor) -> Result<()> {
        let (s, k, n) = (&rank.compute, &rank.kernels, self.group.size());
        let new = |shape: &[usize]| Tensor::empty(s, shape, DType::F32, Category::Workspace);
        let shards: Vec<Shard> = (0..n).map(|r| self.part.cut(GroupRank { rank: r, size: n })).collect();
        let shapes: Vec<Vec<usize>> = shards.iter().map(|c| c.shape(&self.part.shape)).collect();
        let counts: Vec<usize> = shapes.iter().map(|x| x.iter().product()).collect();
        let all = new(&[counts.iter().sum()])?;
        let mine = self.local.view(&[self.local.numel()])?;
        self.group.all_gather_v(s, &mine, &all, &counts, "updates of Muon")?;
        let whole = new(&self.part.shape)?;
        let mut at = 0;
        for ((shard, shape), count) in shards.iter().zip(&shapes).zip(&counts).filter(|(_, n)| **n > 0) {
            let from = all.narrow(0, at, *count)?.view(shape)?;
            k.copy(s, &from, &whole.narrow(shard.axis, shard.range.start, shard.range.len())?)?;
            at += count;
        }
        self.alone(rank, rule, scalars, &whole)?;
        let own = &self.shard.range;
        if own.is_empty() {
            return Ok(());
        }
        Ok(k.copy(s, &whole.narrow(self.shard.axis, own.start, own.len())?, &self.local)?)
    }

    /// Iterates on the shards, with norms and Gram matrices summed over the ranks.
    fn distributed(&self, rank: &Rank, rule: &MuonRule) -> Result<()> {
        let sum = |t: &Tensor| -> ferrotron_tensor::Result<()> {
            Ok(self.group.all_reduce(&rank.compute, t, ReduceOp::Sum, "Gram matrix of Muon")?)
        };
        let sum: &SumOverRanks = &sum;
        // The side that no rank has a part of.
        let gram = if self.shard.axis == 0 { GramSide::Columns } else { GramSide::Rows };
        let coefficients = &rule.coefficients.schedule(rule.steps);
        let ns = NewtonSchulz { coefficients, bf16: rule.bf16, gram, sum: Some(sum) };
        Ok(newton_schulz(&*rank.kernels, &rank.compute, &ns, &self.local)?)
    }

    /// The finished direction in place of the momentum; returns nothing but the factor that scales it.
    fn orthogonalize(&self, rank: &Rank, rule: &MuonRule, scalars: &Tensor) -> Result<f64> {
        let whole = rule.scale.factor(matrix_shape(&self.part.name, &self.part.shape)?);
        match rule.tp_mode {
            _ if self.is_whole() => self.alone(rank, rule, scalars, &self.local)?,
            MuonTpMode::Blockwise => {
                self.alone(rank, rule, scalars, &self.local)?;
                return Ok(rule.scale.factor(matrix_shape(&self.part.name, self.local.shape())?));
            }
            // Ranks that hold the same heads would be summed twice.
            MuonTpMode::Distributed if !self.part.shared(self.group.size()) => {
                self.distributed(rank, rule)?
            }
            _ => self.duplicated(rank, rule, scalars)?,
        }
        Ok(whole)
    }
}

impl Optimizer {
    /// Muon's step on the parameters `list`, of which this rank holds all or nothing. Tensor-parallel ranks hold the same
    /// parameters and step through them in one order.
    pub(super) fn muon_step(
        &self,
        rank: &Rank,
        params: &Params,
        grads: &GradBuffer,
        (group, rule): (&GroupRule, &MuonRule),
        list: &[usize],
    ) -> Result<()> {
        let (k, s, scalars) = (&rank.kernels, &rank.compute, self.scalars());
        let first = group.states();
        let state = |name: &str| self.moments.iter().find(|m| m.name() == name);
        let (Some(momentum), second) = (state(first[0].0), first.get(1).and_then(|m| state(m.0))) else {
            return Err(Error::Invalid("Muon has no momentum".into()));
        };
        for &i in list {
            let spec = &params.specs()[i];
            let (piece, grad) = grads.piece(rank, ParamId(i))?;
            if piece.param_range != (0..spec.numel()) {
                let name = spec.parts.first().map_or("", |p| &p.name);
                return Err(Error::Invalid(format!(
                    "Muon needs {name} whole, not {:?} of it",
                    piece.param_range
                )));
            }
            let update = Tensor::empty(s, &[spec.numel()], DType::F32, Category::Workspace)?;
            let master = &self.masters.pieces()[i];
            let wd_mult = group.weight_decay_of(spec);
            let l2 = (rule.decay == WeightDecay::L2).then_some(master);
            let one =
                MomentumUpdate { grad: &grad, momentum: &momentum.pieces()[i], l2, wd_mult, update: &update };
            k.muon_momentum(s, rule.momentum, scalars, &[one])?;
            for (part_index, (part, shard, range)) in spec.held().enumerate() {
                let local = update.narrow(0, range.start, range.len())?;
                let matrix = Matrix {
                    part,
                    shard,
                    local: local.view(&shard.shape(&part.shape))?,
                    group: rank.tp_group(spec.experts),
                    lines: self.lines.of(i, part_index),
                };
                let factor = matrix.orthogonalize(rank, rule, scalars)? * rule.extra_scale;
                if range.is_empty() {
                    continue;
                }
                if let Some(second) = second {
                    let v = second.pieces()[i].narrow(0, range.start, range.len())?;
                    k.adamuon(s, rule.second, scalars, &local, &v)?;
                }
                k.scale(s, &local, factor as f32)?;
            }
            let weight = self.weight(params, i)?;
            let narrow = params.dtype() != DType::F32 && !spec.fp8_resident();
            let weight = narrow.then_some(&weight);
            let one = ApplyUpdate { master, weight, update: &update, lr_mult: group.lr, wd_mult };
            k.apply_update(s, rule.decay, scalars, &[one])?;
        }
        Ok(())
    }
}
