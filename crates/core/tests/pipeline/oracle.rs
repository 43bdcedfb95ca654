//! Reference executor of a schedule: ranks block at every grouped send/receive, and channels deliver in order, without tags.
//! A value is the list of stages it went through.

use std::collections::{HashMap, VecDeque};

use ferrotron_core::pipeline::{OpKind, Payload, PipelineOp, Schedule, ScheduleStep, Transfer};

type Value = Vec<usize>;
/// Channels by (from, to, payload): sender, step and value.
type Wires = HashMap<(usize, usize, Payload), VecDeque<((usize, usize), Value)>>;

#[derive(Default)]
struct Rank {
    at: usize,
    /// Whether the sends of the current grouped call are posted.
    posted: bool,
    /// Pending receives of that call.
    open: Vec<(usize, usize, Payload, (usize, usize))>,
    /// Available values by (payload, micro-batch, producing stage).
    values: HashMap<(Payload, usize, usize), Value>,
    ops: Vec<PipelineOp>,
}

/// Whether the schedule runs to its end with every operation once, on the right values, and weight gradients of each
/// chunk in micro-batch order.
pub fn runs(schedule: &Schedule) -> bool {
    let s = schedule.shape;
    let mut ranks: Vec<Rank> = (0..s.pp).map(|_| Rank::default()).collect();
    let mut wires = Wires::new();
    let mut moved = true;
    while moved {
        moved = false;
        for (r, rank) in ranks.iter_mut().enumerate() {
            let Some(step) = schedule.ranks[r].get(rank.at) else { continue };
            match step {
                ScheduleStep::Run(_) | ScheduleStep::Pair(..) => {
                    // Outputs of a pair become available when both passes are done.
                    let ready = step.ops().all(|op| input(schedule, rank, r, op).is_some());
                    if !ready || !step.ops().all(|op| run(schedule, rank, r, op)) {
                        return false;
                    }
                    rank.at += 1;
                    moved = true;
                }
                ScheduleStep::Exchange(all) => {
                    if !rank.posted {
                        rank.posted = true;
                        moved = true;
                        for t in all {
                            let m = t.message();
                            match t {
                                Transfer::Send(_) => {
                                    let Some(value) = rank.values.get(&(m.payload, m.micro_batch, m.stage))
                                    else {
                                        return false;
                                    };
                                    let wire = wires.entry((m.from, m.to, m.payload)).or_default();
                                    wire.push_back(((r, rank.at), value.clone()));
                                }
                                Transfer::Receive(_) => {
                                    rank.open.push((m.from, m.to, m.payload, (m.micro_batch, m.stage)));
                                }
                            }
                        }
                    }
                    let open = std::mem::take(&mut rank.open);
                    for (from, to, payload, (micro_batch, stage)) in open {
                        match wires.get_mut(&(from, to, payload)).and_then(VecDeque::pop_front) {
                            Some((_, value)) => {
                                moved = true;
                                if value[0] != micro_batch || value.last() != Some(&stage) {
                                    return false;
                                }
                                if rank.values.insert((payload, micro_batch, stage), value).is_some() {
                                    return false;
                                }
                            }
                            None => rank.open.push((from, to, payload, (micro_batch, stage))),
                        }
                    }
                    // A send completes when its value is received.
                    let waiting = wires.values().flatten().any(|(by, _)| *by == (r, rank.at));
                    if rank.open.is_empty() && !waiting {
                        rank.at += 1;
                        rank.posted = false;
                        moved = true;
                    }
                }
            }
        }
    }
    let ended = ranks.iter().zip(&schedule.ranks).all(|(rank, steps)| rank.at == steps.len());
    ended && ranks.iter().all(|rank| complete(schedule, &rank.ops))
}

/// The input of an operation, if available.
fn input(schedule: &Schedule, rank: &Rank, r: usize, op: PipelineOp) -> Option<Value> {
    let s = schedule.shape;
    let stage = op.chunk * s.pp + r;
    let key = |payload, stage| (payload, op.micro_batch, stage);
    match op.kind {
        OpKind::Forward if stage == 0 => Some(vec![op.micro_batch]),
        OpKind::Forward => rank.values.get(&key(Payload::Activation, stage - 1)).cloned(),
        OpKind::WeightGrad => rank.values.get(&key(Payload::Gradient, stage)).cloned(),
        _ if !rank.values.contains_key(&key(Payload::Activation, stage)) => None,
        _ if stage + 1 == s.pp * s.vp => rank.values.get(&key(Payload::Activation, stage)).cloned(),
        _ => rank.values.get(&key(Payload::Gradient, stage + 1)).cloned(),
    }
}

fn run(schedule: &Schedule, rank: &mut Rank, r: usize, op: PipelineOp) -> bool {
    let stage = op.chunk * schedule.shape.pp + r;
    let key = |payload, stage| (payload, op.micro_batch, stage);
    let Some(mut value) = input(schedule, rank, r, op) else { return false };
    value.push(stage);
    match op.kind {
        OpKind::Forward => rank.values.insert(key(Payload::Activation, stage), value),
        OpKind::WeightGrad => None,
        _ => rank.values.insert(key(Payload::Gradient, stage), value),
    };
    rank.ops.push(op);
    true
}

fn complete(schedule: &Schedule, ops: &[PipelineOp]) -> bool {
    let s = schedule.shape;
    (0..s.vp).all(|chunk| {
        let of = |kinds: &[OpKind]| -> Vec<usize> {
            ops.iter()
                .filter(|o| o.chunk == chunk && kinds.contains(&o.kind))
                .map(|o| o.micro_batch)
                .collect()
        };
        let all: Vec<usize> = (0..s.micro_batches).collect();
        let sorted = |mut list: Vec<usize>| {
            list.sort_unstable();
            list
        };
        let backward = if s.forward_only { vec![] } else { all.clone() };
        sorted(of(&[OpKind::Forward])) == all
            && sorted(of(&[OpKind::Backward, OpKind::BackwardInput])) == backward
            && of(&[OpKind::Backward, OpKind::WeightGrad]) == backward
    })
}
