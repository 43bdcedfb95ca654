//! Names ranks that are slower than others, or than they were.
//!
//! Every `fault.straggler_every` steps all ranks exchange their own times (see [`super::sections`]) as a few host bytes.
//! With `own_i(t)` the own time of rank i in span t of the window (a step, or a few of them in a long window):
//!
//! - relative score `median_t( median_{j≠i} own_j(t) / own_i(t) )` over the ranks j of the same pipeline stage, which do the
//!   same work. Comparing span by span cancels what slows all of them alike: a longer sequence, a busy machine;
//! - individual score `median of earlier windows / this window` of the rank's share `median_t( own_i(t) / median_j own_j(t) )`
//!   over all ranks j. It is for ranks that nobody can be compared with, and unlike plain time does not change when the whole
//!   job does. A job of one rank goes by its plain time, and must be slow for several windows.
//!
//! Scores are taken over two windows, so that a host that was busy for a moment names nobody. A score below
//! `fault.straggler_threshold` names the rank if most spans agree, and if it stands out from the scatter of the other ranks.

use super::health::{HealthProbe, MemoryTrend, resident_bytes};
use super::sections::{Section, SectionTimes};
use crate::events::{Cause, Event, MemoryGrowth, RankSections, Sections, Straggler};
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_kernels::cuda::GpuHealth;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Most spans of a window, whatever its length.
const SPANS: usize = 16;
/// Part of the spans of two windows that must be slow for a rank to be named.
const AGREEING: f64 = 0.7;
/// Windows of a rank's history that its share is compared with, and the fewest.
const HISTORY: usize = 32;
const LEAST_HISTORY: usize = 3;
/// Windows in a row that a rank without peers must be slow for, and one that is alone.
const NO_PEERS: usize = 2;
const ALONE: usize = 3;
/// How many times the scatter of the others a score must be away from 1.
const SCATTERS: f64 = 2.0;
/// Ranks of a stage that are many.
const MANY: usize = 16;
/// Ranks that an event lists.
const LISTED: usize = 64;
/// A GPU clock below this part of the others' median is lower.
const LOWER_CLOCK: f64 = 0.97;

/// What a rank tells the others of a window.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RankWindow {
    /// Own seconds of each span.
    pub(crate) spans: Vec<f32>,
    pub(crate) times: SectionTimes,
    pub(crate) stage: usize,
    host: String,
    device: String,
    rss: Option<u64>,
    pub(crate) gpu: Option<GpuHealth>,
}

/// What is kept of a rank over windows.
#[derive(Default)]
struct RankHistory {
    /// Shares in windows in which it was not named.
    shares: Vec<f64>,
    /// Windows in a row in which its score was low.
    low: usize,
    memory: MemoryTrend,
    ecc: Option<u64>,
}

/// A score and the scores of single spans.
struct Score {
    score: f64,
    spans: Vec<f64>,
}

/// Scores of one rank in a window.
struct Judgement {
    relative: Option<Score>,
    individual: Option<f64>,
    named: Option<f64>,
}

/// Compares the ranks of a run.
pub(crate) struct Stragglers {
    every: u64,
    threshold: f64,
    probe: HealthProbe,
    window: Vec<SectionTimes>,
    /// Steps of the window, measured or not.
    steps: u64,
    checkpoint: f64,
    history: Vec<RankHistory>,
    /// Own times of the window before, by rank.
    before: Vec<Vec<f32>>,
}

impl Stragglers {
    /// Compares ranks every `every` steps.
    pub(crate) fn new(rank: &Rank, every: u64, threshold: f64) -> Stragglers {
        Stragglers {
            every,
            threshold,
            probe: HealthProbe::new(rank),
            window: Vec::new(),
            steps: 0,
            checkpoint: 0.0,
            history: Vec::new(),
            before: Vec::new(),
        }
    }

    /// Adds seconds of a save.
    pub(crate) fn saved(&mut self, seconds: f64) {
        self.checkpoint += seconds;
    }

    /// Adds the times of a step; at the end of a window its events. Collective over `control` then.
    pub(crate) fn step(&mut self, rank: &Rank, step: u64, times: Vec<SectionTimes>) -> Result<Vec<Event>> {
        self.window.extend(times);
        self.steps += 1;
        if self.steps < self.every {
            return Ok(Vec::new());
        }
        let window = std::mem::take(&mut self.window);
        let mut times = medians(&window);
        times.checkpoint = std::mem::take(&mut self.checkpoint);
        self.steps = 0;
        let mine = RankWindow {
            spans: spans(&window),
            times,
            stage: rank.pp.rank(),
            host: self.probe.host.clone(),
            device: self.probe.device.clone(),
            rss: resident_bytes(),
            gpu: self.probe.gpu(),
        };
        let broken = |e: serde_json::Error| Error::Invalid(format!("section times of other ranks: {e}"));
        let text = serde_json::to_vec(&mine).map_err(broken)?;
        let all = rank.control.all_gather_bytes(&text, "section times")?;
        // Only the writer of events needs to know.
        if rank.world.rank() > 0 {
            return Ok(Vec::new());
        }
        let all: Vec<RankWindow> =
            all.iter().map(|t| serde_json::from_slice(t).map_err(broken)).collect::<Result<_>>()?;
        Ok(self.report(step, window.len() as u64, &all))
    }

    /// The events of a window.
    fn report(&mut self, step: u64, steps: u64, all: &[RankWindow]) -> Vec<Event> {
        let judged = self.judge(all);
        let mut listed: Vec<usize> = (0..all.len()).collect();
        if listed.len() > LISTED {
            let own = |i: usize| all[i].times.own();
            listed.sort_by(|a, b| own(*b).total_cmp(&own(*a)));
            listed.truncate(LISTED);
        }
        let ranks = listed.into_iter().map(|i| RankSections {
            rank: i,
            times: all[i].times,
            relative: judged[i].relative.as_ref().map(|s| s.score),
            individual: judged[i].individual,
            rss: all[i].rss,
            gpu: all[i].gpu.clone(),
        });
        let every_rank: Vec<SectionTimes> = all.iter().map(|w| w.times).collect();
        let sections = Sections { step, steps, median: medians(&every_rank), ranks: ranks.collect() };
        let mut events = vec![Event::Sections(sections)];
        for (i, (window, judgement)) in all.iter().zip(&judged).enumerate() {
            if let Some(score) = judgement.named {
                let (section, lost) = slowest(window, &peers(all, i));
                let lost = lost.max((1.0 - score) * window.times.own());
                let cause = self.cause(i, all, section);
                let (host, device) = (window.host.clone(), window.device.clone());
                events.push(Event::Straggler(Straggler {
                    step,
                    rank: i,
                    host,
                    device,
                    score,
                    section,
                    lost,
                    cause,
                }));
            }
        }
        for (i, (window, history)) in all.iter().zip(&mut self.history).enumerate() {
            history.ecc = window.gpu.as_ref().and_then(|g| g.ecc_uncorrected);
            let grows = window.rss.and_then(|rss| Some((rss, history.memory.add(step, rss)?)));
            // Ranks that are threads share a process.
            let shared = all[..i].iter().any(|w| w.host == window.host && w.rss == window.rss);
            if let Some((rss, per_1000_steps)) = grows.filter(|_| !shared) {
                let host = window.host.clone();
                events.push(Event::MemoryGrowth(MemoryGrowth { step, rank: i, host, rss, per_1000_steps }));
            }
        }
        events
    }

    /// Scores all ranks, and keeps their history.
    fn judge(&mut self, all: &[RankWindow]) -> Vec<Judgement> {
        self.history.resize_with(all.len(), RankHistory::default);
        let now: Vec<Vec<f32>> = all.iter().map(|w| w.spans.clone()).collect();
        let before = std::mem::replace(&mut self.before, now);
        // The window before and this one.
        let mut two = all.to_vec();
        let has_two = before.len() == all.len();
        if has_two {
            two.iter_mut().zip(before).for_each(|(w, b)| w.spans.splice(..0, b).for_each(drop));
        }
        let count = all.iter().map(|w| w.spans.len()).min().unwrap_or(0);
        let count_two = two.iter().map(|w| w.spans.len()).min().unwrap_or(0);
        let job: Vec<f64> = (0..count).map(|t| median(all.iter().map(|w| own(w, t)))).collect();
        let (threshold, stages) = (self.threshold, StageTimes::of(&two, count_two));
        let judge = |(i, history): (usize, &mut RankHistory)| {
            let others = stages.others(&two, i).filter(|_| count > 0);
            let relative = others.as_ref().map(|o| Score::of(&two[i], o));
            let share = |t: usize| own(&all[i], t) / if all.len() > 1 { job[t] } else { 1.0 };
            let share = median((0..count).map(share));
            let known = history.shares.len() >= LEAST_HISTORY && count > 0;
            let individual = known.then(|| median(history.shares.iter().copied()) / share);
            let low = match relative.as_ref().zip(others) {
                Some((score, others)) => {
                    let away = || 1.0 - score.score > SCATTERS * scatter(&two, i, &others);
                    (score.is_below(threshold) && away()).then_some(score.score)
                }
                None => individual.filter(|score| *score < threshold),
            };
            history.low = if low.is_some() { history.low + 1 } else { 0 };
            if low.is_none() && count > 0 {
                history.shares.push(share);
                let surplus = history.shares.len().saturating_sub(HISTORY);
                history.shares.drain(..surplus);
            }
            let enough = match (all.len(), &relative) {
                (1, _) => history.low >= ALONE,
                (_, None) => history.low >= NO_PEERS,
                (_, Some(_)) => has_two,
            };
            let named = low.filter(|_| enough);
            Judgement { relative, individual, named }
        };
        self.history.iter_mut().enumerate().map(judge).collect()
    }

    /// What probably makes rank `i` slow in `section`.
    fn cause(&self, i: usize, all: &[RankWindow], section: Section) -> Cause {
        let Some(gpu) = &all[i].gpu else {
            return match section {
                Section::Data => Cause::Data,
                _ if all[i].device == "CPU" => Cause::Host,
                _ => Cause::Unknown,
            };
        };
        let throttles = |word: &str| gpu.throttle.iter().any(|t| t.contains(word));
        let clocks = all.iter().filter_map(|w| w.gpu.as_ref()?.sm_mhz);
        let usual = median(clocks.map(f64::from));
        let is_lower = gpu.sm_mhz.is_some_and(|mhz| f64::from(mhz) < LOWER_CLOCK * usual);
        let new_ecc = self.history[i].ecc.zip(gpu.ecc_uncorrected).is_some_and(|(old, new)| new > old);
        match section {
            Section::Data => Cause::Data,
            _ if new_ecc || !gpu.xid.is_empty() => Cause::GpuErrors,
            _ if throttles("thermal") => Cause::ThermalThrottle,
            // The power cap limits every busy GPU; it is the cause where the clock is lower than the others'.
            _ if is_lower && throttles("power") || throttles("power brake") => Cause::PowerThrottle,
            _ if is_lower || throttles("hardware slowdown") => Cause::Clocks,
            _ => Cause::Unknown,
        }
    }
}

impl Score {
    /// The score of a rank in comparison with the times of others in each span.
    fn of(window: &RankWindow, others: &[f64]) -> Score {
        let spans: Vec<f64> = others.iter().enumerate().map(|(t, o)| o / own(window, t)).collect();
        Score { score: median(spans.iter().copied()), spans }
    }

    /// Whether it is below the threshold, and most spans are nearer to the threshold than to 1.
    fn is_below(&self, threshold: f64) -> bool {
        let slow = self.spans.iter().filter(|s| **s < (1.0 + threshold) / 2.0).count();
        self.score < threshold && slow as f64 >= AGREEING * self.spans.len() as f64
    }
}

/// Own times of the ranks of each pipeline stage.
struct StageTimes {
    spans: usize,
    /// Medians of the spans of stages with many ranks, where one rank more or less does not matter.
    large: HashMap<usize, Vec<f64>>,
}

impl StageTimes {
    fn of(all: &[RankWindow], spans: usize) -> StageTimes {
        let mut stages: HashMap<usize, Vec<&RankWindow>> = HashMap::new();
        all.iter().for_each(|w| stages.entry(w.stage).or_default().push(w));
        stages.retain(|_, ranks| ranks.len() > MANY);
        let medians = |ranks: Vec<&RankWindow>| -> Vec<f64> {
            (0..spans).map(|t| median(ranks.iter().map(|w| own(w, t)))).collect()
        };
        StageTimes {
            spans,
            large: stages.into_iter().map(|(stage, ranks)| (stage, medians(ranks))).collect(),
        }
    }

    /// Median of each span over the ranks that do the same work as rank `i`; none if there is no other.
    fn others(&self, all: &[RankWindow], i: usize) -> Option<Vec<f64>> {
        if let Some(known) = self.large.get(&all[i].stage) {
            return Some(known.clone());
        }
        let peers = peers(all, i);
        let medians = (0..self.spans).map(|t| median(peers.iter().map(|w| own(w, t)))).collect();
        (!peers.is_empty()).then_some(medians)
    }
}

fn own(w: &RankWindow, t: usize) -> f64 {
    w.spans.get(t).map_or(0.0, |s| f64::from(*s)).max(1e-9)
}

/// How far the scores of the other ranks are from 1, in the median: noise that says nothing about rank `i`.
fn scatter(all: &[RankWindow], i: usize, others: &[f64]) -> f64 {
    median(peers(all, i).iter().map(|w| (1.0 - Score::of(w, others).score).abs()))
}

/// The other ranks that do the same work as rank `i`.
fn peers(all: &[RankWindow], i: usize) -> Vec<&RankWindow> {
    let same = |(j, w): &(usize, &RankWindow)| *j != i && w.stage == all[i].stage;
    all.iter().enumerate().filter(same).map(|(_, w)| w).collect()
}

/// The section in which a rank loses most time to its peers, and the seconds; its longest if it has none.
fn slowest(window: &RankWindow, others: &[&RankWindow]) -> (Section, f64) {
    let lost = |s: Section| match others.is_empty() {
        true => window.times.of(s),
        false => window.times.of(s) - median(others.iter().map(|w| w.times.of(s))),
    };
    let work = [Section::Data, Section::Forward, Section::Backward, Section::Optimizer];
    let worst = work.into_iter().max_by(|a, b| lost(*a).total_cmp(&lost(*b))).unwrap_or(Section::Forward);
    (worst, if others.is_empty() { 0.0 } else { lost(worst).max(0.0) })
}

/// Median own time of each of at most [`SPANS`] equal parts of a window.
fn spans(window: &[SectionTimes]) -> Vec<f32> {
    let length = window.len().div_ceil(SPANS).max(1);
    window.chunks(length).map(|part| median(part.iter().map(SectionTimes::own)) as f32).collect()
}

/// Median of each section.
fn medians(all: &[SectionTimes]) -> SectionTimes {
    let mut out = SectionTimes::default();
    for section in Section::ALL {
        *out.of_mut(section) = median(all.iter().map(|t| t.of(section)));
    }
    out.delayed = median(all.iter().map(|t| t.delayed));
    out
}

/// The median; 0 of nothing.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    match all.len() {
        0 => 0.0,
        n if n % 2 == 1 => all[n / 2],
        n => (all[n / 2 - 1] + all[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests;
