//! `runs export`: the metrics of a run for other programs.

use crate::args::Global;
use crate::output;
use anyhow::Result;
use ferrotron_core::events::{self, Line, Metrics, TENSORBOARD, TensorBoard};
use ferrotron_core::{fs, train};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The name of exported metrics in a run folder.
const CSV: &str = "metrics.csv";

/// Arguments of `runs export`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run folder
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// What to write: TensorBoard event files, or CSV with a row for every step
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub format: ExportFormat,
    /// Where to [default: RUN/tensorboard, RUN/metrics.csv]; - writes CSV to standard output
    #[arg(long, value_name = "PATH")]
    pub output: Option<PathBuf>,
}

/// Formats of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ExportFormat {
    /// TensorBoard event files: scalars and histograms.
    Tensorboard,
    /// A row for every step, a column for every metric; of distributions their minimum, mean and maximum.
    Csv,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let written = match args.format {
        ExportFormat::Tensorboard => {
            let own = args.run.join(TENSORBOARD);
            let dir = args.output.unwrap_or_else(|| own.clone());
            // The run that writes there would go on in a file without a name.
            let _lock = if dir == own { Some(train::lock_run(&args.run)?) } else { None };
            TensorBoard::create(&args.run, &dir)?.path().to_path_buf()
        }
        ExportFormat::Csv => {
            let text = csv(&events::read(&args.run)?);
            match args.output {
                Some(path) if path == Path::new("-") => {
                    output::print(&text)?;
                    return Ok(ExitCode::SUCCESS);
                }
                path => {
                    let path = path.unwrap_or_else(|| args.run.join(CSV));
                    fs::write_atomic(&path, text.as_bytes())?;
                    path
                }
            }
        }
    };
    if global.json {
        output::print_json(&json!({ "path": written }))?;
    } else {
        output::print(&format!("wrote {}\n", written.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A row for every step with an event that has metrics, in order; of steps that were done again the last.
fn csv(lines: &[Line]) -> String {
    let mut rows: BTreeMap<u64, (f64, BTreeMap<String, f64>)> = BTreeMap::new();
    let mut columns = BTreeSet::new();
    for line in lines {
        let Metrics { mut scalars, distributions } = Metrics::of(&line.event);
        for (name, x) in distributions {
            let finite: Vec<f64> = x.into_iter().filter(|x| x.is_finite()).collect();
            let fold = |of: fn(f64, f64) -> f64| finite.iter().copied().reduce(of).unwrap_or(f64::NAN);
            scalars.push((format!("{name}/min"), fold(f64::min)));
            scalars.push((format!("{name}/mean"), fold(|a, b| a + b) / finite.len() as f64));
            scalars.push((format!("{name}/max"), fold(f64::max)));
        }
        if scalars.is_empty() {
            continue;
        }
        let (time, row) = rows.entry(line.event.step()).or_default();
        *time = line.time;
        for (name, x) in scalars {
            columns.insert(name.clone());
            row.insert(name, x);
        }
    }
    let names: Vec<String> = columns.iter().map(|name| quoted(name)).collect();
    let mut out = Vec::new();
    // Writing to memory cannot fail.
    let _ = writeln!(out, "step,time{}", names.iter().map(|n| format!(",{n}")).collect::<String>());
    for (step, (time, row)) in rows {
        let _ = write!(out, "{step},{time}");
        for name in &columns {
            let _ = match row.get(name) {
                Some(x) => write!(out, ",{x}"),
                None => write!(out, ","),
            };
        }
        out.push(b'\n');
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// A field of a CSV file (RFC 4180).
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_core::events::{Eval, Event, Step};

    #[test]
    fn a_row_has_the_metrics_of_its_step_and_the_last_of_steps_done_again() {
        let step = |step, loss| {
            let more = [("moe/load_layer_0".to_string(), json!([1, 3]))].into();
            Event::Step(Step { step, loss, more, ..Step::default() })
        };
        let members = [("a,\"b\"".to_string(), 0.1)].into();
        let eval = Event::Eval(Eval { step: 2, loss: 0.25, members, ..Eval::default() });
        let lines: Vec<Line> = [step(1, 3.0), step(2, 9.0), step(2, f64::NAN), eval]
            .into_iter()
            .zip(1..)
            .map(|(event, t)| Line { event, time: f64::from(t) })
            .collect();
        let text = csv(&lines);
        let mut all = text.lines();
        let head = all.next().unwrap();
        assert!(head.starts_with("step,time,eval/loss,\"eval/members/a,\"\"b\"\"\",eval/tokens,"), "{head}");
        assert!(head.contains(",moe/load_layer_0/max,moe/load_layer_0/mean,moe/load_layer_0/min,"), "{head}");
        let rows: Vec<&str> = all.collect();
        assert!(rows[0].starts_with("1,1,,,,3,2,1,"), "{text}");
        assert!(rows[1].starts_with("2,4,0.25,0.1,0,3,2,1,") && rows[1].contains(",NaN,"), "{text}");
        assert_eq!(rows.len(), 2);
    }
}
