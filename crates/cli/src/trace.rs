//! `--trace` and `--profile`: a timeline of some steps, with time by kernel and overlap of communication with compute.

use crate::args::Global;
use crate::profile::{self, Profiled, RankMeasurement};
use crate::{output, ranks, shell};
use anyhow::Result;
use ferrotron_core::data::Batches;
use ferrotron_core::events::{Event, Step};
use ferrotron_core::profile::Profile;
use ferrotron_core::train::{Observer, Outcome, Run};
use ferrotron_core::{Error, Result as Core};
use ferrotron_engine::Rank;
use ferrotron_tensor::trace::{Coverage, KernelTime, Trace};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Rows of a table; the rest is summed up in one.
const LINES: usize = 20;

/// Options of `--trace`.
#[derive(Clone, Debug, clap::Args)]
pub struct TraceArgs {
    /// Write a trace of the last steps (all kernels and collectives of all ranks) for ui.perfetto.dev
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// Write an HTML report of the last steps, and a trace: timeline, roofline, memory, what to change
    #[arg(long, value_name = "FILE.html", num_args = 0..=1, require_equals = true)]
    pub profile: Option<Option<PathBuf>>,
    /// Number of steps in the trace or report
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..), hide_default_value = true)]
    pub trace_steps: u64,
}

/// Name of a report unless one is given.
const REPORT: &str = "profile.html";

impl TraceArgs {
    /// True if steps are to be traced.
    pub fn is_on(&self) -> bool {
        self.trace.is_some() || self.profile.is_some()
    }

    /// The global options, with tracing on if `--trace` or `--profile` is given. Fails here, not at the end of the run, if a
    /// file cannot be written.
    pub fn with_tracing(&self, global: &Global) -> Result<Global> {
        let report = self.profile.as_ref().and_then(Option::as_ref);
        let files = [(self.trace.as_ref(), "write the trace"), (report, "write the profile")];
        for (file, what) in files.into_iter().filter(|_| global.launch.leads()) {
            if let Some(file) = file {
                // What an earlier run wrote stays until there is something to replace it.
                let is_new = !file.exists();
                let open = std::fs::OpenOptions::new().append(true).create(true).open(file);
                open.and_then(|_| if is_new { std::fs::remove_file(file) } else { Ok(()) })
                    .map_err(|e| Error::io_doing(file, what, e))?;
            }
        }
        Ok(Global { trace: self.is_on(), ..global.clone() })
    }

    /// The report, if one is asked for; without a name it is in `folder`.
    fn report(&self, folder: &Path) -> Option<PathBuf> {
        Some(self.profile.as_ref()?.clone().unwrap_or_else(|| folder.join(REPORT)))
    }

    /// Trains as [`Run::train`] does and writes trace and report. Rank 0 gets their summary. `context` is the mean length of
    /// documents, where they vary.
    pub fn train(
        &self,
        run: &mut Run,
        (name, context): (&str, Option<f64>),
        data: &dyn Batches,
        eval: Option<&dyn Batches>,
        observer: &mut dyn Observer,
    ) -> Core<(Outcome, Option<Summary>)> {
        if !self.is_on() {
            return Ok((run.train(data, eval, observer)?, None));
        }
        let first = run.trainer.step() + 1;
        let mut tracer = self.step_tracer(observer);
        let outcome = run.train(data, eval, &mut tracer)?;
        let seen = std::mem::take(&mut tracer.seen);
        let (resolved, seq_len) = (&run.resolved, run.resolved.plan.seq_len);
        let last_untraced = resolved.plan.steps.saturating_sub(self.trace_steps);
        // The first step also allocates and tunes.
        let untraced = seen.iter().filter(|s| s.step > first && s.step <= last_untraced).map(|s| s.seconds);
        let tokens = match seen.as_slice() {
            [.., before, last] if last.step == before.step + 1 => last.tokens - before.tokens,
            _ => (resolved.config.train.global_batch * seq_len) as u64,
        };
        let profiled = Profiled {
            command: "train",
            name,
            resolved,
            untraced: median(untraced.collect()),
            tokens,
            context: context.map_or(seq_len, |n| (n.round() as usize).clamp(1, seq_len.max(1))),
        };
        // An interrupted run ends at once, without its last steps.
        let profile = if outcome.finished { self.profile.clone() } else { None };
        let asked = TraceArgs { profile, ..self.clone() };
        let write = || asked.write(&run.trainer.rank, run.dir(), &profiled).map_err(ranks::to_core_error);
        let summary = if asked.is_on() { write()? } else { None };
        Ok((outcome, summary))
    }

    /// Gathers the traces of all ranks; rank 0 writes trace and report, as far as they are asked for, and gets the summary.
    /// Files without a name are in `folder`.
    pub fn write(&self, rank: &Rank, folder: &Path, profiled: &Profiled) -> Result<Option<Summary>> {
        let report = self.report(folder);
        let trace = gather(rank)?;
        let measured = report.is_some().then(|| RankMeasurement::take(rank, profiled)).transpose()?;
        let Some(trace) = trace else { return Ok(None) };
        let file = self.trace.clone().or_else(|| Some(report.as_ref()?.with_extension("trace.json")));
        let file = file.unwrap_or_default();
        if self.is_on() && !trace.is_empty() {
            std::fs::write(&file, trace.chrome_json())
                .map_err(|e| Error::io_doing(&file, "write the trace", e))?;
        }
        let profile = match report.zip(measured).filter(|_| !trace.is_empty()) {
            Some((report, measured)) => {
                let profile = measured.profile(&trace, profiled)?;
                profile::write(&report, &file, &measured, profiled, &profile)?;
                Some((report, profile))
            }
            None => None,
        };
        Ok(Some(Summary { file, trace, profile }))
    }

    /// Wraps an observer in one that starts and pauses the trace around steps.
    pub fn step_tracer<'a>(&self, inner: &'a mut dyn Observer) -> StepTracer<'a> {
        StepTracer { inner, steps: self.trace_steps, seen: Vec::new() }
    }
}

/// The median of some times, and how many there are.
fn median(mut times: Vec<f64>) -> Option<(f64, usize)> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).map(|median| (*median, times.len()))
}

/// Traces the last steps and nothing between them: no evaluation, no checkpoint.
pub struct StepTracer<'a> {
    inner: &'a mut dyn Observer,
    steps: u64,
    /// The logged steps.
    seen: Vec<SeenStep>,
}

/// What a report takes of a logged step.
struct SeenStep {
    step: u64,
    seconds: f64,
    /// Tokens of the run up to it.
    tokens: u64,
}

impl Observer for StepTracer<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step(Step { step, seconds, tokens, .. }) = event {
            self.seen.push(SeenStep { step: *step, seconds: *seconds, tokens: *tokens });
        }
        self.inner.event(event);
    }

    fn stop(&self) -> bool {
        self.inner.stop()
    }

    fn save(&self) -> bool {
        self.inner.save()
    }

    fn warning(&mut self, what: &str) {
        self.inner.warning(what);
    }

    fn wants_single_steps(&self) -> bool {
        true
    }

    fn before_step(&mut self, rank: &Rank, left: u64) -> Core<()> {
        self.inner.before_step(rank, left)?;
        if left <= self.steps {
            // Ranks may share a device: no rank starts tracing before all have paused.
            rank.world.all().barrier("a traced step begins")?;
            rank.device().start_trace()?;
        }
        Ok(())
    }

    fn after_step(&mut self, rank: &Rank, left: u64) -> Core<()> {
        if left <= self.steps {
            rank.world.all().barrier("a traced step ends")?;
            rank.device().pause_trace();
        }
        self.inner.after_step(rank, left)
    }
}

/// Ignores events and never stops a run.
pub struct NullObserver;

impl Observer for NullObserver {
    fn event(&mut self, _: &Event) {}
    fn stop(&self) -> bool {
        false
    }
}

/// Gathers the traces of all ranks to rank 0.
fn gather(rank: &Rank) -> Result<Option<Trace>> {
    let all = rank.world.all();
    // Ranks that share a device share its trace: the first to take it gets all of it.
    let mine = serde_json::to_vec(&rank.device().take_trace()?)?;
    let traces = all.all_gather_bytes(&mine, "traces")?;
    if all.rank() != 0 {
        return Ok(None);
    }
    let traces = traces.iter().map(|t| serde_json::from_slice(t)).collect::<Result<Vec<Trace>, _>>()?;
    Ok(Some(Trace::merge(traces)))
}

/// A trace, and the report beside it.
pub struct Summary {
    file: PathBuf,
    /// The trace.
    pub trace: Trace,
    profile: Option<(PathBuf, Profile)>,
}

impl Summary {
    /// Prints the summary.
    pub fn print(&self, global: &Global) -> Result<()> {
        match global.json {
            true => output::print(&format!("{}\n", json!({ "trace": self.json() }))),
            false => output::print(&self.text()),
        }
    }

    /// The summary as text.
    pub fn text(&self) -> String {
        let t = &self.trace;
        if t.is_empty() {
            return format!("\nno step was traced: {} was not written\n", self.file.display());
        }
        let mut out = format!(
            "\ntrace: {} ({:.1} ms of {}; open it in ui.perfetto.dev)\n",
            self.file.display(),
            t.seconds() * 1e3,
            match t.ranks().len() {
                1 => "one rank".to_string(),
                n => format!("{n} ranks"),
            }
        );
        if let Some((file, profile)) = &self.profile {
            out += &format!("profile: {} (open it in a browser)\n{}", file.display(), advice(profile));
        }
        out += &table("kernel", &t.by_kernel());
        let collectives = t.by_collective();
        if !collectives.is_empty() {
            out += &format!("\n{}", table("collective", &collectives));
            let o = t.overlap();
            let heads = ["communication", "ms", "overlapped by own compute", "by any rank's compute"];
            out += "\n";
            out += &output::table(&[
                heads.map(String::from).to_vec(),
                line("total, with waiting", o.collectives),
                line("moving data", o.transfers),
            ]);
        }
        out
    }

    /// The summary as JSON.
    pub fn json(&self) -> Value {
        let times = |rows: Vec<KernelTime>| -> Vec<Value> {
            rows.into_iter()
                .map(|k| json!({ "name": k.name, "calls": k.calls, "ms": k.seconds * 1e3 }))
                .collect()
        };
        let cover = |c: Coverage| json!({ "ms": c.total * 1e3, "under_own_compute_ms": c.same_rank * 1e3, "under_any_compute_ms": c.any_rank * 1e3 });
        let overlap = self.trace.overlap();
        json!({
            "file": self.file,
            "ms": self.trace.seconds() * 1e3,
            "ranks": self.trace.ranks().len(),
            "kernels": times(self.trace.by_kernel()),
            "collectives": times(self.trace.by_collective()),
            "communication": { "spans": cover(overlap.collectives), "busy": cover(overlap.transfers) },
            "profile": self.profile.as_ref().map(|(file, p)| json!({ "file": file, "advice": p.advice })),
        })
    }
}

/// What to change, one line each.
fn advice(p: &Profile) -> String {
    if p.advice.is_empty() {
        return "  nothing stands out: no known setting is expected to save 1 % of a step\n".into();
    }
    let rows = p.advice.iter().map(|a| {
        let set: Vec<String> = a.settings.iter().map(|s| format!("--set {}", shell::quote(s))).collect();
        vec![format!("  {:.1} % less", a.gain_s / p.step_s * 1e2), set.join(" ")]
    });
    output::table(&rows.collect::<Vec<_>>())
}

/// Calls, time and share, most first.
fn table(what: &str, times: &[KernelTime]) -> String {
    let total: f64 = times.iter().map(|k| k.seconds).sum();
    let row = |name: String, calls: u64, seconds: f64| {
        let share = seconds / total.max(f64::MIN_POSITIVE) * 1e2;
        vec![name, calls.to_string(), format!("{:.2}", seconds * 1e3), format!("{share:.1} %")]
    };
    let mut rows = vec![[what, "calls", "ms", "share"].map(String::from).to_vec()];
    let (first, rest) = times.split_at(times.len().min(LINES));
    rows.extend(first.iter().map(|k| row(k.name.clone(), k.calls, k.seconds)));
    if !rest.is_empty() {
        let (calls, seconds) = rest.iter().fold((0, 0.0), |(n, s), k| (n + k.calls, s + k.seconds));
        rows.push(row(format!("{} others", rest.len()), calls, seconds));
    }
    output::table(&rows)
}

fn line(name: &str, c: Coverage) -> Vec<String> {
    let part = |s: f64, share: f64| format!("{:.2} ms ({:.0} %)", s * 1e3, share * 1e2);
    vec![
        name.into(),
        format!("{:.2}", c.total * 1e3),
        part(c.same_rank, c.same_rank_fraction()),
        part(c.any_rank, c.any_rank_fraction()),
    ]
}
