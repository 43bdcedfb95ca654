//! Writing results and errors, as text or JSON.

use crate::args::Global;
use clap::error::{ContextKind, ContextValue};
use serde::Serialize;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// Exit code of a failure.
pub const FAILED: u8 = 1;
/// Exit code of wrong usage or configuration.
pub const USAGE: u8 = 2;
/// Exit code of a process that its launcher should start again (`EX_TEMPFAIL`).
pub const RESTART: u8 = 75;
/// Exit code of a process that must not be started again: its job has excluded it.
pub const EXCLUDED: u8 = 76;

/// An error in the command line that the argument parser does not see.
#[derive(Debug)]
pub struct UsageError {
    what: String,
    hint: Option<String>,
}

impl UsageError {
    /// An error with one sentence that says what to change.
    pub fn new(what: impl Into<String>) -> UsageError {
        UsageError { what: what.into(), hint: None }
    }

    /// Adds a hint.
    pub fn hint(self, hint: impl Into<String>) -> UsageError {
        UsageError { hint: Some(hint.into()), ..self }
    }
}

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for UsageError {}

/// Writes text to standard output. A closed pipe (`| head`) is not an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Writes a line to standard error. Nobody may be reading it any more, which is no reason to stop.
pub fn note(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Writes one JSON value and a newline to standard output.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// Flags that were renamed, and their new names.
const RENAMED_FLAGS: [(&str, &str); 2] = [("--patience", "--timeout"), ("--forced", "--force-balance")];

/// The hint for an unknown flag that is the old name of another.
fn renamed(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let (old, new) = RENAMED_FLAGS.into_iter().find(|(old, _)| old == flag)?;
    (error.kind() == clap::error::ErrorKind::UnknownArgument).then(|| format!("{old} is now {new}"))
}

/// Reports an error of the argument parser, or prints the help that was asked for.
pub fn usage(error: &clap::Error) -> ExitCode {
    let json = std::env::args_os().any(|a| a == "--json");
    if let Some(hint) = renamed(error) {
        report(
            &format!("unexpected argument {}", hint.split(' ').next().unwrap_or_default()),
            Some(&hint),
            json,
        );
    } else if json && error.use_stderr() {
        let text = error.to_string();
        let mut parts = text.split("\n\n");
        let what = parts.next().unwrap_or_default().trim_start_matches("error: ").replace('\n', " ");
        let hint = parts.find_map(|p| p.trim().strip_prefix("tip: ").map(str::to_string));
        report(&what, hint.as_deref(), true);
    } else {
        // If standard error cannot be written, there is nowhere to report it.
        let _ = error.print();
    }
    ExitCode::from(if error.use_stderr() { USAGE } else { 0 })
}

/// Reports why a command failed: one sentence, and a hint if there is one.
pub fn failure(error: &anyhow::Error, global: &Global) -> ExitCode {
    let core = error.downcast_ref::<ferrotron_core::Error>().or_else(|| match error.downcast_ref() {
        Some(ferrotron_bridge::Error::Core(e)) => Some(&**e),
        _ => None,
    });
    let (hint, code) = match core {
        Some(e @ ferrotron_core::Error::Config { .. }) => (e.hint(), USAGE),
        Some(e @ ferrotron_core::Error::Restart(_)) => (e.hint(), RESTART),
        Some(e @ ferrotron_core::Error::Excluded(_)) => (e.hint(), EXCLUDED),
        Some(e) => (e.hint(), e.exit_code().unwrap_or(FAILED)),
        None => match error.downcast_ref::<UsageError>() {
            Some(usage) => (usage.hint.as_deref(), USAGE),
            None => (None, FAILED),
        },
    };
    report(&describe(error), hint, global.json);
    ExitCode::from(code)
}

/// An error with its causes, `outer: inner`. A message that ends with its cause already is not followed by it again.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

fn report(what: &str, hint: Option<&str>, json: bool) {
    // In a job of several processes each names its rank.
    let rank =
        ferrotron_core::ranks::LaunchEnv::detect().ok().flatten().filter(|j| j.size > 1).map(|j| j.rank);
    let what = &rank.map_or_else(|| what.to_string(), |r| format!("rank {r}: {what}"));
    let text = if json {
        format!("{}\n", serde_json::json!({ "error": what, "hint": hint }))
    } else {
        let hint = hint.map(|h| format!("hint: {h}\n")).unwrap_or_default();
        format!("error: {what}\n{hint}")
    };
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// A text table with aligned columns.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let gap = width + 2 - cell.chars().count();
            line += cell;
            line += &" ".repeat(gap);
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::describe;
    use anyhow::Context;

    #[test]
    fn a_cause_is_told_once() {
        let io = || std::io::Error::other("the disk is gone");
        let core = anyhow::Error::from(ferrotron_core::Error::io("a/b")(io()));
        assert_eq!(describe(&core), "a/b: the disk is gone");
        let outer = Err::<(), _>(core).context("cannot begin").unwrap_err();
        assert_eq!(describe(&outer), "cannot begin: a/b: the disk is gone");
        // A cause that the message does not tell follows it.
        assert_eq!(describe(&anyhow::Error::from(io()).context("reading")), "reading: the disk is gone");
    }
}
