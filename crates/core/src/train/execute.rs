//! Executes a pipeline schedule on this rank: forward and backward passes of its chunks, and P2P between stages.
//!
//! Activations are sent to the next stage and gradients to the previous one, each direction on a process group and stream
//! of its own, so that neither waits for the other. A sent tensor stays alive until its stream has read it; a received
//! tensor is waited for where it is used.

use super::micro_batch::{weighted_loss, with_mtp_losses};
use super::step_faults::StepFaults;
use crate::fault::sections::{Section, SectionTimer};
use crate::model::{Chunk, ChunkSaved, Decoder, ForwardMode, Input};
use crate::pipeline::{Message, OpKind, Payload, PipelineOp, Schedule, ScheduleStep, Transfer};
use crate::{Error, Result};
use ferrotron_comm::{Communicator, SendRecv};
use ferrotron_engine::moe::MoeBatch;
use ferrotron_engine::{Dropout, GradBuffer, StepContext, StepNumber, Targets, WeightGrad, interleave};
use ferrotron_tensor::{Event, Tensor};
use std::collections::HashMap;

/// A micro-batch on the device.
pub struct MicroBatch {
    /// Token ids, positions and sequence layout.
    pub input: Input,
    /// Labels and their loss weights; none if only logits are computed.
    pub targets: Option<Targets>,
    /// Its position in the training step; none outside of training, or if nothing depends on it.
    pub position: Option<StepPosition>,
}

/// The place of a micro-batch in its step. Dropout and MoE jitter are functions of it, whatever the layout.
pub struct StepPosition {
    /// Steps done before this one; not used where `device_step` is given.
    pub step: u64,
    /// i32 `[1]`: the same where the step is captured, and replayed in many steps.
    pub device_step: Option<Tensor>,
    /// i32 `[rows]`: index in the step of each token of the residual stream on this rank.
    pub rows: Tensor,
    /// Weight of the micro-batch in means over the step.
    pub share: f32,
    /// Probability that an activation is dropped.
    pub dropout: f32,
}

impl StepPosition {
    fn number(&self) -> StepNumber<'_> {
        self.device_step.as_ref().map_or(StepNumber::Known(self.step), StepNumber::OnDevice)
    }
}

impl MicroBatch {
    /// The context of a pass over this micro-batch.
    fn context<'m>(&'m self, ctx: StepContext<'m>) -> StepContext<'m> {
        let captured = self.input.captured.as_deref();
        StepContext { dropout: self.dropout(), moe: self.moe(), captured, ..ctx }
    }

    fn dropout(&self) -> Option<Dropout<'_>> {
        let at = self.position.as_ref().filter(|at| at.dropout > 0.0)?;
        Some(Dropout { p: at.dropout, step: at.number(), rows: &at.rows })
    }

    fn moe(&self) -> Option<MoeBatch<'_>> {
        let input = self.input.moe.as_ref()?;
        Some(match &self.position {
            Some(at) => MoeBatch { input, step: at.number(), rows: &at.rows, micro_batch_weight: at.share },
            None => {
                let step = StepNumber::Known(0);
                MoeBatch { input, step, rows: &input.token_index, micro_batch_weight: 1.0 }
            }
        })
    }
}

/// What a pass over the model computes.
pub enum StepMode<'a> {
    /// Logits `[rows, V]` of each micro-batch, on the last stage.
    Logits,
    /// `Σ weight·loss` f32 `[1]` of each micro-batch, on the last stage.
    Loss,
    /// `Σ weight·loss` of the language model and of each MTP depth, f32 `[1 + D]`, and gradients into this buffer.
    Train(&'a mut GradBuffer),
}

/// Brings a micro-batch to the device when an operation first needs it.
pub type MicroBatchLoader<'a> = dyn FnMut(usize) -> Result<MicroBatch> + 'a;

/// Runs this rank's part of `schedule`. Returns one result per micro-batch, in order, on the rank of the last stage, and
/// nothing elsewhere.
pub fn execute(
    ctx: StepContext,
    decoder: &Decoder,
    schedule: &Schedule,
    load: &mut MicroBatchLoader,
    mode: StepMode,
) -> Result<Vec<Tensor>> {
    execute_with(ctx, decoder, schedule, load, mode, PassHooks::default())
}

/// What watches or disturbs the passes of a step.
#[derive(Clone, Copy, Default)]
pub(super) struct PassHooks<'a> {
    /// Injected faults.
    pub(super) faults: Option<StepFaults<'a>>,
    /// The sections of the step, where they are measured.
    pub(super) sections: Option<&'a SectionTimer>,
}

/// [`execute`] with hooks.
pub(super) fn execute_with(
    ctx: StepContext,
    decoder: &Decoder,
    schedule: &Schedule,
    load: &mut MicroBatchLoader,
    mode: StepMode,
    PassHooks { faults, sections }: PassHooks,
) -> Result<Vec<Tensor>> {
    let me = ctx.rank.pp.rank();
    let steps = schedule.ranks.get(me).map_or(&[][..], Vec::as_slice);
    let mut ops_left = vec![0; schedule.shape.micro_batches];
    schedule.ops(me).for_each(|op| ops_left[op.micro_batch] += 1);
    let count = schedule.shape.micro_batches;
    let mut executor = Executor {
        ctx,
        decoder,
        schedule,
        me,
        load,
        mode,
        faults,
        sections,
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

/// A rank in the middle of its schedule. Maps are keyed by (chunk, micro-batch).
struct Executor<'a, 'b> {
    ctx: StepContext<'a>,
    decoder: &'a Decoder,
    schedule: &'a Schedule,
    me: usize,
    load: &'a mut MicroBatchLoader<'b>,
    mode: StepMode<'a>,
    faults: Option<StepFaults<'a>>,
    sections: Option<&'a SectionTimer>,
    /// Operations left on each micro-batch; its input is freed after the last.
    ops_left: Vec<usize>,
    batches: Vec<Option<MicroBatch>>,
    saved: HashMap<(usize, usize), ChunkSaved>,
    deferred_wgrads: HashMap<(usize, usize), Vec<WeightGrad>>,
    /// Outputs of this rank that are not sent yet.
    outbox: HashMap<Message, Tensor>,
    /// Received tensors, each with the event of its arrival.
    inbox: HashMap<Message, (Tensor, Event)>,
    /// Sent tensors of each direction, each with the event after which it may be freed.
    in_flight_sends: [Vec<(Tensor, Event)>; 2],
    results: Vec<Option<Tensor>>,
}

fn missing(what: impl std::fmt::Display) -> Error {
    Error::Invalid(format!(
        "pipeline schedule: {what} is missing where the schedule uses it; this is a bug, please report it with the recipe"
    ))
}

/// An operation about to run: its chunk, its micro-batch, and the tensor received from another stage.
struct StartedOp<'a> {
    chunk: &'a Chunk,
    batch: MicroBatch,
    received: Option<Tensor>,
}

impl<'a> Executor<'a, '_> {
    /// Micro-batch `m`, loaded at its first use.
    fn batch(&mut self, m: usize) -> Result<&MicroBatch> {
        if self.batches[m].is_none() {
            self.batches[m] = Some((self.load)(m)?);
        }
        self.batches[m].as_ref().ok_or_else(|| missing(format!("micro-batch {m}")))
    }

    /// Makes the compute stream wait for what `op` needs from another stage.
    fn begin(&mut self, op: PipelineOp) -> Result<StartedOp<'a>> {
        let m = op.micro_batch;
        let decoder = self.decoder;
        let chunk = decoder.chunks().get(op.chunk).ok_or_else(|| missing(format!("chunk {}", op.chunk)))?;
        let received = match self.schedule.shape.input_message(self.me, op) {
            None => None,
            Some(message) => {
                let (x, there) = self.inbox.remove(&message).ok_or_else(|| missing(message))?;
                self.ctx.rank.compute.wait(&there)?;
                Some(x)
            }
        };
        self.batch(m)?;
        // Moved out, so that the rest of the executor can be borrowed while the operation runs.
        let batch = self.batches[m].take().ok_or_else(|| missing(format!("micro-batch {m}")))?;
        Ok(StartedOp { chunk, batch, received })
    }

    /// Stores the output of `op` for sending, and frees the micro-batch after its last operation.
    fn end(&mut self, op: PipelineOp, batch: MicroBatch, output: Option<Tensor>) {
        if let (Some(message), Some(tensor)) = (self.schedule.shape.output_message(self.me, op), output) {
            self.outbox.insert(message, tensor);
        }
        let m = op.micro_batch;
        self.ops_left[m] -= 1;
        self.batches[m] = (self.ops_left[m] > 0).then_some(batch);
    }

    /// A section of the step begins.
    fn enter(&self, section: Section) -> Result<()> {
        self.sections.map_or(Ok(()), |timer| timer.enter(self.ctx.rank, section))
    }

    fn run(&mut self, op: PipelineOp) -> Result<()> {
        self.enter(if op.kind == OpKind::Forward { Section::Forward } else { Section::Backward })?;
        let StartedOp { chunk, batch, received } = self.begin(op)?;
        let (key, ctx) = ((op.chunk, op.micro_batch), batch.context(self.ctx));
        let output = match op.kind {
            OpKind::Forward => {
                let forward_mode = self.forward_mode(&batch)?;
                let out = chunk.forward(&ctx, &batch.input, received, forward_mode)?;
                self.store_output(chunk, key, forward_mode, out)?
            }
            OpKind::Backward | OpKind::BackwardInput => {
                let StepMode::Train(grads) = &mut self.mode else {
                    return Err(missing("the gradient buffer"));
                };
                let mut saved = self
                    .saved
                    .remove(&key)
                    .ok_or_else(|| missing("the saved activations of the forward pass"))?;
                if let Some(faults) = &self.faults {
                    faults.saved(ctx.rank, op.micro_batch, &mut saved)?;
                }
                if op.kind == OpKind::Backward {
                    let mut run_wgrad = |g: WeightGrad| g.run(ctx.rank, grads);
                    let dx = chunk.backward(&ctx, saved, &batch.input, received, &mut run_wgrad)?;
                    if let Some(faults) = &self.faults {
                        faults.accumulated(ctx.rank, op.micro_batch, grads)?;
                    }
                    dx
                } else {
                    let deferred = self.deferred_wgrads.entry(key).or_default();
                    let mut defer = |g| {
                        deferred.push(g);
                        Ok(())
                    };
                    chunk.backward(&ctx, saved, &batch.input, received, &mut defer)?
                }
            }
            OpKind::WeightGrad => {
                let wgrads = self.deferred_wgrads.remove(&key).ok_or_else(|| missing(op))?;
                if let StepMode::Train(grads) = &mut self.mode {
                    wgrads.into_iter().try_for_each(|g| g.run(self.ctx.rank, grads))?;
                }
                None
            }
        };
        self.end(op, batch, output);
        Ok(())
    }

    /// Interleaves a forward and a backward pass. The backward starts, so that its token dispatch overlaps the forward's
    /// attention.
    fn pair(&mut self, forward: PipelineOp, backward: PipelineOp) -> Result<()> {
        self.enter(Section::Backward)?;
        let (f, b) = (self.begin(forward)?, self.begin(backward)?);
        let [key, backward_key] = [forward, backward].map(|op| (op.chunk, op.micro_batch));
        let (forward_ctx, backward_ctx) = (f.batch.context(self.ctx), b.batch.context(self.ctx));
        let forward_mode = self.forward_mode(&f.batch)?;
        let saved = self
            .saved
            .remove(&backward_key)
            .ok_or_else(|| missing("the saved activations of the forward pass"))?;
        let StepMode::Train(grads) = &mut self.mode else { return Err(missing("the gradient buffer")) };
        let mut run_wgrad = |g: WeightGrad| g.run(backward_ctx.rank, grads);
        let (dx, out) = interleave(
            b.chunk.backward_in_turns(&backward_ctx, saved, &b.batch.input, b.received, &mut run_wgrad),
            f.chunk.forward_in_turns(&forward_ctx, &f.batch.input, f.received, forward_mode),
        )?;
        let y = self.store_output(f.chunk, key, forward_mode, out)?;
        self.end(forward, f.batch, y);
        self.end(backward, b.batch, dx);
        Ok(())
    }

    /// What the last stage computes for a micro-batch.
    fn forward_mode<'m>(&self, batch: &'m MicroBatch) -> Result<ForwardMode<'m>> {
        let targets = || batch.targets.as_ref().ok_or_else(|| missing("the labels of a micro-batch"));
        Ok(match self.mode {
            StepMode::Logits => ForwardMode::Logits,
            StepMode::Loss => ForwardMode::Loss(targets()?),
            StepMode::Train(_) => ForwardMode::Train(targets()?),
        })
    }

    /// Stores the result and the saved activations of a forward pass; returns the activation for the next stage.
    fn store_output(
        &mut self,
        chunk: &Chunk,
        key: (usize, usize),
        mode: ForwardMode,
        (y, saved): (Tensor, Option<ChunkSaved>),
    ) -> Result<Option<Tensor>> {
        let rank = self.ctx.rank;
        let y = if chunk.is_last() {
            let mtp = saved.as_ref().and_then(ChunkSaved::mtp_losses);
            self.results[key.1] = Some(match mode {
                ForwardMode::Logits => y,
                ForwardMode::Loss(t) | ForwardMode::Train(t) => {
                    with_mtp_losses(rank, weighted_loss(rank, &y, t)?, mtp)?
                }
            });
            None
        } else {
            Some(y)
        };
        self.saved.extend(saved.map(|s| (key, s)));
        Ok(y)
    }

    /// Starts all sends and receives as one group call, each direction on its own stream.
    fn exchange(&mut self, all: &[Transfer]) -> Result<()> {
        let rank = self.ctx.rank;
        let streams = self.decoder.p2p_streams();
        let mut sends: [Vec<(usize, Tensor)>; 2] = Default::default();
        let mut receives: [Vec<(Message, Tensor)>; 2] = Default::default();
        for transfer in all {
            let m = transfer.message();
            let direction = usize::from(m.payload == Payload::Gradient);
            match transfer {
                Transfer::Send(_) => {
                    sends[direction].push((m.to, self.outbox.remove(&m).ok_or_else(|| missing(m))?))
                }
                Transfer::Receive(_) => {
                    let rows = self.batch(m.micro_batch)?.input.rows;
                    receives[direction].push((m, self.ctx.empty(&[rows, self.decoder.config().hidden])?));
                }
            }
        }
        let begin = rank.compute.record()?;
        for (stream, sent) in streams.iter().zip(&mut self.in_flight_sends) {
            stream.wait(&begin)?;
            // The compute stream may free what was sent before, once it has waited for the sends.
            sent.drain(..).try_for_each(|(_, done)| rank.compute.wait(&done))?;
        }
        let out = sends.each_ref().map(|list| list.iter().map(|(to, t)| (*to, t)).collect::<Vec<_>>());
        let into = receives.each_ref().map(|list| list.iter().map(|(m, t)| (m.from, t)).collect::<Vec<_>>());
        let groups = [&rank.pp, &rank.pp_backward_group];
        let direction =
            |i: usize| SendRecv { group: groups[i], stream: &streams[i], sends: &out[i], receives: &into[i] };
        Communicator::send_recv_batch(&[direction(0), direction(1)], "pipeline p2p")?;
        for (i, (sent, received)) in sends.into_iter().zip(receives).enumerate() {
            let done = streams[i].record()?;
            self.in_flight_sends[i].extend(sent.into_iter().map(|(_, t)| (t, done.clone())));
            self.inbox.extend(received.into_iter().map(|(m, t)| (m, (t, done.clone()))));
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        for (_, done) in self.in_flight_sends.iter().flatten() {
            self.ctx.rank.compute.wait(done)?;
        }
        Ok(self.results.into_iter().flatten().collect())
    }
}
