//! The cheapest change that makes a step fit.

use super::MemoryEstimate;
use crate::config::StateDtype;
use crate::{Error, Result};
use ferrotron_engine::{Rank, Recompute};
use ferrotron_tensor::{Error as TensorError, format_bytes};

impl MemoryEstimate {
    /// Changes that save memory, the cheapest in time first, each with what to write.
    fn changes(&self) -> Vec<(String, MemoryEstimate)> {
        let mut out = Vec::new();
        if self.in_flight.0 > self.in_flight.1 {
            out.push((
                "parallel.schedule=1f1b".to_string(),
                MemoryEstimate { in_flight: (1, 1), ..self.clone() },
            ));
        }
        let halves =
            std::iter::successors(Some(self.micro_batch / 2), |n| Some(n / 2)).take_while(|n| *n > 0);
        out.extend(
            halves.map(|n| {
                (format!("train.micro_batch={n}"), MemoryEstimate { micro_batch: n, ..self.clone() })
            }),
        );
        let (last, least) = out.last().cloned().unwrap_or((String::new(), self.clone()));
        let and = |change: &str| if last.is_empty() { change.into() } else { format!("{last} {change}") };
        let selective = Recompute { norm: true, activation: true, ..self.recompute };
        let full = Recompute { layer: true, ..Recompute::default() };
        let narrow = (StateDtype::Bf16, self.moments.1);
        out.push((
            and("train.recompute=[\"norm\",\"activation\"]"),
            MemoryEstimate { recompute: selective, ..least.clone() },
        ));
        out.push((and("train.recompute=full"), MemoryEstimate { recompute: full, ..least.clone() }));
        out.push((
            and("train.recompute=full optimizer.state_dtype=bf16"),
            MemoryEstimate { recompute: full, moments: narrow, ..least },
        ));
        out
    }

    /// What to change so that a step fits in `capacity` bytes, in one sentence.
    pub fn advice(&self, capacity: usize) -> String {
        // Memory comes in pieces: a little must stay free.
        let usable = capacity / 100 * 95;
        let needs = format!(
            "this recipe needs about {} of {}",
            format_bytes(self.total_bytes()),
            format_bytes(capacity)
        );
        match self.changes().into_iter().find(|(_, n)| n.total_bytes() <= usable) {
            Some((change, n)) => {
                let set: Vec<String> = change.split(' ').map(|c| format!("--set {c}")).collect();
                format!(
                    "{needs}; the cheapest change that fits is {} (about {})",
                    set.join(" "),
                    format_bytes(n.total_bytes())
                )
            }
            None => {
                format!(
                    "{needs}, and no change of batch or recomputation makes it fit; take more ranks (parallel.tp, parallel.pp) or a smaller model"
                )
            }
        }
    }
}

/// An out-of-memory error with the way out; any other error as it is.
pub(in crate::train) fn advise<T>(result: Result<T>, rank: &Rank, estimate: &MemoryEstimate) -> Result<T> {
    result.map_err(|error| match error {
        Error::Tensor(table @ TensorError::OutOfMemory { .. }) => {
            let card = rank.device().gpu().map(|c| c.memory);
            let advice = card.map_or_else(
                || "take a smaller train.micro_batch or a smaller model".into(),
                |capacity| estimate.advice(capacity),
            );
            Error::OutOfMemory { table, advice }
        }
        other => other,
    })
}
