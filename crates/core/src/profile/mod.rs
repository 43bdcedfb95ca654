//! Profiles of training steps: where their time and memory went, next to the least time they could take, and what to change.
//!
//! A [`Profile`] is plain data, computed from a trace and the recipe that was traced; views of it only draw.

mod advice;
mod families;
mod memory;
mod timeline;

pub use advice::{Advice, Price};
pub use families::{Family, KernelRow};
pub use memory::MemorySeries;
pub use timeline::{Lane, Timeline};

use crate::Result;
use crate::bench;
use crate::config::Resolved;
use crate::cost::roofline::{Ceilings, KernelCategory};
use ferrotron_engine::Rank;
use ferrotron_tensor::MemoryReport;
use ferrotron_tensor::trace::{CommunicationTime, RankTime, Trace};
use serde::Serialize;

/// Rates of the device that a profile compares kernels with.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRates {
    /// Those of the recipe's own kernels.
    pub ceilings: Ceilings,
    /// TFLOP/s of bf16 GEMMs, where the recipe computes in f32.
    pub bf16_gemm: Option<f64>,
    /// TFLOP/s of FP8 GEMMs, fprop and gradients, where the recipe has none and the GPU does.
    pub fp8_gemm: Option<(f64, f64)>,
}

/// The lowest compute capability with FP8 GEMMs.
const FP8_CAPABILITY: (u32, u32) = (8, 9);

impl DeviceRates {
    /// Measures the rates, with everything else on the device idle. Ranks that share a machine measure at the same time, so
    /// that each sees its share.
    pub fn measure(rank: &Rank, r: &Resolved, context: usize) -> Result<DeviceRates> {
        use ferrotron_tensor::DType;
        let ceilings = bench::ceilings(rank, r, context)?;
        let dtype = r.config.precision.dtype.dtype();
        let bf16_gemm = (dtype == DType::F32).then(|| bench::gemm_ceiling(rank, DType::BF16)).transpose()?;
        let has_fp8 = rank.device().gpu().is_some_and(|gpu| gpu.capability >= FP8_CAPABILITY);
        let fp8_gemm = match advice::with_settings(r, &[advice::FP8]) {
            Some(fp8) if has_fp8 && ceilings.fp8_gemm.is_none() => bench::fp8_gemm_ceiling(rank, &fp8)?,
            _ => None,
        };
        Ok(DeviceRates { ceilings, bf16_gemm, fp8_gemm })
    }
}

/// What a profile is computed from.
#[derive(Clone, Debug)]
pub struct Measurement<'a> {
    /// The recipe that ran.
    pub resolved: &'a Resolved,
    /// Some of its steps.
    pub trace: &'a Trace,
    /// Median seconds of a step that was not traced, where there was one.
    pub step_s: Option<f64>,
    /// Tokens of a step, of all ranks.
    pub tokens: u64,
    /// Tokens of a document; attention does not cross documents.
    pub context: usize,
    /// Rates of rank 0's device; none where they could not be measured.
    pub rates: Option<DeviceRates>,
    /// Bytes of memory that a rank may use, where that is known.
    pub capacity: Option<usize>,
    /// True if the ranks compute on GPUs.
    pub on_gpu: bool,
    /// The memory account of rank 0's device.
    pub memory: MemoryReport,
}

/// The profile of some steps. Times are seconds of one step, and means over ranks where ranks are not listed.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// Ranks in the trace.
    pub ranks: usize,
    /// Traced steps.
    pub steps: usize,
    /// A step: the median of those that were not traced, otherwise the mean of the traced ones.
    pub step_s: f64,
    /// A traced step, which recording slows down.
    pub traced_step_s: f64,
    /// Tokens of a step, of all ranks.
    pub tokens: u64,
    /// FLOPs of the model in a step, of all ranks, without recomputation.
    pub flops: f64,
    /// Where the time of a step goes, for every rank.
    pub breakdown: Vec<RankTime>,
    /// Time by kernel family, longest first.
    pub families: Vec<Family>,
    /// What the least times of families are computed from.
    pub ceilings: Option<CeilingRates>,
    /// Communication by group and collective, the most exposed first.
    pub communication: Vec<CommunicationTime>,
    /// Live memory over the traced steps.
    pub memory: MemorySeries,
    /// What ran when.
    pub timeline: Timeline,
    /// What to change, the cheapest first.
    pub advice: Vec<Advice>,
}

/// [`Ceilings`] by name.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CeilingRates {
    /// TFLOP/s of GEMMs in the compute dtype.
    pub gemm_tflops: f64,
    /// TFLOP/s of FP8 GEMMs, fprop and gradients.
    pub fp8_gemm_tflops: Option<(f64, f64)>,
    /// TFLOP/s of attention, forward and backward.
    pub attention_tflops: (f64, f64),
    /// GB/s of memory.
    pub memory_gb_s: f64,
}

impl Profile {
    /// The profile of a measurement.
    pub fn new(m: &Measurement) -> Result<Profile> {
        let ranks = m.trace.ranks().len().max(1);
        let breakdown: Vec<RankTime> = m.trace.breakdown().into_iter().map(per_step).collect();
        let steps = breakdown.iter().map(|r| r.steps).max().unwrap_or(0);
        let mean = |of: fn(&RankTime) -> f64| breakdown.iter().map(of).sum::<f64>() / ranks as f64;
        let traced_step_s = mean(|r| r.total);
        let share = 1.0 / (ranks * steps.max(1)) as f64;
        let communication = m.trace.by_communication().into_iter().map(|c| CommunicationTime {
            total: c.total * share,
            hidden: c.hidden * share,
            exposed: c.exposed * share,
            ..c
        });
        let mut profile = Profile {
            ranks,
            steps,
            step_s: m.step_s.unwrap_or(traced_step_s),
            traced_step_s,
            tokens: m.tokens,
            flops: m.tokens as f64 * m.resolved.flops_per_token(m.context as f64)?.total(),
            families: families::families(m, share)?,
            ceilings: m.rates.map(|r| CeilingRates {
                gemm_tflops: r.ceilings.gemm,
                fp8_gemm_tflops: r.ceilings.fp8_gemm,
                attention_tflops: r.ceilings.attention,
                memory_gb_s: r.ceilings.memory,
            }),
            communication: communication.collect(),
            memory: memory::series(m),
            timeline: timeline::timeline(m.trace),
            breakdown,
            advice: Vec::new(),
        };
        profile.advice = advice::advice(m, &profile)?;
        Ok(profile)
    }

    /// Seconds of a family.
    pub fn family(&self, category: KernelCategory) -> Option<&Family> {
        self.families.iter().find(|f| f.category == category)
    }

    /// Mean over ranks of a part of the step.
    fn mean(&self, of: impl Fn(&RankTime) -> f64) -> f64 {
        self.breakdown.iter().map(of).sum::<f64>() / self.breakdown.len().max(1) as f64
    }

    /// Speed of traced kernels relative to those of a step that was not traced, where that step is shorter than their time.
    fn pace(&self) -> f64 {
        let busy = self.mean(|r| r.total - r.idle);
        if busy > self.step_s { self.step_s / busy } else { 1.0 }
    }

    /// Seconds in which nothing runs. Recording a launch takes time of its own: a step that was not traced bounds it.
    pub fn idle_s(&self) -> f64 {
        let busy = self.mean(|r| r.total - r.idle);
        (self.step_s - busy).clamp(0.0, self.mean(|r| r.idle).max(0.0))
    }
}

/// Sums over the traced steps as those of one.
fn per_step(r: RankTime) -> RankTime {
    let n = r.steps.max(1) as f64;
    RankTime {
        total: r.total / n,
        compute: r.compute / n,
        exposed_communication: r.exposed_communication / n,
        exposed_copies: r.exposed_copies / n,
        idle: r.idle / n,
        ..r
    }
}
