//! `watch --web`: one page that shows the runs, served from the program itself.
//!
//! The page, its script and its style are in the binary and load nothing from elsewhere. The server answers GET only. Without
//! `--host` it listens on 127.0.0.1 and answers only requests for a loopback name; with it, only those whose path begins with
//! a random token. Files are served by fixed name, or by a name that a listing of the run folder or an event has given, never
//! by a path that was asked for.

mod data;
mod http;

use super::runs::WatchedRuns;
use crate::args::Global;
use crate::output::{self, UsageError};
use anyhow::{Context, Result};
use data::{Axis, Query};
use http::{Request, Response};
use serde_json::json;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The port unless one is given: iron is element 26. If it is taken, any other.
const PORT: u16 = 6026;
/// How often logs are read.
const POLL: Duration = Duration::from_millis(250);
/// Pause after a block of a long log, in which requests are answered from what has been read.
const BETWEEN_BLOCKS: Duration = Duration::from_millis(2);
/// How often pages hear of a log that is being read.
const SHOW: Duration = Duration::from_millis(500);
/// Silence after which a stream of events sends a comment, so that a page that is gone is noticed.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Time for a request to arrive and a response to leave.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Most connections at a time.
const CONNECTIONS: usize = 128;
/// Largest configuration or manifest that is shown.
const MAX_FILE: u64 = 64 << 20;

const PAGE: &str = include_str!("web/page.html");
const SCRIPT: &str = include_str!("web/page.js");
const CHARTS: &str = include_str!("web/charts.js");
const STYLE: &str = include_str!("web/page.css");
const ICON: &str = include_str!("web/icon.svg");

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// What all connections share.
struct Server {
    runs: Mutex<WatchedRuns>,
    /// Rises with every change of any run.
    revision: Mutex<u64>,
    changed: Condvar,
    /// What paths begin with, where the server can be reached from elsewhere.
    token: Option<String>,
    connections: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves until the process ends.
pub fn serve(
    mut runs: WatchedRuns,
    host: Option<IpAddr>,
    port: Option<u16>,
    global: &Global,
) -> Result<ExitCode> {
    let address = host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let listener = listen(address, port)?;
    let address = listener.local_addr()?;
    let token = host.map(|_| token()).transpose()?;
    // The first request finds the runs, and short logs whole.
    runs.poll_block();
    let server = Arc::new(Server {
        runs: Mutex::new(runs),
        revision: Mutex::new(0),
        changed: Condvar::new(),
        token,
        connections: AtomicUsize::new(0),
    });
    let poller = Arc::clone(&server);
    std::thread::Builder::new().name("poll".into()).spawn(move || {
        // Long logs are shown while they are read, block by block.
        let (mut changed, mut shown) = (true, None::<Instant>);
        loop {
            let (new, more) = lock(&poller.runs).poll_block();
            changed |= new;
            if changed && (!more || shown.is_none_or(|t| t.elapsed() >= SHOW)) {
                *lock(&poller.revision) += 1;
                poller.changed.notify_all();
                (changed, shown) = (false, Some(Instant::now()));
            }
            std::thread::sleep(if more { BETWEEN_BLOCKS } else { POLL });
        }
    })?;
    announce(&server, address, global)?;
    for stream in listener.incoming() {
        // A connection that is gone before it is accepted is no reason to end.
        let Ok(mut stream) = stream else { continue };
        let server = Arc::clone(&server);
        if server.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
            server.connections.fetch_sub(1, Ordering::Relaxed);
            drop(Response::error("503 Service Unavailable", "too many connections").send(&mut stream, false));
            continue;
        }
        let answer = move || {
            let _counted = Counted(&server.connections);
            // A browser that goes away in between is no error.
            drop(server.answer(&mut stream));
        };
        if std::thread::Builder::new().name("http".into()).spawn(answer).is_err() {
            output::note("warning: no thread could be started for a connection");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A connection, until it is dropped.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn listen(address: IpAddr, port: Option<u16>) -> Result<TcpListener> {
    let bound = TcpListener::bind((address, port.unwrap_or(PORT)));
    let bound = if port.is_none() { bound.or_else(|_| TcpListener::bind((address, 0))) } else { bound };
    bound.map_err(|e| {
        let what = format!("cannot listen on {address}, port {}: {e}", port.unwrap_or(PORT));
        UsageError::new(what).hint("--port 0 takes a free port").into()
    })
}

/// 128 random bits.
fn token() -> Result<String> {
    let mut bytes = [0u8; 16];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    anyhow::ensure!(
        got.context("no random numbers for the token")? == bytes.len(),
        "no random numbers for the token"
    );
    Ok(bytes.iter().fold(String::new(), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    }))
}

/// Prints where the page is.
fn announce(server: &Server, address: SocketAddr, global: &Global) -> Result<()> {
    let path = server.token.as_ref().map_or(String::new(), |t| format!("{t}/"));
    let url = match address.ip() {
        // Reached by any of the machine's addresses: the name is what others know it by.
        ip if ip.is_unspecified() => {
            let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let name = if name.trim().is_empty() { "localhost" } else { name.trim() };
            format!("http://{name}:{}/{path}", address.port())
        }
        _ => format!("http://{address}/{path}"),
    };
    if global.json {
        return output::print(&format!("{}\n", json!({ "url": url })));
    }
    output::print(&format!("watching at {url}\n"))?;
    output::note("Ctrl-C ends.");
    Ok(())
}

impl Server {
    fn answer(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        let Some(request) = Request::read(stream)? else {
            return Response::error("400 Bad Request", "not a request of this page").send(stream, false);
        };
        let head = request.method == "HEAD";
        if !head && request.method != "GET" {
            return Response::error("405 Method Not Allowed", "only GET").send(stream, false);
        }
        let Some(path) = self.allowed(&request) else {
            let why = "open the address that `ferrotron watch --web` printed";
            return Response::error("403 Forbidden", why).send(stream, head);
        };
        if path == "api/events" && !head {
            return self.event_stream(stream);
        }
        self.respond(path, &request).send(stream, head)
    }

    /// The path within the page, if the request may see it.
    fn allowed<'a>(&self, request: &'a Request) -> Option<&'a str> {
        let path = request.path.strip_prefix('/')?;
        match &self.token {
            None => request.is_for_loopback().then_some(path),
            Some(token) => {
                let (given, path) = path.split_once('/')?;
                // Takes the same time wherever they differ.
                let same = given.len() == token.len()
                    && given.bytes().zip(token.bytes()).fold(0, |all, (a, b)| all | (a ^ b)) == 0;
                same.then_some(path)
            }
        }
    }

    fn respond(&self, path: &str, request: &Request) -> Response {
        match path {
            "" => Response::ok("text/html; charset=utf-8", PAGE),
            "page.js" => Response::ok(JAVASCRIPT, SCRIPT),
            "charts.js" => Response::ok(JAVASCRIPT, CHARTS),
            "page.css" => Response::ok("text/css; charset=utf-8", STYLE),
            "icon.svg" => Response::ok("image/svg+xml", ICON),
            "api/data" => {
                let query = Query {
                    axis: request.query::<Axis>("axis").unwrap_or_default(),
                    points: request.query("points").unwrap_or(800),
                    from: request.query("from").unwrap_or(f64::NEG_INFINITY),
                    to: request.query("to").unwrap_or(f64::INFINITY),
                    smooth: request.query("smooth").unwrap_or(0.0),
                };
                let data = data::all(&lock(&self.runs), &query);
                Response::ok(JSON, data.to_string())
            }
            _ => {
                self.of_run(path).unwrap_or_else(|| Response::error("404 Not Found", "there is no such page"))
            }
        }
    }

    /// `run/N/…`: expert loads, a configuration, the manifest of a checkpoint.
    fn of_run(&self, path: &str) -> Option<Response> {
        let (id, rest) = path.strip_prefix("run/")?.split_once('/')?;
        let runs = lock(&self.runs);
        let run = runs.runs.get(id.parse::<usize>().ok()?)?;
        if let Some(layer) = rest.strip_prefix("loads/") {
            return Some(Response::ok(JSON, data::loads(run, layer.parse().ok()?).to_string()));
        }
        let file = if let Some(step) = rest.strip_prefix("checkpoint/") {
            // By its step: an event may name any path.
            let step = step.parse().ok()?;
            run.history().checkpoints.iter().find(|c| c.step == step)?;
            let folder = ferrotron_core::checkpoint::folder_name(step);
            run.dir().join("checkpoints").join(folder).join("manifest.json")
        } else {
            let name = data::configs(run).into_iter().find(|name| name == rest)?;
            run.dir().join(name)
        };
        drop(runs);
        Some(match ferrotron_core::fs::read_limited(&file, MAX_FILE) {
            Ok(bytes) => Response::ok(TEXT, bytes),
            Err(e) => Response::error("404 Not Found", &e.to_string()),
        })
    }

    /// Tells the page that there is something new, as server-sent events, until it goes away.
    fn event_stream(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        http::begin_event_stream(stream)?;
        let mut told = None;
        loop {
            let revision = {
                let revision = lock(&self.revision);
                let waited = self.changed.wait_timeout_while(revision, HEARTBEAT, |r| told == Some(*r));
                *waited.unwrap_or_else(PoisonError::into_inner).0
            };
            let message = match told == Some(revision) {
                true => ": still here\n\n".to_string(),
                false => format!("data: {revision}\n\n"),
            };
            told = Some(revision);
            stream.write_all(message.as_bytes())?;
            stream.flush()?;
        }
    }
}
