//! What `srun` says of a step.

use super::Env;
use crate::Result;

/// True if `srun` has started this process; inside an allocation the other variables are set for every process.
pub(super) fn is_step(env: &Env) -> bool {
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"].iter().all(|name| env.is_set(name))
}

/// Number of hosts of the step.
pub(super) fn hosts(env: &Env) -> Result<Option<usize>> {
    match env.number("SLURM_STEP_NUM_NODES")? {
        None => env.number("SLURM_NNODES"),
        some => Ok(some),
    }
}

/// The host of rank 0: the first of the step; `srun` itself may run elsewhere.
pub(super) fn first_host(env: &Env) -> Option<String> {
    env.text("SLURM_STEP_NODELIST")
        .and_then(|list| first_of_list(&list))
        .or_else(|| env.text("SLURM_LAUNCH_NODE_IPADDR"))
}

/// The first host of a Slurm node list: `a[07-09,12],b` gives `a07`.
fn first_of_list(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let number: String =
        rest.strip_prefix('[').unwrap_or("").chars().take_while(char::is_ascii_digit).collect();
    let bad = name.is_empty() || rest.starts_with('[') && number.is_empty();
    (!bad).then(|| format!("{name}{number}"))
}

#[cfg(test)]
mod tests {
    use super::first_of_list;

    #[test]
    fn the_first_host_of_slurms_list() {
        assert_eq!(first_of_list("a[07-09,12],b").as_deref(), Some("a07"));
        assert_eq!(first_of_list("gpu-1,gpu-2").as_deref(), Some("gpu-1"));
        assert_eq!(first_of_list("node5").as_deref(), Some("node5"));
        assert_eq!(first_of_list(""), None);
        assert_eq!(first_of_list("x[]"), None);
    }
}
