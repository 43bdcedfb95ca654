//! Job backends whose ranks are processes: what [`Process`] does for all of them.

use crate::backend::{FailureReport, GroupBackend, JobBackend, OpError};
use crate::flight_recorder::{FlightRecorder, OpRecord};
use crate::host_cost::HostCost;
use crate::process::Process;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A [`JobBackend`] of processes: what differs between them.
pub(crate) trait ProcessBackend: Send + Sync {
    /// [`JobBackend::name`].
    fn name(&self) -> &'static str;

    /// This rank.
    fn process(&self) -> &Process;

    /// [`JobBackend::group`].
    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError>;

    /// [`JobBackend::only_enqueues`].
    fn only_enqueues(&self) -> bool {
        false
    }

    /// [`HostCost::library`].
    fn library_time(&self) -> Duration {
        Duration::ZERO
    }
}

impl<B: ProcessBackend> JobBackend for B {
    fn name(&self) -> &'static str {
        ProcessBackend::name(self)
    }

    fn rank(&self) -> usize {
        self.process().control().rank()
    }

    fn size(&self) -> usize {
        self.process().control().size()
    }

    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError> {
        ProcessBackend::group(self, index, name, ranks, deadline)
    }

    fn fail(&self, failure: FailureReport) {
        self.process().fail(failure);
    }

    fn failure(&self) -> Option<FailureReport> {
        self.process().failure()
    }

    fn only_enqueues(&self) -> bool {
        ProcessBackend::only_enqueues(self)
    }

    fn flight_recorder(&self) -> &Arc<FlightRecorder> {
        self.process().flight_recorder()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.process().shared.timeout.set(timeout);
    }

    fn last_ops(&self, rank: usize) -> Option<Vec<OpRecord>> {
        self.process().last_ops(rank)
    }

    fn silent_relay(&self) -> Option<usize> {
        self.process().silent_relay()
    }

    fn host_cost(&self) -> HostCost {
        let (frames, library) = (self.process().control().frames(), self.library_time());
        HostCost { frames, library, ..HostCost::default() }
    }
}
