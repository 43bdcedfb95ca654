//! Puts the messages into the ranks' lists.

use super::{
    op::{Message, OpKind, Payload, PipelineOp, ScheduleShape, ScheduleStep, Transfer},
    schedule::{PipelinePlan, ScheduleKind},
    schedule_1f1b::interleaved_table,
    timeline::{Costs, Timeline},
};
use crate::Result;

/// A rank's list while it is written.
struct Writer<'a> {
    shape: &'a ScheduleShape,
    rank: usize,
    steps: Vec<ScheduleStep>,
}

impl Writer<'_> {
    fn run(&mut self, op: PipelineOp) {
        self.steps.push(ScheduleStep::Run(op));
    }

    /// A backward and perhaps a forward, in turns if they may be.
    fn beside(&mut self, forward: Option<PipelineOp>, backward: PipelineOp, paired: bool) {
        match forward {
            Some(f) if paired && f.micro_batch != backward.micro_batch => {
                self.steps.push(ScheduleStep::Pair(f, backward));
            }
            _ => {
                forward.into_iter().for_each(|f| self.run(f));
                self.run(backward);
            }
        }
    }

    /// One group call of those that exist.
    fn exchange(&mut self, all: impl IntoIterator<Item = Option<Transfer>>) {
        let all: Vec<_> = all.into_iter().flatten().collect();
        if !all.is_empty() {
            self.steps.push(ScheduleStep::Exchange(all));
        }
    }

    fn send(&self, op: PipelineOp) -> Option<Transfer> {
        self.shape.output_message(self.rank, op).map(Transfer::Send)
    }

    fn receive(&self, op: PipelineOp) -> Option<Transfer> {
        self.shape.input_message(self.rank, op).map(Transfer::Receive)
    }
}

/// Plain 1F1B. In the steady state an output is sent with the gradient that arrives, and a gradient with the next
/// input.
pub(super) fn plain(plan: &PipelinePlan, shape: &ScheduleShape) -> Result<Vec<Vec<ScheduleStep>>> {
    let forward = |micro_batch| PipelineOp { kind: OpKind::Forward, micro_batch, chunk: 0 };
    let backward = |micro_batch| PipelineOp { kind: OpKind::Backward, micro_batch, chunk: 0 };
    let mut ranks = Vec::with_capacity(plan.pp);
    for rank in 0..plan.pp {
        let mut w = Writer { shape, rank, steps: Vec::new() };
        let warm = plan.warmup(rank, false)?;
        let alone = if plan.kind == ScheduleKind::ForwardOnly { warm.total } else { warm.warmup };
        for k in (0..alone).map(forward) {
            w.exchange([w.receive(k)]);
            w.run(k);
            w.exchange([w.send(k)]);
        }
        let steady = warm.total - alone;
        if steady > 0 {
            w.exchange([w.receive(forward(alone))]);
        }
        for i in 0..steady {
            let (f, b) = (forward(alone + i), backward(i));
            w.run(f);
            w.exchange([w.send(f), w.receive(b)]);
            w.run(b);
            let next = (i + 1 < steady).then(|| w.receive(forward(alone + i + 1)));
            w.exchange([w.send(b), next.flatten()]);
        }
        if plan.kind != ScheduleKind::ForwardOnly {
            for b in (steady..warm.total).map(backward) {
                w.exchange([w.receive(b)]);
                w.run(b);
                w.exchange([w.send(b)]);
            }
        }
        ranks.push(w.steps);
    }
    Ok(ranks)
}

/// Interleaved 1F1B: after each pair of passes one group call with all that there is to send and to receive. Paired 1F1B
/// is the same with the passes of a pair in turns.
pub(super) fn interleaved(plan: &PipelinePlan, shape: &ScheduleShape) -> Result<Vec<Vec<ScheduleStep>>> {
    let table = interleaved_table(plan.micro_batches, plan.vp, plan.group()?);
    let forward: Vec<PipelineOp> = table
        .iter()
        .map(|&(micro_batch, chunk)| PipelineOp { kind: OpKind::Forward, micro_batch, chunk })
        .collect();
    let backward: Vec<PipelineOp> = plan.backwards(&table).collect();
    let mut ranks = Vec::with_capacity(plan.pp);
    for rank in 0..plan.pp {
        let mut w = Writer { shape, rank, steps: Vec::new() };
        let paired = plan.kind == ScheduleKind::Paired;
        let warm = plan.warmup(rank, paired)?;
        let train = plan.kind != ScheduleKind::ForwardOnly;
        // What arrives during the exchange after the k-th pass. A rank's neighbour does the same pass one beat
        // earlier, so that is the input of the next pass; around the corner it is the P-1st pass before this one
        // that just left the other end, and it may lie waiting here for a while.
        let arriving = |passes: &[PipelineOp], corner: Option<usize>, k: usize| -> Option<Transfer> {
            let message = match corner {
                Some(sender) => shape.output_message(sender, *passes.get(k.checked_sub(plan.pp - 1)?)?),
                None => shape.input_message(rank, *passes.get(k + 1)?),
            };
            message.filter(|_| k + 1 < warm.total).map(Transfer::Receive)
        };
        let last = plan.pp - 1;
        let input = |k| arriving(&forward, (rank == 0).then_some(last), k);
        let gradient = |k| arriving(&backward, (rank == last).then_some(0), k);

        w.exchange([w.receive(forward[0])]);
        for (k, &f) in forward[..warm.warmup].iter().enumerate() {
            w.run(f);
            let turn = train && k + 1 == warm.warmup && !warm.all_in_warmup;
            let back = if turn { w.receive(backward[0]) } else { None };
            w.exchange([w.send(f), input(k), back]);
        }
        if !train {
            ranks.push(w.steps);
            continue;
        }
        if warm.all_in_warmup {
            w.exchange([w.receive(backward[0])]);
        }
        for (i, &b) in backward.iter().enumerate() {
            let k = warm.warmup + i;
            let forward = forward.get(k).copied();
            w.beside(forward, b, paired);
            let sent = forward.and_then(|f| w.send(f));
            let next = forward.and_then(|_| input(k));
            w.exchange([sent, w.send(b), next, gradient(i)]);
        }
        ranks.push(w.steps);
    }
    Ok(ranks)
}

/// Messages for any order of operations, safe where every group call is waited for. All steps are given a time, that
/// of a run in which messages cost nothing, and every rank's list follows it. Of the unfinished messages the earliest
/// has then been reached by both its ranks, so that something always moves.
pub(super) fn timed(
    shape: &ScheduleShape,
    ops: &[Vec<PipelineOp>],
    costs: &Costs,
) -> Result<Vec<Vec<ScheduleStep>>> {
    let timeline = Timeline::of(*shape, ops, costs)?;
    let mut lists: Vec<Vec<(f64, bool, ScheduleStep)>> = vec![Vec::new(); shape.pp];
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        for span in spans {
            lists[rank].push((span.start, true, ScheduleStep::Run(span.op)));
            if let Some(m) = shape.output_message(rank, span.op) {
                lists[m.from].push((span.end, false, ScheduleStep::Exchange(vec![Transfer::Send(m)])));
                lists[m.to].push((span.end, false, ScheduleStep::Exchange(vec![Transfer::Receive(m)])));
            }
        }
    }
    Ok(lists
        .into_iter()
        .map(|mut list| {
            // Stable, and messages before the operations that start when they arrive.
            list.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let mut steps: Vec<ScheduleStep> = Vec::new();
            for (_, _, step) in list {
                match (steps.last_mut(), step) {
                    (Some(ScheduleStep::Exchange(group)), ScheduleStep::Exchange(more)) => group.extend(more),
                    (_, step) => steps.push(step),
                }
            }
            steps
        })
        .collect())
}

/// Sends right after the operation, receives one operation ahead.
pub(super) fn eager(shape: &ScheduleShape, ops: &[Vec<PipelineOp>]) -> Vec<Vec<ScheduleStep>> {
    let list = |(rank, ops): (usize, &Vec<PipelineOp>)| {
        let mut w = Writer { shape, rank, steps: Vec::new() };
        if let Some(first) = ops.first() {
            w.exchange([w.receive(*first)]);
        }
        for (k, op) in ops.iter().enumerate() {
            w.exchange([ops.get(k + 1).and_then(|next| w.receive(*next))]);
            w.run(*op);
            w.exchange([w.send(*op)]);
        }
        w.steps
    };
    ops.iter().enumerate().map(list).collect()
}

/// Every message that a whole step needs.
pub(super) fn all_messages(shape: &ScheduleShape) -> impl Iterator<Item = Message> + '_ {
    let payloads: &[Payload] =
        if shape.forward_only { &[Payload::Activation] } else { &[Payload::Activation, Payload::Gradient] };
    payloads.iter().flat_map(move |&payload| {
        (0..shape.stages()).flat_map(move |stage| {
            (0..shape.micro_batches).filter_map(move |m| shape.message(payload, m, stage))
        })
    })
}
