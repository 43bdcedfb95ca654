//! Digests of what a rank holds, and comparing them between ranks.

use super::Trainer;
use super::run::Run;
use crate::{Error, Result};
use ferrotron_comm::Communicator;
use ferrotron_tensor::{Category, DType, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

impl Run {
    /// Whether parameters differ between ranks that hold the same. The same on all ranks.
    pub(super) fn replicas_differ(&self) -> Result<bool> {
        let t = &self.trainer;
        t.model.params.wait_params(&t.rank)?;
        let full = t.model.params.placement().is_full_size();
        let mut differ = false;
        for experts in [false, true] {
            let group = match (full, experts) {
                (true, false) => &t.rank.dp_cp_group,
                (true, true) => &t.rank.expert_dp_group,
                (false, _) => t.rank.shard_replica_group(experts),
            };
            let held = t.model.params.specs().iter().zip(t.model.params.values());
            let own = held.filter(|(spec, t)| spec.experts == experts && t.is_contiguous());
            let own = t.digests(&own.map(|(_, value)| value.clone()).collect::<Vec<_>>())?;
            let all: Vec<Vec<u64>> = exchange(group, &own, "digests of parameters")?;
            differ |= all.iter().any(|other| *other != own);
        }
        self.any_rank(differ, "replicas")
    }

    /// Whether it is so on any rank.
    pub(super) fn any_rank(&self, mine: bool, label: &'static str) -> Result<bool> {
        let t = &self.trainer;
        Ok(t.runner.all_reduce(&t.rank.control, vec![f64::from(mine)], label)?[0] > 0.0)
    }
}

impl Trainer {
    /// Digests of the tensors that persist between steps, by name.
    pub(super) fn state_digests(&self) -> Result<Vec<(String, u64)>> {
        self.model.params.wait_params(&self.rank)?;
        self.optimizer.wait_state(&self.rank)?;
        let (names, tensors): (Vec<String>, Vec<Tensor>) = self.persistent_tensors()?.into_iter().unzip();
        Ok(names.into_iter().zip(self.digests(&tensors)?).collect())
    }

    fn digests(&self, tensors: &[Tensor]) -> Result<Vec<u64>> {
        let s = &self.rank.compute;
        if tensors.is_empty() {
            return Ok(Vec::new());
        }
        let out = Tensor::empty(s, &[tensors.len()], DType::I64, Category::Workspace)?;
        for (i, t) in tensors.iter().enumerate() {
            self.rank.kernels.digest(s, t, &out.narrow(0, i, 1)?)?;
        }
        Ok(s.download::<i64>(&out)?.into_iter().map(|d| d as u64).collect())
    }
}

/// What all ranks of a group say, in rank order.
pub(super) fn exchange<T: Serialize + DeserializeOwned>(
    group: &Communicator,
    mine: &T,
    label: &'static str,
) -> Result<Vec<T>> {
    let broken = |e: serde_json::Error| Error::Invalid(format!("{label} of a rank: {e}"));
    let all = group.all_gather_bytes(&serde_json::to_vec(mine).map_err(broken)?, label)?;
    all.iter().map(|text| serde_json::from_slice(text).map_err(broken)).collect()
}
