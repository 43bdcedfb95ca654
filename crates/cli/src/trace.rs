//! `--trace`: a timeline of some steps, with time by kernel and overlap of communication with compute.

use crate::args::Global;
use crate::{output, ranks};
use anyhow::Result;
use ferrotron_core::data::Batches;
use ferrotron_core::events::Event;
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
    /// Number of steps in the trace
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..), hide_default_value = true)]
    pub trace_steps: u64,
}

impl TraceArgs {
    /// The global options, with tracing on if `--trace` is given. Fails here, not at the end of the run, if the file
    /// cannot be written.
    pub fn with_tracing(&self, global: &Global) -> Result<Global> {
        if let Some(file) = self.trace.as_ref().filter(|_| global.launch.leads()) {
            std::fs::File::create(file).map_err(|e| Error::io_doing(file, "write the trace", e))?;
        }
        Ok(Global { trace: self.trace.is_some(), ..global.clone() })
    }

    /// Trains as [`Run::train`] does and writes the timeline. Rank 0 gets its summary.
    pub fn train(
        &self,
        run: &mut Run,
        data: &dyn Batches,
        eval: Option<&dyn Batches>,
        observer: &mut dyn Observer,
    ) -> Core<(Outcome, Option<Summary>)> {
        let Some(file) = &self.trace else { return Ok((run.train(data, eval, observer)?, None)) };
        let outcome = run.train(data, eval, &mut self.step_tracer(observer))?;
        let summary = write_trace(&run.trainer.rank, file).map_err(ranks::to_core_error)?;
        Ok((outcome, summary))
    }

    /// Wraps an observer in one that starts and pauses the trace around steps.
    pub fn step_tracer<'a>(&self, inner: &'a mut dyn Observer) -> StepTracer<'a> {
        StepTracer { inner, steps: self.trace_steps }
    }
}

/// Traces the last steps and nothing between them: no evaluation, no checkpoint.
pub struct StepTracer<'a> {
    inner: &'a mut dyn Observer,
    steps: u64,
}

impl Observer for StepTracer<'_> {
    fn event(&mut self, event: &Event) {
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

/// Gathers the traces of all ranks; rank 0 writes them and gets the summary.
pub fn write_trace(rank: &Rank, file: &Path) -> Result<Option<Summary>> {
    gather(rank)?.map(|trace| write(trace, file)).transpose()
}

/// Gathers the traces of all ranks to rank 0.
pub fn gather(rank: &Rank) -> Result<Option<Trace>> {
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

/// Writes a trace.
pub fn write(trace: Trace, file: &Path) -> Result<Summary> {
    std::fs::write(file, trace.chrome_json()).map_err(|e| Error::io_doing(file, "write the trace", e))?;
    Ok(Summary { file: file.to_path_buf(), trace })
}

/// A written trace.
pub struct Summary {
    file: PathBuf,
    trace: Trace,
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
            return format!("\nno step was traced: {} is empty\n", self.file.display());
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
        })
    }
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
