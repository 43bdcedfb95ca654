//! Weighted blends of datasets.

use std::path::Path;

use super::split::normalize;
use super::{Batches, GptConfig, GptDataset, Row};
use crate::{Error, Result};

/// Members are asked for this fraction more than their share, so that rounding never exhausts one.
pub const SURPLUS: f64 = 0.005;

/// For each blended sample, its member dataset and the sample within that dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlendIndex {
    /// Index of the member.
    pub member: Vec<u16>,
    /// Sample of that member.
    pub sample: Vec<u64>,
}

impl BlendIndex {
    /// `size` samples in proportion to `weights`, which sum to 1. Sample i goes to the member that lags most: argmax
    /// of wⱼ·max(i, 1) − countⱼ, the first one on a tie.
    pub fn weighted(weights: &[f64], size: u64) -> Result<Self> {
        Self::fill(weights, size, |_, _| true)
    }

    /// Every sample of every member once, in proportion to their sizes.
    pub fn exhaustive(sizes: &[u64]) -> Result<Self> {
        let total = sizes.iter().try_fold(0u64, |t, &s| t.checked_add(s));
        let total = total.filter(|&t| t > 0).ok_or_else(|| Error::Invalid("a blend of no samples".into()))?;
        let weights: Vec<f64> = sizes.iter().map(|&s| s as f64 / total as f64).collect();
        Self::fill(&weights, total, |member, count| count < sizes[member])
    }

    fn fill(weights: &[f64], size: u64, open: impl Fn(usize, u64) -> bool) -> Result<Self> {
        if weights.is_empty() || weights.len() > i16::MAX as usize {
            return Err(Error::Invalid(format!("a blend has 1 to 32767 members, not {}", weights.len())));
        }
        let mut it = Self::default();
        if it.member.try_reserve_exact(size as usize).is_err()
            || it.sample.try_reserve_exact(size as usize).is_err()
        {
            return Err(Error::Invalid(format!("a blend of {size} samples does not fit in memory")));
        }
        let mut counts = vec![0u64; weights.len()];
        for i in 0..size {
            let i = (i as f64).max(1.0);
            let mut best = (f64::MIN, 0);
            for (j, (&w, &count)) in weights.iter().zip(&counts).enumerate() {
                let behind = w * i - count as f64;
                if behind > best.0 && open(j, count) {
                    best = (behind, j);
                }
            }
            it.member.push(best.1 as u16);
            it.sample.push(counts[best.1]);
            counts[best.1] += 1;
        }
        Ok(it)
    }
}

/// Samples to request of each member so that `target` can be blended: ⌈⌈target·w⌉·(1 + surplus)⌉.
pub fn member_samples(weights: &[f64], target: u64, surplus: f64) -> Vec<u64> {
    weights.iter().map(|w| ((target as f64 * w).ceil() * (1.0 + surplus)).ceil() as u64).collect()
}

/// Fails unless there are members and all have the same sequence length.
fn same_seq(members: &[Box<dyn Batches>]) -> Result<()> {
    let Some(first) = members.first() else { return Err(Error::Invalid("a blend without members".into())) };
    match members.iter().find(|m| m.seq() != first.seq()) {
        Some(m) => Err(Error::Invalid(format!(
            "members of a blend have sequences of {} and {} tokens; give all the same",
            first.seq(),
            m.seq()
        ))),
        None => Ok(()),
    }
}

/// Several sources mixed by an index.
pub struct Blend {
    members: Vec<Box<dyn Batches>>,
    index: BlendIndex,
}

impl Blend {
    /// `size` samples in proportion to `weights`, which are normalized here.
    pub fn weighted(members: Vec<Box<dyn Batches>>, weights: &[f64], size: u64) -> Result<Self> {
        same_seq(&members)?;
        if weights.len() != members.len() || size == 0 {
            return Err(Error::Invalid(format!(
                "a blend of {size} samples from {} members with {} weights",
                members.len(),
                weights.len()
            )));
        }
        let index = BlendIndex::weighted(&normalize(weights)?, size)?;
        Ok(Self { members, index })
    }

    /// Every sample of every member once.
    pub fn exhaustive(members: Vec<Box<dyn Batches>>) -> Result<Self> {
        same_seq(&members)?;
        let sizes: Vec<u64> = members.iter().map(|m| m.samples()).collect();
        let index = BlendIndex::exhaustive(&sizes)?;
        Ok(Self { members, index })
    }

    /// Blends the splits of several `.bin/.idx` prefixes. With weights, each split needs a sample count and is
    /// blended to it (slightly more, since members round up), of members that are asked for the fraction `surplus` more than
    /// their share, mostly [`SURPLUS`]. Without, each member provides one epoch: all of it or, with a count, at most that many
    /// samples in proportion to sizes.
    pub fn gpt(
        prefixes: &[impl AsRef<Path>],
        weights: Option<&[f64]>,
        shares: &[f64; 3],
        samples: [Option<u64>; 3],
        surplus: f64,
        config: &GptConfig,
    ) -> Result<[Option<Self>; 3]> {
        let weights = weights.map(normalize).transpose()?;
        if weights.as_ref().is_some_and(|w| w.len() != prefixes.len()) {
            return Err(Error::Invalid(format!("{} datasets need as many weights", prefixes.len())));
        }
        let mut members: [Vec<Box<dyn Batches>>; 3] = Default::default();
        for (m, prefix) in prefixes.iter().enumerate() {
            // A single dataset without weights is repeated as needed, like an unblended one.
            let mut wanted = if prefixes.len() == 1 { samples } else { [None; 3] };
            if let Some(w) = &weights {
                for (wanted, target) in wanted.iter_mut().zip(samples) {
                    *wanted = target.map(|t| member_samples(&w[m..=m], t, surplus)[0]);
                }
            }
            let splits = GptDataset::splits(prefix, shares, wanted, config)?;
            for (members, split) in members.iter_mut().zip(splits) {
                members.extend(split.map(|s| Box::new(s) as Box<dyn Batches>));
            }
        }
        let mut out = [None, None, None];
        for (k, members) in members.into_iter().enumerate() {
            if members.is_empty() || samples[k] == Some(0) {
                continue;
            }
            out[k] = Some(match (&weights, samples[k]) {
                (Some(w), Some(target)) => {
                    let size = member_samples(w, target, 0.0).iter().sum();
                    Self::weighted(members, w, size)?
                }
                (Some(_), None) => {
                    return Err(Error::Invalid("a weighted blend needs the number of samples".into()));
                }
                (None, Some(target)) if members.len() > 1 => {
                    let sizes: Vec<f64> = members.iter().map(|m| m.samples() as f64).collect();
                    let size = target.min(sizes.iter().sum::<f64>() as u64);
                    Self::weighted(members, &sizes, size)?
                }
                (None, _) => Self::exhaustive(members)?,
            });
        }
        Ok(out)
    }

    /// The member and sample of each blended sample.
    pub fn index(&self) -> &BlendIndex {
        &self.index
    }

    /// The member sources.
    pub fn members(&self) -> &[Box<dyn Batches>] {
        &self.members
    }
}

impl Batches for Blend {
    fn seq(&self) -> usize {
        self.members[0].seq()
    }

    fn samples(&self) -> u64 {
        self.index.member.len() as u64
    }

    fn resets(&self) -> bool {
        self.members.iter().any(|m| m.resets())
    }

    fn length(&self, n: u64) -> Result<Option<usize>> {
        let k = (n % self.samples()) as usize;
        self.members[usize::from(self.index.member[k])].length(self.index.sample[k])
    }

    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let k = (n % self.samples()) as usize;
        self.members[usize::from(self.index.member[k])].row(self.index.sample[k], row)
    }
}

/// Sources in turns: sample n is sample n / k of source n mod k.
pub struct Interleave {
    members: Vec<Box<dyn Batches>>,
}

impl Interleave {
    /// Needs at least one source, all of the same sequence length.
    pub fn new(members: Vec<Box<dyn Batches>>) -> Result<Self> {
        same_seq(&members)?;
        Ok(Self { members })
    }
}

impl Batches for Interleave {
    fn seq(&self) -> usize {
        self.members[0].seq()
    }

    fn samples(&self) -> u64 {
        self.members.iter().map(|m| m.samples()).fold(0, u64::saturating_add)
    }

    fn resets(&self) -> bool {
        self.members.iter().any(|m| m.resets())
    }

    fn length(&self, n: u64) -> Result<Option<usize>> {
        let k = self.members.len() as u64;
        self.members[(n % k) as usize].length(n / k)
    }

    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let k = self.members.len() as u64;
        self.members[(n % k) as usize].row(n / k, row)
    }
}
