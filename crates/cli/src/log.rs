//! The log: one line per event, for people who ask what each rank did. Warnings also go to standard error.
//!
//! Libraries emit events through `tracing`. A dispatcher belongs to one rank: the process's own, or that of the thread
//! which runs the rank. It writes `logs/rank-N.log` once the run folder is known, and keeps the lines before that.

use crate::output::UsageError;
use clap::ValueEnum;
use ferrotron_core::fs;
use std::fmt::{Debug, Write as _};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, dispatcher};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};

/// Variable that gives the level where `--log-level` does not.
pub const VARIABLE: &str = "FERROTRON_LOG";
/// Folder of log files in a run folder.
pub const FOLDER: &str = ferrotron_core::train::LOGS;
/// Bytes kept before the file is open.
const MAX_PENDING: usize = 64 << 10;

/// What `--log-level` accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Failures
    Error,
    /// What may be wrong
    Warn,
    /// What a rank begins and ends
    Info,
    /// Every step
    Debug,
    /// Everything
    Trace,
}

impl LogLevel {
    fn filter(self) -> LevelFilter {
        match self {
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        }
    }

    /// The level of the command line, or of the environment.
    pub fn choose(given: Option<LogLevel>) -> Result<Option<LogLevel>, UsageError> {
        let text = std::env::var_os(VARIABLE).filter(|_| given.is_none());
        let Some(text) = text.filter(|t| !t.is_empty()) else { return Ok(given) };
        let text = text.to_string_lossy();
        LogLevel::from_str(&text, true).map(Some).map_err(|_| {
            UsageError::new(format!("{VARIABLE}={text}: expected error, warn, info, debug or trace"))
        })
    }
}

/// The rank whose events a dispatcher gets.
#[derive(Clone, Copy, Debug)]
pub struct LogRank {
    pub rank: usize,
    /// Ranks of the job.
    pub size: usize,
}

/// Makes the process's dispatcher that of `rank`; other threads of this process may have their own.
pub fn init(level: Option<LogLevel>, rank: LogRank) {
    // Fails where there is one already, which then stays.
    let _ = dispatcher::set_global_default(dispatch(level, rank));
}

/// Runs `work` with a dispatcher of its own: a rank that is a thread.
pub fn for_rank<T>(level: Option<LogLevel>, rank: LogRank, work: impl FnOnce() -> T) -> T {
    dispatcher::with_default(&dispatch(level, rank), work)
}

fn dispatch(level: Option<LogLevel>, rank: LogRank) -> Dispatch {
    let filter = |default| level.map_or(default, LogLevel::filter);
    let (stderr, in_file) = (filter(LevelFilter::WARN), filter(LevelFilter::INFO));
    Dispatch::new(Registry::default().with(RankLog {
        rank,
        stderr,
        in_file,
        file: Mutex::new(Output::Pending(String::new())),
    }))
}

/// Opens the file of this thread's rank in the run folder and writes what was logged before. Where it cannot be opened,
/// a warning says so, and the run goes on without it.
pub fn open_file(run: &Path) {
    let opened = dispatcher::get_default(|d| d.downcast_ref::<RankLog>().map_or(Ok(()), |log| log.open(run)));
    if let Err(e) = opened {
        tracing::warn!("{e}; this rank's log is lost");
    }
}

enum Output {
    Pending(String),
    File(File),
}

struct RankLog {
    rank: LogRank,
    stderr: LevelFilter,
    in_file: LevelFilter,
    file: Mutex<Output>,
}

/// Fields of a span, as ` key=value` each.
struct SpanFields(String);

/// Collects the fields of an event or span.
#[derive(Default)]
struct Fields {
    message: String,
    /// As ` key=value` each.
    others: String,
    /// The command shows it by itself.
    shown: bool,
}

impl Visit for Fields {
    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == "shown" {
            self.shown = value;
        } else {
            self.record_debug(field, &value);
        }
    }
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.others, " {name}={value:?}"),
        };
    }
}

impl RankLog {
    fn open(&self, run: &Path) -> ferrotron_core::Result<()> {
        let folder = run.join(FOLDER);
        if folder.is_symlink() {
            let what = format!("{}: is a link, which is not followed", folder.display());
            return Err(ferrotron_core::Error::Invalid(what));
        }
        std::fs::create_dir_all(&folder).map_err(ferrotron_core::Error::io(&folder))?;
        let mut file = fs::open_append(&folder.join(format!("rank-{}.log", self.rank.rank)))?;
        let mut output = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Output::Pending(lines) = &*output {
            // A full disk must not end a run: the log of events says so if it matters.
            let _ = file.write_all(lines.as_bytes());
        }
        *output = Output::File(file);
        Ok(())
    }

    fn to_file(&self, line: &str) {
        match &mut *self.file.lock().unwrap_or_else(PoisonError::into_inner) {
            Output::Pending(lines) if lines.len() + line.len() <= MAX_PENDING => lines.push_str(line),
            Output::Pending(_) => {}
            Output::File(file) => _ = file.write_all(line.as_bytes()),
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for RankLog {
    fn enabled(&self, about: &Metadata<'_>, _: Context<'_, S>) -> bool {
        *about.level() <= self.stderr.max(self.in_file)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.stderr.max(self.in_file))
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, ctx: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = ctx.span(id) {
            span.extensions_mut().insert(SpanFields(fields.others));
        }
    }

    fn on_event(&self, event: &Event<'_>, ctx: Context<'_, S>) {
        let (level, mut fields) = (*event.metadata().level(), Fields::default());
        event.record(&mut fields);
        let mut spans = String::new();
        for span in ctx.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            spans.extend(span.extensions().get::<SpanFields>().map(|f| f.0.as_str()));
        }
        let LogRank { rank, size } = self.rank;
        let said = format!("{}{}", fields.message, fields.others).replace('\n', " | ");
        if level <= self.in_file {
            let (time, target) = (time(SystemTime::now()), event.metadata().target());
            self.to_file(&format!("{time} {level:5} rank={rank}{spans} {target}: {said}\n"));
        }
        if level <= self.stderr && !fields.shown {
            let kind = match level {
                Level::ERROR => "error",
                Level::WARN => "warning",
                Level::INFO => "info",
                Level::DEBUG => "debug",
                Level::TRACE => "trace",
            };
            let by = if size > 1 { format!("rank {rank}: ") } else { String::new() };
            let _ = std::io::stderr().write_all(format!("ferrotron: {kind}: {by}{said}\n").as_bytes());
        }
    }
}

/// As `2026-11-16T12:34:56.789Z`.
fn time(at: SystemTime) -> String {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (seconds, millis) = (since.as_secs(), since.subsec_millis());
    let [h, m, s] = [seconds / 3600 % 24, seconds / 60 % 60, seconds % 60];
    // Years begin in March, so that a leap day is the last of its year; 146,097 days are 400 years.
    let days = seconds / 86400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let at = |s: u64, ms: u64| time(SystemTime::UNIX_EPOCH + Duration::from_millis(s * 1000 + ms));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_400, 7), "2000-02-29T00:00:00.007Z");
        assert_eq!(at(1_798_761_599, 999), "2026-12-31T23:59:59.999Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn each_rank_has_its_file_with_levels_rank_and_step() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|s| {
            for rank in 0..2 {
                let dir = dir.path();
                s.spawn(move || {
                    for_rank(Some(LogLevel::Debug), LogRank { rank, size: 2 }, || {
                        tracing::info!(shown = true, "before the folder is known");
                        open_file(dir);
                        let step = tracing::error_span!("step", step = 7);
                        step.in_scope(|| tracing::debug!(shown = true, loss = 2.5, "two\nlines of {rank}"));
                        tracing::trace!("not logged");
                    });
                });
            }
        });
        for rank in 0..2 {
            let text = std::fs::read_to_string(dir.path().join(format!("{FOLDER}/rank-{rank}.log"))).unwrap();
            let lines: Vec<&str> = text.lines().map(|l| l.split_once("Z ").unwrap().1).collect();
            let target = module_path!();
            assert_eq!(lines[0], format!("INFO  rank={rank} {target}: before the folder is known"));
            assert_eq!(
                lines[1],
                format!("DEBUG rank={rank} step=7 {target}: two | lines of {rank} loss=2.5")
            );
            assert_eq!(lines.len(), 2);
        }
    }
}
