//! Which optimizer state is in host memory.
//!
//! Offloaded buckets are tensors in pinned host memory. Rules of single elements stream them through the device in chunks
//! ([`super::streamed`]) or update them in place with the CPU ([`super::host_update`]); Muon, which needs whole matrices, reads
//! and writes its momentum over the link. Bits do not depend on where state is, nor on what updates it.

use super::ParamGroups;
use crate::config::{MasterDtype, OptimizerCompute};
use ferrotron_engine::Params;
use ferrotron_engine::data_parallel::{Bucket, ShardingStrategy};
use ferrotron_tensor::DType;

/// How optimizer state is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateStorage {
    /// How it is distributed over data-parallel ranks.
    pub sharding: ShardingStrategy,
    /// Master weights.
    pub master: MasterDtype,
    /// Fraction of its bytes in host memory.
    pub on_host: f64,
    /// What updates state in host memory.
    pub compute: OptimizerCompute,
}

impl StateStorage {
    /// Bytes of master weights and moments for each element of a bucket. f32 weights are their own masters.
    pub(super) fn bytes_per_element(&self, params: &Params, groups: &ParamGroups, bucket: &Bucket) -> usize {
        let master = match (params.dtype(), self.master) {
            (DType::F32, _) => 0,
            (_, MasterDtype::F32) => DType::F32.size(),
            (_, MasterDtype::Remainder) => DType::I16.size(),
        };
        let rule = groups.storage(bucket.storage);
        master + rule.states().iter().map(|(name, _)| rule.state_dtype(name).size()).sum::<usize>()
    }
}

/// The buckets whose state is in host memory: as many of the first as bring their bytes nearest to `fraction` of all.
pub(crate) fn on_host(bytes: impl Iterator<Item = usize>, fraction: f64) -> Vec<bool> {
    let bytes: Vec<usize> = bytes.collect();
    let wanted = bytes.iter().sum::<usize>() as f64 * fraction;
    let mut taken = 0.0;
    let chosen = bytes.iter().map(|b| {
        let nearer = taken + *b as f64 / 2.0 <= wanted;
        taken += if nearer { *b as f64 } else { 0.0 };
        nearer && *b > 0
    });
    chosen.collect()
}

#[cfg(test)]
mod tests {
    use super::on_host;

    #[test]
    fn a_fraction_is_met_by_whole_buckets() {
        let chosen = |fraction| on_host([10, 0, 20, 30, 40].into_iter(), fraction);
        assert_eq!(chosen(0.0), [false; 5]);
        assert_eq!(chosen(0.3), [true, false, true, false, false]);
        assert_eq!(chosen(1.0), [true, false, true, true, true]);
        // 35 of 100: 30 is nearer than 60.
        assert_eq!(chosen(0.35), [true, false, true, false, false]);
    }
}
