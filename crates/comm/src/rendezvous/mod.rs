//! How the processes of a job find rank 0 and know each other: where rank 0 listens, the job's secret, and one
//! connection from every other rank to rank 0, each proven by the [`handshake`].

pub(crate) mod accept;
pub(crate) mod connect;
pub(crate) mod handshake;
mod job_secret;
pub(crate) mod listen;
pub(crate) mod torch_store;

#[cfg(test)]
mod tests;

use crate::launch_env::LaunchEnv;
use crate::{Error, Result};
use connect::Place;
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};
use torch_store::TorchStore;

pub(crate) use job_secret::{SecretFile, SecretSource};

/// What only the processes of a job know.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) [u8; 32]);

impl Secret {
    /// The secret that a user or launcher has given as text.
    pub(crate) fn from_text(text: &str) -> Secret {
        Secret(crate::hmac_sha256::sha256(format!("ferrotron secret {text}").as_bytes()))
    }

    fn random() -> Result<Secret> {
        random().map(Secret)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

pub(crate) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0u8; 32];
    let got = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    match got {
        Ok(32) => Ok(bytes),
        _ => Err(Error::Launch("the operating system gives no random numbers".into())),
    }
}

/// Connects the ranks of `job` by `deadline`: on rank 0 one connection to every other rank, elsewhere the one to
/// rank 0.
pub(crate) fn meet(job: &LaunchEnv, deadline: Instant) -> Result<HashMap<usize, TcpStream>> {
    if job.size == 1 {
        return Ok(HashMap::new());
    }
    let Some(at) = &job.rendezvous else {
        let what = "set MASTER_ADDR (and MASTER_PORT) to where rank 0 can be reached, on all ranks";
        return Err(Error::Launch(what.to_string()));
    };
    match (&job.store_key, job.rank) {
        (Some(key), 0) => {
            let (listener, secret) = publish(job, at, key, deadline)?;
            accept::all_ranks(&listener, job.size, &secret, deadline, &|| None)
        }
        (Some(key), _) => {
            let place = || -> Result<Place> { published(at, key, deadline) };
            Ok(HashMap::from([(0, connect::to_rank0(job, place, deadline, &|| None)?)]))
        }
        (None, 0) => {
            let listener = listen::at(job, at)?;
            let port = listener.local_addr().map_err(|e| failed(at, e))?.port();
            // The file lives until all ranks have come.
            let (secret, _file) = SecretSource::of(job, port)?.create()?;
            accept::all_ranks(&listener, job.size, &secret, deadline, &|| None)
        }
        (None, _) => {
            let place = || -> Result<Place> {
                let address = resolve(at)?;
                let secret = SecretSource::of(job, address.port())?.read()?;
                let secret =
                    secret.ok_or_else(|| Error::Launch(format!("rank 0 does not listen at {at}")))?;
                Ok(Place { address, secret })
            };
            Ok(HashMap::from([(0, connect::to_rank0(job, place, deadline, &|| None)?)]))
        }
    }
}

/// Rank 0 under torchrun: listens at a port of its own and leaves the address and a new secret in the store.
fn publish(job: &LaunchEnv, at: &str, key: &str, deadline: Instant) -> Result<(TcpListener, Secret)> {
    loop {
        let done = TorchStore::connect(resolve(at)?, deadline).and_then(|mut store| {
            let host = listen::beside_store(job, at, store.local_address()?);
            let listener = TcpListener::bind((host, 0))?;
            let mut address = listener.local_addr()?;
            address.set_ip(host);
            let secret = Secret::random().map_err(std::io::Error::other)?;
            store.set(key, &[&secret.0[..], address.to_string().as_bytes()].concat())?;
            Ok((listener, secret))
        });
        match done {
            Ok(done) => return Ok(done),
            Err(e) if Instant::now() + RETRY >= deadline => return Err(no_store(at, &e)),
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Other ranks under torchrun: what rank 0 has left in the store.
fn published(at: &str, key: &str, deadline: Instant) -> Result<Place> {
    let store = resolve(at)?;
    let value =
        TorchStore::connect(store, deadline).and_then(|mut s| s.wait(key)).map_err(|e| no_store(at, &e))?;
    decode_place(&value, store)
        .ok_or_else(|| Error::Launch(format!("torchrun's store at {at} holds another value under {key}")))
}

/// Decodes what [`publish`] has left; `store` is where the store is, for an address that names only the port.
pub(crate) fn decode_place(value: &[u8], store: SocketAddr) -> Option<Place> {
    let (secret, address) = value.split_first_chunk::<32>()?;
    let mut address: SocketAddr = std::str::from_utf8(address).ok()?.parse().ok()?;
    if address.ip().is_unspecified() {
        address.set_ip(store.ip());
    }
    Some(Place { address, secret: Secret(*secret) })
}

fn no_store(at: &str, error: &std::io::Error) -> Error {
    Error::Launch(format!(
        "torchrun's store at {at}: {error}; TORCHELASTIC_USE_AGENT_STORE=False meets at MASTER_PORT without it"
    ))
}

/// Pause between attempts to reach rank 0 or the store.
pub(crate) const RETRY: Duration = Duration::from_millis(100);

fn failed(rendezvous: &str, error: std::io::Error) -> Error {
    Error::Launch(format!("TCP at {rendezvous}: {error}"))
}

pub(crate) fn resolve(rendezvous: &str) -> Result<SocketAddr> {
    // IPv4 first: `localhost` may name both, and servers often listen at that one alone.
    let mut found: Vec<SocketAddr> =
        rendezvous.to_socket_addrs().map_err(|e| failed(rendezvous, e))?.collect();
    found.sort_by_key(SocketAddr::is_ipv6);
    let first = found.first().copied();
    first.ok_or_else(|| Error::Launch(format!("'{rendezvous}' does not resolve to an address")))
}
