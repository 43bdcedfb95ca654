//! Assignment of samples to data-parallel ranks.

use std::ops::Range;

use super::mt19937::Mt19937;
use crate::{Error, Result};

/// Consecutive samples: each step takes `micro_batch * ranks` of them, and rank r gets the r-th run of `micro_batch`.
#[derive(Clone, Copy, Debug)]
pub struct Sequential {
    /// Number of samples in the dataset.
    pub total: u64,
    /// Samples per rank and step.
    pub micro_batch: u64,
    /// Number of data-parallel ranks.
    pub ranks: u64,
    /// Drop an incomplete last step.
    pub drop_last: bool,
}

impl Sequential {
    /// The samples of `rank` in the step that starts after `consumed` samples; `None` at the end. In an incomplete
    /// step the last ranks may get fewer samples or none.
    pub fn micro_batch(&self, consumed: u64, rank: u64) -> Option<Range<u64>> {
        let step = self.micro_batch.checked_mul(self.ranks)?;
        let left = self.total.saturating_sub(consumed);
        if left == 0 || step == 0 || (self.drop_last && left < step) {
            return None;
        }
        let at = |r: u64| consumed + r.saturating_mul(self.micro_batch).min(left.min(step));
        Some(at(rank)..at(rank.saturating_add(1)))
    }
}

/// Samples in a new random order each epoch: `torch.randperm` seeded with the epoch.
#[derive(Clone, Copy, Debug)]
pub struct Cyclic {
    /// Number of samples in the dataset.
    pub total: u64,
    /// Samples per rank and step.
    pub micro_batch: u64,
    /// Number of data-parallel ranks.
    pub ranks: u64,
    /// Keep each rank to its own part of the dataset in every epoch.
    pub sharded: bool,
}

impl Cyclic {
    /// The micro-batches of `rank` from `consumed` samples to the end of that epoch.
    pub fn rest_of_epoch(&self, consumed: u64, rank: u64) -> Result<Vec<Vec<u64>>> {
        let step = self.micro_batch.checked_mul(self.ranks).filter(|&s| s > 0 && rank < self.ranks);
        let steps = step.map_or(0, |s| self.total / s);
        let (Some(step), true) = (step, steps > 0) else {
            return Err(Error::Invalid(format!(
                "{} samples cannot be dealt to rank {rank} of {} in micro-batches of {}",
                self.total, self.ranks, self.micro_batch
            )));
        };
        let (epoch, within) = (consumed / (steps * step), consumed % (steps * step));
        if within % step != 0 {
            return Err(Error::Invalid(format!(
                "{consumed} consumed samples end inside a step of {step}; was the batch size changed?"
            )));
        }
        let bucket = if self.sharded {
            steps * self.micro_batch
        } else {
            self.total / self.micro_batch * self.micro_batch
        };
        let Some(bucket) = u32::try_from(bucket).ok().filter(|&b| b < u32::MAX / 20) else {
            return Err(Error::Invalid(format!(
                "{bucket} samples are too many to permute; use them in order"
            )));
        };
        let order = Mt19937::new(epoch as u32).torch_randperm(bucket);
        let ids: Vec<u64> = if self.sharded {
            let start = rank * u64::from(bucket);
            let rest = &order[(within / self.ranks) as usize..];
            rest.iter().map(|&i| start + u64::from(i)).collect()
        } else {
            let rest = order.iter().skip((within + rank) as usize).step_by(self.ranks as usize);
            rest.map(|&i| u64::from(i)).collect()
        };
        Ok(ids.chunks_exact(self.micro_batch as usize).map(<[u64]>::to_vec).collect())
    }
}

/// Every sample once over all ranks, one at a time: rank r gets r, r + ranks, r + 2·ranks, …
pub fn full_validation(total: u64, ranks: u64, rank: u64) -> impl Iterator<Item = u64> {
    (rank..total).step_by(usize::try_from(ranks).unwrap_or(usize::MAX).max(1))
}
