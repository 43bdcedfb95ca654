//! The cheapest change that makes a step fit.

use super::MemoryEstimate;
use crate::config::{PipelineSchedule, StateDtype};
use crate::model::description::StepShape;
use crate::{Error, Result};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{Rank, Recompute};
use ferrotron_tensor::{Error as TensorError, format_bytes};

impl MemoryEstimate {
    /// The same with another step on every stage.
    fn with(&self, change: impl Fn(&mut StepShape)) -> MemoryEstimate {
        let mut new = self.clone();
        new.stages.iter_mut().for_each(change);
        new
    }

    /// The same with micro-batches of `count` sequences.
    fn with_micro_batch(&self, count: usize) -> MemoryEstimate {
        self.with(|s| {
            if let Layout::Rows { count: old, .. } = &mut s.micro_batch {
                s.micro_batches = s.micro_batches * *old / count.max(1);
                *old = count;
            }
        })
    }

    /// Sequences of a micro-batch.
    fn micro_batch(&self) -> usize {
        match self.stages.first().map(|s| &s.micro_batch) {
            Some(Layout::Rows { count, .. }) => *count,
            _ => 1,
        }
    }

    /// Changes that save memory, the cheapest in time first, each with the keys to set.
    fn changes(&self) -> Vec<(String, MemoryEstimate)> {
        let mut out = Vec::new();
        if self.schedule == PipelineSchedule::Paired {
            let plain = MemoryEstimate { schedule: PipelineSchedule::OneForwardOneBackward, ..self.clone() };
            out.push(("parallel.schedule=1f1b".to_string(), plain));
        }
        let halves =
            std::iter::successors(Some(self.micro_batch() / 2), |n| Some(n / 2)).take_while(|n| *n > 0);
        out.extend(halves.map(|n| (format!("train.micro_batch={n}"), self.with_micro_batch(n))));
        let (last, least) = out.last().cloned().unwrap_or((String::new(), self.clone()));
        let and = |change: &str| if last.is_empty() { change.into() } else { format!("{last} {change}") };
        let full = |s: &mut StepShape| s.recompute = Recompute { layer: true, ..Recompute::default() };
        let selective = |s: &mut StepShape| (s.recompute.norm, s.recompute.activation) = (true, true);
        out.push((and("train.recompute=[\"norm\",\"activation\"]"), least.with(selective)));
        out.push((and("train.recompute=full"), least.with(full)));
        let bf16 = MemoryEstimate { moments: (StateDtype::Bf16, self.moments.1), ..least.with(full) };
        out.push((and("train.recompute=full optimizer.state_dtype=bf16"), bf16));
        out
    }

    /// What to change so that a step fits in `capacity` bytes, in one sentence.
    pub fn advice(&self, capacity: usize) -> Result<String> {
        // Allocations are rounded up and fragment: a little must stay free.
        let usable = capacity / 100 * 95;
        let needed = format_bytes(self.largest()?.total());
        let needs = format!("this recipe needs about {needed} of {}", format_bytes(capacity));
        for (change, estimate) in self.changes() {
            let total = estimate.largest()?.total();
            if total <= usable {
                let set: Vec<String> = change.split(' ').map(|c| format!("--set {c}")).collect();
                let (set, about) = (set.join(" "), format_bytes(total));
                return Ok(format!("{needs}; the cheapest change that fits is {set} (about {about})"));
            }
        }
        Ok(format!(
            "{needs}, and no change of batch or recomputation makes it fit; use more ranks (parallel.tp, parallel.pp) or \
             a smaller model"
        ))
    }
}

/// Adds to an out-of-memory error what to change; other errors pass unchanged.
pub(crate) fn advise<T>(result: Result<T>, rank: &Rank, estimate: &MemoryEstimate) -> Result<T> {
    result.map_err(|error| match error {
        Error::Tensor(table @ TensorError::OutOfMemory { .. }) => {
            let advice = rank.device().gpu().map(|gpu| estimate.advice(gpu.memory));
            let advice = advice
                .and_then(Result::ok)
                .unwrap_or_else(|| "use a smaller train.micro_batch or a smaller model".into());
            Error::OutOfMemory { table, advice }
        }
        other => other,
    })
}
