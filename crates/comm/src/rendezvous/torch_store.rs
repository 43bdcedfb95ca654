//! A client of torchrun's store (a c10d `TCPStore`, which the agent serves at MASTER_ADDR:MASTER_PORT): just enough
//! to leave a value under a key and to wait for it.
//!
//! A query is one byte, then its arguments: numbers as little-endian u64 (the magic number is u32), strings with
//! their length in front. The store has no password: what is in it is known to whoever can connect to it.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const WAIT: u8 = 6;
const MAGIC: u32 = 0x3C85_F7CE;
/// The reply to [`WAIT`] when the key is there.
const STOP_WAITING: u8 = 0;
/// Longest value taken from the store.
const MAX_VALUE: u64 = 4096;

/// A connection to the store.
pub(crate) struct TorchStore {
    stream: TcpStream,
    deadline: Instant,
}

impl TorchStore {
    /// Connects; every later call fails at `deadline`.
    pub(crate) fn connect(at: SocketAddr, deadline: Instant) -> Result<TorchStore> {
        let mut stream = TcpStream::connect_timeout(&at, left(deadline)?)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(left(deadline)?))?;
        stream.write_all(&[&[VALIDATE][..], &MAGIC.to_le_bytes()].concat())?;
        Ok(TorchStore { stream, deadline })
    }

    /// The address of this host on the way to the store.
    pub(crate) fn local_address(&self) -> Result<std::net::IpAddr> {
        Ok(self.stream.local_addr()?.ip())
    }

    /// Sets `key`.
    pub(crate) fn set(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let mut query = vec![SET];
        put(&mut query, key.as_bytes());
        put(&mut query, value);
        self.stream.write_all(&query)
    }

    /// Waits until `key` is set and returns its value.
    pub(crate) fn wait(&mut self, key: &str) -> Result<Vec<u8>> {
        let mut query = vec![WAIT];
        query.extend(1u64.to_le_bytes());
        put(&mut query, key.as_bytes());
        self.stream.write_all(&query)?;
        read_waited(&mut Limited { stream: &self.stream, deadline: self.deadline })?;
        let mut query = vec![GET];
        put(&mut query, key.as_bytes());
        self.stream.write_all(&query)?;
        read_value(&mut Limited { stream: &self.stream, deadline: self.deadline })
    }
}

fn put(query: &mut Vec<u8>, text: &[u8]) {
    query.extend((text.len() as u64).to_le_bytes());
    query.extend(text);
}

/// Reads the reply to WAIT.
pub(crate) fn read_waited(from: &mut impl Read) -> Result<()> {
    let mut reply = [0];
    from.read_exact(&mut reply)?;
    match reply[0] {
        STOP_WAITING => Ok(()),
        other => Err(Error::new(ErrorKind::InvalidData, format!("it answers {other} to a wait"))),
    }
}

/// Reads the reply to GET.
pub(crate) fn read_value(from: &mut impl Read) -> Result<Vec<u8>> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > MAX_VALUE {
        return Err(Error::new(ErrorKind::InvalidData, format!("it holds a value of {len} bytes")));
    }
    let mut value = vec![0; len as usize];
    from.read_exact(&mut value)?;
    Ok(value)
}

fn left(deadline: Instant) -> Result<Duration> {
    match deadline.checked_duration_since(Instant::now()) {
        Some(left) if !left.is_zero() => Ok(left),
        _ => Err(ErrorKind::TimedOut.into()),
    }
}

/// Reads that all together end at the deadline, however slowly bytes come.
pub(crate) struct Limited<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Instant,
}

impl Read for Limited<'_> {
    fn read(&mut self, to: &mut [u8]) -> Result<usize> {
        self.stream.set_read_timeout(Some(left(self.deadline)?))?;
        match self.stream.read(to) {
            // What Linux says when a read times out.
            Err(e) if e.kind() == ErrorKind::WouldBlock => Err(ErrorKind::TimedOut.into()),
            done => done,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A store that takes what is asked and replies with `reply`, byte by byte with `pause` between them.
    fn store(reply: Vec<u8>, pause: Duration) -> (SocketAddr, std::thread::JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let serve = move || {
            let (mut stream, _) = listener.accept().unwrap();
            for byte in reply {
                if stream.write_all(&[byte]).is_err() {
                    break;
                }
                std::thread::sleep(pause);
            }
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut asked = Vec::new();
            let _ = stream.read_to_end(&mut asked);
            asked
        };
        (at, std::thread::spawn(serve))
    }

    fn ask(reply: Vec<u8>, pause: Duration, limit: Duration) -> (Result<Vec<u8>>, Vec<u8>) {
        let (at, served) = store(reply, pause);
        let mut client = TorchStore::connect(at, Instant::now() + limit).unwrap();
        let got = client.wait("k");
        drop(client);
        (got, served.join().unwrap())
    }

    #[test]
    fn queries_are_those_of_the_protocol() {
        let reply = [&[0][..], &3u64.to_le_bytes(), b"abc"].concat();
        let (got, asked) = ask(reply, Duration::ZERO, Duration::from_secs(10));
        assert_eq!(got.unwrap(), b"abc");
        let want = [
            &[0, 0xce, 0xf7, 0x85, 0x3c][..],
            &[6, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, b'k'],
            &[3, 1, 0, 0, 0, 0, 0, 0, 0, b'k'],
        ];
        assert_eq!(asked, want.concat());
        let (at, served) = store(vec![], Duration::ZERO);
        let mut client = TorchStore::connect(at, Instant::now() + Duration::from_secs(10)).unwrap();
        assert!(client.local_address().unwrap().is_loopback());
        client.set("k", b"vw").unwrap();
        drop(client);
        let want = [want[0], &[1, 1, 0, 0, 0, 0, 0, 0, 0, b'k', 2, 0, 0, 0, 0, 0, 0, 0, b'v', b'w']];
        assert_eq!(served.join().unwrap(), want.concat());
    }

    #[test]
    fn hostile_replies_end_in_an_error_in_time() {
        let none = Duration::ZERO;
        let soon = Duration::from_secs(10);
        assert!(ask(vec![1], none, soon).0.is_err(), "a cancelled wait");
        assert!(ask(vec![], none, soon).0.is_err(), "a closed connection");
        let huge = [&[0][..], &u64::MAX.to_le_bytes()].concat();
        assert!(ask(huge, none, soon).0.unwrap_err().to_string().contains("bytes"));
        assert!(ask([&[0][..], &9u64.to_le_bytes(), b"abc"].concat(), none, soon).0.is_err(), "cut short");
        // One byte at a time does not extend the limit.
        let slow = [&[0][..], &40u64.to_le_bytes(), &[0; 40]].concat();
        let start = Instant::now();
        let (got, _) = ask(slow, Duration::from_millis(100), Duration::from_millis(600));
        assert_eq!(got.unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(start.elapsed() < Duration::from_secs(6));
    }
}
