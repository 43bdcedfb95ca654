//! Steps as graphs: given to the card launch by launch a few times, then captured, and replayed from there on.
//!
//! A small model's step is hundreds of launches that take the host longer than the card. Replayed, it is one copy and
//! one launch, of the same kernels on the same values: the same bits. What changes from step to step is in the memory
//! that [`GraphInputs`] fills; whatever else would have to change makes a step that is not replayed.

use super::Trainer;
use super::graph_inputs::GraphInputs;
use crate::config::{Config, CudaGraphMode};
use crate::data::Batch;
use crate::optimizer::{StepRates, outcome};
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_engine::attention::Layout;
use ferrotron_tensor::{Category, DType, Event, Graph, Stream, Tensor};
use std::time::{Duration, Instant};

/// Steps launch by launch before a capture: everything that is chosen by trying has been chosen then.
const WARMUP_STEPS: u32 = 3;
/// Part of a step's time that giving it to the card must take for a replay to pay. On an H200 steps were faster by 2 %
/// with a part of 25 %, by 7 % with 33 and 41 %; with 6 % the difference was noise.
const MIN_LAUNCH_SHARE: f64 = 0.2;

/// What launches depend on besides the recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepShape {
    pub(super) micro_batches: usize,
    /// Of a micro-batch.
    pub(super) tokens: usize,
    pub(super) seq: usize,
}

impl StepShape {
    /// That of a step; none where sequences are not laid out as in other steps.
    pub(super) fn of(batches: &[Batch], seq: usize) -> Option<StepShape> {
        let tokens = batches.first()?.tokens.len();
        let alike = |b: &Batch| {
            b.cu_seqlens.is_none()
                && [&b.tokens, &b.labels, &b.positions].iter().all(|list| list.len() == tokens)
        };
        let whole = seq > 0 && tokens > 0 && tokens.is_multiple_of(seq);
        (whole && batches.iter().all(alike)).then_some(StepShape {
            micro_batches: batches.len(),
            tokens,
            seq,
        })
    }

    pub(super) fn layout(&self) -> Layout {
        Layout::Rows { count: self.tokens / self.seq.max(1), len: self.seq }
    }
}

/// How the next step is given to the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaunchMode {
    Eager,
    Capture,
    Replay,
}

/// Decides which steps are replayed, and knows why.
pub(super) struct GraphPolicy {
    mode: CudaGraphMode,
    /// Why no step ever is.
    disabled_reason: Option<String>,
    /// Of the last step.
    form: Option<StepShape>,
    /// Steps of that form in a row that were given launch by launch.
    launched: u32,
    /// Least time of the host and of the card for one of them, the first left out.
    min_times: Option<(Duration, Duration)>,
    /// Steps replayed.
    replayed: u64,
}

/// Times of a step: when the card began it, and how long the host took.
pub(super) struct StepTimer {
    form: StepShape,
    start: Event,
    begun: Instant,
    host: Duration,
}

impl StepTimer {
    /// The host is done with it.
    pub(super) fn launched(&mut self) {
        self.host = self.begun.elapsed();
    }
}

/// Whether steps are replayed, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaGraphDecision {
    /// auto means that it is not decided yet.
    pub value: CudaGraphMode,
    /// In words.
    pub reason: String,
}

impl GraphPolicy {
    /// What a recipe asks for on a rank. Refused where it says `on` and that is not possible.
    pub(super) fn new(c: &Config, rank: &Rank) -> Result<GraphPolicy> {
        let why = if rank.device().gpu().is_none() {
            Some("the CPU runs work at once")
        } else if rank.world.size() > 1 {
            Some("several ranks meet on the host in every step")
        } else if rank.device().is_instrumented() {
            Some("every launch is watched")
        } else {
            c.cuda_graph_blocker()
        };
        GraphPolicy::of(c.train.cuda_graph, why)
    }

    fn of(mode: CudaGraphMode, why: Option<&str>) -> Result<GraphPolicy> {
        if let (CudaGraphMode::On, Some(why)) = (mode, why) {
            let what =
                format!("train.cuda_graph = \"on\": steps cannot be replayed here: {why}; leave it out");
            return Err(Error::Invalid(what));
        }
        let disabled_reason = why.map(String::from);
        Ok(GraphPolicy { mode, disabled_reason, form: None, launched: 0, min_times: None, replayed: 0 })
    }

    fn is_off(&self) -> bool {
        self.mode == CudaGraphMode::Off || self.disabled_reason.is_some()
    }

    /// Part of a step's time that the host needed.
    fn share(&self) -> Option<f64> {
        self.min_times.map(|(host, card)| host.as_secs_f64() / card.as_secs_f64().max(1e-9))
    }

    /// How to give the next step, where there is a graph of steps of the form `made`, which may be replayed if `free`.
    fn next(&mut self, form: Option<StepShape>, made: Option<StepShape>, free: bool) -> LaunchMode {
        if self.is_off() {
            return LaunchMode::Eager;
        }
        if form.is_some() && form == made {
            return if free { LaunchMode::Replay } else { LaunchMode::Eager };
        }
        if form != self.form {
            (self.form, self.launched, self.min_times) = (form, 0, None);
        }
        let pays = self.mode == CudaGraphMode::On || self.share().is_some_and(|s| s > MIN_LAUNCH_SHARE);
        if form.is_some() && self.launched >= WARMUP_STEPS && pays {
            return LaunchMode::Capture;
        }
        self.launched = self.launched.saturating_add(1);
        LaunchMode::Eager
    }

    /// Begins to measure the step that is now given launch by launch, where that helps to decide.
    pub(super) fn watch(&self, s: &Stream) -> Result<Option<StepTimer>> {
        let useful =
            !self.is_off() && self.mode == CudaGraphMode::Auto && (2..=WARMUP_STEPS).contains(&self.launched);
        let Some(form) = self.form.filter(|_| useful) else { return Ok(None) };
        Ok(Some(StepTimer { form, start: s.record()?, begun: Instant::now(), host: Duration::ZERO }))
    }

    /// A measured step is done.
    pub(super) fn finish_timer(&mut self, watch: &StepTimer, done: &Event) -> Result<()> {
        self.record_times(watch.form, watch.host, done.since(&watch.start)?);
        Ok(())
    }

    fn record_times(&mut self, form: StepShape, host: Duration, card: Duration) {
        if self.form == Some(form) {
            self.min_times = Some(self.min_times.map_or((host, card), |(h, c)| (h.min(host), c.min(card))));
        }
    }

    /// A capture did not work: steps go on launch by launch, unless they were not to.
    fn failed(&mut self, why: Error) -> Result<()> {
        if self.mode == CudaGraphMode::On {
            return Err(why);
        }
        self.disabled_reason = why.to_string().lines().next().map(String::from);
        Ok(())
    }

    /// Was the last step one that cannot be replayed?
    fn is_packed(&self) -> bool {
        self.launched > 0 && self.form.is_none()
    }

    /// Will one of the next steps of the same form decide?
    fn is_open(&self) -> bool {
        !self.is_off()
            && !self.is_packed()
            && (self.launched < WARMUP_STEPS
                || (self.mode == CudaGraphMode::Auto && self.min_times.is_none()))
    }

    fn choice(&self) -> CudaGraphDecision {
        let percent = |s: f64| format!("{:.0} %", s * 1e2);
        let (value, reason) = match (self.mode, &self.disabled_reason, self.share()) {
            (CudaGraphMode::Off, ..) => (CudaGraphMode::Off, "the recipe says so".into()),
            (_, Some(why), _) => (CudaGraphMode::Off, why.clone()),
            _ if self.is_packed() => (CudaGraphMode::Off, "sequences lie differently in every step".into()),
            (CudaGraphMode::On, ..) => (CudaGraphMode::On, "the recipe says so".into()),
            (_, _, Some(s)) if s > MIN_LAUNCH_SHARE => {
                (CudaGraphMode::On, format!("giving a step to the card took {} of its time", percent(s)))
            }
            (_, _, Some(s)) => (
                CudaGraphMode::Off,
                format!("giving a step to the card took only {} of its time", percent(s)),
            ),
            _ => (
                CudaGraphMode::Auto,
                "on if giving the first steps to the card takes more than a fifth of their time".into(),
            ),
        };
        CudaGraphDecision { value, reason }
    }
}

/// A step as a graph, and the memory through which it hears and answers.
pub(super) struct CapturedStep {
    form: StepShape,
    graph: Graph,
    inputs: GraphInputs,
    /// f32 `[outcome::COUNT + micro-batches]`: what came of the step, and losses.
    results: Tensor,
}

impl Trainer {
    /// Are steps replayed, and why?
    pub fn cuda_graph_decision(&self) -> CudaGraphDecision {
        self.graph_policy.choice()
    }

    /// Steps that were replayed so far.
    pub fn steps_replayed(&self) -> u64 {
        self.graph_policy.replayed
    }

    /// Is it yet to be seen whether steps like the last are replayed? A capture counts as seen when it is made.
    pub fn cuda_graph_undecided(&self) -> bool {
        let pays = self.graph_policy.choice().value == CudaGraphMode::On;
        self.graph_policy.is_open() || (pays && self.captured.is_none())
    }

    /// Gives a step to the card as a graph, capturing it first if it is time: its losses and what came of it. Nothing where
    /// it is to be given launch by launch.
    pub(super) fn replay(
        &mut self,
        batches: &[Batch],
        seq: usize,
        weight: f32,
        rates: StepRates,
    ) -> Result<Option<(Vec<Tensor>, Tensor)>> {
        let form = StepShape::of(batches, seq);
        let (made, free) =
            self.captured.as_ref().map_or((None, false), |r| (Some(r.form), r.graph.is_ready()));
        let step = match (self.graph_policy.next(form, made, free), form) {
            (LaunchMode::Capture, Some(form)) => {
                // The memory of a graph of other steps is used again.
                self.captured = None;
                match self.capture(form) {
                    Ok(step) => step,
                    Err(e) => return self.graph_policy.failed(e).map(|()| None),
                }
            }
            (LaunchMode::Replay, _) => match self.captured.take() {
                Some(step) => step,
                None => return Ok(None),
            },
            _ => return Ok(None),
        };
        let launched = self.replay_captured(&step, batches, weight, rates);
        self.captured = Some(step);
        launched.map(Some)
    }

    fn capture(&mut self, form: StepShape) -> Result<CapturedStep> {
        let s = self.rank.compute.clone();
        let inputs = GraphInputs::new(&self.rank, form)?;
        let words = outcome::COUNT + form.micro_batches;
        let results = Tensor::empty(&s, &[words], DType::F32, Category::Workspace)?;
        let graph = s.capture(|| -> Result<()> {
            s.copy(&inputs.scalars()?, self.optimizer.scalars())?;
            let losses =
                self.forward_backward(form.micro_batches, &mut |rank, _, i| inputs.micro_batch(rank, i))?;
            let outcome = self.optimizer.apply(&self.rank, &self.params, &self.step_state, &self.grads)?;
            s.copy(&outcome, &results.narrow(0, 0, outcome::COUNT)?)?;
            for (i, number) in losses.iter().enumerate() {
                s.copy(number, &results.narrow(0, outcome::COUNT + i, 1)?)?;
            }
            Ok(())
        })?;
        Ok(CapturedStep { form, graph, inputs, results })
    }

    fn replay_captured(
        &mut self,
        step: &CapturedStep,
        batches: &[Batch],
        weight: f32,
        rates: StepRates,
    ) -> Result<(Vec<Tensor>, Tensor)> {
        let s = &self.rank.compute;
        let values = self.optimizer.scalar_values(rates);
        step.inputs.fill(&self.rank, &self.decoder, batches, weight, &values)?;
        step.graph.replay()?;
        // A copy: the next replay overwrites them.
        let out = Tensor::empty(s, step.results.shape(), DType::F32, Category::Workspace)?;
        s.copy(&step.results, &out)?;
        self.graph_policy.replayed += 1;
        let loss = |i: usize| Ok(out.narrow(0, outcome::COUNT + i, 1)?);
        let losses = (0..step.form.micro_batches).map(loss).collect::<Result<_>>()?;
        Ok((losses, out.narrow(0, 0, outcome::COUNT)?))
    }
}

#[cfg(test)]
mod tests;
