//! Processes of one host without MPI: control messages over TCP, data over shared memory. Tensors are on the host, and
//! collectives are those of [`crate::host_group`].
//!
//! Nothing of it has a name in the file system, so a killed process leaves nothing behind.

mod outbox;
mod rings;
mod segment;
mod transfer;

use crate::backend::{GroupBackend, OpError};
use crate::control::{ControlTransport, Topic};
use crate::host_group::HostGroupBackend;
use crate::launch_env::LaunchEnv;
use crate::membership::{Generation, host_name};
use crate::process::{AfterFailure, Process};
use crate::process_backend::ProcessBackend;
use crate::process_group::ProcessGroup;
use crate::tcp_control::TcpControl;
use crate::{Result, World};
use outbox::Outbox;
use rings::{Rings, segment_bytes};
use segment::Segment;
use std::sync::Arc;
use std::time::{Duration, Instant};
use transfer::ShmTransfer;

/// Said of processes on several hosts.
const ONE_HOST: &str =
    "across hosts processes on the CPU need MPI, and on GPUs NCCL: start them with Open MPI's mpirun";

struct ShmJobBackend {
    process: Arc<Process>,
    /// After `process`, whose end waits until the others have taken everything.
    outbox: Arc<Outbox>,
}

impl World {
    /// The job of processes on this host that `job` describes. Tensors are on the host. A rank that waits longer than
    /// `timeout` for another fails with an error that names it, and the whole job ends. Dropping the last handle waits
    /// for the other ranks to finish, too.
    pub fn one_host(job: &LaunchEnv, timeout: Duration) -> Result<World> {
        let control: Arc<dyn ControlTransport> = Arc::new(TcpControl::connect(job, timeout)?);
        let process = Arc::new(Process::new(control, timeout, AfterFailure::Exit)?);
        World::start(Arc::new(ShmJobBackend { process, outbox: Arc::default() }), timeout)
    }

    /// [`World::one_host`] for one generation of a job that restarts.
    pub fn one_host_generation(generation: &Generation, timeout: Duration) -> Result<World> {
        let process = generation.process(timeout)?;
        World::start(Arc::new(ShmJobBackend { process, outbox: Arc::default() }), timeout)
    }
}

impl ShmJobBackend {
    /// Maps the segments of all members of a group.
    fn open_rings(group: &ProcessGroup, deadline: Instant) -> Result<Rings, OpError> {
        let n = group.ranks.len();
        let failed = |e: std::io::Error| OpError::Backend {
            what: format!("shared memory of {} bytes: {e}", segment_bytes(n)),
        };
        let (own, file) = Segment::create(segment_bytes(n)).map_err(failed)?;
        let mine = format!("{}\n{}\n{}", std::process::id(), segment::number(&file), host_name());
        let all = group.gather(Topic::segments(group.index), mine.as_bytes(), deadline)?;
        let mut segments = Vec::with_capacity(n);
        let mut own = Some(own);
        for (r, text) in all.iter().enumerate() {
            segments.push(match own.take_if(|_| r == group.me) {
                Some(own) => own,
                None => open_segment(text, n)
                    .map_err(|what| OpError::Backend { what: format!("rank {}: {what}", group.ranks[r]) })?,
            });
        }
        // The descriptor is closed when all have mapped it.
        group.gather(Topic::segments(group.index), &[], deadline)?;
        Ok(Rings::new(group.me, segments))
    }
}

/// The segment that another rank has announced as process id, descriptor and host.
fn open_segment(text: &[u8], n: usize) -> Result<Segment, String> {
    let text = String::from_utf8_lossy(text);
    let mut lines = text.splitn(3, '\n');
    let mut number = || lines.next().and_then(|l| l.parse::<u32>().ok());
    let (Some(pid), Some(descriptor)) = (number(), number()) else {
        return Err("it announced no shared memory; run the same program on all ranks".into());
    };
    if lines.next() != Some(&host_name()) {
        return Err(format!("it is on another host or in another container; {ONE_HOST}"));
    }
    Segment::open(pid, descriptor, segment_bytes(n)).map_err(|e| format!("its shared memory: {e}"))
}

impl ProcessBackend for ShmJobBackend {
    fn name(&self) -> &'static str {
        "shared memory"
    }

    fn process(&self) -> &Process {
        &self.process
    }

    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError> {
        let Some(group) = ProcessGroup::new(&self.process, index, name, ranks, deadline)? else {
            return Ok(None);
        };
        let rings = ShmJobBackend::open_rings(&group, deadline)?;
        let outbox = self.outbox.clone();
        Ok(Some(Arc::new(HostGroupBackend::new(ShmTransfer { group, rings, outbox }))))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn another_host_is_refused_with_what_to_use_there() {
        let (_own, file) = Segment::create(segment_bytes(2)).unwrap();
        let here = (std::process::id(), segment::number(&file));
        let text = |host: &str| format!("{}\n{}\n{host}", here.0, here.1).into_bytes();
        assert!(open_segment(&text(&host_name()), 2).is_ok());
        let error = open_segment(&text("another host"), 2).err().unwrap();
        assert!(error.contains("another host") && error.contains("MPI") && error.contains("NCCL"), "{error}");
        for bad in [&b""[..], b"1\n", b"x\n2\n", b"-1\n-1\n"] {
            assert!(open_segment(bad, 2).is_err(), "{bad:?}");
        }
        // Of a group of another size.
        assert!(open_segment(&text(&host_name()), 3).is_err());
    }
}
