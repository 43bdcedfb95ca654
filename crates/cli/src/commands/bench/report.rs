//! What `bench train` prints of one rank.

use super::Train;
use super::train::Measured;
use crate::{format, output, ranks};
use ferrotron_core::bench;
use ferrotron_core::config::{QuantRecipe, Resolved};
use ferrotron_tensor::{Category, format_bytes};
use serde_json::{Value, json};

/// The measurements and the roofline of a step as JSON.
pub(super) fn json(
    args: &Train,
    m: &Measured,
    least: &[bench::RooflinePart],
    ceilings: &bench::Ceilings,
) -> Value {
    let (rank, b, (peak, _)) = (&m.rank, &m.steps, &m.peak);
    let precision = &m.resolved.config.precision;
    let categories: serde_json::Map<_, _> =
        Category::ALL.iter().zip(b.memory.peak).map(|(c, bytes)| (c.name().into(), bytes.into())).collect();
    let roofline_s: f64 = least.iter().map(|p| p.floor_s).sum();
    let by_part: serde_json::Map<_, _> =
        least.iter().map(|p| (p.category.name().into(), (p.floor_s * 1e3).into())).collect();
    json!({
        "work": args.work,
        "device": ranks::device_name(rank),
        "threads": rank.device().threads().count(),
        "dtype": precision.dtype.name(),
        "recipe": precision.recipe.name(),
        "step_ms": b.median() * 1e3,
        "tok_s": b.tokens_per_s(),
        "best_tok_s": b.tokens as f64 / b.step_s[0],
        "tflops": b.tflops(),
        "peak_tflops": peak,
        "mfu": m.mfu(),
        "peak_bytes": b.memory.total_peak,
        "peak_bytes_by_category": categories,
        "reserved_bytes": b.memory.reserved_peak,
        "host_bytes": b.memory.host.peak,
        "offload": b.offload.map(|o| json!({
            "movable_bytes": o.movable,
            "moved_bytes": o.moved,
            "peak_reduction_bytes": o.peak_reduction,
            "window_bytes": o.window,
            "to_host_gb_s": o.link.to_host / 1e9,
            "from_host_gb_s": o.link.from_host / 1e9,
            "expected_stall_ms": o.expected_stall * 1e3,
            "measured_stall_ms": o.measured_stall.map(|s| s * 1e3),
        })),
        "link_gb_s": m.link.map(|l| json!({
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
        "split_overflows": b.routing.as_ref().map(|r| r.overflows),
        "balanced": m.balanced.as_ref().map(|f| json!({
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
        "plan": m.plan.as_ref().map(|(time, memory)| json!({
            "step_ms": time.total * 1e3,
            "seconds": time,
            "peak_bytes": memory.total(),
        })),
        "kernel_ms": args.trace.profile.is_some().then(|| {
            let steps = b.step_s.len() as f64;
            let ms = |t: &std::time::Duration| t.as_secs_f64() * 1e3 / steps;
            b.profile.iter().map(|(k, (_, t))| (k.to_string(), ms(t).into())).collect::<serde_json::Map<_, _>>()
        }),
        "trace": m.traced.as_ref().map(|t| t.json()),
    })
}

/// Workload, device, and a table of the measurements.
pub(super) fn summary(args: &Train, m: &Measured) -> String {
    format!(
        "{} in {} on {}\n{}",
        args.work,
        precision_text(&m.resolved),
        ranks::device_description(&m.rank),
        output::table(&rows(m))
    )
}

fn rows(m: &Measured) -> Vec<Vec<String>> {
    let (b, (peak, source)) = (&m.steps, &m.peak);
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
        vec!["MFU".into(), format!("{:.1} % of {peak:.2} TFLOP/s{source}", m.mfu() * 1e2)],
        vec!["start".into(), format::seconds(b.start_s)],
        vec!["first step".into(), format!("{} after the process started", format::seconds(b.first_step_s))],
    ];
    if let Some(r) = &b.routing {
        rows.push(vec!["routing".into(), routing(r)]);
    }
    if let Some((f, r)) = m.balanced.as_ref().and_then(|f| Some((f, f.routing.as_ref()?))) {
        let (ms, rate) = (f.median() * 1e3, format::thousands(f.tokens_per_s() as u64));
        let text = format!("{ms:.1} ms, {rate} tokens/s, {:.3} TFLOP/s, routing {}", f.tflops(), routing(r));
        rows.push(vec!["balanced".into(), text]);
    }
    if m.rank.device().gpu().is_some() {
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
    if let Some((time, memory)) = &m.plan {
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
    if let Some(l) = m.link {
        let [to, from, both] = [l.to_host, l.from_host, l.both].map(|rate| rate / 1e9);
        let text = format!("{to:.1} GB/s to the host, {from:.1} GB/s back; both at once {both:.1} GB/s each");
        rows.push(vec!["link".into(), text]);
    }
    rows
}

/// The routing and its load imbalance as text.
fn routing(r: &bench::RoutingReport) -> String {
    let loads =
        r.imbalance().map_or_else(String::new, |x| format!(" (most loaded expert {x:.2} x the mean)"));
    let overflows = match r.overflows {
        0 => String::new(),
        1 => ", 1 overflow (moe.split_headroom)".into(),
        n => format!(", {n} overflows (moe.split_headroom)"),
    };
    format!("{}{loads}{overflows}", r.name())
}

/// The compute precision, and the FP8 recipe if there is one.
pub fn precision_text(r: &Resolved) -> String {
    let p = &r.config.precision;
    match p.recipe {
        QuantRecipe::None => p.dtype.name().into(),
        scaling => format!("{} with {} scaling in the layers", p.dtype.name(), scaling.name()),
    }
}

/// Time by part of the step against its roofline.
pub(super) fn parts(parts: &[bench::RooflinePart], c: bench::Ceilings, b: &bench::TrainBench) -> String {
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
pub(super) fn profile(b: &bench::TrainBench, layers: usize) -> String {
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
