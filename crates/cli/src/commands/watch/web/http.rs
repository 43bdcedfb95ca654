//! As much of HTTP/1.1 as one page needs: GET, small requests, one response per connection.

use std::io::{Read, Result, Write};
use std::net::TcpStream;

/// Longest head of a request.
const MAX_HEAD: usize = 16 << 10;

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// The path as sent, without the query. Nothing is decoded: the names that are served need no escapes.
    pub path: String,
    query: Vec<(String, String)>,
    pub host: Option<String>,
}

impl Request {
    /// Reads the head of a request; none if it is not one.
    pub fn read(stream: &mut TcpStream) -> Result<Option<Request>> {
        let mut head = Vec::new();
        let mut buffer = [0; 2048];
        while !head.windows(4).any(|w| w == b"\r\n\r\n") {
            let n = stream.read(&mut buffer)?;
            if n == 0 || head.len() + n > MAX_HEAD {
                return Ok(None);
            }
            head.extend_from_slice(&buffer[..n]);
        }
        Ok(Request::parse(&head))
    }

    fn parse(head: &[u8]) -> Option<Request> {
        let head = std::str::from_utf8(head).ok()?;
        let mut lines = head.split("\r\n");
        let mut first = lines.next()?.split(' ');
        let (method, target, version) = (first.next()?, first.next()?, first.next()?);
        if !version.starts_with("HTTP/1.") || first.next().is_some() || !target.starts_with('/') {
            return None;
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let pairs = query.split('&').filter_map(|p| p.split_once('='));
        let mut hosts =
            lines.filter_map(|l| l.split_once(':')).filter(|(k, _)| k.eq_ignore_ascii_case("host"));
        let host = hosts.next().map(|(_, v)| v.trim().to_string());
        if hosts.next().is_some() {
            return None;
        }
        Some(Request {
            method: method.into(),
            path: path.into(),
            query: pairs.map(|(k, v)| (k.into(), v.into())).collect(),
            host,
        })
    }

    /// A value of the query.
    pub fn query<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.query.iter().find(|(k, _)| k == name)?.1.parse().ok()
    }

    /// True if the Host header names this machine by a loopback name. A page of another site that has its own name point to
    /// 127.0.0.1 (DNS rebinding) sends that name. The port may differ: it may be forwarded.
    pub fn is_for_loopback(&self) -> bool {
        let Some(host) = &self.host else { return false };
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => host,
        };
        matches!(name, "127.0.0.1" | "[::1]") || name.eq_ignore_ascii_case("localhost")
    }
}

/// Headers of every response: nothing from elsewhere, nothing inline, no framing, nothing kept in caches.
const SECURITY: &str = "\
Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
X-Content-Type-Options: nosniff\r\n\
X-Frame-Options: DENY\r\n\
Referrer-Policy: no-referrer\r\n\
Cross-Origin-Resource-Policy: same-origin\r\n\
Cross-Origin-Opener-Policy: same-origin\r\n\
Cache-Control: no-store\r\n\
Connection: close\r\n";

/// A response.
#[derive(Debug)]
pub struct Response {
    status: &'static str,
    kind: &'static str,
    body: Vec<u8>,
}

impl Response {
    /// 200.
    pub fn ok(kind: &'static str, body: impl Into<Vec<u8>>) -> Response {
        Response { status: "200 OK", kind, body: body.into() }
    }

    /// Plain text with another status.
    pub fn error(status: &'static str, text: &str) -> Response {
        Response { status, kind: "text/plain; charset=utf-8", body: format!("{text}\n").into() }
    }

    /// Sends it; without its body for HEAD.
    pub fn send(&self, stream: &mut TcpStream, head_only: bool) -> Result<()> {
        let Response { status, kind, body } = self;
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{SECURITY}\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        if !head_only {
            stream.write_all(body)?;
        }
        stream.flush()
    }
}

/// Begins a stream of server-sent events.
pub fn begin_event_stream(stream: &mut TcpStream) -> Result<()> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{SECURITY}\r\n");
    stream.write_all(head.as_bytes())?;
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(target: &str, headers: &str) -> Option<Request> {
        Request::parse(format!("GET {target} HTTP/1.1\r\n{headers}\r\n\r\n").as_bytes())
    }

    #[test]
    fn requests() {
        let r = parse("/api/data?points=600&from=1.5&x", "Host: localhost:6026\r\nAccept: */*").unwrap();
        assert_eq!((r.method.as_str(), r.path.as_str()), ("GET", "/api/data"));
        assert_eq!((r.query("points"), r.query("from"), r.query::<f64>("to")), (Some(600), Some(1.5), None));
        assert!(r.query::<usize>("from").is_none());
        for bad in ["", "x", "http://a/"] {
            assert_eq!(parse(bad, "Host: a"), None, "{bad}");
        }
        assert_eq!(parse("/", "Host: localhost\r\nHost: evil.example"), None);
        assert_eq!(Request::parse(b"GET / HTTP/1.1 x\r\n\r\n"), None);
        assert_eq!(Request::parse(b"\xff\r\n\r\n"), None);
    }

    #[test]
    fn only_loopback_names_are_this_machine() {
        let ok = |host: &str| parse("/", &format!("host: {host}")).unwrap().is_for_loopback();
        for host in ["localhost", "LOCALHOST:1", "127.0.0.1:6026", "[::1]:6026", "[::1]"] {
            assert!(ok(host), "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "evil:127.0.0.1", ""]
        {
            assert!(!ok(host), "{host}");
        }
        assert!(!parse("/", "Accept: a").unwrap().is_for_loopback());
    }
}
