//! What `train` prints before its first step.

use super::derived;
use super::lead_rank::View;
use crate::args::Global;
use crate::commands::bench::peak_by_datasheet;
use crate::format;
use crate::output;
use crate::ranks;
use anyhow::Result;
use ferrotron_core::config::{CudaGraphMode, Derived, Packing, Recipe};
use ferrotron_core::cost::summary::timeline;
use ferrotron_core::cost::{MemoryEstimate, derived_comm_unit, derived_state_offload};
use ferrotron_core::events::{self, Event, RunStart};
use ferrotron_core::train::Run;

/// Prints what is about to run, and logs the start of a new run.
pub(super) fn announce(
    run: &mut Run,
    recipe: &Recipe,
    view: &mut View,
    global: &Global,
    first: u64,
) -> Result<()> {
    let device = run.trainer.rank.device().clone();
    let ranks = run.trainer.rank.world.size();
    let start = RunStart {
        schema: events::SCHEMA,
        recipe: recipe.name.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        steps: run.resolved.plan.steps,
        parameters: run.resolved.model.parameters() as u64,
        device: ranks::device_name(&run.trainer.rank),
        threads: device.threads().count() as u64,
        dtype: run.resolved.config.precision.dtype.name().into(),
        flops_per_token: run.flops_per_token,
        ranks: ranks as u64,
        peak_tflops: peak_by_datasheet(&run.trainer.rank).map(|peak| peak * ranks as f64),
    };
    if !global.json {
        let p = &run.resolved.plan;
        let doing = match first {
            0 => format!("training {}", recipe.name),
            n if run.stops_early() => {
                format!("{} is finished: it was stopped early after step {n}", recipe.name)
            }
            n if n > p.steps => {
                format!("{} is finished: {n} steps are done, more than train.steps", recipe.name)
            }
            n if n == p.steps => format!("{} is finished: all {n} steps are done", recipe.name),
            n => format!("resuming {} after step {n} of {}", recipe.name, p.steps),
        };
        run.notes.iter().for_each(output::note);
        output::note(format_args!(
            "{doing}: {} parameters in {}, {} steps of {}{} tokens, {} -> {}",
            format::count(start.parameters),
            start.dtype,
            format::thousands(p.steps),
            if run.resolved.config.data.packing == Packing::PaddingFree { "up to " } else { "" },
            format::count(run.resolved.config.train.global_batch as u64 * p.seq_len as u64),
            ranks::device_description(&run.trainer.rank),
            run.dir().display(),
        ));
        if first == 0 {
            output::note(MemoryEstimate::of(&run.resolved)?.bytes_per_parameter()?);
            let parallel = &run.resolved.config.parallel;
            if parallel.pp > 1 {
                let bubble = 100.0 * timeline(&run.resolved)?.bubble();
                output::note(format!("pipeline: {} stages, {bubble:.1} % of a step is bubble", parallel.pp));
            }
            let mut resolved = run.resolved.clone();
            resolved.derived.extend(derived_comm_unit(&resolved)?);
            let memory = device.gpu().map(|gpu| gpu.memory);
            resolved.derived.extend(derived_state_offload(&resolved, memory)?);
            // Resolved on the device, so it is not among the recipe's derived values.
            let choice = run.trainer.cuda_graph_decision();
            if device.gpu().is_some() && resolved.config.train.cuda_graph == CudaGraphMode::Auto {
                let value = format!("\"{}\"", choice.value);
                resolved.derived.push(Derived { key: "train.cuda_graph", value, reason: choice.reason });
            }
            let derived = derived(&resolved);
            if !derived.is_empty() {
                output::note(derived.trim_end());
            }
        }
    }
    if first == 0 {
        run.emit(Event::RunStart(start), view)?;
    }
    Ok(())
}
