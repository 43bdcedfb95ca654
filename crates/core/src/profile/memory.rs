//! Live memory by category over the traced steps.

use super::Measurement;
use ferrotron_tensor::Category;
use ferrotron_tensor::trace::MemorySample;
use serde::Serialize;

/// Most points of a series: twice the pixels of a wide screen.
const POINTS: usize = 4000;

/// Live bytes of one device over time.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MemorySeries {
    /// The rank whose launches were sampled: rank 0, or the first in the trace.
    pub rank: usize,
    /// Names of the categories.
    pub categories: Vec<&'static str>,
    /// Milliseconds since the start of the trace.
    pub at_ms: Vec<f64>,
    /// Bytes by category at each of them.
    pub bytes: Vec<[usize; 6]>,
    /// Peak bytes by category over the whole run; they need not add up.
    pub peak: [usize; 6],
    /// Peak bytes of all of them together.
    pub total_peak: usize,
    /// Bytes that the pool held from the device at most.
    pub reserved_peak: usize,
    /// Bytes that the rank may use, where that is known.
    pub capacity: Option<usize>,
}

/// The memory of the first rank. Ranks that share a device share its account.
pub(super) fn series(m: &Measurement) -> MemorySeries {
    let rank = m.trace.memory.iter().map(|s| s.rank).min().unwrap_or(0);
    let mut samples: Vec<&MemorySample> = m.trace.memory.iter().filter(|s| s.rank == rank).collect();
    samples.sort_by_key(|s| s.at);
    let samples = decimated(&samples);
    MemorySeries {
        rank,
        categories: Category::ALL.iter().map(|c| c.name()).collect(),
        at_ms: samples.iter().map(|s| s.at as f64 / 1e6).collect(),
        bytes: samples.iter().map(|s| s.bytes).collect(),
        peak: m.memory.peak,
        total_peak: m.memory.total_peak,
        reserved_peak: m.memory.reserved_peak,
        capacity: m.capacity,
    }
}

/// Of many samples the largest and the smallest of each group of neighbours, so that peaks stay.
fn decimated<'a>(samples: &[&'a MemorySample]) -> Vec<&'a MemorySample> {
    if samples.len() <= POINTS {
        return samples.to_vec();
    }
    let total = |i: &usize| samples.get(*i).map_or(0, |s| s.bytes.iter().sum::<usize>());
    let size = samples.len().div_ceil(POINTS / 2);
    let mut out = Vec::with_capacity(POINTS);
    for begin in (0..samples.len()).step_by(size) {
        let group = begin..(begin + size).min(samples.len());
        let (least, most) = (group.clone().min_by_key(total), group.max_by_key(total));
        let mut kept: Vec<usize> = [least, most].into_iter().flatten().collect();
        kept.sort_unstable();
        kept.dedup();
        out.extend(kept.into_iter().filter_map(|i| samples.get(i).copied()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_series_keeps_its_peak_and_its_order() {
        let all: Vec<MemorySample> = (0..50_000u64)
            .map(|at| {
                let bytes = if at == 31_234 { 1 << 40 } else { 1000 + (at as usize * 7919) % 512 };
                MemorySample { rank: 0, at, bytes: [bytes, 0, 0, 0, 0, 0] }
            })
            .collect();
        let few = decimated(&all.iter().collect::<Vec<_>>());
        assert!(few.len() <= POINTS && few.len() > POINTS / 4, "{}", few.len());
        assert!(few.iter().any(|s| s.at == 31_234) && few.is_sorted_by_key(|s| s.at));
        assert_eq!(decimated(&few[..100]).len(), 100);
    }
}
