//! `--profile`: the report of some steps, one HTML page that needs nothing beside it.
//!
//! Style, script and data are in the page, and a content security policy lets nothing else run or load. The data is a JSON block
//! without `<`, and the script sets all of it as text.

use crate::commands::bench;
use crate::machine::Memory;
use crate::{format, ranks};
use anyhow::{Context, Result};
use ferrotron_core::Error;
use ferrotron_core::config::{Resolved, STORED_CONFIG};
use ferrotron_core::profile::{DeviceRates, Measurement, Profile};
use ferrotron_engine::Rank;
use ferrotron_tensor::MemoryReport;
use ferrotron_tensor::trace::Trace;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;

const PAGE: &str = include_str!("profile/page.html");
const STYLE: &str = concat!(include_str!("commands/watch/web/page.css"), include_str!("profile/page.css"));
const SCRIPT: &str = concat!(include_str!("commands/watch/web/charts.js"), include_str!("profile/page.js"));

/// What was profiled, and what its steps were like without a trace.
#[derive(Clone, Debug)]
pub struct Profiled<'a> {
    /// `train` or `bench train`.
    pub command: &'static str,
    /// The recipe or workload.
    pub name: &'a str,
    /// The recipe.
    pub resolved: &'a Resolved,
    /// Median seconds of the steps that were not traced, and how many.
    pub untraced: Option<(f64, usize)>,
    /// Tokens of a step, of all ranks.
    pub tokens: u64,
    /// Tokens of a document.
    pub context: usize,
}

/// What a rank measures beside its trace.
pub struct RankMeasurement {
    memory: MemoryReport,
    /// Or why there are none.
    rates: Result<DeviceRates, String>,
    capacity: Option<usize>,
    device: String,
    on_gpu: bool,
    peak_tflops: Option<f64>,
}

impl RankMeasurement {
    /// Measures on every rank at once, after the traced steps: ranks of a machine share it.
    pub fn take(rank: &Rank, p: &Profiled) -> Result<RankMeasurement> {
        // Before the buffers of the measurement.
        let memory = rank.device().memory();
        rank.world.all().barrier("rates are measured")?;
        let rates = DeviceRates::measure(rank, p.resolved, p.context).map_err(|e| e.to_string());
        let sharing = if rank.world.engine() == "threads" { rank.world.size() } else { 1 };
        let memory_of_device = match rank.device().gpu() {
            Some(gpu) => Some(gpu.memory),
            None => Memory::look().total.map(|bytes| bytes as usize),
        };
        Ok(RankMeasurement {
            memory,
            rates,
            capacity: memory_of_device.map(|bytes| bytes / sharing.max(1)),
            device: ranks::device_description(rank),
            on_gpu: rank.device().gpu().is_some(),
            peak_tflops: bench::peak_by_datasheet(rank)
                .map(|peak| peak * (rank.world.size() / sharing) as f64),
        })
    }

    /// The profile of the traced steps.
    pub fn profile(&self, trace: &Trace, p: &Profiled) -> Result<Profile> {
        Ok(Profile::new(&Measurement {
            resolved: p.resolved,
            trace,
            step_s: p.untraced.map(|(seconds, _)| seconds),
            tokens: p.tokens,
            context: p.context,
            rates: self.rates.as_ref().ok().copied(),
            capacity: self.capacity,
            on_gpu: self.on_gpu,
            memory: self.memory.clone(),
        })?)
    }
}

/// Texts around a profile.
#[derive(Serialize)]
struct Subject {
    title: String,
    untraced_steps: usize,
    idle_s: f64,
    peak_tflops: Option<f64>,
    on_gpu: bool,
    has_rates: bool,
    no_rates: Option<String>,
    about: Vec<(&'static str, String)>,
    notes: Vec<String>,
}

#[derive(Serialize)]
struct PageData<'a> {
    subject: Subject,
    profile: &'a Profile,
}

/// Writes the page of a profile whose trace is at `trace`.
pub fn write(file: &Path, trace: &Path, m: &RankMeasurement, p: &Profiled, profile: &Profile) -> Result<()> {
    let data = PageData { subject: subject(trace, m, p, profile), profile };
    // A script block ends at the first `</script`, whatever its type.
    let json = serde_json::to_string(&data)?.replace('<', "\\u003c");
    let page = PAGE
        .replace("%NONCE%", &nonce()?)
        .replace("%STYLE%", STYLE)
        .replace("%SCRIPT%", SCRIPT)
        .replacen("%PROFILE%", &json, 1);
    Ok(std::fs::write(file, page).map_err(|e| Error::io_doing(file, "write the profile", e))?)
}

fn subject(trace: &Path, m: &RankMeasurement, p: &Profiled, profile: &Profile) -> Subject {
    let (r, ranks) = (p.resolved, profile.ranks);
    let c = &r.config;
    let layout = c.parallel.layout().to_string();
    let mut about = vec![
        ("recipe", format!("{} ({})", p.name, p.command)),
        ("device", m.device.clone()),
        (
            "ranks",
            if ranks > 1 {
                format!("{ranks} ({layout}); memory and rates are those of rank 0")
            } else {
                "1".into()
            },
        ),
        (
            "model",
            format!("{} parameters, {} layers", format::count(r.model.parameters() as u64), r.model.layers),
        ),
        ("precision", bench::precision_text(r)),
        (
            "batch",
            format!(
                "{} sequences of {} tokens, micro-batches of {}",
                c.train.global_batch, r.plan.seq_len, r.plan.micro_batch
            ),
        ),
        (
            "step time",
            match p.untraced {
                Some((_, n)) => {
                    format!("median of {n} steps that were not traced; {} were traced", profile.steps)
                }
                None => format!("mean of {} traced steps", profile.steps),
            },
        ),
        ("trace", format!("{} (open it in ui.perfetto.dev)", trace.display())),
        ("version", format!("{} {}", env!("CARGO_PKG_VERSION"), env!("FERROTRON_COMMIT"))),
    ];
    if p.command == "train" {
        about.push(("configuration", format!("{STORED_CONFIG} in the run folder")));
    }
    let mut notes = Vec::new();
    if p.untraced.is_none() {
        notes.push(
            "All steps of this run were traced, the first among them, which also allocates and tunes: give it more --steps for \
             numbers that last."
                .to_string(),
        );
    }
    if m.on_gpu {
        notes.push(
            "Traced steps are launched kernel by kernel; without --profile a step may replay a CUDA graph."
                .into(),
        );
    }
    notes.push("Expected gains are computed from the times above and measured rates, each as if it were the only change.".into());
    Subject {
        title: format!("{} · {}", p.name, m.device),
        untraced_steps: p.untraced.map_or(0, |(_, n)| n),
        idle_s: profile.idle_s(),
        peak_tflops: m.peak_tflops,
        on_gpu: m.on_gpu,
        has_rates: m.rates.is_ok(),
        no_rates: m.rates.as_ref().err().cloned(),
        about,
        notes,
    }
}

/// Names the page's own script and style in its security policy.
fn nonce() -> Result<String> {
    let mut bytes = [0u8; 16];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    anyhow::ensure!(got.context("no random numbers")? == bytes.len(), "no random numbers for the page");
    Ok(bytes.iter().fold(String::new(), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    }))
}
