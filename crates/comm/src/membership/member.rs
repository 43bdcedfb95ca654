//! A process of a job: its connection to the coordinator, heartbeats, and its seat in each generation.

use super::coordinator::RestartPolicy;
use super::host_name;
use super::messages::{Assign, Ended, Frames, FromMember, Join, ToMember, write};
use super::server::{Server, end_process};
use crate::backend::FailureReport;
use crate::launch_env::LaunchEnv;
use crate::process::ProcessState;
use crate::rendezvous::accept::{HANDSHAKE_TIMEOUT, all_ranks};
use crate::rendezvous::connect::{Place, prove, to_rank0};
use crate::rendezvous::{RETRY, SecretSource, listen, random, resolve};
use crate::{Error, Result};
use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Interval of heartbeats.
const BEAT: Duration = Duration::from_millis(500);
/// Most time a process that leaves waits for the others, if it hosts the coordinator.
const LAST_MEMBER: Duration = Duration::from_secs(20);

/// This process's membership of a job. Dropping it leaves the job.
pub struct Membership {
    shared: Arc<Shared>,
}

struct Shared {
    job: LaunchEnv,
    policy: RestartPolicy,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    join: Join,
    /// The connection, for writing.
    out: Option<TcpStream>,
    /// Address of the coordinator, and the job's secret.
    place: Option<Place>,
    assigned: Option<Assign>,
    refused: Option<(String, Ended)>,
    /// Process id and host of the coordinator, and when it was heard last.
    coordinator: Option<(u32, String, Instant)>,
    /// Why there is no connection.
    trouble: String,
    server: Option<Server>,
    /// The process state of the generation in progress.
    world: Option<(u64, Weak<ProcessState>)>,
    /// The generation of which a rank was lost last, and that failure: it may come before the ranks have met.
    lost: Option<(u64, FailureReport)>,
    leaving: bool,
}

/// How a process has left its last generation; the default before its first.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// Steps done in it.
    pub steps: u64,
    /// Why it ended.
    pub reason: String,
    /// Nothing has failed: the processes change places.
    pub rotate: bool,
}

/// A rank in a generation, whose other ranks are about to be met.
pub struct Seat {
    /// Generation, from 1.
    pub generation: u64,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// What ended the generation before; empty in the first.
    pub reason: String,
    /// Ranks whose process is another than before.
    pub replaced: Vec<usize>,
    /// All processes have changed places; nothing has failed.
    pub rotated: bool,
    listener: TcpListener,
    rank0: Place,
    shared: Arc<Shared>,
}

impl Membership {
    /// Joins the job that `job` describes; its size includes spares. Returns at once: [`Membership::take_seat`] waits.
    pub fn join(job: &LaunchEnv, policy: RestartPolicy) -> Result<Membership> {
        let process = u64::from_le_bytes(random()?.first_chunk::<8>().copied().unwrap_or_default());
        let join = Join {
            process,
            pid: std::process::id(),
            host: host_name(),
            slot: job.rank,
            seat: None,
            waiting: None,
            steps: 0,
            reason: String::new(),
            rotate: false,
            restarts: 0,
            failures: Vec::new(),
        };
        let state = State {
            join,
            out: None,
            place: None,
            assigned: None,
            refused: None,
            coordinator: None,
            trouble: String::new(),
            server: None,
            world: None,
            lost: None,
            leaving: false,
        };
        let shared =
            Arc::new(Shared { job: job.clone(), policy, state: Mutex::new(state), changed: Condvar::new() });
        let member = shared.clone();
        let spawned = std::thread::Builder::new().name("job membership".into()).spawn(move || member.run());
        spawned.map_err(|e| Error::Launch(format!("cannot start the membership thread: {e}")))?;
        Ok(Membership { shared })
    }

    /// Waits for a seat in the next generation, having left the last one as `left` says. `None` if this process is not
    /// needed any more: the job has finished. Waits as long as the coordinator does, a spare forever; without a coordinator
    /// at most `timeout`.
    pub fn take_seat(&self, left: &Left, timeout: Duration) -> Result<Option<Seat>> {
        let shared = &*self.shared;
        let mut deadline = Instant::now() + timeout;
        let mut state = shared.state();
        while state.place.is_none() {
            state = shared.wait(state, deadline)?;
        }
        let listener = TcpListener::bind((shared.own_address(&state), 0))
            .map_err(|e| Error::Launch(format!("cannot listen for the other ranks: {e}")))?;
        let at = listener.local_addr().map_err(|e| Error::Launch(e.to_string()))?;
        state.world = None;
        state.assigned = None;
        state.join.waiting = Some(at);
        state.join.steps = left.steps;
        state.join.reason.clone_from(&left.reason);
        state.join.rotate = left.rotate;
        shared.say(&mut state);
        loop {
            if let Some((reason, ended)) = state.refused.take() {
                return match ended {
                    Ended::Finished => Ok(None),
                    Ended::Excluded => Err(Error::Excluded(reason)),
                    Ended::Failed => Err(Error::Launch(reason)),
                };
            }
            if let (Some(assign), Some(place)) = (state.assigned.take(), state.place.clone()) {
                let mut address = assign.rank0;
                if address.ip().is_unspecified() {
                    address.set_ip(place.address.ip());
                }
                let rank0 = Place { address, secret: assign.secret(&place.secret) };
                let Assign { generation, rank, size, reason, replaced, rotated, .. } = assign;
                return Ok(Some(Seat {
                    generation,
                    rank,
                    size,
                    reason,
                    replaced,
                    rotated,
                    listener,
                    rank0,
                    shared: self.shared.clone(),
                }));
            }
            if state.out.is_some() {
                deadline = Instant::now() + timeout;
            }
            state = shared.wait(state, deadline)?;
        }
    }

    /// The failure of a rank that the coordinator notices becomes that of this generation's processes.
    pub(crate) fn watch(&self, seat: u64, world: &Arc<ProcessState>) {
        let mut state = self.shared.state();
        state.world = Some((seat, Arc::downgrade(world)));
        // It was noticed while the ranks met.
        let lost = state.lost.take_if(|(generation, _)| *generation == seat);
        drop(state);
        if let Some((_, failure)) = lost {
            world.set_failure(failure);
        }
    }

    /// The address by which other processes of the job reach this one, once it is known. A process that reaches the coordinator
    /// by loopback does not know it: the address is unspecified, and stands for [`Membership::coordinator`] of whoever connects.
    pub fn address(&self) -> IpAddr {
        let state = self.shared.state();
        self.shared.own_address(&state)
    }

    /// The address by which this process reaches the coordinator's host, once it is known.
    pub fn coordinator(&self) -> Option<IpAddr> {
        self.shared.state().place.as_ref().map(|place| place.address.ip())
    }

    /// Leaves as a process does that is killed, except that a coordinator in it goes on.
    #[cfg(test)]
    pub(super) fn vanish(self) {
        let mut state = self.shared.state();
        (state.leaving, state.join.seat) = (true, None);
        state.out.take().into_iter().for_each(|s| drop(s.shutdown(std::net::Shutdown::Both)));
    }
}

impl Seat {
    /// Connects the ranks of the generation: on rank 0 one connection to every other rank, elsewhere the one to rank 0. Ends
    /// when one of them is lost, so that this process is free for the next generation.
    pub(crate) fn meet(&self, job: &LaunchEnv, timeout: Duration) -> Result<HashMap<usize, TcpStream>> {
        let deadline = Instant::now() + timeout;
        if self.size == 1 {
            return Ok(HashMap::new());
        }
        let cancelled = || {
            let state = self.shared.state();
            let lost = state.lost.as_ref().filter(|(generation, _)| *generation == self.generation);
            lost.map(|(_, failure)| failure.reason.clone())
        };
        if self.rank == 0 {
            return all_ranks(&self.listener, self.size, &self.rank0.secret, deadline, &cancelled);
        }
        let own = LaunchEnv {
            rank: self.rank,
            size: self.size,
            rendezvous: Some(self.rank0.address.to_string()),
            ..job.clone()
        };
        let place = || Ok(self.rank0.clone());
        Ok(HashMap::from([(0, to_rank0(&own, place, deadline, &cancelled)?)]))
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let shared = &*self.shared;
        let deadline = Instant::now() + LAST_MEMBER;
        let mut state = shared.state();
        if state.join.seat.is_some() && state.join.waiting.is_none() && !std::thread::panicking() {
            if let Some(out) = &mut state.out {
                let _ = write(out, &FromMember::Bye);
            }
            // The others may still need the coordinator, and spares hear from it that they may end.
            while state.server.as_ref().is_some_and(|s| !s.is_over()) && Instant::now() < deadline {
                drop(state);
                std::thread::sleep(Duration::from_millis(20));
                state = shared.state();
            }
        }
        state.leaving = true;
        state.out = None;
        shared.changed.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change; fails at the deadline.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, deadline: Instant) -> Result<MutexGuard<'a, State>> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let at = self.job.rendezvous.as_deref().unwrap_or_default();
            return Err(Error::Launch(format!(
                "no coordinator of the job answers at {at}: {}; check MASTER_ADDR and MASTER_PORT",
                state.trouble
            )));
        }
        let waited = self.changed.wait_timeout(state, left.min(Duration::from_millis(200)));
        Ok(waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// The address at which this process would accept the other ranks.
    fn own_address(&self, state: &State) -> IpAddr {
        let local = state.out.as_ref().and_then(|s| s.local_addr().ok()).map(|a| a.ip());
        match local {
            _ if self.job.one_host => Ipv4Addr::LOCALHOST.into(),
            Some(ip) if !ip.is_loopback() => ip,
            _ => Ipv4Addr::UNSPECIFIED.into(),
        }
    }

    /// Tells the coordinator what this process does now.
    fn say(&self, state: &mut State) {
        let join = FromMember::Join(state.join.clone());
        if let Some(out) = &mut state.out {
            // A broken connection is opened again, and says the same.
            let _ = write(out, &join);
        }
    }

    /// Keeps the connection to the coordinator, and is one if there is none.
    fn run(&self) {
        while !self.state().leaving {
            match self.connect() {
                Ok(stream) => self.follow(stream),
                Err(e) => self.state().trouble = e.to_string(),
            }
            let mut state = self.state();
            (state.out, state.coordinator) = (None, None);
            drop(state);
            self.changed.notify_all();
            std::thread::sleep(RETRY);
        }
    }

    fn connect(&self) -> Result<TcpStream> {
        let Some(at) = &self.job.rendezvous else {
            let what = "set MASTER_ADDR (and MASTER_PORT) to where rank 0 can be reached, on all ranks";
            return Err(Error::Launch(what.to_string()));
        };
        let address = resolve(at)?;
        if self.state().server.is_none()
            && let Some(listener) = self.bind(at, address)
        {
            let (secret, file) = SecretSource::of(&self.job, address.port())?.create()?;
            let server = Server::start(listener, secret, file, self.policy.clone())?;
            self.state().server = Some(server);
            tracing::info!(%address, "coordinates the job");
        }
        let secret = SecretSource::of(&self.job, address.port())?.read()?;
        let secret = secret.ok_or_else(|| Error::Launch(format!("no coordinator listens at {at}")))?;
        let place = Place { address, secret };
        let stream = prove(&self.job, &place, Instant::now() + HANDSHAKE_TIMEOUT)
            .map_err(|what| Error::Launch(what.to_string()))?;
        let mut state = self.state();
        state.place = Some(place);
        state.out = Some(stream.try_clone().map_err(|e| Error::Launch(e.to_string()))?);
        state.trouble.clear();
        self.say(&mut state);
        drop(state);
        self.changed.notify_all();
        Ok(stream)
    }

    /// The job's rendezvous address, if it is free and this process may listen there.
    fn bind(&self, at: &str, address: SocketAddr) -> Option<TcpListener> {
        match self.job.one_host || self.job.rank == 0 {
            true => listen::at(&self.job, at).ok(),
            // Another process of rank 0's host; loopback would be this one's own.
            false if address.ip().is_loopback() => None,
            false => TcpListener::bind(address).ok(),
        }
    }

    /// Reads what the coordinator says and sends heartbeats, until the connection closes.
    fn follow(&self, mut stream: TcpStream) {
        let _ = stream.set_read_timeout(Some(BEAT));
        let (mut frames, mut bytes, mut beat) = (Frames::default(), [0; 4096], Instant::now());
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => return,
                Ok(n) => frames.add(&bytes[..n]),
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(_) => return,
            }
            loop {
                match frames.next::<ToMember>() {
                    Ok(Some(message)) => self.hear(message),
                    Ok(None) => break,
                    Err(_) => return,
                }
            }
            let mut state = self.state();
            if state.leaving {
                return;
            }
            if state.coordinator.as_ref().is_some_and(|c| c.2.elapsed() > self.policy.heartbeat) {
                // Stopped, and in the way of another one.
                let silent = state.coordinator.take();
                drop(state);
                return silent.into_iter().for_each(|(pid, host, _)| end_process(pid, &host));
            }
            if beat.elapsed() >= BEAT {
                beat = Instant::now();
                let sent = state.out.as_mut().map(|out| write(out, &FromMember::Beat));
                if !matches!(sent, Some(Ok(()))) {
                    return;
                }
            }
        }
    }

    fn hear(&self, message: ToMember) {
        let mut state = self.state();
        match message {
            ToMember::Beat { pid, host } => state.coordinator = Some((pid, host, Instant::now())),
            ToMember::Assign(assign) => {
                state.join.seat = Some((assign.generation, assign.rank));
                state.join.waiting = None;
                state.join.rotate = false;
                state.join.restarts = assign.restarts;
                state.join.failures.clone_from(&assign.failures);
                state.assigned = Some(assign);
            }
            ToMember::Lost { generation, rank, reason } => {
                let world = state.world.as_ref().filter(|(g, _)| *g == generation);
                let world = world.and_then(|(_, w)| w.upgrade());
                let failure = FailureReport { rank, stall: false, diagnosis: true, is_final: false, reason };
                state.lost = Some((generation, failure.clone()));
                drop(state);
                tracing::warn!("{}", failure.reason);
                if let Some(world) = world {
                    world.set_failure(failure);
                }
                return self.changed.notify_all();
            }
            ToMember::Refuse { reason, ended } => state.refused = Some((reason, ended)),
        }
        drop(state);
        self.changed.notify_all();
    }
}
