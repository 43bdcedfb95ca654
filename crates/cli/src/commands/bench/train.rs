//! `bench train` of one rank: timed steps, and what is measured beside them.

use super::Train;
use super::report;
use crate::args::Global;
use crate::profile::Profiled;
use crate::{output, trace};
use anyhow::Result;
use ferrotron_core::bench;
use ferrotron_core::config::{Precision, Resolved};
use ferrotron_core::cost::memory::MemoryBytes;
use ferrotron_core::plan::{Hardware, StepTime, of_recipe};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use std::path::Path;
use std::process::ExitCode;

/// Bytes of a copy to measure the link to host memory with.
const LINK_BYTES: usize = 256 << 20;

/// A benchmarked workload.
pub(super) struct Measured {
    pub(super) rank: Rank,
    pub(super) resolved: Resolved,
    /// TFLOP/s that MFU is a share of, and how they are known.
    pub(super) peak: (f64, String),
    pub(super) steps: bench::TrainBench,
    /// The same with balanced routing.
    pub(super) balanced: Option<bench::TrainBench>,
    pub(super) traced: Option<trace::Summary>,
    /// Rates of the link to host memory, where the run offloads.
    pub(super) link: Option<bench::LinkRates>,
    /// What the planner says of the workload.
    pub(super) plan: Option<(StepTime, MemoryBytes)>,
}

impl Measured {
    pub(super) fn mfu(&self) -> f64 {
        self.steps.tflops() / self.peak.0
    }
}

/// Runs the command.
pub(super) fn run(args: &Train, global: &Global) -> Result<ExitCode> {
    if args.steps == 0 || args.peak.is_some_and(|peak| peak.is_nan() || peak <= 0.0) {
        return Err(output::UsageError::new("--steps must be at least 1, and --peak above 0").into());
    }
    let resolved = super::resolve(&args.work, &args.set, args.dtype, global.world_size(args.ranks)?)?;
    if resolved.config.parallel.layout().world()? != 1 {
        return crate::commands::bench_ranks::run(args, global, &resolved);
    }
    let m = measure(args, global, resolved)?;
    if global.json {
        let (least, ceilings) = roofline(&m)?;
        output::print_json(&report::json(args, &m, &least, &ceilings))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&report::summary(args, &m))?;
    if let Some(traced) = &m.traced {
        traced.print(global)?;
    }
    if args.trace.profile.is_some() {
        output::print(&report::profile(&m.steps, m.resolved.model.layers))?;
        let (least, ceilings) = roofline(&m)?;
        output::print(&report::parts(&least, ceilings, &m.steps))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &Train, global: &Global, resolved: Resolved) -> Result<Measured> {
    let rank = args.trace.with_tracing(global)?.rank(
        1234,
        Instrumentation { kernel_times: args.trace.profile.is_some(), ..Instrumentation::default() },
    )?;
    let peak = peak(args, &rank, resolved.config.precision.dtype)?;
    let document = args.packed.map(usize::from);
    let steps = bench::train(rank.clone(), &resolved, args.warmup, args.steps, document, global.started)?;
    let balanced = train_force_balanced(args, &rank, &resolved, global)?;
    let traced = traced(args, &rank, &resolved, &steps)?;
    let offloads = steps.memory.host.peak > 0 && rank.device().gpu().is_some();
    let link = offloads.then(|| bench::link_rates(&rank, LINK_BYTES)).transpose()?;
    let plan = planned(&rank, &resolved)?;
    Ok(Measured { rank, resolved, peak, steps, balanced, traced, link, plan })
}

/// What the planner says of the workload, on GPUs that it knows.
fn planned(rank: &Rank, r: &Resolved) -> Result<Option<(StepTime, MemoryBytes)>> {
    let Some(gpu) = rank.device().gpu() else { return Ok(None) };
    let Some(hardware) = Hardware::of_gpu(&gpu.name)? else { return Ok(None) };
    Ok(Some(of_recipe(r, &hardware)?))
}

/// The same workload with random, nearly balanced routing, if `--force-balance` is given.
fn train_force_balanced(
    args: &Train,
    rank: &Rank,
    r: &Resolved,
    global: &Global,
) -> Result<Option<bench::TrainBench>> {
    let Some(even) = balanced(args, r)? else { return Ok(None) };
    let document = args.packed.map(usize::from);
    Ok(Some(bench::train(rank.clone(), &even, args.warmup, args.steps, document, global.started)?))
}

/// The workload with random, nearly balanced routing, if `--force-balance` is given.
pub(in crate::commands) fn balanced(args: &Train, r: &Resolved) -> Result<Option<Resolved>> {
    if !args.force_balance {
        return Ok(None);
    }
    if r.model.moe.is_none() {
        anyhow::bail!("--force-balance applies to MoE models, and {} is dense; remove the flag", args.work);
    }
    let mut even = r.clone();
    even.config.moe.force_balance = Some(0.0);
    Ok(Some(even))
}

/// The roofline time of every part of the step, and the ceilings it is computed from, measured now.
fn roofline(m: &Measured) -> Result<(Vec<bench::RooflinePart>, bench::Ceilings)> {
    let ceilings = bench::ceilings(&m.rank, &m.resolved, m.steps.context)?;
    Ok((bench::roofline(&m.resolved, &m.steps, ceilings)?, ceilings))
}

/// Runs the traced steps, apart from the timed ones, which tracing would slow down.
fn traced(
    args: &Train,
    rank: &Rank,
    resolved: &Resolved,
    b: &bench::TrainBench,
) -> Result<Option<trace::Summary>> {
    if !args.trace.is_on() {
        return Ok(None);
    }
    // What the account says of the traced steps is about them.
    rank.device().restart_memory_peaks();
    let mut silent = trace::NullObserver;
    let mut tracer = args.trace.step_tracer(&mut silent);
    bench::train_with_observer(
        rank.clone(),
        resolved,
        args.warmup,
        args.trace.trace_steps as usize,
        &mut tracer,
    )?;
    args.trace.write(rank, Path::new(""), &profiled(args, resolved, b, b.median()))
}

/// What a report says of the timed steps.
pub(in crate::commands) fn profiled<'a>(
    args: &'a Train,
    resolved: &'a Resolved,
    b: &bench::TrainBench,
    step_s: f64,
) -> Profiled<'a> {
    Profiled {
        command: "bench train",
        name: &args.work,
        resolved,
        untraced: Some((step_s, b.step_s.len())),
        tokens: b.tokens,
        context: b.context,
    }
}

/// Peak TFLOP/s of the GPU by the vendor's datasheet, dense bf16 whatever the precision, as MFU is usually reported.
pub fn peak_by_datasheet(rank: &Rank) -> Option<f64> {
    const HOPPER: f64 = 989.0;
    let card = rank.device().gpu()?;
    ["H100", "H200", "GH200"].iter().any(|n| card.name.contains(n)).then_some(HOPPER)
}

/// Peak TFLOP/s for MFU, and its source.
fn peak(args: &Train, rank: &Rank, dtype: Precision) -> Result<(f64, String)> {
    Ok(match (args.peak, peak_by_datasheet(rank)) {
        (Some(peak), _) => (peak, String::new()),
        (None, Some(peak)) => (peak, ", the GPU's dense bf16 peak by its datasheet".into()),
        (None, None) => {
            let n = bench::gemm_ceiling_size(rank);
            (bench::gemm_ceiling(rank, dtype.dtype())?, format!(", a {n}x{n}x{n} GEMM measured here"))
        }
    })
}
