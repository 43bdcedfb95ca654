//! Who has which rank: the decisions of the coordinator, without sockets or clocks of its own.
//!
//! A *generation* is one formation of the job's groups. It begins when every rank has a process that waits for it, and ends
//! when one of them fails. Survivors keep their ranks. A missing rank goes to the process that the launcher has restarted in
//! its place, else to a spare; a process that does not answer or does not come within the soft limit is given up.
//!
//! A generation also ends when all its ranks ask for it, to change places: every process takes the rank after its own.

use super::messages::{Assign, Ended, Join, ToMember};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

/// How long a coordinator that took over waits for the members of the last generation to find it.
const TAKE_OVER: Duration = Duration::from_secs(2);
/// How long a spare may take to leave when the job is over.
const LEAVE: Duration = Duration::from_secs(2);
/// Longest wait before a restart.
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// How a job is kept together.
#[derive(Clone, Debug)]
pub struct RestartPolicy {
    /// Number of ranks.
    pub size: usize,
    /// Generations after the first.
    pub restarts: u64,
    /// Failures of one process slot after which it is excluded.
    pub rank_failures: u64,
    /// How long a generation waits for ranks that are alive, and for a replacement of those that are not.
    pub soft: Duration,
    /// Silence after which a process is given up.
    pub heartbeat: Duration,
    /// Wait before the second restart in a row without a step; doubled for each further one.
    pub backoff: Duration,
    /// World sizes to which the job may shrink, largest first.
    pub shrink: Vec<usize>,
}

/// Number of a connection.
pub(crate) type Id = u64;

struct Member {
    join: Join,
    heard: Instant,
    /// It has finished its work.
    finished: bool,
    /// When it was told that the job is over.
    dismissed: Option<Instant>,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Send(Id, ToMember),
    /// Close the connection, and end the process if it is on this host: it does not answer.
    Evict(Id, Join),
}

/// The state of the job's membership.
pub(crate) struct Coordinator {
    policy: RestartPolicy,
    /// Ranks of the next generation.
    size: usize,
    generation: u64,
    /// Generations that began because of a failure.
    restarts: u64,
    members: BTreeMap<Id, Member>,
    failures: BTreeMap<usize, u64>,
    /// Since when ranks are missing, and why the last generation ended.
    forming: Option<(Instant, String)>,
    /// Restarts in a row without a step.
    fruitless: u32,
    /// A rank has finished its work and left.
    left: bool,
    /// When it learned from a member of a generation that another coordinator had formed.
    took_over: Option<Instant>,
}

impl Coordinator {
    pub(crate) fn new(policy: RestartPolicy, now: Instant) -> Coordinator {
        let size = policy.size;
        Coordinator {
            policy,
            size,
            generation: 0,
            restarts: 0,
            members: BTreeMap::new(),
            failures: BTreeMap::new(),
            forming: Some((now, String::new())),
            fruitless: 0,
            left: false,
            took_over: None,
        }
    }

    /// A member has connected, or says what it does now.
    pub(crate) fn joined(&mut self, id: Id, join: Join, now: Instant) -> Vec<Action> {
        for (slot, count) in &join.failures {
            let known = self.failures.entry(*slot).or_default();
            *known = (*known).max(*count);
        }
        self.restarts = self.restarts.max(join.restarts);
        if let Some((generation, _)) = join.seat {
            // A coordinator that took over learns where the job is.
            if generation > self.generation {
                self.generation = generation;
                self.took_over = Some(now);
            }
            if self.members.values().all(|m| m.join.waiting.is_some() || m.join.seat.is_none())
                && join.waiting.is_none()
                && self.generation == generation
            {
                self.forming = None;
            }
        }
        let failed = self.failures.get(&join.slot).copied().unwrap_or(0);
        if join.seat.is_none() && failed >= self.policy.rank_failures {
            let reason = format!(
                "the process of rank {} on {} is excluded after {failed} failures (fault.rank_failures)",
                join.slot,
                short_host(&join.host)
            );
            return vec![Action::Send(id, ToMember::Refuse { reason, ended: Ended::Excluded })];
        }
        let survivor_waits = join.waiting.is_some() && join.seat.is_some_and(|(g, _)| g == self.generation);
        let why = join.reason.clone();
        self.members.insert(id, Member { join, heard: now, finished: false, dismissed: None });
        match &mut self.forming {
            None if survivor_waits => self.forming = Some((now, why)),
            Some((_, known)) if survivor_waits && known.is_empty() => *known = why,
            _ => {}
        }
        Vec::new()
    }

    /// A member is alive.
    pub(crate) fn heard(&mut self, id: Id, now: Instant) {
        if let Some(member) = self.members.get_mut(&id) {
            member.heard = now;
        }
    }

    /// A member has finished its work.
    pub(crate) fn finished(&mut self, id: Id) {
        if let Some(member) = self.members.get_mut(&id) {
            member.finished = true;
        }
    }

    /// A connection has closed.
    pub(crate) fn closed(&mut self, id: Id, now: Instant) -> Vec<Action> {
        match self.members.remove(&id) {
            Some(m) if !m.finished => self.lost(&m.join, "its process has ended", now),
            Some(m) => {
                self.left |= m.join.seat.is_some_and(|(g, _)| g == self.generation);
                Vec::new()
            }
            None => Vec::new(),
        }
    }

    /// True once every rank has finished.
    pub(crate) fn is_over(&self) -> bool {
        let mut seated = self.seated().peekable();
        self.generation > 0
            && self.forming.is_none()
            && seated.peek().is_some()
            && seated.all(|(_, m)| m.finished)
    }

    /// Members of the last generation.
    fn seated(&self) -> impl Iterator<Item = (&Id, &Member)> {
        self.members.iter().filter(|(_, m)| m.join.seat.is_some_and(|(g, _)| g == self.generation))
    }

    /// Members that do not have a seat.
    fn seatless(&self) -> impl Iterator<Item = Id> {
        self.members.iter().filter(|(_, m)| m.join.seat.is_none()).map(|(id, _)| *id)
    }

    /// The process of a rank is lost: it counts as its failure, and the others of the generation are told.
    fn lost(&mut self, join: &Join, how: &str, now: Instant) -> Vec<Action> {
        let Some((generation, rank)) = join.seat.filter(|(g, _)| *g == self.generation) else {
            return Vec::new();
        };
        *self.failures.entry(join.slot).or_default() += 1;
        let reason = format!("rank {rank} on {} is lost: {how}", short_host(&join.host));
        match &mut self.forming {
            None => self.forming = Some((now, reason.clone())),
            Some((_, why)) if why.is_empty() => *why = reason.clone(),
            Some(_) => {}
        }
        let lost = ToMember::Lost { generation, rank, reason };
        self.seated()
            .filter(|(_, m)| m.join.waiting.is_none())
            .map(|(id, _)| Action::Send(*id, lost.clone()))
            .collect()
    }

    /// Gives up members that are silent, tells spares when the job is over, and forms the next generation once that is
    /// possible. Called often.
    pub(crate) fn tick(&mut self, now: Instant, nonce: impl FnOnce() -> [u8; 32]) -> Vec<Action> {
        let mut actions = Vec::new();
        let silent: Vec<Id> = self
            .members
            .iter()
            .filter(|(_, m)| now.saturating_duration_since(m.heard) > self.policy.heartbeat)
            .map(|(id, _)| *id)
            .collect();
        for id in silent {
            actions.extend(self.evict(id, "it does not answer", now));
        }
        if self.is_over() {
            actions.extend(self.dismiss(now));
            return actions;
        }
        if let Some((since, reason)) = self.forming.clone() {
            actions.extend(self.form(since, reason, now, nonce));
        }
        actions
    }

    /// Tells spares that the job is over, and gives up those that do not leave.
    fn dismiss(&mut self, now: Instant) -> Vec<Action> {
        let reason = "the job has finished".to_string();
        let refuse = ToMember::Refuse { reason, ended: Ended::Finished };
        let mut actions = Vec::new();
        for id in self.seatless().collect::<Vec<_>>() {
            match self.members.get_mut(&id).map(|m| (m.dismissed, m)) {
                Some((None, member)) => {
                    member.dismissed = Some(now);
                    actions.push(Action::Send(id, refuse.clone()));
                }
                Some((Some(at), _)) if now.saturating_duration_since(at) > LEAVE => {
                    actions.extend(self.evict(id, "it does not leave", now));
                }
                _ => {}
            }
        }
        actions
    }

    /// True once every rank has finished and every spare has left.
    pub(crate) fn is_deserted(&self) -> bool {
        self.is_over() && self.seatless().next().is_none()
    }

    fn evict(&mut self, id: Id, how: &str, now: Instant) -> Vec<Action> {
        let Some(member) = self.members.remove(&id) else { return Vec::new() };
        let mut actions = self.lost(&member.join, how, now);
        actions.push(Action::Evict(id, member.join));
        actions
    }

    /// The next generation, or what must happen before it.
    fn form(
        &mut self,
        since: Instant,
        reason: String,
        now: Instant,
        nonce: impl FnOnce() -> [u8; 32],
    ) -> Vec<Action> {
        let waited = now.saturating_duration_since(since);
        // Survivors that have not left the failed generation yet.
        let busy: Vec<Id> =
            self.seated().filter(|(_, m)| m.join.waiting.is_none()).map(|(id, _)| *id).collect();
        if !busy.is_empty() {
            return match waited > self.policy.soft {
                true => busy
                    .into_iter()
                    .flat_map(|id| self.evict(id, "it did not leave its failed communication in time", now))
                    .collect(),
                false => Vec::new(),
            };
        }
        let rotate = self.seated().count() == self.size && self.seated().all(|(_, m)| m.join.rotate);
        let restart = self.generation > 0 && !rotate;
        if restart && self.restarts >= self.policy.restarts {
            return self.give_up(&format!(
                "{reason}; the {} restarts of fault.restarts are used up",
                self.policy.restarts
            ));
        }
        if restart && waited < self.backoff() {
            return Vec::new();
        }
        let found_by_all = self.seated().count() >= self.size;
        if !found_by_all && self.took_over.is_some_and(|at| now.saturating_duration_since(at) < TAKE_OVER) {
            return Vec::new();
        }
        if rotate {
            let mut last: Vec<(usize, Id)> =
                self.seated().filter_map(|(id, m)| Some((m.join.seat?.1, *id))).collect();
            last.sort_unstable();
            let mut seats: Vec<Id> = last.into_iter().map(|(_, id)| id).collect();
            seats.rotate_right(1);
            return self.seat(seats, reason, true, nonce);
        }
        let Some(seats) = self.seats(waited > self.policy.soft) else {
            // Processes of a job that begins may start late; each has its own time limit.
            return match restart && waited > self.policy.soft {
                true => self.shrink_or_give_up(&reason),
                false => Vec::new(),
            };
        };
        self.restarts += u64::from(restart);
        self.seat(seats, reason, false, nonce)
    }

    fn backoff(&self) -> Duration {
        match self.fruitless {
            0 => Duration::ZERO,
            n => (self.policy.backoff * 2u32.saturating_pow(n - 1)).min(MAX_BACKOFF),
        }
    }

    /// A member for every rank; `None` if one is missing.
    fn seats(&self, late: bool) -> Option<Vec<Id>> {
        let mut free: BTreeSet<Id> =
            self.members.iter().filter(|(_, m)| m.join.waiting.is_some()).map(|(id, _)| *id).collect();
        let mut seats: Vec<Option<Id>> = vec![None; self.size];
        let mut take = |seats: &mut Vec<Option<Id>>, fits: &dyn Fn(&Join, usize) -> bool| {
            for (rank, seat) in seats.iter_mut().enumerate().filter(|(_, seat)| seat.is_none()) {
                let found = free.iter().copied().find(|id| fits(&self.members[id].join, rank));
                if let Some(id) = found {
                    free.remove(&id);
                    *seat = Some(id);
                }
            }
        };
        let generation = self.generation;
        take(&mut seats, &|j, rank| j.seat == Some((generation, rank)));
        take(&mut seats, &|j, rank| j.seat.is_none() && j.slot == rank);
        // The first generation waits for the processes that the launcher meant; later ones take any.
        if generation > 0 || late {
            take(&mut seats, &|j, _| j.seat.is_none_or(|(g, _)| g != generation));
        }
        seats.into_iter().collect()
    }

    fn seat(
        &mut self,
        seats: Vec<Id>,
        reason: String,
        rotated: bool,
        nonce: impl FnOnce() -> [u8; 32],
    ) -> Vec<Action> {
        let worked = seats.iter().any(|id| self.members[id].join.steps > 0);
        if self.generation > 0 && !rotated {
            self.fruitless = if worked { 0 } else { self.fruitless + 1 };
        }
        let replaced: Vec<usize> = (0..seats.len())
            .filter(|r| self.members[&seats[*r]].join.seat != Some((self.generation, *r)))
            .collect();
        self.generation += 1;
        self.forming = None;
        let anywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let rank0 = seats.first().and_then(|id| self.members[id].join.waiting).unwrap_or(anywhere);
        let nonce = nonce();
        let mut actions = Vec::new();
        for (rank, id) in seats.into_iter().enumerate() {
            let assign = Assign {
                generation: self.generation,
                rank,
                size: self.size,
                rank0,
                nonce,
                reason: reason.clone(),
                replaced: if self.generation == 1 || rotated { Vec::new() } else { replaced.clone() },
                rotated,
                restarts: self.restarts,
                failures: self.failures.iter().map(|(slot, n)| (*slot, *n)).collect(),
            };
            if let Some(member) = self.members.get_mut(&id) {
                member.join.seat = Some((self.generation, rank));
                member.join.waiting = None;
                member.join.rotate = false;
                member.join.steps = 0;
            }
            actions.push(Action::Send(id, ToMember::Assign(assign)));
        }
        actions
    }

    /// Without a replacement: fewer ranks, where that is allowed.
    fn shrink_or_give_up(&mut self, reason: &str) -> Vec<Action> {
        let here = self.members.values().filter(|m| m.join.waiting.is_some()).count();
        match self.policy.shrink.iter().copied().find(|size| *size <= here && *size < self.size) {
            Some(size) => {
                self.size = size;
                // Ranks are counted anew, in the order of the old ones.
                let mut old: Vec<(Option<(u64, usize)>, Id)> = self
                    .members
                    .iter()
                    .filter(|(_, m)| m.join.waiting.is_some())
                    .map(|(id, m)| (m.join.seat, *id))
                    .collect();
                old.sort_by_key(|(seat, id)| (seat.is_none(), seat.map(|(_, r)| r), *id));
                for (rank, (_, id)) in old.iter().enumerate() {
                    if let Some(member) = self.members.get_mut(id) {
                        member.join.seat = (rank < size).then_some((self.generation, rank));
                    }
                }
                Vec::new()
            }
            None => self.give_up(&format!(
                "{reason}; nobody replaced it within {:.0} s (fault.soft_timeout): start a spare (--spares), or have the \
                 launcher restart it",
                self.policy.soft.as_secs_f64()
            )),
        }
    }

    fn give_up(&mut self, reason: &str) -> Vec<Action> {
        let refuse = ToMember::Refuse { reason: reason.to_string(), ended: Ended::Failed };
        self.forming = None;
        self.members.keys().map(|id| Action::Send(*id, refuse.clone())).collect()
    }
}

/// The part of a host's identity that people know.
fn short_host(host: &str) -> &str {
    host.split_whitespace().next().unwrap_or("an unknown host")
}
