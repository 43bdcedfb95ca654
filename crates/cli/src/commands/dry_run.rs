//! `train --dry-run`: what a run would be and cost, before anything is allocated or written.

mod job;

pub use job::run as run_job;

use super::train::{Args, check_data, derived, device_memory};
use crate::args::Global;
use crate::progress::JobProgress;
use crate::{format, output};
use anyhow::Result;
use ferrotron_bridge::model_source::tokenizer_at;
use ferrotron_bridge::recipe::{Untokenized, resolve_dry};
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::cost::summary::timeline;
use ferrotron_core::cost::{
    CostSummary, MemoryEstimate, StageCost, derived_comm_unit, derived_state_offload, with_state_offload,
};
use ferrotron_core::data::source;
use ferrotron_core::model::PipelineLayout;
use ferrotron_tensor::format_bytes;
use std::cell::Cell;
use std::path::Path;
use std::process::ExitCode;

/// Columns of the drawn pipeline schedule.
const WIDTH: usize = 120;

/// Prints the resolved configuration, its costs and derived values. Data and tokenizer are opened, so that a wrong path is
/// found here; text is not tokenized, unless the length of the run depends on it.
pub fn run(args: &Args, mut recipe: Recipe, global: &Global) -> Result<ExitCode> {
    if !global.launch.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    let tokenized = Cell::new(false);
    let (resolved, untokenized) = {
        let gauge = JobProgress::new(global, "tokenizing");
        resolve_dry(&mut recipe, &|_, done, total| {
            tokenized.set(true);
            gauge.set(done, total);
        })?
    };
    let (recipe, resolved) = (&recipe, &resolved);
    resolved.check_injections()?;
    let mut data_notes = match untokenized.is_empty() {
        true => {
            check_data(resolved, global)?;
            source::open(resolved)?.notes
        }
        false => untokenized.iter().map(not_tokenized).collect(),
    };
    if tokenized.get() {
        data_notes.push(
            "the data was tokenized into data.cache, since the number of steps follows from the number of its samples \
             (train.epochs); `train` reads it from there"
                .into(),
        );
    }
    if let Some(path) = &resolved.config.data.tokenizer {
        tokenizer_at(Path::new(path))?;
    }
    // Of the parameters of each rank, so it is not among the recipe's derived values.
    let resolved = &{
        let mut all = resolved.clone();
        all.derived.extend(derived_comm_unit(resolved)?);
        all.derived.extend(derived_state_offload(resolved, device_memory(global))?);
        all
    };
    let cost = CostSummary::of(&*with_state_offload(resolved, device_memory(global))?)?;
    let groups = resolved.group_sizes()?;
    if global.json {
        output::print_json(&serde_json::json!({
            "recipe": recipe.name,
            "out": args.out(recipe),
            "config": resolved.config,
            "plan": resolved.plan,
            "derived": resolved.derived,
            "cost": cost,
            "notes": data_notes,
            "parameter_groups": groups.iter().map(|(name, rule, n)| {
                serde_json::json!({ "params": name, "rule": rule, "parameters": n })
            }).collect::<Vec<_>>(),
            "optimizer_bytes_per_parameter": MemoryEstimate::of(resolved)?.optimizer_bytes(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let p = &resolved.plan;
    let mut notes = format!(
        "{} steps, {} sequences, {} tokens\n",
        format::thousands(p.steps),
        format::count(p.samples),
        format::count(p.tokens)
    );
    notes += &costs(&cost, resolved)?;
    if !groups.is_empty() {
        notes += "parameter groups:\n";
        let line = |(name, rule, n): &(String, String, usize)| {
            format!("  {name}: {rule}, {} parameters\n", format::count(*n as u64))
        };
        notes += &groups.iter().map(line).collect::<String>();
    }
    notes += &data_notes.iter().map(|note| format!("{note}\n")).collect::<String>();
    notes += &derived(resolved);
    notes += &pipeline(resolved)?;
    let notes: String = notes.lines().map(|l| format!("# {l}\n")).collect();
    output::print(&format!("{}\n{notes}", resolved.config.to_toml()))?;
    Ok(ExitCode::SUCCESS)
}

/// What is not known of a text.
fn not_tokenized(text: &Untokenized) -> String {
    format!(
        "{}: {} of text, which `train` tokenizes; its samples and ids have not been looked at",
        text.path,
        format_bytes(text.bytes as usize)
    )
}

/// Parameters, FLOPs, memory and communication, one line or table each.
fn costs(cost: &CostSummary, resolved: &Resolved) -> Result<String> {
    let count = |n: usize| format::count(n as u64);
    let mut out = format!("parameters: {}", count(cost.parameters));
    if cost.active_parameters < cost.parameters {
        out += &format!(", {} active per token", count(cost.active_parameters));
    }
    if cost.ranks > 1 {
        let most = cost.stages.iter().map(|s| s.parameters).max().unwrap_or(0);
        out += &format!(", at most {} on a rank", count(most));
    }
    out += &format!("\nFLOPs per token: {}\n", flops(cost.flops_per_token));
    out += &format!("{}\n", MemoryEstimate::of(resolved)?.bytes_per_parameter()?);
    out += "memory per rank, estimated:\n";
    out += &by_stage(cost, &|s| {
        let m = &s.memory;
        let mut parts = vec![
            ("weights", m.parameters),
            ("gradients", m.gradients),
            ("optimizer state", m.optimizer),
            ("activations", m.activations),
            ("workspace", m.workspace),
        ];
        if m.update > 0 {
            parts.push(("Muon's updates after the passes", m.update));
        }
        parts.push(("total", m.total()));
        if m.host > 0 {
            parts.push(("offloaded to the host", m.host));
        }
        parts.iter().map(|(name, bytes)| (name.to_string(), format_bytes(*bytes))).collect()
    });
    if cost.ranks > 1 {
        out += "communication per step, sent by a rank, by process group:\n";
        out += &by_stage(cost, &|s| {
            s.sent.iter().map(|(group, bytes)| (group.to_string(), format_bytes(*bytes as usize))).collect()
        });
    }
    Ok(out)
}

/// A line of named values for one rank of every pipeline stage.
fn by_stage(cost: &CostSummary, of: &dyn Fn(&StageCost) -> Vec<(String, String)>) -> String {
    let line = |(i, stage): (usize, &StageCost)| {
        let name = if cost.stages.len() > 1 { format!("  stage {i}: ") } else { "  ".into() };
        let values: Vec<String> = of(stage).iter().map(|(name, value)| format!("{name} {value}")).collect();
        format!("{name}{}\n", values.join(", "))
    };
    cost.stages.iter().enumerate().map(line).collect()
}

/// 25.2 MFLOP, 6.4 GFLOP.
fn flops(x: f64) -> String {
    let (unit, name) =
        [(1e12, "TFLOP"), (1e9, "GFLOP")].into_iter().find(|(unit, _)| x >= *unit).unwrap_or((1e6, "MFLOP"));
    format!("{:.2} {name}", x / unit)
}

/// The pipeline's stages and a drawing of the schedule with its bubble; nothing with a single stage.
fn pipeline(resolved: &Resolved) -> Result<String> {
    let p = &resolved.config.parallel;
    if p.pp == 1 {
        return Ok(String::new());
    }
    let placement = PipelineLayout { vp: p.vp, layout: p.stages.clone() }.place(&resolved.model, p.pp)?;
    Ok(format!("stages: {placement}\n{}", timeline(resolved)?.draw(WIDTH)))
}
