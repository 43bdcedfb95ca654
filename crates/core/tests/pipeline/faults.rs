//! Faulty schedules are refused.

use ferrotron_core::{
    Error,
    pipeline::{Matching, PipelinePlan, Schedule, ScheduleKind, ScheduleStep, Transport, check},
};
use proptest::prelude::*;

use crate::oracle;

prop_compose! {
    fn plan()(
        pp in 1usize..5, vp in 1usize..4, m in 1usize..9,
        mode in prop::sample::select(vec![ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble, ScheduleKind::Paired, ScheduleKind::ForwardOnly]),
        transport in prop::sample::select(vec![Transport::Batched, Transport::Eager]),
    ) -> PipelinePlan {
        PipelinePlan { kind: mode, transport, ..PipelinePlan::new(pp, vp, m) }
    }
}

/// All positions of a schedule: rank, step, and index within a grouped send/receive.
fn places(schedule: &Schedule) -> Vec<(usize, usize, Option<usize>)> {
    let mut all = vec![];
    for (rank, steps) in schedule.ranks.iter().enumerate() {
        for (step, entry) in steps.iter().enumerate() {
            match entry {
                ScheduleStep::Run(_) | ScheduleStep::Pair(..) => all.push((rank, step, None)),
                ScheduleStep::Exchange(group) => all.extend((0..group.len()).map(|k| (rank, step, Some(k)))),
            }
        }
    }
    all
}

fn refused_at(schedule: &Schedule, rank: usize) -> Result<(), TestCaseError> {
    match check(schedule, Matching::Tagged) {
        Err(Error::Schedule { rank: named, operation, .. }) => {
            prop_assert_eq!(named, rank);
            prop_assert!(!operation.is_empty());
            Ok(())
        }
        other => Err(TestCaseError::fail(format!("{other:?}"))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_dropped_or_doubled_entry_is_found(plan in plan(), pick in any::<prop::sample::Index>(), later in any::<prop::sample::Index>()) {
        let good = plan.schedule().unwrap();
        let all = places(&good);
        let (rank, step, part) = all[pick.index(all.len())];
        let mut dropped = good.clone();
        let mut doubled = good.clone();
        match part {
            None => {
                dropped.ranks[rank].remove(step);
                let again = good.ranks[rank][step].clone();
                let to = step + later.index(good.ranks[rank].len() - step);
                doubled.ranks[rank].insert(to + 1, again);
            }
            Some(k) => {
                let ScheduleStep::Exchange(group) = &mut dropped.ranks[rank][step] else { unreachable!() };
                let transfer = group.remove(k);
                let ScheduleStep::Exchange(group) = &mut doubled.ranks[rank][step] else { unreachable!() };
                group.push(transfer);
            }
        }
        refused_at(&dropped, rank)?;
        refused_at(&doubled, rank)?;
    }

    /// Swapping two entries of a rank is refused exactly if executing it fails.
    #[test]
    fn a_swap_is_refused_exactly_if_it_goes_wrong(plan in plan(), rank in any::<prop::sample::Index>(),
        a in any::<prop::sample::Index>(), b in any::<prop::sample::Index>(), near in any::<bool>()) {
        let plan = PipelinePlan { transport: Transport::Batched, ..plan };
        let mut schedule = plan.schedule().unwrap();
        let steps = &mut schedule.ranks[rank.index(plan.pp)];
        let a = a.index(steps.len());
        let b = if near { (a + 1) % steps.len() } else { b.index(steps.len()) };
        steps.swap(a, b);
        let verdict = check(&schedule, Matching::Blocking);
        prop_assert_eq!(verdict.is_ok(), oracle::runs(&schedule), "{:?}", verdict);
    }

    /// The same for entries of different ranks, where only the combination is wrong.
    #[test]
    fn split_group_calls_are_refused_exactly_if_they_go_wrong(plan in plan(), pick in any::<prop::sample::Index>(), turn in any::<bool>()) {
        let mut schedule = PipelinePlan { transport: Transport::Batched, ..plan }.schedule().unwrap();
        let groups: Vec<(usize, usize)> = places(&schedule).iter().filter(|p| p.2 == Some(1)).map(|p| (p.0, p.1)).collect();
        prop_assume!(!groups.is_empty());
        let (rank, step) = groups[pick.index(groups.len())];
        let ScheduleStep::Exchange(all) = schedule.ranks[rank].remove(step) else { unreachable!() };
        for transfer in all {
            let at = if turn { step } else { step + 1 };
            let at = at.min(schedule.ranks[rank].len());
            schedule.ranks[rank].insert(at, ScheduleStep::Exchange(vec![transfer]));
        }
        let verdict = check(&schedule, Matching::Blocking);
        prop_assert_eq!(verdict.is_ok(), oracle::runs(&schedule), "{:?}", verdict);
    }
}

fn text(schedule: &Schedule, matching: Matching) -> String {
    check(schedule, matching).unwrap_err().to_string()
}

/// Sending before receiving on both sides: fine with buffered sends, a deadlock with blocking ones.
#[test]
fn a_deadlock_is_named() {
    let mut schedule = PipelinePlan::new(2, 1, 2).schedule().unwrap();
    for steps in &mut schedule.ranks {
        let apart = |step: &ScheduleStep| match step {
            ScheduleStep::Run(_) | ScheduleStep::Pair(..) => vec![step.clone()],
            ScheduleStep::Exchange(all) => all.iter().map(|t| ScheduleStep::Exchange(vec![*t])).collect(),
        };
        *steps = steps.iter().flat_map(apart).collect();
    }
    check(&schedule, Matching::Tagged).unwrap();
    assert_eq!(
        text(&schedule, Matching::Blocking),
        "pipeline rank 0, step 3 (send the activation of micro-batch 1 by stage 0 (rank 0 to 1)): waits for ever for \
         rank 1 to take the activation of micro-batch 1; that rank stands at step 3 (send the gradient of micro-batch 0 \
         by stage 1 (rank 1 to 0))"
    );
}

#[test]
fn faults_are_named() {
    let good = PipelinePlan::new(2, 1, 3).schedule().unwrap();
    let with = |change: &dyn Fn(&mut Schedule)| {
        let mut schedule = good.clone();
        change(&mut schedule);
        text(&schedule, Matching::Blocking)
    };
    let f1 = good.ranks[1].iter().position(|s| s.to_string() == "F1.0").unwrap();
    let b1 = good.ranks[1].iter().position(|s| s.to_string() == "B1.0").unwrap();
    let swapped = with(&|s| s.ranks[1].swap(f1, b1));
    assert_eq!(swapped, format!("pipeline rank 1, step {f1} (B1.0): runs before its forward"));
    let dropped = with(&|s| drop(s.ranks[1].remove(b1)));
    assert!(
        dropped.starts_with("pipeline rank 1, step") && dropped.contains("before it is made"),
        "{dropped}"
    );
    let early = with(&|s| drop(s.ranks[1].remove(0)));
    assert!(
        early.contains("(F0.0): runs before the rank receives the activation of micro-batch 0"),
        "{early}"
    );
    assert!(with(&|s| drop(s.ranks.pop())).contains("has 1 lists"));
    let pair = |f: &ScheduleStep, b: &ScheduleStep| match (f, b) {
        (ScheduleStep::Run(f), ScheduleStep::Run(b)) => ScheduleStep::Pair(*f, *b),
        _ => unreachable!(),
    };
    // The last stage's backward depends on the forward paired with it; and two backwards are not a pair.
    let own = with(&|s| s.ranks[1][f1] = pair(&good.ranks[1][f1], &good.ranks[1][b1]));
    assert!(own.contains("(F1.0 beside B1.0): pairs two passes of one micro-batch"), "{own}");
    let kinds = with(&|s| s.ranks[1][b1] = pair(&good.ranks[1][b1], &good.ranks[1][b1]));
    assert!(kinds.contains("(B1.0 beside B1.0): pairs other passes"), "{kinds}");
    // Two chunks swapped on the sending side only.
    let eager =
        PipelinePlan { transport: Transport::Eager, ..PipelinePlan::new(2, 1, 4) }.schedule().unwrap();
    let mut crossed = eager.clone();
    let receives: Vec<usize> = (0..crossed.ranks[1].len())
        .filter(|&k| crossed.ranks[1][k].to_string().starts_with("receive"))
        .collect();
    let late = crossed.ranks[1].remove(receives[1]);
    crossed.ranks[1].insert(0, late);
    let error = text(&crossed, Matching::Tagged);
    assert!(
        error.contains("expects the activation of micro-batch 1")
            && error.contains("sends the activation of micro-batch 0"),
        "{error}"
    );
}
