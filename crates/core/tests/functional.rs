//! Functional tests: every recipe of `tests/functional` against its recorded results (see its README).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::{Input, TextFormat, TokenizerInfo, build, source};
use ferrotron_core::events::{self, Event};
use ferrotron_core::ranks::on_threads_with;
use ferrotron_core::train::{LogicalValues, Observer, Run};
use ferrotron_engine::Rank;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

const WRITE: &str = "FERROTRON_FUNCTIONAL_WRITE";

/// Relative tolerance where a file states none.
const TOLERANCES: [(&str, f64); 3] = [("losses", 1e-4), ("zero_gradients", 0.02), ("peak_memory", 0.02)];

struct StopAfter(Option<u64>, u64);

impl Observer for StopAfter {
    fn event(&mut self, event: &Event) {
        if let Event::Step(s) = event {
            self.1 = s.step;
        }
    }
    fn stop(&self) -> bool {
        self.0.is_some_and(|n| self.1 >= n)
    }
}

/// Results of a run.
struct Made {
    losses: BTreeMap<u64, f64>,
    zero_gradients: u64,
    peak_memory: u64,
    state: [Vec<LogicalValues>; 2],
}

/// Continues the run of a folder to its end, or until it is stopped.
fn run(r: &Resolved, dir: &Path, stop: Option<u64>) -> Made {
    let make = || Ok(Rank::cpu(1, r.config.train.seed)?);
    let all = on_threads_with(
        &r.config.parallel.layout(),
        Duration::from_secs(60),
        Default::default(),
        make,
        |rank| {
            let sources = source::open(r)?;
            let mut run = Run::open(rank, r.clone(), dir, None)?;
            run.train(&*sources.train, sources.eval.as_deref(), &mut StopAfter(stop, 0))?;
            let t = &run.trainer;
            // Before the test itself allocates anything.
            let peak = t.rank.device().memory().total_peak as u64;
            Ok((t.count_zero_grads()?, peak, [t.weights()?, t.expert_tables()?]))
        },
    );
    let (zero_gradients, peak_memory, state) = all.unwrap().remove(0);
    let step = |l: events::Line| match l.event {
        Event::Step(s) => Some((s.step, s.loss)),
        _ => None,
    };
    let losses = events::read(dir).unwrap().into_iter().filter_map(step).collect();
    Made { losses, zero_gradients, peak_memory, state }
}

/// The text of the license, by lines.
fn fixed_text(prefix: &Path) {
    let license = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../LICENSE"));
    let bytes = |text: &str| Ok(text.bytes().map(u32::from).collect());
    let input = Input { path: license.into(), format: TextFormat::Text };
    build(&[input], &bytes, Some(0), &TokenizerInfo::bytes(), prefix, &|_, _| {}).unwrap();
}

/// Runs a case and returns its differences.
fn check(path: &Path) -> Result<(), String> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut recipe = Recipe::default();
    recipe.add(&path.display().to_string(), &text).map_err(|e| e.to_string())?;
    let data = tempfile::tempdir().unwrap();
    let prefix = data.path().join("text");
    fixed_text(&prefix);
    recipe.set(&format!("data.path={:?}", prefix.display().to_string())).map_err(|e| e.to_string())?;
    let resolved = recipe.resolve(None).map_err(|e| e.to_string())?;
    let file = path.with_extension("json");
    let expected: Map<String, Value> = match std::fs::read_to_string(&file) {
        Ok(text) => serde_json::from_str(&text).map_err(|e| format!("{}: {e}", file.display()))?,
        Err(_) => Map::new(),
    };
    let known = ["losses", "zero_gradients", "peak_memory", "tolerances", "stop_after", "steps"];
    if let Some(key) = expected.keys().find(|k| !known.contains(&k.as_str())) {
        return Err(format!("{}: {key} is none of {}", file.display(), known.join(", ")));
    }
    let dir = tempfile::tempdir().unwrap();
    let whole = run(&resolved, dir.path(), None);
    if let Some(stop) = expected.get("stop_after") {
        let stop = stop.as_u64().ok_or("stop_after is no number of steps")?;
        let dir = tempfile::tempdir().unwrap();
        let part = run(&resolved, dir.path(), Some(stop));
        if part.losses.len() as u64 != stop || part.losses.len() >= whole.losses.len() {
            return Err(format!("it made {} steps in place of {stop}", part.losses.len()));
        }
        let resumed = run(&resolved, dir.path(), None);
        if resumed.losses != whole.losses || resumed.state != whole.state {
            return Err(format!("resumed: {:?} instead of {:?}", resumed.losses, whole.losses));
        }
    }
    let filled = fill(&expected, &whole);
    if ["losses", "zero_gradients", "peak_memory"].iter().any(|k| !expected.contains_key(*k)) {
        let text = serde_json::to_string_pretty(&filled).unwrap() + "\n";
        if std::env::var_os(WRITE).is_some() {
            std::fs::write(&file, text).unwrap();
            return Ok(());
        }
        return Err(format!("{} is not complete; write ({WRITE}=1 does it)\n{text}", file.display()));
    }
    compare(&expected, &filled)
}

/// The expected file of a run; hand-written fields stay.
fn fill(expected: &Map<String, Value>, made: &Made) -> Map<String, Value> {
    let last = made.losses.len() as u64;
    let listed = expected.get("losses").and_then(Value::as_object).map(|l| l.keys().cloned().collect());
    let steps = expected.get("steps").and_then(Value::as_array);
    let steps = steps.map(|list| list.iter().map(|s| s.to_string()).collect());
    let default = || [1, last / 2, last].iter().map(u64::to_string).collect();
    let steps: Vec<String> = steps.or(listed).unwrap_or_else(default);
    let loss = |step: String| {
        let x = step.parse().ok().and_then(|n: u64| made.losses.get(&n)).copied();
        (step, json!(x))
    };
    let mut out = expected.clone();
    out.insert("losses".into(), Value::Object(steps.into_iter().map(loss).collect()));
    out.insert("zero_gradients".into(), json!(made.zero_gradients));
    out.insert("peak_memory".into(), json!(made.peak_memory));
    let given = expected.get("tolerances").and_then(Value::as_object).cloned().unwrap_or_default();
    let mut tolerances: Map<String, Value> =
        TOLERANCES.map(|(k, x)| (k.into(), json!(x))).into_iter().collect();
    tolerances.extend(given);
    out.insert("tolerances".into(), Value::Object(tolerances));
    out
}

fn compare(wanted: &Map<String, Value>, ours: &Map<String, Value>) -> Result<(), String> {
    let room = |key: &str| ours["tolerances"][key].as_f64().ok_or(format!("tolerances.{key} is no number"));
    let near = |what: &str, a: &Value, b: &Value, room: f64| {
        let (Some(x), Some(y)) = (a.as_f64(), b.as_f64()) else {
            return Err(format!("{what}: {a} instead of {b}"));
        };
        if (x - y).abs() <= room * y.abs() {
            return Ok(());
        }
        Err(format!("{what}: {x} instead of {y}, where {room} of it is allowed"))
    };
    let losses = wanted["losses"].as_object().ok_or("losses are no table of steps")?;
    if losses.is_empty() {
        return Err("no loss is listed".into());
    }
    for (step, loss) in losses {
        near(&format!("loss of step {step}"), &ours["losses"][step], loss, room("losses")?)?;
    }
    for key in ["zero_gradients", "peak_memory"] {
        near(key, &ours[key], &wanted[key], room(key)?)?;
    }
    Ok(())
}

fn folder() -> PathBuf {
    let named = std::env::var_os("FERROTRON_FUNCTIONAL").map(PathBuf::from);
    named.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/functional")))
}

#[test]
fn every_case_matches_its_recorded_results() {
    let entries = std::fs::read_dir(folder()).unwrap().map(|e| e.unwrap().path());
    let mut files: Vec<PathBuf> = entries.collect();
    files.sort();
    let is = |p: &Path, ending: &str| p.extension().is_some_and(|e| e == ending);
    let cases: Vec<&PathBuf> = files.iter().filter(|p| is(p, "toml")).collect();
    assert!(!cases.is_empty(), "no case in {}", folder().display());
    let lonely = files.iter().find(|p| is(p, "json") && !p.with_extension("toml").exists());
    assert!(lonely.is_none(), "{lonely:?} has no recipe beside it");
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|p| check(p).err().map(|e| format!("{}: {e}", p.file_stem().unwrap().display())))
        .collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn a_difference_is_reported() {
    let losses: BTreeMap<u64, f64> = (1..=4).map(|s| (s, 5.0 - s as f64)).collect();
    let made = |loss: f64, zeros: u64, peak: u64| Made {
        losses: losses.iter().map(|(s, l)| (*s, l * loss)).collect(),
        zero_gradients: zeros,
        peak_memory: peak,
        state: [Vec::new(), Vec::new()],
    };
    let kept = serde_json::from_value(json!({"steps": [2, 4], "tolerances": {"losses": 1e-3}})).unwrap();
    let wanted = fill(&kept, &made(1.0, 100, 1000));
    assert_eq!(wanted["losses"], json!({"2": 3.0, "4": 1.0}));
    let seen = |m: Made| compare(&wanted, &fill(&wanted, &m)).err();
    assert_eq!(seen(made(1.0009, 101, 1019)), None);
    assert!(seen(made(1.0011, 100, 1000)).unwrap().contains("loss of step"));
    assert!(seen(made(f64::NAN, 100, 1000)).is_some());
    assert!(seen(made(1.0, 103, 1000)).unwrap().contains("zero_gradients"));
    assert!(seen(made(1.0, 100, 1021)).unwrap().contains("peak_memory"));
}
