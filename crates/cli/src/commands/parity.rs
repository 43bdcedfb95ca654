//! `parity`: one training step under two settings, compared tensor by tensor.

use crate::args::Global;
use crate::layout::ParitySide;
use crate::output::{self, UsageError};
use anyhow::Result;
use ferrotron_bridge::forward::ForwardOptions;
use ferrotron_bridge::{Weights, forward};
use ferrotron_core::config::{Precision, QuantRecipe, Recipe};
use ferrotron_core::model::PipelineLayout;

use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::parity::{
    Comparison, DRAWS, Outcome, Tolerance, compare, first_step, move_weights, recheck,
};
use ferrotron_core::train::Trainer;
use ferrotron_engine::Rank;
use ferrotron_tensor::DeviceKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Text of `--help`.
pub const LONG: &str = "\
Run one training step under two settings and compare loss, every gradient and every updated weight.

A side is a comma-separated list of f32, bf16 or f16; cpu, cuda or cuda:N; fp8=RECIPE; threads=N; micro_batch=N; and layout keys
(tp=2). RECIPE is current, delayed (with an amax history from earlier steps), block, mxfp8 or nvfp4. The report lists for each
tensor its relative error (norm of the difference divided by the norm of side A), the tolerance, the largest absolute difference
and a verdict, worst first.

Tolerances without --tolerance:
  only threads differ                                  bit-identical
  micro_batch, layout or (in f32) device differs       gradients 1e-5: sums are in another order
  f32 against bf16 or f16; bf16 or f16 on two devices  loss 0.02, gradients 0.1
  the same FP8 recipe on both sides                    gradients 0.05 (0.1 with current scaling where micro_batch or cp differs)
  another FP8 recipe, or one on one side only          loss 0.02, gradients 0.25 (nvfp4: 0.5)
Updated weights may differ by what such gradients change in one Adam step.

In f32, a tensor that misses its tolerance is measured: side A runs a few times more with every weight moved by one unit in the
last place. A tensor that this moves about as far as the sides are apart agrees, and is reported as ill-conditioned: rounding
alone explains its difference.

The exit code is 0 if the sides agree and 1 if they differ.";

const AFTER: &str = "\
Examples:
  ferrotron parity threads=1 threads=8               must be bit-identical
  ferrotron parity cpu cuda                          the same model on two devices
  ferrotron parity f32 bf16                          must agree within bf16 precision
  ferrotron parity bf16 bf16,fp8=current,tp=2        FP8 GEMMs on two ranks
  ferrotron parity micro_batch=1 micro_batch=4 --recipe my.toml
  ferrotron parity dp=1 tp=2,dp=2                    one rank against four
  mpirun -n 4 ferrotron parity dp=1 tp=2             ranks as MPI processes
  ferrotron parity f32 bf16 --model models/Qwen3-0.6B --input ids.safetensors";

/// Arguments of `parity`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// First setting, such as f32 or threads=1
    pub a: ParitySide,
    /// Second setting
    pub b: ParitySide,
    /// Recipe whose first step is compared
    #[arg(long, value_name = "RECIPE or FILE.toml", default_value = "tiny", conflicts_with = "model")]
    pub recipe: String,
    /// Hugging Face folder, checkpoint or run folder to run instead of a recipe
    #[arg(long, value_name = "DIR", requires = "input")]
    pub model: Option<PathBuf>,
    /// Input file for --model, as for `forward`
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Largest relative error allowed in any tensor; 0 demands identical bits [default: see above]
    #[arg(long, value_name = "X")]
    pub tolerance: Option<f64>,
    /// Override a recipe key; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Rows of the printed table.
const SHOWN: usize = 12;

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let [a, b] = [side(&args, &args.a, global, None)?, side(&args, &args.b, global, None)?];
    let tolerance = match args.tolerance {
        Some(x) if x >= 0.0 => Tolerance::all(x),
        Some(x) => return Err(UsageError::new(format!("--tolerance {x} must be 0 or more")).into()),
        None => tolerance(&a, &b),
    };
    let mut rows = compare(&a.outcome, &b.outcome, &tolerance);
    if tolerance == Tolerance::F32 && is_f32(&a) && is_f32(&b) && rows.iter().any(|r| !r.agrees) {
        let moved = |seed| Ok(side(&args, &args.a, global, Some(seed))?.outcome);
        let moved = (0..DRAWS).map(moved).collect::<Result<Vec<_>>>()?;
        recheck(&mut rows, &a.outcome, &moved);
        rows.sort_by_key(|r| r.agrees);
    }
    let differ = rows.iter().filter(|r| !r.agrees).count();
    let agree = differ == 0;
    if !global.launch.leads() {
        // Every process of a job has the full result and exits with the same code; rank 0 prints it.
    } else if global.json {
        output::print_json(&serde_json::json!({
            "a": args.a.text,
            "b": args.b.text,
            "agree": agree,
            "tensors": rows.len(),
            "different": differ,
            "identical": rows.iter().filter(|r| r.identical).count(),
            "ill_conditioned": rows.iter().filter(|r| r.is_ill_conditioned()).count(),
            "loss": [a.outcome.loss, b.outcome.loss],
            "bounds": tolerance,
            "report": rows,
        }))?;
    } else {
        output::print(&report(&args, &rows, [&a, &b]))?;
    }
    Ok(if agree { ExitCode::SUCCESS } else { ExitCode::from(output::FAILED) })
}

/// The result of one side, and the settings that decide the tolerance.
struct SideResult {
    outcome: Outcome,
    dtype: Precision,
    scaling: QuantRecipe,
    /// FP8 scales are powers of two.
    pow2: bool,
    cp: usize,
    micro_batch: usize,
    device: DeviceKind,
    ranks: usize,
}

/// Runs one side; with `ulp_seed`, with every weight moved by one unit in the last place.
fn side(args: &Args, side: &ParitySide, global: &Global, ulp_seed: Option<u64>) -> Result<SideResult> {
    let place = Global {
        device: side.device.unwrap_or(global.device),
        threads: side.threads.unwrap_or(global.threads),
        ..global.clone()
    };
    let mut recipe = match (&args.model, &args.input) {
        (Some(model), Some(input)) => return folder(model, input, side, &place, ulp_seed),
        _ => Recipe::open(&args.recipe)?,
    };
    recipe.set_all(&args.set)?;
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
    // In a job, every process computes a single-rank side by itself; a side with several ranks uses all processes.
    let alone = recipe.config.parallel.layout().world()? == 1;
    if let Some(job) = global.launch.job()?.filter(|_| !alone) {
        let given = recipe.is_set("parallel.dp");
        let layout = recipe.config.parallel.layout();
        let layout = RankLayout { dp: layout.dp.filter(|_| given), ..layout };
        let dp = Grid::new(layout, job.size)?.dp();
        recipe.put_key("parallel.dp", i64::try_from(dp).unwrap_or(i64::MAX))?;
    }
    let (resolved, weights) = ferrotron_bridge::recipe::resolve(&mut recipe)?;
    let fill = |t: &Trainer| {
        weights.as_ref().map_or(Ok(()), |w| w.fill(t))?;
        ulp_seed.map_or(Ok(()), |seed| move_weights(t, seed))
    };
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

/// Forward and backward pass of a stored model. There is no optimizer step, so no weights to compare.
fn folder(
    model: &Path,
    input: &Path,
    side: &ParitySide,
    place: &Global,
    ulp_seed: Option<u64>,
) -> Result<SideResult> {
    if side.micro_batch.is_some() {
        return Err(UsageError::new(
            "micro_batch applies to recipes; with --model the whole input is one batch",
        )
        .into());
    }
    if side.fp8.is_some() {
        return Err(
            UsageError::new("fp8 applies to recipes; use --recipe finetune-hf --set model.hf=DIR").into()
        );
    }
    let (dtype, scaling) = (side.dtype.unwrap_or(Precision::F32), QuantRecipe::None);
    let weights = Weights::open(model)?;
    let input = forward::read_input(input)?;
    let backward = input.labels.is_some();
    let layout = side.layout.grid();
    forward::check_layout(weights.model(), &layout)?;
    forward::check_dtype(weights.model(), dtype.dtype())?;
    let stages = PipelineLayout { vp: layout.vp, layout: None };
    let options = ForwardOptions { dtype: dtype.dtype(), stages, backward, ulp_seed };
    let one = |rank: Rank| {
        let kind = rank.device().kind();
        let out = forward::forward(rank, &weights, &input, &options);
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

/// True if weights and every GEMM are f32.
fn is_f32(side: &SideResult) -> bool {
    side.dtype == Precision::F32 && side.scaling == QuantRecipe::None
}

/// True if both sides sum in the same order, so that equal precision must give equal bits.
fn same(a: &SideResult, b: &SideResult) -> bool {
    a.micro_batch == b.micro_batch && a.device == b.device && a.ranks == 1 && b.ranks == 1
}

/// True if activation tensors hold different tokens on the two sides, and so have another amax.
fn other_tensors(a: &SideResult, b: &SideResult) -> bool {
    (a.micro_batch, a.cp) != (b.micro_batch, b.cp)
}

/// The default tolerance: identical bits where the arithmetic is identical.
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
        // Two devices round intermediate results to bf16 at different points.
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
    // Where every tensor is identical, the table is left out.
    let table = if identical == rows.len() { String::new() } else { worst(rows) };
    let ill = rows.iter().filter(|r| r.is_ill_conditioned()).count();
    let verdict = match differ {
        0 if ill > 0 => format!(
            "the sides agree: {} tensors, {ill} of them ill-conditioned: rounding moves them beyond their tolerance",
            rows.len()
        ),
        0 if identical == rows.len() => format!("the sides agree: all {identical} tensors are bit-identical"),
        0 => format!("the sides agree: {} tensors, {identical} of them bit-identical", rows.len()),
        n => format!("THE SIDES DIFFER: {n} of {} tensors exceed the tolerance", rows.len()),
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
        let measured = |x| format!("one ulp in the weights moves it by {}", number(x));
        let verdict = match (r.agrees, r.ulp_movement) {
            (true, Some(x)) => format!("ill-conditioned: {}", measured(x)),
            (false, Some(x)) => format!("DIFFERS; {}", measured(x)),
            (true, None) if r.identical => "identical".into(),
            (true, None) => "agrees".into(),
            (false, None) => "DIFFERS".into(),
        };
        let numbers = [r.relative, r.allowed, r.max_abs].map(number);
        let names = [r.kind.name().to_string(), r.name.clone()];
        names.into_iter().chain(numbers).chain([verdict]).collect()
    }));
    let more = match rows.len().saturating_sub(SHOWN) {
        0 => String::new(),
        n => format!("and {n} more with smaller errors; --json lists all\n"),
    };
    format!("\n{}{more}\n", output::table(&table))
}
