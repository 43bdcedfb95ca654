//! Groups of processes: every rank sends its descriptor to every other, so that a missing rank is known by number.

use crate::backend::{Descriptors, OpError};
use crate::control::{MAX_WAITING, Topic};
use crate::op_descriptor::OpDescriptor;
use crate::process::Process;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Bytes that a round of a gather through the root may queue there: an eighth of what may wait for a peer, since all of it
/// goes through one connection where the root is not the rank that forwards messages.
const ROUND: usize = MAX_WAITING / 8;
/// Shortest part of a rank in a round, so that large groups gather short messages in one.
const SHORTEST_PART: usize = 4 << 10;

/// A group whose ranks are processes.
pub(crate) struct ProcessGroup {
    pub(crate) process: Arc<Process>,
    /// Number of the group.
    pub(crate) index: u64,
    /// Members as ranks of the job, in group order.
    pub(crate) ranks: Vec<usize>,
    /// This rank within the group.
    pub(crate) me: usize,
}

impl ProcessGroup {
    /// Creates group `index`; all ranks of the job call it. Each rank compares its member list with that of the
    /// previous rank, so any difference is noticed by at least one rank.
    pub(crate) fn new(
        process: &Arc<Process>,
        index: u64,
        name: &str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<ProcessGroup>, OpError> {
        process.check_alive()?;
        process.shared.groups.lock().unwrap_or_else(PoisonError::into_inner).insert(index, ranks.to_vec());
        let control = process.control();
        let (here, size) = (control.rank(), control.size());
        if size > 1 {
            let mine = format!("number {index}, '{name}' of {ranks:?}");
            let before = (here + size - 1) % size;
            control.send((here + 1) % size, Topic::group_setup(index), mine.clone().into_bytes())?;
            let theirs = process.wait(
                deadline,
                || Ok(control.try_receive(before, Topic::group_setup(index))),
                || vec![(before, before)],
            )?;
            if theirs != mine.as_bytes() {
                let theirs = String::from_utf8_lossy(&theirs);
                let what = format!(
                    "rank {here} creates group {mine}, rank {before} creates group {theirs}; all ranks must create the same groups in the same order"
                );
                return Err(OpError::Backend { what });
            }
        }
        let me = ranks.iter().position(|r| *r == here);
        Ok(me.map(|me| ProcessGroup { process: process.clone(), index, ranks: ranks.to_vec(), me }))
    }

    /// The other ranks of the group.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.ranks.len()).filter(move |r| *r != me)
    }

    /// Sends `mine` to all and waits for one message from each. Returns them in rank order; this rank's own entry is
    /// empty.
    pub(crate) fn gather(
        &self,
        topic: Topic,
        mine: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, OpError> {
        self.process.check_alive()?;
        let control = self.process.control();
        for to in self.others() {
            control.send(self.ranks[to], topic, mine.to_vec())?;
        }
        self.collect(topic, deadline)
    }

    /// Waits for one message from each other rank. Returns them in rank order; this rank's own entry is empty.
    fn collect(&self, topic: Topic, deadline: Instant) -> Result<Vec<Vec<u8>>, OpError> {
        self.process.check_alive()?;
        let control = self.process.control();
        let mut received: Vec<Option<Vec<u8>>> = vec![None; self.ranks.len()];
        received[self.me] = Some(Vec::new());
        // Shared by both closures.
        let received = std::cell::RefCell::new(received);
        self.process.wait(
            deadline,
            || {
                let mut received = received.borrow_mut();
                for (place, rank) in received.iter_mut().zip(&self.ranks) {
                    if place.is_none() {
                        *place = control.try_receive(*rank, topic);
                    }
                }
                Ok(received.iter().all(Option::is_some).then_some(()))
            },
            || {
                let missing = |(i, c): (usize, &Option<Vec<u8>>)| c.is_none().then(|| (i, self.ranks[i]));
                received.borrow().iter().enumerate().filter_map(missing).collect()
            },
        )?;
        Ok(received.into_inner().into_iter().flatten().collect())
    }

    /// Bytes of all ranks in rank order: every rank sends its own to the first, which sends all of them to everybody.
    /// Two frames a rank, where [`ProcessGroup::gather`] has as many as there are ranks.
    pub(crate) fn gather_through_root(
        &self,
        topic: Topic,
        mine: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, OpError> {
        let control = self.process.control();
        if self.me == 0 {
            let mut all = self.collect(topic, deadline)?;
            all[0] = mine.to_vec();
            let mut text = Vec::with_capacity(all.iter().map(|b| 8 + b.len()).sum());
            for bytes in &all {
                text.extend((bytes.len() as u64).to_le_bytes());
                text.extend(bytes);
            }
            self.others().try_for_each(|to| control.send(self.ranks[to], topic, text.clone()))?;
            return Ok(all);
        }
        self.process.check_alive()?;
        let root = self.ranks[0];
        control.send(root, topic, mine.to_vec())?;
        let text =
            self.process.wait(deadline, || Ok(control.try_receive(root, topic)), || vec![(0, root)])?;
        let mut rest = text.as_slice();
        let mut all = Vec::with_capacity(self.ranks.len());
        while let Some((len, after)) = rest.split_first_chunk::<8>() {
            let part = usize::try_from(u64::from_le_bytes(*len)).ok().and_then(|n| after.split_at_checked(n));
            let Some((part, after)) = part else { break };
            all.push(part.to_vec());
            rest = after;
        }
        if all.len() != self.ranks.len() || !rest.is_empty() {
            return Err(invalid_reply(root));
        }
        Ok(all)
    }

    /// Bytes of any length of all ranks in rank order, through the root.
    pub(crate) fn gather_bytes_through_root(
        &self,
        mine: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, OpError> {
        let n = self.ranks.len();
        // The root sends the parts of n ranks to n - 1 of them.
        let part = (ROUND / (n * (n - 1)).max(1)).max(SHORTEST_PART);
        let topic = Topic::bytes(self.index);
        self.gather_in_rounds(part, mine, |mine| self.gather_through_root(topic, mine, deadline))
    }

    /// Gathers in rounds of at most `part` bytes a rank: what a connection or a mailbox holds is limited. Each rank sends the
    /// number of bytes it has left, then the next of them, until none has any. Short messages take one round.
    pub(crate) fn gather_in_rounds(
        &self,
        part: usize,
        mut mine: &[u8],
        gather: impl Fn(&[u8]) -> Result<Vec<Vec<u8>>, OpError>,
    ) -> Result<Vec<Vec<u8>>, OpError> {
        let mut all = vec![Vec::new(); self.ranks.len()];
        loop {
            let (now, later) = mine.split_at(mine.len().min(part));
            let mut text = (mine.len() as u64).to_le_bytes().to_vec();
            text.extend(now);
            let parts = gather(&text)?;
            let mut more = false;
            for ((bytes, part), rank) in all.iter_mut().zip(&parts).zip(&self.ranks) {
                let Some((left, now)) = part.split_first_chunk::<8>() else {
                    return Err(invalid_reply(*rank));
                };
                bytes.extend(now);
                more |= u64::from_le_bytes(*left) > now.len() as u64;
            }
            if !more {
                return Ok(all);
            }
            mine = later;
        }
    }

    /// [`ProcessGroup::exchange_descriptors`] in two frames a rank.
    pub(crate) fn exchange_through_root(
        &self,
        descriptor: &OpDescriptor,
        deadline: Instant,
    ) -> Result<Descriptors, OpError> {
        let all = self.gather_through_root(Topic::collective(self.index), &descriptor.encode(), deadline)?;
        let decoded = all.iter().enumerate().map(|(r, bytes)| self.decode(r, bytes).map(Arc::new));
        Ok(Descriptors::PerRank(decoded.collect::<Result<_, _>>()?))
    }

    /// Implements [`crate::backend::GroupBackend::exchange_descriptors`].
    pub(crate) fn exchange_descriptors(
        &self,
        descriptor: &OpDescriptor,
        deadline: Instant,
    ) -> Result<Descriptors, OpError> {
        let all = self.gather(Topic::collective(self.index), &descriptor.encode(), deadline)?;
        self.compare_descriptors(descriptor, &all)
    }

    /// Compares this rank's descriptor with those of all, as gathered.
    pub(crate) fn compare_descriptors(
        &self,
        descriptor: &OpDescriptor,
        all: &[Vec<u8>],
    ) -> Result<Descriptors, OpError> {
        let mine = descriptor.encode();
        let same = self.others().all(|r| all[r] == mine);
        if same && !descriptor.is_pairwise() {
            self.others().for_each(|r| self.process.note_call(self.ranks[r], descriptor));
            return Ok(Descriptors::AllEqual);
        }
        let mut descriptors = Vec::with_capacity(all.len());
        for (r, bytes) in all.iter().enumerate() {
            let theirs = if r == self.me { descriptor.clone() } else { self.decode(r, bytes)? };
            descriptors.push(Arc::new(theirs));
        }
        Ok(Descriptors::PerRank(descriptors))
    }

    /// Implements [`crate::backend::GroupBackend::all_gather_bytes`].
    pub(crate) fn all_gather_bytes(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, OpError> {
        // A rank may have sent its next part before others take this one.
        self.gather_in_rounds(ROUND, mine, |mine| {
            let mut all = self.gather(Topic::bytes(self.index), mine, deadline)?;
            all[self.me] = mine.to_vec();
            Ok(all)
        })
    }

    /// Decodes a descriptor from rank `from` of the group.
    pub(crate) fn decode(&self, from: usize, bytes: &[u8]) -> Result<OpDescriptor, OpError> {
        let rank = self.ranks[from];
        let descriptor = OpDescriptor::decode(bytes).ok_or_else(|| {
            let what = format!("rank {rank} sent an invalid op descriptor; all ranks must run the same version of the program");
            OpError::Backend { what }
        })?;
        self.process.note_call(rank, &descriptor);
        Ok(descriptor)
    }
}

fn invalid_reply(rank: usize) -> OpError {
    let what =
        format!("rank {rank} sent an invalid reply; all ranks must run the same version of the program");
    OpError::Backend { what }
}

impl From<crate::Error> for OpError {
    fn from(error: crate::Error) -> OpError {
        OpError::Backend { what: error.to_string() }
    }
}
