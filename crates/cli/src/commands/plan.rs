//! `plan`: what fits on a machine, how fast, and why, before anything runs.

use super::plan_output::{picture_titles, print_plans, print_published, print_varied};
use crate::args::Global;
use crate::output::UsageError;
use anyhow::Result;
use ferrotron_core::config::Recipe;
use ferrotron_core::plan::{
    Constraints, GemmDtype, Hardware, HostMemory, LayoutPlan, Machine, SearchResult, Workload, draw_step,
    gpus_that_fit, published, search,
};
use ferrotron_tensor::{format_bytes, gpus};
use std::path::PathBuf;
use std::process::ExitCode;

/// The long help.
pub const LONG: &str = "\
Search every legal layout of a recipe on a number of GPUs for the fastest that fits.

Tensor, context, pipeline and expert parallelism, tensor parallelism inside experts, chunks per stage, schedule, ZeRO
stage, micro-batch and recomputation are chosen together. Nothing runs: times come from a description of the GPU and its
links, memory from the estimate that training itself uses. No GPU is needed.";

const AFTER: &str = "\
Examples:
  ferrotron plan llama-8b --gpus 8xH100
  ferrotron plan llama-8b --gpus 64xB200 --precision mxfp8 --set train.global_batch=512
  ferrotron plan llama-8b --gpus 8xH200 --layout tp=2,pp=1      what is fixed; the rest is chosen
  ferrotron plan llama-8b --gpus 8xH200 --vary tp,pp            the best of every tp and pp
  ferrotron plan llama-70b --gpus 64xH100 --svg step.svg        a picture of one step
  ferrotron plan llama-8b --gpus 16xmy-gpu.toml                 another GPU, as docs/plan.md says
  ferrotron plan --published rows.csv                           the cost model beside published throughput";

/// Arguments of `plan`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Built-in recipe or TOML file
    #[arg(value_name = "RECIPE", required_unless_present = "published")]
    recipe: Option<String>,
    /// GPUs: a number and a kind (H100, H200, B200, GB200, B300, GB300 or a .toml file), or `this`
    #[arg(long, value_name = "NxGPU", required_unless_present = "published")]
    gpus: Option<String>,
    /// Override a recipe key; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Operands of GEMMs; `any`: the fastest that the GPU has [default: as the recipe says]
    #[arg(long, value_name = "DTYPE", value_parser = ["bf16", "fp8", "mxfp8", "nvfp4", "any"])]
    precision: Option<String>,
    /// Fix parts of the layout (tp=4,pp=2); keys: tp, cp, pp, vp, ep, etp, zero, micro_batch, recompute, schedule, precision
    #[arg(long, value_name = "LAYOUT", default_value = "")]
    layout: String,
    /// Also search what to keep in host memory: activations of some layers, optimizer state, both
    #[arg(long, conflicts_with = "vary")]
    offload: bool,
    /// Print the best plan for every value of these keys, as in tp,pp; keys: tp, cp, pp, vp, ep, etp, zero, micro_batch
    #[arg(long, value_name = "KEYS", value_delimiter = ',')]
    vary: Vec<String>,
    /// Draw one step of the best plan: pipeline timeline, exposed communication, memory of each pipeline rank
    #[arg(long, value_name = "FILE", conflicts_with = "vary")]
    svg: Option<PathBuf>,
    /// Runner-ups to print
    #[arg(long, value_name = "N", default_value_t = 4)]
    top: usize,
    /// Compare the cost model with published rows (CSV)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["recipe", "gpus", "vary", "svg"])]
    published: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    if let Some(path) = &args.published {
        let text = std::fs::read_to_string(path)
            .map_err(|e| UsageError::new(format!("can't read {}: {e}", path.display())))?;
        let rows = published::read_rows(&text)?;
        print_published(&published::compare_all(&rows)?, global)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (Some(name), Some(gpus)) = (&args.recipe, &args.gpus) else {
        return Err(UsageError::new("plan takes a recipe and --gpus").into());
    };
    let machine = if gpus == "this" { this_machine()? } else { parse_machine(gpus)? };
    let mut limits = Constraints::free(dtypes(name, &args, &machine)?);
    let usage = |e: ferrotron_core::Error| UsageError::new(e.to_string());
    limits.fix(&args.layout).map_err(|e| UsageError::new(format!("--layout: {e}")))?;
    check_varied(&args.vary)?;
    let mut variants = Vec::new();
    for dtype in limits.dtypes.iter().copied() {
        let limits = Constraints { dtypes: vec![dtype], ..limits.clone() };
        let workload = workload(name, &args, &machine, dtype)?;
        let sets = if args.offload { HostMemory::sets(workload.recipe.model.layers) } else { Vec::new() };
        let offloaded: Vec<Workload> = sets.iter().map(|set| workload.with_host_memory(*set)).collect();
        variants.extend([workload].into_iter().chain(offloaded).map(|w| (w, limits.clone())));
    }
    let [(first, first_limits), ..] = &variants[..] else {
        return Err(UsageError::new("no precision to plan with").into());
    };
    if !args.vary.is_empty() {
        if variants.len() > 1 {
            return Err(UsageError::new("--vary takes one --precision, not any").into());
        }
        let rows = varied(first, &machine, first_limits, &args.vary)?;
        print_varied(&rows, &args.vary, first, &machine, global)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut found = SearchResult { considered: 0, plans: Vec::new(), least_memory: None };
    for (workload, limits) in &variants {
        let one = search(workload, &machine, limits, args.top + 1).map_err(usage)?;
        found.considered += one.considered;
        found.plans.extend(one.plans);
        found.least_memory = [found.least_memory, one.least_memory].into_iter().flatten().reduce(f64::min);
    }
    found.plans.sort_by(|a, b| a.time.total.total_cmp(&b.time.total));
    found.plans.truncate(args.top + 1);
    let Some(best) = found.plans.first() else {
        return Err(UsageError::new(nothing_fits(first, &machine, first_limits, &found)).into());
    };
    let is_best = |(w, limits): &&(Workload, Constraints)| {
        limits.dtypes.contains(&best.candidate.dtype) && HostMemory::of(&w.recipe) == best.host
    };
    let workload = variants.iter().find(is_best).map_or(first, |(w, _)| w);
    if let Some(path) = &args.svg {
        let trace = workload.trace(&machine.hardware, &best.candidate)?;
        let (title, subtitle) = picture_titles(best, name, workload, &machine)?;
        let picture = draw_step(&trace, &title, &subtitle, machine.hardware.memory());
        std::fs::write(path, picture)
            .map_err(|e| UsageError::new(format!("can't write {}: {e}", path.display())))?;
    }
    print_plans(&found, name, workload, &machine, global)?;
    Ok(ExitCode::SUCCESS)
}

/// Operands of GEMMs to choose from.
fn dtypes(name: &str, args: &Args, machine: &Machine) -> Result<Vec<GemmDtype>> {
    let mut recipe = Recipe::open(name)?;
    recipe.set_all(&args.set)?;
    let hw = &machine.hardware;
    let dtype = match args.precision.as_deref() {
        Some("any") => {
            // Experts have bf16 and FP8 GEMMs.
            let moe = workload(name, args, machine, GemmDtype::Bf16)?.recipe.model.moe.is_some();
            let known = |d: &GemmDtype| hw.curve(*d).is_some() && (!moe || *d <= GemmDtype::Fp8);
            return Ok(GemmDtype::ALL.into_iter().filter(known).collect());
        }
        asked => GemmDtype::ALL
            .into_iter()
            .find(|d| Some(d.name()) == asked)
            .unwrap_or_else(|| GemmDtype::of(recipe.config.precision.recipe)),
    };
    Ok(vec![dtype])
}

/// The recipe as the planner takes it, with GEMMs of `dtype`.
fn workload(name: &str, args: &Args, machine: &Machine, dtype: GemmDtype) -> Result<Workload> {
    let mut recipe = Recipe::open(name)?;
    recipe.set_all(&args.set)?;
    // A plan needs no data.
    if !recipe.is_set("data.path") {
        recipe.set("data.path=embedded")?;
    }
    if machine.hardware.curve(dtype).is_none() {
        let (name, dtype) = (&machine.hardware.name, dtype.name().to_uppercase());
        return Err(
            UsageError::new(format!("{name} has no {dtype} GEMMs; take --precision bf16 or fp8")).into()
        );
    }
    // Which GEMMs are quantized is the same for all recipes of FP8 and FP4.
    let quantized = if dtype == GemmDtype::Bf16 { "none" } else { "fp8-current" };
    recipe.set(&format!("precision.recipe={quantized}"))?;
    let recipe = recipe.resolve(None)?;
    Ok(Workload { recipe, gpus: machine.gpus, gradient_bytes: 4.0, overlap_param_gather: true })
}

/// GPUs as an option names them.
pub fn parse_machine(text: &str) -> Result<Machine> {
    Ok(Machine::parse(text).map_err(|e| UsageError::new(e.to_string()))?)
}

/// The GPUs of this machine.
pub(super) fn this_machine() -> Result<Machine> {
    let all = gpus().unwrap_or_default();
    let Some(first) = all.first() else {
        return Err(UsageError::new("this machine has no GPU; name one, as in --gpus 8xH100").into());
    };
    let hardware = Hardware::of_gpu(&first.name)?.ok_or_else(|| {
        UsageError::new(format!(
            "no description of {}; `ferrotron bench calibrate --out gpu.toml` measures one, to be named as --gpus {}xgpu.toml",
            first.name,
            all.len()
        ))
    })?;
    Ok(Machine { gpus: all.len(), hardware })
}

/// Keys with numbers for values, which `--vary` takes.
const VARIED: [&str; 8] = ["tp", "cp", "pp", "vp", "ep", "etp", "zero", "micro_batch"];

fn check_varied(keys: &[String]) -> Result<()> {
    for (i, key) in keys.iter().enumerate() {
        if !VARIED.contains(&key.as_str()) {
            let what = format!("--vary {key}: the keys are {}", VARIED.join(", "));
            return Err(UsageError::new(what).into());
        }
        if keys[..i].contains(key) {
            return Err(UsageError::new(format!("--vary: {key} is given twice")).into());
        }
    }
    Ok(())
}

/// The best plan for every combination of the values of some keys.
fn varied(
    workload: &Workload,
    machine: &Machine,
    limits: &Constraints,
    keys: &[String],
) -> Result<Vec<(Vec<usize>, Option<LayoutPlan>)>> {
    let mut combinations: Vec<Vec<usize>> = vec![Vec::new()];
    for key in keys {
        let values: Vec<usize> = match key.as_str() {
            "zero" => vec![0, 1, 2, 3],
            _ => (0..=6)
                .map(|i| 1 << i)
                .filter(|n| key == "vp" || key == "micro_batch" || *n <= machine.gpus)
                .collect(),
        };
        combinations = combinations
            .iter()
            .flat_map(|c| values.iter().map(move |v| c.iter().copied().chain([*v]).collect()))
            .collect();
    }
    let mut rows = Vec::new();
    for values in combinations {
        let mut fixed = limits.clone();
        let text: Vec<String> = keys.iter().zip(&values).map(|(k, v)| format!("{k}={v}")).collect();
        fixed.fix(&text.join(","))?;
        // What is no legal layout has no row.
        if let Ok(found) = search(workload, machine, &fixed, 1) {
            rows.push((values, found.plans.into_iter().next()));
        }
    }
    Ok(rows)
}

/// One sentence with the nearest thing that works.
pub(super) fn nothing_fits(
    workload: &Workload,
    machine: &Machine,
    limits: &Constraints,
    found: &SearchResult,
) -> String {
    let hw = &machine.hardware;
    let needs = found.least_memory.map_or(String::new(), |b| {
        format!(
            "; the smallest of {} layouts needs about {} on a GPU",
            found.considered,
            format_bytes(b as usize)
        )
    });
    if let Some(gpus) = gpus_that_fit(workload, machine, limits) {
        return format!(
            "nothing fits in the {} of {} {}{needs}; {gpus} would do",
            format_bytes(hw.memory()),
            machine.gpus,
            hw.name
        );
    }
    format!(
        "nothing fits in the {} of {} {}{needs}; take a smaller model or a shorter data.seq_len",
        format_bytes(hw.memory()),
        machine.gpus,
        hw.name
    )
}
