//! `bench kernels`: every kernel of a training step against measured GEMM and memory ceilings.

use super::bench::{Kernels, resolve};
use crate::args::Global;
use crate::output::{self, UsageError};
use crate::ranks;
use anyhow::Result;
use ferrotron_core::bench::{KernelBench, KernelWork, gemm_ceiling_size, kernels, names};
use ferrotron_tensor::Instrumentation;
use std::io::IsTerminal;
use std::process::ExitCode;

/// Runs the command.
pub fn run(args: &Kernels, global: &Global) -> Result<ExitCode> {
    if !(args.seconds >= 0.0 && args.seconds.is_finite()) {
        return Err(UsageError::new(format!("--seconds {} must be 0 or more", args.seconds)).into());
    }
    let resolved = resolve(&args.work, &args.set, args.dtype, None)?;
    let chosen = names(&resolved, &args.filter);
    if chosen.is_empty() {
        let what = format!("no kernel of {} matches --filter {:?}", args.work, args.filter);
        let all = names(&resolved, "").join(", ");
        return Err(UsageError::new(what).hint(format!("the kernels are {all}")).into());
    }
    let dtype = resolved.config.precision.dtype;
    let rank = global.rank(1234, Instrumentation::default())?;
    let threads = rank.device().threads().count();
    let live = !global.json && std::io::stderr().is_terminal();
    let mut count = 0;
    let mut done = |k: &KernelBench| {
        count += 1;
        if live {
            eprint!("\r\x1b[2K{count}/{} {}", chosen.len(), k.name);
        }
    };
    let measured = kernels(&rank, &resolved, &args.filter, args.seconds, &mut done)?;
    if live {
        eprint!("\r\x1b[2K");
    }
    if global.json {
        output::print_json(&serde_json::json!({
            "work": args.work,
            "device": ranks::device_name(&rank),
            "threads": threads,
            "dtype": dtype.name(),
            "kernels": measured.iter().map(json).collect::<Vec<_>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["kernel", "shape", "ms", "rate", "", "of ceiling", "launch us"].map(String::from).to_vec();
    let mut rows = vec![head];
    rows.extend(measured.iter().map(|k| {
        vec![
            k.name.clone(),
            k.shape.clone(),
            format!("{:.3}", k.seconds * 1e3),
            format!("{:.1}", k.rate()),
            unit(k).into(),
            format!("{:.0} %", k.share() * 1e2),
            format!("{:.1}", k.host_s * 1e6),
        ]
    }));
    let product = measured.iter().find(|k| matches!(k.work, KernelWork::Flops(_)));
    let product = product.map_or(String::new(), |k| format!(" ({:.0} GFLOP/s)", k.ceiling));
    let n = gemm_ceiling_size(&rank);
    output::print(&format!(
        "{} in {} on {}, one micro-batch; medians\n\n{}\n{}",
        args.work,
        dtype.name(),
        ranks::device_description(&rank),
        output::table(&rows),
        format_args!(
            "ceilings, measured here: GFLOP/s against a {n}x{n}x{n} GEMM{product}, GB/s against copying as many bytes\n"
        ),
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn unit(k: &KernelBench) -> &'static str {
    match k.work {
        KernelWork::Flops(_) => "GFLOP/s",
        KernelWork::Bytes(_) => "GB/s",
    }
}

fn json(k: &KernelBench) -> serde_json::Value {
    let (KernelWork::Flops(work) | KernelWork::Bytes(work)) = k.work;
    serde_json::json!({
        "name": k.name,
        "shape": k.shape,
        "calls": k.calls,
        "ms": k.seconds * 1e3,
        "work": work,
        "unit": unit(k),
        "rate": k.rate(),
        "ceiling": k.ceiling,
        "of_ceiling": k.share(),
        "host_us": k.host_s * 1e6,
    })
}
