//! A schedule carried out: this rank's chunks work through its list, and tensors travel between stages.
//!
//! Messages to later stages and messages to earlier ones have a group and a stream each, so that neither waits for the
//! other. A tensor that was sent stays alive until its stream has read it; one that was received is waited for where
//! it is used.

use super::{Kind, Message, Op, Payload, Schedule, Step, Transfer};
use crate::model::{Chunk, ChunkSaved, Decoder, Goal, Input};
use crate::train::{weighted, with_further};
use crate::{Error, Result};
use ferrotron_comm::{Communicator, Lane};
use ferrotron_engine::moe::Mix;
use ferrotron_engine::{Dropout, GradBuffer, Pass, Targets, WeightGrad, in_turn};
use ferrotron_tensor::{Event, Tensor};
use std::collections::HashMap;

/// One micro-batch on the device.
pub struct MicroBatch {
    /// Tokens.
    pub input: Input,
    /// Labels and weights; none where only logits are wanted.
    pub targets: Option<Targets>,
    /// Dropout, in training.
    pub dropout: Option<Drops>,
    /// Its part of a step; none outside of training.
    pub part: Option<StepPart>,
}

/// A micro-batch in its step; see [`Mix`].
pub struct StepPart {
    /// Step of the run.
    pub step: u64,
    /// i32 `[rows]`: number in the step of each token of the residual stream on this rank.
    pub rows: Tensor,
    /// Its share in means over the step.
    pub share: f32,
}

/// What is dropped in a micro-batch; see [`Dropout`].
pub struct Drops {
    /// Chance that an activation is dropped.
    pub p: f32,
    /// Step of the run.
    pub step: u64,
    /// i32 `[rows]`: number in the step of each token of the residual stream on this rank.
    pub rows: Tensor,
}

impl MicroBatch {
    /// A pass over it.
    fn pass<'m>(&'m self, pass: Pass<'m>) -> Pass<'m> {
        Pass { dropout: self.dropout(), mix: self.mix(), ..pass }
    }

    fn dropout(&self) -> Option<Dropout<'_>> {
        self.dropout.as_ref().map(|d| Dropout { p: d.p, step: d.step, rows: &d.rows })
    }

    fn mix(&self) -> Option<Mix<'_>> {
        let input = self.input.mix.as_ref()?;
        Some(match &self.part {
            Some(p) => Mix { input, step: p.step, rows: &p.rows, share: p.share },
            None => Mix { input, step: 0, rows: &input.numbers, share: 1.0 },
        })
    }
}

/// What a pass through the model is for.
pub enum Aim<'a> {
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
    pass: Pass,
    decoder: &Decoder,
    schedule: &Schedule,
    load: &mut Load,
    aim: Aim,
) -> Result<Vec<Tensor>> {
    let me = pass.rank.pp.rank();
    let steps = schedule.ranks.get(me).map_or(&[][..], Vec::as_slice);
    let mut left = vec![0; schedule.shape.micro_batches];
    schedule.ops(me).for_each(|op| left[op.micro_batch] += 1);
    let count = schedule.shape.micro_batches;
    let mut work = Work {
        pass,
        decoder,
        schedule,
        me,
        load,
        aim,
        left,
        batches: (0..count).map(|_| None).collect(),
        kept: HashMap::new(),
        later: HashMap::new(),
        made: HashMap::new(),
        came: HashMap::new(),
        sent: [Vec::new(), Vec::new()],
        results: (0..count).map(|_| None).collect(),
    };
    for step in steps {
        match step {
            Step::Run(op) => work.run(*op)?,
            Step::Pair(forward, backward) => work.pair(*forward, *backward)?,
            Step::Exchange(all) => work.exchange(all)?,
        }
    }
    work.finish()
}

/// A rank in the middle of its list. Keys are (chunk, micro-batch).
struct Work<'a, 'b> {
    pass: Pass<'a>,
    decoder: &'a Decoder,
    schedule: &'a Schedule,
    me: usize,
    load: &'a mut Load<'b>,
    aim: Aim<'a>,
    /// Operations to come on each micro-batch.
    left: Vec<usize>,
    batches: Vec<Option<MicroBatch>>,
    kept: HashMap<(usize, usize), ChunkSaved>,
    later: HashMap<(usize, usize), Vec<WeightGrad>>,
    /// Made here, to be sent.
    made: HashMap<Message, Tensor>,
    /// Received, with when it is there.
    came: HashMap<Message, (Tensor, Event)>,
    /// Sent on each lane, with when that is done.
    sent: [Vec<(Tensor, Event)>; 2],
    results: Vec<Option<Tensor>>,
}

fn lost(what: impl std::fmt::Display) -> Error {
    Error::Invalid(format!("{what} is not there where the schedule uses it: a mistake in the schedule"))
}

/// An operation that has begun: its chunk, its micro-batch, and what came from another stage.
struct Begun<'a> {
    chunk: &'a Chunk,
    batch: MicroBatch,
    given: Option<Tensor>,
}

impl<'a> Work<'a, '_> {
    /// The micro-batch, brought to the device if this is its first use.
    fn batch(&mut self, m: usize) -> Result<&MicroBatch> {
        if self.batches[m].is_none() {
            self.batches[m] = Some((self.load)(m)?);
        }
        self.batches[m].as_ref().ok_or_else(|| lost(format!("micro-batch {m}")))
    }

    /// An operation begins, as soon as what it needs of another stage is there.
    fn begin(&mut self, op: Op) -> Result<Begun<'a>> {
        let m = op.micro_batch;
        let decoder = self.decoder;
        let chunk = decoder.chunks().get(op.chunk).ok_or_else(|| lost(format!("chunk {}", op.chunk)))?;
        let given = match self.schedule.shape.needs(self.me, op) {
            None => None,
            Some(message) => {
                let (x, there) = self.came.remove(&message).ok_or_else(|| lost(message))?;
                self.pass.rank.compute.wait(&there)?;
                Some(x)
            }
        };
        self.batch(m)?;
        // Taken out while it is used, so that everything else can be.
        let batch = self.batches[m].take().ok_or_else(|| lost(format!("micro-batch {m}")))?;
        Ok(Begun { chunk, batch, given })
    }

    /// An operation has ended with something for another stage.
    fn end(&mut self, op: Op, batch: MicroBatch, made: Option<Tensor>) {
        if let (Some(message), Some(tensor)) = (self.schedule.shape.makes(self.me, op), made) {
            self.made.insert(message, tensor);
        }
        let m = op.micro_batch;
        self.left[m] -= 1;
        self.batches[m] = (self.left[m] > 0).then_some(batch);
    }

    fn run(&mut self, op: Op) -> Result<()> {
        let Begun { chunk, batch, given } = self.begin(op)?;
        let (key, pass) = ((op.chunk, op.micro_batch), batch.pass(self.pass));
        let made = match op.kind {
            Kind::Forward => {
                let goal = self.goal(&batch)?;
                let out = chunk.forward(&pass, &batch.input, given, goal)?;
                self.keep(chunk, key, goal, out)?
            }
            Kind::Backward | Kind::BackwardInput => {
                let Aim::Train(grads) = &mut self.aim else { return Err(lost("a buffer for gradients")) };
                let saved = self.kept.remove(&key).ok_or_else(|| lost("what forward kept"))?;
                if op.kind == Kind::Backward {
                    let mut put = |g: WeightGrad| g.run(pass.rank, grads);
                    chunk.backward(&pass, saved, &batch.input, given, &mut put)?
                } else {
                    let later = self.later.entry(key).or_default();
                    let mut put = |g| {
                        later.push(g);
                        Ok(())
                    };
                    chunk.backward(&pass, saved, &batch.input, given, &mut put)?
                }
            }
            Kind::WeightGrad => {
                let jobs = self.later.remove(&key).ok_or_else(|| lost(op))?;
                if let Aim::Train(grads) = &mut self.aim {
                    jobs.into_iter().try_for_each(|g| g.run(self.pass.rank, grads))?;
                }
                None
            }
        };
        self.end(op, batch, made);
        Ok(())
    }

    /// A forward and a backward in turns. The backward is first: what it sends travels beside the forward's attention.
    fn pair(&mut self, forward: Op, backward: Op) -> Result<()> {
        let (f, b) = (self.begin(forward)?, self.begin(backward)?);
        let [key, back] = [forward, backward].map(|op| (op.chunk, op.micro_batch));
        let (pass, pass_back) = (f.batch.pass(self.pass), b.batch.pass(self.pass));
        let goal = self.goal(&f.batch)?;
        let saved = self.kept.remove(&back).ok_or_else(|| lost("what forward kept"))?;
        let Aim::Train(grads) = &mut self.aim else { return Err(lost("a buffer for gradients")) };
        let mut put = |g: WeightGrad| g.run(pass_back.rank, grads);
        let (dx, out) = in_turn(
            b.chunk.backward_in_turns(&pass_back, saved, &b.batch.input, b.given, &mut put),
            f.chunk.forward_in_turns(&pass, &f.batch.input, f.given, goal),
        )?;
        let y = self.keep(f.chunk, key, goal, out)?;
        self.end(forward, f.batch, y);
        self.end(backward, b.batch, dx);
        Ok(())
    }

    /// What comes out at the end of the model.
    fn goal<'m>(&self, batch: &'m MicroBatch) -> Result<Goal<'m>> {
        let targets = || batch.targets.as_ref().ok_or_else(|| lost("the labels of a micro-batch"));
        Ok(match self.aim {
            Aim::Logits => Goal::Logits,
            Aim::Loss => Goal::Loss(targets()?),
            Aim::Train(_) => Goal::Train(targets()?),
        })
    }

    /// Puts what a forward made where it belongs; what is for the next stage is returned.
    fn keep(
        &mut self,
        chunk: &Chunk,
        key: (usize, usize),
        goal: Goal,
        (y, saved): (Tensor, Option<ChunkSaved>),
    ) -> Result<Option<Tensor>> {
        let rank = self.pass.rank;
        let y = if chunk.is_last() {
            let further = saved.as_ref().and_then(ChunkSaved::prediction_losses);
            self.results[key.1] = Some(match goal {
                Goal::Logits => y,
                Goal::Loss(t) | Goal::Train(t) => with_further(rank, weighted(rank, &y, t)?, further)?,
            });
            None
        } else {
            Some(y)
        };
        self.kept.extend(saved.map(|s| (key, s)));
        Ok(y)
    }

    /// Sends and receives all at once, each payload on its lane.
    fn exchange(&mut self, all: &[Transfer]) -> Result<()> {
        let rank = self.pass.rank;
        let lanes = self.decoder.lanes();
        let mut sends: [Vec<(usize, Tensor)>; 2] = Default::default();
        let mut receives: [Vec<(Message, Tensor)>; 2] = Default::default();
        for transfer in all {
            let m = transfer.message();
            let lane = usize::from(m.payload == Payload::Gradient);
            match transfer {
                Transfer::Send(_) => sends[lane].push((m.to, self.made.remove(&m).ok_or_else(|| lost(m))?)),
                Transfer::Receive(_) => {
                    let rows = self.batch(m.micro_batch)?.input.rows;
                    receives[lane].push((m, self.pass.empty(&[rows, self.decoder.config().hidden])?));
                }
            }
        }
        let begin = rank.compute.record()?;
        for (lane, sent) in lanes.iter().zip(&mut self.sent) {
            lane.wait(&begin)?;
            // What was sent before may be freed once computation knows that it has been read.
            sent.drain(..).try_for_each(|(_, done)| rank.compute.wait(&done))?;
        }
        let out = sends.each_ref().map(|list| list.iter().map(|(to, t)| (*to, t)).collect::<Vec<_>>());
        let into = receives.each_ref().map(|list| list.iter().map(|(m, t)| (m.from, t)).collect::<Vec<_>>());
        let groups = [&rank.pp, &rank.back];
        let lane =
            |i: usize| Lane { group: groups[i], stream: &lanes[i], sends: &out[i], receives: &into[i] };
        Communicator::exchange_all(&[lane(0), lane(1)], "between stages")?;
        for (i, (sent, received)) in sends.into_iter().zip(receives).enumerate() {
            let done = lanes[i].record()?;
            self.sent[i].extend(sent.into_iter().map(|(_, t)| (t, done.clone())));
            self.came.extend(received.into_iter().map(|(m, t)| (m, (t, done.clone()))));
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        for (_, done) in self.sent.iter().flatten() {
            self.pass.rank.compute.wait(done)?;
        }
        Ok(self.results.into_iter().flatten().collect())
    }
}
