//! The commands that `train` suggests at the end: they work as printed, in the folder where it ran.

use super::train::Args;
use crate::args::{Device, Global};
use crate::shell::{path, quote};
use anyhow::Result;
use ferrotron_bridge::model_source::tokenizer_at;
use ferrotron_bridge::recipe::tokenizer_path;
use ferrotron_core::checkpoint::{BEST, latest};
use ferrotron_core::config::Config;
use ferrotron_core::ranks::Launcher;
use ferrotron_core::train::{CHECKPOINTS, Run};
use std::path::{Path, PathBuf};

/// Keys that `--steps` replaces.
const LENGTH: [&str; 3] = ["train.steps", "train.tokens", "train.epochs"];
/// Keys that `--data` replaces.
const DATA: [&str; 2] = ["data.path", "data.weights"];

/// The run's data was tokenized, and the run does not say with what.
const UNKNOWN_TOKENIZER: &str = " --tokenizer DIR";

/// The suggestions, each under a line that says what it is for.
pub fn text(args: &Args, global: &Global, run: &Run) -> Result<String> {
    let config = &run.resolved.config;
    let device = match global.device {
        Device::Auto => String::new(),
        Device::Cpu => " --device cpu".into(),
        Device::Cuda(n) => format!(" --device cuda:{n}"),
    };
    let tokenizer = match tokenizer_path(config) {
        Some(known) => format!(" --tokenizer {}{}", path(&known), end_of_document(&known, config)),
        None if run.resolved.model.vocab == 256 => String::new(), // tokens are bytes
        None => UNKNOWN_TOKENIZER.into(),
    };
    let mut all: Vec<(&str, String)> = Vec::new();
    if latest(&run.dir().join(CHECKPOINTS))?.is_some() {
        let stopped = run.stops_early();
        // After early stopping the newest checkpoint is not the one to use.
        let best = run.dir().join(CHECKPOINTS).join(BEST);
        let model = if stopped && best.exists() { best } else { run.dir().to_path_buf() };
        let dir = path(&model);
        // The run names its tokenizer where it can.
        let given = if tokenizer == UNKNOWN_TOKENIZER { &tokenizer } else { "" };
        all.push(("generate more text", format!("ferrotron generate --model {dir}{given}{device}")));
        let convert = |ending: &str, option: &str| {
            let export = beside(run.dir(), ending);
            let overwrite = if export.exists() { " --overwrite" } else { "" };
            format!("ferrotron convert {dir} {}{option}{overwrite}", path(&export))
        };
        if config.has_lora() {
            all.push(("export the adapters for PEFT", convert("adapter", "")));
            all.push(("merge them into the base model, a Hugging Face folder", convert("hf", " --merge")));
        } else {
            all.push(("export to a Hugging Face folder", convert("hf", "")));
        }
        if !stopped {
            let more = train(args, global, &LENGTH)?;
            let steps = run.resolved.plan.steps.max(run.trainer.step()).saturating_mul(2);
            let out = args.out.as_deref().map(|o| format!(" --out {}", path(o))).unwrap_or_default();
            let data = given_data(args);
            all.push((
                "train longer (a new --out keeps this run)",
                format!("{more}{data}{out} --steps {steps}{device}"),
            ));
        }
    }
    all.push(("tokenize your own text", format!("ferrotron data build my.txt --output my{tokenizer}")));
    let own = train(args, global, &DATA)?;
    let steps = args.steps.map(|n| format!(" --steps {n}")).unwrap_or_default();
    all.push(("train on it", format!("{own} --data my --out runs/mine{steps}{device}")));
    if config.model.hf.is_none() {
        let finetune = "ferrotron train finetune-hf --set model.hf=DIR --data my";
        all.push(("fine-tune the Hugging Face model in DIR", finetune.into()));
    }
    all.push(("list other models and sizes", "ferrotron recipes".into()));
    let lines = all.iter().map(|(what, command)| format!("  {what}:\n    {command}\n"));
    Ok(format!("\nnext:\n{}", lines.collect::<String>()))
}

/// `ferrotron train` with the recipe, ranks and values that the user gave, except the keys that other options replace.
fn train(args: &Args, global: &Global, replaced: &[&str]) -> Result<String> {
    let launcher = match global.launch.job()? {
        Some(job) => match job.launcher {
            Launcher::OpenMpi => format!("mpirun -n {} ", job.size),
            Launcher::Slurm | Launcher::SlurmMpi => format!("srun -n {} ", job.size),
            Launcher::Torchrun => format!("torchrun --no-python --nproc-per-node {} ", job.local_size),
            // Every process is started by itself, with its own variables.
            Launcher::Variables | Launcher::Kubernetes | Launcher::Mpich => String::new(),
        },
        None => String::new(),
    };
    let mut out = format!("{launcher}ferrotron train {}", quote(&args.recipe));
    if let Some(ranks) = args.ranks {
        out += &format!(" --ranks {ranks}");
    }
    let key = |assignment: &str| assignment.split('=').next().unwrap_or_default().trim().to_string();
    for set in args.set.iter().filter(|s| !replaced.contains(&key(s).as_str())) {
        out += &format!(" --set {}", quote(set));
    }
    Ok(out)
}

/// What `data build` must be told about the end of a document, where the tokenizer does not say it.
fn end_of_document(tokenizer: &Path, config: &Config) -> String {
    let of_tokenizer = tokenizer_at(tokenizer).ok().and_then(|t| t.eos().first().copied());
    match config.data.eod {
        eod if eod == of_tokenizer && eod.is_some() => String::new(),
        Some(eod) => format!(" --eod {eod}"),
        None => " --no-eod".into(),
    }
}

/// `--data` as the user gave it.
fn given_data(args: &Args) -> String {
    args.data.iter().map(|d| format!(" --data {}", quote(d))).collect()
}

/// The folder beside a run for its export, `runs/tiny-hf`.
fn beside(run: &Path, ending: &str) -> PathBuf {
    let name = run.file_name().map(|n| n.to_string_lossy().into_owned());
    run.with_file_name(format!("{}-{ending}", name.unwrap_or_else(|| "run".into())))
}
