//! Validation of a configuration: every refusal is one sentence that says what to change.

use super::model::MAX_LAYERS;
use super::{
    Config, CudaGraphMode, Decay, DispatcherType, FsdpOuter, MasterDtype, OffloadedActivations, Packing,
    Precision, QuantRecipe, Recipe, Resolved,
};
use crate::error::{Error, Result};
use crate::fault::inject::Injection;
use crate::grid::ModelSizes;
use crate::model::PipelineLayout;
use crate::model::config::{ModelConfig, Positions};

/// Far above any real run, and small enough that no product of lengths overflows later.
const MAX_STEPS: u64 = 1 << 40;
const MAX_SIZE: usize = 1 << 24;
/// Of one kind of parallelism; the product of three of them fits in 64 bits.
const MAX_RANKS: usize = 1 << 20;

impl Config {
    /// Why steps of this recipe cannot be captured as a CUDA graph, on any device; none if they can.
    pub fn cuda_graph_blocker(&self) -> Option<&'static str> {
        let p = &self.parallel;
        if self.fault.compares_runs() {
            Some(
                "with fault.rerun, fault.hash_every or fault.verify_every, what is sent is hashed call by call",
            )
        } else if !self.fault.inject.0.is_empty() {
            Some("with fault.inject, a step may be disturbed at every launch")
        } else if p.pp > 1 {
            Some("pipeline stages exchange activations on streams of their own")
        } else if self.data.packing == Packing::PaddingFree {
            Some("with data.packing = \"padding_free\", steps differ in their number of tokens")
        } else if p.cp > 1 && (self.data.reset_at_documents || self.data.packing != Packing::None) {
            Some("with parallel.cp, what ranks send each other depends on where documents begin")
        } else if self.precision.recipe == QuantRecipe::Nvfp4 {
            Some("with precision.recipe = \"nvfp4\", rounding depends on the number of the step")
        } else if self.offload.optimizer.fraction() > 0.0 {
            Some("with offload.optimizer, copies of the last step run beside the next")
        } else if self.offload.host_shards().any() {
            Some("with offload.weights or offload.gradients, copies of the last step run beside the next")
        } else if self.moe.experts.is_some() {
            self.moe_cuda_graph_blocker()
        } else {
            None
        }
    }

    fn moe_cuda_graph_blocker(&self) -> Option<&'static str> {
        let (m, p) = (&self.moe, &self.parallel);
        let fixed_sizes =
            m.dispatcher == DispatcherType::AllGather || m.pad_to_capacity && m.capacity_per_rank;
        if m.record.is_some() || m.replay.is_some() {
            Some("recorded routing is copied from and to the host in every step")
        } else if m.capacity.is_some() && !m.capacity_per_rank && self.data.packing != Packing::None {
            Some("with data.packing, moe.capacity depends on the padding; moe.capacity_per_rank does not")
        } else if p.ep * p.etp.unwrap_or(1) > 1 && !fixed_sizes {
            Some(
                "the host reads how many tokens every expert gets; moe.pad_to_capacity with moe.capacity_per_rank, or \
                 moe.dispatcher = \"all_gather\", fixes the sizes",
            )
        } else {
            None
        }
    }
}

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
        Ok(())
    }

    fn check_offload(&self) -> Result<()> {
        let (offload, zero) = (&self.config.offload, self.config.parallel.zero);
        for (key, on) in [("offload.weights", offload.weights), ("offload.gradients", offload.gradients)] {
            if on && zero != 3 {
                return self.refuse(
                    key,
                    format!("moves the shards of ZeRO-3, and parallel.zero is {zero}; set parallel.zero = 3"),
                );
            }
        }
        self.within("offload.optimizer", offload.optimizer.fraction(), 0.0, 1.0)
    }

    fn check_fault(&self) -> Result<()> {
        let f = &self.config.fault;
        for (key, value, least, most) in [
            ("fault.soft_timeout", f.soft_timeout, 0.1, 1e6),
            ("fault.hard_timeout", f.hard_timeout, 0.1, 1e6),
            ("fault.heartbeat_timeout", f.heartbeat_timeout, 2.0, 1e6),
            ("fault.min_timeout", f.min_timeout, 0.0, 1e6),
            ("fault.backoff", f.backoff, 0.0, 3600.0),
            ("fault.spike", f.spike, 0.0, 1e12),
            ("fault.straggler_threshold", f.straggler_threshold, 0.0, 1.0),
            ("fault.exit_margin", f.exit_margin, 0.0, 1e7),
            ("fault.rank_failures", f.rank_failures as f64, 1.0, 1e9),
        ] {
            self.within(key, value, least, most)?;
        }
        for entry in &f.inject.0 {
            if let Err(e) = Injection::parse(entry) {
                return self.refuse("fault.inject", format!("{entry:?}: {e}"));
            }
        }
        if f.verify_on_partner && (f.verify_every == 0 || f.verify_every != f.snapshot_every) {
            let why = "other processes begin at a snapshot: set fault.verify_every and fault.snapshot_every to the same";
            return self.refuse("fault.verify_on_partner", why);
        }
        let saves = self.config.checkpoint.every;
        if f.verify_on_partner && !saves.is_multiple_of(f.verify_every) {
            let why = format!(
                "only verified states are saved: set checkpoint.every to a multiple of {}",
                f.verify_every
            );
            return self.refuse("fault.verify_on_partner", why);
        }
        let rerun = [("fault.rerun", f.rerun), ("fault.verify_every", f.verify_every > 0)];
        match rerun.iter().find(|(_, on)| *on && f.snapshot_every == 0) {
            Some((key, _)) => {
                self.refuse(key, "runs steps again from a snapshot in memory; set fault.snapshot_every too")
            }
            None => Ok(()),
        }
    }

    fn check_parallel(&self) -> Result<()> {
        let p = &self.config.parallel;
        let sizes = [
            ("tp", p.tp),
            ("cp", p.cp),
            ("pp", p.pp),
            ("vp", p.vp),
            ("dp", p.dp),
            ("ep", p.ep),
            ("etp", p.etp.unwrap_or(1)),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return self.refuse(&format!("parallel.{key}"), "must be at least 1; 1 means not split");
        }
        for (key, n) in sizes {
            self.within(&format!("parallel.{key}"), n as f64, 1.0, MAX_RANKS as f64)?;
        }
        if p.zero > 3 {
            return self.refuse("parallel.zero", "must be 0, 1, 2 or 3");
        }
        if let Some(size) = p.fsdp_group {
            let replicas = p.dp.saturating_mul(p.cp);
            if p.zero != 3 {
                return self.refuse("parallel.fsdp_group", "is for sharded weights; set parallel.zero to 3");
            }
            if size == 0 || !replicas.is_multiple_of(size) {
                let what =
                    format!("must divide the {replicas} data-parallel ranks (parallel.dp x parallel.cp)");
                return self.refuse("parallel.fsdp_group", &what);
            }
        }
        if p.fsdp_outer == FsdpOuter::Optimizer && p.fsdp_group.is_none() {
            let what = "is for groups of ranks that hold the same shards; set parallel.fsdp_group";
            return self.refuse("parallel.fsdp_outer", what);
        }
        if p.comm_unit.is_some_and(|bytes| bytes.0 == 0) {
            return self.refuse("parallel.comm_unit", "must be at least 1 byte; leave it out to derive it");
        }
        if p.vp > 1 && p.pp == 1 {
            return self.refuse("parallel.vp", "needs a pipeline; set it to 1, or parallel.pp to 2 or more");
        }
        Ok(())
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

    fn check_data_values(&self) -> Result<()> {
        let d = &self.config.data;
        if d.path.0.iter().any(|p| p.is_empty()) {
            return self.refuse("data.path", "a path is empty");
        }
        if d.is_embedded() && d.path.0.len() > 1 {
            return self
                .refuse("data.path", "\"embedded\" stands alone; leave it out or leave the other paths out");
        }
        if d.is_embedded() && d.tokenizer.is_some() {
            let what = "the corpus inside the program is read as bytes; leave data.tokenizer out";
            return self.refuse("data.tokenizer", what);
        }
        if !d.weights.is_empty() && d.weights.len() != d.path.0.len() {
            let what = format!("{} weights for {} paths; give one per path", d.weights.len(), d.path.0.len());
            return self.refuse("data.weights", what);
        }
        if d.weights.iter().any(|w| *w < 0.0)
            || (!d.weights.is_empty() && d.weights.iter().sum::<f64>() <= 0.0)
        {
            return self.refuse("data.weights", "must not be negative, and not all 0");
        }
        let split = d.split.0;
        if split.iter().any(|s| *s < 0.0) || split[0] <= 0.0 {
            return self
                .refuse("data.split", "shares must not be negative, and that of training must be above 0");
        }
        if self.config.eval.every == 0 {
            let wanting = [
                ("checkpoint.best", self.config.checkpoint.best),
                ("eval.patience", self.config.eval.patience > 0),
            ];
            if let Some((key, _)) = wanting.into_iter().find(|(_, on)| *on) {
                return self.refuse(key, "it goes by evaluations, of which there are none; set eval.every");
            }
        }
        if self.config.eval.every > 0 && split[1] <= 0.0 {
            let what = "there is no validation data: give data.split a second share, or set eval.every to 0";
            return self.refuse("eval.every", what);
        }
        Ok(())
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
        if let OffloadedActivations::Layers(count) = self.config.offload.activations
            && count >= m.layers
        {
            let most = m.layers.saturating_sub(1);
            let what = format!(
                "the last of {} layers stays, because its backward follows at once; at most {most}, or \"auto\"",
                m.layers
            );
            return self.refuse("offload.activations", what);
        }
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
        self.check_expert_ranks(r)?;
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
                "start {start} and increment {increment} must be multiples of train.micro_batch = {micro}"
            );
            return self.refuse("train.ramp", what);
        }
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

    /// Every rank holds a part of an expert: etp·ep·pp divides the number of ranks.
    fn check_expert_ranks(&self, r: &Resolved) -> Result<()> {
        let (p, batch) = (&r.config.parallel, r.config.train.global_batch);
        let layout = p.layout();
        let experts = layout.etp().saturating_mul(p.ep).saturating_mul(p.pp);
        let ranks = p.tp.saturating_mul(p.cp).saturating_mul(p.pp).saturating_mul(p.dp);
        if r.model.moe.is_none() && !ranks.is_multiple_of(experts) {
            let what = format!(
                "{} splits experts, which this model has none of, and does not divide the {ranks} ranks of tp x cp x pp x dp; leave it out",
                layout.etp()
            );
            return self.refuse("parallel.etp", what);
        }
        if r.derived.iter().any(|d| d.key == "parallel.dp") && !batch.is_multiple_of(p.dp) {
            let key = if self.is_set("parallel.etp") { "parallel.etp" } else { "parallel.ep" };
            let what = format!(
                "etp x ep = {} ranks hold the experts, which makes parallel.dp {}; it does not divide train.global_batch = {batch}; change one",
                layout.etp().saturating_mul(p.ep),
                p.dp
            );
            return self.refuse(key, what);
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
