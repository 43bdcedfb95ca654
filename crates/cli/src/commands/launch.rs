//! `launch`: start the processes of a job on this machine, and start those again that die.

use crate::args::Global;
use crate::output::{self, EXCLUDED, RESTART, UsageError};
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Text of `--help`.
pub const LONG: &str = "\
Start the processes of a job on this machine, one rank each, and start those again that die.

It sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and a secret, as a cluster's launcher would. A process that is
killed, or that asks for it (exit code 75), is started again; with fault.restarts the others keep running meanwhile and go on
with it. Any other failure ends the job. Signals are passed on to all processes; none outlives the launcher.";

const AFTER: &str = "\
Examples:
  ferrotron launch -n 4 train my.toml --set parallel.tp=2
  ferrotron launch -n 5 train my.toml --spares 1 --set fault.snapshot_every=10
  ferrotron launch -n 4 train my.toml --set fault.restarts=10 --set fault.snapshot_every=10";

/// The variable by which a process knows the launcher that it must not outlive.
const PARENT: &str = "FERROTRON_LAUNCHER_PID";
/// The variable that tells a process that it was started again.
const RESTARTED: &str = "FERROTRON_RESTARTED";
/// How long the other processes may take to end after one has failed for good.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Arguments of `launch`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Number of processes, spares included
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub processes: u16,
    /// Most processes to start again
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub max_restarts: u64,
    /// A ferrotron command and its arguments, such as: train my.toml
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    if std::env::var_os("RANK").is_some() {
        let what = "RANK is set: this is a process of a job already; leave `launch` out";
        return Err(UsageError::new(what).into());
    }
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGUSR1])?;
    let mut job = Job::start(&args, None)?;
    let code = loop {
        for signal in signals.pending() {
            job.signal(signal);
        }
        match job.poll(global.json)? {
            Some(code) => break code,
            None => std::thread::sleep(POLL_INTERVAL),
        }
    };
    Ok(ExitCode::from(code))
}

/// A process that [`run`] has started ends with it, however that ends.
pub fn end_with_launcher() {
    let Some(parent) = std::env::var(PARENT).ok().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw)
    else {
        return;
    };
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // It may have ended before.
    if rustix::process::getppid() != Some(parent) && std::env::var_os("RANK").is_some() {
        signal_hook::low_level::exit(i32::from(RESTART));
    }
}

/// Whether this process was started in place of one that died.
pub fn is_restarted() -> bool {
    std::env::var_os(RESTARTED).is_some()
}

/// The processes of a job.
pub struct Job {
    size: usize,
    command: Vec<String>,
    environment: Vec<(&'static str, String)>,
    children: Vec<Option<Child>>,
    restarts_left: u64,
    /// Processes started again.
    pub restarts: u64,
    /// Processes that died and were not started again.
    abandoned: usize,
    /// When and with which code a process failed for good.
    failed: Option<(Instant, u8)>,
    /// A signal has asked the job to end.
    ending: bool,
    /// Where the output of the processes goes; none is this process's own.
    log: Option<File>,
}

impl Job {
    /// Starts all processes.
    pub fn start(args: &Args, log: Option<File>) -> Result<Job> {
        // Free now; the coordinator of the job binds it a moment later.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let secret: [u64; 4] = std::array::from_fn(|_| random());
        let environment = vec![
            ("WORLD_SIZE", args.processes.to_string()),
            ("LOCAL_WORLD_SIZE", args.processes.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_string()),
            ("MASTER_PORT", port.to_string()),
            ("FERROTRON_JOB_SECRET", secret.map(|x| format!("{x:016x}")).concat()),
            (PARENT, std::process::id().to_string()),
        ];
        let size = usize::from(args.processes);
        let mut job = Job {
            size,
            command: args.command.clone(),
            environment,
            children: (0..size).map(|_| None).collect(),
            restarts_left: args.max_restarts,
            restarts: 0,
            abandoned: 0,
            failed: None,
            ending: false,
            log,
        };
        for rank in 0..size {
            job.children[rank] = Some(job.spawn(rank)?);
        }
        Ok(job)
    }

    fn spawn(&self, rank: usize) -> Result<Child> {
        let program = std::env::current_exe().context("this program's own path")?;
        let mut command = std::process::Command::new(&program);
        command.args(&self.command).envs(self.environment.iter().map(|(k, v)| (k, v)));
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        if self.restarts > 0 {
            command.env(RESTARTED, "1");
        }
        if let Some(log) = &self.log {
            command.stdout(log.try_clone()?).stderr(log.try_clone()?).stdin(Stdio::null());
        }
        command.spawn().with_context(|| format!("cannot start {}", program.display()))
    }

    /// Sends a signal to every process.
    pub fn signal(&mut self, signal: i32) {
        self.ending |= signal != SIGUSR1;
        let signal = Signal::from_named_raw(signal);
        for pid in self.children.iter().flatten().map(Child::id) {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            if let (Some(pid), Some(signal)) = (pid, signal) {
                let _ = kill_process(pid, signal);
            }
        }
    }

    /// Ends every process at once.
    pub fn kill(&mut self) {
        self.failed.get_or_insert((Instant::now(), 1));
        self.children.iter_mut().flatten().for_each(|child| drop(child.kill()));
    }

    /// Looks after the processes. The exit code of the job once all have ended.
    pub fn poll(&mut self, quiet: bool) -> Result<Option<u8>> {
        for rank in 0..self.size {
            let Some(child) = &mut self.children[rank] else { continue };
            let Some(status) = child.try_wait()? else { continue };
            self.children[rank] = None;
            self.ended(rank, status, quiet)?;
        }
        if self.failed.is_some_and(|(at, _)| at.elapsed() > END_TIMEOUT) {
            self.children.iter_mut().flatten().for_each(|child| drop(child.kill()));
        }
        let over = self.children.iter().all(Option::is_none);
        let nobody = u8::from(self.abandoned == self.size) * RESTART;
        Ok(over.then(|| self.failed.map_or(nobody, |(_, code)| code)))
    }

    fn ended(&mut self, rank: usize, status: ExitStatus, quiet: bool) -> Result<()> {
        let code = status.code().and_then(|c| u8::try_from(c).ok());
        let again = status.signal().is_some() || code == Some(RESTART);
        let how = match status.signal() {
            Some(signal) => format!("was ended by signal {signal}"),
            None => format!("exited with code {}", code.unwrap_or(1)),
        };
        // A process that waited for the others has nothing to save, and says which signal ended it.
        let by_request = self.ending && (status.signal().is_some() || code.is_some_and(|c| c > 128));
        match code {
            Some(0 | EXCLUDED) => {}
            _ if by_request => {}
            _ if again && !self.ending && self.failed.is_none() && self.restarts_left > 0 => {
                self.restarts_left -= 1;
                self.restarts += 1;
                if !quiet {
                    output::note(format_args!("process {rank} {how}; starting it again"));
                }
                self.children[rank] = Some(self.spawn(rank)?);
            }
            // The others may go on without it (fault.shrink), or end.
            _ if again && !self.ending && self.failed.is_none() => {
                if !quiet {
                    output::note(format_args!("process {rank} {how}; it is not started again"));
                }
                self.abandoned += 1;
            }
            _ => {
                if self.failed.is_none() && !quiet && !self.ending {
                    output::note(format_args!("process {rank} {how}; the job ends"));
                }
                self.failed.get_or_insert((Instant::now(), code.unwrap_or(1)));
            }
        }
        Ok(())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Random, from the operating system by way of the standard library's hasher keys.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
