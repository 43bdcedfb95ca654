//! Validation of a configuration: every refusal is one sentence that says what to change.

use super::model::MAX_LAYERS;
use super::{CudaGraphMode, Decay, MasterDtype, Packing, Precision, Recipe, Resolved};
use crate::error::{Error, Result};
use crate::grid::ModelSizes;
use crate::model::PipelineLayout;
use crate::model::config::{ModelConfig, Positions};

/// Far above any real run, and small enough that no product of lengths overflows later.
const MAX_STEPS: u64 = 1 << 40;
const MAX_SIZE: usize = 1 << 24;
/// Micro-batches of an evaluation on a rank: far above any real one.
const MAX_EVALUATION: u64 = 1 << 26;

impl Recipe {
    /// Checks of single values, before anything is derived from them.
    pub fn check_values(&self) -> Result<()> {
        let c = &self.config;
        self.check_parallel()?;
        self.check_offload()?;
        self.check_fault()?;
        self.check_bad_steps()?;
        for (key, value) in [
            ("data.seq_len", c.data.seq_len),
            ("train.global_batch", Some(c.train.global_batch)),
            ("train.micro_batch", c.train.micro_batch),
            ("train.mlp_chunk", c.train.mlp_chunk),
        ] {
            if let Some(value) = value {
                self.within(key, value as f64, 1.0, MAX_SIZE as f64)?;
            }
        }
        for (key, value, least) in [
            ("train.steps", c.train.steps, 1),
            ("train.tokens", c.train.tokens.map(|t| t.0), 1),
            ("train.log_every", Some(c.train.log_every), 1),
            ("eval.every", Some(c.eval.every), 0),
            ("eval.batches", Some(c.eval.batches), (c.eval.every > 0) as u64),
            ("checkpoint.every", Some(c.checkpoint.every), 0),
            ("schedule.warmup", c.schedule.warmup, 0),
            ("schedule.decay_steps", c.schedule.decay_steps, 1),
            ("schedule.wsd_steps", c.schedule.wsd_steps, 1),
            ("schedule.weight_decay_steps", c.schedule.weight_decay_steps, 1),
            ("generate.tokens", Some(c.generate.tokens), 0),
        ] {
            let most = if key == "train.tokens" { 1u64 << 53 } else { MAX_STEPS };
            if let Some(value) = value {
                self.within(key, value as f64, least as f64, most as f64)?;
            }
        }
        if let Some(epochs) = c.train.epochs {
            self.within("train.epochs", epochs, 1e-6, 1e6)?;
        }
        self.check_optimizer()?;
        self.check_data_values()?;
        self.check_ramp()?;
        self.below_one("dropout.hidden", c.dropout.hidden)?;
        self.within("generate.temperature", c.generate.temperature, 0.0, 1e3)?;
        if !(c.generate.top_p > 0.0 && c.generate.top_p <= 1.0) {
            return self.refuse("generate.top_p", "must be above 0 and at most 1; 1 draws from all tokens");
        }
        self.check_unused()
    }

    fn check_optimizer(&self) -> Result<()> {
        let o = &self.config.optimizer;
        if o.lr <= 0.0 {
            return self.refuse("optimizer.lr", "must be above 0");
        }
        self.within("optimizer.lr", o.lr, 0.0, 1e3)?;
        self.within("schedule.init_lr", self.config.schedule.init_lr, 0.0, 1e3)?;
        if let Some(min) = o.min_lr
            && !(0.0..=o.lr).contains(&min)
        {
            return self.refuse(
                "optimizer.min_lr",
                format!("must lie between 0 and optimizer.lr, which is {}", o.lr),
            );
        }
        for beta in o.betas {
            self.below_one("optimizer.betas", beta)?;
        }
        self.below_one("optimizer.momentum", o.momentum)?;
        if o.eps <= 0.0 {
            return self.refuse("optimizer.eps", "must be above 0, such as 1e-8");
        }
        self.within("optimizer.weight_decay", o.weight_decay, 0.0, 1e3)?;
        self.within("optimizer.weight_decay_end", o.weight_decay_end.unwrap_or(0.0), 0.0, 1e3)?;
        if o.clip < 0.0 {
            return self.refuse("optimizer.clip", "must not be negative; 0 means no clipping");
        }
        if o.nesterov == Some(true) && o.momentum == 0.0 {
            return self.refuse("optimizer.nesterov", "needs a momentum; set optimizer.momentum above 0");
        }
        self.check_groups()?;
        self.check_lora()
    }

    fn check_ramp(&self) -> Result<()> {
        let full = self.config.train.global_batch as u64;
        let Some([start, increment, samples]) = self.config.train.ramp else { return Ok(()) };
        let bad = if start == 0 || increment == 0 || samples == 0 {
            "its three numbers must be at least 1".into()
        } else if start > full {
            format!("starts at {start}, above train.global_batch = {full}; start lower")
        } else if !(full - start).is_multiple_of(increment) {
            format!(
                "steps of {increment} do not lead from {start} to train.global_batch = {full}; change the increment"
            )
        } else if (full - start) / increment > 100_000 {
            "has more than 100000 levels; use a larger increment".into()
        } else if samples > MAX_STEPS {
            format!("{samples} samples are more than {MAX_STEPS}; use fewer")
        } else {
            return Ok(());
        };
        self.refuse("train.ramp", bad)
    }

    /// Checks of an architecture.
    pub(super) fn check_model(&self, m: &ModelConfig) -> Result<()> {
        let sizes = [
            ("model.layers", m.layers, MAX_LAYERS),
            ("model.hidden", m.hidden, MAX_SIZE),
            ("model.ffn", m.ffn, MAX_SIZE),
            ("model.heads", m.heads, 1 << 16),
            ("model.kv_heads", m.kv_heads, 1 << 16),
            ("model.head_dim", m.head_dim, 1 << 16),
            ("model.vocab", m.vocab, MAX_SIZE),
            ("model.max_positions", m.max_positions, MAX_SIZE),
        ];
        for (key, value, most) in sizes {
            self.within(key, value as f64, 1.0, most as f64)?;
        }
        if !m.heads.is_multiple_of(m.kv_heads) {
            let what =
                format!("{} key/value heads do not divide {} query heads; change one", m.kv_heads, m.heads);
            return self.refuse("model.kv_heads", what);
        }
        if let Positions::Rope(rope) = &m.positions {
            if !rope.rotary_dim.is_multiple_of(2) || rope.rotary_dim > m.head_dim {
                let what =
                    format!("rotary positions need an even number of channels, not {}", rope.rotary_dim);
                return self.refuse("model.head_dim", what);
            }
            if rope.theta <= 0.0 {
                return self.refuse("model.rope_theta", "must be above 0, such as 10000");
            }
        }
        self.check_offloaded_layers(m)?;
        if m.window == Some(0) {
            return self.refuse(
                "model.window",
                "must be at least 1: a token sees itself; leave it out for no window",
            );
        }
        // A tiny value may round to 0 in f32, and a large one to infinity.
        if m.norm.eps <= 0.0 || !m.norm.eps.is_finite() {
            return self.refuse("model.norm_eps", "must be above 0, such as 1e-5");
        }
        if m.init_std < 0.0 || !m.init_std.is_finite() {
            return self.refuse("model.init_std", "must not be negative, such as 0.02");
        }
        // Errors that no single key causes: constants of a Hugging Face configuration, or sizes that are too large together.
        m.validate().map_err(|e| Error::Config {
            file: None,
            line: None,
            key: None,
            what: e.to_string(),
            hint: None,
        })
    }

    /// Checks of values against each other, after derivation.
    pub(super) fn check_together(&self, r: &Resolved) -> Result<()> {
        let (c, m) = (&r.config, &r.model);
        self.check_layout(r)?;
        self.check_batches(r)?;
        self.check_vocabulary(r)?;
        self.check_rates(r)?;
        self.check_schedule(r)?;
        self.check_lora_targets(r)?;
        self.check_group_members(r)?;
        self.check_precision(r)?;
        self.check_loss(r)?;
        if let (CudaGraphMode::On, Some(why)) = (c.train.cuda_graph, c.cuda_graph_blocker()) {
            return self.refuse("train.cuda_graph", format!("steps cannot be replayed: {why}; leave it out"));
        }
        if c.generate.tokens >= m.max_positions as u64 {
            let what = format!(
                "{} tokens are more than the model's {} positions; ask for fewer",
                c.generate.tokens, m.max_positions
            );
            return self.refuse("generate.tokens", what);
        }
        Ok(())
    }

    /// Length of the run, model and ranks.
    fn check_layout(&self, r: &Resolved) -> Result<()> {
        let (c, plan, m) = (&r.config, &r.plan, &r.model);
        if plan.steps > MAX_STEPS {
            let what =
                format!("{} steps are more than {MAX_STEPS}; use a larger batch or fewer tokens", plan.steps);
            return self.refuse("train.tokens", what);
        }
        if plan.seq_len > m.max_positions {
            let what = format!(
                "{} tokens are longer than the model's {}; shorten it or raise model.max_positions",
                plan.seq_len, m.max_positions
            );
            return self.refuse("data.seq_len", what);
        }
        if let Err(e) = c.parallel.layout().check_model(&ModelSizes::of(m)) {
            let what = e.to_string();
            let key = match what.split('=').next() {
                Some("ep") => "parallel.ep",
                Some("etp") => "parallel.etp",
                _ => "parallel.tp",
            };
            return self.refuse(key, what);
        }
        self.check_moe(r)?;
        self.check_mtp(r)?;
        if c.optimizer.master_dtype == MasterDtype::Remainder && c.precision.dtype != Precision::Bf16 {
            let what = "a remainder completes bf16 weights to f32; f32 weights are their own masters, and f16 has another exponent, so leave it out";
            return self.refuse("optimizer.master_dtype", what);
        }
        let stages = PipelineLayout { vp: c.parallel.vp, layout: c.parallel.stages.clone() };
        if let Err(e) = stages.place(m, c.parallel.pp) {
            return self.refuse("parallel.stages", e.to_string());
        }
        self.check_expert_ranks(r)
    }

    /// Sizes that micro-batches must divide.
    fn check_batches(&self, r: &Resolved) -> Result<()> {
        let (c, plan) = (&r.config, &r.plan);
        let micro = plan.micro_batch * c.parallel.dp;
        if !c.train.global_batch.is_multiple_of(micro) {
            let ranks = if c.parallel.dp > 1 {
                format!(" times parallel.dp = {}", c.parallel.dp)
            } else {
                String::new()
            };
            let (one, all) = (plan.micro_batch, c.train.global_batch);
            let what = format!("{one}{ranks} does not divide train.global_batch = {all}; change one");
            return self.refuse("train.micro_batch", what);
        }
        if let Some([start, increment, _]) = c.train.ramp
            && !(start.is_multiple_of(micro as u64) && increment.is_multiple_of(micro as u64))
        {
            let what = format!(
                "start {start} and increment {increment} must be multiples of {micro}: train.micro_batch = {} times parallel.dp = {}",
                plan.micro_batch, c.parallel.dp
            );
            return self.refuse("train.ramp", what);
        }
        let per_batch = (c.train.global_batch / micro).max(1) as u64;
        let most = MAX_EVALUATION / per_batch;
        if c.eval.every > 0 && c.eval.batches > most {
            let what = format!(
                "{} batches, each of {per_batch} micro-batches on a rank, are too many for an evaluation; it can have at most {most}",
                c.eval.batches
            );
            return self.refuse("eval.batches", what);
        }
        Ok(())
    }

    /// The data against the vocabulary and packing.
    fn check_vocabulary(&self, r: &Resolved) -> Result<()> {
        let (c, m) = (&r.config, &r.model);
        if c.data.is_embedded() && m.vocab < 256 {
            let what = format!(
                "{} tokens cannot hold the 256 bytes of the corpus inside the program; use 256",
                m.vocab
            );
            return self.refuse("model.vocab", what);
        }
        if c.data.packing != Packing::None && c.data.is_embedded() {
            let what = "the embedded corpus is one text without documents; set data.path, or leave it out";
            return self.refuse("data.packing", what);
        }
        if let Some(eod) = c.data.eod
            && eod as usize >= m.vocab
        {
            let what = format!("{eod} is outside the vocabulary of {}; use a smaller id", m.vocab);
            return self.refuse("data.eod", what);
        }
        Ok(())
    }

    fn check_schedule(&self, r: &Resolved) -> Result<()> {
        let s = &r.config.schedule;
        let (Some(warmup), Some(decay)) = (s.warmup, s.decay_steps) else { return Ok(()) };
        if s.decay == Decay::Constant {
            return Ok(());
        }
        if warmup >= decay {
            let what = format!(
                "{warmup} steps of warm-up leave none of the {decay} until schedule.decay_steps; shorten it"
            );
            return self.refuse("schedule.warmup", what);
        }
        if s.decay == Decay::Wsd
            && let Some(wsd) = s.wsd_steps
            && wsd > decay - warmup
        {
            let what = format!(
                "{wsd} steps do not fit between warm-up ({warmup}) and schedule.decay_steps ({decay}); shorten it"
            );
            return self.refuse("schedule.wsd_steps", what);
        }
        Ok(())
    }

    pub(super) fn within(&self, key: &str, value: f64, least: f64, most: f64) -> Result<()> {
        if value < least {
            return self.refuse(key, format!("{value} is too small; it must be at least {least}"));
        }
        if value > most {
            return self.refuse(key, format!("{value} is too large; it must be at most {most}"));
        }
        Ok(())
    }

    fn below_one(&self, key: &str, value: f64) -> Result<()> {
        if (0.0..1.0).contains(&value) {
            return Ok(());
        }
        self.refuse(key, format!("{value} must be at least 0 and below 1"))
    }
}
