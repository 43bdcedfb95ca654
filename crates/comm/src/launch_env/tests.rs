#![allow(clippy::unwrap_used)]

use super::*;

fn job(vars: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
    LaunchEnv::from(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
}

fn found(vars: &[(&str, &str)]) -> LaunchEnv {
    job(vars).unwrap().unwrap()
}

#[test]
fn alone_is_no_job() {
    assert_eq!(job(&[]).unwrap(), None);
    // Inside an allocation, but not started by srun.
    assert_eq!(job(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]).unwrap(), None);
    // A pod of a job that says nothing of its size.
    assert_eq!(job(&[("JOB_COMPLETION_INDEX", "1"), ("KUBERNETES_SERVICE_HOST", "10.0.0.1")]).unwrap(), None);
}

#[test]
fn torchrun_meets_at_its_store() {
    let vars = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("GROUP_RANK", "1"),
        ("MASTER_ADDR", "a"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", "run"),
        ("TORCHELASTIC_RESTART_COUNT", "2"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];
    let want = LaunchEnv {
        launcher: Launcher::Torchrun,
        rank: 3,
        size: 8,
        local_rank: 1,
        local_size: 2,
        one_host: false,
        rendezvous: Some("a:29500".into()),
        store_key: Some("ferrotron/run/2/8".into()),
        job: "run/2".into(),
        secret: None,
    };
    assert_eq!(found(&vars), want);
    // Without the agent's store the port is free for rank 0.
    let off = [&vars[..9], &[("TORCHELASTIC_USE_AGENT_STORE", "False")]].concat();
    assert_eq!(found(&off), LaunchEnv { store_key: None, ..want });
}

#[test]
fn plain_variables_on_loopback_are_one_host() {
    let j = found(&[("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a")]);
    assert_eq!((j.launcher, j.one_host, j.local_rank, j.local_size), (Launcher::Variables, false, 0, 1));
    assert_eq!(j.rendezvous.unwrap(), "a:20000");
    for here in ["localhost", "127.0.0.1", "::1"] {
        let vars = [("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", here)];
        let j = found(&vars);
        assert_eq!((j.one_host, j.local_rank, j.local_size), (true, 3, 8));
        // The master of a PyTorchJob is told `localhost`, its workers the name of the service.
        let j = found(&[&vars[..], &[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]].concat());
        assert_eq!((j.launcher, j.one_host, j.local_rank), (Launcher::Kubernetes, false, 0));
        // The launcher's own count stands above the address.
        let j = found(&[&vars[..], &[("LOCAL_WORLD_SIZE", "4")]].concat());
        assert_eq!((j.one_host, j.local_size), (false, 4));
    }
    let secret = found(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("FERROTRON_JOB_SECRET", "x")]).secret.unwrap();
    assert_eq!(secret, Secret::from_text("x"));
    assert!(!format!("{secret:?}").contains(&secret.0[0].to_string()));
}

#[test]
fn kubernetes_gives_ranks_in_several_ways() {
    let indexed = [("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "job-0.svc")];
    let j = found(&indexed);
    assert_eq!((j.launcher, j.rank, j.size, j.local_rank), (Launcher::Kubernetes, 2, 4, 0));
    assert_eq!(j.rendezvous.unwrap(), "job-0.svc:20000");
    let pet = [
        ("PET_NODE_RANK", "1"),
        ("PET_NNODES", "2"),
        ("PET_NPROC_PER_NODE", "1"),
        ("PET_MASTER_ADDR", "m"),
        ("PET_MASTER_PORT", "7"),
    ];
    let j = found(&pet);
    assert_eq!((j.launcher, j.rank, j.size, j.one_host), (Launcher::Kubernetes, 1, 2, false));
    assert_eq!(j.rendezvous.unwrap(), "m:7");
    let several = [&pet[..2], &[("PET_NPROC_PER_NODE", "8")]].concat();
    assert!(job(&several).unwrap_err().to_string().contains("torchrun"));
}

#[test]
fn mpi_and_slurm() {
    let vars =
        [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "4")];
    let j = found(&vars);
    assert_eq!((j.launcher, j.rank, j.size, j.one_host), (Launcher::OpenMpi, 2, 4, true));
    assert_eq!(j.rendezvous, None);
    let slurm = [
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "12345"),
        ("SLURM_LAUNCH_NODE_IPADDR", "fe80::1"),
    ];
    let j = found(&slurm);
    assert_eq!((j.launcher, j.rank, j.local_rank, j.one_host), (Launcher::Slurm, 1, 1, false));
    assert_eq!(j.rendezvous.unwrap(), "[fe80::1]:22345");
    // Batch scripts for PyTorch export the number of ranks, and no rank.
    for (job, launcher) in [(&vars[..], Launcher::OpenMpi), (&slurm[..], Launcher::Slurm)] {
        let j = found(&[job, &[("WORLD_SIZE", "7")]].concat());
        assert_eq!((j.launcher, j.size), (launcher, found(job).size));
    }
    let j = found(&[&slurm[..], &[("SLURM_STEP_NUM_NODES", "1"), ("SLURM_STEP_NODELIST", "n3")]].concat());
    assert_eq!((j.one_host, j.local_size, j.rendezvous.as_deref()), (true, 2, Some("n3:22345")));
    for pmi in ["PMIX_RANK", "PMI_RANK"] {
        let j = found(&[&slurm[..], &[(pmi, "1"), ("PMI_SIZE", "2")]].concat());
        assert_eq!((j.launcher, j.rendezvous.as_deref()), (Launcher::SlurmMpi, Some("[fe80::1]:22345")));
    }
    assert_eq!(found(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]).launcher, Launcher::Mpich);
}

#[test]
fn wrong_variables_are_named() {
    let text = |vars: &[(&str, &str)]| job(vars).unwrap_err().to_string();
    assert!(text(&[("RANK", "0")]).contains("WORLD_SIZE"));
    assert!(text(&[("WORLD_SIZE", "2")]).contains("RANK"));
    assert!(text(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("'x'"));
    assert!(text(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("count from 0"));
    let far = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")];
    assert!(text(&far).contains("65535"));
}
