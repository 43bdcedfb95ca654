//! Whose bits differed first.

use ferrotron_core::fault::culprit::{Call, Difference, Record, StepCalls, culprit};

fn collective(group: u64, sequence: u64, digest: u64) -> Call {
    Call { group, sequence, route: None, what: format!("group {group}"), digest: Some(digest) }
}

fn message(sequence: u64, route: (u64, u64), digest: Option<u64>) -> Call {
    Call { group: 9, sequence, route: Some(route), what: "message".into(), digest }
}

fn step(calls: Vec<Call>) -> StepCalls {
    StepCalls { step: 3, calls }
}

fn record(list: &StepCalls) -> Record {
    Record { steps: vec![list.clone()], state: Vec::new() }
}

/// The culprit between two runs of every rank.
fn found(first: &[StepCalls], second: &[StepCalls]) -> Option<usize> {
    let differences: Vec<_> =
        first.iter().zip(second).map(|(a, b)| record(a).difference(&record(b))).collect();
    culprit(&differences, first)
}

#[test]
fn in_a_pipeline_the_stage_that_sent_first_is_at_fault_not_the_one_with_fewer_calls() {
    // Stage 0 has had many calls of its own group before it sends; stage 1 answers in its first call.
    let stages = |wrong: u64| {
        let own = (0..5).map(|i| collective(1, i, 7 + if i == 4 { wrong } else { 0 }));
        let first = own.chain([message(0, (0, 1), Some(40 + wrong)), message(0, (1, 0), None)]);
        let partner = (0..5).map(|i| collective(1, i, 7));
        let second = vec![message(0, (0, 1), None), message(0, (1, 0), Some(50 + wrong))];
        [step(first.collect()), step(second), step(partner.collect())]
    };
    assert_eq!(found(&stages(0), &stages(0)), None);
    assert_eq!(found(&stages(0), &stages(1)), Some(0));
    // Sequence numbers of a later run do not count.
    let mut later = stages(0);
    later.iter_mut().flat_map(|s| &mut s.calls).for_each(|c| c.sequence += 100);
    assert_eq!(found(&stages(0), &later), None);
}

#[test]
fn a_fault_that_went_through_collectives_is_traced_to_its_first_sender() {
    // Two groups of two share rank 1: 0-1, then 1-2; rank 2 differs later than 1, 1 later than 0.
    let ranks = |wrong: u64| {
        [
            step(vec![collective(1, 0, 1 + wrong), collective(1, 1, 2)]),
            step(vec![collective(1, 0, 1), collective(2, 5, 9 + wrong), collective(1, 1, 2)]),
            step(vec![collective(2, 5, 9), collective(2, 6, 4 + wrong)]),
            step(vec![collective(2, 6, 4)]),
        ]
    };
    assert_eq!(found(&ranks(0), &ranks(1)), Some(0));
}

#[test]
fn state_that_differs_without_a_payload_is_the_ranks_own() {
    let state = |x| Record { steps: Vec::new(), state: vec![("a".into(), 1), ("b".into(), x)] };
    let differs = state(2).difference(&state(3));
    assert_eq!(differs, Some(Difference::State { tensor: "b".into() }));
    assert_eq!(culprit(&[None, None, differs, None], &[]), Some(2));
    assert_eq!(state(2).difference(&state(2)), None);
}
