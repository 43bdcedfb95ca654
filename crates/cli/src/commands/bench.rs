//! `bench`: training steps, kernels and collectives.

use crate::args::Global;
use crate::profile::Profiled;
use crate::ranks;
use crate::trace;
use crate::{format, output};
use anyhow::Result;
use ferrotron_core::bench;
use ferrotron_core::config::{Precision, QuantRecipe, Resolved};
use ferrotron_core::cost::memory::MemoryBytes;
use ferrotron_core::plan::{Hardware, StepTime, of_recipe};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, Instrumentation, format_bytes};
use std::path::Path;
use std::process::ExitCode;

const AFTER: &str = "\
Examples:
  ferrotron bench train                              the recipe `tiny`
  ferrotron bench train --work my.toml --steps 20
  ferrotron bench train --dtype f32 --json
  ferrotron bench train --work llama-1b --profile    profile.html: where the time goes, and what to change
  ferrotron bench train --work custom/L=4/d=1024/h=16/kv=4/hd=64/ffn=2816/V=32000/T=1536/B=3
  ferrotron bench train --work moe-8l --force-balance     also with balanced routing
  ferrotron bench train --work llama-1b --set parallel.tp=2 --ranks 4   several ranks: communication hidden and exposed
  mpirun -n 4 ferrotron bench train --set parallel.pp=2
  ferrotron bench kernels --filter gemm
  ferrotron bench comm --ranks 4                     time and bandwidth of collectives
  ferrotron bench calibrate --out my-gpu.toml        the GPU's curves for `ferrotron plan --gpus 8xmy-gpu.toml`";

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands of `bench`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Benchmark training steps on random tokens: tokens/s, MFU, memory, communication hidden and exposed
    Train(Train),
    /// Benchmark each kernel of a training step against measured GEMM and memory ceilings
    Kernels(Kernels),
    /// Benchmark every collective: time, algorithm bandwidth and bus bandwidth
    Comm(super::bench_comm::Args),
    /// Measure a GPU for `plan`: GEMMs, attention, memory, link to the host; writes a hardware file; takes about a minute
    Calibrate(super::bench_calibrate::Args),
}

/// Arguments of `bench train`.
#[derive(Debug, clap::Args)]
pub struct Train {
    /// Workload: a benchmark model, a recipe, a custom/... shape or a TOML file
    #[arg(long, value_name = "NAME or FILE.toml", default_value = "tiny")]
    pub work: String,
    /// Number of ranks, as threads of this process; sets parallel.dp to N / (tp x cp x pp) [default: tp x cp x pp x dp]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Number of timed steps; the median is reported
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub steps: usize,
    /// Number of warm-up steps before timing starts
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub warmup: usize,
    /// Compute precision: f32, bf16 or f16 [default: the recipe's]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Pack each sequence with documents of this many tokens; attention does not cross documents
    #[arg(long, value_name = "TOKENS")]
    pub packed: Option<std::num::NonZeroUsize>,
    /// Also benchmark an MoE model with random, nearly balanced routing
    #[arg(long)]
    pub force_balance: bool,
    /// Peak TFLOP/s for MFU [default: the GPU's datasheet, otherwise a measured large GEMM]
    #[arg(long, value_name = "TFLOPS")]
    pub peak: Option<f64>,
    /// Override a recipe key; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Trace options.
    #[command(flatten)]
    pub trace: trace::TraceArgs,
}

/// Bytes of a copy to measure the link to host memory with.
const LINK_BYTES: usize = 256 << 20;

/// Arguments of `bench kernels`.
#[derive(Debug, clap::Args)]
pub struct Kernels {
    /// Workload whose shapes are used: a benchmark model, a recipe, a custom/... shape or a TOML file
    #[arg(long, value_name = "NAME or FILE.toml", default_value = "tiny")]
    pub work: String,
    /// Only kernels whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub filter: String,
    /// Seconds to time each kernel
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    pub seconds: f64,
    /// Compute precision: f32, bf16 or f16 [default: the recipe's]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Override a recipe key; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    match args.command {
        Command::Train(args) => train(&args, global),
        Command::Kernels(args) => super::bench_kernels::run(&args, global),
        Command::Comm(args) => super::bench_comm::run(&args, global),
        Command::Calibrate(args) => super::bench_calibrate::run(&args, global),
    }
}

/// The workload with the overrides of the command line.
pub(super) fn resolve(
    work: &str,
    set: &[String],
    dtype: Option<Precision>,
    ranks: Option<usize>,
) -> Result<Resolved> {
    let mut recipe = bench::workload(work)?;
    recipe.set_all(set)?;
    if let Some(dtype) = dtype {
        recipe.put_key("precision.dtype", dtype.name())?;
    }
    super::train::args::set_ranks(&mut recipe, ranks)?;
    let given = |key: &str| set.iter().any(|s| s.split('=').next().is_some_and(|k| k.trim() == key));
    let dp = recipe.config.parallel.dp;
    if dp > 1 && bench::fixes_batch(work) && !given("train.global_batch") {
        // The batch that a workload fixes is that of one data-parallel rank.
        let batch = recipe.config.train.global_batch.saturating_mul(dp);
        recipe.put_key("train.global_batch", i64::try_from(batch).unwrap_or(i64::MAX))?;
    }
    Ok(ferrotron_bridge::recipe::resolve(&mut recipe)?.0)
}

fn train(args: &Train, global: &Global) -> Result<ExitCode> {
    let resolved = resolve(&args.work, &args.set, args.dtype, global.world_size(args.ranks)?)?;
    let dtype = resolved.config.precision.dtype;
    if resolved.config.parallel.layout().world()? != 1 {
        return super::bench_ranks::run(args, global, &resolved);
    }
    let rank = args.trace.with_tracing(global)?.rank(
        1234,
        Instrumentation { kernel_times: args.trace.profile.is_some(), ..Instrumentation::default() },
    )?;
    let (peak, source) = peak(args, &rank, dtype)?;
    let document = args.packed.map(usize::from);
    let b = bench::train(rank.clone(), &resolved, args.warmup, args.steps.max(1), document, global.started)?;
    let forced = train_force_balanced(args, &rank, &resolved, global)?;
    let traced = traced(args, &rank, &resolved, &b)?;
    let mfu = b.tflops() / peak;
    let offloads = b.memory.host.peak > 0 && rank.device().gpu().is_some();
    let link = offloads.then(|| bench::link_rates(&rank, LINK_BYTES)).transpose()?;
    let plan = planned(&rank, &resolved)?;
    let categories: serde_json::Map<_, _> =
        Category::ALL.iter().zip(b.memory.peak).map(|(c, bytes)| (c.name().into(), bytes.into())).collect();
    if global.json {
        let (least, ceilings) = roofline(&rank, &resolved, &b)?;
        let roofline_s: f64 = least.iter().map(|p| p.floor_s).sum();
        let by_part: serde_json::Map<_, _> =
            least.iter().map(|p| (p.category.name().into(), (p.floor_s * 1e3).into())).collect();
        output::print_json(&serde_json::json!({
            "work": args.work,
            "device": ranks::device_name(&rank),
            "threads": rank.device().threads().count(),
            "dtype": dtype.name(),
            "recipe": resolved.config.precision.recipe.name(),
            "step_ms": b.median() * 1e3,
            "tok_s": b.tokens_per_s(),
            "best_tok_s": b.tokens as f64 / b.step_s[0],
            "tflops": b.tflops(),
            "peak_tflops": peak,
            "mfu": mfu,
            "peak_bytes": b.memory.total_peak,
            "peak_bytes_by_category": categories,
            "reserved_bytes": b.memory.reserved_peak,
            "host_bytes": b.memory.host.peak,
            "offload": b.offload.map(|o| serde_json::json!({
                "movable_bytes": o.movable,
                "moved_bytes": o.moved,
                "peak_reduction_bytes": o.peak_reduction,
                "window_bytes": o.window,
                "to_host_gb_s": o.link.to_host / 1e9,
                "from_host_gb_s": o.link.from_host / 1e9,
                "expected_stall_ms": o.expected_stall * 1e3,
                "measured_stall_ms": o.measured_stall.map(|s| s * 1e3),
            })),
            "link_gb_s": link.map(|l| serde_json::json!({
                "to_host": l.to_host / 1e9,
                "from_host": l.from_host / 1e9,
                "both_at_once": l.both / 1e9,
            })),
            "start_s": b.start_s,
            "first_step_s": b.first_step_s,
            "host_ms": b.host_least() * 1e3,
            "cuda_graph": b.graph,
            "routing": b.routing.as_ref().map(|r| r.name()),
            "loads": b.routing.as_ref().map(|r| &r.loads),
            "balanced": forced.as_ref().map(|f| serde_json::json!({
                "step_ms": f.median() * 1e3,
                "tok_s": f.tokens_per_s(),
                "tflops": f.tflops(),
                "mfu": f.tflops() / peak,
                "loads": f.routing.as_ref().map(|r| &r.loads),
            })),
            "steps": b.step_s.len(),
            "loss": b.loss,
            "roofline_ms": roofline_s * 1e3,
            "of_roofline": roofline_s / b.median(),
            "roofline_ms_by_part": by_part,
            "ceilings": {
                "gemm_tflops": ceilings.gemm,
                "fp8_gemm_tflops": ceilings.fp8_gemm.map(|(output, gradients)| [output, gradients]),
                "attention_tflops": [ceilings.attention.0, ceilings.attention.1],
                "memory_gb_s": ceilings.memory,
            },
            "commit": env!("FERROTRON_COMMIT"),
            "plan": plan.map(|(time, memory)| serde_json::json!({
                "step_ms": time.total * 1e3,
                "seconds": time,
                "peak_bytes": memory.total(),
            })),
            "kernel_ms": args.trace.profile.is_some().then(|| {
                let steps = b.step_s.len() as f64;
                let ms = |t: &std::time::Duration| t.as_secs_f64() * 1e3 / steps;
                b.profile.iter().map(|(k, (_, t))| (k.to_string(), ms(t).into())).collect::<serde_json::Map<_, _>>()
            }),
            "trace": traced.map(|t| t.json()),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![
        vec!["step".into(), format!("{:.1} ms (median of {})", b.median() * 1e3, b.step_s.len())],
        vec!["tokens/s".into(), format::thousands(b.tokens_per_s() as u64)],
        vec![
            "TFLOP/s".into(),
            format!(
                "{:.3} ({:.2} MFLOP per token, forward and backward)",
                b.tflops(),
                b.flops_per_token / 1e6
            ),
        ],
        vec!["MFU".into(), format!("{:.1} % of {peak:.2} TFLOP/s{source}", mfu * 1e2)],
        vec!["start".into(), format::seconds(b.start_s)],
        vec!["first step".into(), format!("{} after the process started", format::seconds(b.first_step_s))],
    ];
    if let Some(r) = &b.routing {
        rows.push(vec!["routing".into(), routing(r)]);
    }
    if let Some((f, r)) = forced.as_ref().and_then(|f| Some((f, f.routing.as_ref()?))) {
        let (ms, rate) = (f.median() * 1e3, format::thousands(f.tokens_per_s() as u64));
        let text = format!("{ms:.1} ms, {rate} tokens/s, {:.3} TFLOP/s, routing {}", f.tflops(), routing(r));
        rows.push(vec!["balanced".into(), text]);
    }
    if rank.device().gpu().is_some() {
        let (host, share) = (b.host_least() * 1e3, b.host_least() / b.median() * 1e2);
        let text = format!("{host:.2} ms per step ({share:.0} %)");
        rows.push(vec!["CPU launch overhead".into(), text]);
        let how = if b.graph { "on" } else { "off" };
        rows.push(vec!["CUDA graph".into(), format!("{how} ({})", b.cuda_graph_decision.reason)]);
    }
    for (c, bytes) in Category::ALL.iter().zip(b.memory.peak).filter(|(_, bytes)| *bytes > 0) {
        rows.push(vec![format!("peak {}", c.name()), format_bytes(bytes)]);
    }
    rows.push(vec!["peak total".into(), format_bytes(b.memory.total_peak)]);
    rows.push(vec!["reserved".into(), format_bytes(b.memory.reserved_peak)]);
    if b.memory.host.peak > 0 {
        rows.push(vec!["peak host".into(), format_bytes(b.memory.host.peak)]);
    }
    if let Some((time, memory)) = plan {
        let (ms, bytes) = (time.total * 1e3, memory.total());
        let apart = |ours: f64, measured: f64| format!("{:+.1} %", (ours / measured - 1.0) * 1e2);
        let text = format!(
            "{ms:.1} ms ({}), {} ({}), as `plan` estimates",
            apart(ms, b.median() * 1e3),
            format_bytes(bytes),
            apart(bytes as f64, b.memory.total_peak as f64)
        );
        rows.push(vec!["planned".into(), text]);
    }
    if let Some(l) = link {
        let [to, from, both] = [l.to_host, l.from_host, l.both].map(|rate| rate / 1e9);
        let text = format!("{to:.1} GB/s to the host, {from:.1} GB/s back; both at once {both:.1} GB/s each");
        rows.push(vec!["link".into(), text]);
    }
    output::print(&format!(
        "{} in {} on {}\n{}",
        args.work,
        precision_text(&resolved),
        ranks::device_description(&rank),
        output::table(&rows)
    ))?;
    if let Some(traced) = traced {
        traced.print(global)?;
    }
    if args.trace.profile.is_some() {
        output::print(&profile(&b, resolved.model.layers))?;
        let (least, ceilings) = roofline(&rank, &resolved, &b)?;
        output::print(&parts(&least, ceilings, &b))?;
    }
    Ok(ExitCode::SUCCESS)
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
    Ok(Some(bench::train(rank.clone(), &even, args.warmup, args.steps.max(1), document, global.started)?))
}

/// The workload with random, nearly balanced routing, if `--force-balance` is given.
pub(super) fn balanced(args: &Train, r: &Resolved) -> Result<Option<Resolved>> {
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

/// The routing and its load imbalance as text.
fn routing(r: &bench::RoutingReport) -> String {
    let loads =
        r.imbalance().map_or_else(String::new, |x| format!(" (most loaded expert {x:.2} x the mean)"));
    format!("{}{loads}", r.name())
}

/// The compute precision, and the FP8 recipe if there is one.
pub fn precision_text(r: &Resolved) -> String {
    let p = &r.config.precision;
    match p.recipe {
        QuantRecipe::None => p.dtype.name().into(),
        scaling => format!("{} with {} scaling in the layers", p.dtype.name(), scaling.name()),
    }
}

/// The roofline time of every part of the step, and the ceilings it is computed from, measured now.
fn roofline(
    rank: &Rank,
    resolved: &Resolved,
    b: &bench::TrainBench,
) -> Result<(Vec<bench::RooflinePart>, bench::Ceilings)> {
    let ceilings = bench::ceilings(rank, resolved, b.context)?;
    Ok((bench::roofline(resolved, b, ceilings)?, ceilings))
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
pub(super) fn profiled<'a>(
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

/// Time by part of the step against its roofline.
fn parts(parts: &[bench::RooflinePart], c: bench::Ceilings, b: &bench::TrainBench) -> String {
    let mut rows = vec![["part", "roofline ms", "ms", "of roofline"].map(String::from).to_vec()];
    let line = |name: &str, least: f64, took: f64| {
        let share =
            if least > 0.0 && took > 0.0 { format!("{:.0} %", least / took * 1e2) } else { String::new() };
        vec![name.to_string(), format!("{:.2}", least * 1e3), format!("{:.2}", took * 1e3), share]
    };
    rows.extend(parts.iter().map(|p| line(p.category.name(), p.floor_s, p.measured_s)));
    rows.push(line("step", parts.iter().map(|p| p.floor_s).sum(), b.median()));
    let digits = if c.gemm < 10.0 { 2 } else { 0 };
    let fp8 = c.fp8_gemm.map_or_else(String::new, |(fprop, gradients)| {
        format!(" (FP8: {fprop:.digits$} fprop, {gradients:.digits$} dgrad and wgrad)")
    });
    format!(
        "\n{}\nceilings, each measured alone in this run: GEMM {:.digits$} TFLOP/s{fp8}, attention {:.digits$} forward and \
         {:.digits$} backward, memory {:.0} GB/s\n",
        output::table(&rows),
        c.gemm,
        c.attention.0,
        c.attention.1,
        c.memory
    )
}

/// Time by kernel, longest first, and the time between kernels.
fn profile(b: &bench::TrainBench, layers: usize) -> String {
    let steps = b.step_s.len() as f64;
    let total: f64 = b.step_s.iter().sum();
    let mut kernels: Vec<_> = b.profile.iter().collect();
    kernels.sort_by_key(|k| std::cmp::Reverse(k.1.1));
    let mut rows = vec![vec!["kernel".to_string(), "calls/step".into(), "ms/step".into(), "share".into()]];
    let line = |name: &str, calls: String, s: f64| {
        vec![name.to_string(), calls, format!("{:.2}", s / steps * 1e3), format!("{:.1} %", s / total * 1e2)]
    };
    let inside: f64 = kernels.iter().map(|k| k.1.1.as_secs_f64()).sum();
    rows.extend(kernels.iter().map(|(name, (calls, time))| {
        line(name, format!("{:.0}", *calls as f64 / steps), time.as_secs_f64())
    }));
    rows.push(line("between kernels", String::new(), total - inside));
    let launches = kernels.iter().map(|k| k.1.0 as f64).sum::<f64>() / steps;
    format!(
        "\n{}\n{launches:.0} kernel launches per step, {:.1} per layer (forward and backward, everything included)\n",
        output::table(&rows),
        launches / layers.max(1) as f64
    )
}
