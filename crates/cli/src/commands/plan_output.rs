//! What `plan` prints.

use crate::args::Global;
use crate::{format, output};
use anyhow::Result;
use ferrotron_core::pipeline::ScheduleKind;
use ferrotron_core::plan::published::Comparison;
use ferrotron_core::plan::{
    GemmDtype, LayoutPlan, Machine, SearchResult, StepTime, Workload, recompute_sets,
};
use ferrotron_tensor::format_bytes;
use serde_json::{Value, json};

/// The best plan in full, and why the runner-ups lose.
pub fn print_plans(
    found: &SearchResult,
    name: &str,
    workload: &Workload,
    machine: &Machine,
    global: &Global,
) -> Result<()> {
    if global.json {
        let plans = found.plans.iter().map(|p| as_json(p, workload, machine)).collect::<Result<Vec<_>>>()?;
        return output::print_json(&json!({
            "recipe": name,
            "gpus": machine.gpus,
            "gpu": machine.hardware.name,
            "considered": found.considered,
            "plans": plans,
        }));
    }
    let Some((best, others)) = found.plans.split_first() else { return Ok(()) };
    let hw = &machine.hardware;
    let mut out = format!(
        "{name} on {} x {} ({} a GPU, NVLink domains of {}): the best of {} layouts\n\n",
        machine.gpus,
        hw.name,
        format_bytes(hw.memory()),
        hw.domain().min(machine.gpus),
        format::thousands(found.considered as u64)
    );
    out += &format!("{}\n\n", layout_text(best, machine.gpus));
    out += &rates(best, workload, machine)?;
    out += &times(&best.time);
    out += &memory(best, machine);
    if !others.is_empty() {
        out += "\nrunner-ups\n";
        let rows: Vec<Vec<String>> = others
            .iter()
            .map(|p| {
                let slower = p.time.total / best.time.total - 1.0;
                vec![
                    format!("  +{:.1} %", 100.0 * slower),
                    layout_text(p, machine.gpus),
                    why(&p.time, &best.time),
                ]
            })
            .collect();
        out += &output::table(&rows);
    }
    out += &format!("\nrun it\n  ferrotron train {name} {}\n", keys(best, workload, machine.gpus));
    output::print(&out)
}

/// The lines above the picture of a step.
pub fn picture_titles(
    p: &LayoutPlan,
    name: &str,
    workload: &Workload,
    machine: &Machine,
) -> Result<(String, String)> {
    let (r, seconds) = (Rates::of(p, workload, machine)?, p.time.total);
    let title = format!("{name} on {} x {}: one step of {seconds:.3} s", machine.gpus, machine.hardware.name);
    let subtitle = format!(
        "{}; {} micro-batches; {} tokens/s a GPU, MFU {:.1} % of the bf16 peak",
        layout_text(p, machine.gpus),
        workload.micro_batches(&p.candidate),
        format::thousands((r.tokens / machine.gpus as f64).round() as u64),
        100.0 * r.mfu
    );
    Ok((title, subtitle))
}

/// tp=4 pp=8 vp=5 dp=2, micro-batch 1, ZeRO-1, no recomputation
pub fn layout_text(p: &LayoutPlan, gpus: usize) -> String {
    let (c, l) = (&p.candidate, &p.candidate.layout);
    let dp = gpus / (l.tp * l.cp * l.pp).max(1);
    let sizes =
        [("tp", l.tp), ("cp", l.cp), ("pp", l.pp), ("vp", l.vp), ("ep", l.ep), ("etp", l.etp()), ("dp", dp)];
    let mut sizes: Vec<String> =
        sizes.iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name}={n}")).collect();
    if sizes.is_empty() {
        sizes.push("one rank".into());
    }
    let zero = if dp * l.cp > 1 { format!(", ZeRO-{}", c.zero) } else { String::new() };
    let schedule = if c.schedule == ScheduleKind::ZeroBubble { ", zero-bubble" } else { "" };
    let precision = if c.dtype == GemmDtype::Bf16 { "" } else { c.dtype.name() };
    let comma = if precision.is_empty() { "" } else { ", " };
    let host = match (p.host.layers, p.host.optimizer > 0.0) {
        (0, false) => String::new(),
        (0, true) => ", optimizer state in host memory".into(),
        (n, false) => format!(", activations of {n} layers of a chunk in host memory"),
        (n, true) => format!(", optimizer state and activations of {n} layers of a chunk in host memory"),
    };
    format!(
        "{}, micro-batch {}{zero}{schedule}, {}{comma}{precision}{host}",
        sizes.join(" "),
        c.micro_batch,
        recomputed(p)
    )
}

fn recomputed(p: &LayoutPlan) -> &'static str {
    const NAMES: [&str; 4] = [
        "nothing recomputed",
        "norms and activations recomputed",
        "MLPs and norms recomputed",
        "layers recomputed",
    ];
    let at = recompute_sets().iter().position(|r| *r == p.candidate.recompute);
    at.and_then(|i| NAMES.get(i)).copied().unwrap_or("recomputation as given")
}

/// What the recipe must change to run a plan, as options of the command line.
fn keys(p: &LayoutPlan, workload: &Workload, gpus: usize) -> String {
    let mut out = p.changes(&workload.recipe, gpus);
    // The recipe of the workload has the plan's own offloading, and stands for all of FP8 and FP4.
    out.retain(|s| !s.starts_with("--set offload."));
    out.extend(p.host.settings().iter().map(|s| format!("--set {s}")));
    match p.candidate.dtype {
        GemmDtype::Fp8 => out.push("--set precision.recipe=fp8-current".into()),
        GemmDtype::Mxfp8 => out.push("--set precision.recipe=mxfp8".into()),
        GemmDtype::Nvfp4 => out.push("--set precision.recipe=nvfp4".into()),
        GemmDtype::Bf16 => out.push("--set precision.recipe=none".into()),
    }
    out.join(" ")
}

/// Throughput of a plan.
struct Rates {
    tokens: f64,
    tflops: f64,
    mfu: f64,
    hours: f64,
}

impl Rates {
    fn of(p: &LayoutPlan, workload: &Workload, machine: &Machine) -> Result<Rates> {
        let r = &workload.recipe;
        let gpus = machine.gpus as f64;
        let tokens = workload.tokens() / p.time.total;
        let tflops = tokens * r.flops_per_token(r.plan.seq_len as f64)?.total() / gpus / 1e12;
        let mfu = tflops / machine.hardware.gemm.bf16.peak;
        Ok(Rates { tokens, tflops, mfu, hours: r.plan.tokens as f64 / tokens * gpus / 3600.0 })
    }
}

fn rates(p: &LayoutPlan, workload: &Workload, machine: &Machine) -> Result<String> {
    let r = Rates::of(p, workload, machine)?;
    let whole = |x: f64| format::thousands(x.round().max(0.0) as u64);
    Ok(format!(
        "step {:.3} s for {} tokens: {} tokens/s, {} a GPU, {}, MFU {:.1} % of the bf16 peak\n{} tokens a day; the recipe's {} tokens take {} GPU-hours\n\n",
        p.time.total,
        whole(workload.tokens()),
        whole(r.tokens),
        whole(r.tokens / machine.gpus as f64),
        format::tflops(r.tflops),
        100.0 * r.mfu,
        format::count((r.tokens * 86_400.0) as u64),
        format::count(workload.recipe.plan.tokens),
        whole(r.hours),
    ))
}

/// Parts of a step by name.
fn parts(t: &StepTime) -> [(&'static str, f64); 11] {
    let p = &t.passes;
    [
        ("GEMMs", p.gemm),
        ("attention", p.attention),
        ("memory-bound kernels", p.memory),
        ("exposed TP communication", p.tp),
        ("exposed CP communication", p.cp),
        ("exposed EP communication", p.ep),
        ("waiting for the host", p.host),
        ("waiting for offloaded tensors", t.offload),
        ("pipeline bubble", t.bubble),
        ("exposed DP communication", t.dp),
        ("optimizer", t.optimizer),
    ]
}

fn times(t: &StepTime) -> String {
    let rows: Vec<Vec<String>> = parts(t)
        .iter()
        .filter(|(_, s)| *s > 5e-4 * t.total)
        .map(|(name, s)| {
            vec![format!("  {name}"), format!("{:.1} ms", s * 1e3), format!("{:.1} %", 100.0 * s / t.total)]
        })
        .collect();
    format!("time\n{}", output::table(&rows))
}

fn memory(p: &LayoutPlan, machine: &Machine) -> String {
    let m = &p.memory;
    let rows = [
        ("weights", m.parameters),
        ("gradients", m.gradients),
        ("optimizer state", m.optimizer),
        ("activations", m.activations),
        ("workspace", m.workspace),
        ("total", m.total()),
    ];
    let share = |b: usize| format!("{:.0} %", 100.0 * b as f64 / machine.hardware.memory() as f64);
    let rows: Vec<Vec<String>> =
        rows.iter().map(|(n, b)| vec![format!("  {n}"), format_bytes(*b), share(*b)]).collect();
    format!("memory of the rank that needs most\n{}", output::table(&rows))
}

/// The part in which a plan loses most against the best, and the one in which it gains most, if that makes up for much of it.
fn why(t: &StepTime, best: &StepTime) -> String {
    let mut more: Vec<(&str, f64)> =
        parts(t).iter().zip(&parts(best)).map(|((name, a), (_, b))| (*name, a - b)).collect();
    more.sort_by(|a, b| b.1.total_cmp(&a.1));
    let (Some((lost, most)), Some((won, least))) = (more.first(), more.last()) else { return String::new() };
    if *most <= 0.0 {
        return "as fast".into();
    }
    let gain = match -least > 0.5 * most {
        true => format!(", {won} {} less", short_seconds(-least)),
        false => String::new(),
    };
    format!("{lost} {} more{gain}", short_seconds(*most))
}

fn short_seconds(s: f64) -> String {
    if s < 1.0 { format!("{:.1} ms", s * 1e3) } else { format!("{s:.2} s") }
}

fn as_json(p: &LayoutPlan, workload: &Workload, machine: &Machine) -> Result<Value> {
    let (c, l) = (&p.candidate, &p.candidate.layout);
    let r = Rates::of(p, workload, machine)?;
    Ok(json!({
        "layout": { "tp": l.tp, "cp": l.cp, "pp": l.pp, "vp": l.vp, "ep": l.ep, "etp": l.etp(),
                    "dp": machine.gpus / (l.tp * l.cp * l.pp).max(1) },
        "zero": c.zero,
        "micro_batch": c.micro_batch,
        "recompute": recomputed(p),
        "precision": c.dtype,
        "schedule": if c.schedule == ScheduleKind::ZeroBubble { "zero-bubble" } else { "1f1b" },
        "seconds": p.time,
        "memory": p.memory,
        "memory_total": p.memory.total(),
        "tokens_per_second": r.tokens,
        "tflops_per_gpu": r.tflops,
        "mfu": r.mfu,
        "gpu_hours": r.hours,
        "host_memory": p.host,
        "set": keys(p, workload, machine.gpus),
    }))
}

/// A row for every combination of the varied keys.
pub fn print_varied(
    rows: &[(Vec<usize>, Option<LayoutPlan>)],
    keys: &[String],
    workload: &Workload,
    machine: &Machine,
    global: &Global,
) -> Result<()> {
    if global.json {
        let all = rows
            .iter()
            .map(|(values, plan)| {
                let named: serde_json::Map<String, Value> =
                    keys.iter().cloned().zip(values.iter().map(|v| json!(v))).collect();
                let plan = plan.as_ref().map(|p| as_json(p, workload, machine)).transpose()?;
                Ok(json!({ "fixed": named, "plan": plan }))
            })
            .collect::<Result<Vec<_>>>()?;
        return output::print_json(&all);
    }
    let mut table = vec![
        keys.iter().cloned().chain(["step", "tokens/s/GPU", "memory", "plan"].map(String::from)).collect(),
    ];
    for (values, plan) in rows {
        let mut row: Vec<String> = values.iter().map(usize::to_string).collect();
        match plan {
            Some(p) => {
                let each = workload.tokens() / p.time.total / machine.gpus as f64;
                row.extend([
                    format!("{:.3} s", p.time.total),
                    format::thousands(each.round() as u64),
                    format_bytes(p.memory.total()),
                    layout_text(p, machine.gpus),
                ]);
            }
            None => row.push("does not fit".into()),
        }
        table.push(row);
    }
    output::print(&output::table(&table))
}

/// Errors of the cost model by family and hardware, and the rows that it predicts worst.
pub fn print_published(all: &[Comparison], global: &Global) -> Result<()> {
    if global.json {
        let rows = all
            .iter()
            .map(|c| {
                Ok(json!({ "row": c.row.title(), "half": c.row.text("half"), "published": c.row.tokens()?,
                           "predicted": c.predicted, "error": c.error()?, "seconds": c.time }))
            })
            .collect::<Result<Vec<_>>>()?;
        return output::print_json(&rows);
    }
    let mut groups: std::collections::BTreeMap<String, Vec<f64>> = std::collections::BTreeMap::new();
    for c in all {
        let (half, error) = (c.row.text("half"), c.error()?.abs());
        for of in [c.row.text("model"), c.row.text("system")] {
            groups.entry(format!("{half}  {of}")).or_default().push(error);
        }
        groups.entry(format!("{half}  all")).or_default().push(error);
    }
    let mut table =
        vec![["half  rows of", "rows", "median error", "90th percentile"].map(String::from).to_vec()];
    for (name, errors) in &mut groups {
        errors.sort_by(f64::total_cmp);
        let at = |q: f64| errors[((errors.len() - 1) as f64 * q).round() as usize];
        let percent = |x: f64| format!("{:.1} %", 100.0 * x);
        table.push(vec![name.clone(), errors.len().to_string(), percent(at(0.5)), percent(at(0.9))]);
    }
    let mut worst: Vec<(&Comparison, f64)> =
        all.iter().map(|c| Ok((c, c.error()?))).collect::<Result<Vec<_>>>()?;
    worst.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    let rows: Vec<Vec<String>> = worst
        .iter()
        .take(10)
        .map(|(c, e)| vec![format!("{:+.0} %", 100.0 * e), c.row.text("half").into(), c.row.title()])
        .collect();
    output::print(&format!(
        "{}\nworst rows, predicted over published tokens/s\n{}",
        output::table(&table),
        output::table(&rows)
    ))
}
