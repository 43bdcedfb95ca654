//! Expected split sizes of MoE messages in a run: where they are used, and when they change on all ranks.

use super::Trainer;
use super::model_state::ModelState;
use crate::Result;
use crate::config::Resolved;
use ferrotron_engine::Rank;
use ferrotron_engine::moe::{MoeState, SplitHeadroom, SplitSizes};

/// Most steps in a row that sizes must have held before they are used again.
const MAX_CALM: u32 = 256;

/// What the host keeps of expected split sizes; the same on all ranks, on pipeline stages without MoE layers too.
pub(super) struct ExpectedSplits {
    /// How often sizes have changed: steps with the same number launch the same messages.
    changes: u64,
    /// The next step uses them; otherwise the host reads the counts of every layer.
    in_force: bool,
    /// Steps in a row, whose counts the host read, that sizes would have held; and how many must be.
    calm: [u32; 2],
    /// How many must be at first.
    first_calm: u32,
    /// Steps whose messages did not hold their tokens.
    pub(super) overflows: u64,
}

impl ExpectedSplits {
    /// The headroom with which a recipe expects split sizes on this rank's device; none where the host reads the counts.
    pub(super) fn headroom(rank: &Rank, r: &Resolved) -> Option<SplitHeadroom> {
        // Other transports wait for their peers on the host anyway.
        let asked = r.model.moe.is_some()
            && r.config.expects_split_sizes()
            && rank.world.only_enqueues()
            && !rank.device().is_meta();
        asked.then(|| SplitHeadroom::new(r.config.moe.split_headroom))
    }

    /// Prepares the MoE layers of this rank's stages.
    pub(super) fn begin(
        rank: &Rank,
        model: &mut ModelState,
        headroom: SplitHeadroom,
    ) -> Result<ExpectedSplits> {
        if let Some(moe) = model.step_state.moe_mut() {
            moe.expect_split_sizes(rank, headroom)?;
        }
        let first_calm = headroom.calm;
        Ok(ExpectedSplits { changes: 0, in_force: false, calm: [0, first_calm], first_calm, overflows: 0 })
    }

    /// Number of the sizes that the next step uses; none if the host reads its counts.
    pub(super) fn epoch(&self) -> Option<u64> {
        self.in_force.then_some(self.changes)
    }

    /// Sizes were set.
    pub(super) fn changed(&mut self) {
        self.changes += 1;
    }

    /// A step ended whose counts the host read; `held`: sizes would have held them, on all ranks.
    pub(super) fn counted(&mut self, held: bool) {
        self.calm[0] = if held { self.calm[0] + 1 } else { 0 };
        self.in_force = self.calm[0] >= self.calm[1];
    }

    /// A step did not fit. Early in a run, and where the data changes, routing may move faster than sizes follow: the steps
    /// between two overflows double, so that few steps run twice.
    pub(super) fn overflowed(&mut self) {
        self.overflows += 1;
        self.in_force = false;
        self.calm = [0, (2 * self.calm[1]).min(MAX_CALM)];
    }
}

impl Trainer {
    /// The split sizes of this rank's MoE layers, where they are expected.
    pub(super) fn split_sizes(&self) -> Option<&SplitSizes> {
        self.model.step_state.moe().and_then(MoeState::split_sizes)
    }

    /// Whether MoE messages have expected split sizes, so that a step may have to be launched again.
    pub(super) fn expects_split_sizes(&self) -> bool {
        self.runner.splits.is_some()
    }

    /// Uses expected split sizes from now on, whatever the recipe and the transport say: for tests. Every rank calls it.
    pub fn expect_split_sizes(&mut self, headroom: SplitHeadroom) -> Result<()> {
        self.runner.splits = Some(ExpectedSplits::begin(&self.rank, &mut self.model, headroom)?);
        Ok(())
    }

    /// Whether the host reads the counts of MoE messages until sizes that are expected come into force.
    pub fn awaits_split_sizes(&self) -> bool {
        self.runner.splits.as_ref().is_some_and(|splits| splits.epoch().is_none())
    }

    /// Steps so far whose MoE messages of expected size did not hold their tokens, so that they ran again.
    pub fn split_overflows(&self) -> u64 {
        self.runner.splits.as_ref().map_or(0, |splits| splits.overflows)
    }

    /// Returns to sizes that the host reads, until sizes would have held as many steps in a row as at the start of a run: a rank that
    /// begins here has no counts of steps before, and all must agree.
    pub(super) fn forget_split_sizes(&mut self) -> Result<()> {
        if let Some(splits) = &mut self.runner.splits {
            (splits.in_force, splits.calm) = (false, [0, splits.first_calm]);
        }
        self.split_sizes().map_or(Ok(()), |sizes| Ok(sizes.reset(&self.rank.compute)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Recipe;
    use crate::data::{Batches, source};
    use crate::ranks::on_threads_with;
    use std::time::Duration;

    #[test]
    fn every_overflow_doubles_the_steps_that_must_have_held() {
        let mut s = ExpectedSplits { changes: 0, in_force: false, calm: [0, 2], first_calm: 2, overflows: 0 };
        let until_in_force = |s: &mut ExpectedSplits| (1..).find(|_| (s.counted(true), s.in_force).1);
        s.counted(true);
        s.counted(false);
        assert_eq!(until_in_force(&mut s), Some(2), "they must be in a row");
        for steps in [4, 8, 16, 32, 64, 128, 256, 256] {
            s.overflowed();
            assert_eq!((s.epoch(), until_in_force(&mut s)), (None, Some(steps)));
        }
        assert_eq!(s.overflows, 8);
    }

    /// The results of `work` on two expert-parallel ranks, whose sizes are used from the second step on.
    fn on_two_ranks(work: impl Fn(&mut Trainer, &dyn Batches) -> Result<bool> + Sync) -> Vec<bool> {
        let mut recipe = Recipe::named("tiny").unwrap();
        for set in ["moe.experts=4", "moe.topk=2", "moe.ffn=16", "parallel.ep=2", "parallel.dp=2"] {
            recipe.set(set).unwrap();
        }
        for set in ["train.global_batch=4", "train.micro_batch=1", "data.seq_len=16"] {
            recipe.set(set).unwrap();
        }
        let resolved = recipe.resolve(None).unwrap();
        let layout = resolved.config.parallel.layout();
        let make = || Ok(Rank::cpu(1, 1)?);
        let work = |rank| {
            let data = source::open(&resolved)?.train;
            let mut t = Trainer::new(rank, &resolved)?;
            assert!(!t.expects_split_sizes(), "threads wait for each other anyway");
            t.expect_split_sizes(SplitHeadroom { calm: 0, ..SplitHeadroom::new(1.0) })?;
            work(&mut t, &*data)
        };
        on_threads_with(&layout, Duration::from_secs(30), Default::default(), make, work).unwrap()
    }

    fn raise_overflow(t: &Trainer) -> Result<()> {
        let overflow = t.split_sizes().map(SplitSizes::overflow).unwrap()?;
        Ok(t.rank.compute.upload_into(&overflow, &[1i32])?)
    }

    /// A restored rank has no counts, as one that replaces another has none: sizes begin anew, and bits stay.
    #[test]
    fn sizes_begin_anew_after_a_snapshot() {
        let same = on_two_ranks(|t, data| {
            let steps = |t: &mut Trainer| (0..3).map(|_| t.train_step(data)).collect::<Result<Vec<_>>>();
            steps(t)?;
            assert!(!t.awaits_split_sizes());
            let mut snapshot = t.begin_memory_snapshot(None)?;
            let first = steps(t)?;
            // An overflow that nothing has handled is of a step that never was.
            raise_overflow(t)?;
            t.restore_memory_snapshot(&mut snapshot)?;
            assert!(t.awaits_split_sizes());
            let second = steps(t)?;
            assert!(!t.awaits_split_sizes());
            Ok(first == second)
        });
        assert_eq!(same, [true, true]);
    }

    #[test]
    fn a_step_that_overflows_ends_when_it_has_run_again() {
        let later = on_two_ranks(|t, data| {
            t.train_step(data)?;
            raise_overflow(t)?;
            let step = t.begin_step(data)?;
            let launched = t.rank.compute.record()?;
            t.end_step(step, &mut None)?;
            assert_eq!(t.split_overflows(), 1);
            Ok(t.last_done.since(&launched)? > Duration::ZERO)
        });
        assert_eq!(later, [true, true]);
    }
}
