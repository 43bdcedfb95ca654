//! Runs a case: `train` in a process of its own, whose log and resident memory are read.

use super::results::Results;
use anyhow::{Context, Result, bail};
use ferrotron_core::events::{self, Event, Step};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Pause between two readings of resident memory.
const PAUSE: Duration = Duration::from_millis(5);
/// Steps before memory and time are steady: allocators fill, kernels are chosen.
const WARM_UP: usize = 3;

/// A run of a case.
pub struct Training<'a> {
    /// The recipe that all cases share.
    pub recipe: &'a Path,
    /// What the case sets.
    pub set: &'a [String],
    /// Folder of runs.
    pub folder: PathBuf,
    /// Options of every process: device, threads.
    pub options: &'a [String],
}

impl Training<'_> {
    /// Trains to the end. With `killed_in` it does so twice, the second time killed in that step and resumed, and fails where
    /// the second run does not give the bits of the first.
    pub fn results(&self, killed_in: Option<u64>) -> Result<Results> {
        let whole = self.finish("whole", &["--fresh"])?;
        let Some(step) = killed_in else { return results(&whole) };
        let kill = format!("fault.inject=kill:step={step}");
        let status = self.train("resumed", &["--set", &kill, "--fresh"])?.1;
        if status.success() {
            bail!("the run was not killed in step {step}; see {}", self.log("resumed").display());
        }
        let resumed = self.finish("resumed", &[])?;
        let (first, second) = (results(&whole)?, results(&resumed)?);
        for (metric, values) in &first.steps {
            let others = second.steps.get(metric).map_or(&[][..], Vec::as_slice);
            let differs = |(a, b): (&f64, &f64)| a.to_bits() != b.to_bits();
            let at = values.iter().zip(others).position(differs);
            if let Some(i) = at.or((values.len() != others.len()).then_some(others.len())) {
                bail!("resumed, step {}: {metric} is not that of the uninterrupted run", i + 1);
            }
        }
        Ok(second)
    }

    /// Runs `train`, which must end well.
    fn finish(&self, name: &str, more: &[&str]) -> Result<Finished> {
        let (resident, status) = self.train(name, more)?;
        if !status.success() {
            let log = self.log(name);
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let why = text.lines().rfind(|line| line.contains("error")).unwrap_or("no error was printed");
            bail!("train failed ({status}; see {}): {why}", log.display());
        }
        Ok(Finished { lines: events::read(&self.folder.join(name))?, resident })
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }

    /// Runs `train`; gives readings of resident memory and how it ended.
    fn train(&self, name: &str, more: &[&str]) -> Result<(Vec<(f64, f64)>, ExitStatus)> {
        std::fs::create_dir_all(&self.folder)
            .with_context(|| format!("cannot create {}", self.folder.display()))?;
        let log = self.log(name);
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(std::env::current_exe().context("where the program is")?);
        command.arg("train").arg(self.recipe).args(self.options).arg("--out").arg(self.folder.join(name));
        command.args(self.set.iter().flat_map(|pair| ["--set", pair]));
        command.args(more).stdout(file.try_clone()?).stderr(file);
        let mut child = command.spawn().context("cannot start `train`")?;
        let mut resident = Vec::new();
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok((resident, status));
            }
            resident.extend(resident_bytes(child.id()).map(|bytes| (now(), bytes)));
            std::thread::sleep(PAUSE);
        }
    }
}

struct Finished {
    lines: Vec<events::Line>,
    /// Time and resident bytes.
    resident: Vec<(f64, f64)>,
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

fn resident_bytes(process: u32) -> Option<f64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/statm")).ok()?;
    let pages: f64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as f64)
}

/// Reads results from the log of a run.
fn results(run: &Finished) -> Result<Results> {
    let mut steps: BTreeMap<u64, (&Step, f64)> = BTreeMap::new();
    for line in &run.lines {
        if let Event::Step(step) = &line.event {
            steps.insert(step.step, (step, line.time));
        }
    }
    if steps.len() <= WARM_UP {
        bail!("the run has logged {} steps", steps.len());
    }
    let mut out = Results::default();
    let (mut seconds, mut resident) = (Vec::new(), Vec::new());
    for (step, time) in steps.values() {
        let mut put = |name: &str, x: f64| out.steps.entry(name.to_string()).or_default().push(x);
        put("loss", step.loss);
        put("grad_norm", step.grad_norm);
        put("lr", step.lr);
        step.num_zeros.into_iter().for_each(|n| put("num_zeros", n as f64));
        step.losses.iter().for_each(|(name, x)| put(name, *x));
        for name in ["load_balancing_loss", "z_loss"] {
            step.more.get(name).and_then(serde_json::Value::as_f64).into_iter().for_each(|x| put(name, x));
        }
        out.memory.push(step.memory);
        seconds.push(step.seconds);
        let after = run.resident.partition_point(|(t, _)| t < time);
        resident.extend(run.resident.get(after).map(|(_, bytes)| *bytes));
    }
    let growth = resident.windows(2).skip(WARM_UP).map(|pair| pair[1] - pair[0]).collect();
    out.growth = median(growth).unwrap_or(0.0);
    out.time.extend(median(seconds.split_off(WARM_UP)).map(|s| ("step".to_string(), s)));
    Ok(out)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
