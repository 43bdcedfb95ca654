//! Steps as graphs: given to the card launch by launch a few times, then captured, and replayed from there on.
//!
//! A small model's step is hundreds of launches that take the host longer than the card. Replayed, it is one copy and
//! one launch, of the same kernels on the same values: the same bits. What changes from step to step is in the memory
//! that [`Inputs`] fills; whatever else would have to change makes a step that is not replayed.

use super::Trainer;
use super::inputs::Inputs;
use crate::config::{Config, Graph as Wish};
use crate::data::Batch;
use crate::optimizer::{StepRates, outcome};
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_engine::attention::Layout;
use ferrotron_tensor::{Category, DType, Event, Graph, Stream, Tensor};
use std::time::{Duration, Instant};

/// Steps launch by launch before a capture: everything that is chosen by trying has been chosen then.
const FIRST: u32 = 3;
/// Part of a step's time that giving it to the card must take for a replay to pay. On an H200 steps were faster by 2 %
/// with a part of 25 %, by 7 % with 33 and 41 %; with 6 % the difference was noise.
const SHARE: f64 = 0.2;

/// What launches depend on besides the recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) micro_batches: usize,
    /// Of a micro-batch.
    pub(super) tokens: usize,
    pub(super) seq: usize,
}

impl Form {
    /// That of a step; none where sequences are not laid out as in other steps.
    pub(super) fn of(batches: &[Batch], seq: usize) -> Option<Form> {
        let tokens = batches.first()?.tokens.len();
        let alike = |b: &Batch| {
            b.cu_seqlens.is_none()
                && [&b.tokens, &b.labels, &b.positions].iter().all(|list| list.len() == tokens)
        };
        let whole = seq > 0 && tokens > 0 && tokens.is_multiple_of(seq);
        (whole && batches.iter().all(alike)).then_some(Form { micro_batches: batches.len(), tokens, seq })
    }

    pub(super) fn layout(&self) -> Layout {
        Layout::Rows { count: self.tokens / self.seq.max(1), len: self.seq }
    }
}

/// How the next step is given to the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Launches,
    Capture,
    Replay,
}

/// Decides which steps are replayed, and knows why.
pub(super) struct Policy {
    wish: Wish,
    /// Why no step ever is.
    never: Option<String>,
    /// Of the last step.
    form: Option<Form>,
    /// Steps of that form in a row that were given launch by launch.
    launched: u32,
    /// Least time of the host and of the card for one of them, the first left out.
    least: Option<(Duration, Duration)>,
    /// Steps replayed.
    replayed: u64,
}

/// Times of a step: when the card began it, and how long the host took.
pub(super) struct Watch {
    form: Form,
    start: Event,
    begun: Instant,
    host: Duration,
}

impl Watch {
    /// The host is done with it.
    pub(super) fn given(&mut self) {
        self.host = self.begun.elapsed();
    }
}

/// Whether steps are replayed, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphChoice {
    /// auto means that it is not decided yet.
    pub value: Wish,
    /// In words.
    pub reason: String,
}

impl Policy {
    /// What a recipe asks for on a rank. Refused where it says `on` and that is not possible.
    pub(super) fn new(c: &Config, rank: &Rank) -> Result<Policy> {
        let why = if rank.device().card().is_none() {
            Some("the CPU runs work at once")
        } else if rank.world.size() > 1 {
            Some("several ranks meet on the host in every step")
        } else if rank.device().is_watched() {
            Some("every launch is watched")
        } else {
            c.no_graph()
        };
        Policy::of(c.train.graph, why)
    }

    fn of(wish: Wish, why: Option<&str>) -> Result<Policy> {
        if let (Wish::On, Some(why)) = (wish, why) {
            let what = format!("train.graph = \"on\": steps cannot be replayed here: {why}; leave it out");
            return Err(Error::Invalid(what));
        }
        let never = why.map(String::from);
        Ok(Policy { wish, never, form: None, launched: 0, least: None, replayed: 0 })
    }

    fn is_off(&self) -> bool {
        self.wish == Wish::Off || self.never.is_some()
    }

    /// Part of a step's time that the host needed.
    fn share(&self) -> Option<f64> {
        self.least.map(|(host, card)| host.as_secs_f64() / card.as_secs_f64().max(1e-9))
    }

    /// How to give the next step, where there is a graph of steps of the form `made`, which may be replayed if `free`.
    fn next(&mut self, form: Option<Form>, made: Option<Form>, free: bool) -> Next {
        if self.is_off() {
            return Next::Launches;
        }
        if form.is_some() && form == made {
            return if free { Next::Replay } else { Next::Launches };
        }
        if form != self.form {
            (self.form, self.launched, self.least) = (form, 0, None);
        }
        let pays = self.wish == Wish::On || self.share().is_some_and(|s| s > SHARE);
        if form.is_some() && self.launched >= FIRST && pays {
            return Next::Capture;
        }
        self.launched = self.launched.saturating_add(1);
        Next::Launches
    }

    /// Begins to measure the step that is now given launch by launch, where that helps to decide.
    pub(super) fn watch(&self, s: &Stream) -> Result<Option<Watch>> {
        let useful = !self.is_off() && self.wish == Wish::Auto && (2..=FIRST).contains(&self.launched);
        let Some(form) = self.form.filter(|_| useful) else { return Ok(None) };
        Ok(Some(Watch { form, start: s.record()?, begun: Instant::now(), host: Duration::ZERO }))
    }

    /// A measured step is done.
    pub(super) fn measured(&mut self, watch: &Watch, done: &Event) -> Result<()> {
        self.took(watch.form, watch.host, done.since(&watch.start)?);
        Ok(())
    }

    fn took(&mut self, form: Form, host: Duration, card: Duration) {
        if self.form == Some(form) {
            self.least = Some(self.least.map_or((host, card), |(h, c)| (h.min(host), c.min(card))));
        }
    }

    /// A capture did not work: steps go on launch by launch, unless they were not to.
    fn failed(&mut self, why: Error) -> Result<()> {
        if self.wish == Wish::On {
            return Err(why);
        }
        self.never = why.to_string().lines().next().map(String::from);
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
            && (self.launched < FIRST || (self.wish == Wish::Auto && self.least.is_none()))
    }

    fn choice(&self) -> GraphChoice {
        let percent = |s: f64| format!("{:.0} %", s * 1e2);
        let (value, reason) = match (self.wish, &self.never, self.share()) {
            (Wish::Off, ..) => (Wish::Off, "the recipe says so".into()),
            (_, Some(why), _) => (Wish::Off, why.clone()),
            _ if self.is_packed() => (Wish::Off, "sequences lie differently in every step".into()),
            (Wish::On, ..) => (Wish::On, "the recipe says so".into()),
            (_, _, Some(s)) if s > SHARE => {
                (Wish::On, format!("giving a step to the card took {} of its time", percent(s)))
            }
            (_, _, Some(s)) => {
                (Wish::Off, format!("giving a step to the card took only {} of its time", percent(s)))
            }
            _ => (
                Wish::Auto,
                "on if giving the first steps to the card takes more than a fifth of their time".into(),
            ),
        };
        GraphChoice { value, reason }
    }
}

/// A step as a graph, and the memory through which it hears and answers.
pub(super) struct Replayed {
    form: Form,
    graph: Graph,
    inputs: Inputs,
    /// f32 `[outcome::COUNT + micro-batches]`: what came of the step, and losses.
    results: Tensor,
}

impl Trainer {
    /// Are steps replayed, and why?
    pub fn graph_choice(&self) -> GraphChoice {
        self.policy.choice()
    }

    /// Steps that were replayed so far.
    pub fn steps_replayed(&self) -> u64 {
        self.policy.replayed
    }

    /// Is it yet to be seen whether steps like the last are replayed? A capture counts as seen when it is made.
    pub fn graph_is_open(&self) -> bool {
        let pays = self.policy.choice().value == Wish::On;
        self.policy.is_open() || (pays && self.replayed.is_none())
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
        let form = Form::of(batches, seq);
        let (made, free) =
            self.replayed.as_ref().map_or((None, false), |r| (Some(r.form), r.graph.is_ready()));
        let step = match (self.policy.next(form, made, free), form) {
            (Next::Capture, Some(form)) => {
                // The memory of a graph of other steps is used again.
                self.replayed = None;
                match self.capture(form) {
                    Ok(step) => step,
                    Err(e) => return self.policy.failed(e).map(|()| None),
                }
            }
            (Next::Replay, _) => match self.replayed.take() {
                Some(step) => step,
                None => return Ok(None),
            },
            _ => return Ok(None),
        };
        let given = self.play(&step, batches, weight, rates);
        self.replayed = Some(step);
        given.map(Some)
    }

    fn capture(&mut self, form: Form) -> Result<Replayed> {
        let s = self.rank.compute.clone();
        let inputs = Inputs::new(&self.rank, form)?;
        let words = outcome::COUNT + form.micro_batches;
        let results = Tensor::empty(&s, &[words], DType::F32, Category::Workspace)?;
        let graph = s.capture(|| -> Result<()> {
            s.copy(&inputs.scalars()?, self.optimizer.scalars())?;
            let losses = self.passes(form.micro_batches, &mut |rank, _, i| inputs.micro_batch(rank, i))?;
            let came = self.optimizer.apply(&self.rank, &self.params, &self.grads)?;
            s.copy(&came, &results.narrow(0, 0, outcome::COUNT)?)?;
            for (i, number) in losses.iter().enumerate() {
                s.copy(number, &results.narrow(0, outcome::COUNT + i, 1)?)?;
            }
            Ok(())
        })?;
        Ok(Replayed { form, graph, inputs, results })
    }

    fn play(
        &mut self,
        step: &Replayed,
        batches: &[Batch],
        weight: f32,
        rates: StepRates,
    ) -> Result<(Vec<Tensor>, Tensor)> {
        let s = &self.rank.compute;
        let told = self.optimizer.scalar_values(rates);
        step.inputs.fill(&self.rank, &self.decoder, batches, weight, &told)?;
        step.graph.replay()?;
        // A copy: the next replay overwrites them.
        let out = Tensor::empty(s, step.results.shape(), DType::F32, Category::Workspace)?;
        s.copy(&step.results, &out)?;
        self.policy.replayed += 1;
        let loss = |i: usize| Ok(out.narrow(0, outcome::COUNT + i, 1)?);
        let losses = (0..step.form.micro_batches).map(loss).collect::<Result<_>>()?;
        Ok((losses, out.narrow(0, 0, outcome::COUNT)?))
    }
}

#[cfg(test)]
mod tests;
