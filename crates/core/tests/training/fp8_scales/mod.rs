//! State of delayed scaling: resumes bit for bit under any layout and recipe, and starts calibrated. Operand statistics
//! change no result.

mod calibration;
mod checkpoints;
mod statistics;

use super::support::*;
use ferrotron_core::checkpoint::{self, Snapshot};
use ferrotron_core::config::Resolved;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Trainer, to_f32};
use ferrotron_engine::Rank;

/// The base recipe in sizes that FP8 GEMMs support, with an FP8 recipe.
fn narrow(scaling: &str, more: &[&str]) -> Resolved {
    let scaling = format!("precision.recipe={scaling}");
    let set = ["precision.dtype=bf16", "model.ffn=64", "model.head_dim=16", "train.steps=8", &scaling];
    recipe(&[&set, more].concat())
}

fn delayed(more: &[&str]) -> Resolved {
    narrow("fp8-delayed", &[&["precision.amax_history=4"], more].concat())
}

/// Scales and amax histories by name.
fn scales(s: &Snapshot) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let ours = s.items.iter().filter(|i| i.name.starts_with("fp8."));
    let mut all: Vec<_> =
        ours.map(|i| (i.name.clone(), i.shape.clone(), to_f32(i.dtype, &i.bytes).unwrap())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn steps(t: &mut Trainer, n: usize) -> Vec<u64> {
    (0..n).map(|_| t.train_step(&RULE).unwrap().loss.to_bits()).collect()
}

/// The snapshot of all ranks after some steps under a layout, from a checkpoint or from the start.
fn under(layout: &str, r: &Resolved, from: Option<&checkpoint::Loaded>, n: usize) -> Snapshot {
    let layout: RankLayout = layout.parse().unwrap();
    let work = |rank: Rank| {
        let mut t = Trainer::new(rank, r)?;
        from.map_or(Ok(()), |from| t.restore(from))?;
        for _ in 0..n {
            t.train_step(&RULE)?;
        }
        t.snapshot()
    };
    let make = || Ok(Rank::cpu(1, r.config.train.seed)?);
    join(on_threads(&layout, make, work).unwrap())
}

fn in_layout(layout: &str, more: &[&str]) -> Resolved {
    let keys = layout_keys(layout);
    delayed(&keys.iter().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>())
}
