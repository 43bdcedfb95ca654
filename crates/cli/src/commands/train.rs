//! `train`: train a model from a recipe.

mod planned;
mod restart;

use crate::args::{Device, Global};
use crate::format;
use crate::log;
use crate::machine::Memory;
use crate::output::{self, UsageError};
use crate::progress::{JobProgress, Progress};
use crate::ranks;
use crate::signal::Signals;
use crate::trace;
use anyhow::Result;
use clap::ValueEnum;
use ferrotron_core::config::{CudaGraphMode, Derived, Packing, Recipe, Resolved, refused_changes};
use ferrotron_core::cost::summary::timeline;
use ferrotron_core::cost::{MemoryEstimate, check_fits, derived_comm_unit, derived_state_offload};
use ferrotron_core::data::{Sources, source};
use ferrotron_core::events::{self, Ending, Event, RunEnd, RunStart};
use ferrotron_core::fault::time_limit::{SLURM_END, TimeLimit};
use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::model::generate::{Prompt, Sampling, generate};
use ferrotron_core::plan::Machine;
use ferrotron_core::ranks::StepCount;
use ferrotron_core::train::{Observer, OpenOptions, Outcome, Run, Trainer};
use ferrotron_engine::{Rank, StepContext};
use ferrotron_tensor::gpus;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Text of `--help`.
pub const LONG: &str = "\
Train a model from a recipe.

Without an argument it trains a small model on the built-in corpus, which takes about a minute and ends with a sample and a
summary. A run writes one folder: events.jsonl (one line per step), checkpoints, the resolved configuration and what each rank
logged (logs/rank-N.log).

Ctrl-C, SIGTERM and SIGHUP finish the step, save a checkpoint and exit; the same command resumes. A second Ctrl-C exits at
once. SIGUSR1 saves a checkpoint and training goes on. A run goes on if nobody reads its output any more (| head).

A resumed run prints what has changed since its checkpoint. It is refused if the samples before its data position are no
longer those it was trained on (batch size, sequence length, data, its seed, split or blend), unless --allow-changes names
the key. Data is compared by its whole .idx and by the .bin: all of it up to 64 MiB, 1,024 blocks of a larger one.

Several ranks: parallel.tp is the tensor-parallel size, parallel.cp the context-parallel size, parallel.pp the number of
pipeline stages; the remaining ranks are data-parallel replicas (parallel.dp). Ranks are threads of this process, on the CPU or
sharing one GPU, or the processes of a launcher, one rank each: mpirun (Open MPI), srun, torchrun, Kubernetes, or anything that
sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; parallel.dp then follows from their number. On GPUs they use
NCCL, one GPU per process; on the CPU MPI, or without it shared memory on one host. FERROTRON_JOB_SECRET, the same on all
ranks, keeps other processes out of the job; without it a secret comes from torchrun, or on one host from a private file. If a
rank does not join a collective within --timeout seconds, the run fails with an error that names it; the newest checkpoint
stays intact.";

const AFTER: &str = "\
Examples:
  ferrotron train
  ferrotron train tiny --steps 20 --out runs/trial
  ferrotron train gpt2-124m --data corpus/fineweb_text_document
  ferrotron train finetune-hf --set model.hf=models/Llama-3.2-1B --data my_text_document
  ferrotron train sft --set model.hf=models/Qwen3-0.6B --data chats.jsonl.gz
  ferrotron train sft --set model.hf=models/Qwen3-0.6B --data 0.8:chats.jsonl --data '0.2:more/*.jsonl.zst'
  ferrotron train my.toml --set optimizer.lr=3e-4 --set precision.dtype=f32
  ferrotron train my.toml --ranks 4 --set parallel.tp=2
  mpirun -n 4 ferrotron train my.toml --set parallel.tp=2
  torchrun --no-python --nproc-per-node 8 ferrotron train my.toml
  ferrotron train my.toml --steps 20 --profile    profile.html in the run folder: where the time goes, and what to change
  ferrotron train my.toml --dry-run        print the resolved configuration, derived values, memory and communication
  torchrun --no-python --nproc-per-node 8 ferrotron train llama-8b --plan --data corpus/text    the fastest layout for 8 GPUs
  ferrotron train llama-405b --dry-run --gpus 1024xH100    build and check every rank of the job, on this machine

`ferrotron recipes` lists the recipes, `ferrotron explain` every key.";

/// A checkpoint of a run to resume from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ResumeFrom {
    /// The newest.
    Latest,
    /// The one with the lowest validation loss.
    Best,
}

/// Arguments of `train`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Built-in recipe or TOML file
    #[arg(value_name = "RECIPE or FILE.toml", default_value = "tiny")]
    pub recipe: String,
    /// Run folder; an unfinished run in it is resumed [default: runs/RECIPE]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Optimizer steps (train.steps)
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Number of ranks, as threads of this process; sets parallel.dp to N / (tp x cp x pp) [default: tp x cp x pp x dp]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// So many of the launched processes are spares, which take over the ranks of processes that fail (fault.restarts)
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "ranks")]
    pub spares: usize,
    /// Text or .jsonl files, folder, glob, prefix of a .bin/.idx pair, "embedded" (data.path); repeat it to blend
    #[arg(long, value_name = "[WEIGHT:]PATH")]
    pub data: Vec<String>,
    /// Override a recipe key; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Start over; the run in the run folder is deleted when the new one has saved a checkpoint, and is restored otherwise
    #[arg(long)]
    pub fresh: bool,
    /// Checkpoint to resume from: the latest, or the best by validation loss (checkpoint.best); later ones are then deleted
    #[arg(long, value_enum, value_name = "WHICH", default_value = "latest", conflicts_with = "fresh")]
    pub resume: ResumeFrom,
    /// Resume although these keys have changed (data.path: the data itself; data.order: the order of its samples)
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    pub allow_changes: Vec<String>,
    /// Print the resolved configuration and its costs, then exit; text is tokenized only where train.epochs needs that
    #[arg(long)]
    pub dry_run: bool,
    /// Search the fastest layout that fits on the GPUs at hand (or of --gpus), as `plan` does, and use it; --set fixes parts
    #[arg(long, conflicts_with = "ranks")]
    pub plan: bool,
    /// With --dry-run: build and check all ranks of a job on such GPUs (1024xH100), without a GPU and without tensors
    #[arg(long, value_name = "NxGPU", requires = "dry_run", conflicts_with = "ranks")]
    pub gpus: Option<String>,
    /// Trace options.
    #[command(flatten)]
    pub trace: trace::TraceArgs,
}

impl Args {
    /// The recipe with the overrides of the command line.
    pub fn load(&self, global: &Global) -> Result<Recipe> {
        let mut recipe = Recipe::open(&self.recipe)?;
        let steps = self.steps.map(|n| format!("train.steps={}", n.min(i64::MAX as u64)));
        let set: Vec<&str> = self.set.iter().chain(&steps).map(String::as_str).collect();
        recipe.set_all(&set)?;
        if !self.data.is_empty() {
            let (paths, weights) = super::data_args::weighted(&self.data)?;
            recipe.put_key("data.path", paths)?;
            if let Some(weights) = weights {
                recipe.put_key("data.weights", weights)?;
            }
        }
        let ranks = match self.machine()? {
            _ if self.plan => Some(planned::apply(&mut recipe, self, global)?),
            Some(machine) => Some(machine.gpus),
            None => global.world_size(self.ranks)?,
        };
        set_ranks(&mut recipe, ranks)?;
        Ok(recipe)
    }

    /// The machine of `--gpus`.
    pub fn machine(&self) -> Result<Option<Machine>> {
        self.gpus.as_deref().map(super::plan::parse_machine).transpose()
    }

    /// The run folder.
    pub fn out(&self, recipe: &Recipe) -> PathBuf {
        self.out.clone().unwrap_or_else(|| PathBuf::from("runs").join(&recipe.name))
    }
}

/// Sets `parallel.dp` to what makes the layout one of `ranks` ranks, if that is given.
pub fn set_ranks(recipe: &mut Recipe, ranks: Option<usize>) -> Result<()> {
    if let Some(ranks) = ranks {
        let given = recipe.is_set("parallel.dp");
        let parallel = &recipe.config.parallel;
        let layout = RankLayout { dp: given.then_some(parallel.dp), ..parallel.layout() };
        // An impossible layout is refused here, with the nearest possible one.
        let grid = Grid::new(layout, ranks).map_err(|e| UsageError::new(e.to_string()))?;
        recipe.put_key("parallel.dp", i64::try_from(grid.dp()).unwrap_or(i64::MAX))?;
    }
    Ok(())
}

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
    check_data(&resolved, global)?;
    check_memory(&resolved, global)?;
    check_allowed(&args.allow_changes)?;
    let out = args.out(&recipe);
    let signals = Signals::listen()?;
    if global.json || !global.launch.leads() {
        signals.set_say(Box::new(|_| {}));
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

    /// Trains on rank 0, which reports progress and writes the summary. However it ends, the log says so.
    fn on_lead_rank(self, mut run: Run) -> Result<()> {
        let begin = Instant::now();
        let (total, done) = (run.resolved.plan.steps, run.trainer.step());
        let progress = Progress::new(self.global, total, done, self.recipe.is_set("train.log_every"));
        let mut view = View { progress, signals: self.signals.clone(), total, steps: self.steps };
        let ended = self.train(&mut run, &mut view, begin);
        let goes_on =
            |e: &anyhow::Error| matches!(e.downcast_ref(), Some(ferrotron_core::Error::ChangeRanks));
        if let Err(e) = &ended
            && !goes_on(e)
        {
            let seconds = begin.elapsed().as_secs_f64();
            let (ending, reason) = (Ending::Failed, Some(output::describe(e)));
            let end = RunEnd { step: run.trainer.step(), ending, seconds, tokens_per_s: 0.0, reason };
            // The error at hand is the one to report.
            drop(run.emit(Event::RunEnd(end), &mut view));
        }
        view.progress.finish();
        // From here on there is nothing to finish or save.
        let (outcome, text, traced) = ended?;
        if !self.global.json && outcome.finished {
            let summary = super::train_summary::text(&run, &outcome, self.global.started, text.as_deref());
            output::print(&format!(
                "{summary}{}",
                super::next_commands::text(self.args, self.global, &run)?
            ))?;
        }
        traced.map_or(Ok(()), |t| t.print(self.global))
    }

    /// The recipe's name and, where lengths of samples vary, their mean.
    fn subject(&self) -> (&str, Option<f64>) {
        (&self.recipe.name, self.sources.varying.map(|samples| samples.mean_length))
    }

    /// The run from its first to its last event.
    fn train(&self, run: &mut Run, view: &mut View, begin: Instant) -> Result<Ended> {
        run.epoch_tokens = Some(self.sources.epoch_tokens);
        if let Some(samples) = self.sources.varying {
            run.count_flops_of(samples.mean_length)?;
        }
        let is_new = run.verifying.is_none();
        if is_new {
            announce(run, self.recipe, view, self.global, run.trainer.step())?;
        }
        if !self.global.json && is_new {
            self.sources.notes.iter().for_each(output::note);
        }
        view.progress.start();
        self.signals.set_say(view.progress.say());
        // The log has it already.
        match (&run.restarted, &run.resumed) {
            (Some(restart), _) => view.event(&Event::Restart(restart.clone())),
            (None, Some(resume)) if is_new => view.event(&Event::Resume(resume.clone())),
            (None, _) => {}
        }
        let (train, eval) = (&*self.sources.train, self.sources.eval.as_deref());
        let (outcome, traced) = self.args.trace.train(run, self.subject(), train, eval, view)?;
        let text = if outcome.finished { sample(run)? } else { None };
        if let Some(text) = &text {
            let prompt = run.resolved.config.generate.prompt.clone().unwrap_or_default();
            let event = events::Sample { step: run.trainer.step(), prompt, text: text.clone() };
            run.emit(Event::Sample(event), view)?;
        }
        let ending = if outcome.finished { Ending::Finished } else { Ending::Interrupted };
        let seconds = begin.elapsed().as_secs_f64();
        let tokens_per_s = outcome.tokens as f64 / seconds;
        let reason = outcome.stopped_early.then(|| early_stop(run)).flatten();
        let end = RunEnd { step: run.trainer.step(), ending, seconds, tokens_per_s, reason };
        run.emit(Event::RunEnd(end), view)?;
        Ok((outcome, text, traced))
    }
}

/// Why early stopping ended a run.
fn early_stop(run: &Run) -> Option<String> {
    let (best, patience) = (run.trainer.best?, run.resolved.config.eval.patience);
    Some(format!(
        "early stopping: the validation loss has not improved for {patience} evaluations; it was {} after step {}",
        format::loss(best.loss),
        best.step
    ))
}

/// Outcome, sample and trace of a run.
type Ended = (Outcome, Option<String>, Option<trace::Summary>);

/// Shows events as progress, and brings requests of signals to the run.
struct View<'a> {
    progress: Progress,
    signals: Signals,
    steps: &'a StepCount,
    /// Steps of the run.
    total: u64,
}

impl Observer for View<'_> {
    fn event(&mut self, event: &Event) {
        self.progress.event(event);
    }
    fn stop(&self) -> bool {
        self.signals.stop_requested()
    }
    fn save(&self) -> bool {
        self.signals.take_save_request()
    }
    fn warning(&mut self, what: &str) {
        self.progress.warning(what);
    }
    fn before_step(&mut self, _: &Rank, left: u64) -> ferrotron_core::Result<()> {
        let step = self.total + 1 - left.min(self.total);
        self.signals.set_step(step);
        self.steps.begin(step);
        Ok(())
    }
}

/// Prints what is about to run, and logs the start of a new run.
fn announce(run: &mut Run, recipe: &Recipe, view: &mut View, global: &Global, first: u64) -> Result<()> {
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
        peak_tflops: super::bench::peak_by_datasheet(&run.trainer.rank).map(|peak| peak * ranks as f64),
    };
    if !global.json {
        let p = &run.resolved.plan;
        let doing = match first {
            0 => format!("training {}", recipe.name),
            n if run.stops_early() => {
                format!("{} is finished: it was stopped early after step {n}", recipe.name)
            }
            n if n >= p.steps => format!("{} is finished: all {n} steps are done", recipe.name),
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

/// Samples text from the trained model if the recipe asks for it and tokens are bytes. The tensor-parallel group of
/// rank 0 does it together, or all ranks where a forward pass takes all of them.
fn sample(run: &Run) -> ferrotron_core::Result<Option<String>> {
    let (g, rank) = (&run.resolved.config.generate, &run.trainer.rank);
    // Generation needs all layers and all tokens on a rank: with pipeline or context parallelism it is left to
    // `generate`.
    let takes_part = rank.tp.ranks().contains(&0) || run.trainer.forward_is_collective();
    let able = rank.pp.size() == 1 && rank.cp.size() == 1 && takes_part;
    if g.tokens == 0 || run.resolved.model.vocab != 256 || !able {
        return Ok(None);
    }
    let prompt = g.prompt.clone().filter(|p| !p.is_empty()).unwrap_or_else(|| "\n".into());
    let ids: Vec<i32> = prompt.bytes().map(i32::from).collect();
    let sampling = Sampling {
        temperature: g.temperature as f32,
        top_k: g.top_k as usize,
        top_p: g.top_p as f32,
        seed: run.resolved.config.train.seed,
    };
    let t = &run.trainer;
    let pass = StepContext::new(&t.rank, &t.model.params, &t.model.step_state);
    let out = generate(
        &t.model.decoder,
        &pass,
        Prompt { tokens: &ids, max_new: g.tokens as usize, stop: &[] },
        sampling,
        &mut |_| true,
    )?;
    let bytes: Vec<u8> = out.iter().map(|id| *id as u8).collect();
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}
