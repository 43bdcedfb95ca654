//! Small collectives in a row, launched together.
//!
//! A small collective costs its launch, not its bytes. NCCL runs the calls of a group as one kernel; other backends run them
//! in order. Every call keeps its descriptor, sequence number and place in the flight recorder.

use crate::backend::{Collective, Completion, GroupBackend};
use crate::communicator::PreparedCall;
use crate::flight_recorder::OpStatus;
use crate::op_descriptor::OpDescriptor;
use crate::{Communicator, ReduceOp, Result, watchdog};
use ferrotron_tensor::{Stream, Tensor};
use std::sync::Arc;
use std::time::Instant;

impl Communicator {
    /// [`Communicator::all_reduce`] of several tensors with their labels, launched together. They do not overlap.
    pub fn all_reduce_coalesced(
        &self,
        s: &Stream,
        tensors: &[(&Tensor, &'static str)],
        op: ReduceOp,
    ) -> Result<()> {
        let calls = tensors.iter().map(|(t, label)| self.prepare_all_reduce(s, t, op, label));
        self.coalesced(s, calls.collect::<Result<_>>()?)
    }

    /// [`Communicator::all_gather`] of several `(mine, all)` with their labels, launched together. The tensors of one do not
    /// overlap those of another.
    pub fn all_gather_coalesced(
        &self,
        s: &Stream,
        tensors: &[(&Tensor, &Tensor, &'static str)],
    ) -> Result<()> {
        let calls = tensors.iter().map(|(mine, all, label)| self.prepare_all_gather(s, mine, all, label));
        self.coalesced(s, calls.collect::<Result<_>>()?)
    }

    fn coalesced(&self, s: &Stream, calls: Vec<PreparedCall>) -> Result<()> {
        self.check_disjoint(&calls)?;
        let joined = calls.len().saturating_sub(1) as u64;
        match &self.core.backend {
            Some(backend) if backend.coalesces() && calls.len() > 1 => {
                self.run_together(s, &**backend, calls)?
            }
            _ => calls.into_iter().try_for_each(|c| self.run_prepared(s, c))?,
        }
        self.core.meter.add_coalesced(joined);
        self.core.world_meter.add_coalesced(joined);
        Ok(())
    }

    /// Checks that no call writes what another uses.
    fn check_disjoint(&self, calls: &[PreparedCall]) -> Result<()> {
        for (i, call) in calls.iter().enumerate() {
            for other in &calls[..i] {
                for a in tensors(&call.collective) {
                    for b in tensors(&other.collective) {
                        self.check(&call.descriptor, |c| c.disjoint(a, b))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn run_together(&self, s: &Stream, backend: &dyn GroupBackend, calls: Vec<PreparedCall>) -> Result<()> {
        let (core, start) = (&*self.core, Instant::now());
        let recorder = core.job_backend.flight_recorder();
        let mut counters = self.counters();
        let (mut descriptors, mut collectives, mut sent) = (Vec::new(), Vec::new(), Vec::new());
        for call in calls {
            let descriptor = Arc::new(counters.numbered(call.descriptor));
            let of = (&*descriptor, &call.collective);
            core.hooks.collective(Some(s), (core.index, core.rank), of, core.name)?;
            descriptors.push(descriptor);
            collectives.push(call.collective);
            sent.push(call.sent);
        }
        let _span = self.span(s, &descriptors[0])?;
        let numbers: Vec<u64> = descriptors.iter().map(|d| recorder.begin(core.index, d.clone())).collect();
        let done = || -> Result<Completion> {
            for (descriptor, collective) in descriptors.iter().zip(&collectives) {
                self.agree(backend, Some(s), (descriptor, collective), start)?;
            }
            let deadline = watchdog::deadline(core.timeout.get());
            let run = backend.run_coalesced(s, &collectives, deadline);
            run.map_err(|e| self.failed(&descriptors[0], start, e))
        };
        match core.inside.time(done) {
            Ok(completion) => self.completed(Some(s), &numbers, completion)?,
            Err(error) => {
                numbers.iter().for_each(|n| recorder.set(*n, OpStatus::Failed));
                return Err(error);
            }
        }
        let kinds = descriptors.iter().map(|d: &Arc<OpDescriptor>| d.kind);
        kinds.zip(sent).for_each(|(kind, bytes)| self.add_volume(kind, bytes));
        Ok(())
    }
}

/// The tensors that a call uses.
fn tensors<'a>(collective: &Collective<'a>) -> Vec<&'a Tensor> {
    match *collective {
        Collective::AllReduce { t, .. } | Collective::Broadcast { t, .. } => vec![t],
        Collective::AllGather { mine, all, .. } | Collective::ReduceScatter { mine, all, .. } => {
            vec![mine, all]
        }
        Collective::AllToAll { from, to, .. } => vec![from, to],
        Collective::Barrier | Collective::AllGatherBytes(_) => Vec::new(),
    }
}
