//! Membership of a job that outlives the failure of its processes.
//!
//! One process, whichever binds the job's rendezvous address first, is the *coordinator*: a thread of it knows every process
//! of the job by a connection, and gives ranks to them. When a rank is lost, the others leave their communication, keep their
//! processes, and take seats in the next generation, together with the process that replaces it. If the coordinator's own
//! process is lost, another binds the address, and the members tell it who they are.

mod coordinator;
mod member;
mod messages;
mod server;
#[cfg(test)]
mod tests;

use crate::Result;
use crate::launch_env::LaunchEnv;
use crate::process::{AfterFailure, Process};
use crate::tcp_control::TcpControl;
pub use coordinator::RestartPolicy;
pub use member::{Left, Membership, Seat};
pub use messages::Ended;
use std::sync::Arc;
use std::time::Duration;

/// Exit code of a process that a launcher should start again (`EX_TEMPFAIL`).
pub const TEMPORARY_FAILURE: i32 = 75;

/// What tells this host from others: its name, the kernel that was started, and the namespace in which process ids count.
pub(crate) fn host_name() -> String {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {} {}", read("hostname").trim(), read("random/boot_id").trim(), space.display())
}

/// A generation of a job that restarts: its connections, and what a failure does.
pub struct Generation<'a> {
    /// This process.
    pub membership: &'a Membership,
    /// Its rank.
    pub seat: &'a Seat,
    /// How the process was launched.
    pub job: &'a LaunchEnv,
    /// After a failure the process has this long to leave its communication before it is ended by force.
    pub hard: Duration,
}

impl Generation<'_> {
    /// Connects the ranks and starts this one's monitor.
    pub(crate) fn process(&self, timeout: Duration) -> Result<Arc<Process>> {
        let Seat { rank, size, .. } = *self.seat;
        let connected = self.seat.meet(self.job, timeout)?;
        let control = Arc::new(TcpControl::over(rank, size, connected)?);
        let process = Arc::new(Process::new(control, timeout, AfterFailure::Restart(self.hard))?);
        self.membership.watch(self.seat.generation, &process.shared);
        Ok(process)
    }
}
