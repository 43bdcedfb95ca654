//! The GPUs of a job. Several ranks may share one: as threads, or where NCCL allows it.

use crate::Result;
use ferrotron_engine::Rank;
use std::collections::BTreeSet;

/// Number of GPUs that all ranks use together; 0 on CPUs. Collective over the world.
pub fn gpus_of_all_ranks(rank: &Rank) -> Result<usize> {
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let name = rank.device().gpu().map(|gpu| {
        let bus = ferrotron_kernels::cuda::bus_id(gpu.ordinal);
        format!("{host} {}", bus.unwrap_or_else(|| format!("cuda:{}", gpu.ordinal)))
    });
    let names =
        rank.world.all().all_gather_bytes(name.unwrap_or_default().as_bytes(), "GPUs of all ranks")?;
    Ok(distinct(&names))
}

fn distinct(names: &[Vec<u8>]) -> usize {
    names.iter().filter(|n| !n.is_empty()).collect::<BTreeSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_ranks_share_counts_once() {
        let count =
            |names: &[&str]| distinct(&names.iter().map(|n| n.as_bytes().to_vec()).collect::<Vec<_>>());
        assert_eq!(count(&["a 0000:01", "a 0000:01", "a 0000:01", "a 0000:01"]), 1);
        assert_eq!(count(&["a 0000:01", "a 0000:02", "b 0000:01", "a 0000:01"]), 3);
        assert_eq!(count(&["", ""]), 0);
    }
}
