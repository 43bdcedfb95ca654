//! How this process was launched: alone, or by one of the launchers people use, told from their environment
//! variables.

mod slurm;
#[cfg(test)]
mod tests;

use crate::rendezvous::Secret;
use crate::{Error, Result};

/// The convention that gave this process its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Open MPI's `mpirun` (`OMPI_COMM_WORLD_RANK`).
    OpenMpi,
    /// `srun` with PMIx or PMI-2: MPI can be used.
    SlurmMpi,
    /// `srun` without PMI.
    Slurm,
    /// MPICH's `mpiexec` or a relative of it (`PMI_RANK`), which is not supported.
    Mpich,
    /// torchrun (`TORCHELASTIC_RUN_ID`).
    Torchrun,
    /// A Kubernetes job: `JOB_COMPLETION_INDEX` or `PET_NODE_RANK`, or `RANK` inside a pod.
    Kubernetes,
    /// `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, set by hand or by a script.
    Variables,
}

impl Launcher {
    /// Its name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Launcher::OpenMpi => "Open MPI's mpirun",
            Launcher::SlurmMpi => "srun with PMI",
            Launcher::Slurm => "srun",
            Launcher::Mpich => "MPICH's mpiexec",
            Launcher::Torchrun => "torchrun",
            Launcher::Kubernetes => "Kubernetes",
            Launcher::Variables => "RANK and WORLD_SIZE",
        }
    }
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
    /// True if all processes are known to be on this host.
    pub one_host: bool,
    /// `host:port` where rank 0 listens, or where torchrun's store does, if known.
    pub rendezvous: Option<String>,
    /// The key of this job in the store that torchrun's agent serves at the rendezvous; `None` without such a store.
    pub store_key: Option<String>,
    /// What tells this job from others, as far as the launcher says.
    pub(crate) job: String,
    /// `FERROTRON_JOB_SECRET`.
    pub(crate) secret: Option<Secret>,
}

/// The port rank 0 listens on when the launcher names only the host. Below the ephemeral range, so that no outgoing
/// connection occupies it; jobs on one host differ by job id.
fn default_port(job: Option<usize>) -> u16 {
    20_000 + (job.unwrap_or(0) % 10_000) as u16
}

/// The environment, with what launchers do to it.
struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty())
    }

    fn is_set(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        match self.text(name) {
            None => Ok(None),
            Some(text) => match text.parse() {
                Ok(n) => Ok(Some(n)),
                Err(_) => Err(Error::Launch(format!("{name} is '{text}', which is not a number"))),
            },
        }
    }
}

/// The variables of one launcher: rank, size, rank and number of processes on the host.
type Names = [&'static str; 4];

impl LaunchEnv {
    /// Reads the environment; `None` if this process was started alone. Contradictory or incomplete variables are
    /// errors.
    pub fn detect() -> Result<Option<LaunchEnv>> {
        LaunchEnv::from(&|name| std::env::var(name).ok())
    }

    fn from(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<LaunchEnv>> {
        let env = Env(env);
        let Some((launcher, names)) = launcher(&env)? else { return Ok(None) };
        let [rank, size, local, local_size] = names;
        let needed = |name: &str, other: &str| {
            env.number(name)?
                .ok_or_else(|| Error::Launch(format!("{other} is set but {name} is not; set both")))
        };
        let (r, n) = (needed(rank, size)?, needed(size, rank)?);
        if r >= n {
            return Err(Error::Launch(format!("{rank} is {r}, but {size} is {n}: ranks count from 0")));
        }
        let address = address(&env, launcher);
        let (by_local, by_count) = (env.number(local)?, env.number(local_size)?);
        let one_host = by_count == Some(n)
            || matches!(launcher, Launcher::Slurm | Launcher::SlurmMpi) && slurm::hosts(&env)? == Some(1)
            // Everybody's own loopback: pods are told so too, but only about rank 0.
            || launcher == Launcher::Variables
                && by_count.is_none()
                && address.as_deref().is_some_and(means_loopback);
        let (local_rank, local_size) = match one_host {
            true => (by_local.unwrap_or(r), n),
            false => (by_local.unwrap_or(0), by_count.unwrap_or(1).max(1)),
        };
        let port = port(&env)?;
        // An IPv6 address needs brackets before its port.
        let join = |host: String| match host.contains(':') && !host.starts_with('[') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        // Only what is the same on all ranks: torchrun's agents may be of several Slurm steps.
        let names: &[&str] = match launcher {
            Launcher::Torchrun => &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
            Launcher::Slurm | Launcher::SlurmMpi => &["SLURM_JOB_ID", "SLURM_STEP_ID"],
            _ => &["SLURM_JOB_ID"],
        };
        let job: Vec<String> = names.iter().map(|name| env.text(name).unwrap_or_default()).collect();
        let job = job.join("/");
        let has_store = env.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let store_key = (launcher == Launcher::Torchrun && has_store && address.is_some())
            .then(|| format!("ferrotron/{job}/{n}"));
        Ok(Some(LaunchEnv {
            launcher,
            rank: r,
            size: n,
            local_rank,
            local_size,
            one_host,
            rendezvous: address.map(join),
            store_key,
            job,
            secret: env.text("FERROTRON_JOB_SECRET").map(|text| Secret::from_text(&text)),
        }))
    }

    /// A rank of a job by plain variables, of one host.
    #[cfg(test)]
    pub(crate) fn for_test(rank: usize, size: usize, rendezvous: &str) -> LaunchEnv {
        LaunchEnv {
            launcher: Launcher::Variables,
            rank,
            size,
            local_rank: rank,
            local_size: size,
            one_host: true,
            rendezvous: Some(rendezvous.to_string()),
            store_key: None,
            job: String::new(),
            secret: None,
        }
    }
}

/// The launcher and its variables. RANK comes first, because it may have been set by hand under another launcher.
fn launcher(env: &Env) -> Result<Option<(Launcher, Names)>> {
    let variables = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
    let by_slurm = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"];
    let in_pod = env.is_set("KUBERNETES_SERVICE_HOST");
    Ok(Some(if env.is_set("TORCHELASTIC_RUN_ID") && env.is_set("RANK") {
        (Launcher::Torchrun, variables)
    } else if env.is_set("RANK") {
        (if in_pod { Launcher::Kubernetes } else { Launcher::Variables }, variables)
    } else if env.is_set("JOB_COMPLETION_INDEX") && env.is_set("WORLD_SIZE") {
        (Launcher::Kubernetes, ["JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
    } else if env.is_set("PET_NODE_RANK") && env.is_set("PET_NNODES") {
        if env.text("PET_NPROC_PER_NODE").is_some_and(|n| n != "1") {
            let what = "PET_NPROC_PER_NODE asks for several processes on each host, which torchrun starts: \
                        use torchrun --no-python ferrotron …";
            return Err(Error::Launch(what.into()));
        }
        (Launcher::Kubernetes, ["PET_NODE_RANK", "PET_NNODES", "LOCAL_RANK", "PET_NPROC_PER_NODE"])
    // Batch scripts export it for every task; the launcher below then gives the ranks.
    } else if env.is_set("WORLD_SIZE") && !env.is_set("OMPI_COMM_WORLD_SIZE") && !slurm::is_step(env) {
        (Launcher::Variables, variables)
    } else if env.is_set("OMPI_COMM_WORLD_SIZE") {
        let names = [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ];
        (Launcher::OpenMpi, names)
    } else if slurm::is_step(env) {
        let has_pmi = env.is_set("PMIX_RANK") || env.is_set("PMI_RANK");
        (if has_pmi { Launcher::SlurmMpi } else { Launcher::Slurm }, by_slurm)
    } else if env.is_set("PMI_RANK") && env.is_set("PMI_SIZE") {
        (Launcher::Mpich, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"])
    } else {
        return Ok(None);
    }))
}

/// The host of the rendezvous.
fn address(env: &Env, launcher: Launcher) -> Option<String> {
    let named = env.text("MASTER_ADDR");
    match launcher {
        Launcher::Slurm | Launcher::SlurmMpi => named.or_else(|| slurm::first_host(env)),
        Launcher::Kubernetes => named.or_else(|| env.text("PET_MASTER_ADDR")),
        _ => named,
    }
}

fn port(env: &Env) -> Result<u16> {
    for name in ["MASTER_PORT", "PET_MASTER_PORT"] {
        if let Some(port) = env.number(name)? {
            return u16::try_from(port)
                .map_err(|_| Error::Launch(format!("{name} is {port}; ports end at 65535")));
        }
    }
    Ok(default_port(env.number("SLURM_JOB_ID")?))
}

fn means_loopback(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|a| a.is_loopback())
}
