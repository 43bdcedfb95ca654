//! Transfers of one group over shared memory: collectives through the [`Rings`], messages each in a file in memory that
//! the sender keeps until it was taken.

use super::outbox::Outbox;
use super::rings::Rings;
use super::segment::{create_file, number};
use crate::backend::OpError;
use crate::control::Topic;
use crate::host_group::{Done, Transfer};
use crate::process_group::ProcessGroup;
use ferrotron_tensor::Tensor;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest sleep before looking whether a rank has failed or exited.
const LOOK: Duration = Duration::from_millis(10);
/// Bytes of a descriptor sent along with its length; most fit.
const SLOT: usize = 512;

pub(super) struct ShmTransfer {
    pub(super) group: ProcessGroup,
    pub(super) rings: Rings,
    pub(super) outbox: Arc<Outbox>,
}

/// Where a message is.
pub(super) struct Posted {
    pid: u32,
    descriptor: u32,
}

impl ShmTransfer {
    /// Moves what can be moved now: `sends` and `receives` shrink. Returns whether anything was.
    fn progress(
        &self,
        sends: &mut Vec<(usize, &[u8])>,
        receives: &mut Vec<(usize, &mut [u8])>,
    ) -> Done<bool> {
        let broken = |what: String| OpError::Backend { what };
        let mut moved = 0;
        for (to, bytes) in sends.iter_mut() {
            let n = self.rings.send(*to, bytes).map_err(broken)?;
            *bytes = &bytes[n..];
            moved += n;
        }
        for (from, bytes) in receives.iter_mut() {
            let n = self.rings.receive(*from, bytes).map_err(broken)?;
            *bytes = &mut std::mem::take(bytes)[n..];
            moved += n;
        }
        sends.retain(|(_, bytes)| !bytes.is_empty());
        receives.retain(|(_, bytes)| !bytes.is_empty());
        Ok(moved > 0)
    }

    /// Fails if the deadline has passed, a rank has failed, or one that is waited for has exited.
    fn check(&self, waiting: impl Iterator<Item = usize>, deadline: Instant) -> Done {
        let mut missing: Vec<usize> = waiting.collect();
        missing.sort_unstable();
        missing.dedup();
        let control = self.group.process.control();
        let ended: Vec<(usize, bool)> = missing
            .iter()
            .filter(|r| control.has_exited(self.group.ranks[**r]))
            .map(|r| (*r, false))
            .collect();
        let failure = self.group.process.failure();
        match Instant::now() >= deadline || failure.is_some() || !ended.is_empty() {
            true => Err(OpError::RanksMissing { missing, ended, failure }),
            false => Ok(()),
        }
    }

    fn exchange(
        &self,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
        deadline: Instant,
    ) -> Done {
        self.group.process.check_alive()?;
        let mut sends: Vec<(usize, &[u8])> = sends.to_vec();
        let mut receives: Vec<(usize, &mut [u8])> =
            receives.iter_mut().map(|(r, b)| (*r, &mut **b)).collect();
        sends.retain(|(_, bytes)| !bytes.is_empty());
        receives.retain(|(_, bytes)| !bytes.is_empty());
        while !sends.is_empty() || !receives.is_empty() {
            let seen = self.rings.bell();
            if !self.progress(&mut sends, &mut receives)? {
                let waiting = sends.iter().map(|(r, _)| *r).chain(receives.iter().map(|(r, _)| *r));
                self.check(waiting, deadline)?;
                self.rings.sleep(seen, LOOK);
            }
        }
        Ok(())
    }

    /// Bytes of any length, up to [`SLOT`] of them in one round.
    fn gather(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>> {
        let n = self.group.ranks.len();
        let (now, later) = mine.split_at(mine.len().min(SLOT));
        let mut slot = (mine.len() as u64).to_le_bytes().to_vec();
        slot.extend(now);
        slot.resize(8 + SLOT, 0);
        let others: Vec<usize> = self.group.others().collect();
        let mut slots = vec![[0u8; 8 + SLOT]; n];
        let mut receives: Vec<_> =
            slots.iter_mut().enumerate().filter(|(r, _)| *r != self.group.me).collect();
        let mut receives: Vec<_> = receives.iter_mut().map(|(r, slot)| (*r, &mut slot[..])).collect();
        let sends: Vec<_> = others.iter().map(|r| (*r, &slot[..])).collect();
        self.exchange(&sends, &mut receives, deadline)?;
        let mut all: Vec<Vec<u8>> = vec![Vec::new(); n];
        for r in &others {
            let (len, text) = slots[*r].split_at(8);
            let len = len.try_into().map_or(0, u64::from_le_bytes) as usize;
            all[*r] = text[..len.min(SLOT)].to_vec();
            let grown = all[*r].try_reserve_exact(len.saturating_sub(SLOT));
            grown.map_err(|e| OpError::Backend { what: format!("{len} bytes of another rank: {e}") })?;
            all[*r].resize(len, 0);
        }
        let mut receives: Vec<(usize, &mut [u8])> = all
            .iter_mut()
            .enumerate()
            .map(|(r, text)| (r, text.get_mut(SLOT..).unwrap_or_default()))
            .collect();
        let sends: Vec<_> = others.iter().map(|r| (*r, later)).collect();
        self.exchange(&sends, &mut receives, deadline)?;
        Ok(all)
    }
}

impl Transfer for ShmTransfer {
    type Message = Posted;

    fn group(&self) -> &ProcessGroup {
        &self.group
    }

    fn run(
        &self,
        _owners: &[&Tensor],
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
        deadline: Instant,
    ) -> Done {
        self.exchange(sends, receives, deadline)
    }

    fn gather_descriptors(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>> {
        self.gather(mine, deadline)
    }

    fn all_gather_bytes(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>> {
        let mut all = self.gather(mine, deadline)?;
        all[self.group.me] = mine.to_vec();
        Ok(all)
    }

    fn post(&self, to: usize, descriptor: Vec<u8>, bytes: Vec<u8>) -> Done {
        let failed = |e: std::io::Error| OpError::Backend { what: format!("memory for a message: {e}") };
        let mut file = create_file("ferrotron-message", bytes.len()).map_err(failed)?;
        file.write_all(&bytes).map_err(failed)?;
        let mut text = std::process::id().to_le_bytes().to_vec();
        text.extend(number(&file).to_le_bytes());
        text.extend(descriptor);
        let (control, to) = (self.group.process.control(), self.group.ranks[to]);
        self.outbox.keep(control, (self.group.index, to), file);
        Ok(control.send(to, Topic::p2p(self.group.index), text)?)
    }

    fn next_message(&self, from: usize, deadline: Instant) -> Done<(Vec<u8>, Posted)> {
        let (rank, topic) = (self.group.ranks[from], Topic::p2p(self.group.index));
        let process = &self.group.process;
        let text = process.wait(
            deadline,
            || Ok(process.control().try_receive(rank, topic)),
            || vec![(from, rank)],
        )?;
        let word = |at: usize| text.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        match (word(0), word(4)) {
            (Some(pid), Some(descriptor)) => Ok((text[8..].to_vec(), Posted { pid, descriptor })),
            _ => Err(OpError::Backend { what: format!("rank {rank} sent an invalid message") }),
        }
    }

    fn take_message(
        &self,
        from: usize,
        Posted { pid, descriptor }: Posted,
        (_, to): (&Tensor, &mut [u8]),
        _deadline: Instant,
    ) -> Done {
        let rank = self.group.ranks[from];
        let path = format!("/proc/{pid}/fd/{descriptor}");
        let read = File::open(path).and_then(|file| file.read_exact_at(to, 0));
        read.map_err(|e| {
            // It is there as long as its sender is, which may be known here only later.
            let gone = e.kind() == std::io::ErrorKind::NotFound;
            match gone || self.group.process.control().has_exited(rank) {
                true => {
                    OpError::RanksMissing { missing: vec![from], ended: vec![(from, false)], failure: None }
                }
                false => OpError::Backend { what: format!("a message of rank {rank}: {e}") },
            }
        })?;
        let control = self.group.process.control();
        Ok(control.send(rank, Topic::p2p_taken(self.group.index), Vec::new())?)
    }
}
