//! Executes this rank's list of a pipeline schedule: forward and backward of its chunks, sends and receives between stages.
//!
//! Activations (to later stages) and gradients (to earlier ones) have a process group and a stream each, so that neither
//! waits for the other. A sent tensor stays alive until its stream has read it; a received one is waited for at first use.

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
    /// Labels and loss weights; `None` where only logits are needed.
    pub targets: Option<Targets>,
    /// Dropout, in training.
    pub dropout: Option<DropoutRows>,
    /// Its position in the step; `None` outside training.
    pub position: Option<StepPosition>,
}

/// A micro-batch in its step; see [`MoeBatch`].
pub struct StepPosition {
    /// Step of the run.
    pub step: u64,
    /// i32 `[rows]`: index in the step of each token on this rank.
    pub rows: Tensor,
    /// Its weight in means over the step.
    pub share: f32,
}

/// Dropout of a micro-batch; see [`Dropout`].
pub struct DropoutRows {
    /// Drop probability.
    pub p: f32,
    /// Step of the run.
    pub step: u64,
    /// i32 `[rows]`: index in the step of each token on this rank.
    pub rows: Tensor,
}

impl MicroBatch {
    /// The context of a pass over this micro-batch.
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

/// What a pass through the model computes.
pub enum StepMode<'a> {
    /// Logits `[rows, V]` of each micro-batch, on the last stage.
    Logits,
    /// `Σ weight·loss` f32 `[1]` of each micro-batch, on the last stage.
    Loss,
    /// Losses of the main model and of each MTP depth (f32 `[1 + D]`), and gradients.
    Train(&'a mut GradBuffer),
}

/// Uploads a micro-batch at its first use.
pub type Load<'a> = dyn FnMut(usize) -> Result<MicroBatch> + 'a;

/// Runs this rank's list of `schedule`. On the last stage, returns a result per micro-batch in order; elsewhere nothing.
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

/// Execution state of a rank. Keys are (chunk, micro-batch).
struct Executor<'a, 'b> {
    pass: StepContext<'a>,
    decoder: &'a Decoder,
    schedule: &'a Schedule,
    me: usize,
    load: &'a mut Load<'b>,
    mode: StepMode<'a>,
    /// Remaining operations per micro-batch.
    ops_left: Vec<usize>,
    batches: Vec<Option<MicroBatch>>,
    saved: HashMap<(usize, usize), ChunkSaved>,
    deferred_wgrads: HashMap<(usize, usize), Vec<WeightGrad>>,
    /// Computed here, to be sent.
    outbox: HashMap<Message, Tensor>,
    /// Received, with its completion event.
    inbox: HashMap<Message, (Tensor, Event)>,
    /// Sent per direction, with the completion event.
    in_flight_sends: [Vec<(Tensor, Event)>; 2],
    results: Vec<Option<Tensor>>,
}

fn missing(what: impl std::fmt::Display) -> Error {
    Error::Invalid(format!(
        "{what} is missing where the schedule uses it; this is a bug in the schedule, please report it with the recipe"
    ))
}

/// A started operation: its chunk, its micro-batch, and its input from another stage.
struct StartedOp<'a> {
    chunk: &'a Chunk,
    batch: MicroBatch,
    received: Option<Tensor>,
}

impl<'a> Executor<'a, '_> {
    /// The micro-batch, uploaded at its first use.
    fn batch(&mut self, m: usize) -> Result<&MicroBatch> {
        if self.batches[m].is_none() {
            self.batches[m] = Some((self.load)(m)?);
        }
        self.batches[m].as_ref().ok_or_else(|| missing(format!("micro-batch {m}")))
    }

    /// Starts an operation after its input from another stage.
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
        // Taken out of the map while in use, so that the rest of the state can be borrowed.
        let batch = self.batches[m].take().ok_or_else(|| missing(format!("micro-batch {m}")))?;
        Ok(StartedOp { chunk, batch, received })
    }

    /// Finishes an operation whose output goes to another stage.
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
                let saved =
                    self.saved.remove(&key).ok_or_else(|| missing("the saved activation of forward"))?;
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

    /// Interleaves a forward and a backward pass. Backward goes first: its exchange overlaps the forward's attention.
    fn pair(&mut self, forward: PipelineOp, backward: PipelineOp) -> Result<()> {
        let (f, b) = (self.begin(forward)?, self.begin(backward)?);
        let [key, back] = [forward, backward].map(|op| (op.chunk, op.micro_batch));
        let (pass, pass_back) = (f.batch.pass(self.pass), b.batch.pass(self.pass));
        let goal = self.forward_mode(&f.batch)?;
        let saved = self.saved.remove(&back).ok_or_else(|| missing("the saved activation of forward"))?;
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

    /// The result of the last stage.
    fn forward_mode<'m>(&self, batch: &'m MicroBatch) -> Result<ForwardMode<'m>> {
        let targets = || batch.targets.as_ref().ok_or_else(|| missing("the labels of a micro-batch"));
        Ok(match self.mode {
            StepMode::Logits => ForwardMode::Logits,
            StepMode::Loss => ForwardMode::Loss(targets()?),
            StepMode::Train(_) => ForwardMode::Train(targets()?),
        })
    }

    /// Stores a forward's results; returns the tensor for the next stage, if any.
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

    /// Starts a grouped send/receive, activations and gradients each on their own stream.
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
            // Earlier sends may be freed once the compute stream has waited for them.
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
