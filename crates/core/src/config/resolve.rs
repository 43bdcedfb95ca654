//! Derives the values that a recipe leaves unset, each with its reason.

use super::model::section;
use super::ramp::Ramp;
use super::{Config, Decay, Packing, Recipe, WeightDecayStyle, write};
use super::{moe, mtp};
use crate::error::{Error, Result};
use crate::model::config::ModelConfig;
use serde::Serialize;

/// Most tokens of a derived micro-batch: enough for efficient GEMMs, few enough for memory.
const MICRO_BATCH_TOKENS: usize = 4096;
/// Micro-batches for each pipeline stage where the batch has as many. The bubble of 1F1B, (pp − 1)/(m + pp − 1) of the
/// time, is below 20 % then.
const MICRO_BATCHES_PER_STAGE: usize = 4;
/// The longest derived sequence.
const LONGEST_DERIVED: usize = 4096;

/// The longest derived warm-up, in steps.
const LONGEST_WARMUP: u64 = 2000;

/// A derived value and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Derived {
    /// The key.
    pub key: &'static str,
    /// Its value in TOML.
    pub value: String,
    /// The reason.
    pub reason: String,
}

/// Derived values while they are being collected.
#[derive(Default)]
pub(super) struct Derivations(Vec<Derived>);

impl Derivations {
    /// Records and returns a value.
    pub(super) fn add<T: Serialize>(&mut self, key: &'static str, value: T, reason: impl Into<String>) -> T {
        let shown = toml::Value::try_from(&value).map(|v| write::value(&v)).unwrap_or_default();
        self.0.push(Derived { key, value: shown, reason: reason.into() });
        value
    }
}

/// A complete configuration and the architecture it describes.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Every key that applies has a value; [`Config::to_toml`] of it is stored in the run folder.
    pub config: Config,
    /// The architecture.
    pub model: ModelConfig,
    /// Lengths of the run, as plain numbers.
    pub plan: RunPlan,
    /// Derived values in order of derivation.
    pub derived: Vec<Derived>,
    /// The .bin/.idx pair of each `data.path`: the path itself, or what its text has been tokenized into.
    pub pairs: Vec<String>,
}

/// The lengths of a run. Schedules count samples (sequences), so their lengths are given in samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunPlan {
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences over the whole run.
    pub samples: u64,
    /// Tokens over the whole run.
    pub tokens: u64,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Sequences per micro-batch; divides every batch of the run.
    pub micro_batch: usize,
    /// Lowest learning rate after warm-up.
    pub min_lr: f64,
    /// Weight decay at the end.
    pub weight_decay_end: f64,
    /// Samples of warm-up.
    pub warmup_samples: u64,
    /// Samples until the lowest learning rate.
    pub decay_samples: u64,
    /// Samples of the last part of warm-up, stable, decay; 0 for other schedules.
    pub wsd_samples: u64,
    /// Samples until the last weight decay.
    pub weight_decay_samples: u64,
}

impl Recipe {
    /// Derives unset values and validates all of them, before anything is allocated. `hf` is the architecture of the
    /// folder in model.hf, where that is set.
    pub fn resolve(&self, hf: Option<&ModelConfig>) -> Result<Resolved> {
        self.check_values()?;
        let mut derived = Derivations::default();
        let model = self.architecture(hf, &mut derived)?;
        self.check_model(&model)?;
        let mut c = self.config.clone();
        c.model = section(&self.config.model, &model);
        c.moe = moe::section(&self.config.moe, &model);
        c.mtp = mtp::section(&self.config.mtp, &model);
        self.derive_data(&mut c, &model, &mut derived)?;
        self.derive_precision(&mut c, &mut derived);
        self.derive_optimizer(&mut c, &mut derived);
        self.derive_lora(&mut c, &mut derived);
        let plan = self.derive_lengths(&mut c, &mut derived)?;
        self.derive_loss_chunk(&mut c, &model, &mut derived);
        let pairs = c.data.path.0.clone();
        let resolved = Resolved { config: c, model, plan, derived: derived.0, pairs };
        self.check_together(&resolved)?;
        Ok(resolved)
    }

    /// Steps after which `samples` are consumed.
    pub fn steps_for_samples(&self, samples: u64) -> u64 {
        let train = &self.config.train;
        Ramp::new(train.global_batch as u64, train.ramp).steps_for(samples)
    }

    fn derive_data(&self, c: &mut Config, model: &ModelConfig, derived: &mut Derivations) -> Result<()> {
        let data = &mut c.data;
        if data.path.0.is_empty() {
            if model.vocab != 256 || data.tokenizer.is_some() {
                let what = "no data: set data.path (or --data) to .jsonl or text files, to the prefix of a .bin/.idx \
                            pair made by `ferrotron data build`, or to \"embedded\" for a trial on the corpus inside the program";
                return Err(Error::Config {
                    file: None,
                    line: None,
                    key: None,
                    what: what.into(),
                    hint: None,
                });
            }
            data.path.0 = derived.add(
                "data.path",
                vec!["embedded".into()],
                "no data is given and the model reads bytes",
            );
        }
        if data.path.0.len() > 1 && data.weights.is_empty() {
            data.weights = derived.add("data.weights", vec![1.0; data.path.0.len()], "equal weights");
        }
        let bytes = data.tokenizer.is_none() && model.vocab <= 256;
        if data.eod.is_none() && (data.is_embedded() || bytes) {
            data.eod = Some(derived.add("data.eod", 0, "a zero byte ends a document when bytes are tokens"));
        }
        if data.seq_len.is_none() {
            let (value, reason) = if model.max_positions <= LONGEST_DERIVED {
                (model.max_positions, "the longest sequence of the model".to_string())
            } else {
                (
                    LONGEST_DERIVED,
                    format!("the model takes {}, more than fits by default", model.max_positions),
                )
            };
            data.seq_len = Some(derived.add("data.seq_len", value, reason));
        }
        Ok(())
    }

    /// Raises parallel.dp to the number of data-parallel ranks that expert parallelism needs.
    fn derive_ranks(&self, c: &mut Config, derived: &mut Derivations) {
        let p = &mut c.parallel;
        let dense = p.tp.saturating_mul(p.cp).saturating_mul(p.pp).max(1);
        let expert = p.etp.unwrap_or(p.tp).saturating_mul(p.ep).saturating_mul(p.pp).max(1);
        let world = dense.saturating_mul(p.dp.max(1)) as u64;
        let most = (world / gcd(world, expert as u64)).saturating_mul(expert as u64);
        let dp = (most / dense as u64) as usize;
        if c.moe.experts.is_some() && dp != p.dp && most.is_multiple_of(dense as u64) {
            p.dp =
                derived.add("parallel.dp", dp, "etp x ep ranks hold the experts, and each has its own data");
        }
    }

    fn derive_lengths(&self, c: &mut Config, derived: &mut Derivations) -> Result<RunPlan> {
        self.derive_ranks(c, derived);
        let seq_len = c.data.seq_len.unwrap_or(LONGEST_DERIVED).max(1);
        let ramp = Ramp::new(c.train.global_batch as u64, c.train.ramp);

        let micro_batch = c.train.micro_batch.unwrap_or_else(|| derive_micro_batch(c, seq_len, derived));
        c.train.micro_batch = Some(micro_batch);

        let steps = match (c.train.steps, c.train.tokens) {
            (Some(steps), _) => steps,
            (None, Some(_)) if c.data.packing == Packing::PaddingFree => {
                let what = "how many samples these are depends on the data, whose samples differ in length; set train.steps or \
                            train.epochs";
                return self.refuse("train.tokens", what);
            }
            (None, Some(tokens)) => {
                let steps = ramp.steps_for(tokens.0.div_ceil(seq_len as u64));
                derived.add(
                    "train.steps",
                    steps,
                    format!("{} tokens in batches of sequences of {seq_len}", tokens.0),
                )
            }
            (None, None) => {
                let what = "the length of the run is not set: set train.steps (or --steps), train.tokens or train.epochs";
                return Err(Error::Config {
                    file: None,
                    line: None,
                    key: None,
                    what: what.into(),
                    hint: None,
                });
            }
        };
        (c.train.steps, c.train.tokens) = (Some(steps), None);

        let (o, s) = (&mut c.optimizer, &mut c.schedule);
        let tenth_of_run = (steps / 10).min(LONGEST_WARMUP);
        let min_lr = *o
            .min_lr
            .get_or_insert_with(|| derived.add("optimizer.min_lr", tenth(o.lr), "a tenth of optimizer.lr"));
        let wd_end = *o.weight_decay_end.get_or_insert(o.weight_decay);
        let warmup = match s.warmup {
            // The recipe's warm-up is for the recipe's length; the user may have asked for a shorter run.
            Some(n) if n > tenth_of_run && self.is_built_in("schedule.warmup") => {
                let reason = format!("a tenth of the run, shorter than the recipe's {n} steps");
                derived.add("schedule.warmup", tenth_of_run, reason)
            }
            Some(n) => n,
            None => {
                let reason = format!("a tenth of the run, at most {LONGEST_WARMUP} steps");
                derived.add("schedule.warmup", tenth_of_run, reason)
            }
        };
        s.warmup = Some(warmup);
        let decay = match s.decay {
            Decay::Constant => s.decay_steps.unwrap_or(steps),
            _ => *s
                .decay_steps
                .get_or_insert_with(|| derived.add("schedule.decay_steps", steps, "the whole run")),
        };
        let wsd = match s.decay {
            Decay::Wsd => *s.wsd_steps.get_or_insert_with(|| {
                derived.add("schedule.wsd_steps", (decay / 10).max(1), "a tenth of schedule.decay_steps")
            }),
            _ => 0,
        };
        let wd_steps = match s.weight_decay_style {
            WeightDecayStyle::Constant => s.weight_decay_steps.unwrap_or(steps),
            _ => *s
                .weight_decay_steps
                .get_or_insert_with(|| derived.add("schedule.weight_decay_steps", steps, "the whole run")),
        };
        let samples = ramp.samples_after(steps);
        let decay_samples = ramp.samples_after(decay);
        Ok(RunPlan {
            steps,
            samples,
            tokens: samples.saturating_mul(seq_len as u64),
            seq_len,
            micro_batch,
            min_lr,
            weight_decay_end: wd_end,
            warmup_samples: ramp.samples_after(warmup),
            decay_samples,
            wsd_samples: decay_samples - ramp.samples_after(decay.saturating_sub(wsd)),
            weight_decay_samples: ramp.samples_after(wd_steps),
        })
    }
}

/// The largest micro-batch that divides every batch, is near [`MICRO_BATCH_TOKENS`] and leaves enough micro-batches to
/// fill a pipeline.
fn derive_micro_batch(c: &Config, seq_len: usize, derived: &mut Derivations) -> usize {
    let (batch, dp, pp, vp) = (c.train.global_batch, c.parallel.dp.max(1), c.parallel.pp, c.parallel.vp);
    let ramp = c.train.ramp.map_or(0, |[start, increment, _]| gcd(start, increment));
    // Of one data-parallel rank, where the batch divides over them.
    let all = gcd(batch as u64, ramp) as usize;
    let whole = if all.is_multiple_of(dp) { all / dp } else { 1 };
    let most = (MICRO_BATCH_TOKENS / seq_len).clamp(1, whole);
    let filling = match pp {
        0 | 1 => most,
        _ => (batch / dp / (MICRO_BATCHES_PER_STAGE * pp)).max(1),
    };
    let value = (1..=most.min(filling)).rev().find(|m| whole.is_multiple_of(*m)).unwrap_or(1);
    let reason = if filling < most {
        let count = batch / dp / value;
        let bubble = 100.0 * (pp - 1) as f64 / (vp * count + pp - 1) as f64;
        format!("{count} micro-batches fill {pp} pipeline stages: a bubble of about {bubble:.0} %")
    } else if value == batch {
        format!("the whole batch is {} tokens, one pass", value * seq_len)
    } else if seq_len >= MICRO_BATCH_TOKENS {
        format!("one sequence is {seq_len} tokens already")
    } else {
        format!("divides every batch and keeps a pass near {MICRO_BATCH_TOKENS} tokens")
    };
    derived.add("train.micro_batch", value, reason)
}

impl super::DataSection {
    /// Whether the data is the embedded corpus.
    pub fn is_embedded(&self) -> bool {
        self.path.0.iter().any(|p| p == "embedded")
    }
}

impl super::FaultSection {
    /// Whether runs of the same steps may be compared: what ranks send is hashed then.
    pub fn compares_runs(&self) -> bool {
        self.rerun || self.hash_every > 0 || self.verify_every > 0
    }
}

impl Config {
    /// Keys whose values differ, each with this value and the other in TOML; an unset key shows as "unset".
    pub fn differences(&self, other: &Config) -> Vec<(&'static str, String, String)> {
        let show = |c: &Config, k: &super::KeyInfo| match c.get(k.section, k.name) {
            Some(v) => write::value(&v),
            None => "unset".into(),
        };
        super::KEYS
            .iter()
            .map(|k| (k.key, show(self, k), show(other, k)))
            .filter(|(_, ours, theirs)| ours != theirs)
            .collect()
    }
}

/// A tenth, rounded so that it prints as 0.0003 and not 0.00030000000000000003.
fn tenth(x: f64) -> f64 {
    format!("{:.12e}", x / 10.0).parse().unwrap_or(x / 10.0)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
