//! Energy that the GPUs of a run use in training steps, without evaluations and checkpoints.

use super::StepMetrics;
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_kernels::cuda::NvmlDevice;
use serde_json::{Value, json};

/// Reads a GPU's energy counter in millijoules; none where it cannot be read.
type Source = Box<dyn FnMut() -> Option<u64> + Send>;

/// An energy meter that can be paused.
pub(super) struct Meter {
    source: Source,
    /// The counter's value at the last resume; none while paused.
    since: Option<u64>,
    /// Millijoules of the lap so far.
    lap: u64,
    /// A read failed, so the lap is incomplete.
    incomplete: bool,
}

impl Meter {
    /// A running meter.
    pub(super) fn new(source: Source) -> Meter {
        let mut meter = Meter { source, since: None, lap: 0, incomplete: false };
        meter.resume();
        meter
    }

    /// Pauses; does nothing if already paused.
    pub(super) fn pause(&mut self) {
        let Some(since) = self.since.take() else { return };
        match (self.source)() {
            // A reloaded driver counts from zero again.
            Some(now) => self.lap += now.saturating_sub(since),
            None => self.incomplete = true,
        }
    }

    /// Resumes; does nothing if already running.
    pub(super) fn resume(&mut self) {
        if self.since.is_none() {
            self.since = (self.source)();
            self.incomplete |= self.since.is_none();
        }
    }

    /// Millijoules since the last lap, and starts the next; none if a read failed during the lap.
    pub(super) fn lap(&mut self) -> Option<i64> {
        let running = self.since.is_some() || self.incomplete;
        self.pause();
        let lap = (!self.incomplete).then_some(i64::try_from(self.lap).unwrap_or(i64::MAX));
        (self.lap, self.incomplete) = (0, false);
        if running {
            self.resume();
        }
        lap
    }
}

/// Energy of all GPUs of a run.
pub(super) struct Energy {
    meter: Meter,
    /// Another rank on the same GPU reads its counter.
    other_counts: bool,
    steps: u64,
    tokens: u64,
    seconds: f64,
}

impl Energy {
    /// Opens the energy counter of this rank's GPU. Collective over the world.
    pub(super) fn new(rank: &Rank) -> Result<Energy> {
        let counter = NvmlDevice::open(rank.device()).filter(|gpu| gpu.millijoules().is_some());
        let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let card = counter.as_ref().map(|c| format!("{machine}{}", c.bus_id())).unwrap_or_default();
        let all = rank.world.all().all_gather_bytes(card.as_bytes(), "GPUs of all ranks")?;
        let first = all.iter().position(|c| c == card.as_bytes());
        let other_counts = !card.is_empty() && first.is_some_and(|i| i < rank.world.rank());
        let source: Source = Box::new(move || counter.as_ref()?.millijoules());
        Ok(Energy { meter: Meter::new(source), other_counts, steps: 0, tokens: 0, seconds: 0.0 })
    }

    pub(super) fn pause(&mut self) {
        self.meter.pause();
    }

    pub(super) fn resume(&mut self) {
        self.meter.resume();
    }

    /// Counts a step.
    pub(super) fn step(&mut self, tokens: u64, seconds: f64) {
        self.steps += 1;
        self.tokens += tokens;
        self.seconds += seconds;
    }

    /// Energy per step and per token and mean power since the last report, of all GPUs together. Collective over the
    /// world.
    pub(super) fn report(&mut self, rank: &Rank) -> Result<StepMetrics> {
        let mine = self.meter.lap();
        // A GPU that another rank reads counts once.
        let mine = if self.other_counts { Some(0) } else { mine };
        let broken = |e: serde_json::Error| Error::Invalid(format!("energy of other ranks: {e}"));
        let mut sum = Some(0i64);
        let text = serde_json::to_vec(&mine).map_err(broken)?;
        for told in rank.world.all().all_gather_bytes(&text, "energy of the steps")? {
            let told: Option<i64> = serde_json::from_slice(&told).map_err(broken)?;
            sum = sum.zip(told).map(|(a, b)| a.saturating_add(b));
        }
        let joules = sum.map(|mj| mj as f64 / 1e3);
        let over = |by: f64| joules.filter(|_| by > 0.0).map_or(Value::Null, |j| json!(j / by));
        let named = [
            ("energy_j", over(self.steps as f64)),
            ("energy_j_per_token", over(self.tokens as f64)),
            ("power_w", over(self.seconds)),
        ];
        (self.steps, self.tokens, self.seconds) = (0, 0, 0.0);
        Ok(named.map(|(name, x)| (name.to_string(), x)).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A meter whose counter returns these values in turn.
    fn scripted(said: &[Option<u64>]) -> Meter {
        let said: Vec<_> = said.to_vec();
        let mut said = said.into_iter();
        Meter::new(Box::new(move || said.next().expect("asked too often")))
    }

    #[test]
    fn laps_leave_out_pauses() {
        let mut m = scripted(&[Some(100), Some(150), Some(150), Some(160), Some(900), Some(905), Some(905)]);
        assert_eq!(m.lap(), Some(50));
        // Ten until an evaluation begins, five after it has ended; 740 in between belong to no step.
        m.pause();
        m.pause();
        m.resume();
        m.resume();
        assert_eq!(m.lap(), Some(15));
    }

    #[test]
    fn a_lap_in_a_pause_ends_there_and_the_next_begins_with_resume() {
        let mut m = scripted(&[Some(10), Some(20), Some(50), Some(57), Some(57)]);
        m.pause();
        assert_eq!(m.lap(), Some(10));
        assert_eq!(m.lap(), Some(0));
        m.resume();
        assert_eq!(m.lap(), Some(7));
    }

    #[test]
    fn a_failed_read_gives_no_number_for_its_lap() {
        let mut never = Meter::new(Box::new(|| None));
        assert_eq!((never.lap(), never.lap()), (None, None));
        // Reads fail at the end of the first lap and the start of the second; the third is complete.
        let mut m = scripted(&[Some(10), None, None, Some(40), Some(70), Some(70)]);
        assert_eq!(m.lap(), None);
        assert_eq!(m.lap(), None);
        assert_eq!(m.lap(), Some(30));
        // A counter that starts anew is not a negative energy.
        let mut m = scripted(&[Some(1000), Some(3), Some(3), Some(8), Some(8)]);
        assert_eq!((m.lap(), m.lap()), (Some(0), Some(5)));
    }

    #[test]
    fn without_gpus_there_is_no_number() {
        let rank = Rank::cpu(1, 1).unwrap();
        let mut e = Energy::new(&rank).unwrap();
        e.step(10, 1.0);
        let n = e.report(&rank).unwrap();
        let names: Vec<&str> = n.keys().map(String::as_str).collect();
        assert_eq!(names, ["energy_j", "energy_j_per_token", "power_w"]);
        assert!(n.values().all(Value::is_null));
    }
}
