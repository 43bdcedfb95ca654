//! `parity`: the same step twice, compared tensor by tensor.

use crate::args::Global;
use crate::layout::ParitySide;
use crate::output::{self, UsageError};
use anyhow::Result;
use ferrotron_bridge::{HfCheckpoint, forward};
use ferrotron_core::config::{Precision, QuantRecipe, Recipe};
use ferrotron_core::model::PipelineLayout;

use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::parity::{Comparison, Outcome, Tolerance, compare, first_step};
use ferrotron_core::train::Trainer;
use ferrotron_engine::Rank;
use ferrotron_tensor::DeviceKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The long help.
pub const LONG: &str = "\
One training step under two settings, compared tensor by tensor: loss, every gradient, every updated weight.

A side is a list of f32 or bf16, cpu, cuda or cuda:N, fp8=SCALING, threads=N, micro_batch=N and layout keys (tp=2). SCALING is
current, delayed (with magnitudes that were collected before), block, mxfp8 or nvfp4. The report names each tensor with its
relative error (the norm of the difference by the norm of side A), the error that is allowed, the largest single difference
and a verdict, the worst first. Allowed without --tolerance: nothing, the same bits, where only threads differ; 1e-5 of
gradients where micro_batch or, in f32, the device differs, which sums in another order; 0.1 of gradients and 0.02 of the loss
between f32 and bf16, and in bf16 between devices; with the same scaling on both sides 0.05 of gradients (0.1 with current
scaling of other micro-batches or cp, whose scales are others); with another scaling, or one on one side only, 0.02 of the
loss and 0.25 of gradients (nvfp4: 0.5). Weights may differ by what such gradients do to one step of Adam.
Exit code 0: the sides agree, 1: they do not.";

const AFTER: &str = "\
Examples:
  ferrotron parity threads=1 threads=8               must agree to the last bit
  ferrotron parity cpu cuda                          the same model on two devices
  ferrotron parity f32 bf16                          must agree within the precision of bf16
  ferrotron parity bf16 bf16,fp8=current,tp=2        8-bit products on two ranks
  ferrotron parity micro_batch=1 micro_batch=4 --recipe my.toml
  ferrotron parity dp=1 tp=2,dp=2                    one rank and four
  mpirun -n 4 ferrotron parity dp=1 tp=2             the same with processes
  ferrotron parity f32 bf16 --model models/Qwen3-0.6B --input ids.safetensors";

/// What to compare.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// One side, such as f32 or threads=1
    pub a: ParitySide,
    /// The other side
    pub b: ParitySide,
    /// The recipe whose first step is made
    #[arg(long, value_name = "RECIPE or FILE.toml", default_value = "tiny", conflicts_with = "model")]
    pub recipe: String,
    /// A Hugging Face folder instead of a recipe
    #[arg(long, value_name = "DIR", requires = "input")]
    pub model: Option<PathBuf>,
    /// Token ids for --model, as in `forward`
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Largest relative error of every tensor that counts as agreement; 0 means the same bits [default: as above]
    #[arg(long, value_name = "X")]
    pub tolerance: Option<f64>,
    /// Change a key of the recipe; may be given many times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Rows shown to people.
const SHOWN: usize = 12;

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let [a, b] = [side(&args, &args.a, global)?, side(&args, &args.b, global)?];
    let tolerance = match args.tolerance {
        Some(x) if x >= 0.0 => Tolerance::all(x),
        Some(x) => return Err(UsageError::new(format!("--tolerance {x} must be 0 or more")).into()),
        None => tolerance(&a, &b),
    };
    let rows = compare(&a.outcome, &b.outcome, &tolerance);
    let differ = rows.iter().filter(|r| !r.agrees).count();
    let agree = differ == 0;
    if !global.launch.leads() {
        // Every process of a job has the whole result, and ends with the same code.
    } else if global.json {
        output::print_json(&serde_json::json!({
            "a": args.a.text,
            "b": args.b.text,
            "agree": agree,
            "tensors": rows.len(),
            "different": differ,
            "identical": rows.iter().filter(|r| r.identical).count(),
            "loss": [a.outcome.loss, b.outcome.loss],
            "tolerance": tolerance,
            "report": rows,
        }))?;
    } else {
        output::print(&report(&args, &rows, [&a, &b]))?;
    }
    Ok(if agree { ExitCode::SUCCESS } else { ExitCode::from(output::FAILED) })
}

/// One side, done.
struct SideResult {
    outcome: Outcome,
    dtype: Precision,
    scaling: QuantRecipe,
    /// Are its scales powers of two?
    pow2: bool,
    cp: usize,
    micro_batch: usize,
    device: DeviceKind,
    ranks: usize,
}

fn side(args: &Args, side: &ParitySide, global: &Global) -> Result<SideResult> {
    let place = Global {
        device: side.device.unwrap_or(global.device),
        threads: side.threads.unwrap_or(global.threads),
        ..global.clone()
    };
    let mut recipe = match (&args.model, &args.input) {
        (Some(model), Some(input)) => return folder(model, input, side, &place),
        _ => Recipe::open(&args.recipe)?,
    };
    for assignment in &args.set {
        recipe.set(assignment)?;
    }
    if let Some(dtype) = side.dtype {
        recipe.put_key("precision.dtype", dtype.name())?;
    }
    if let Some(scaling) = side.fp8 {
        recipe.put_key("precision.recipe", scaling.to_string())?;
    }
    if let Some(n) = side.micro_batch {
        recipe.put_key("train.micro_batch", i64::try_from(n).unwrap_or(i64::MAX))?;
    }
    for (key, size) in side.layout.sizes() {
        if let Some(n) = size {
            recipe.put_key(&format!("parallel.{key}"), i64::try_from(n).unwrap_or(i64::MAX))?;
        }
    }
    // A side of one rank is computed by every process of a job for itself; another is cut over all of them.
    let alone = recipe.config.parallel.layout().world()? == 1;
    if let Some(job) = global.launch.job()?.filter(|_| !alone) {
        let given = recipe.is_set("parallel.dp");
        let layout = recipe.config.parallel.layout();
        let layout = RankLayout { dp: layout.dp.filter(|_| given), ..layout };
        let dp = Grid::new(layout, job.size)?.dp();
        recipe.put_key("parallel.dp", i64::try_from(dp).unwrap_or(i64::MAX))?;
    }
    let (resolved, weights) = ferrotron_bridge::recipe::resolve(&mut recipe)?;
    let fill = |t: &Trainer| weights.as_ref().map_or(Ok(()), |w| w.fill(t));
    let layout = resolved.config.parallel.layout();
    let one = |rank: Rank| Ok((rank.device().kind(), first_step(rank, &resolved, Some(&fill))?));
    let (seed, ranks) = (resolved.config.train.seed, layout.world()?);
    let mut all = if ranks == 1 {
        crate::ranks::run_single(&place, seed, one)?
    } else {
        crate::ranks::run(&place, &layout, seed, one)?
    };
    let (device, outcome) = all.swap_remove(0);
    let (precision, micro_batch) = (&resolved.config.precision, resolved.plan.micro_batch);
    let (dtype, scaling, pow2) = (precision.dtype, precision.recipe, precision.pow2_scales == Some(true));
    Ok(SideResult { outcome, dtype, scaling, pow2, cp: layout.cp, micro_batch, device, ranks })
}

/// Forward and backward of a Hugging Face folder: no update, so no weights to compare.
fn folder(model: &Path, input: &Path, side: &ParitySide, place: &Global) -> Result<SideResult> {
    if side.micro_batch.is_some() {
        return Err(UsageError::new("micro_batch is for recipes; with --model the input is one batch").into());
    }
    if side.fp8.is_some() {
        return Err(
            UsageError::new("fp8 is for recipes; take --recipe finetune-hf --set model.hf=DIR").into()
        );
    }
    let (dtype, scaling) = (side.dtype.unwrap_or(Precision::F32), QuantRecipe::None);
    let checkpoint = HfCheckpoint::open(model)?;
    let input = forward::read_input(input)?;
    let backward = input.labels.is_some();
    let layout = side.layout.grid();
    forward::check_layout(&checkpoint, &layout)?;
    let one = |rank: Rank| {
        let kind = rank.device().kind();
        let stages = PipelineLayout { vp: layout.vp, layout: None };
        let out = forward::forward(rank, &checkpoint, dtype.dtype(), &stages, &input, backward);
        Ok((kind, out.map_err(|e| crate::ranks::to_core_error(e.into()))?))
    };
    let mut all = match layout.world()? {
        1 => crate::ranks::run_single(place, 0, one)?,
        _ => crate::ranks::run(place, &layout, 0, one)?,
    };
    let (device, outcome) = all.swap_remove(0);
    let ranks = layout.world()?;
    let outcome = outcome.into();
    Ok(SideResult {
        outcome,
        dtype,
        scaling,
        pow2: false,
        cp: layout.cp,
        micro_batch: input.batch,
        device,
        ranks,
    })
}

/// Is everything summed in the same order?
fn same(a: &SideResult, b: &SideResult) -> bool {
    a.micro_batch == b.micro_batch && a.device == b.device && a.ranks == 1 && b.ranks == 1
}

/// Has a tensor of activations other tokens on both sides, and so another largest magnitude?
fn other_tensors(a: &SideResult, b: &SideResult) -> bool {
    (a.micro_batch, a.cp) != (b.micro_batch, b.cp)
}

/// What counts as agreement where nobody says: equal arithmetic gives equal bits.
fn tolerance(a: &SideResult, b: &SideResult) -> Tolerance {
    match (a.dtype, b.dtype) {
        _ if a.scaling != b.scaling => match [a, b].iter().any(|s| s.scaling == QuantRecipe::Nvfp4) {
            true => Tolerance::FP4,
            false => Tolerance::FP8,
        },
        (x, y) if x == y && same(a, b) => Tolerance::EXACT,
        _ if a.scaling == QuantRecipe::Fp8Current && !(a.pow2 && b.pow2) && other_tensors(a, b) => {
            Tolerance::FP8_OTHER_SCALES
        }
        _ if a.scaling != QuantRecipe::None => Tolerance::FP8_SAME_SCALES,
        // Two devices round intermediate results to bf16 at their own places.
        (Precision::F32, Precision::F32) => Tolerance::F32,
        (x, y) if x == y && a.device == b.device && a.ranks == b.ranks => Tolerance::F32,
        _ => Tolerance::BF16,
    }
}

fn report(args: &Args, rows: &[Comparison], sides: [&SideResult; 2]) -> String {
    let work = match &args.model {
        Some(model) => format!("one pass of {}", model.display()),
        None => format!("the first step of {}", args.recipe),
    };
    let losses = sides.map(|s| s.outcome.loss.map_or("none".into(), |l| format!("{l:.6}")));
    let differ = rows.iter().filter(|r| !r.agrees).count();
    let identical = rows.iter().filter(|r| r.identical).count();
    // A list of zeros says nothing.
    let table = if identical == rows.len() { String::new() } else { worst(rows) };
    let verdict = match differ {
        0 if identical == rows.len() => format!("they agree to the last bit in all {identical} tensors"),
        0 => format!("they agree: {} tensors, {identical} of them to the last bit", rows.len()),
        n => format!("THEY DIFFER: {n} of {} tensors are further apart than allowed", rows.len()),
    };
    format!(
        "{work}, {} against {}; loss {} and {}\n{table}{verdict}\n",
        args.a.text, args.b.text, losses[0], losses[1],
    )
}

/// The worst tensors as a table.
fn worst(rows: &[Comparison]) -> String {
    let number = |x: f64| if x == 0.0 { "0".to_string() } else { format!("{x:.1e}") };
    let head = ["", "", "relative error", "allowed", "largest", ""].map(String::from).to_vec();
    let mut table = vec![head];
    table.extend(rows.iter().take(SHOWN).map(|r| {
        let verdict = match (r.identical, r.agrees) {
            (true, true) => "identical",
            (false, true) => "agrees",
            _ => "DIFFERS",
        };
        let numbers = [r.relative, r.allowed, r.max_abs].map(number);
        let names = [r.kind.name().to_string(), r.name.clone()];
        names.into_iter().chain(numbers).chain([verdict.into()]).collect()
    }));
    let more = match rows.len().saturating_sub(SHOWN) {
        0 => String::new(),
        n => format!("and {n} more that are no worse; --json lists all\n"),
    };
    format!("\n{}{more}\n", output::table(&table))
}
