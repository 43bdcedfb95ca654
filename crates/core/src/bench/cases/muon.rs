//! Muon at the matrices of the model: Newton–Schulz for each shape, and the whole update.

use super::{KernelCase, Run, Sizes, case, empty, random};
use crate::Result;
use crate::bench::KernelWork;
use crate::config::OptimizerKind;
use crate::model::{ModelOptions, logical_specs};
use crate::optimizer::MuonRule;
use ferrotron_engine::{ParamKind, Rank};
use ferrotron_kernels::{
    ApplyUpdate, GramSide, MomentumUpdate, NewtonSchulz, newton_schulz_batched, newton_schulz_flops, scalars,
};
use ferrotron_tensor::{DType, Tensor};

/// Elements that are updated at most: what comes after is more of the same.
const MAX_ELEMENTS: usize = 1 << 28;
/// Matrices of one shape that are orthogonalized together at most.
const MAX_BATCH: usize = 8;

/// Every logical matrix of the model that Muon updates by default.
fn matrices(z: &Sizes) -> Vec<[usize; 2]> {
    let specs = logical_specs(&z.model, &ModelOptions::default()).unwrap_or_default();
    let updated = |k| matches!(k, ParamKind::Matrix | ParamKind::Expert | ParamKind::Router);
    let parts = specs.iter().filter(|s| updated(s.kind())).flat_map(|s| &s.parts);
    parts.filter_map(|p| <[usize; 2]>::try_from(p.shape.as_slice()).ok()).collect()
}

pub(super) fn cases(z: &Sizes) -> Vec<KernelCase> {
    let Some(settings) = z.muon.filter(|_| z.optimizer == OptimizerKind::Muon) else { return Vec::new() };
    let (rule, all) = (MuonRule::of(&settings), matrices(z));
    let mut counts: Vec<([usize; 2], usize)> = Vec::new();
    for shape in &all {
        match counts.iter_mut().find(|(s, _)| s == shape) {
            Some((_, n)) => *n += 1,
            None => counts.push((*shape, 1)),
        }
    }
    let mut out = Vec::new();
    for (shape, count) in counts {
        let ([rows, cols], n) = (shape, count.min(MAX_BATCH));
        let work = KernelWork::Flops(n as f64 * newton_schulz_flops(shape, rule.steps));
        out.push(case(
            format!("muon.newton_schulz.{rows}x{cols}"),
            format!("{n} of {rows}x{cols}"),
            work,
            move |rank| {
                let xs = stack(rank, n, shape)?;
                Ok(Box::new(move |rank| orthogonalize(rank, &rule, &xs)))
            },
        ));
    }
    let total: usize = all.iter().map(|[rows, cols]| rows * cols).sum();
    let mut left = MAX_ELEMENTS;
    let few: Vec<[usize; 2]> = all
        .into_iter()
        .enumerate()
        .take_while(|(i, [rows, cols])| {
            let fits = *i == 0 || rows * cols <= left;
            left = left.saturating_sub(rows * cols);
            fits
        })
        .map(|(_, shape)| shape)
        .collect();
    let n: usize = few.iter().map(|[rows, cols]| rows * cols).sum();
    let work = KernelWork::Flops(few.iter().map(|s| newton_schulz_flops(*s, rule.steps)).sum());
    let dtype = z.dtype;
    out.push(case("muon.update", format!("{n} of {total} elements"), work, move |rank| {
        update(rank, rule, dtype, &few)
    }));
    out
}

fn stack(rank: &Rank, n: usize, shape: [usize; 2]) -> Result<Vec<Tensor>> {
    (0..n).map(|_| random(rank, &shape, DType::F32)).collect()
}

fn orthogonalize(rank: &Rank, rule: &MuonRule, xs: &[Tensor]) -> Result<()> {
    let mut left: Vec<&Tensor> = xs.iter().collect();
    let coefficients = &rule.coefficients.schedule(rule.steps);
    while let Some(first) = left.first() {
        let shape = [first.shape()[0], first.shape()[1]];
        let (alike, others) = left.into_iter().partition::<Vec<_>, _>(|x| x.shape() == shape);
        let ns = NewtonSchulz { coefficients, bf16: rule.bf16, gram: GramSide::shorter(shape), sum: None };
        newton_schulz_batched(&*rank.kernels, &rank.compute, &ns, &alike)?;
        left = others;
    }
    Ok(())
}

/// Momentum, orthogonalization and step of every matrix.
fn update(rank: &Rank, rule: MuonRule, dtype: DType, shapes: &[[usize; 2]]) -> Result<Run> {
    let new = |dtype| -> Result<Vec<Tensor>> { shapes.iter().map(|s| random(rank, s, dtype)).collect() };
    let (grads, momenta, updates, masters) =
        (new(DType::F32)?, new(DType::F32)?, new(DType::F32)?, new(DType::F32)?);
    let weights = if dtype == DType::F32 { Vec::new() } else { new(dtype)? };
    let step = empty(rank, &[scalars::COUNT], DType::F32)?;
    let mut values = [0f32; scalars::COUNT];
    (values[scalars::LR], values[scalars::WEIGHT_DECAY], values[scalars::CLIP]) = (1e-4, 0.1, 1.0);
    rank.compute.upload_into(&step, &values)?;
    Ok(Box::new(move |rank| {
        let (k, s, wd_mult) = (&rank.kernels, &rank.compute, 1.0);
        let list = grads.iter().zip(&momenta).zip(&updates);
        let list: Vec<MomentumUpdate> = list
            .map(|((grad, momentum), update)| MomentumUpdate { grad, momentum, l2: None, wd_mult, update })
            .collect();
        k.muon_momentum(s, rule.momentum, &step, &list)?;
        orthogonalize(rank, &rule, &updates)?;
        updates.iter().try_for_each(|u| k.scale(s, u, 0.2))?;
        let list = masters.iter().zip(&updates).enumerate();
        let list: Vec<ApplyUpdate> = list
            .map(|(i, (master, update))| ApplyUpdate {
                master,
                weight: weights.get(i),
                update,
                lr_mult: 1.0,
                wd_mult,
            })
            .collect();
        Ok(k.apply_update(s, rule.decay, &step, &list)?)
    }))
}
