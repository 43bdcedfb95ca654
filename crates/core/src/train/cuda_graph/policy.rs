//! Decides which steps are captured and replayed: by `train.cuda_graph`, by what capture rules out, and for `auto` by
//! the share of a step's time that its launches take on the host.

use crate::config::{Config, CudaGraphMode};
use crate::data::Batch;
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_engine::attention::Layout;
use ferrotron_tensor::{Event, Stream};
use std::time::{Duration, Instant};

/// Eager steps before a capture. Autotuning has chosen every GEMM algorithm by then.
const WARMUP_STEPS: u32 = 3;
/// Smallest share of the step time spent on launches for which a replay pays. On an H200, replayed steps were 2 % faster
/// at a share of 25 % and 7 % faster at 33 and 41 %; at 6 % the difference was noise.
const MIN_LAUNCH_SHARE: f64 = 0.2;
/// Launch time of a step from which a replay pays on one rank, whatever the share: it costs nothing there, and a host that
/// launches for less time has more left for the data. Over ranks a captured step does not overlap its collectives with compute.
const LONG_LAUNCHES: Duration = Duration::from_millis(3);

/// What the launches of a step depend on besides the recipe. Steps of equal shape launch the same kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::train) struct StepShape {
    pub(in crate::train) micro_batches: usize,
    /// Tokens of a micro-batch.
    pub(in crate::train) tokens: usize,
    pub(in crate::train) seq: usize,
    /// Packed sequences of a micro-batch at most; none where each row is one.
    pub(in crate::train) sequences: Option<usize>,
    /// Number of the expected split sizes of MoE messages, where there are any.
    pub(in crate::train) splits: Option<u64>,
}

impl StepShape {
    /// The shape of a step with up to `sequences` packed sequences in a micro-batch; none if its micro-batches differ in length, so
    /// that launches depend on the data.
    pub(super) fn of(
        batches: &[Batch],
        (seq, sequences): (usize, usize),
        splits: Option<u64>,
    ) -> Option<StepShape> {
        let first = batches.first()?;
        let (tokens, packed) = (first.tokens.len(), first.cu_seqlens.is_some());
        let alike = |b: &Batch| {
            let sequences_fit = match &b.cu_seqlens {
                Some(offsets) => packed && offsets.len() <= sequences + 1,
                // A row that ends in padding is not attended to differently, but MoE layers skip it.
                None => !packed && b.padding.is_none(),
            };
            sequences_fit
                && !b.varies
                && [&b.tokens, &b.labels, &b.positions].iter().all(|list| list.len() == tokens)
        };
        let full_rows = seq > 0 && tokens > 0 && tokens.is_multiple_of(seq);
        let sequences = packed.then_some(sequences);
        let shape = StepShape { micro_batches: batches.len(), tokens, seq, sequences, splits };
        (full_rows && batches.iter().all(alike)).then_some(shape)
    }

    /// The sequences of a micro-batch. Where they are packed, the first has all tokens and stands for any others.
    pub(in crate::train) fn layout(&self) -> Layout {
        match self.sequences {
            None => Layout::Rows { count: self.tokens / self.seq.max(1), len: self.seq },
            Some(n) => {
                let mut offsets = vec![self.tokens as i32; n + 1];
                offsets[0] = 0;
                Layout::Packed { offsets }
            }
        }
    }

    /// Whether launches of this shape serve a step: there are at least as many sequences.
    fn holds(&self, step: &StepShape) -> bool {
        let rest = |s: &StepShape| StepShape { sequences: None, ..*s };
        self.sequences.is_some() == step.sequences.is_some()
            && self.sequences >= step.sequences
            && rest(self) == rest(step)
    }
}

/// How the next step is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaunchMode {
    Eager,
    Capture,
    Replay,
}

/// Host and device time of an eager step.
pub(in crate::train) struct StepTimer {
    shape: StepShape,
    device_start: Event,
    host_start: Instant,
    /// Time to launch the first micro-batch.
    first: Option<Duration>,
    host: Duration,
}

impl StepTimer {
    /// Micro-batch `i` is about to be launched.
    pub(in crate::train) fn micro_batch(&mut self, i: usize) {
        if i == 1 {
            self.first = Some(self.host_start.elapsed());
        }
    }

    /// Stops the host's clock: everything is launched. A launch blocks while the GPU's queue is full, which is no cost of
    /// launching, so no micro-batch counts for more than the first, which found the queue empty.
    pub(in crate::train) fn launched(&mut self) {
        let all = self.host_start.elapsed();
        let unblocked = self.first.map(|first| first * self.shape.micro_batches as u32);
        self.host = unblocked.map_or(all, |unblocked| all.min(unblocked));
    }
}

/// Whether steps are replayed, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaGraphDecision {
    /// On or off; auto means undecided.
    pub value: CudaGraphMode,
    /// Why, in one phrase.
    pub reason: String,
}

/// The state of the decision.
pub(super) struct GraphPolicy {
    mode: CudaGraphMode,
    /// There is one rank only.
    alone: bool,
    /// Why no step can be captured.
    disabled_reason: Option<String>,
    /// Shape of the last step, with as many packed sequences as those before it may have.
    shape: Option<StepShape>,
    /// Eager steps of that shape in a row.
    eager_steps: u32,
    /// Shortest host and device time of such a step, without the first.
    min_times: Option<(Duration, Duration)>,
    /// Steps replayed so far.
    pub(super) replayed: u64,
}

impl GraphPolicy {
    /// Reads `train.cuda_graph`; an error if it is `on` where a step cannot be captured.
    pub(super) fn new(c: &Config, rank: &Rank) -> Result<GraphPolicy> {
        let blocker = if rank.device().gpu().is_none() {
            Some("the CPU launches nothing")
        } else if rank.world.size() > 1 && !rank.world.only_enqueues() {
            Some("ranks that communicate without NCCL wait for each other on the host")
        } else if rank.device().is_instrumented() {
            Some("instrumentation observes every launch")
        } else {
            c.cuda_graph_blocker()
        };
        GraphPolicy::of(c.train.cuda_graph, rank.world.size() == 1, blocker)
    }

    fn of(mode: CudaGraphMode, alone: bool, blocker: Option<&str>) -> Result<GraphPolicy> {
        if let (CudaGraphMode::On, Some(blocker)) = (mode, blocker) {
            let what =
                format!("train.cuda_graph = \"on\": steps cannot be captured here: {blocker}; leave it out");
            return Err(Error::Invalid(what));
        }
        let disabled_reason = blocker.map(String::from);
        Ok(GraphPolicy {
            mode,
            alone,
            disabled_reason,
            shape: None,
            eager_steps: 0,
            min_times: None,
            replayed: 0,
        })
    }

    pub(super) fn is_off(&self) -> bool {
        self.mode == CudaGraphMode::Off || self.disabled_reason.is_some()
    }

    /// Share of the device's step time that the host needs for launches.
    fn launch_share(&self) -> Option<f64> {
        self.min_times.map(|(host, device)| host.as_secs_f64() / device.as_secs_f64().max(1e-9))
    }

    /// Launch time of a step, where it is long enough to be worth a replay by itself.
    fn long_launches(&self) -> Option<Duration> {
        self.min_times.map(|(host, _)| host).filter(|host| self.alone && *host >= LONG_LAUNCHES)
    }

    /// How to launch the next step, given the shape of the captured graph and whether that graph is idle.
    pub(super) fn next(
        &mut self,
        shape: Option<StepShape>,
        captured: Option<StepShape>,
        is_idle: bool,
    ) -> LaunchMode {
        if self.is_off() {
            return LaunchMode::Eager;
        }
        let holds = |kept: Option<StepShape>| shape.is_some_and(|s| kept.is_some_and(|kept| kept.holds(&s)));
        if holds(captured) {
            return if is_idle { LaunchMode::Replay } else { LaunchMode::Eager };
        }
        let shape = if holds(self.shape) { self.shape } else { shape };
        if shape != self.shape {
            (self.shape, self.eager_steps, self.min_times) = (shape, 0, None);
        }
        let pays = self.mode == CudaGraphMode::On
            || self.launch_share().is_some_and(|s| s > MIN_LAUNCH_SHARE)
            || self.long_launches().is_some();
        if shape.is_some() && self.eager_steps >= WARMUP_STEPS && pays {
            return LaunchMode::Capture;
        }
        self.eager_steps = self.eager_steps.saturating_add(1);
        LaunchMode::Eager
    }

    /// The shape to capture: that of the last steps.
    pub(super) fn shape(&self) -> Option<StepShape> {
        self.shape
    }

    /// Starts to time the eager step about to be launched, if `auto` still needs times.
    pub(super) fn timer(&self, s: &Stream) -> Result<Option<StepTimer>> {
        let useful = !self.is_off()
            && self.mode == CudaGraphMode::Auto
            && (2..=WARMUP_STEPS).contains(&self.eager_steps);
        let Some(shape) = self.shape.filter(|_| useful) else { return Ok(None) };
        let (device_start, host_start) = (s.record()?, Instant::now());
        Ok(Some(StepTimer { shape, device_start, host_start, first: None, host: Duration::ZERO }))
    }

    /// Records the times of a step that the device finished at `done`. `mean` gives the mean over all ranks: they all
    /// decide the same.
    pub(super) fn finish_timer(
        &mut self,
        timer: &StepTimer,
        done: &Event,
        mean: impl FnOnce([f64; 2]) -> Result<[f64; 2]>,
    ) -> Result<()> {
        let device = done.since(&timer.device_start)?;
        let times = mean([timer.host, device].map(|t| t.as_secs_f64()))?;
        let [host, device] = times.map(|t| Duration::try_from_secs_f64(t).unwrap_or_default());
        self.record_times(timer.shape, host, device);
        Ok(())
    }

    fn record_times(&mut self, shape: StepShape, host: Duration, device: Duration) {
        if self.shape == Some(shape) {
            let shortest = self.min_times.map_or((host, device), |(h, d)| (h.min(host), d.min(device)));
            self.min_times = Some(shortest);
        }
    }

    /// A capture failed: an error under `on`, eager steps from here on under `auto`.
    pub(super) fn capture_failed(&mut self, error: Error) -> Result<()> {
        if self.mode == CudaGraphMode::On {
            return Err(error);
        }
        self.disabled_reason = error.to_string().lines().next().map(String::from);
        Ok(())
    }

    /// Was the last step one whose launches depend on the data?
    fn is_irregular(&self) -> bool {
        self.eager_steps > 0 && self.shape.is_none()
    }

    /// Can one of the next steps of the same shape still decide?
    pub(super) fn is_open(&self) -> bool {
        !self.is_off()
            && !self.is_irregular()
            && (self.eager_steps < WARMUP_STEPS
                || (self.mode == CudaGraphMode::Auto && self.min_times.is_none()))
    }

    /// The decision so far.
    pub(super) fn decision(&self) -> CudaGraphDecision {
        let percent = |s: f64| format!("{:.0} %", s * 1e2);
        let (value, reason) = match (self.mode, &self.disabled_reason, self.launch_share()) {
            (CudaGraphMode::Off, ..) => (CudaGraphMode::Off, "the recipe says so".into()),
            (_, Some(why), _) => (CudaGraphMode::Off, why.clone()),
            _ if self.is_irregular() => {
                (CudaGraphMode::Off, "micro-batches differ in length or in their padding".into())
            }
            (CudaGraphMode::On, ..) => (CudaGraphMode::On, "the recipe says so".into()),
            (_, _, Some(s)) if s > MIN_LAUNCH_SHARE => {
                (CudaGraphMode::On, format!("launches took {} of the step time", percent(s)))
            }
            (_, _, Some(s)) => match self.long_launches() {
                Some(t) => {
                    (CudaGraphMode::On, format!("launches took {:.1} ms of a step", t.as_secs_f64() * 1e3))
                }
                None => (CudaGraphMode::Off, format!("launches took only {} of the step time", percent(s))),
            },
            _ => {
                let what =
                    "on if launches take more than a fifth of the first steps' time, or 3 ms on one rank";
                (CudaGraphMode::Auto, what.into())
            }
        };
        CudaGraphDecision { value, reason }
    }
}

#[cfg(test)]
mod tests;
