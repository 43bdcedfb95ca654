//! A schedule carried out: this rank's chunks work through its list, and tensors travel between stages.
//!
//! Messages to later stages and messages to earlier ones have a group and a stream each, so that neither waits for the
//! other. A tensor that was sent stays alive until its stream has read it; one that was received is waited for where
//! it is used.

use super::{Message, OpKind, Payload, PipelineOp, Schedule, ScheduleStep, Transfer};
use crate::model::{Chunk, ChunkSaved, Decoder, ForwardMode, Input};
use crate::train::{weighted_loss, with_mtp_losses};
use crate::{Error, Result};
use ferrotron_comm::{Communicator, SendRecv};
use ferrotron_engine::moe::MoeBatch;
use ferrotron_engine::{Dropout, GradBuffer, StepContext, Targets, WeightGrad, interleave};
use ferrotron_tensor::{Event, Tensor};
use std::collections::HashMap;

/// One micro-batch on the device.
pub struct MicroBatch {
    /// Tokens.
    pub input: Input,
    /// Labels and weights; none where only logits are wanted.
    pub targets: Option<Targets>,
    /// Dropout, in training.
    pub dropout: Option<DropoutRows>,
    /// Its part of a step; none outside of training.
    pub position: Option<StepPosition>,
}

/// A micro-batch in its step; see [`MoeBatch`].
pub struct StepPosition {
    /// Step of the run.
    pub step: u64,
    /// i32 `[rows]`: number in the step of each token of the residual stream on this rank.
    pub rows: Tensor,
    /// Its share in means over the step.
    pub share: f32,
}

/// What is dropped in a micro-batch; see [`Dropout`].
pub struct DropoutRows {
    /// Chance that an activation is dropped.
    pub p: f32,
    /// Step of the run.
    pub step: u64,
    /// i32 `[rows]`: number in the step of each token of the residual stream on this rank.
    pub rows: Tensor,
}

impl MicroBatch {
    /// A pass over it.
    fn pass<'m>(&'m self, pass: StepContext<'m>) -> StepContext<'m> {
        StepContext { dropout: self.dropout(), moe: self.mix(), ..pass }
    }

    fn dropout(&self) -> Option<Dropout<'_>> {
        self.dropout.as_ref().map(|d| Dropout { p: d.p, step: d.step, rows: &d.rows })
    }

    fn mix(&self) -> Option<MoeBatch<'_>> {
        let input = self.input.moe.as_ref()?;
        Some(match &self.position {
            Some(p) => MoeBatch { input, step: p.step, rows: &p.rows, micro_batch_weight: p.share },
            None => MoeBatch { input, step: 0, rows: &input.token_index, micro_batch_weight: 1.0 },
        })
    }
}

/// What a pass through the model is for.
pub enum StepMode<'a> {
    /// Logits `[rows, V]` of each micro-batch, on the last stage.
    Logits,
    /// `Σ weight·loss` f32 `[1]` of each micro-batch, on the last stage.
    Loss,
    /// The same, behind it that of each prediction further ahead (f32 `[1 + D]`), and gradients.
    Train(&'a mut GradBuffer),
}

/// Brings a micro-batch to the device when it is first needed.
pub type Load<'a> = dyn FnMut(usize) -> Result<MicroBatch> + 'a;

/// Runs this rank's list of `schedule`. On the rank of the last stage, returns a result for each micro-batch in order;
/// elsewhere nothing.
pub fn execute(
    pass: StepContext,
    decoder: &Decoder,
    schedule: &Schedule,
    load: &mut Load,
    mode: StepMode,
) -> Result<Vec<Tensor>> {
    let me = pass.rank.pp.rank();
    let steps = schedule.ranks.get(me).map_or(&[][..], Vec::as_slice);
    let mut ops_left = vec![0; schedule.shape.micro_batches];
    schedule.ops(me).for_each(|op| ops_left[op.micro_batch] += 1);
    let count = schedule.shape.micro_batches;
    let mut executor = Executor {
        pass,
        decoder,
        schedule,
        me,
        load,
        mode,
        ops_left,
        batches: (0..count).map(|_| None).collect(),
        saved: HashMap::new(),
        deferred_wgrads: HashMap::new(),
        outbox: HashMap::new(),
        inbox: HashMap::new(),
        in_flight_sends: [Vec::new(), Vec::new()],
        results: (0..count).map(|_| None).collect(),
    };
    for step in steps {
        match step {
            ScheduleStep::Run(op) => executor.run(*op)?,
            ScheduleStep::Pair(forward, backward) => executor.pair(*forward, *backward)?,
            ScheduleStep::Exchange(all) => executor.exchange(all)?,
        }
    }
    executor.finish()
}

/// A rank in the middle of its list. Keys are (chunk, micro-batch).
struct Executor<'a, 'b> {
    pass: StepContext<'a>,
    decoder: &'a Decoder,
    schedule: &'a Schedule,
    me: usize,
    load: &'a mut Load<'b>,
    mode: StepMode<'a>,
    /// Operations to come on each micro-batch.
    ops_left: Vec<usize>,
    batches: Vec<Option<MicroBatch>>,
    saved: HashMap<(usize, usize), ChunkSaved>,
    deferred_wgrads: HashMap<(usize, usize), Vec<WeightGrad>>,
    /// Made here, to be sent.
    outbox: HashMap<Message, Tensor>,
    /// Received, with when it is there.
    inbox: HashMap<Message, (Tensor, Event)>,
    /// Sent on each lane, with when that is done.
    in_flight_sends: [Vec<(Tensor, Event)>; 2],
    results: Vec<Option<Tensor>>,
}

fn missing(what: impl std::fmt::Display) -> Error {
    Error::Invalid(format!("{what} is not there where the schedule uses it: a mistake in the schedule"))
}

/// An operation that has begun: its chunk, its micro-batch, and what came from another stage.
struct StartedOp<'a> {
    chunk: &'a Chunk,
    batch: MicroBatch,
    received: Option<Tensor>,
}

impl<'a> Executor<'a, '_> {
    /// The micro-batch, brought to the device if this is its first use.
    fn batch(&mut self, m: usize) -> Result<&MicroBatch> {
        if self.batches[m].is_none() {
            self.batches[m] = Some((self.load)(m)?);
        }
        self.batches[m].as_ref().ok_or_else(|| missing(format!("micro-batch {m}")))
    }

    /// An operation begins, as soon as what it needs of another stage is there.
    fn begin(&mut self, op: PipelineOp) -> Result<StartedOp<'a>> {
        let m = op.micro_batch;
        let decoder = self.decoder;
        let chunk = decoder.chunks().get(op.chunk).ok_or_else(|| missing(format!("chunk {}", op.chunk)))?;
        let received = match self.schedule.shape.input_message(self.me, op) {
            None => None,
            Some(message) => {
                let (x, there) = self.inbox.remove(&message).ok_or_else(|| missing(message))?;
                self.pass.rank.compute.wait(&there)?;
                Some(x)
            }
        };
        self.batch(m)?;
        // Taken out while it is used, so that everything else can be.
        let batch = self.batches[m].take().ok_or_else(|| missing(format!("micro-batch {m}")))?;
        Ok(StartedOp { chunk, batch, received })
    }

    /// An operation has ended with something for another stage.
    fn end(&mut self, op: PipelineOp, batch: MicroBatch, output: Option<Tensor>) {
        if let (Some(message), Some(tensor)) = (self.schedule.shape.output_message(self.me, op), output) {
            self.outbox.insert(message, tensor);
        }
        let m = op.micro_batch;
        self.ops_left[m] -= 1;
        self.batches[m] = (self.ops_left[m] > 0).then_some(batch);
    }

    fn run(&mut self, op: PipelineOp) -> Result<()> {
        let StartedOp { chunk, batch, received } = self.begin(op)?;
        let (key, pass) = ((op.chunk, op.micro_batch), batch.pass(self.pass));
        let output = match op.kind {
            OpKind::Forward => {
                let goal = self.forward_mode(&batch)?;
                let out = chunk.forward(&pass, &batch.input, received, goal)?;
                self.store_output(chunk, key, goal, out)?
            }
            OpKind::Backward | OpKind::BackwardInput => {
                let StepMode::Train(grads) = &mut self.mode else {
                    return Err(missing("a buffer for gradients"));
                };
                let saved = self.saved.remove(&key).ok_or_else(|| missing("what forward kept"))?;
                if op.kind == OpKind::Backward {
                    let mut put = |g: WeightGrad| g.run(pass.rank, grads);
                    chunk.backward(&pass, saved, &batch.input, received, &mut put)?
                } else {
                    let later = self.deferred_wgrads.entry(key).or_default();
                    let mut put = |g| {
                        later.push(g);
                        Ok(())
                    };
                    chunk.backward(&pass, saved, &batch.input, received, &mut put)?
                }
            }
            OpKind::WeightGrad => {
                let jobs = self.deferred_wgrads.remove(&key).ok_or_else(|| missing(op))?;
                if let StepMode::Train(grads) = &mut self.mode {
                    jobs.into_iter().try_for_each(|g| g.run(self.pass.rank, grads))?;
                }
                None
            }
        };
        self.end(op, batch, output);
        Ok(())
    }

    /// A forward and a backward in turns. The backward is first: what it sends travels beside the forward's attention.
    fn pair(&mut self, forward: PipelineOp, backward: PipelineOp) -> Result<()> {
        let (f, b) = (self.begin(forward)?, self.begin(backward)?);
        let [key, back] = [forward, backward].map(|op| (op.chunk, op.micro_batch));
        let (pass, pass_back) = (f.batch.pass(self.pass), b.batch.pass(self.pass));
        let goal = self.forward_mode(&f.batch)?;
        let saved = self.saved.remove(&back).ok_or_else(|| missing("what forward kept"))?;
        let StepMode::Train(grads) = &mut self.mode else { return Err(missing("a buffer for gradients")) };
        let mut put = |g: WeightGrad| g.run(pass_back.rank, grads);
        let (dx, out) = interleave(
            b.chunk.backward_in_turns(&pass_back, saved, &b.batch.input, b.received, &mut put),
            f.chunk.forward_in_turns(&pass, &f.batch.input, f.received, goal),
        )?;
        let y = self.store_output(f.chunk, key, goal, out)?;
        self.end(forward, f.batch, y);
        self.end(backward, b.batch, dx);
        Ok(())
    }

    /// What comes out at the end of the model.
    fn forward_mode<'m>(&self, batch: &'m MicroBatch) -> Result<ForwardMode<'m>> {
        let targets = || batch.targets.as_ref().ok_or_else(|| missing("the labels of a micro-batch"));
        Ok(match self.mode {
            StepMode::Logits => ForwardMode::Logits,
            StepMode::Loss => ForwardMode::Loss(targets()?),
            StepMode::Train(_) => ForwardMode::Train(targets()?),
        })
    }

    /// Puts what a forward made where it belongs; what is for the next stage is returned.
    fn store_output(
        &mut self,
        chunk: &Chunk,
        key: (usize, usize),
        goal: ForwardMode,
        (y, saved): (Tensor, Option<ChunkSaved>),
    ) -> Result<Option<Tensor>> {
        let rank = self.pass.rank;
        let y = if chunk.is_last() {
            let further = saved.as_ref().and_then(ChunkSaved::mtp_losses);
            self.results[key.1] = Some(match goal {
                ForwardMode::Logits => y,
                ForwardMode::Loss(t) | ForwardMode::Train(t) => {
                    with_mtp_losses(rank, weighted_loss(rank, &y, t)?, further)?
                }
            });
            None
        } else {
            Some(y)
        };
        self.saved.extend(saved.map(|s| (key, s)));
        Ok(y)
    }

    /// Sends and receives all at once, each payload on its lane.
    fn exchange(&mut self, all: &[Transfer]) -> Result<()> {
        let rank = self.pass.rank;
        let lanes = self.decoder.p2p_streams();
        let mut sends: [Vec<(usize, Tensor)>; 2] = Default::default();
        let mut receives: [Vec<(Message, Tensor)>; 2] = Default::default();
        for transfer in all {
            let m = transfer.message();
            let lane = usize::from(m.payload == Payload::Gradient);
            match transfer {
                Transfer::Send(_) => {
                    sends[lane].push((m.to, self.outbox.remove(&m).ok_or_else(|| missing(m))?))
                }
                Transfer::Receive(_) => {
                    let rows = self.batch(m.micro_batch)?.input.rows;
                    receives[lane].push((m, self.pass.empty(&[rows, self.decoder.config().hidden])?));
                }
            }
        }
        let begin = rank.compute.record()?;
        for (lane, sent) in lanes.iter().zip(&mut self.in_flight_sends) {
            lane.wait(&begin)?;
            // What was sent before may be freed once computation knows that it has been read.
            sent.drain(..).try_for_each(|(_, done)| rank.compute.wait(&done))?;
        }
        let out = sends.each_ref().map(|list| list.iter().map(|(to, t)| (*to, t)).collect::<Vec<_>>());
        let into = receives.each_ref().map(|list| list.iter().map(|(m, t)| (m.from, t)).collect::<Vec<_>>());
        let groups = [&rank.pp, &rank.pp_backward_group];
        let lane =
            |i: usize| SendRecv { group: groups[i], stream: &lanes[i], sends: &out[i], receives: &into[i] };
        Communicator::send_recv_batch(&[lane(0), lane(1)], "between stages")?;
        for (i, (sent, received)) in sends.into_iter().zip(receives).enumerate() {
            let done = lanes[i].record()?;
            self.in_flight_sends[i].extend(sent.into_iter().map(|(_, t)| (t, done.clone())));
            self.inbox.extend(received.into_iter().map(|(m, t)| (m, (t, done.clone()))));
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        for (_, done) in self.in_flight_sends.iter().flatten() {
            self.pass.rank.compute.wait(done)?;
        }
        Ok(self.results.into_iter().flatten().collect())
    }
}
