//! The cheapest things to change: settings whose gain follows from what was measured.
//!
//! | setting | gain |
//! |---|---|
//! | less `train.recompute` | time of each kernel family x share of its work that is recomputation |
//! | twice the `train.micro_batch` | half of the time between kernels, and of communication that every micro-batch repeats |
//! | `precision.dtype=bf16` | GEMM time x (1 - f32 rate / bf16 rate), rates measured alone |
//! | `precision.recipe=fp8-current` | GEMM time x (1 - FP8 floor / bf16 floor) less the time of casts |
//! | `train.cuda_graph=auto` | time between kernels |
//! | optimizer dtypes | optimizer time x share of bytes that no longer move |
//! | `parallel.zero`, `parallel.overlap` | exposed data-parallel communication x share that is no longer sent, or can be hidden |
//! | pipeline schedule | difference of the bubbles of both schedules |
//! | no offloading | exposed copies |
//! | twice the `train.global_batch` | half of the time of the optimizer and of data-parallel communication, per token |
//!
//! Every setting was resolved with the rest of the recipe, so that it is not refused, and where it takes memory the estimate
//! says that it fits. Gains of several settings do not add up.

use super::families::rank_floors;
use super::{Measurement, Profile};
use crate::Result;
use crate::config::{
    CudaGraphMode, MasterDtype, OffloadedState, PipelineSchedule, Precision, QuantRecipe, Recipe, Resolved,
};
use crate::cost::roofline::{Ceilings, KernelCategory, update_bytes};
use crate::cost::summary::timeline;
use crate::cost::{MemoryEstimate, USABLE_PERCENT};
use ferrotron_tensor::format_bytes;
use serde::Serialize;

/// Most things to change.
const MOST: usize = 5;
/// Share of a step below which a gain is not worth a change, and may be noise.
const LEAST_SHARE: f64 = 0.01;
/// A family at less of its roofline than this is bound by something else than its bytes.
const BANDWIDTH_BOUND: f64 = 0.4;

/// The setting that is tried for FP8 GEMMs.
pub(super) const FP8: &str = "precision.recipe=fp8-current";

/// What a change costs, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Price {
    /// Results are the same.
    #[serde(rename = "same results")]
    Nothing,
    /// Results are the same up to rounding.
    #[serde(rename = "more memory")]
    Memory,
    /// Training computes in other dtypes; compare the loss.
    #[serde(rename = "other numerics")]
    Numerics,
    /// The batch is another one; the learning rate may have to follow.
    #[serde(rename = "another batch")]
    Batch,
}

/// One thing to change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The keys, as `--set` takes them.
    pub settings: Vec<String>,
    /// Why, with the measured numbers.
    pub why: String,
    /// Expected seconds less per step; of another batch, per as many tokens as a step has now.
    pub gain_s: f64,
    /// What it costs.
    pub price: Price,
    /// Memory of a rank with it, where that matters.
    pub memory: Option<String>,
}

/// The recipe with other settings; none where it would be refused.
pub(super) fn with_settings(r: &Resolved, settings: &[&str]) -> Option<Resolved> {
    let mut recipe = Recipe::of_config(r.config.clone());
    recipe.set_all(settings).ok()?;
    recipe.resolve(r.config.model.hf.is_some().then_some(&r.model)).ok()
}

/// The changes with the largest gains, the cheapest first.
pub(super) fn advice(m: &Measurement, p: &Profile) -> Result<Vec<Advice>> {
    if p.steps == 0 {
        return Ok(Vec::new());
    }
    let f = Facts { m, p, r: m.resolved, ceilings: m.rates.map(|r| r.ceilings) };
    let mut all: Vec<Advice> = [
        f.overlap()?,
        f.cuda_graph()?,
        f.zero()?,
        f.pipeline()?,
        f.less_recompute()?,
        f.larger_micro_batch()?,
        f.no_offload()?,
        f.bf16()?,
        f.fp8()?,
        f.optimizer_dtypes()?,
        f.larger_batch()?,
    ]
    .into_iter()
    .flatten()
    .map(|a| Advice { gain_s: a.gain_s * p.pace(), ..a })
    .filter(|a| a.gain_s > LEAST_SHARE * p.step_s)
    .collect();
    all.sort_by(|a, b| b.gain_s.total_cmp(&a.gain_s));
    all.truncate(MOST);
    all.sort_by_key(|a| a.price);
    Ok(all)
}

struct Facts<'a> {
    m: &'a Measurement<'a>,
    p: &'a Profile,
    r: &'a Resolved,
    ceilings: Option<Ceilings>,
}

impl Facts<'_> {
    fn seconds(&self, category: KernelCategory) -> f64 {
        self.p.family(category).map_or(0.0, |f| f.measured_s)
    }

    fn gemm_seconds(&self) -> f64 {
        self.seconds(KernelCategory::Gemm) + self.seconds(KernelCategory::GroupedGemm)
    }

    /// Exposed seconds of data-parallel communication.
    fn exposed_dp(&self) -> f64 {
        let is_dp = |group: &str| group.starts_with("dp") || group.starts_with("expert_dp");
        self.p.communication.iter().filter(|c| is_dp(&c.group)).map(|c| c.exposed).sum()
    }

    /// Micro-batches of a step on each replica.
    fn micro_batches(&self) -> usize {
        self.r.config.train.global_batch / (self.r.plan.micro_batch * self.r.config.parallel.dp).max(1)
    }

    fn floors(&self, r: &Resolved, c: Ceilings) -> Result<Vec<(KernelCategory, f64)>> {
        rank_floors(r, self.m.tokens, self.m.context, c)
    }

    /// Memory of a rank with another recipe if it fits: the estimate, plus what this run needed beyond its own estimate.
    fn fits(&self, new: &Resolved) -> Result<Option<String>> {
        let estimate = |r: &Resolved| -> Result<usize> { Ok(MemoryEstimate::of(r)?.largest()?.total()) };
        let more = self.m.memory.total_peak.saturating_sub(estimate(self.r)?);
        let needed = estimate(new)?.saturating_add(more);
        let Some(capacity) = self.m.capacity else { return Ok(None) };
        let text = format!("about {} of {}", format_bytes(needed), format_bytes(capacity));
        Ok((needed <= capacity / 100 * USABLE_PERCENT).then_some(text))
    }

    fn overlap(&self) -> Result<Option<Advice>> {
        let exposed = self.p.mean(|r| r.exposed_communication);
        if self.r.config.parallel.overlap || exposed <= 0.0 {
            return Ok(None);
        }
        let gain_s = exposed.min(self.p.mean(|r| r.compute));
        let why = format!(
            "Communication does not overlap with computation: {} per step are exposed, all of which may be hidden at best.",
            ms(exposed)
        );
        Ok(self.setting(&["parallel.overlap=true"], why, gain_s, Price::Nothing))
    }

    fn cuda_graph(&self) -> Result<Option<Advice>> {
        if !self.m.on_gpu || self.r.config.train.cuda_graph != CudaGraphMode::Off {
            return Ok(None);
        }
        let idle = self.p.idle_s();
        let why = format!(
            "The GPU waits for launches for {} of a step; a CUDA graph replays them at once.",
            ms(idle)
        );
        Ok(self.setting(&["train.cuda_graph=auto"], why, idle, Price::Nothing))
    }

    fn zero(&self) -> Result<Option<Advice>> {
        let p = &self.r.config.parallel;
        let (exposed, n) = (self.exposed_dp(), self.micro_batches().max(1) as f64);
        if p.dp < 2 {
            return Ok(None);
        }
        // Weights are gathered and gradients reduced: once, or for every micro-batch.
        let (share, what) = match p.zero {
            0 => {
                let optimizer = self.seconds(KernelCategory::Optimizer);
                let why = format!(
                    "Every one of {} replicas updates all parameters, which takes {}; sharded, each updates its part.",
                    p.dp,
                    ms(optimizer)
                );
                let gain = optimizer * (1.0 - 1.0 / p.dp as f64);
                return Ok(self.setting(&["parallel.zero=1"], why, gain, Price::Nothing));
            }
            3 => (1.0 - 2.0 / (3.0 * n), "gathers weights twice and reduces gradients for every micro-batch"),
            2 => (1.0 - 2.0 / (1.0 + n), "reduces gradients for every micro-batch"),
            _ => return Ok(None),
        };
        let settings = ["parallel.zero=1"];
        let Some(new) = with_settings(self.r, &settings) else { return Ok(None) };
        let Some(memory) = self.fits(&new)? else { return Ok(None) };
        let why = format!("ZeRO {} {what}; {} of that are exposed.", p.zero, ms(exposed));
        let advice = self.setting(&settings, why, exposed * share, Price::Memory);
        Ok(advice.map(|a| Advice { memory: Some(memory), ..a }))
    }

    fn pipeline(&self) -> Result<Option<Advice>> {
        let p = &self.r.config.parallel;
        if p.pp < 2 {
            return Ok(None);
        }
        let now = timeline(self.r)?.bubble();
        // A bubble is time in which a stage waits for another.
        let waits = self.p.mean(|r| r.exposed_communication) + self.p.idle_s();
        let half = (self.r.plan.micro_batch / 2).max(1);
        let tries = [
            "parallel.schedule=zero-bubble".to_string(),
            format!("parallel.vp={}", p.vp * 2),
            format!("train.micro_batch={half}"),
        ];
        let mut best: Option<Advice> = None;
        for setting in tries {
            let settings = [setting.as_str()];
            if p.schedule != PipelineSchedule::OneForwardOneBackward && setting.contains("schedule") {
                continue;
            }
            let Some(new) = with_settings(self.r, &settings) else { continue };
            let (Some(memory), Ok(bubble)) = (self.fits(&new)?, timeline(&new).map(|t| t.bubble())) else {
                continue;
            };
            let gain = (self.p.step_s * (1.0 - (1.0 - now) / (1.0 - bubble))).min(waits);
            let why = format!(
                "The schedule leaves {:.0} % of a step as pipeline bubble; with this it is {:.0} %.",
                now * 1e2,
                bubble * 1e2
            );
            let advice = self.setting(&settings, why, gain, Price::Memory);
            let advice = advice.map(|a| Advice { memory: Some(memory), ..a });
            best = best.into_iter().chain(advice).max_by(|a, b| a.gain_s.total_cmp(&b.gain_s));
        }
        Ok(best)
    }

    fn less_recompute(&self) -> Result<Option<Advice>> {
        let Some(c) = self.ceilings else { return Ok(None) };
        let old = self.floors(self.r, c)?;
        for setting in ["train.recompute=none", "train.recompute=[\"norm\",\"activation\"]"] {
            let Some(new) = with_settings(self.r, &[setting]) else { continue };
            let Some(memory) = self.fits(&new)? else { continue };
            let less = self.floors(&new, c)?;
            let gain = old.iter().zip(&less).filter(|((_, old), _)| *old > 0.0);
            let gain = gain.map(|((category, old), (_, new))| self.seconds(*category) * (1.0 - new / old));
            let gain: f64 = gain.sum();
            let why = format!(
                "Backward computes {} of forward again; the memory that saves is not needed.",
                match self.r.config.train.recompute.modules().layer {
                    true => "all",
                    false => "parts",
                }
            );
            let advice = self.setting(&[setting], why, gain, Price::Memory);
            return Ok(advice.map(|a| Advice { memory: Some(memory), ..a }));
        }
        Ok(None)
    }

    fn larger_micro_batch(&self) -> Result<Option<Advice>> {
        let (n, micro, p) = (self.micro_batches(), self.r.plan.micro_batch, &self.r.config.parallel);
        if n < 2 || p.pp > 1 {
            return Ok(None);
        }
        let setting = format!("train.micro_batch={}", micro * 2);
        let Some(new) = with_settings(self.r, &[&setting]) else { return Ok(None) };
        let Some(memory) = self.fits(&new)? else { return Ok(None) };
        let idle = self.p.idle_s();
        let repeated = if p.zero > 1 { self.exposed_dp() } else { 0.0 };
        let again = match repeated > 0.0 {
            true => format!(", and {} of communication that each repeats are exposed", ms(repeated)),
            false => String::new(),
        };
        let why = format!(
            "A step has {n} micro-batches of {micro}: {} pass between kernels{again}. Half as many need half of it; that \
             larger GEMMs also run faster is not counted.",
            ms(idle)
        );
        let advice = self.setting(&[&setting], why, (idle + repeated) / 2.0, Price::Memory);
        Ok(advice.map(|a| Advice { memory: Some(memory), ..a }))
    }

    fn no_offload(&self) -> Result<Option<Advice>> {
        let o = &self.r.config.offload;
        let state = o.optimizer != OffloadedState::Fraction(0.0);
        if !o.activations.is_on() && !state {
            return Ok(None);
        }
        let settings = ["offload.activations=off", "offload.optimizer=0"];
        let Some(new) = with_settings(self.r, &settings) else { return Ok(None) };
        let Some(memory) = self.fits(&new)? else { return Ok(None) };
        let exposed = self.p.mean(|r| r.exposed_copies);
        let why = format!(
            "A step waits {} for copies from and to host memory, and fits without them.",
            ms(exposed)
        );
        let advice = self.setting(&settings, why, exposed, Price::Memory);
        Ok(advice.map(|a| Advice { memory: Some(memory), ..a }))
    }

    fn bf16(&self) -> Result<Option<Advice>> {
        let Some((c, bf16)) = self.ceilings.zip(self.m.rates.and_then(|r| r.bf16_gemm)) else {
            return Ok(None);
        };
        if self.r.config.precision.dtype != Precision::F32 || bf16 <= c.gemm {
            return Ok(None);
        }
        let gemms = self.gemm_seconds();
        let why = format!(
            "GEMMs take {} of a step in f32 at {:.2} TFLOP/s; in bf16 a large one ran at {bf16:.2} here.",
            ms(gemms),
            c.gemm
        );
        let gain = gemms * (1.0 - c.gemm / bf16);
        Ok(self.setting(&["precision.dtype=bf16"], why, gain, Price::Numerics))
    }

    fn fp8(&self) -> Result<Option<Advice>> {
        let Some((c, fp8)) = self.ceilings.zip(self.m.rates.and_then(|r| r.fp8_gemm)) else {
            return Ok(None);
        };
        if self.r.config.precision.recipe != QuantRecipe::None {
            return Ok(None);
        }
        let Some(new) = with_settings(self.r, &[FP8]) else { return Ok(None) };
        let sum = |floors: &[(KernelCategory, f64)], which: &[KernelCategory]| -> f64 {
            floors.iter().filter(|(c, _)| which.contains(c)).map(|(_, seconds)| seconds).sum()
        };
        let gemms = [KernelCategory::Gemm, KernelCategory::Fp8Gemm, KernelCategory::GroupedGemm];
        let (old, new) = (self.floors(self.r, c)?, self.floors(&new, Ceilings { fp8_gemm: Some(fp8), ..c })?);
        let (before, after) = (sum(&old, &gemms), sum(&new, &gemms));
        if before <= 0.0 {
            return Ok(None);
        }
        // Casts move bytes as norms do, and reach as much of the roofline.
        let norms = self.p.family(KernelCategory::Norms).and_then(|f| f.of_roofline());
        let casts = sum(&new, &[KernelCategory::Quantize]) / norms.unwrap_or(1.0).clamp(0.1, 1.0);
        let took = self.gemm_seconds();
        let why = format!(
            "GEMMs take {} of a step at {:.0} % of their bf16 roofline; large FP8 GEMMs ran at {:.0} TFLOP/s here, bf16 at {:.0}. \
             Casts of about {} are counted.",
            ms(took),
            before / took.max(f64::MIN_POSITIVE) * 1e2,
            fp8.0,
            c.gemm,
            ms(casts)
        );
        Ok(self.setting(&[FP8], why, took * (1.0 - after / before) - casts, Price::Numerics))
    }

    fn optimizer_dtypes(&self) -> Result<Option<Advice>> {
        let Some(family) = self.p.family(KernelCategory::Optimizer) else { return Ok(None) };
        let Some(bound) = family.of_roofline().filter(|share| *share >= BANDWIDTH_BOUND) else {
            return Ok(None);
        };
        let mut settings = Vec::new();
        let o = &self.r.config.optimizer;
        if o.master_dtype == MasterDtype::F32 && self.r.config.precision.dtype == Precision::Bf16 {
            settings.push("optimizer.master_dtype=remainder");
        }
        if o.state_dtype.bytes() > 2.0 {
            settings.push("optimizer.state_dtype=bf16");
        }
        let Some(new) = with_settings(self.r, &settings).filter(|_| !settings.is_empty()) else {
            return Ok(None);
        };
        let (old, less) = (update_bytes(self.r), update_bytes(&new));
        let why = format!(
            "The optimizer takes {}, {:.0} % of which is the time of its bytes; it moves {old:.0} bytes per parameter, and {less:.0} \
             so.",
            ms(family.measured_s),
            bound.min(1.0) * 1e2
        );
        Ok(self.setting(&settings, why, family.measured_s * (1.0 - less / old), Price::Numerics))
    }

    fn larger_batch(&self) -> Result<Option<Advice>> {
        let (optimizer, exposed) = (self.seconds(KernelCategory::Optimizer), self.exposed_dp());
        let repeated = if self.r.config.parallel.zero > 1 { 0.0 } else { exposed };
        let setting = format!("train.global_batch={}", self.r.config.train.global_batch * 2);
        let communication = match repeated > 0.0 {
            true => format!(" and {} of exposed data-parallel communication", ms(repeated)),
            false => String::new(),
        };
        let why = format!(
            "Every step pays {} for the optimizer{communication}, whatever its batch; twice the batch pays it half as often per \
             token.",
            ms(optimizer)
        );
        Ok(self.setting(&[&setting], why, (optimizer + repeated) / 2.0, Price::Batch))
    }

    /// Advice, unless the recipe with it would be refused.
    fn setting(&self, settings: &[&str], why: String, gain_s: f64, price: Price) -> Option<Advice> {
        with_settings(self.r, settings)?;
        let settings = settings.iter().map(|s| s.to_string()).collect();
        Some(Advice { settings, why, gain_s, price, memory: None })
    }
}

fn ms(seconds: f64) -> String {
    let ms = seconds * 1e3;
    let digits = if ms >= 100.0 {
        0
    } else if ms >= 1.0 {
        1
    } else {
        3
    };
    format!("{ms:.digits$} ms")
}
