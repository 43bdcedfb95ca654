//! Muon on this rank's parameters: momentum, orthogonalization of every logical matrix by itself, and the step.
//!
//! A parameter may stack several matrices (q, k, v; gate, up; experts): each is orthogonalized and scaled alone, all of one
//! shape in one batch. A matrix that tensor-parallel ranks share is treated as [`MuonTpMode`] says.

mod matrix;

use super::{GroupRule, Optimizer, UpdateRule};
use crate::config::{
    MuonAdaptive, MuonCoefficients, MuonDecay, MuonProducts, MuonScale, MuonSettings, MuonTpMode,
};
use crate::{Error, Result};
use ferrotron_engine::data_parallel::group_rank;
use ferrotron_engine::{GradBuffer, GroupRank, ParamId, ParamSpec, Params, Rank};
use ferrotron_kernels::{
    AdaptiveScale, ApplyUpdate, CoefficientSet, MomentumUpdate, MuonMomentum, ScaleMode, WeightDecay,
    normuon_lines,
};
use ferrotron_tensor::{Category, DType, Tensor};
pub(crate) use matrix::TpMode;
use matrix::{Matrix, orthogonalize};
use std::ops::Range;

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
    /// Newton–Schulz GEMMs in bf16; otherwise f32.
    pub bf16: bool,
    /// Factor on the update by shape.
    pub scale: ScaleMode,
    /// Factor on the update on top of `scale`; 0.2 with `spectral` matches AdamW's RMS.
    pub extra_scale: f64,
    /// Kind of second moment.
    pub adaptive: MuonAdaptive,
    /// β2 and ε of the adaptive second moment.
    pub second: AdaptiveScale,
    /// Matrices that tensor-parallel ranks share.
    pub tp_mode: MuonTpMode,
    /// q, k and v are matrices of their own.
    pub split_qkv: bool,
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
            split_qkv: m.split_qkv,
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

/// Bytes of updates that are held at once, at most, unless those of one parameter are more.
const UPDATE_BYTES: usize = 512 << 20;

/// Parameters that are updated together, of `specs` on a tensor-parallel rank.
fn batches(specs: &[&ParamSpec], tp: impl Fn(bool) -> GroupRank) -> Vec<Range<usize>> {
    let bytes = |spec: &ParamSpec| {
        let whole: usize = spec.parts.iter().map(|p| p.shape.iter().product::<usize>()).sum();
        let gathered = if tp(spec.experts).size > 1 { whole } else { 0 };
        (spec.numel() + gathered) * DType::F32.size()
    };
    let (mut out, mut start, mut held) = (Vec::new(), 0, 0);
    for (end, spec) in specs.iter().enumerate() {
        if end > start && held + bytes(spec) > UPDATE_BYTES {
            out.push(start..end);
            (start, held) = (end, 0);
        }
        held += bytes(spec);
    }
    out.push(start..specs.len());
    out
}

/// Most bytes of workspace that a step on parameters takes: updates, gathered matrices, and the stacks of Newton–Schulz.
pub(crate) fn workspace_bytes(
    rule: &MuonRule,
    specs: &[&ParamSpec],
    tp: impl Fn(bool) -> GroupRank,
) -> Result<usize> {
    let mut most = 0;
    for batch in batches(specs, &tp) {
        let specs = &specs[batch];
        let updates: usize = specs.iter().map(|s| s.numel() * DType::F32.size()).sum();
        most = most.max(updates + matrix::workspace_bytes(rule, specs, &tp)?);
    }
    Ok(most)
}

impl Optimizer {
    /// Muon's step on the parameters `list`, of which this rank holds all or nothing. Tensor-parallel ranks hold the same
    /// parameters and step through them in one order.
    pub(super) fn muon_step(
        &self,
        rank: &Rank,
        params: &Params,
        grads: &GradBuffer,
        rules: (&GroupRule, &MuonRule),
        list: &[usize],
    ) -> Result<()> {
        let specs: Vec<&ParamSpec> = list.iter().map(|i| &params.specs()[*i]).collect();
        let each = batches(&specs, |experts| group_rank(rank.tp_group(experts)));
        each.into_iter().try_for_each(|batch| self.muon_updates(rank, params, grads, rules, &list[batch]))
    }

    /// The step on a few parameters together.
    fn muon_updates(
        &self,
        rank: &Rank,
        params: &Params,
        grads: &GradBuffer,
        (group, rule): (&GroupRule, &MuonRule),
        list: &[usize],
    ) -> Result<()> {
        let (k, s, scalars) = (&rank.kernels, &rank.compute, self.scalars());
        let names = group.states();
        let state = |name: &str| self.moments.iter().find(|m| m.name() == name);
        let (Some(momentum), second) = (state(names[0].0), names.get(1).and_then(|m| state(m.0))) else {
            return Err(Error::Invalid("Muon has no momentum".into()));
        };
        let new = |n: usize| Tensor::empty(s, &[n], DType::F32, Category::Workspace);
        let mut pairs = Vec::with_capacity(list.len());
        for &i in list {
            let spec = &params.specs()[i];
            let (piece, grad) = grads.piece(rank, ParamId(i))?;
            if piece.param_range != (0..spec.numel()) {
                let name = spec.parts.first().map_or("", |p| &p.name);
                let held = &piece.param_range;
                return Err(Error::Invalid(format!("Muon needs {name} whole, not {held:?} of it")));
            }
            pairs.push((grad, new(spec.numel())?));
        }
        let wd_mult = |i: usize| group.weight_decay_of(&params.specs()[i]);
        let momenta = list.iter().zip(&pairs).map(|(&i, (grad, update))| {
            let l2 = (rule.decay == WeightDecay::L2).then_some(&self.masters.pieces()[i]);
            MomentumUpdate { grad, momentum: &momentum.pieces()[i], l2, wd_mult: wd_mult(i), update }
        });
        k.muon_momentum(s, rule.momentum, scalars, &momenta.collect::<Vec<_>>())?;
        let mut matrices = Vec::new();
        for (&i, (_, update)) in list.iter().zip(&pairs) {
            let spec = &params.specs()[i];
            for which in rule.matrices(spec) {
                let lines = self.lines.of(i, which.start);
                let (mut matrix, range) =
                    Matrix::new(rule, spec, which, update, rank.tp_group(spec.experts))?;
                matrix.begin(rank, rule)?;
                let second = match second {
                    Some(v) => Some(v.pieces()[i].narrow(0, range.start, range.len())?),
                    None => None,
                };
                matrices.push((matrix, update.narrow(0, range.start, range.len())?, lines, second));
            }
        }
        let operands: Vec<&Tensor> = matrices.iter().filter_map(|(m, ..)| m.operand()).collect();
        orthogonalize(rank, rule, &operands)?;
        for (matrix, local, lines, second) in &matrices {
            if let (Some(lines), Some(x)) = (lines, matrix.operand()) {
                k.normuon(s, rule.second, scalars, x, lines)?;
            }
            let factor = matrix.finish(rank, rule)?;
            if local.numel() == 0 {
                continue;
            }
            if let Some(v) = second {
                k.adamuon(s, rule.second, scalars, local, v)?;
            }
            k.scale(s, local, factor as f32)?;
        }
        let weights = list.iter().map(|i| self.weight(params, *i)).collect::<Result<Vec<_>>>()?;
        let steps = list.iter().zip(&pairs).zip(&weights).map(|((&i, (_, update)), weight)| {
            let narrow = params.dtype() != DType::F32 && !params.specs()[i].fp8_resident();
            let (master, weight) = (&self.masters.pieces()[i], narrow.then_some(weight));
            ApplyUpdate { master, weight, update, lr_mult: group.lr, wd_mult: wd_mult(i) }
        });
        Ok(k.apply_update(s, rule.decay, scalars, &steps.collect::<Vec<_>>())?)
    }
}
