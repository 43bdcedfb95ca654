//! The best evaluation of a run: whose checkpoint is kept (`checkpoint.best`), and since when none was better, which ends
//! the run (`eval.patience`).

use serde::{Deserialize, Serialize};

/// The evaluation with the lowest loss so far. It is part of the checkpoints' state, so that a resumed run goes on with it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BestEval {
    /// Steps made before it.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
    /// The loss that the last evaluation to count as an improvement had.
    reference: f64,
    /// Evaluations since then.
    since: u64,
}

impl BestEval {
    /// The best evaluation after one with `loss`; `.1`: this one is the best. It counts as an improvement if it is lower
    /// than the last that did by more than `min_delta`. A loss that is no number is no improvement.
    pub(super) fn after(
        before: Option<BestEval>,
        step: u64,
        loss: f64,
        min_delta: f64,
    ) -> (Option<BestEval>, bool) {
        let Some(mut best) = before else {
            let first = loss.is_finite().then_some(BestEval { step, loss, reference: loss, since: 0 });
            return (first, first.is_some());
        };
        let lowest = loss < best.loss;
        if lowest {
            (best.step, best.loss) = (step, loss);
        }
        if loss < best.reference - min_delta {
            (best.reference, best.since) = (loss, 0);
        } else {
            best.since += 1;
        }
        (Some(best), lowest)
    }

    /// Whether `patience` evaluations in a row were no improvement; never with 0.
    pub(super) fn exhausts(&self, patience: u64) -> bool {
        patience > 0 && self.since >= patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(losses: &[f64], min_delta: f64) -> (Option<BestEval>, Vec<bool>) {
        let mut best = None;
        let mut marks = Vec::new();
        for (i, loss) in losses.iter().enumerate() {
            let (next, lowest) = BestEval::after(best, 10 * (i as u64 + 1), *loss, min_delta);
            best = next;
            marks.push(lowest);
        }
        (best, marks)
    }

    #[test]
    fn the_lowest_loss_is_the_best() {
        let (best, marks) = run(&[3.0, 2.0, 2.0, f64::NAN, 1.9, 2.5], 0.0);
        assert_eq!(marks, [true, true, false, false, true, false]);
        let best = best.unwrap();
        assert_eq!((best.step, best.loss, best.since), (50, 1.9, 1));
        assert!(best.exhausts(1) && !best.exhausts(2) && !best.exhausts(0));
        assert_eq!(run(&[f64::NAN], 0.0), (None, vec![false]));
    }

    #[test]
    fn small_steps_add_up_to_an_improvement() {
        // 0.3 lower in three steps: the first two are too small, the third is measured from the same reference.
        let (best, marks) = run(&[2.0, 1.9, 1.8, 1.7], 0.25);
        assert_eq!((marks, best.unwrap().since), (vec![true; 4], 0));
        assert_eq!(run(&[2.0, 1.9, 1.8], 0.25).0.unwrap().since, 2);
    }
}
