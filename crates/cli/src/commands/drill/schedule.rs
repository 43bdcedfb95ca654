//! Which faults a drill injects, and when.

use std::str::FromStr;

/// Time between two faults: uniform between both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Least.
    pub min: f64,
    /// Most.
    pub max: f64,
    /// In steps instead of seconds: the same faults on every machine.
    pub steps: bool,
}

impl FromStr for Interval {
    type Err = String;
    fn from_str(text: &str) -> Result<Interval, String> {
        let (numbers, steps) = match text.strip_suffix("steps") {
            Some(numbers) => (numbers, true),
            None => (text, false),
        };
        let number = |t: &str| t.trim().parse::<f64>().ok().filter(|x| *x > 0.0 && x.is_finite());
        let (min, max) = numbers.split_once("..").unwrap_or((numbers, numbers));
        match (number(min), number(max)) {
            (Some(min), Some(max)) if min <= max => Ok(Interval { min, max, steps }),
            _ => Err("expected seconds as MIN..MAX, such as 20..60, or steps, such as 10..30steps".into()),
        }
    }
}

/// Kinds of faults that leave the result unchanged when the run survives them, with their further keys.
const KINDS: [(&str, &str); 11] = [
    ("kill", ""),
    ("stop", ""),
    ("hang", ""),
    ("lose", ""),
    ("flip", ",target=gradient,bit=30"),
    ("flip", ",target=weight"),
    ("flip", ",target=activation"),
    ("nan", ""),
    ("slow", ",percent=50"),
    ("disk", ""),
    ("corrupt", ""),
];

/// The kinds that `asked` names, or all.
pub fn kinds(asked: &[String]) -> Result<Vec<(&'static str, &'static str)>, String> {
    let mut names = KINDS.map(|(name, _)| name).to_vec();
    names.dedup();
    if let Some(unknown) = asked.iter().find(|kind| !names.contains(&kind.as_str())) {
        return Err(format!("--faults {unknown}: expected some of {}", names.join(", ")));
    }
    let is_asked = |(name, _): &(&str, &str)| asked.is_empty() || asked.iter().any(|kind| kind == name);
    Ok(KINDS.into_iter().filter(is_asked).collect())
}

/// When faults come.
pub struct Schedule<'a> {
    pub kinds: &'a [(&'static str, &'static str)],
    pub every: Interval,
    pub ranks: u16,
    pub steps: u64,
    /// Steps after which a checkpoint is saved.
    pub saves: &'a [u64],
    pub step_seconds: f64,
    pub seed: u64,
}

impl Schedule<'_> {
    /// Entries of `fault.inject`: kinds in random order, none twice before all had their turn, on random ranks.
    pub fn faults(&self) -> Vec<String> {
        let mut random = Random(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let (mut time, mut out, mut left) = (0.0, Vec::new(), Vec::new());
        let step_time = if self.every.steps { 1.0 } else { self.step_seconds.max(1e-9) };
        loop {
            time += self.every.min + random.unit() * (self.every.max - self.every.min);
            let step = (time / step_time) as u64 + 1;
            // The last steps are left alone: a fault after them disturbs nothing.
            if step + 2 > self.steps || self.kinds.is_empty() {
                return out;
            }
            if left.is_empty() {
                left = self.kinds.to_vec();
            }
            let (kind, keys) = left.swap_remove(random.below(left.len() as u64) as usize);
            // A fault of a save is made good by the next one.
            let saves_left = self.saves.iter().filter(|save| **save >= step).count();
            if matches!(kind, "disk" | "corrupt") && saves_left < 2 {
                continue;
            }
            let rank = random.below(u64::from(self.ranks));
            out.push(format!("{kind}:rank={rank},step={step}{keys}"));
        }
    }
}

/// xorshift64*: a drill with a seed injects the same faults everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.unit() * n as f64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_follow_the_interval_and_take_turns() {
        let kinds = kinds(&[]).unwrap();
        let every: Interval = "20..60".parse().unwrap();
        let schedule = |seed| Schedule {
            kinds: &kinds,
            every,
            ranks: 4,
            steps: 10_000,
            saves: &[9_999, 10_000],
            step_seconds: 0.5,
            seed,
        };
        let faults = schedule(3).faults();
        assert_eq!(faults, schedule(3).faults());
        assert_ne!(faults, schedule(4).faults());
        // 5,000 s with a fault every 40 s on average.
        assert!((100..150).contains(&faults.len()), "{}", faults.len());
        let first: std::collections::BTreeSet<&str> =
            faults[..kinds.len()].iter().filter_map(|f| f.split(':').next()).collect();
        assert_eq!(first.len(), 9, "{faults:?}");
        let flips = faults[..kinds.len()].iter().filter(|f| f.starts_with("flip")).count();
        assert_eq!((kinds.len(), flips), (11, 3), "{faults:?}");
        let steps: Vec<u64> = faults
            .iter()
            .map(|f| f.split("step=").nth(1).unwrap().split(',').next().unwrap().parse().unwrap())
            .collect();
        assert!(steps.windows(2).all(|w| (39..=121).contains(&(w[1] - w[0]))), "{steps:?}");
        let every = "10..10steps".parse().unwrap();
        let by_step = Schedule { every, steps: 40, ..schedule(1) }.faults();
        assert!(by_step[0].contains("step=11") && by_step[1].contains("step=21"), "{by_step:?}");
        assert!("60..20".parse::<Interval>().is_err() && "x".parse::<Interval>().is_err());
        assert!(super::kinds(&["fire".into()]).unwrap_err().contains("kill, stop"));
    }
}
