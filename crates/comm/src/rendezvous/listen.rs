//! Where rank 0 listens: at the address the others use, at all addresses only where that one is not known.

use super::{failed, resolve};
use crate::launch_env::LaunchEnv;
use crate::{Error, Result};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

/// Listens at `rendezvous` (`host:port`).
pub(crate) fn at(job: &LaunchEnv, rendezvous: &str) -> Result<TcpListener> {
    let address = resolve(rendezvous)?;
    let bound = TcpListener::bind((host(job, address.ip()), address.port())).or_else(|e| match e.kind() {
        // The others reach this host by an address that it does not have itself: that of a service, or behind NAT.
        ErrorKind::AddrNotAvailable => TcpListener::bind(any(address)),
        _ => Err(e),
    });
    bound.map_err(|e| match e.kind() {
        ErrorKind::AddrInUse => {
            let port = address.port();
            Error::Launch(format!(
                "rank 0 cannot listen on port {port}: {e}; set another MASTER_PORT on all ranks"
            ))
        }
        _ => failed(rendezvous, e),
    })
}

/// The address to listen at, given what MASTER_ADDR resolves to here. A host often resolves its own name to loopback,
/// where processes of other hosts cannot come.
fn host(job: &LaunchEnv, resolved: IpAddr) -> IpAddr {
    match resolved.is_loopback() && !job.one_host {
        true => any(SocketAddr::new(resolved, 0)).ip(),
        false => resolved,
    }
}

/// The address to listen at beside torchrun's store, given this host's address on the way to it.
pub(super) fn beside_store(job: &LaunchEnv, store: &str, local: IpAddr) -> IpAddr {
    // All agents are given the same name of the store's host; if it is that of loopback, all are on this one.
    let name = store.rsplit_once(':').map_or(store, |(host, _)| host).trim_matches(['[', ']']);
    let means_loopback = name == "localhost" || name.parse::<IpAddr>().is_ok_and(|a| a.is_loopback());
    match local.is_loopback() && !job.one_host && !means_loopback {
        true => any(SocketAddr::new(local, 0)).ip(),
        false => local,
    }
}

fn any(like: SocketAddr) -> SocketAddr {
    let all: IpAddr = match like.is_ipv4() {
        true => Ipv4Addr::UNSPECIFIED.into(),
        false => Ipv6Addr::UNSPECIFIED.into(),
    };
    SocketAddr::new(all, like.port())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_address_is_the_one_the_others_use() {
        let here = LaunchEnv::for_test(0, 2, "127.0.0.1:0");
        let apart = LaunchEnv { one_host: false, ..here.clone() };
        assert_eq!(host(&here, ip("127.0.0.1")), ip("127.0.0.1"));
        assert_eq!(host(&apart, ip("10.1.2.3")), ip("10.1.2.3"));
        // A name that means loopback here and something else elsewhere.
        assert_eq!(host(&apart, ip("127.0.1.1")), ip("0.0.0.0"));
        assert_eq!(host(&apart, ip("::1")), ip("::"));
        assert_eq!(beside_store(&apart, "localhost:1", ip("127.0.0.1")), ip("127.0.0.1"));
        assert_eq!(beside_store(&apart, "[::1]:1", ip("::1")), ip("::1"));
        assert_eq!(beside_store(&apart, "node7:1", ip("127.0.1.1")), ip("0.0.0.0"));
        assert_eq!(beside_store(&apart, "node7:1", ip("10.0.0.7")), ip("10.0.0.7"));
        assert_eq!(beside_store(&here, "node7:1", ip("127.0.1.1")), ip("127.0.1.1"));
    }

    #[test]
    fn rank_0_listens_there_only_and_names_a_port_that_is_taken() {
        let job = LaunchEnv::for_test(0, 2, "127.0.0.1:0");
        let listener = at(&job, "127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listener.local_addr().unwrap().ip().is_loopback());
        let error = at(&job, &format!("127.0.0.1:{port}")).unwrap_err().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("another MASTER_PORT"), "{error}");
        // An address this host does not have, as that of a Kubernetes service.
        let listener = at(&LaunchEnv { one_host: false, ..job }, "192.0.2.1:0").unwrap();
        assert!(listener.local_addr().unwrap().ip().is_unspecified());
    }
}
