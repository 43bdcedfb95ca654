//! `bench comm`: time and bandwidth of collectives.

use crate::args::Global;
use crate::{output, ranks};
use anyhow::Result;
use ferrotron_core::bench::{COLLECTIVES, CommBench, FORMULA, comm, sizes};
use ferrotron_core::config::Precision;
use ferrotron_core::grid::RankLayout;
use ferrotron_engine::Rank;
use ferrotron_tensor::format_bytes;
use std::process::ExitCode;

/// Text of `--help`.
pub const LONG: &str = "\
Benchmark every collective from 1 KiB to 64 MiB: time per call, algorithm bandwidth and bus bandwidth, as nccl-tests define
them.

Ranks are threads of this process, on the CPU or sharing one GPU, or the processes of a launcher: on the CPU over MPI or, on one
host, shared memory; over NCCL with one GPU each. The size is that of a rank's tensor for all-reduce, broadcast and message, and of the full gathered,
scattered or exchanged tensor otherwise. Algorithm bandwidth is size / time. Bus bandwidth is algorithm bandwidth x 2(n-1)/n for
all-reduce and x (n-1)/n for all-gather, reduce-scatter and all-to-all: what the slowest link of a ring carries, which is
comparable between numbers of ranks. `message` is a send-recv around the ring: every rank sends to the next and receives
from the previous. Host time is what a rank's host takes to issue one call: with NCCL the enqueue and what is checked before it,
with threads and MPI the call itself. Own time is the part of it outside NCCL. Frames are control messages between hosts that
the busiest rank sends per call; over NCCL they are heartbeats, however many calls there are.";

const AFTER: &str = "\
Examples:
  ferrotron bench comm --ranks 4
  ferrotron bench comm --device cuda --ranks 2 --filter all-reduce
  mpirun -n 4 ferrotron bench comm --json";

/// Arguments of `bench comm`.
#[derive(Debug, clap::Args)]
#[command(long_about = LONG, after_help = AFTER)]
pub struct Args {
    /// Number of ranks as threads of this process; under a launcher its processes are the ranks [default: 2]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Only collectives whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub filter: String,
    /// Dtype: f32, bf16 or f16 [default: f32 and bf16]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Largest size in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    pub largest: usize,
    /// Seconds to time each size
    #[arg(long, value_name = "S", default_value_t = 0.1)]
    pub seconds: f64,
}

/// Runs the command.
pub fn run(args: &Args, global: &Global) -> Result<ExitCode> {
    let ranks = global.world_size(args.ranks)?.unwrap_or(2);
    let collectives: Vec<_> = COLLECTIVES.into_iter().filter(|k| k.name().contains(&args.filter)).collect();
    if collectives.is_empty() {
        let names = COLLECTIVES.map(|k| k.name()).join(", ");
        let what = format!("--filter {:?} matches none of {names}", args.filter);
        return Err(output::UsageError::new(what).into());
    }
    let dtypes = args.dtype.map_or(vec![Precision::F32, Precision::Bf16], |d| vec![d]);
    let layout = RankLayout { dp: Some(ranks), ..RankLayout::default() };
    let one = |rank: Rank| {
        let mut rows = Vec::new();
        for kind in &collectives {
            for dtype in &dtypes {
                for bytes in sizes(args.largest) {
                    rows.push(comm(&rank, *kind, dtype.dtype(), bytes, args.seconds)?);
                }
            }
        }
        Ok((ranks::device_description(&rank), rank.world.engine(), rows))
    };
    let (device, engine, rows) = ranks::run(global, &layout, 0, one)?.swap_remove(0);
    if !global.launch.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    if global.json {
        output::print_json(&serde_json::json!({
            "ranks": ranks,
            "engine": engine,
            "device": device,
            "formula": FORMULA,
            "results": rows,
        }))?;
    } else {
        output::print(&format!("{device}, over {engine}\n{}\n{FORMULA}\n", table(&rows)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(rows: &[CommBench]) -> String {
    let head = [
        "collective",
        "type",
        "bytes",
        "time",
        "host time",
        "own time",
        "frames",
        "algorithm GB/s",
        "bus GB/s",
    ]
    .map(String::from);
    let mut out = vec![head.to_vec()];
    out.extend(rows.iter().map(|r| {
        vec![
            r.collective.to_string(),
            r.dtype.to_string(),
            format_bytes(r.bytes),
            short(r.seconds),
            short(r.host_seconds),
            r.own_seconds.map_or("-".into(), short),
            format!("{:.2}", r.frames),
            format!("{:.3}", r.algorithm),
            format!("{:.3}", r.bus),
        ]
    }));
    output::table(&out)
}

/// 12.3 us, 4.56 ms, 1.23 s.
fn short(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}
