//! Delayed-scaling state in checkpoints. Scales belong to modules and operand roles, not to ranks: all ranks of a stage have
//! the same, so any layout loads what any other saved.
//!
//! For each quantized linear layer, named by its outputs (`layers.0.attn.q+k+v`; a tied LM head is `embed.tokens`):
//! `fp8.scale/<module>` f32 `[3]` and `fp8.history/<module>` f32 `[steps, 3]`, in the order input, weight, gradient. A module
//! without them starts with fresh state; saved state of modules that are not quantized now is ignored.

use super::Trainer;
use crate::checkpoint::{Item, Loaded};
use crate::model::module_of;
use crate::{Error, Result};
use ferrotron_engine::ParamSpec;
use ferrotron_engine::quant::{DelayedState, QuantState, Role};
use ferrotron_tensor::DType;
use std::collections::HashSet;

const SCALE: &str = "fp8.scale/";
const HISTORY: &str = "fp8.history/";
const ROLES: usize = Role::ALL.len();

/// The name of a linear layer by its stacked outputs: `layers.0.mlp.gate+up`. The experts of a layer have one name,
/// whichever a rank holds: `layers.0.moe.experts.gate+up`.
pub(super) fn module(spec: &ParamSpec) -> String {
    let mut names: Vec<String> = spec.parts.iter().map(|p| module_of(&p.name)).collect();
    if spec.experts {
        // Matrices of an expert are neighbours.
        let each = names.iter().skip(1).position(|n| *n == names[0]).map_or(names.len(), |i| i + 1);
        names.truncate(each);
    }
    let mut names = names.into_iter();
    let first = names.next().unwrap_or_default();
    let last = |name: String| name.rsplit('.').next().map(String::from).unwrap_or_default();
    names.fold(first, |all, name| format!("{all}+{}", last(name)))
}

const EXPERTS: &str = "experts";

/// Whether `name` is a module of a model with the logical tensors `parts`.
fn is_module(name: &str, parts: &HashSet<&str>) -> bool {
    // The output matrix is `head`, or the table it shares.
    if name == "head" || name == "embed.tokens" {
        return parts.contains(name) || parts.contains(format!("{name}.weight").as_str());
    }
    let (parent, outputs) = name.rsplit_once('.').unwrap_or(("", name));
    let parent = match parent.rsplit('.').next() {
        Some(EXPERTS) => format!("{parent}.0"),
        _ => parent.to_string(),
    };
    outputs.split('+').all(|output| parts.contains(format!("{parent}.{output}.weight").as_str()))
}

fn delayed(t: &Trainer) -> Option<&DelayedState> {
    t.model.step_state.quant().and_then(QuantState::delayed)
}

/// The scales of this rank's stage for a checkpoint; all ranks of the stage have the same.
pub(super) fn items(t: &Trainer) -> Result<Vec<Item>> {
    let Some(d) = delayed(t) else { return Ok(Vec::new()) };
    let s = &t.rank.compute;
    let (scale, history) = (s.download::<f32>(&d.scale)?, s.download::<f32>(&d.history)?);
    let mut items = Vec::new();
    for (i, slots) in d.slots().chunks_exact(ROLES).enumerate() {
        let (name, own) = (module(&t.model.params.specs()[slots[0].param.0]), i * ROLES..(i + 1) * ROLES);
        let mut add = |kind: &str, shape: &[usize], values: &[f32]| {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            items.push(Item::whole(&format!("{kind}{name}"), DType::F32, shape.to_vec(), bytes));
        };
        let rows: Vec<f32> =
            history.chunks_exact(scale.len()).flat_map(|r| &r[own.clone()]).copied().collect();
        add(SCALE, &[ROLES], &scale[own]);
        add(HISTORY, &[rows.len() / ROLES, ROLES], &rows);
    }
    Ok(items)
}

/// Names and shapes of a checkpoint's scales, all optional; an error if one belongs to no module of this model, has another
/// shape, or comes without its history. `parts` are the model's logical tensors.
pub(super) fn check<'a>(loaded: &'a Loaded, parts: &HashSet<&str>) -> Result<Vec<(&'a str, &'a [usize])>> {
    let damaged = |what: String| Err(Error::damaged(loaded.path(), what));
    let mut found = Vec::new();
    for tensor in loaded.tensors() {
        let (name, shape) = (tensor.name.as_str(), tensor.shape.as_slice());
        let (module, other, fits) = match (name.strip_prefix(SCALE), name.strip_prefix(HISTORY)) {
            (Some(module), _) => (module, HISTORY, shape == [ROLES]),
            (_, Some(module)) => (module, SCALE, matches!(shape, [steps, ROLES] if *steps > 0)),
            _ => continue,
        };
        if !is_module(module, parts) {
            // The check of all names says so.
            continue;
        }
        if !fits || tensor.dtype.native() != Some(DType::F32) {
            let dtype = tensor.dtype.native().map_or(tensor.dtype.name(), DType::name);
            return damaged(format!(
                "{name} is {dtype} {shape:?} where scales are f32 [{ROLES}] and their history f32 [steps, {ROLES}]"
            ));
        }
        if loaded.get(&format!("{other}{module}")).is_none() {
            return damaged(format!("has {name} without {other}{module}"));
        }
        found.push((name, shape));
    }
    Ok(found)
}

/// What scales map an amax to: of inputs and weights, and of gradients.
pub(super) fn scaled_to(t: &Trainer) -> Option<[f32; 2]> {
    delayed(t).map(DelayedState::scaled_to)
}

/// Restores the scales from a checked checkpoint, which map an amax to `from`; modules without saved scales start fresh.
pub(super) fn restore(t: &Trainer, loaded: &Loaded, from: Option<[f32; 2]>) -> Result<()> {
    let Some(d) = delayed(t) else { return Ok(()) };
    let s = &t.rank.compute;
    // A power of two, so exact where format and margin differ, and 1 where they do not.
    let (from, to) = (from.unwrap_or(d.scaled_to()), d.scaled_to());
    let factor = |role: usize| {
        let of = usize::from(Role::ALL[role] == Role::Gradient);
        to[of] / from[of]
    };
    let (n, len) = (d.slots().len(), d.history.shape()[0]);
    let (mut scale, mut history) = (vec![1f32; n], vec![0f32; len * n]);
    for (i, slots) in d.slots().chunks_exact(ROLES).enumerate() {
        let name = module(&t.model.params.specs()[slots[0].param.0]);
        let name = [SCALE, HISTORY].map(|kind| format!("{kind}{name}"));
        if loaded.get(&name[0]).is_none() {
            continue;
        }
        let [saved, rows] = [&name[0], &name[1]].map(|name| loaded.read(name));
        let (saved, rows) = (super::to_f32(DType::F32, &saved?)?, super::to_f32(DType::F32, &rows?)?);
        for (role, saved) in saved.iter().enumerate() {
            let rescaled = saved * factor(role);
            if rescaled.is_nan() || rescaled <= 0.0 || saved.is_infinite() {
                return Err(Error::damaged(
                    loaded.path(),
                    format!("{} is {saved}, which is no scale", name[0]),
                ));
            }
            // As in an update: the largest finite scale instead of an infinite one.
            scale[i * ROLES + role] = rescaled.min(f32::MAX);
        }
        // The last row is the newest. Row 0 is where a step gathers; it is zero between steps.
        let newest = rows.chunks_exact(ROLES).skip(1).rev();
        for (row, values) in (1..len).rev().zip(newest) {
            history[row * n + i * ROLES..][..ROLES].copy_from_slice(values);
        }
    }
    s.upload_into(&d.scale, &scale)?;
    s.upload_into(&d.history, &history)?;
    Ok(())
}

/// Scales and amax history of this rank's stage.
pub(crate) struct DelayedScales {
    scale: Vec<f32>,
    history: Vec<f32>,
}

impl Trainer {
    /// Reads the state of delayed scaling, if the recipe uses it.
    pub(crate) fn scales(&self) -> Result<Option<DelayedScales>> {
        let Some(d) = delayed(self) else { return Ok(None) };
        let s = &self.rank.compute;
        Ok(Some(DelayedScales { scale: s.download(&d.scale)?, history: s.download(&d.history)? }))
    }

    /// Sets the state of delayed scaling to that of another trainer of the same recipe.
    pub(crate) fn set_scales(&self, scales: &DelayedScales) -> Result<()> {
        let (Some(d), s) = (delayed(self), &self.rank.compute) else { return Ok(()) };
        s.upload_into(&d.scale, &scales.scale)?;
        s.upload_into(&d.history, &scales.history)?;
        // FP8 parameters are quantized with these scales.
        self.optimizer.sync_params(&self.rank, &self.model.params, &self.model.step_state)
    }
}
