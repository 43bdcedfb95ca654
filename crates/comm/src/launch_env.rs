//! How this process was launched: alone, by `mpirun`, by `srun`, or with torchrun's environment variables.

use crate::{Error, Result};

/// The convention that gave this process its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Open MPI's `mpirun`, or `srun` with PMI: MPI itself provides the rank.
    Mpi,
    /// `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, as set by torchrun.
    Torchrun,
    /// `SLURM_PROCID`, `SLURM_NTASKS`, and `SLURM_STEP_NODELIST` or `SLURM_LAUNCH_NODE_IPADDR`.
    Slurm,
}

/// This process's rank in a job of several, as given by the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchEnv {
    /// The launcher.
    pub launcher: Launcher,
    /// This process's rank.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Rank among the processes of the same host, which selects the GPU.
    pub local_rank: usize,
    /// Number of processes on the same host if known, else 1.
    pub local_size: usize,
    /// TCP address of rank 0 as `host:port`, if known.
    pub rendezvous: Option<String>,
}

/// The port rank 0 listens on when the launcher names only the host. Below the ephemeral range, so that no outgoing
/// connection occupies it; jobs on one host differ by job id.
fn port(job: Option<usize>) -> u16 {
    20_000 + (job.unwrap_or(0) % 10_000) as u16
}

/// The first host of a Slurm node list: `a[07-09,12],b` gives `a07`.
fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let number: String =
        rest.strip_prefix('[').unwrap_or("").chars().take_while(char::is_ascii_digit).collect();
    let bad = name.is_empty() || rest.starts_with('[') && number.is_empty();
    (!bad).then(|| format!("{name}{number}"))
}

impl LaunchEnv {
    /// Reads the environment; `None` if this process was started alone. Contradictory or incomplete variables are
    /// errors.
    pub fn detect() -> Result<Option<LaunchEnv>> {
        LaunchEnv::from(&|name| std::env::var(name).ok())
    }

    fn from(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<LaunchEnv>> {
        let number = |name: &str| -> Result<Option<usize>> {
            match env(name).filter(|v| !v.trim().is_empty()) {
                None => Ok(None),
                Some(text) => match text.trim().parse() {
                    Ok(n) => Ok(Some(n)),
                    Err(_) => Err(Error::Launch(format!("{name} is '{text}', which is not a number"))),
                },
            }
        };
        // Torchrun's variables take precedence, because they may have been set by hand.
        let set = |name: &str| env(name).is_some_and(|v| !v.trim().is_empty());
        let (launcher, rank, size, local, local_size) = if set("RANK") || set("WORLD_SIZE") {
            (Launcher::Torchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        } else if set("OMPI_COMM_WORLD_SIZE") {
            (
                Launcher::Mpi,
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
            )
        } else if set("PMIX_RANK") && set("SLURM_NTASKS") {
            (Launcher::Mpi, "PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        } else if set("PMI_RANK") && set("PMI_SIZE") {
            (Launcher::Mpi, "PMI_RANK", "PMI_SIZE", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        } else if set("SLURM_PROCID") && set("SLURM_NTASKS") && set("SLURM_STEP_ID") {
            (Launcher::Slurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        } else {
            return Ok(None);
        };
        let needed = |name: &str, other: &str| {
            number(name)?.ok_or_else(|| Error::Launch(format!("{other} is set but {name} is not; set both")))
        };
        let (r, n) = (needed(rank, size)?, needed(size, rank)?);
        if r >= n {
            return Err(Error::Launch(format!("{rank} is {r}, but {size} is {n}: ranks count from 0")));
        }
        // Slurm places rank 0 on the first host of the step; srun itself may run elsewhere.
        let slurm = || first_host(&env("SLURM_STEP_NODELIST")?);
        let rendezvous = match env("MASTER_ADDR").filter(|host| !host.trim().is_empty()) {
            None if launcher == Launcher::Slurm => slurm().or_else(|| env("SLURM_LAUNCH_NODE_IPADDR")),
            named => named,
        };
        let at = match number("MASTER_PORT")? {
            Some(p) => u16::try_from(p)
                .map_err(|_| Error::Launch(format!("MASTER_PORT is {p}; ports end at 65535")))?,
            None => port(number("SLURM_JOB_ID")?),
        };
        // An IPv6 address needs brackets before its port.
        let join = |host: String| match host.contains(':') {
            true => format!("[{host}]:{at}"),
            false => format!("{}:{at}", host.trim()),
        };
        let (local_rank, rendezvous) = (number(local)?.unwrap_or(0), rendezvous.map(join));
        let local_size = number(local_size)?.unwrap_or(1).max(1);
        Ok(Some(LaunchEnv { launcher, rank: r, size: n, local_rank, local_size, rendezvous }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn job(vars: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
        LaunchEnv::from(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn every_launcher_is_recognised() {
        assert_eq!(job(&[]).unwrap(), None);
        // Inside an allocation, but not started by srun.
        assert_eq!(job(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]).unwrap(), None);
        let j = job(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "a"),
        ]);
        let want = LaunchEnv {
            launcher: Launcher::Torchrun,
            rank: 3,
            size: 8,
            local_rank: 1,
            local_size: 4,
            rendezvous: Some("a:20000".into()),
        };
        assert_eq!(j.unwrap().unwrap(), want);
        let vars = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "2")];
        let j = job(&vars).unwrap().unwrap();
        assert_eq!((j.launcher, j.rank, j.size, j.rendezvous), (Launcher::Mpi, 2, 4, None));
        let slurm = [
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "12345"),
            ("SLURM_LAUNCH_NODE_IPADDR", "fe80::1"),
        ];
        let j = job(&slurm).unwrap().unwrap();
        assert_eq!((j.launcher, j.rank, j.local_rank), (Launcher::Slurm, 1, 1));
        assert_eq!(j.rendezvous.unwrap(), "[fe80::1]:22345");
        let j = job(&[&slurm[..], &[("PMIX_RANK", "1")]].concat()).unwrap().unwrap();
        assert_eq!(j.launcher, Launcher::Mpi);
    }

    #[test]
    fn the_first_host_of_slurms_list() {
        assert_eq!(first_host("a[07-09,12],b").as_deref(), Some("a07"));
        assert_eq!(first_host("gpu-1,gpu-2").as_deref(), Some("gpu-1"));
        assert_eq!(first_host("node5").as_deref(), Some("node5"));
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("x[]"), None);
    }

    #[test]
    fn wrong_variables_are_named() {
        let text = |vars: &[(&str, &str)]| job(vars).unwrap_err().to_string();
        assert!(text(&[("RANK", "0")]).contains("WORLD_SIZE"));
        assert!(text(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("'x'"));
        assert!(text(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("count from 0"));
        let far = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")];
        assert!(text(&far).contains("65535"));
    }
}
