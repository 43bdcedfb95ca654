//! The sockets of the coordinator: a thread that accepts members, one for each of them, and one that decides.

use super::coordinator::{Action, Coordinator, Id, RestartPolicy};
use super::messages::{Frames, FromMember, ToMember, write};
use super::{TEMPORARY_FAILURE, host_name};
use crate::rendezvous::accept::HANDSHAKE_TIMEOUT;
use crate::rendezvous::handshake::{Answering, HELLO, Hello, Next, VERSION};
use crate::rendezvous::torch_store::Limited;
use crate::rendezvous::{Secret, SecretFile, random};
use crate::{Error, Result};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How often decisions are made when nothing happens.
const TICK: Duration = Duration::from_millis(20);
/// Connections that have proven nothing yet.
const MAX_PENDING: usize = 256;

enum News {
    Connected(Id, TcpStream),
    Said(Id, FromMember),
    Closed(Id),
}

/// The coordinator in this process.
pub(super) struct Server {
    /// All ranks have finished, and all spares have left.
    over: Arc<AtomicBool>,
}

impl Server {
    /// Serves at `listener` until the process ends. `file` keeps the job's secret readable for its other processes.
    pub(super) fn start(
        listener: TcpListener,
        secret: Secret,
        file: Option<SecretFile>,
        policy: RestartPolicy,
    ) -> Result<Server> {
        let (news, heard) = channel();
        let over = Arc::new(AtomicBool::new(false));
        let size = policy.size;
        spawn("job members", move || accept(&listener, &secret, size, &news))?;
        let ended = over.clone();
        spawn("job coordinator", move || {
            let _file = file;
            decide(&heard, policy, &ended);
        })?;
        Ok(Server { over })
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(work);
    spawned.map(drop).map_err(|e| Error::Launch(format!("cannot start a thread of the coordinator: {e}")))
}

fn accept(listener: &TcpListener, secret: &Secret, size: usize, news: &Sender<News>) {
    let pending = Arc::new(AtomicUsize::new(0));
    for (id, stream) in (1..).zip(listener.incoming()) {
        // Out of descriptors, or a connection that has gone already.
        let Ok(stream) = stream else {
            std::thread::sleep(TICK);
            continue;
        };
        if pending.fetch_add(1, Ordering::AcqRel) >= MAX_PENDING {
            pending.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let (secret, news, unproven) = (secret.clone(), news.clone(), pending.clone());
        let serve = move || {
            let member = handshake(&stream, &secret, size);
            unproven.fetch_sub(1, Ordering::AcqRel);
            if member {
                read(id, stream, &news);
            }
        };
        if spawn("job member", serve).is_err() {
            pending.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// True if the other side knows the job's secret.
fn handshake(stream: &TcpStream, secret: &Secret, size: usize) -> bool {
    let Ok(nonce) = random() else { return false };
    let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
    let mut answering = Answering::new(Hello::new(0, size, nonce));
    let mut bytes = [0; HELLO];
    let _ = stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT));
    let _ = stream.set_nodelay(true);
    loop {
        let wanted = answering.wants().min(bytes.len());
        let Ok(n) = (Limited { stream, deadline }).read(&mut bytes[..wanted]) else { return false };
        match answering.feed(secret, &bytes[..n]) {
            _ if n == 0 => return false,
            Next::More => {}
            Next::Send(answer) => {
                if (&mut &*stream).write_all(&answer).is_err() {
                    return false;
                }
            }
            Next::Proven(hello) => return hello.version == VERSION,
            Next::Stranger => return false,
        }
    }
}

/// Reads what a member says until its connection closes.
fn read(id: Id, mut stream: TcpStream, news: &Sender<News>) {
    let _ = stream.set_read_timeout(None);
    let Ok(writer) = stream.try_clone() else { return };
    if news.send(News::Connected(id, writer)).is_err() {
        return;
    }
    let (mut frames, mut bytes) = (Frames::default(), [0; 4096]);
    'open: while let Ok(n) = stream.read(&mut bytes) {
        if n == 0 {
            break;
        }
        frames.add(&bytes[..n]);
        loop {
            match frames.next::<FromMember>() {
                Ok(Some(message)) => drop(news.send(News::Said(id, message))),
                Ok(None) => break,
                Err(_) => break 'open,
            }
        }
    }
    let _ = news.send(News::Closed(id));
}

fn decide(heard: &Receiver<News>, policy: RestartPolicy, over: &AtomicBool) {
    let mut coordinator = Coordinator::new(policy, Instant::now());
    let mut streams: HashMap<Id, TcpStream> = HashMap::new();
    let host = host_name();
    let alive = || ToMember::Beat { pid: std::process::id(), host: host.clone() };
    loop {
        let news = heard.recv_timeout(TICK);
        let now = Instant::now();
        let mut actions = match news {
            Ok(News::Connected(id, stream)) => {
                streams.insert(id, stream);
                // At once: a member must know whom to end if this process is stopped.
                vec![Action::Send(id, alive())]
            }
            Ok(News::Said(id, FromMember::Join(join))) => coordinator.joined(id, join, now),
            Ok(News::Said(id, FromMember::Beat)) => {
                coordinator.heard(id, now);
                vec![Action::Send(id, alive())]
            }
            Ok(News::Said(id, FromMember::Bye)) => {
                coordinator.finished(id);
                Vec::new()
            }
            Ok(News::Closed(id)) => {
                streams.remove(&id);
                coordinator.closed(id, now)
            }
            Err(RecvTimeoutError::Timeout) => Vec::new(),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        actions.extend(coordinator.tick(now, || random().unwrap_or_default()));
        for action in actions {
            match action {
                Action::Send(id, message) => send(&mut streams, id, &message),
                Action::Evict(id, join) => {
                    streams.remove(&id).into_iter().for_each(|s| drop(s.shutdown(Shutdown::Both)));
                    end_process(join.pid, &join.host);
                }
            }
        }
        over.store(coordinator.is_deserted(), Ordering::Release);
    }
}

fn send(streams: &mut HashMap<Id, TcpStream>, id: Id, message: &ToMember) {
    // A member that does not read is noticed by its silence.
    if let Some(stream) = streams.get_mut(&id) {
        let _ = write(stream, message);
    }
}

/// Ends a process of this host that does not answer. Its connection was open, so the process id is still its own.
pub(super) fn end_process(pid: u32, host: &str) {
    if host != host_name() {
        return;
    }
    tracing::warn!(shown = true, pid, "ending a process that does not answer");
    if pid == std::process::id() {
        signal_hook::low_level::exit(TEMPORARY_FAILURE);
    }
    if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}
