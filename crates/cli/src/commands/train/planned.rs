//! `train --plan`: the fastest layout for the GPUs at hand, in place of the recipe's own.

use super::Args;
use crate::args::{Device, Global};
use crate::commands::plan::{nothing_fits, this_machine};
use crate::commands::plan_output::layout_text;
use crate::output::{self, UsageError};
use anyhow::Result;
use ferrotron_bridge::recipe::resolve_dry;
use ferrotron_core::config::Recipe;
use ferrotron_core::plan::{Constraints, Machine, search, workload_of};
use ferrotron_tensor::{format_bytes, gpus};

/// Keys of a recipe that fix a part of the layout, by the names of `plan --layout`.
const FIXED: [(&str, &str); 10] = [
    ("parallel.tp", "tp"),
    ("parallel.cp", "cp"),
    ("parallel.pp", "pp"),
    ("parallel.vp", "vp"),
    ("parallel.ep", "ep"),
    ("parallel.etp", "etp"),
    ("parallel.schedule", "schedule"),
    ("parallel.dp", "dp"),
    ("parallel.zero", "zero"),
    ("train.micro_batch", "micro_batch"),
];

/// Gives the recipe the layout of the fastest plan, and says which; returns the number of GPUs.
pub fn apply(recipe: &mut Recipe, args: &Args, global: &Global) -> Result<usize> {
    let machine = match args.machine()? {
        Some(machine) => machine,
        None => at_hand(global)?,
    };
    let mut alone = recipe.clone();
    // A plan needs no data.
    if !alone.is_set("data.path") {
        alone.set("data.path=embedded")?;
    }
    let (resolved, _) = resolve_dry(&mut alone, &|_, _, _| {})?;
    let (workload, mut limits) = workload_of(&resolved, machine.gpus);
    fix(&mut limits, &args.set, &resolved)?;
    let found = search(&workload, &machine, &limits, 1)?;
    let Some(best) = found.plans.first() else {
        return Err(UsageError::new(nothing_fits(&workload, &machine, &limits, &found)).into());
    };
    recipe.set_all(&best.settings(machine.gpus))?;
    if global.launch.leads() && !global.json {
        let hw = &machine.hardware;
        output::note(format_args!("plan: {}", layout_text(best, machine.gpus)));
        output::note(format_args!(
            "the fastest of {} layouts on {} x {}: about {:.2} s a step, {} of {} on a GPU",
            crate::format::thousands(found.considered as u64),
            machine.gpus,
            hw.name,
            best.time.total,
            format_bytes(best.memory.total()),
            format_bytes(hw.memory()),
        ));
    }
    Ok(machine.gpus)
}

/// Fixes what the user has set.
fn fix(limits: &mut Constraints, set: &[String], resolved: &ferrotron_core::config::Resolved) -> Result<()> {
    for item in set {
        let Some((key, value)) = item.split_once('=') else { continue };
        if let Some((_, name)) = FIXED.iter().find(|(k, _)| *k == key.trim()) {
            limits.fix(&format!("{name}={}", value.trim()))?;
        }
        if key.trim() == "train.recompute" {
            let asked = resolved.config.train.recompute.modules();
            if !ferrotron_core::plan::recompute_sets().contains(&asked) {
                return Err(UsageError::new(
                    "--plan knows train.recompute none, [\"norm\",\"activation\"], [\"norm\",\"activation\",\"mlp\"] and full; \
                     take one of them, or leave it out",
                )
                .into());
            }
            limits.recompute = Some(asked);
        }
    }
    Ok(())
}

/// The GPUs of this launch: one of each process, or one alone.
fn at_hand(global: &Global) -> Result<Machine> {
    if global.device == Device::Cpu || gpus().map_or(0, |all| all.len()) == 0 {
        let what = "--plan chooses a layout for GPUs, and this run would be on the CPU; leave it out, or check a job for other \
                    GPUs with --dry-run --gpus 8xH100";
        return Err(UsageError::new(what).into());
    }
    let gpus = global.world_size(None)?.unwrap_or(1);
    Ok(Machine { gpus, ..this_machine()? })
}
