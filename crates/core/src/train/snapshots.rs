//! The snapshots that a process keeps of its rank, their mirrors on other ranks, and the newest state that all ranks have.
//!
//! Two snapshots are kept: the newest complete one, and the one that is being copied. Each is mirrored on a partner, where
//! possible of another host, by a thread of its own. The next snapshot is taken once no rank is mirroring any more, so that
//! at any time every rank has one complete snapshot of the same step, in its own memory and in its partner's.

use super::Trainer;
use super::memory_snapshot::{MemorySnapshot, SnapshotHeader};
use super::partner_verification::{FaultCounts, Process, Verification};
use crate::{Error, Result};
use ferrotron_comm::{Communicator, PeerAddress, PeerKey, PeerMemory, SNAPSHOTS_KEPT};
use ferrotron_tensor::HostBuffer;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The snapshots of a process. Clones share them; they outlive the trainer and its communication.
#[derive(Clone, Default)]
pub struct Snapshots(Arc<Mutex<KeptSnapshots>>);

#[derive(Default)]
struct KeptSnapshots {
    /// Oldest first, with their steps.
    own: VecDeque<(u64, Arc<Mutex<MemorySnapshot>>)>,
    peers: Option<PeerMemory>,
    /// The host of processes that do not know an address of their own.
    coordinator: Option<IpAddr>,
    /// What keeps this rank's mirrors.
    partner: Option<PeerAddress>,
    mirroring: Option<JoinHandle<()>>,
    /// Ranks of the job that the snapshots belong to.
    ranks: usize,
    /// Steps that other processes are about to run.
    verification: Option<Verification>,
    /// Wrong results of processes.
    faults: FaultCounts,
}

/// What a rank tells the others before a run goes on.
#[derive(Serialize, Deserialize)]
struct Held {
    address: Option<PeerAddress>,
    /// Steps of its own snapshots.
    own: Vec<u64>,
    /// Snapshots of others that it keeps.
    mirrors: Vec<PeerKey>,
}

/// The newest state that all ranks have in memory.
pub(super) struct Recovery {
    pub(super) step: u64,
    /// Who keeps this rank's, if this process does not have it.
    from: Option<PeerAddress>,
}

impl Snapshots {
    /// Snapshots that are mirrored in the memory of other processes, and theirs in `peers`. `coordinator` is the address of the
    /// coordinator's host.
    pub fn mirrored(peers: PeerMemory, coordinator: Option<IpAddr>) -> Snapshots {
        let snapshots = Snapshots::default();
        let mut kept = snapshots.kept();
        (kept.peers, kept.coordinator) = (Some(peers), coordinator);
        drop(kept);
        snapshots
    }

    fn kept(&self) -> MutexGuard<'_, KeptSnapshots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The step of the newest snapshot.
    pub fn newest(&self) -> Option<u64> {
        self.kept().own.back().map(|(step, _)| *step)
    }

    /// Whether other processes keep copies of them.
    pub(super) fn are_mirrored(&self) -> bool {
        self.kept().peers.is_some()
    }

    /// Waits until the last snapshot is mirrored.
    pub(super) fn finish_mirroring(&self) {
        if let Some(thread) = self.kept().mirroring.take() {
            let _ = thread.join();
        }
    }

    /// The steps that are being verified; none after it.
    pub(super) fn take_verification(&self) -> Option<Verification> {
        self.kept().verification.take()
    }

    /// Steps that are to be verified.
    pub(super) fn set_verification(&self, v: Option<Verification>) {
        self.kept().verification = v;
    }

    /// Counts a fault of a process; how many it has now.
    pub(super) fn count_fault(&self, process: Process) -> u64 {
        let mut kept = self.kept();
        let count = kept.faults.entry(process).or_default();
        *count += 1;
        *count
    }

    /// Whether the last snapshot is still being mirrored.
    pub(super) fn is_mirroring(&self) -> bool {
        self.kept().mirroring.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Exchanges addresses and what each rank holds, and finds the newest step of which every rank's snapshot is in some
    /// process. Collective.
    pub(super) fn recovery(&self, all: &Communicator) -> Result<Option<Recovery>> {
        let mut kept = self.kept();
        if kept.ranks != all.size() {
            // Shards of another number of ranks.
            kept.own.clear();
            kept.peers.iter().for_each(PeerMemory::clear);
            kept.ranks = all.size();
        }
        let own = |(step, snapshot): &(u64, Arc<Mutex<MemorySnapshot>>)| {
            let mine = lock(snapshot).header.rank == all.rank();
            mine.then_some(*step)
        };
        let held = Held {
            address: kept.peers.as_ref().map(|p| p.address().clone()),
            own: kept.own.iter().filter_map(own).collect(),
            mirrors: kept.peers.as_ref().map_or(Vec::new(), PeerMemory::keys),
        };
        let text = serde_json::to_vec(&held).map_err(|e| Error::Invalid(format!("snapshots: {e}")))?;
        let said = all.all_gather_bytes(&text, "snapshots")?;
        let said: Vec<Held> = said
            .iter()
            .map(|text| serde_json::from_slice(text))
            .collect::<Result<_, _>>()
            .map_err(|e| Error::Invalid(format!("snapshots of a rank: {e}")))?;
        let addresses: Vec<Option<&PeerAddress>> = said.iter().map(|h| h.address.as_ref()).collect();
        let coordinator = kept.coordinator;
        let reached = |a: &PeerAddress| coordinator.map_or_else(|| a.clone(), |host| a.or_at(host));
        kept.partner = partner(&addresses, all.rank()).and_then(|r| addresses[r].map(reached));
        let keeper = |owner: usize, step: u64| {
            let key = PeerKey { owner, step };
            said.iter().find(|h| h.mirrors.contains(&key)).and_then(|h| h.address.as_ref())
        };
        let mut steps: Vec<u64> = said.iter().flat_map(|h| h.own.iter().copied()).collect();
        steps.extend(said.iter().flat_map(|h| h.mirrors.iter().map(|key| key.step)));
        steps.sort_unstable();
        let complete =
            |step: u64| (0..said.len()).all(|r| said[r].own.contains(&step) || keeper(r, step).is_some());
        let Some(step) = steps.into_iter().rev().find(|step| complete(*step)) else { return Ok(None) };
        let from = match said[all.rank()].own.contains(&step) {
            true => None,
            false => keeper(all.rank(), step).map(reached),
        };
        Ok(Some(Recovery { step, from }))
    }

    /// Brings a trainer to the state of [`Snapshots::recovery`]. Collective.
    pub(super) fn recover(&self, trainer: &mut Trainer, to: &Recovery) -> Result<()> {
        if let Some(keeper) = &to.from {
            let key = PeerKey { owner: trainer.rank.world.rank(), step: to.step };
            let bytes = keeper.get(key)?.ok_or_else(|| {
                Error::Invalid(format!("the snapshot of step {} is not kept any more", to.step))
            })?;
            let snapshot = Arc::new(Mutex::new(decode(bytes)?));
            self.kept().own = VecDeque::from([(to.step, snapshot)]);
        }
        self.restore(trainer, to.step)
    }

    /// Goes back to the snapshot of `step`; later ones are dropped. Collective.
    pub(crate) fn restore(&self, trainer: &mut Trainer, step: u64) -> Result<()> {
        let mut kept = self.kept();
        kept.own.retain(|(of, _)| *of <= step);
        let found = kept.own.iter().find(|(of, _)| *of == step).map(|(_, snapshot)| snapshot.clone());
        drop(kept);
        let snapshot = found.ok_or_else(|| Error::Invalid(format!("there is no snapshot of step {step}")))?;
        trainer.restore_memory_snapshot(&mut lock(&snapshot))
    }

    /// Drops the snapshots after `step`, whose state was found to be wrong.
    pub(super) fn drop_after(&self, step: u64) {
        self.kept().own.retain(|(of, _)| *of <= step);
    }

    /// Takes a snapshot of the state after the last launched step, and begins to mirror it. No rank may be mirroring.
    pub(super) fn take(&self, trainer: &mut Trainer) -> Result<()> {
        let mut kept = self.kept();
        let kept = &mut *kept;
        if let Some(thread) = kept.mirroring.take() {
            let _ = thread.join();
        }
        kept.ranks = trainer.rank.world.size();
        let reused = match kept.own.len() >= SNAPSHOTS_KEPT {
            true => kept.own.pop_front().and_then(|(_, s)| Arc::into_inner(s)),
            false => None,
        };
        let buffer = reused.map(|s| s.into_inner().unwrap_or_else(PoisonError::into_inner).buffer);
        let snapshot = trainer.begin_memory_snapshot(buffer)?;
        let step = snapshot.header.step;
        kept.own.retain(|(of, _)| *of != step);
        let snapshot = Arc::new(Mutex::new(snapshot));
        kept.own.push_back((step, snapshot.clone()));
        if let Some(partner) = kept.partner.clone() {
            let mirror = move || {
                if let Err(e) = send(&snapshot, &partner) {
                    // The next one may succeed; until then the step before is what ranks have in common.
                    tracing::warn!(shown = true, "a snapshot is not mirrored: {e}");
                }
            };
            let spawned = std::thread::Builder::new().name("snapshot mirror".into()).spawn(mirror);
            kept.mirroring =
                Some(spawned.map_err(|e| Error::Invalid(format!("cannot start a thread: {e}")))?);
        }
        Ok(())
    }
}

fn lock(snapshot: &Mutex<MemorySnapshot>) -> MutexGuard<'_, MemorySnapshot> {
    snapshot.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rank that keeps the mirrors of `rank`: at the least distance that leads every rank to another host, else the next.
fn partner(addresses: &[Option<&PeerAddress>], rank: usize) -> Option<usize> {
    let n = addresses.len();
    if n < 2 || addresses.iter().any(Option::is_none) {
        return None;
    }
    let host = |r: usize| addresses[r % n].map(PeerAddress::host);
    let distance = (1..n).find(|d| (0..n).all(|r| host(r) != host(r + d))).unwrap_or(1);
    Some((rank + distance) % n)
}

/// `u64` length of the header, the header, the tensors.
fn send(snapshot: &Mutex<MemorySnapshot>, to: &PeerAddress) -> Result<()> {
    let mut snapshot = lock(snapshot);
    let MemorySnapshot { header, buffer } = &mut *snapshot;
    let key = PeerKey { owner: header.rank, step: header.step };
    let text = serde_json::to_vec(header).map_err(|e| Error::Invalid(format!("snapshot: {e}")))?;
    Ok(to.put(key, &[&(text.len() as u64).to_le_bytes(), &text, buffer.bytes()?])?)
}

fn decode(mut bytes: Vec<u8>) -> Result<MemorySnapshot> {
    let header = bytes.split_first_chunk::<8>().and_then(|(len, rest)| {
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        Some((serde_json::from_slice::<SnapshotHeader>(rest.get(..len)?).ok()?, 8 + len))
    });
    let (header, start) =
        header.ok_or_else(|| Error::Invalid("a mirrored snapshot has no readable header".into()))?;
    bytes.drain(..start);
    Ok(MemorySnapshot { header, buffer: HostBuffer::from(bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partners_are_on_other_hosts_where_possible() {
        let address = |ip: &str| PeerAddress::for_test(ip);
        let partners = |ips: &[&str]| -> Vec<Option<usize>> {
            let all: Vec<PeerAddress> = ips.iter().map(|ip| address(ip)).collect();
            let all: Vec<Option<&PeerAddress>> = all.iter().map(Some).collect();
            (0..all.len()).map(|r| partner(&all, r)).collect()
        };
        assert_eq!(partners(&["10.0.0.1"; 3]), [Some(1), Some(2), Some(0)]);
        let two = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"];
        assert_eq!(partners(&two), [Some(2), Some(3), Some(0), Some(1)]);
        assert_eq!(partners(&["10.0.0.1"]), [None]);
        assert_eq!(partner(&[None, None], 0), None);
    }
}
