//! `train`: train a model from a recipe.

mod announce;
pub mod args;
mod lead_rank;
mod planned;
mod restart;
mod sample;

use crate::args::{Device, Global};
use crate::log;
use crate::machine::Memory;
use crate::output::{self, UsageError};
use crate::progress::JobProgress;
use crate::ranks;
use crate::signal::Signals;
use anyhow::Result;
use args::ResumeFrom;
pub use args::{Args, LONG};
use ferrotron_core::config::{Recipe, Resolved, refused_changes};
use ferrotron_core::cost::check_fits;
use ferrotron_core::data::{Sources, source};
use ferrotron_core::events::Event;
use ferrotron_core::fault::time_limit::{SLURM_END, TimeLimit};
use ferrotron_core::ranks::StepCount;
use ferrotron_core::train::{Observer, OpenOptions, Run, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::gpus;
use sample::sample;
use std::process::ExitCode;

/// Derived values with their reasons, one line each.
pub fn derived(resolved: &Resolved) -> String {
    let rows: Vec<_> = resolved
        .derived
        .iter()
        .map(|d| vec![format!("  {} = {}", d.key, d.value), format!("({})", d.reason)])
        .collect();
    if rows.is_empty() { String::new() } else { format!("derived:\n{}", output::table(&rows)) }
}

/// Refuses a run on the CPU that needs more memory than the machine has. A GPU says so itself, at the first allocation.
fn check_memory(resolved: &Resolved, global: &Global) -> Result<()> {
    let cpu = match global.device {
        Device::Cpu => true,
        Device::Cuda(_) => false,
        Device::Auto => gpus().map_or(0, |all| all.len()) == 0,
    };
    let ranks = match global.launch.job()? {
        Some(job) => job.local_size,
        None => resolved.config.parallel.layout().world()?,
    };
    match Memory::look().total.filter(|_| cpu) {
        Some(memory) => Ok(check_fits(resolved, ranks, memory as usize)?),
        None => Ok(()),
    }
}

/// Memory of the GPU that a run would use, if there is one.
pub fn device_memory(global: &Global) -> Option<usize> {
    let all = gpus().unwrap_or_default();
    let gpu = match global.device {
        Device::Cpu => None,
        Device::Cuda(ordinal) => all.get(ordinal),
        Device::Auto => all.first(),
    };
    gpu.map(|gpu| gpu.memory)
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    global.launch.set_spares(args.spares);
    let mut recipe = args.load(global)?;
    if let Some(machine) = args.machine()? {
        return super::dry_run::run_job(recipe, &machine, global);
    }
    if args.dry_run {
        return super::dry_run::run(&args, recipe, global);
    }
    let (resolved, first) = {
        let gauge = JobProgress::new(global, "tokenizing");
        ferrotron_bridge::recipe::resolve_with(&mut recipe, &|_, done, total| gauge.set(done, total))?
    };
    resolved.check_injections()?;
    check_data(&resolved, global)?;
    check_memory(&resolved, global)?;
    check_allowed(&args.allow_changes)?;
    let out = args.out(&recipe);
    let signals = Signals::listen()?;
    if global.json || !global.launch.leads() {
        signals.set_printer(Box::new(|_| {}));
    }
    let slurm_end = std::env::var(SLURM_END).ok();
    if let Some(limit) = TimeLimit::of(&resolved.config, global.started, slurm_end.as_deref()) {
        signals.set_limit(limit);
    }
    signals.set_joining(global.launch.job()?.is_some());
    let layout = resolved.config.parallel.layout();
    let fill = |t: &Trainer| first.as_ref().map_or(Ok(()), |weights| weights.fill(t));
    let seed = resolved.config.train.seed;
    let faults = restart::faults(&args, &recipe, &resolved, global)?;
    ranks::run_generations(
        &args.trace.with_tracing(global)?,
        &layout,
        seed,
        faults.as_ref(),
        |rank, start| {
            signals.set_joining(false);
            let lead = rank.world.rank() == 0;
            let resolved = restart::resolved(&recipe, &resolved, rank.world.size())?;
            // Before the run folder is touched: a typo in a path must not cost anything.
            let sources = source::open(&resolved)?;
            let options = OpenOptions {
                initial_weights: Some(&fill),
                data: Some(&*sources.train),
                from_best: args.resume == ResumeFrom::Best,
                fresh: args.fresh,
                begun: start.restarted.is_some() || super::launch::is_restarted(),
                allow_changes: &args.allow_changes,
                snapshots: start.snapshots,
                restarted: start.restarted,
            };
            let run = Run::open_with(rank, resolved, &out, options)?;
            log::open_file(run.dir());
            let signals = signals.clone();
            let training =
                Training { args: &args, recipe: &recipe, global, sources, signals, steps: start.steps };
            match lead {
                true => training.on_lead_rank(run).map_err(ranks::to_core_error),
                false => training.on_other_rank(run),
            }
        },
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Checks the data against model and tokenizer, and prints what the user should know.
pub fn check_data(resolved: &Resolved, global: &Global) -> Result<()> {
    let notes = ferrotron_bridge::recipe::check_data(resolved)?;
    if global.launch.leads() && !global.json {
        notes.iter().for_each(output::note);
    }
    Ok(())
}

/// Refuses names in `--allow-changes` that allow nothing.
fn check_allowed(keys: &[String]) -> Result<()> {
    match keys.iter().find(|k| !refused_changes().any(|r| r == *k)) {
        Some(key) => {
            let all: Vec<&str> = refused_changes().collect();
            let what = format!("--allow-changes {key}: its change is never refused");
            Err(UsageError::new(what).hint(format!("the keys are {}", all.join(", "))).into())
        }
        None => Ok(()),
    }
}

/// What a rank needs to train.
struct Training<'a> {
    args: &'a Args,
    recipe: &'a Recipe,
    global: &'a Global,
    sources: Sources,
    signals: Signals,
    steps: &'a StepCount,
}

impl Training<'_> {
    /// Trains on a rank other than 0, which prints nothing.
    fn on_other_rank(self, mut run: Run) -> ferrotron_core::Result<()> {
        struct SilentObserver<'a>(Signals, &'a StepCount, u64);
        impl Observer for SilentObserver<'_> {
            fn event(&mut self, _: &Event) {}
            fn stop(&self) -> bool {
                self.0.stop_requested()
            }
            fn save(&self) -> bool {
                self.0.take_save_request()
            }
            fn before_step(&mut self, _: &Rank, left: u64) -> ferrotron_core::Result<()> {
                self.1.begin(self.2 + 1 - left.min(self.2));
                Ok(())
            }
        }
        let (train, eval) = (&*self.sources.train, self.sources.eval.as_deref());
        let mut observer = SilentObserver(self.signals.clone(), self.steps, run.resolved.plan.steps);
        let subject = self.subject();
        let (outcome, _) = self.args.trace.train(&mut run, subject, train, eval, &mut observer)?;
        if outcome.finished {
            sample(&run)?;
        }
        Ok(())
    }

    /// The recipe's name and, where lengths of samples vary, their mean.
    fn subject(&self) -> (&str, Option<f64>) {
        (&self.recipe.name, self.sources.varying.map(|samples| samples.mean_length))
    }
}
