//! Timeouts learned from the run.
//!
//! `--timeout` must allow for the slowest thing a run ever does: the first step, which compiles kernels and chooses GEMM
//! algorithms, or a save to a slow file system. A rank that hangs in an ordinary step would be waited for as long. So each
//! section of the loop learns its own: ten times the longest that it took so far, at least `fault.min_timeout` seconds (five
//! times that for saves) and at most `--timeout`, once it was seen often enough.

use std::time::{Duration, Instant};

/// Times the longest seen.
const FACTOR: u32 = 10;

/// What happens between the ends of two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    /// A step alone.
    Step,
    /// An evaluation, and the step after it.
    Evaluation,
    /// A save, and the step after it: a rank that still writes is waited for there.
    Save,
}

impl Section {
    /// How often a section is seen before its longest time counts.
    fn enough(self) -> u32 {
        if self == Section::Step { 16 } else { 3 }
    }

    /// Least timeout, in units of `fault.min_timeout`: file systems are slow at times.
    fn least(self) -> u32 {
        if self == Section::Save { 5 } else { 1 }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    longest: Duration,
    count: u32,
}

/// How long a rank waits for others in each section.
#[derive(Debug)]
pub(crate) struct Timeouts {
    /// `fault.min_timeout`; none if nothing is learned.
    least: Option<Duration>,
    seen: [Seen; 3],
    section: Section,
    /// The end of the last step; none before the first, which takes longer than any other.
    since: Option<Instant>,
}

impl Timeouts {
    /// With `fault.min_timeout` seconds; 0 learns nothing.
    pub(crate) fn new(min_timeout: f64) -> Timeouts {
        let least = Duration::try_from_secs_f64(min_timeout).ok().filter(|d| !d.is_zero());
        Timeouts { least, seen: Default::default(), section: Section::Step, since: None }
    }

    /// An evaluation or a save begins. Returns its timeout; none is the job's.
    pub(crate) fn enter(&mut self, section: Section) -> Option<Duration> {
        self.section = section;
        self.of(section)
    }

    /// A step has ended at `now`. Returns the timeout of the next; none is the job's.
    pub(crate) fn step_ended(&mut self, now: Instant) -> Option<Duration> {
        if let Some(since) = self.since {
            let seen = &mut self.seen[self.section as usize];
            seen.longest = seen.longest.max(now.saturating_duration_since(since));
            seen.count = seen.count.saturating_add(1);
        }
        self.since = Some(now);
        self.section = Section::Step;
        self.of(Section::Step)
    }

    fn of(&self, section: Section) -> Option<Duration> {
        let Seen { longest, count } = self.seen[section as usize];
        let least = self.least.filter(|_| count >= section.enough())?;
        Some((least * section.least()).max(longest.saturating_mul(FACTOR)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_section_learns_from_its_own_times() {
        let mut timeouts = Timeouts::new(5.0);
        let second = Duration::from_secs(1);
        let mut now = Instant::now();
        // The first step is long and does not count; the next 16 take a second each.
        for i in 0..=16 {
            now += if i == 0 { 100 * second } else { second };
            assert_eq!(timeouts.step_ended(now), (i == 16).then_some(10 * second), "step {i}");
        }
        for i in 0..4 {
            assert_eq!(timeouts.enter(Section::Save), (i == 3).then_some(300 * second), "save {i}");
            now += 30 * second;
            assert_eq!(timeouts.step_ended(now), Some(10 * second));
        }
        assert_eq!(timeouts.enter(Section::Evaluation), None);
    }

    #[test]
    fn short_steps_have_the_least_and_zero_learns_nothing() {
        let (mut five, mut none) = (Timeouts::new(5.0), Timeouts::new(0.0));
        let mut now = Instant::now();
        for _ in 0..40 {
            now += Duration::from_millis(10);
            five.step_ended(now);
            assert_eq!(none.step_ended(now), None);
        }
        assert_eq!(five.step_ended(now), Some(Duration::from_secs(5)));
    }
}
