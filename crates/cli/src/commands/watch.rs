//! `watch`: a live view of runs, in the terminal or in a browser.

mod chart;
mod runs;
mod screen;
mod terminal;
mod view;
mod web;

use crate::args::Global;
use crate::output;
use anyhow::Result;
use runs::WatchedRuns;
use serde_json::json;
use std::io::IsTerminal;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use terminal::{Input, Terminal};
use view::Choices;

/// The long help.
pub const LONG: &str = "\
Show runs while they train, or after: loss, learning rate, throughput, memory, expert load and energy, several runs overlaid.
Everything comes from events.jsonl of the run folders.

A RUN is a run folder or a folder of runs, in which new ones appear by themselves.";

const AFTER: &str = "\
Keys: l logarithmic axes, s smoothing, left and right further panels, 0-9 one run only (a: all), q quit.

Examples:
  ferrotron watch                      all runs in the folder runs
  ferrotron watch runs/a runs/b        two runs overlaid
  ferrotron watch runs/a --once        one snapshot, then exit
  ferrotron watch --web                a page for a browser on this machine
  ferrotron watch --web --host 0.0.0.0 the same for other machines, with a secret in its address";

/// Arguments of `watch`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Run folders, or folders of runs
    #[arg(value_name = "RUN", default_value = "runs")]
    pub runs: Vec<PathBuf>,
    /// Print one snapshot and exit; the default where output is not a terminal
    #[arg(long)]
    pub once: bool,
    /// Serve a page for a browser instead, on this machine only unless --host is given
    #[arg(long, conflicts_with = "once")]
    pub web: bool,
    /// Port of the page [default: 6026, or a free one if that is taken]
    #[arg(long, value_name = "P", requires = "web")]
    pub port: Option<u16>,
    /// Address to serve the page on, such as 0.0.0.0; the page then has a secret in its address
    #[arg(long, value_name = "IP", requires = "web")]
    pub host: Option<IpAddr>,
}

/// How often logs are read.
const POLL: Duration = Duration::from_millis(500);

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let mut runs = WatchedRuns::new(args.runs)?;
    if args.web {
        return web::serve(runs, args.host, args.port, global);
    }
    if global.json {
        runs.poll();
        output::print_json(&summary(&runs))?;
    } else if args.once || !(std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        runs.poll();
        let (width, height) = terminal::size();
        output::print(&view::draw(&runs.runs, &Choices::default(), width, height).plain())?;
    } else {
        interactive(runs)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Draws until the user quits.
fn interactive(mut runs: WatchedRuns) -> Result<()> {
    // A log of a million events takes a moment: it is read before the terminal is taken over.
    runs.poll();
    let terminal = Terminal::enter()?;
    let mut choices = Choices::default();
    let mut shown = None;
    loop {
        let (width, height) = terminal::size();
        let screen = view::draw(&runs.runs, &choices, width, height);
        terminal.write(&screen.escapes(shown.as_ref()))?;
        shown = Some(screen);
        match terminal.wait(POLL) {
            Input::Quit | Input::Key(b'q' | b'Q' | 27) => return Ok(()),
            Input::Key(b'l') => choices.log ^= true,
            Input::Key(b's') => choices.smooth ^= true,
            Input::Key(b'a') => choices.only = None,
            Input::Key(key @ b'0'..=b'9') => {
                let run = usize::from(key - b'0');
                let again = choices.only == Some(run);
                choices.only = (!again && run < runs.runs.len()).then_some(run);
            }
            Input::Right => choices.first += 1,
            Input::Left => choices.first = choices.first.checked_sub(1).unwrap_or(view::PANELS - 1),
            Input::Redraw => shown = None,
            Input::Key(_) | Input::Nothing => {}
        }
        runs.poll();
    }
}

/// The state of every run.
fn summary(runs: &WatchedRuns) -> serde_json::Value {
    let run = |r: &runs::WatchedRun| {
        let h = r.history();
        json!({
            "name": r.name,
            "path": r.dir(),
            "state": r.state(),
            "step": h.steps.step.last(),
            "steps": h.start.as_ref().map(|s| s.steps),
            "loss": h.steps.column("loss").last(),
            "eval_loss": h.evals.last().map(|e| e.loss),
            "tokens_per_s": h.steps.last("tokens_per_s"),
            "time": h.last_time,
            "unreadable_lines": h.unreadable,
            "error": r.error,
        })
    };
    json!({ "runs": runs.runs.iter().map(run).collect::<Vec<_>>() })
}
