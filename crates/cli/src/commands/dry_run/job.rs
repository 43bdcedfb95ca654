//! `train --dry-run --gpus`: every rank of a job, built and checked on this machine without tensors.

use crate::args::Global;
use crate::{format, output};
use anyhow::Result;
use ferrotron_bridge::recipe::resolve_dry;
use ferrotron_core::config::Recipe;
use ferrotron_core::dry_run::{DryRunReport, dry_run};
use ferrotron_core::plan::Machine;
use ferrotron_tensor::format_bytes;
use std::process::ExitCode;

/// Prints what was built and checked; fails if the job would not run.
pub fn run(mut recipe: Recipe, machine: &Machine, global: &Global) -> Result<ExitCode> {
    if !global.launch.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    // Samples are made up, so that a recipe without data can be checked.
    if !recipe.is_set("data.path") {
        recipe.set("data.path=embedded")?;
    }
    let (resolved, _) = resolve_dry(&mut recipe, &|_, _, _| {})?;
    let report = dry_run(&resolved, &machine.hardware)?;
    match global.json {
        true => output::print_json(&serde_json::json!({
            "recipe": recipe.name,
            "gpu": machine.hardware.name,
            "ok": report.problems.is_empty(),
            "report": report,
        }))?,
        false => output::print(&text(&report, &recipe.name, machine))?,
    }
    Ok(if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(r: &DryRunReport, name: &str, machine: &Machine) -> String {
    let count = |n: usize| format::thousands(n as u64);
    let mut out = format!("{name} on {} {}: {}\n", r.ranks, machine.hardware.name, r.layout);
    let mut line = |name: &str, what: String| out += &format!("  {name:<9} {what}\n");
    line(
        "ranks",
        format!(
            "{}, with {} different programs ({} built)",
            count(r.ranks),
            r.programs,
            count(r.built_ranks)
        ),
    );
    if r.ranks > 1 {
        let groups: Vec<String> =
            r.groups.iter().map(|g| format!("{} {} x {}", g.name, g.count, g.size)).collect();
        line("groups", groups.join(", "));
    }
    line(
        "schedule",
        format!(
            "{} micro-batches, {} operations and exchanges",
            count(r.micro_batches),
            count(r.schedule_steps)
        ),
    );
    if r.ranks > 1 {
        let (start, step) = (format::thousands(r.start_calls), format::thousands(r.step_calls));
        line("calls", format!("{start} before the first step, {step} in a step"));
        let sent: Vec<String> = r
            .sent
            .iter()
            .map(|(group, bytes)| format!("{group} {}", format_bytes(*bytes as usize)))
            .collect();
        line("sent", format!("{} in a step by all ranks", sent.join(", ")));
    }
    let (m, capacity) = (&r.largest, format_bytes(r.capacity));
    line(
        "memory",
        format!(
            "at most {} of {capacity}, on rank {} (stage {}); its simulation allocates {}",
            format_bytes(m.bytes.total()),
            m.rank,
            m.stage,
            format_bytes(m.allocated)
        ),
    );
    match r.problems.is_empty() {
        true => out + "ok: groups agree, every call is matched, no deadlock, memory suffices\n",
        false => r.problems.iter().fold(out, |out, problem| format!("{out}problem: {problem}\n")),
    }
}
