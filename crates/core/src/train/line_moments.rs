//! Second moments of NorMuon in checkpoints: f32, one for each row or column of a logical matrix, `normuon.v/<name>`.

use super::Trainer;
use crate::Result;
use crate::checkpoint::{Item, Loaded};
use crate::optimizer::{ParamGroups, is_normuon, line_name};
use crate::tensorfile::to_f32;
use ferrotron_engine::ParamSpec;
use ferrotron_kernels::normuon_lines;
use ferrotron_tensor::DType;

/// Those of the parameters that this rank updates.
pub(super) fn items(t: &Trainer) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    // Another stage saves what is mirrored here.
    for (_, name, v) in t.optimizer.line_moments(&t.model.params).filter(|(spec, ..)| !spec.mirror) {
        let values = t.rank.compute.download::<f32>(v)?;
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        items.push(Item::whole(&name, DType::F32, vec![values.len()], bytes));
    }
    Ok(items)
}

/// Names and shapes that a checkpoint of the whole model has.
pub(super) fn expected(groups: &ParamGroups, specs: &[ParamSpec]) -> Vec<(String, Vec<usize>)> {
    let keeps = |s: &&ParamSpec| {
        let rule = groups.rules().get(s.group.index);
        rule.is_some_and(|r| !r.frozen && is_normuon(&r.rule))
    };
    let lines = |shape: &[usize]| match *shape {
        [rows, cols] => normuon_lines([rows, cols]),
        _ => shape.iter().product(),
    };
    let parts = specs.iter().filter(keeps).flat_map(|s| &s.parts);
    parts.map(|p| (line_name(&p.name), vec![lines(&p.shape)])).collect()
}

/// Restores them from a checked checkpoint.
pub(super) fn restore(t: &Trainer, loaded: &Loaded) -> Result<()> {
    for (_, name, v) in t.optimizer.line_moments(&t.model.params) {
        t.rank.compute.upload_into(v, &to_f32(DType::F32, &loaded.read(&name)?)?)?;
    }
    Ok(())
}
