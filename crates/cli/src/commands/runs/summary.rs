//! What a run folder says of its run, from the two ends of its log: a list of long runs stays quick.

use anyhow::{Context, Result};
use ferrotron_core::events::{Ending, Event, FILE_NAME, Line, is_run};
use ferrotron_core::{fs, train};
use serde::{Serialize, Serializer};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes read of the beginning of a log, and of its end.
const HEAD: u64 = 64 << 10;
const TAIL: u64 = 1 << 20;
/// Steps whose tokens/s are averaged.
const RECENT: usize = 20;

/// Where a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A process holds its folder.
    Running,
    /// Every step is done.
    Finished,
    /// An error ended it.
    Failed,
    /// It was asked to stop, or killed; the same command resumes.
    Interrupted,
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            State::Running => "running",
            State::Finished => "finished",
            State::Failed => "failed",
            State::Interrupted => "interrupted",
        })
    }
}

/// A run in a list.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The folder, relative to the one that was listed.
    pub name: String,
    /// The folder.
    pub path: PathBuf,
    /// Recipe or file.
    pub recipe: String,
    /// Where it stands.
    pub state: State,
    /// Steps done.
    pub step: u64,
    /// Steps of the whole run, where its start is in the log.
    pub steps: Option<u64>,
    /// Training loss of the newest step.
    #[serde(serialize_with = "finite")]
    pub loss: Option<f64>,
    /// Loss of the newest evaluation.
    #[serde(serialize_with = "finite")]
    pub eval_loss: Option<f64>,
    /// Mean over the newest steps.
    pub tokens_per_s: Option<f64>,
    /// Why it failed or stopped early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The newest event.
    pub last_event: Option<LastEvent>,
}

/// The newest event of a run.
#[derive(Clone, Debug, Serialize)]
pub struct LastEvent {
    /// What happened: `step`, `checkpoint`, `run_end`, …
    pub kind: String,
    /// When, in seconds since 1970.
    pub time: f64,
}

fn finite<S: Serializer>(x: &Option<f64>, s: S) -> Result<S::Ok, S::Error> {
    x.filter(|x| x.is_finite()).serialize(s)
}

/// The runs in `dir`, or `dir` itself if it is one, the newest event first.
pub fn find(dir: &Path) -> Result<Vec<Summary>> {
    if is_run(dir) {
        return Ok(vec![Summary::read(dir, &dir.display().to_string())?]);
    }
    let mut runs = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("{}: cannot be listed", dir.display()))? {
        let path = entry.with_context(|| format!("{}: cannot be listed", dir.display()))?.path();
        if is_run(&path) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            runs.push(Summary::read(&path, &name)?);
        }
    }
    let time = |run: &Summary| run.last_event.as_ref().map_or(0.0, |e| e.time);
    runs.sort_by(|a, b| time(b).total_cmp(&time(a)).then_with(|| a.name.cmp(&b.name)));
    Ok(runs)
}

impl Summary {
    /// Reads a run folder; lines that are no events are passed over.
    pub fn read(dir: &Path, name: &str) -> Result<Summary> {
        let lines = ends(&dir.join(FILE_NAME))?;
        let mut run = Summary {
            name: name.to_string(),
            path: dir.to_path_buf(),
            recipe: String::new(),
            state: State::Interrupted,
            step: 0,
            steps: None,
            loss: None,
            eval_loss: None,
            tokens_per_s: None,
            reason: None,
            last_event: None,
        };
        let mut rates = Vec::new();
        for Line { event, time } in &lines {
            let kind = serde_json::to_value(event).ok().and_then(|v| v["kind"].as_str().map(String::from));
            run.last_event = Some(LastEvent { kind: kind.unwrap_or_default(), time: *time });
            match event {
                Event::RunStart(e) => (run.recipe, run.steps) = (e.recipe.clone(), Some(e.steps)),
                Event::Step(e) => {
                    (run.step, run.loss) = (e.step, Some(e.loss));
                    rates.push(e.tokens_per_s);
                }
                // A run may go on for longer than it was begun.
                Event::Resume(e) => {
                    let steps = e.changes.iter().find(|c| c.key == "train.steps");
                    run.steps = steps.and_then(|c| c.new.parse().ok()).or(run.steps);
                }
                Event::Eval(e) => run.eval_loss = Some(e.loss),
                Event::RunEnd(e) => {
                    run.step = e.step;
                    run.reason.clone_from(&e.reason);
                    run.state = match e.ending {
                        Ending::Finished => State::Finished,
                        Ending::Interrupted => State::Interrupted,
                        Ending::Failed => State::Failed,
                    };
                }
                _ => {}
            }
        }
        let recent = &rates[rates.len().saturating_sub(RECENT)..];
        run.tokens_per_s = (!recent.is_empty()).then(|| recent.iter().sum::<f64>() / recent.len() as f64);
        if train::is_running(dir) {
            run.state = State::Running;
        }
        Ok(run)
    }
}

/// The events at the beginning and the end of a log.
fn ends(path: &Path) -> Result<Vec<Line>> {
    let mut file = fs::open_regular(path)?;
    let failed = || format!("{}: cannot be read", path.display());
    let length = file.metadata().with_context(failed)?.len();
    let mut bytes = Vec::new();
    if length <= HEAD + TAIL {
        file.read_to_end(&mut bytes).with_context(failed)?;
    } else {
        file.by_ref().take(HEAD).read_to_end(&mut bytes).with_context(failed)?;
        // The cut line of the head and that of the tail become one that is no event.
        file.seek(SeekFrom::End(-(TAIL as i64))).with_context(failed)?;
        file.read_to_end(&mut bytes).with_context(failed)?;
    }
    Ok(bytes.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
}
