//! What updates optimizer state in host memory: the device, through which it streams, or the CPU.
//!
//! `offload.optimizer_compute = "auto"` runs two steps with each on a GPU and times the stages of a chunk in the second. Stages
//! overlap, so the slowest gives an executor's rate, and the executor with the higher rate stays. Bits do not depend on it.

use crate::Result;
use crate::config::OptimizerCompute;
use ferrotron_engine::Rank;
use ferrotron_tensor::{DeviceKind, Event, Stream};
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Steps with each executor before one is chosen; the last of them is timed.
const TRIAL_STEPS: u64 = 2;

/// What updates state in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Executor {
    /// The device: state streams through it.
    Device,
    /// The CPU, in place.
    Cpu,
}

/// The choice between them.
pub(super) struct ExecutorChoice {
    /// Those that may be chosen.
    wanted: OptimizerCompute,
    trial: Mutex<Trial>,
}

/// Trial of both executors.
#[derive(Default)]
struct Trial {
    /// Steps begun.
    steps: u64,
    /// Of each executor and stage, the largest chunk.
    stages: Vec<StageTime>,
    chosen: Option<Executor>,
}

impl Trial {
    /// Whether the current step is timed.
    fn is_timed(&self) -> bool {
        self.chosen.is_none() && self.steps > 0 && self.steps.is_multiple_of(TRIAL_STEPS)
    }
}

/// Begin and end of a stage of a chunk.
struct StageTime {
    executor: Executor,
    stage: Stage,
    begin: Event,
    end: Event,
}

/// A stage of an executor's work on a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stage {
    pub(super) name: &'static str,
    /// Elements of the chunk.
    pub(super) elements: usize,
    /// Bytes over the link; 0 for computation.
    pub(super) bytes: usize,
}

impl ExecutorChoice {
    /// There is nothing to measure on the CPU device: copies there are not those of a link.
    pub(super) fn new(rank: &Rank, wanted: OptimizerCompute) -> ExecutorChoice {
        let wanted = match (wanted, rank.device().kind()) {
            (OptimizerCompute::Auto, DeviceKind::Cpu) => OptimizerCompute::Device,
            (wanted, _) => wanted,
        };
        ExecutorChoice { wanted, trial: Mutex::default() }
    }

    /// Measures on any device.
    #[cfg(test)]
    pub(super) fn trial() -> ExecutorChoice {
        ExecutorChoice { wanted: OptimizerCompute::Auto, trial: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Trial> {
        self.trial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an executor may be chosen.
    pub(super) fn may_be(&self, executor: Executor) -> bool {
        match self.wanted {
            OptimizerCompute::Auto => true,
            OptimizerCompute::Device => executor == Executor::Device,
            OptimizerCompute::Cpu => executor == Executor::Cpu,
        }
    }

    /// The executor of a step, and whether it was chosen just now. A step that is skipped, in which the CPU has nothing to do,
    /// is not timed; `is_skipped` says whether this one is.
    pub(super) fn of_step(&self, is_skipped: impl FnOnce() -> Result<bool>) -> Result<(Executor, bool)> {
        let fixed = match self.wanted {
            OptimizerCompute::Auto => self.lock().chosen,
            OptimizerCompute::Device => Some(Executor::Device),
            OptimizerCompute::Cpu => Some(Executor::Cpu),
        };
        if let Some(executor) = fixed {
            return Ok((executor, false));
        }
        let mut trial = self.lock();
        let step = trial.steps + 1;
        if step <= 2 * TRIAL_STEPS {
            if !step.is_multiple_of(TRIAL_STEPS) || !is_skipped()? {
                trial.steps = step;
            }
            let first = step <= TRIAL_STEPS;
            return Ok((if first { Executor::Device } else { Executor::Cpu }, false));
        }
        let mut times = Vec::new();
        for t in std::mem::take(&mut trial.stages) {
            times.push((t.executor, t.stage, t.end.since(&t.begin)?.as_secs_f64()));
        }
        let (chosen, line) = choose(&times);
        tracing::info!("{line}");
        trial.chosen = Some(chosen);
        Ok((chosen, true))
    }

    /// The begin of a stage on `stream`, if it is timed.
    pub(super) fn begin(&self, stream: &Stream) -> Result<Option<Event>> {
        let timed = self.wanted == OptimizerCompute::Auto && self.lock().is_timed();
        Ok(timed.then(|| stream.record()).transpose()?)
    }

    /// The end of a stage on `stream` that began at `begin`.
    pub(super) fn end(
        &self,
        (executor, stage): (Executor, Stage),
        begin: Option<Event>,
        stream: &Stream,
    ) -> Result<()> {
        let Some(begin) = begin else { return Ok(()) };
        let mut trial = self.lock();
        let same = |t: &StageTime| t.executor == executor && t.stage.name == stage.name;
        if trial.stages.iter().any(|t| same(t) && t.stage.elements > stage.elements) {
            return Ok(());
        }
        trial.stages.retain(|t| !same(t));
        trial.stages.push(StageTime { executor, stage, begin, end: stream.record()? });
        Ok(())
    }
}

/// The executor whose slowest stage handles more elements in a second, and a line that says why. Without times of the CPU
/// (the device alone updates FP8 weights), the device.
fn choose(times: &[(Executor, Stage, f64)]) -> (Executor, String) {
    let rate = |executor: Executor| {
        let stages = times.iter().filter(|t| t.0 == executor);
        stages.map(|(_, stage, seconds)| stage.elements as f64 / seconds.max(1e-9)).reduce(f64::min)
    };
    let mut line = "optimizer state in host memory".to_string();
    for (executor, name) in [(Executor::Device, "device"), (Executor::Cpu, "CPU")] {
        let Some(rate) = rate(executor) else { continue };
        let _ = write!(line, "; {name} {:.2} G elements/s", rate / 1e9);
        for (_, stage, seconds) in times.iter().filter(|t| t.0 == executor) {
            let (amount, unit) =
                if stage.bytes > 0 { (stage.bytes, "GB") } else { (stage.elements, "G elements") };
            let _ = write!(line, ", {} {:.2} {unit}/s", stage.name, amount as f64 / seconds.max(1e-9) / 1e9);
        }
    }
    let faster =
        rate(Executor::Cpu).is_some_and(|cpu| rate(Executor::Device).is_none_or(|device| cpu > device));
    let (chosen, name) = if faster { (Executor::Cpu, "cpu") } else { (Executor::Device, "device") };
    (chosen, format!("{line}: offload.optimizer_compute = \"{name}\" from now on"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &'static str, bytes: usize) -> Stage {
        Stage { name, elements: 1_000_000_000, bytes }
    }

    #[test]
    fn the_slowest_stage_decides() {
        let device = |seconds| {
            [
                (Executor::Device, stage("in", 8_000_000_000), seconds),
                (Executor::Device, stage("out", 8_000_000_000), 0.1),
            ]
        };
        let cpu = [
            (Executor::Cpu, stage("gradients", 4_000_000_000), 0.08),
            (Executor::Cpu, stage("update", 0), 0.5),
            (Executor::Cpu, stage("weights", 2_000_000_000), 0.04),
        ];
        let all = |seconds| [&device(seconds)[..], &cpu[..]].concat();
        let (chosen, line) = choose(&all(0.2));
        assert_eq!(chosen, Executor::Device, "{line}");
        assert_eq!(
            line,
            "optimizer state in host memory; device 5.00 G elements/s, in 40.00 GB/s, out 80.00 GB/s; \
             CPU 2.00 G elements/s, gradients 50.00 GB/s, update 2.00 G elements/s, weights 50.00 GB/s: \
             offload.optimizer_compute = \"device\" from now on"
        );
        assert_eq!(choose(&all(0.6)).0, Executor::Cpu);
        // Nothing that the CPU may update, or nothing at all.
        assert_eq!(choose(&device(0.6)).0, Executor::Device);
        assert_eq!(choose(&[]).0, Executor::Device);
    }
}
