//! The cheapest change that makes a step fit.

use super::Need;
use crate::config::Moments;
use crate::{Error, Result};
use ferrotron_engine::{Rank, Recompute};
use ferrotron_tensor::{Error as TensorError, human};

impl Need {
    /// Changes that save memory, the cheapest in time first, each with what to write.
    fn changes(&self) -> Vec<(String, Need)> {
        let mut out = Vec::new();
        if self.held.0 > self.held.1 {
            out.push(("parallel.schedule=1f1b".to_string(), Need { held: (1, 1), ..self.clone() }));
        }
        let halves =
            std::iter::successors(Some(self.micro_batch / 2), |n| Some(n / 2)).take_while(|n| *n > 0);
        out.extend(
            halves.map(|n| (format!("train.micro_batch={n}"), Need { micro_batch: n, ..self.clone() })),
        );
        let (last, least) = out.last().cloned().unwrap_or((String::new(), self.clone()));
        let and = |change: &str| if last.is_empty() { change.into() } else { format!("{last} {change}") };
        let again = Recompute { norm: true, activation: true, ..self.recompute };
        let full = Recompute { layer: true, ..Recompute::default() };
        let narrow = (Moments::Bf16, self.moments.1);
        out.push((
            and("train.recompute=[\"norm\",\"activation\"]"),
            Need { recompute: again, ..least.clone() },
        ));
        out.push((and("train.recompute=full"), Need { recompute: full, ..least.clone() }));
        out.push((
            and("train.recompute=full optimizer.moments=bf16"),
            Need { recompute: full, moments: narrow, ..least },
        ));
        out
    }

    /// What to change so that a step fits in `room` bytes, in one sentence.
    pub fn advice(&self, room: usize) -> String {
        // Memory comes in pieces: a little must stay free.
        let usable = room / 100 * 95;
        let needs = format!("this recipe needs about {} of {}", human(self.total()), human(room));
        match self.changes().into_iter().find(|(_, n)| n.total() <= usable) {
            Some((change, n)) => {
                let set: Vec<String> = change.split(' ').map(|c| format!("--set {c}")).collect();
                format!(
                    "{needs}; the cheapest change that fits is {} (about {})",
                    set.join(" "),
                    human(n.total())
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
pub(in crate::train) fn advise<T>(result: Result<T>, rank: &Rank, need: &Need) -> Result<T> {
    result.map_err(|error| match error {
        Error::Tensor(table @ TensorError::OutOfMemory { .. }) => {
            let card = rank.device().card().map(|c| c.memory);
            let advice = card.map_or_else(
                || "take a smaller train.micro_batch or a smaller model".into(),
                |room| need.advice(room),
            );
            Error::OutOfMemory { table, advice }
        }
        other => other,
    })
}
