//! `bench calibrate`: measures a GPU for the planner and writes its description.

use crate::args::Global;
use crate::output::{self, UsageError};
use crate::ranks;
use anyhow::Result;
use ferrotron_core::bench::{Calibration, GpuMeasurements, calibrate, measure_gpu};
use ferrotron_core::plan::Hardware;
use ferrotron_tensor::Instrumentation;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `bench calibrate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// File to write; `ferrotron plan RECIPE --gpus 8xgpu.toml` then plans with it
    #[arg(long, value_name = "FILE.toml", default_value = "gpu.toml")]
    out: PathBuf,
    /// GPU or .toml file whose links between GPUs and overlap are taken over [default: the known GPU of that name]
    #[arg(long, value_name = "GPU")]
    links: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args, global: &Global) -> Result<ExitCode> {
    let rank = global.rank(1234, Instrumentation::default())?;
    let Some(gpu) = rank.device().gpu() else {
        let what = "bench calibrate measures a GPU, and this device is a CPU";
        return Err(UsageError::new(what).hint("run it on a GPU host, with --device cuda").into());
    };
    let known = match &args.links {
        Some(name) => Hardware::find(name)?,
        None => Hardware::of_gpu(&gpu.name)?.ok_or_else(|| {
            UsageError::new(format!("no links are known of {}", gpu.name))
                .hint("name a GPU whose links between GPUs are alike, as in --links H100")
        })?,
    };
    let live = !global.json && std::io::stderr().is_terminal();
    let mut progress = |what: &str| {
        if live {
            eprint!("\r\x1b[2Kmeasuring {what}");
        }
    };
    let measured = measure_gpu(&rank, &mut progress)?;
    if live {
        eprint!("\r\x1b[2K");
    }
    let fitted = calibrate(&known, &measured);
    let hw = &fitted.hardware;
    let text = format!(
        "# Measured by `ferrotron bench calibrate` on {}: memory, GEMMs, attention, memory-bound kernels, launches and the link\n\
         # to the host. Links between GPUs, overlap and what is said of other dtypes are those of {}.\n{}",
        gpu.name,
        known.name,
        hw.to_toml()?
    );
    std::fs::write(&args.out, text)
        .map_err(|e| UsageError::new(format!("can't write {}: {e}", args.out.display())))?;
    if global.json {
        output::print_json(&json(&fitted, &measured))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![["curve", "", "measurements", "mean error"].map(String::from).to_vec()];
    rows.extend(fitted.curves.iter().map(|c| {
        vec![c.name.into(), c.values.clone(), c.points.to_string(), format!("{:.1} %", c.error * 1e2)]
    }));
    rows.push(vec!["memory-bound kernels".into(), format!("{:.0} GB/s", hw.memory_gb_s)]);
    rows.push(vec!["a kernel's launch".into(), format!("{:.1} us", hw.kernel_us)]);
    rows.push(vec!["link to the host".into(), format!("{:.1} GB/s", hw.host_gb_s)]);
    output::print(&format!(
        "{}\n{}\n{} written\n  plan with it: ferrotron plan llama-8b --gpus 8x{}\n",
        ranks::device_description(&rank),
        output::table(&rows),
        args.out.display(),
        args.out.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn json(c: &Calibration, m: &GpuMeasurements) -> serde_json::Value {
    serde_json::json!({
        "hardware": c.hardware,
        "curves": c.curves.iter().map(|c| serde_json::json!({
            "name": c.name, "values": c.values, "measurements": c.points, "mean_error": c.error,
        })).collect::<Vec<_>>(),
        "gemms": m.gemms.iter().map(|g| serde_json::json!({
            "dtype": g.dtype,
            "gemm": format!("{:?}", g.shape.gemm).to_lowercase(),
            "experts": g.shape.experts,
            "m": g.shape.m,
            "n": g.shape.n,
            "k": g.shape.k,
            "accumulate": g.shape.accumulate,
            "seconds": g.seconds,
            "fitted_seconds": g.shape.seconds(&c.hardware, g.dtype),
        })).collect::<Vec<_>>(),
        "attention": m.attention.iter().map(|(head, length, [forward, backward])| serde_json::json!({
            "head_dim": head, "length": length, "forward_tflops": forward, "backward_tflops": backward,
            "fitted_part": c.hardware.attention.reached(*head, *length as f64 / 2.0),
        })).collect::<Vec<_>>(),
    })
}
