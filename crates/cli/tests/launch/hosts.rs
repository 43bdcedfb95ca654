//! Two hosts: network namespaces joined by a bridge, each with an `mpirun` daemon, or with one process each. Without the permission for
//! namespaces, two daemons on this host whose ranks communicate over loopback TCP only.

use super::layouts::agrees;
use super::{mpi, recipe, support, text};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Two namespaces with an address each, removed on drop.
struct Hosts {
    /// What their names begin with.
    name: String,
    /// The first three numbers of their addresses.
    net: String,
}

impl Hosts {
    /// `pair` tells them from those of other tests.
    fn make(pair: u32) -> Result<Hosts, String> {
        let id = std::process::id();
        let (name, net) = (format!("ft{pair}{}", id % 100_000), format!("10.{}.{}", 203 + pair, id % 256));
        let hosts = Hosts { name, net };
        let (name, net) = (&hosts.name, &hosts.net);
        ip(&format!("link add {name}b type bridge"))?;
        ip(&format!("addr add {net}.1/24 dev {name}b"))?;
        ip(&format!("link set {name}b up"))?;
        for i in [2, 3] {
            ip(&format!("netns add {name}h{i}"))?;
            ip(&format!("link add {name}v{i} type veth peer name eth0 netns {name}h{i}"))?;
            ip(&format!("link set {name}v{i} master {name}b up"))?;
            ip(&format!("-n {name}h{i} addr add {net}.{i}/24 dev eth0"))?;
            ip(&format!("-n {name}h{i} link set eth0 up"))?;
            ip(&format!("-n {name}h{i} link set lo up"))?;
        }
        // Some machines do not let bridges forward.
        let ping = format!("import socket; socket.create_server(('{net}.2', 4711)).accept()");
        let mut server = Command::new("ip")
            .args(["netns", "exec", &format!("{name}h2"), "python3", "-c", &ping])
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| e.to_string())?;
        let knock = format!("import socket; socket.create_connection(('{net}.2', 4711), 2)");
        let reached = (0..20).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            let knock = ["netns", "exec", &format!("{name}h3"), "python3", "-c", &knock];
            Command::new("ip").args(knock).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
        });
        let _ = server.kill();
        let _ = server.wait();
        if reached { Ok(hosts) } else { Err("one namespace does not reach the other".into()) }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let name = &self.name;
        for i in [2, 3] {
            // The other end goes with it.
            let _ = ip(&format!("link del {name}v{i}"));
            let _ = ip(&format!("netns del {name}h{i}"));
        }
        let _ = ip(&format!("link del {name}b"));
    }
}

fn ip(args: &str) -> Result<(), String> {
    let out = Command::new("ip").args(args.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(format!("ip {args}: {}", String::from_utf8_lossy(&out.stderr).trim())),
    }
}

/// A stand-in for ssh: (host, command…).
fn agent(dir: &Path, enter: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join("agent");
    // Hosts have temporary folders of their own: daemons that share one get in each other's way.
    let own = format!("TMPDIR={}/$host\nmkdir -p $TMPDIR\nexport TMPDIR", dir.display());
    std::fs::write(&path, format!("#!/bin/sh\nhost=$1\nshift\n{own}\nexec {enter} sh -c \"$*\"\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    text(&path).to_string()
}

#[test]
fn loss_and_gradients_are_those_of_one_rank_across_two_hosts() {
    if !mpi::installed("loss_and_gradients_are_those_of_one_rank_across_two_hosts") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 2);
    let hosts = Hosts::make(0);
    let (agent, names, net) = match &hosts {
        Ok(h) => (
            agent(dir.path(), &format!("ip netns exec {}h${{host##*.}}", h.name)),
            format!("{0}.2:2,{0}.3:2", h.net),
            format!("{}.0/24", h.net),
        ),
        Err(why) => {
            eprintln!("two hosts on the loopback, because: {why}");
            (agent(dir.path(), ""), "one:2,two:2".to_string(), "lo".to_string())
        }
    };
    let mut options = vec!["-H", &names, "--mca", "plm_rsh_agent", &agent];
    options.extend(["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", &net]);
    if hosts.is_ok() {
        options.extend(["--mca", "oob_tcp_if_include", &net]);
    }
    for layout in ["tp=2,dp=2", "tp=4", "tp=2,pp=2", "pp=2,cp=2"] {
        let args = ["parity", "dp=1", layout, "--recipe", text(&recipe), "--json"];
        let o = mpi::ferrotron(4, &options, &args).wait(Duration::from_secs(120)).succeeded();
        agrees(&o, layout);
    }
}

/// Nothing closes the connections of a host that has lost its network or power: only their silence tells.
#[test]
fn a_host_that_falls_silent_is_named_by_the_other() {
    let hosts = match Hosts::make(1) {
        Ok(hosts) => hosts,
        Err(why) => return eprintln!("SKIPPED: a_host_that_falls_silent_is_named_by_the_other: {why}"),
    };
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path(), 1_000_000), dir.path().join("run"));
    // Far beyond the time in which it must be noticed. The hosts share a kernel, and so memory for data.
    let args = ["train", text(&recipe), "--out", text(&out), "--timeout", "60", "--device", "cpu"];
    let start = |rank: usize| -> Child {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}h{}", hosts.name, rank + 2)]).arg(support::binary());
        command.args(args).args(["--threads", "1"]).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", format!("{}.2", hosts.net)).env("MASTER_PORT", "29500");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children = [start(0), start(1)];
    let begun = Instant::now();
    while !std::fs::read_to_string(out.join("events.jsonl")).is_ok_and(|t| t.contains("\"step\":5")) {
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    ip(&format!("link set {}v3 down", hosts.name)).unwrap();
    let cut = Instant::now();
    for (rank, child) in children.into_iter().enumerate() {
        let e = support::wait(child);
        assert!(e.code.is_some_and(|code| code != 0), "{e:?}");
        assert!(e.err.contains(&format!("rank {} ", 1 - rank)) && e.err.contains("exited"), "{e:?}");
    }
    assert!(cut.elapsed() < Duration::from_secs(12), "{:?}", cut.elapsed());
}
