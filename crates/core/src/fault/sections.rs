//! Times of the sections of a step on one rank, without the time in communication.
//!
//! All ranks of a job end a step together, because they wait for each other in collectives: the length of a step says nothing
//! about a rank. What counts is its own time, the step without communication. On the CPU that is the host's clock, less the
//! time inside calls on groups ([`ferrotron_comm::HostCost::inside`]) and the time in which the rank's thread waited for a
//! core that others used, of which no rank of a full machine is to blame. On a GPU it is the time between events on the compute
//! stream, less what the stream spent in collectives and in waiting for streams that carry them
//! ([`ferrotron_tensor::Stream::take_peer_waits`]); nothing synchronizes, and events are read with the results of the step.
//! A step that is replayed as a CUDA graph has no events inside and is not measured.

use crate::Result;
use ferrotron_comm::HostCost;
use ferrotron_engine::Rank;
use ferrotron_tensor::{Event, PeerWait};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// A section of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Section {
    /// Reading samples.
    Data,
    /// Forward passes, and the upload of their micro-batches.
    Forward,
    /// Backward passes, and forward passes that are interleaved with them.
    Backward,
    /// Collectives, sends and receives, waiting for other ranks included.
    Communication,
    /// From the last backward pass to the end of the step.
    Optimizer,
    /// Copies of a save that training waits for.
    Checkpoint,
}

impl Section {
    /// All sections, in the order of a step.
    pub const ALL: [Section; 6] = [
        Section::Data,
        Section::Forward,
        Section::Backward,
        Section::Communication,
        Section::Optimizer,
        Section::Checkpoint,
    ];

    /// Its name in events.
    pub fn name(self) -> &'static str {
        match self {
            Section::Data => "data",
            Section::Forward => "forward",
            Section::Backward => "backward",
            Section::Communication => "communication",
            Section::Optimizer => "optimizer",
            Section::Checkpoint => "checkpoint",
        }
    }
}

/// Seconds of a rank in each section; all but `communication` are its own work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SectionTimes {
    /// Reading samples, as far as the device waited for it.
    pub data: f64,
    /// Forward passes.
    pub forward: f64,
    /// Backward passes.
    pub backward: f64,
    /// Communication that nothing overlaps, waiting for other ranks included. The rank that others wait for has least.
    pub communication: f64,
    /// Optimizer.
    pub optimizer: f64,
    /// Saves.
    pub checkpoint: f64,
    /// Waiting for a core of a CPU that computes, in none of the other sections.
    #[serde(default)]
    pub delayed: f64,
}

impl SectionTimes {
    /// Seconds of a section.
    pub fn of(&self, section: Section) -> f64 {
        match section {
            Section::Data => self.data,
            Section::Forward => self.forward,
            Section::Backward => self.backward,
            Section::Communication => self.communication,
            Section::Optimizer => self.optimizer,
            Section::Checkpoint => self.checkpoint,
        }
    }

    /// Seconds of a section, to be set.
    pub fn of_mut(&mut self, section: Section) -> &mut f64 {
        match section {
            Section::Data => &mut self.data,
            Section::Forward => &mut self.forward,
            Section::Backward => &mut self.backward,
            Section::Communication => &mut self.communication,
            Section::Optimizer => &mut self.optimizer,
            Section::Checkpoint => &mut self.checkpoint,
        }
    }

    /// The rank's own time in a step. Saves are left out, because only some steps have one.
    pub fn own(&self) -> f64 {
        self.data + self.forward + self.backward + self.optimizer
    }
}

/// Measures the steps of one rank; does nothing unless it is switched on.
#[derive(Default)]
pub(crate) struct SectionTimer {
    on: bool,
    /// Percent by which this rank is slowed down, for tests and drills.
    slowdown: Cell<f64>,
    marks: RefCell<Vec<Mark>>,
    data: Cell<Duration>,
    /// The end of the step before.
    last_end: RefCell<Option<Event>>,
    /// Steps that were read back and not taken yet.
    done: RefCell<Vec<SectionTimes>>,
    /// Own seconds of the last one.
    last_own: Cell<f64>,
}

/// The begin of a section, which is the end of the one before.
struct Mark {
    section: Section,
    at: Event,
    /// Time of the host inside calls on groups until then, and time in which it waited for a core.
    host: HostCost,
    /// Waits for other ranks since the mark before.
    waits: Vec<PeerWait>,
}

/// A step that was launched: its marks become times when the device has passed them.
pub(crate) struct StepMarks {
    marks: Vec<Mark>,
    data: Duration,
    last_end: Option<Event>,
    /// Communication blocks the host, and its clock says for how long.
    host_clock: bool,
}

impl SectionTimer {
    /// A timer for a run on `rank`.
    pub(crate) fn new(rank: &Rank, on: bool) -> SectionTimer {
        let on = on && !rank.device().is_meta();
        rank.compute.meter_peer_waits(on && rank.world.only_enqueues());
        if on && rank.device().gpu().is_none() {
            rank.world.meter_run_delay();
        }
        SectionTimer { on, ..SectionTimer::default() }
    }

    /// Slows this rank's own work down by `percent` from now on.
    pub(crate) fn slow_down(&self, percent: f64) {
        self.slowdown.set(percent.max(0.0));
    }

    /// Runs what reads the samples of a step.
    pub(crate) fn read_data<T>(&self, read: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = read();
        self.data.set(start.elapsed());
        out
    }

    /// A section begins. Nothing is measured while the stream is captured into a CUDA graph.
    pub(crate) fn enter(&self, rank: &Rank, section: Section) -> Result<()> {
        if !(self.on || self.slowdown.get() > 0.0) || rank.compute.is_capturing() {
            return Ok(());
        }
        if self.slowdown.get() > 0.0 {
            self.idle(rank)?;
        }
        let host = rank.world.host_cost();
        let waits = rank.compute.take_peer_waits();
        self.marks.borrow_mut().push(Mark { section, at: rank.compute.record()?, host, waits });
        Ok(())
    }

    /// The step was launched; none if nothing of it was measured.
    pub(crate) fn end(&self, rank: &Rank) -> Result<Option<StepMarks>> {
        if self.marks.borrow().is_empty() {
            return Ok(None);
        }
        self.enter(rank, Section::Optimizer)?;
        let marks = self.marks.take();
        let end = marks.last().map(|m| m.at.clone());
        let last_end = self.last_end.replace(end);
        let host_clock = !rank.world.only_enqueues();
        Ok(Some(StepMarks { marks, data: self.data.take(), last_end, host_clock }))
    }

    /// The step was read back.
    pub(crate) fn ended(&self, step: Option<StepMarks>) -> Result<()> {
        if let Some(step) = step {
            let times = step.times()?;
            self.last_own.set(times.own());
            if self.on {
                self.done.borrow_mut().push(times);
            }
        }
        Ok(())
    }

    /// Takes the steps that were read back since the last call.
    pub(crate) fn take(&self) -> Vec<SectionTimes> {
        self.done.take()
    }

    /// Adds the slowdown of the section that ends here: on the CPU of its own time, on a GPU of that of the last step, all
    /// at the end of the step.
    fn idle(&self, rank: &Rank) -> Result<()> {
        let share = self.slowdown.get() / 100.0;
        let marks = self.marks.borrow();
        let Some(last) = marks.last() else { return Ok(()) };
        if rank.device().gpu().is_none() {
            let host = rank.world.host_cost().since(&last.host);
            let own = rank.compute.record()?.since(&last.at)?.saturating_sub(host.inside + host.delayed);
            std::thread::sleep(own.mul_f64(share));
        } else if last.section == Section::Optimizer {
            let time = Duration::from_secs_f64(self.last_own.get() * share / (1.0 + share));
            rank.compute.launch_on_host("slowdown", &[], move |_| {
                std::thread::sleep(time);
                Ok(())
            })?;
        }
        Ok(())
    }
}

impl StepMarks {
    /// Times of the sections, once the device has passed the last mark.
    fn times(&self) -> Result<SectionTimes> {
        let mut times = SectionTimes::default();
        for pair in self.marks.windows(2) {
            let [from, to] = pair else { continue };
            let whole = to.at.since(&from.at)?.as_secs_f64();
            let host = to.host.since(&from.host);
            let (apart, delayed) = match self.host_clock {
                true => (host.inside, host.delayed.as_secs_f64()),
                false => (to.waits.iter().map(PeerWait::duration).sum::<ferrotron_tensor::Result<_>>()?, 0.0),
            };
            let apart = apart.as_secs_f64().min(whole);
            let delayed = delayed.min(whole - apart);
            *times.of_mut(from.section) += whole - apart - delayed;
            times.communication += apart;
            times.delayed += delayed;
        }
        // Reading that the device computed through cost nothing.
        if let (Some(first), Some(last_end)) = (self.marks.first(), &self.last_end) {
            let gap = first.at.since(last_end)?;
            times.data = self.data.min(gap).as_secs_f64();
        }
        Ok(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_comm::World;

    /// Two ranks of which one computes five times as long: both have steps of the same length, and own times that differ.
    #[test]
    fn waiting_for_another_rank_is_not_own_time() {
        let worlds = World::threads(2, Duration::from_secs(20));
        let times: Vec<SectionTimes> = std::thread::scope(|s| {
            let step = |world: World| {
                let mut rank = Rank::cpu(1, 1).unwrap();
                rank.world = world;
                let timer = SectionTimer::new(&rank, true);
                let ms = if rank.world.rank() == 0 { 100 } else { 20 };
                timer.enter(&rank, Section::Forward).unwrap();
                std::thread::sleep(Duration::from_millis(ms));
                timer.enter(&rank, Section::Backward).unwrap();
                rank.world.all().barrier("end").unwrap();
                let marks = timer.end(&rank).unwrap();
                timer.ended(marks).unwrap();
                timer.take()[0]
            };
            let all: Vec<_> = worlds.into_iter().map(|w| s.spawn(move || step(w))).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(times[0].forward >= 0.1 && times[1].forward >= 0.02 && times[1].forward < 0.08, "{times:?}");
        assert!(times[1].communication >= 0.04, "{times:?}");
        assert!(times[1].own() < times[0].own() / 1.2, "{times:?}");
    }

    #[test]
    fn a_slowdown_adds_its_share_of_own_time() {
        let rank = Rank::cpu(1, 1).unwrap();
        let timer = SectionTimer::new(&rank, true);
        timer.slow_down(50.0);
        timer.enter(&rank, Section::Forward).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let marks = timer.end(&rank).unwrap();
        timer.ended(marks).unwrap();
        assert!(timer.take()[0].forward >= 0.03);
        // Switched off, it measures nothing.
        let off = SectionTimer::new(&rank, false);
        off.enter(&rank, Section::Forward).unwrap();
        assert!(off.end(&rank).unwrap().is_none());
    }
}
