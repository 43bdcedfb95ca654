//! Which activations of a model are offloaded: as settings say, or as much as the link moves for free and as must move.

use super::profile::{MeasuredPass, RecordedPasses};
use super::{
    AllocationSet, ChunkProfile, Expected, HostSlots, Link, OffloadPlan, OffloadedLayer, Offloader,
    PassRecorder,
};
use crate::{Module, Rank, Saved};
use ferrotron_tensor::{Result, Stream};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What to offload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadChoice {
    /// All activations of the first layers of each model chunk.
    Layers(usize),
    /// The activations of these modules, in all layers but the last of each chunk.
    Modules(Vec<Module>),
    /// What the link moves while the device computes, and at least `needed` bytes of each micro-batch.
    Auto {
        /// Bytes without which a step does not fit.
        needed: usize,
        /// The first layers of each chunk that are offloaded until a step has been measured, at least one: their copies tell
        /// the rate of the link.
        layers: usize,
    },
}

/// Steps before the first one that is measured: the first chooses GEMM algorithms, and until memory of the device and of the host
/// has been allocated, and launches no longer keep the device waiting, layers take longer.
const WARM_UP: u64 = 3;
/// Measured steps after which an automatic choice stays as it is.
const ROUNDS: usize = 4;
/// Of the computation: a longer stall makes the choice anew.
const TOLERATED_STALL: f64 = 0.005;
/// A choice that moves so much more replaces the one before.
const WORTHWHILE: f64 = 1.05;
/// Of the link's rate, which varies from step to step.
const USABLE: f64 = 0.95;
/// Seconds; below this a stall is what rounding leaves.
const NO_STALL: f64 = 1e-9;
/// Layers by which a reload starts earlier than it must.
const LEAD: usize = 1;

/// The offloading of a rank's activations.
pub struct ActivationOffload {
    offloader: Offloader,
    choice: OffloadChoice,
    passes: RecordedPasses,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    steps: u64,
    /// Step whose passes are recorded.
    recorded: Option<u64>,
    link: Option<Link>,
    /// Plans of the chunks, where they were chosen by measurement.
    plans: BTreeMap<usize, OffloadPlan>,
    /// How often the plans were chosen.
    rounds: usize,
    done: bool,
    /// Whether [`ActivationOffload::host_became_full`] has said so.
    told_full: bool,
}

/// What offloading does to one micro-batch on one rank, as measured and as planned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OffloadReport {
    /// Bytes that layers save and that could be offloaded.
    pub movable: usize,
    /// Bytes that move to the host and back.
    pub moved: usize,
    /// Bytes by which the resident activations are lower at their peak.
    pub peak_reduction: usize,
    /// Bytes that the link can carry to the host between the end of the first layer's forward and the start of the last one's.
    pub window: usize,
    /// Measured rates of the copies of a pass; 0 if nothing moves.
    pub link: Link,
    /// Seconds of computation.
    pub seconds: f64,
    /// Seconds that computation is expected to wait.
    pub expected_stall: f64,
    /// Seconds that it waited, where the plan has run.
    pub measured_stall: Option<f64>,
}

impl ActivationOffload {
    /// Offloads tensors of at least `min_bytes`.
    pub fn new(rank: &Rank, choice: OffloadChoice, min_bytes: usize) -> Result<ActivationOffload> {
        let mut offloader = Offloader::new(rank, min_bytes)?;
        offloader.optional = matches!(choice, OffloadChoice::Auto { .. });
        Ok(ActivationOffload {
            offloader,
            choice,
            passes: RecordedPasses::default(),
            state: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The moves of chunk `chunk` with `layers` layers.
    pub fn plan(&self, chunk: usize, layers: usize) -> OffloadPlan {
        match &self.choice {
            OffloadChoice::Layers(count) => OffloadPlan::first(*count, layers),
            OffloadChoice::Modules(_) => OffloadPlan::streamed(layers),
            OffloadChoice::Auto { layers: count, .. } => match self.lock().plans.get(&chunk) {
                Some(plan) => plan.clone(),
                None => OffloadPlan::first((*count).max(1), layers),
            },
        }
    }

    /// The streams that copy.
    pub fn copy_streams(&self) -> [&Stream; 2] {
        [&self.offloader.to_host, &self.offloader.from_host]
    }

    /// The step that is launched next is captured into a CUDA graph, which keeps this host memory.
    pub fn begin_capture(&mut self) -> HostSlots {
        self.offloader.slots = HostSlots::default();
        self.offloader.slots.clone()
    }

    /// Whether nothing will be chosen any more.
    pub fn is_settled(&self) -> bool {
        self.lock().done
    }

    /// True once, after host memory had no space for a part of an automatic choice, which has stayed on the device.
    pub fn host_became_full(&self) -> bool {
        self.host_is_full() && !std::mem::replace(&mut self.lock().told_full, true)
    }

    fn host_is_full(&self) -> bool {
        self.offloader.host_is_full.load(Relaxed)
    }

    /// A recorder of the pass that begins, if it is the first of its chunk in a step to be measured.
    pub fn recorder(&self, chunk: usize) -> Option<PassRecorder> {
        let state = self.lock();
        if state.recorded != Some(state.steps) || self.recorded().iter().any(|(c, _)| *c == chunk) {
            return None;
        }
        Some(PassRecorder::new(self.offloader.compute(), chunk, &self.passes))
    }

    fn recorded(&self) -> MutexGuard<'_, Vec<(usize, super::profile::RecordedPass)>> {
        self.passes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to offload some allocations that a layer has saved.
    pub fn start(
        &self,
        saved: &mut impl Saved,
        set: AllocationSet,
        recorder: Option<&mut PassRecorder>,
    ) -> Result<OffloadedLayer> {
        let layer = self.offloader.offload(saved, &|module| self.wants(module), set)?;
        if let Some(recorder) = recorder {
            recorder.copied(&layer);
        }
        Ok(layer)
    }

    /// Notes what a layer has saved that could be offloaded.
    pub fn note(&self, saved: &mut impl Saved, recorder: &mut PassRecorder) {
        let found = self.offloader.candidates(saved, &|module| self.wants(module));
        recorder.saved(found.iter().map(|t| t.allocation_bytes()).collect());
    }

    fn wants(&self, module: Module) -> bool {
        match &self.choice {
            OffloadChoice::Modules(list) => list.contains(&module),
            _ => true,
        }
    }

    /// Before a step: when a measured step is complete on the device, chooses and reports. The report of an automatic choice
    /// comes as it is made, and when it has run; a choice that makes computation wait, or uses the link less than it could, is
    /// made anew from the step that showed it.
    pub fn begin_step(&self) -> Result<Option<OffloadReport>> {
        let mut state = self.lock();
        let step = state.steps;
        state.steps += 1;
        if state.done {
            return Ok(None);
        }
        let recorded = match state.recorded {
            None if step == WARM_UP => {
                state.recorded = Some(state.steps);
                return Ok(None);
            }
            Some(recorded) if recorded < state.steps => recorded,
            _ => return Ok(None),
        };
        let passes = std::mem::take(&mut *self.recorded());
        if passes.is_empty() || !passes.iter().all(|(_, p)| p.is_reached()) {
            // The device has not come so far; after a while without any pass there is nothing to report.
            state.done = passes.is_empty() && step > recorded + 8;
            *self.recorded() = passes;
            return Ok(None);
        }
        let measured: Vec<(usize, MeasuredPass)> =
            passes.iter().map(|(chunk, pass)| Ok((*chunk, pass.measure()?))).collect::<Result<_>>()?;
        // A choice may be that nothing moves.
        let link = link(&measured).or(state.link).unwrap_or(Link { to_host: 0.0, from_host: 0.0 });
        state.link = Some(link);
        let OffloadChoice::Auto { needed, .. } = self.choice else {
            state.done = true;
            drop(state);
            return Ok(Some(self.report(link, &measured, true)));
        };
        let each = needed.div_ceil(measured.len().max(1));
        let plan = |(chunk, pass): &(usize, MeasuredPass)| (*chunk, choose(&pass.profile, link, each));
        let next: BTreeMap<usize, OffloadPlan> = match link.to_host > 0.0 {
            true => measured.iter().map(plan).collect(),
            false => BTreeMap::new(),
        };
        let ran = state.rounds > 0;
        // A choice that host memory has no space for stays as it is: what fits moves.
        if link.to_host == 0.0
            || self.host_is_full()
            || (ran && (state.rounds == ROUNDS || !is_better(&measured, &state.plans, &next)))
        {
            state.done = true;
            drop(state);
            return Ok(Some(self.report(link, &measured, true)));
        }
        // One step settles under the new plan; the next one is measured.
        state.plans = next;
        state.rounds += 1;
        state.recorded = Some(state.steps + 1);
        drop(state);
        Ok(Some(self.report(link, &measured, false)))
    }

    /// Sums over chunks.
    fn report(&self, link: Link, passes: &[(usize, MeasuredPass)], ran: bool) -> OffloadReport {
        let mut out = OffloadReport {
            movable: 0,
            moved: 0,
            peak_reduction: 0,
            window: 0,
            link,
            seconds: 0.0,
            expected_stall: 0.0,
            measured_stall: None,
        };
        let mut stall = 0.0;
        for (chunk, MeasuredPass { profile, stall: waited, copied }) in passes {
            let plan = self.plan(*chunk, profile.layers.len());
            let expected = match link.to_host > 0.0 {
                true => profile.run(&plan, link),
                false => Expected { peak: profile.movable(), stall: 0.0 },
            };
            out.movable += profile.movable();
            let moved = if self.host_is_full() { copied[0].0 } else { profile.all_moved(&plan) };
            out.moved += moved;
            out.peak_reduction += profile.movable().saturating_sub(expected.peak).min(moved);
            out.window += (profile.window() * link.to_host) as usize;
            out.seconds += profile.seconds();
            out.expected_stall += expected.stall;
            stall += waited;
        }
        out.measured_stall = ran.then_some(stall);
        out
    }
}

/// Whether other plans are worth a change after passes under the present ones: those make computation wait, and others would move
/// less, or others would move clearly more.
fn is_better(
    passes: &[(usize, MeasuredPass)],
    now: &BTreeMap<usize, OffloadPlan>,
    next: &BTreeMap<usize, OffloadPlan>,
) -> bool {
    let moved = |plans: &BTreeMap<usize, OffloadPlan>| -> usize {
        passes.iter().filter_map(|(c, p)| Some(p.profile.all_moved(plans.get(c)?))).sum()
    };
    let (stall, seconds) = passes
        .iter()
        .fold((0.0, 0.0), |(stall, seconds), (_, p)| (stall + p.stall, seconds + p.profile.seconds()));
    let (now, next) = (moved(now), moved(next));
    (stall > TOLERATED_STALL * seconds && next < now) || next as f64 > WORTHWHILE * now as f64
}

/// The rates of the copies of some passes, if there were any.
fn link(passes: &[(usize, MeasuredPass)]) -> Option<Link> {
    let rate = |direction: usize| {
        let copied = passes.iter().map(|(_, p)| p.copied[direction]);
        let (bytes, seconds) = copied.fold((0, 0.0), |sum, (b, s)| (sum.0 + b, sum.1 + s));
        (bytes > 0).then_some(bytes as f64 / f64::max(seconds, 1e-9))
    };
    Some(Link { to_host: rate(0)?, from_host: rate(1)? })
}

/// Offloads the allocations, from the first layer on, that can be copied before the last layer's forward without a wait, and
/// others where the peak must be lower by `needed` bytes.
fn choose(chunk: &ChunkProfile, link: Link, needed: usize) -> OffloadPlan {
    let careful = Link { to_host: link.to_host * USABLE, from_host: link.from_host * USABLE };
    let count = chunk.layers.len();
    let (all, mut best) = (chunk.movable(), OffloadPlan { layers: vec![None; count] });
    let mut chosen: Vec<(usize, AllocationSet)> = Vec::new();
    for (l, layer) in chunk.layers.iter().enumerate().take(count.saturating_sub(1)) {
        for i in 0..layer.allocations.len() {
            let mut more = chosen.clone();
            match more.last_mut() {
                Some(last) if last.0 == l => last.1 = last.1.with(i),
                _ => more.push((l, AllocationSet::default().with(i))),
            }
            let plan = chunk.plan(&more, careful, LEAD);
            let in_time = plan.layers.iter().flatten().all(|m| m.release_before < count);
            let Expected { peak, stall } = chunk.run(&plan, careful);
            let free = in_time && stall <= NO_STALL && peak < chunk.peak(&best);
            // What is too large for the time that is left stays; something smaller may still move.
            if free || all - chunk.peak(&best) < needed {
                best = if free { plan } else { in_time_to_fit(plan) };
                chosen = more;
            }
        }
    }
    best
}

/// Releases layers as early as the default schedule does: of K of L layers, layer i before the forward of layer L − K + i, so
/// that the peak falls by all that moves, even where computation waits for it.
fn in_time_to_fit(mut plan: OffloadPlan) -> OffloadPlan {
    let (count, moving) = (plan.layers.len(), plan.layers.iter().flatten().count());
    for (i, m) in plan.layers.iter_mut().flatten().enumerate() {
        m.release_before = m.release_before.min(count - moving + i);
        m.reload_before = m.reload_before.min((count - 1 - moving + i).max(i + 1).min(count - 1));
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::LayerProfile;

    fn chunk() -> ChunkProfile {
        let layer = LayerProfile { forward: 1.0, backward: 2.0, allocations: vec![500, 1500, 1000] };
        ChunkProfile { layers: vec![layer; 10], output: 1.0 }
    }

    /// 8 of 10 layers lie between the end of the first and the start of the last: 8 s.
    #[test]
    fn as_much_moves_as_is_free() {
        let link = Link { to_host: 1000.0, from_host: 1000.0 };
        let plan = choose(&chunk(), link, 0);
        // 7,600 bytes of 30,000 at 95 % of the rate: two layers, and of the third all but the largest allocation.
        assert_eq!(chunk().all_moved(&plan), 7500);
        let e = chunk().run(&plan, link);
        assert_eq!((e.peak, e.stall), (30_000 - 7500, 0.0));
    }

    #[test]
    fn what_must_move_moves_even_if_it_is_not_free() {
        let link = Link { to_host: 1000.0, from_host: 1000.0 };
        let plan = choose(&chunk(), link, 12_000);
        let e = chunk().run(&plan, link);
        assert!(e.peak <= 18_000 && e.stall > 2.0, "{e:?}");
        // As much as there is, if that is not enough.
        let plan = choose(&chunk(), link, 100_000);
        assert_eq!(chunk().all_moved(&plan), 27_000);
    }

    #[test]
    fn a_fast_link_moves_all_layers_but_two() {
        let link = Link { to_host: 1e9, from_host: 1e9 };
        // The layer before the last is released before the output at the earliest.
        assert_eq!(chunk().all_moved(&choose(&chunk(), link, 0)), 24_000);
        let empty = ChunkProfile::default();
        assert!(choose(&empty, link, 7).is_empty());
    }
}
