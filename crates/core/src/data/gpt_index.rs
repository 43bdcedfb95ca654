//! The three indices of a GPT dataset: the order of documents, the start of each sample, and the order in which
//! samples are drawn. All are identical to Megatron's for the same seed.
//!
//! T = tokens per epoch, x = 1 if samples carry one extra token (0 if not), s = tokens per sample.

use super::mt19937::Mt19937;
use crate::{Error, Result};

/// Start of a sample: position in the document index, token offset inside that document.
pub type Start = [u32; 2];

/// What the indices are built from.
#[derive(Clone, Copy, Debug)]
pub struct IndexSpec {
    /// Tokens per sample (s).
    pub seq: usize,
    /// Seed of the generator.
    pub seed: u32,
    /// Number of samples; `None` for one epoch.
    pub samples: Option<u64>,
    /// True if a sample is one token longer than `seq` (x = 1).
    pub extra: bool,
    /// True if an incomplete last sample is dropped.
    pub drop_last: bool,
}

/// The indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GptIndex {
    /// Documents in the order in which their tokens are concatenated, over all epochs.
    pub documents: Vec<u32>,
    /// Start of each sample, and the end of the last: samples + 1 entries.
    pub starts: Vec<Start>,
    /// The sample drawn n-th.
    pub shuffle: Vec<u32>,
}

/// Number of epochs, and the number of samples before the last epoch if that is shuffled separately.
fn epochs(spec: &IndexSpec, tokens: u64) -> Result<(u64, Option<u64>)> {
    let (seq, x) = (spec.seq as u64, u64::from(spec.extra));
    let Some(samples) = spec.samples else { return Ok((1, None)) };
    let wanted = samples.checked_mul(seq).and_then(|t| t.checked_add(x));
    let Some(wanted) = wanted else {
        return Err(Error::Invalid(format!(
            "{samples} samples of {seq} tokens are more than can be counted"
        )));
    };
    // The smallest E with E·T ≥ samples·s + x.
    let e = wanted.div_ceil(tokens).max(1);
    if e == 1 {
        return Ok((1, None));
    }
    let before = ((e - 1) * tokens).saturating_sub(x) / seq;
    let per_epoch = tokens.saturating_sub(x) / seq;
    let from_last = samples.saturating_sub(before);
    // A last epoch of which less than 80 % is used is shuffled separately, so that earlier epochs are used up first.
    let apart = from_last < (0.8 * per_epoch as f64) as u64;
    Ok((e, apart.then_some(before)))
}

/// A vector with reserved memory, or an error if it does not fit.
fn reserve<T>(count: u64, what: &str) -> Result<Vec<T>> {
    let mut v = Vec::new();
    // Positions and samples are 32-bit; larger indices would hardly fit in memory.
    if count > u64::from(u32::MAX) - 2 || v.try_reserve_exact(count as usize).is_err() {
        return Err(Error::Invalid(format!(
            "{count} {what} are too many for one dataset; ask for fewer samples or split the data into a blend"
        )));
    }
    Ok(v)
}

impl GptIndex {
    /// Builds the indices of `documents`, whose lengths are given by `length`. `name` is used in messages.
    pub fn build(
        documents: std::ops::Range<u32>,
        length: impl Fn(u32) -> Result<usize>,
        spec: &IndexSpec,
        name: &str,
    ) -> Result<Self> {
        if spec.seq == 0 {
            return Err(Error::Invalid("a sample needs at least one token; the sequence length is 0".into()));
        }
        let mut tokens = 0u64;
        for d in documents.clone() {
            tokens += length(d)? as u64;
        }
        if tokens <= u64::from(spec.extra) {
            return Err(Error::Invalid(format!(
                "{name}: the {} documents of this split hold {tokens} tokens, too few for a sample; \
                 give more data or change the split",
                documents.len()
            )));
        }
        let (epochs, apart) = epochs(spec, tokens)?;
        let mut random = Mt19937::new(spec.seed);

        let mut order = reserve(epochs.saturating_mul(documents.len() as u64), "documents")?;
        for _ in 0..epochs {
            order.extend(documents.clone());
        }
        let last_epoch = order.len() - if apart.is_some() { documents.len() } else { 0 };
        random.shuffle(&mut order[..last_epoch]);
        random.shuffle(&mut order[last_epoch..]);

        let starts = sample_starts(&order, &length, spec, epochs * tokens)?;

        let samples = starts.len() - 1;
        let mut shuffle = reserve(samples as u64, "samples")?;
        shuffle.extend(0..samples as u32);
        let cut = apart.map_or(samples, |n| (n as usize).min(samples));
        random.shuffle(&mut shuffle[..cut]);
        random.shuffle(&mut shuffle[cut..]);
        Ok(Self { documents: order, starts, shuffle })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.shuffle.len()
    }

    /// True if there is no complete sample.
    pub fn is_empty(&self) -> bool {
        self.shuffle.is_empty()
    }
}

/// Cuts the concatenated documents into samples that overlap by x tokens.
fn sample_starts(
    order: &[u32],
    length: &impl Fn(u32) -> Result<usize>,
    spec: &IndexSpec,
    tokens: u64,
) -> Result<Vec<Start>> {
    let (seq, x) = (spec.seq as u64, u64::from(spec.extra));
    let usable = tokens - x;
    let samples = if spec.drop_last { usable / seq } else { usable.div_ceil(seq) };
    let mut starts = reserve(samples + 1, "samples")?;
    starts.push([0, 0]);
    let (mut position, mut offset) = (0usize, 0u64);
    for _ in 0..samples {
        let mut left = seq + x;
        loop {
            let available = length(order[position])? as u64 - offset;
            if left <= available {
                // The next sample starts x tokens before this one ends.
                offset += left - x;
                break;
            }
            left -= available;
            if position + 1 == order.len() {
                // The incomplete last sample ends with the data.
                offset = (length(order[position])? as u64).saturating_sub(x);
                break;
            }
            position += 1;
            offset = 0;
        }
        // Both fit in 32 bits: `reserve` bounds positions, and lengths are i32 in the file.
        starts.push([position as u32, offset as u32]);
    }
    Ok(starts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(lengths: &[usize], samples: u64) -> GptIndex {
        let spec = IndexSpec { seq: 4, seed: 1234, samples: Some(samples), extra: true, drop_last: true };
        GptIndex::build(0..lengths.len() as u32, |d| Ok(lengths[d as usize]), &spec, "t").unwrap()
    }

    #[test]
    fn known_two_epochs_together() {
        let it = build(&[5, 3, 7], 6);
        assert_eq!(it.documents, [2, 1, 2, 0, 1, 0]);
        assert_eq!(it.starts, [[0, 0], [0, 4], [1, 1], [2, 2], [2, 6], [3, 3], [4, 2], [5, 3]]);
        assert_eq!(it.shuffle, [5, 0, 3, 4, 2, 6, 1]);
    }

    #[test]
    fn known_last_epoch_apart() {
        let it = build(&[5, 3, 7, 4, 6, 10, 2, 9], 14);
        assert_eq!(it.documents, [2, 1, 6, 0, 4, 5, 3, 7, 5, 0, 3, 4, 2, 6, 1, 7]);
        let shuffle = [3, 9, 2, 1, 7, 5, 4, 0, 8, 6, 10, 19, 12, 20, 15, 14, 18, 17, 21, 16, 11, 13];
        assert_eq!(it.shuffle, shuffle);
    }

    #[test]
    fn absurd_requests_are_errors() {
        let spec = |samples, seq| IndexSpec { seq, seed: 0, samples, extra: true, drop_last: true };
        let one = |s: IndexSpec| GptIndex::build(0..1, |_| Ok(10), &s, "t");
        assert!(one(spec(Some(u64::MAX), 8)).is_err());
        assert!(one(spec(Some(u64::MAX / 16), 8)).is_err());
        assert!(one(spec(Some(1), 0)).is_err());
        assert!(GptIndex::build(0..3, |_| Ok(0), &spec(None, 8), "t").is_err());
        assert!(one(spec(None, 80)).unwrap().is_empty());
    }
}
