//! Messages between two ranks, and host bytes for all.

use crate::communicator::Direction;
use crate::engine::{Job, Letter};
use crate::notice::{Detail, Kind, Notice};
use crate::recorder::Progress;
use crate::{Communicator, Result, volume, watchdog};
use ferrotron_tensor::{Stream, Tensor};
use std::sync::Arc;
use std::time::Instant;

impl Communicator {
    /// Sends `t` to rank `to` of the group. Does not wait for the receiver.
    pub fn send(&self, s: &Stream, t: &Tensor, to: usize, label: &'static str) -> Result<()> {
        self.exchange(s, &[(to, t)], &[], label)
    }

    /// Receives `t` from rank `from` of the group, which sends the same shape, type and label.
    pub fn receive(&self, s: &Stream, t: &Tensor, from: usize, label: &'static str) -> Result<()> {
        self.exchange(s, &[], &[(from, t)], label)
    }

    /// Sends and receives all at once: (rank of the group, tensor). The order of the lists does not matter
    /// between ranks; several messages from one rank to another arrive in the order sent. Only the ranks named
    /// take part. Tensors received overlap nothing else of the call.
    pub fn exchange(
        &self,
        s: &Stream,
        sends: &[(usize, &Tensor)],
        receives: &[(usize, &Tensor)],
        label: &'static str,
    ) -> Result<()> {
        let me = self.rank();
        let route = |from: usize, to: usize, t: &Tensor| {
            self.notice(Kind::Message, label).of(t, true).with(Detail::Route(from as u64, to as u64))
        };
        let mut sends: Vec<Letter> =
            sends.iter().map(|(p, t)| Letter { peer: *p, tensor: t, notice: route(me, *p, t) }).collect();
        let mut receives: Vec<Letter> =
            receives.iter().map(|(p, t)| Letter { peer: *p, tensor: t, notice: route(*p, me, t) }).collect();
        for l in sends.iter().chain(&receives) {
            self.check(&l.notice, |c| c.whole(s, l.tensor)?.peer(l.peer, self.size()))?;
        }
        for (i, l) in receives.iter().enumerate() {
            let others = sends.iter().chain(&receives[..i]);
            others.into_iter().try_for_each(|o| self.check(&l.notice, |c| c.apart(l.tensor, o.tensor)))?;
        }
        let core = &*self.core;
        let Some(engine) = &core.engine else { return self.to_itself(s, &sends, &receives) };
        let mut counters = self.counters();
        let mut number = |direction, l: &mut Letter| {
            let next = counters.messages.entry((direction, l.peer)).or_default();
            l.notice.sequence = *next;
            *next += 1;
        };
        sends.iter_mut().for_each(|l| number(Direction::Out, l));
        receives.iter_mut().for_each(|l| number(Direction::In, l));
        // Of several messages the recorder shows the first that is waited for.
        let Some(first) = receives.first().or(sends.first()).map(|l| Arc::new(l.notice.clone())) else {
            return Ok(());
        };
        let recorder = core.hub.recorder();
        let number = recorder.begin(first.clone());
        let start = Instant::now();
        let done = engine.exchange(s, &sends, &receives, watchdog::deadline(core.patience)).map_err(|t| {
            // Say which of several messages is missing.
            let late = |peer: usize| receives.iter().find(|l| l.peer == peer).map(|l| &l.notice);
            let call = match &t {
                crate::engine::Trouble::Absent { missing, .. } => missing.first().and_then(|p| late(*p)),
                _ => None,
            };
            watchdog::give_up(&*core.hub, &core.ranks, call.unwrap_or(&first), start.elapsed(), t)
        });
        recorder.set(number, if done.is_ok() { Progress::Done } else { Progress::Failed });
        done?;
        for l in sends.iter().filter(|l| l.peer != me) {
            self.count(Kind::Message, l.tensor.bytes() as u64);
        }
        Ok(())
    }

    /// Messages of a group of one.
    fn to_itself(&self, s: &Stream, sends: &[Letter], receives: &[Letter]) -> Result<()> {
        let paired = sends.len() == receives.len()
            && sends.iter().zip(receives).all(|(a, b)| !a.notice.conflict(0, &b.notice, 0));
        if !paired {
            let call = sends.first().or(receives.first()).map_or(String::new(), |l| l.notice.to_string());
            let what =
                "a rank alone sends to itself: in one exchange, with as many sends as receives of the \
                        same shapes"
                    .to_string();
            return Err(crate::Error::Argument { call, what });
        }
        sends.iter().zip(receives).try_for_each(|(a, b)| Ok(s.copy(a.tensor, b.tensor)?))
    }

    /// Host bytes of any length from every rank, in the order of ranks.
    pub fn all_gather_bytes(&self, mine: &[u8], label: &'static str) -> Result<Vec<Vec<u8>>> {
        let notice: Notice = self.notice(Kind::Bytes, label);
        if self.core.engine.is_none() {
            self.count(Kind::Bytes, 0);
            return Ok(vec![mine.to_vec()]);
        }
        let rank = self.rank();
        self.meet_and(
            None,
            notice,
            &Job::Bytes(mine),
            |engine, deadline| engine.bytes(mine, deadline),
            |all: &Vec<Vec<u8>>| volume::all_gather(rank, all.iter().map(Vec::len)),
        )
    }
}
