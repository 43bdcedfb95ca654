//! Signals of a run. SIGINT (Ctrl-C), SIGTERM and SIGHUP finish the step, save a checkpoint and end the run; a second Ctrl-C
//! ends it at once. SIGUSR1 saves a checkpoint and the run goes on. Each is answered when it arrives.
//!
//! A terminal sends Ctrl-C to its whole foreground process group, and `launch`, `torchrun` and `timeout` then forward theirs:
//! ranks get SIGINT twice for one Ctrl-C.

use crate::output;
use ferrotron_core::fault::time_limit::TimeLimit;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// SIGINT again within this time is the first one, forwarded by a launcher.
const FORWARDED: Duration = Duration::from_millis(500);

/// Shows a line to the user.
pub type PrintLine = Box<dyn Fn(&str) + Send>;

/// What signals have asked for. Clones share it.
#[derive(Clone)]
pub struct Signals(Arc<Shared>);

struct Shared {
    stop: Arc<AtomicBool>,
    save: Arc<AtomicBool>,
    /// The step in progress, from 1; 0 before the first.
    step: AtomicU64,
    /// Other processes are being waited for: there is nothing to finish or save yet.
    joining: AtomicBool,
    say: Mutex<PrintLine>,
    /// When the run ends by itself.
    limit: OnceLock<TimeLimit>,
    /// That has been told.
    limit_told: AtomicBool,
}

impl Signals {
    /// Installs the handlers, and a thread that answers with [`Signals::set_printer`]; until then on standard error.
    pub fn listen() -> anyhow::Result<Signals> {
        let (stop, save) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let mut ending = vec![SIGINT, SIGTERM];
        // `nohup` means that the end of the terminal is not to end the run.
        if !is_ignored(SIGHUP) {
            ending.push(SIGHUP);
        }
        for signal in &ending {
            flag::register(*signal, Arc::clone(&stop))?;
        }
        flag::register(SIGUSR1, Arc::clone(&save))?;
        let say: PrintLine = Box::new(|line| output::note(line));
        let shared = Arc::new(Shared {
            stop,
            save,
            step: AtomicU64::new(0),
            joining: AtomicBool::new(false),
            say: Mutex::new(say),
            limit: OnceLock::new(),
            limit_told: AtomicBool::new(false),
        });
        let mut arrived = signal_hook::iterator::Signals::new([&ending[..], &[SIGUSR1]].concat())?;
        let answering = Arc::clone(&shared);
        let answer = move || {
            // When the run was first asked to end.
            let mut asked: Option<Instant> = None;
            for signal in arrived.forever() {
                if signal == SIGINT
                    && let Some(first) = asked
                {
                    if first.elapsed() < FORWARDED {
                        continue;
                    }
                    answering.say("stopped at once; the same command resumes from the last checkpoint");
                    if std::io::stderr().is_terminal() {
                        output::note(""); // the progress bar's line ends here
                    }
                    signal_hook::low_level::exit(128 + SIGINT);
                }
                if signal != SIGUSR1 && answering.joining.load(Ordering::Relaxed) {
                    answering.say("stopped while joining the job; nothing was to be saved");
                    signal_hook::low_level::exit(128 + signal);
                }
                if signal != SIGUSR1 {
                    asked.get_or_insert_with(Instant::now);
                }
                answering.say(&answer(signal, answering.step.load(Ordering::Relaxed)));
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(answer)?;
        Ok(Signals(shared))
    }

    /// True once a signal has asked the run to end, or its time limit has passed.
    pub fn stop_requested(&self) -> bool {
        if let Some(limit) = self.0.limit.get().filter(|limit| limit.has_passed()) {
            if !self.0.limit_told.swap(true, Ordering::Relaxed) {
                self.0.say(&format!("{}: saving and ending", limit.why));
            }
            return true;
        }
        self.0.stop.load(Ordering::Relaxed)
    }

    /// The run ends as after SIGTERM when this limit has passed.
    pub fn set_limit(&self, limit: TimeLimit) {
        _ = self.0.limit.set(limit);
    }

    /// True once after a signal has asked for a checkpoint.
    pub fn take_save_request(&self) -> bool {
        self.0.save.swap(false, Ordering::Relaxed)
    }

    /// The run is about to do this step, from 1.
    pub fn set_step(&self, step: u64) {
        self.0.step.store(step, Ordering::Relaxed);
    }

    /// Whether this process waits for the others of its job to join: then a signal ends it at once.
    pub fn set_joining(&self, joining: bool) {
        self.0.joining.store(joining, Ordering::Relaxed);
    }

    /// How signals are answered from here on.
    pub fn set_printer(&self, say: PrintLine) {
        *self.0.say.lock().unwrap_or_else(PoisonError::into_inner) = say;
    }
}

impl Shared {
    fn say(&self, line: &str) {
        (self.say.lock().unwrap_or_else(PoisonError::into_inner))(line);
    }
}

/// The answer to a signal while `step` is in progress.
fn answer(signal: i32, step: u64) -> String {
    let step = if step == 0 { "the first step".into() } else { format!("step {step}") };
    match signal {
        SIGUSR1 => format!("SIGUSR1: saving after {step}"),
        SIGINT => format!("finishing {step} and saving; press Ctrl-C again to stop now"),
        SIGHUP => format!("SIGHUP: finishing {step}, saving and ending"),
        _ => format!("SIGTERM: finishing {step}, saving and ending"),
    }
}

/// Did whoever started this process ignore the signal? As Linux tells it; elsewhere false.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_ask_and_are_answered() {
        let signals = Signals::listen().unwrap();
        let (said, heard) = std::sync::mpsc::channel();
        signals.set_printer(Box::new(move |line| said.send(line.to_string()).unwrap()));
        signals.set_step(9);
        assert!(!signals.stop_requested() && !signals.take_save_request());
        let raise = |signal| {
            signal_hook::low_level::raise(signal).unwrap();
            heard.recv_timeout(std::time::Duration::from_secs(10)).unwrap()
        };
        assert_eq!(raise(SIGUSR1), "SIGUSR1: saving after step 9");
        assert!(!signals.stop_requested());
        assert!(signals.take_save_request() && !signals.take_save_request());
        assert_eq!(raise(SIGTERM), "SIGTERM: finishing step 9, saving and ending");
        assert!(signals.stop_requested() && signals.clone().stop_requested());
        // Schedulers may send it twice: only Ctrl-C ends at once.
        raise(SIGTERM);
        assert_eq!(answer(SIGINT, 9), "finishing step 9 and saving; press Ctrl-C again to stop now");
        assert!(!is_ignored(SIGTERM));
    }
}
