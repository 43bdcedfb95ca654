//! `bench train` over several ranks: a step, and how much of its communication computation hides.

use super::bench::{Train, balanced, peak_by_datasheet, precision_text, profiled};
use crate::args::Global;
use crate::profile::Profiled;
use crate::trace::{NullObserver, Summary};
use crate::{format, output, ranks};
use anyhow::Result;
use ferrotron_core::bench::{self, TrainBench};
use ferrotron_core::config::Resolved;
use ferrotron_engine::Rank;
use ferrotron_tensor::format_bytes;
use ferrotron_tensor::trace::{CommunicationTime, Coverage, Trace};
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;

/// The timed steps, as rank 0 knows them.
struct Measured {
    bench: TrainBench,
    balanced: Option<TrainBench>,
    /// Median seconds of a step on the slowest rank.
    step_s: f64,
    /// Peak memory of the fullest rank; ranks that share a device report it as one.
    peak_bytes: usize,
    reserved_bytes: usize,
    /// Control frames per step of the rank that sends most.
    frames: f64,
    device: String,
    engine: &'static str,
    on_gpu: bool,
    /// Peak TFLOP/s of all GPUs, where it is known.
    peak: Option<f64>,
}

/// Runs the benchmark on the ranks of the workload's layout.
pub fn run(args: &Train, global: &Global, resolved: &Resolved) -> Result<ExitCode> {
    let layout = resolved.config.parallel.layout();
    // Steps are traced apart from the timed ones: tracing slows them down, and rules out CUDA graphs.
    let with_tracing = Global { trace: true, ..args.trace.with_tracing(global)? };
    let one = |rank: Rank| measure(args, global, resolved, &rank).map_err(ranks::to_core_error);
    let m = ranks::run(global, &layout, 1234, one)?.into_iter().flatten().next();
    let one = |rank: Rank| traced(args, resolved, &rank, m.as_ref()).map_err(ranks::to_core_error);
    let traced = ranks::run(&with_tracing, &layout, 1234, one)?.into_iter().flatten().next();
    let Some((m, traced)) = m.as_ref().zip(traced) else { return Ok(ExitCode::SUCCESS) };
    let written = args.trace.is_on().then_some(&traced);
    let c = Communication { trace: &traced.trace, steps: args.trace.trace_steps };
    if global.json {
        let mut value = m.json(args, resolved, layout.world()?);
        (value["communication"], value["communication_total"]) = (c.json(), c.total_json());
        value["trace"] = written.map(|t| t.json()).into();
        output::print_json(&value)?;
    } else {
        output::print(&format!("{}\n{}", m.text(args, resolved, layout.world()?), c.text()))?;
        written.map_or(Ok(()), |t| t.print(global))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Traces steps. None on ranks other than 0.
fn traced(
    args: &Train,
    resolved: &Resolved,
    rank: &Rank,
    measured: Option<&Measured>,
) -> Result<Option<Summary>> {
    let mut silent = NullObserver;
    let mut tracer = args.trace.step_tracer(&mut silent);
    let steps = args.trace.trace_steps as usize;
    bench::train_with_observer(rank.clone(), resolved, args.warmup.max(1), steps, &mut tracer)?;
    // Another process than rank 0's has no measurements, and writes no report.
    let profiled = match measured {
        Some(m) => profiled(args, resolved, &m.bench, m.step_s),
        None => Profiled {
            command: "bench train",
            name: &args.work,
            resolved,
            untraced: None,
            tokens: 0,
            context: args.packed.map_or(resolved.plan.seq_len, usize::from),
        },
    };
    args.trace.write(rank, Path::new(""), &profiled)
}

/// Times steps. None on ranks other than 0.
fn measure(args: &Train, global: &Global, resolved: &Resolved, rank: &Rank) -> Result<Option<Measured>> {
    let (document, steps) = (args.packed.map(usize::from), args.steps);
    let time = |r: &Resolved| bench::train(rank.clone(), r, args.warmup, steps, document, global.started);
    let b = time(resolved)?;
    let even = balanced(args, resolved)?.map(|r| time(&r)).transpose()?;
    let step_s = bench::max_over_ranks(&rank.world.all(), b.median())?;
    let most = |bytes: usize| bench::max_over_ranks(&rank.world.all(), bytes as f64).map(|b| b as usize);
    let (peak_bytes, reserved_bytes) = (most(b.memory.total_peak)?, most(b.memory.reserved_peak)?);
    let gpus = bench::gpus_of_all_ranks(rank)?;
    let frames = bench::max_over_ranks(&rank.world.all(), b.frames)?;
    if rank.world.rank() > 0 {
        return Ok(None);
    }
    let on_gpu = rank.device().gpu().is_some();
    let engine = rank.world.engine();
    let peak = args.peak.or_else(|| peak_by_datasheet(rank).map(|peak| peak * gpus as f64));
    let (bench, balanced, device) = (b, even, ranks::device_description(rank));
    Ok(Some(Measured {
        bench,
        balanced,
        step_s,
        peak_bytes,
        reserved_bytes,
        frames,
        device,
        engine,
        on_gpu,
        peak,
    }))
}

impl Measured {
    fn tokens_per_s(&self) -> f64 {
        self.bench.tokens as f64 / self.step_s
    }

    /// TFLOP/s of all ranks together.
    fn tflops(&self) -> f64 {
        self.tokens_per_s() * self.bench.flops_per_token / 1e12
    }

    fn text(&self, args: &Train, resolved: &Resolved, ranks: usize) -> String {
        let b = &self.bench;
        let mut rows = vec![
            vec![
                "step".into(),
                format!("{:.1} ms (median of {}, slowest rank)", self.step_s * 1e3, b.step_s.len()),
            ],
            vec!["tokens/s".into(), format::thousands(self.tokens_per_s() as u64)],
            vec![
                "TFLOP/s".into(),
                format!("{:.3} in total, {:.3} per rank", self.tflops(), self.tflops() / ranks as f64),
            ],
        ];
        if let Some(peak) = self.peak {
            rows.push(vec![
                "MFU".into(),
                format!("{:.1} % of {peak:.2} TFLOP/s of all GPUs", self.tflops() / peak * 1e2),
            ]);
        }
        if let Some(f) = &self.balanced {
            rows.push(vec![
                "balanced".into(),
                format!("{:.1} ms, {:.3} TFLOP/s", f.median() * 1e3, f.tflops()),
            ]);
        }
        // The CPU's launches are the step itself.
        if self.on_gpu {
            let (host, share) = (b.host_least() * 1e3, b.host_least() / self.step_s * 1e2);
            rows.push(vec!["CPU launch overhead".into(), format!("{host:.2} ms per step ({share:.0} %)")]);
            let how = if b.graph { "on" } else { "off" };
            rows.push(vec!["CUDA graph".into(), format!("{how} ({})", b.cuda_graph_decision.reason)]);
        }
        rows.push(vec![
            "peak memory".into(),
            format!(
                "{} on the rank with the highest peak, {} reserved",
                format_bytes(self.peak_bytes),
                format_bytes(self.reserved_bytes)
            ),
        ]);
        if self.engine != "threads" {
            rows.push(vec![
                "control frames".into(),
                format!("{:.1} per step on the busiest rank", self.frames),
            ]);
        }
        format!(
            "{} in {} on {}, over {}\n{}",
            args.work,
            precision_text(resolved),
            self.device,
            self.engine,
            output::table(&rows)
        )
    }

    fn json(&self, args: &Train, resolved: &Resolved, ranks: usize) -> Value {
        json!({
            "work": args.work,
            "ranks": ranks,
            "layout": resolved.config.parallel.layout().to_string(),
            "engine": self.engine,
            "device": self.device,
            "dtype": resolved.config.precision.dtype.name(),
            "recipe": resolved.config.precision.recipe.name(),
            "steps": self.bench.step_s.len(),
            "step_ms": self.step_s * 1e3,
            "tok_s": self.tokens_per_s(),
            "tflops": self.tflops(),
            "peak_tflops": self.peak,
            "mfu": self.peak.map(|peak| self.tflops() / peak),
            "balanced_step_ms": self.balanced.as_ref().map(|f| f.median() * 1e3),
            "control_frames": self.frames,
            "host_ms": self.bench.host_least() * 1e3,
            "cuda_graph": self.bench.graph,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "loss": self.bench.loss,
            "commit": env!("FERROTRON_COMMIT"),
        })
    }
}

/// Communication of traced steps.
struct Communication<'a> {
    trace: &'a Trace,
    steps: u64,
}

impl Communication<'_> {
    /// Per step and rank, of what is summed over traced steps and ranks.
    fn mean(&self, sum: f64) -> f64 {
        sum / (self.steps as f64 * self.trace.ranks().len().max(1) as f64)
    }

    fn text(&self) -> String {
        let heads = ["group", "collective", "calls", "ms", "hidden", "exposed"];
        let mut rows = vec![heads.map(String::from).to_vec()];
        let ms = |s: f64| format!("{:.3}", self.mean(s) * 1e3);
        let line = |group: &str, op: &str, calls: String, [total, hidden]: [f64; 2]| {
            vec![group.into(), op.into(), calls, ms(total), ms(hidden), ms(total - hidden)]
        };
        let times = self.trace.by_communication();
        for t in &times {
            let calls = format!("{:.1}", self.mean(t.calls as f64));
            rows.push(line(&t.group, &t.op, calls, [t.total, t.hidden]));
        }
        let Coverage { total, same_rank, .. } = self.trace.overlap().collectives;
        rows.push(line("all", "", String::new(), [total, same_rank]));
        format!(
            "communication per step and rank, in ms on its stream with the wait for other ranks; hidden while the rank computes\n{}",
            output::table(&rows)
        )
    }

    fn one_json(&self, total: f64, hidden: f64) -> Value {
        let [total, hidden, exposed] = [total, hidden, total - hidden].map(|s| self.mean(s) * 1e3);
        json!({ "ms": total, "hidden_ms": hidden, "exposed_ms": exposed })
    }

    /// Every kind.
    fn json(&self) -> Value {
        let row = |t: CommunicationTime| {
            let mut row = self.one_json(t.total, t.hidden);
            row["calls"] = self.mean(t.calls as f64).into();
            (row["group"], row["op"]) = (t.group.into(), t.op.into());
            row
        };
        self.trace.by_communication().into_iter().map(row).collect()
    }

    /// All of it; what runs at the same time counts once.
    fn total_json(&self) -> Value {
        let Coverage { total, same_rank, .. } = self.trace.overlap().collectives;
        self.one_json(total, same_rank)
    }
}
