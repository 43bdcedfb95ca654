//! Arguments of `train`, and the recipe that they give.

use super::planned;
use crate::args::Global;
use crate::commands::data_args;
use crate::commands::plan::parse_machine;
use crate::output::UsageError;
use crate::trace;
use anyhow::Result;
use clap::ValueEnum;
use ferrotron_core::config::Recipe;
use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::plan::Machine;
use std::path::PathBuf;

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
    /// Launched processes to hold as spares; a spare takes over the rank of a process that fails (fault.restarts)
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
            let (paths, weights) = data_args::weighted(&self.data)?;
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
        self.gpus.as_deref().map(parse_machine).transpose()
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
