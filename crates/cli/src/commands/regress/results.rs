//! Results of cases: recorded in a TOML file, compared with those of another day.

use super::cases::Tolerance;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Bytes by which the resident memory of a healthy run may grow from one step to the next, in the median.
pub const GROWTH_LIMIT: f64 = (256 << 10) as f64;

/// Relative tolerance of the number of zero gradients: rows of the embedding that no token used, and of experts, where a routing
/// decision may flip.
const ZEROS: f64 = 0.02;

/// How much more than the mean of all kernels the time of one may rise.
const ONE_KERNEL: f64 = 4.0;

/// Results that were recorded on one device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// The device. Times are compared only on the same one; on a GPU nothing is compared on another one.
    pub device: String,
    /// By case.
    pub case: BTreeMap<String, Results>,
}

/// Results of one case.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Results {
    /// Values of every step by metric: `loss`, `grad_norm`, `lr`, `num_zeros`, other losses.
    pub steps: BTreeMap<String, Vec<f64>>,
    /// Peak bytes of tensors so far after every step, or after all steps where there is one.
    pub memory: Vec<u64>,
    /// Median growth of resident memory from step to step, in bytes; not recorded.
    #[serde(skip)]
    pub growth: f64,
    /// Median time of a step or a kernel, by name: multiples of a plain matrix product on the CPU, milliseconds on a GPU.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub time: BTreeMap<String, f64>,
}

/// Where results leave what was recorded: the first step of a metric.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The metric.
    pub metric: String,
    /// The first step that differs; none of a time.
    pub step: Option<usize>,
    /// What it is now.
    pub found: f64,
    /// What was recorded.
    pub recorded: f64,
    /// The relative difference that is allowed.
    pub allowed: f64,
}

impl Recorded {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Recorded> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text)
            .with_context(|| format!("{} is no record of `regress --record`", path.display()))
    }

    /// Writes a file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = format!("# Written by `ferrotron regress --record`.\n{}", toml::to_string(self)?);
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Results {
    /// As recorded: values with seven digits, times with four, memory only where it changes.
    pub fn rounded(&self) -> Results {
        let digits = |x: f64, n: usize| format!("{x:.n$e}").parse().unwrap_or(x);
        let steps = self.steps.iter();
        let steps = steps.map(|(k, v)| (k.clone(), v.iter().map(|x| digits(*x, 6)).collect())).collect();
        let time = self.time.iter().map(|(k, x)| (k.clone(), digits(*x, 3))).collect();
        Results { steps, time, memory: self.memory.last().copied().into_iter().collect(), ..*self }
    }

    /// Where these leave `recorded`, the earliest step first.
    pub fn differences(&self, recorded: &Results, tolerance: &Tolerance) -> Vec<Difference> {
        let mut out = Vec::new();
        for (metric, wanted) in &recorded.steps {
            let allowed = match metric.as_str() {
                "grad_norm" => tolerance.grad_norm,
                "lr" => 1e-6,
                "num_zeros" => ZEROS,
                _ => tolerance.loss,
            };
            let ours = self.steps.get(metric).map_or(&[][..], Vec::as_slice);
            let pairs = (0..wanted.len().max(ours.len())).map(|i| {
                (ours.get(i).copied().unwrap_or(f64::NAN), wanted.get(i).copied().unwrap_or(f64::NAN))
            });
            out.extend(first(metric, pairs, allowed));
        }
        if let [.., peak] = recorded.memory[..] {
            let last = self.memory.len().saturating_sub(1);
            // Peaks so far: before the last step they may be lower.
            let reached = self.memory.iter().enumerate();
            let reached = reached.map(|(i, m)| (if i < last { (*m).max(peak) } else { *m }) as f64);
            out.extend(first("memory", reached.map(|m| (m, peak as f64)), tolerance.memory));
        }
        if self.growth > GROWTH_LIMIT {
            let (metric, found) = ("resident memory per step".into(), self.growth);
            out.push(Difference { metric, step: None, found, recorded: 0.0, allowed: GROWTH_LIMIT });
        }
        out.extend(self.slower(recorded, tolerance));
        out.sort_by_key(|d| d.step.unwrap_or(usize::MAX));
        out
    }

    /// The geometric mean of times over the recorded ones; none where no time is in both.
    pub fn relative_time(&self, recorded: &Results) -> Option<f64> {
        let ratio = |(name, t): (&String, &f64)| recorded.time.get(name).map(|r| (t / r).ln());
        let all: Vec<f64> = self.time.iter().filter_map(ratio).collect();
        (!all.is_empty()).then(|| (all.iter().sum::<f64>() / all.len() as f64).exp())
    }

    /// Times over their limit: of a step; of all kernels in the mean, which scatters less than one of them, and of each.
    fn slower(&self, recorded: &Results, tolerance: &Tolerance) -> Vec<Difference> {
        let is_step = recorded.time.contains_key("step");
        let (name, allowed) = match is_step {
            true => ("time of a step", tolerance.step_time),
            false => ("time of all kernels, mean", tolerance.kernel_time),
        };
        let over = |metric: &str, found: f64, recorded: f64, allowed: f64| {
            let slow = found > recorded * (1.0 + allowed);
            slow.then(|| Difference { metric: metric.into(), step: None, found, recorded, allowed })
        };
        let mean = self.relative_time(recorded).and_then(|ratio| over(name, ratio, 1.0, allowed));
        let each = recorded.time.iter().filter(|_| !is_step).filter_map(|(kernel, wanted)| {
            over(&format!("time of {kernel}"), *self.time.get(kernel)?, *wanted, ONE_KERNEL * allowed)
        });
        mean.into_iter().chain(each).collect()
    }
}

/// The first step at which a metric differs; NaN, and a step that only one of them has, differ.
fn first(metric: &str, pairs: impl Iterator<Item = (f64, f64)>, allowed: f64) -> Option<Difference> {
    let same = |a: f64, b: f64| (a - b).abs() <= allowed * b.abs();
    let differs = |(_, (a, b)): &(usize, (f64, f64))| !same(*a, *b);
    let (i, (found, recorded)) = pairs.enumerate().find(differs)?;
    Some(Difference { metric: metric.into(), step: Some(i + 1), found, recorded, allowed })
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Difference { metric, step, found, recorded, allowed } = self;
        if *recorded == 0.0 && step.is_none() {
            let [found, allowed] = [*found, *allowed].map(|b| ferrotron_tensor::format_bytes(b as usize));
            return write!(f, "{metric} grows by {found}, where {allowed} is allowed");
        }
        if let Some(step) = step {
            write!(f, "step {step}: ")?;
        }
        let apart = found / recorded - 1.0;
        write!(f, "{metric} {found} instead of {recorded} ({apart:+.1e}, allowed {allowed:.0e})")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TOLERANCE: Tolerance =
        Tolerance { loss: 1e-4, grad_norm: 1e-3, memory: 0.02, step_time: 0.25, kernel_time: 0.05 };

    fn results() -> Results {
        let steps = [("loss", vec![5.5, 5.25, 5.0]), ("grad_norm", vec![2.0, 1.5, 1.25])];
        Results {
            steps: steps.map(|(name, values)| (name.to_string(), values)).into(),
            memory: vec![900, 1000, 1000],
            growth: 1000.0,
            time: [("step".to_string(), 10.0)].into(),
        }
    }

    fn differences(change: impl Fn(&mut Results)) -> Vec<(String, Option<usize>)> {
        let mut now = results();
        change(&mut now);
        let all = now.differences(&results().rounded(), &TOLERANCE);
        all.into_iter().map(|d| (d.metric, d.step)).collect()
    }

    #[test]
    fn the_first_step_of_every_metric_that_differs_is_named() {
        assert!(differences(|_| ()).is_empty());
        fn loss(now: &mut Results) -> &mut Vec<f64> {
            now.steps.get_mut("loss").unwrap()
        }
        assert!(differences(|now| loss(now)[1] *= 1.00009).is_empty());
        assert_eq!(differences(|now| loss(now)[1] *= 1.0002), [("loss".into(), Some(2))]);
        assert_eq!(differences(|now| loss(now)[2] = f64::NAN), [("loss".into(), Some(3))]);
        assert_eq!(differences(|now| loss(now).truncate(2)), [("loss".into(), Some(3))]);
        assert_eq!(differences(|now| loss(now).push(1.0)), [("loss".into(), Some(4))]);
        let both = differences(|now| {
            loss(now)[2] = 1.0;
            now.steps.get_mut("grad_norm").unwrap()[0] = 4.0;
        });
        assert_eq!(both, [("grad_norm".into(), Some(1)), ("loss".into(), Some(3))]);
        assert_eq!(differences(|now| now.steps.clear()).len(), 2, "a metric that is gone");
    }

    #[test]
    fn memory_and_time_have_their_limits() {
        assert_eq!(differences(|now| now.memory[1] = 1030), [("memory".into(), Some(2))]);
        assert_eq!(
            differences(|now| now.memory[2] = 970),
            [("memory".into(), Some(3))],
            "less is a change, too"
        );
        assert!(differences(|now| now.memory[0] = 10).is_empty(), "the peak is reached later");
        assert_eq!(differences(|now| now.growth = 1e6), [("resident memory per step".into(), None)]);
        let time =
            |name: &'static str, x: f64| differences(move |now| now.time.extend([(name.to_string(), x)]));
        assert!(time("step", 12.0).is_empty());
        assert_eq!(time("step", 13.0), [("time of a step".into(), None)]);
        assert!(differences(|now| now.time.clear()).is_empty(), "not measured");
        let kernels = |times: [f64; 3]| Results {
            time: ["gemm.a", "gemm.b", "gemm.c"].map(String::from).into_iter().zip(times).collect(),
            ..Results::default()
        };
        let slower = |times| {
            let all = kernels(times).differences(&kernels([1.0, 2.0, 4.0]), &TOLERANCE);
            all.into_iter().map(|d| d.metric).collect::<Vec<_>>()
        };
        assert!(slower([1.1, 2.0, 4.0]).is_empty(), "one of them scatters");
        assert_eq!(slower([1.1, 2.2, 4.4]), ["time of all kernels, mean"]);
        assert_eq!(slower([1.0, 2.6, 3.3]), ["time of gemm.b"]);
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let recorded =
            Recorded { device: "CPU".into(), case: [("dense".into(), results().rounded())].into() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.toml");
        recorded.write(&path).unwrap();
        let back = Recorded::read(&path).unwrap();
        assert_eq!(back.case["dense"].steps, recorded.case["dense"].steps);
        assert_eq!(back.case["dense"].memory, [1000]);
        std::fs::write(&path, "device = 3").unwrap();
        assert!(Recorded::read(&path).unwrap_err().to_string().contains("regress --record"));
    }
}
