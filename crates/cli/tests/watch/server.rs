//! The server of the page, without a browser: what it serves, to whom, and how soon it tells of an event.

use super::run_log::RunLog;
use super::{Ends, binary};
use ferrotron_core::events::{Checkpoint, Event, FILE_NAME};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A server with its address.
pub struct Server {
    _process: Ends,
    pub url: String,
    /// host:port
    address: String,
    /// What follows the address: `/`, or `/TOKEN/`.
    base: String,
}

impl Server {
    pub fn start(runs: &Path, args: &[&str]) -> Server {
        let mut child = Command::new(binary())
            .args(["watch", "--web", "--port", "0", "--json"])
            .args(args)
            .arg(runs)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = child.stdout.take().unwrap();
        let process = Ends(child);
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).unwrap();
        let url = serde_json::from_str::<Value>(&line).unwrap()["url"].as_str().unwrap().to_string();
        let (address, base) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
        let (address, base) = (address.to_string(), format!("/{base}"));
        Server { _process: process, url, address, base }
    }

    /// Sends bytes and returns all of the answer.
    fn raw(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        let mut answer = Vec::new();
        // A server that refuses may close before it has read everything.
        drop(stream.read_to_end(&mut answer));
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn connect(&self) -> TcpStream {
        let port = self.address.rsplit_once(':').unwrap().1;
        let stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Status line and body of a path below the page's address.
    fn get(&self, path: &str) -> (String, String) {
        let host = &self.address;
        let answer = self.raw(format!("GET {}{path} HTTP/1.1\r\nHost: {host}\r\n\r\n", self.base).as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        (head.lines().next().unwrap_or_default().to_string(), body.to_string())
    }
}

const OK: &str = "HTTP/1.1 200 OK";
const NOT_FOUND: &str = "HTTP/1.1 404 Not Found";
const FORBIDDEN: &str = "HTTP/1.1 403 Forbidden";

#[test]
fn the_page_and_the_files_of_a_run_are_served_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("secret"), "do not show").unwrap();
    let mut run = RunLog::create(dir.path(), "a", 100);
    run.steps(30);
    run.event(Event::Checkpoint(Checkpoint {
        step: 30,
        path: "../../secret".into(),
        ..Checkpoint::default()
    }));
    let checkpoint = run.dir.join("checkpoints/step-00000030");
    std::fs::create_dir_all(&checkpoint).unwrap();
    std::fs::write(checkpoint.join("manifest.json"), "{\"the\": \"manifest\"}").unwrap();
    std::fs::write(run.dir.join("config-until-10.toml"), "old").unwrap();
    let server = Server::start(dir.path(), &[]);
    assert!(server.address.starts_with("127.0.0.1:"), "{}", server.url);
    for (path, part) in [
        ("", "<title>Ferrotron"),
        ("page.js", "EventSource"),
        ("charts.js", "class LineChart"),
        ("page.css", ":root"),
        ("icon.svg", "<svg"),
        ("run/0/config.toml", "steps = 100"),
        ("run/0/config-until-10.toml", "old"),
        ("run/0/checkpoint/30", "the"),
        ("run/0/loads/1", "\"steps\":["),
    ] {
        let (status, body) = server.get(path);
        assert!(status == OK && body.contains(part), "{path}: {status}: {body}");
    }
    for path in [
        "secret",
        "../secret",
        "run/0/../secret",
        "run/0/../../secret",
        "run/0/%2e%2e/secret",
        "run/0//etc/passwd",
        "run/0/events.jsonl",
        "run/0/config.toml/..",
        "run/0/checkpoint/29",
        "run/0/checkpoint/../../../secret",
        "run/1/config.toml",
        "run/-1/config.toml",
        "run/18446744073709551616/config.toml",
        "run/0/loads/x",
    ] {
        let (status, body) = server.get(path);
        assert!(status == NOT_FOUND && !body.contains("do not show"), "{path}: {status}: {body}");
    }
    let (status, body) = server.get("api/data?points=16&smooth=0.9");
    let data: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, OK);
    let run = &data["runs"][0];
    assert_eq!((&run["name"], &run["step"], &run["state"]), (&"a".into(), &30.into(), &"running".into()));
    assert!((2..=18).contains(&run["series"]["loss"]["x"].as_array().unwrap().len()), "{body}");
    assert!(run["series"]["loss, smoothed"]["y"].is_array());
    // Nothing of the page comes from elsewhere.
    let (_, page) = server.get("");
    assert!(!page.contains("//") && !page.contains(" style=") && !page.contains("onclick"), "{page}");
}

/// Steps that gave the same bits again are a verification that passed: a note, but no mark in the charts. A log of an earlier
/// version, as text.
#[test]
fn reruns_are_marked_unless_they_verify_steps() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = RunLog::create(dir.path(), "a", 100);
    run.steps(30);
    let outcomes = ["the same bits", "different bits", "the same bits, skip"];
    let mut log = std::fs::File::options().append(true).open(run.dir.join(FILE_NAME)).unwrap();
    for (step, outcome) in [10, 20, 30].iter().zip(outcomes) {
        let line = format!(
            "{{\"kind\":\"rerun\",\"step\":{step},\"steps\":10,\"reason\":\"verification\",\"outcome\":\"{outcome}\",\"seconds\":1.0}}"
        );
        writeln!(log, "{line}").unwrap();
    }
    let server = Server::start(dir.path(), &[]);
    let start = Instant::now();
    let data = loop {
        let data: Value = serde_json::from_str(&server.get("api/data?points=16").1).unwrap();
        if data["runs"][0]["step"] == 30 {
            break data;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{data}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let run = &data["runs"][0];
    let marks: Vec<_> = run["marks"].as_array().unwrap().iter().map(|m| (&m["step"], &m["kind"])).collect();
    assert_eq!(marks, [(&30.into(), &"rerun".into()), (&20.into(), &"rerun".into())]);
    let notes = run["notes"].as_array().unwrap();
    let kinds: Vec<_> = notes.iter().map(|n| n["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["rerun", "rerun", "verified"]);
    let notes: Vec<&str> = notes.iter().map(|n| n["text"].as_str().unwrap()).collect();
    assert_eq!((run["unreadable"].as_u64(), notes.len()), (Some(0), 3), "{notes:?}");
    assert!(notes.iter().rev().zip(outcomes).all(|(note, outcome)| note.ends_with(outcome)), "{notes:?}");
}

#[test]
fn others_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    RunLog::create(dir.path(), "a", 100).steps(3);
    let server = Server::start(dir.path(), &[]);
    let ask = |request: &str| server.raw(request.as_bytes());
    // DNS rebinding: the name of another site that points here.
    for host in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"] {
        let answer = ask(&format!("GET /api/data HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert!(answer.starts_with(FORBIDDEN) && !answer.contains("\"runs\""), "{answer}");
    }
    assert!(ask("GET / HTTP/1.1\r\n\r\n").starts_with(FORBIDDEN));
    assert!(ask("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(ask("nonsense\r\n\r\n").starts_with("HTTP/1.1 400"));
    assert!(ask(&format!("GET /{} HTTP/1.1\r\n", "x".repeat(100_000))).starts_with("HTTP/1.1 400"));
    let answer = ask("HEAD / HTTP/1.1\r\nHost: localhost:9\r\n\r\n");
    assert!(answer.starts_with(OK) && answer.ends_with("\r\n\r\n"), "{answer}");
    for header in
        ["Content-Security-Policy: default-src 'none';", "nosniff", "no-store", "frame-ancestors 'none'"]
    {
        assert!(answer.contains(header), "{header}: {answer}");
    }
    assert!(!answer.contains("Access-Control"), "{answer}");

    // Reachable from elsewhere: only with the token.
    let open = Server::start(dir.path(), &["--host", "127.0.0.1"]);
    assert_eq!(open.base.len(), 34, "{}", open.url);
    assert_eq!(open.get("").0, OK);
    assert_eq!(open.get("api/data").0, OK);
    for path in ["/", "/api/data", "/page.js", "/0123456789abcdef0123456789abcdef/", &open.base[..33]] {
        let answer = open.raw(format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", open.address).as_bytes());
        assert!(answer.starts_with(FORBIDDEN), "{path}: {answer}");
    }
    let again = Server::start(dir.path(), &["--host", "127.0.0.1"]);
    assert_ne!(open.base, again.base);
}

#[test]
fn the_stream_tells_of_an_event_within_two_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = RunLog::create(dir.path(), "a", 100);
    run.steps(3);
    let server = Server::start(dir.path(), &[]);
    let mut stream = server.connect();
    stream.write_all(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map(|l| l.unwrap());
    let mut next =
        || lines.find_map(|l| l.strip_prefix("data: ").map(|n| n.parse::<u64>().unwrap())).unwrap();
    let mut told = next();
    // The best of three: the machine may be busy with other tests.
    let mut best = Duration::MAX;
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(300));
        let start = Instant::now();
        run.steps(1);
        let now = next();
        assert!(now > told);
        (told, best) = (now, best.min(start.elapsed()));
    }
    assert!(best < Duration::from_secs(2), "{best:?}");
    // A run that appears is told of as well.
    RunLog::create(dir.path(), "b", 100).steps(1);
    next();
}
