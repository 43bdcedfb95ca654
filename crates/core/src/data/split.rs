//! Training, validation and test splits such as `99,1,0`, with numpy's summation order.

use std::num::ParseFloatError;
use std::ops::Range;

use crate::{Error, Result};

/// A split of a dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Training.
    Train,
    /// Validation.
    Valid,
    /// Test.
    Test,
}

impl Split {
    /// All splits, in the order of a split string.
    pub const ALL: [Self; 3] = [Self::Train, Self::Valid, Self::Test];

    /// `train`, `valid` or `test`.
    pub fn name(self) -> &'static str {
        ["train", "valid", "test"][self as usize]
    }
}

/// Sum in numpy's order, on which the last bit of normalized weights depends: sequential below 8 values, eight
/// partial sums up to 128, recursive halves beyond.
fn numpy_sum(v: &[f64]) -> f64 {
    if v.len() < 8 {
        return v.iter().sum();
    }
    if v.len() > 128 {
        let half = v.len() / 2;
        let half = half - half % 8;
        return numpy_sum(&v[..half]) + numpy_sum(&v[half..]);
    }
    let (blocks, rest) = v.as_chunks::<8>();
    let mut r = [0.0; 8];
    for (k, block) in blocks.iter().enumerate() {
        for (r, b) in r.iter_mut().zip(block) {
            *r = if k == 0 { *b } else { *r + b };
        }
    }
    let sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    rest.iter().fold(sum, |s, x| s + x)
}

/// Weights divided by their sum. They must be finite, non-negative and not all zero.
pub fn normalize(weights: &[f64]) -> Result<Vec<f64>> {
    let sum = numpy_sum(weights);
    if weights.iter().any(|w| !w.is_finite() || *w < 0.0) || !(sum.is_finite() && sum > 0.0) {
        return Err(Error::Invalid(format!(
            "weights {weights:?} cannot be normalized: give non-negative numbers, at least one above zero"
        )));
    }
    Ok(weights.iter().map(|w| w / sum).collect())
}

/// The numbers of `a,b,c` or `a/b/c`, not normalized.
pub fn parse_shares(text: &str) -> Result<Vec<f64>, ParseFloatError> {
    text.split([',', '/']).map(|part| part.trim().parse()).collect()
}

/// The fractions `(begin, end)` of each split from its shares; `None` for an empty split.
pub fn split_matrix(shares: &[f64; 3]) -> [Option<(f64, f64)>; 3] {
    let mut begin = 0.0f64;
    shares.map(|share| {
        let end = begin + share;
        let range = (end > begin).then_some((begin, end));
        begin = end;
        range
    })
}

/// The range of a split: fractions of `count`, rounded half to even as in Python.
pub fn split_range(fractions: (f64, f64), count: usize) -> Range<usize> {
    let at = |f: f64| ((f * count as f64).round_ties_even() as usize).min(count);
    at(fractions.0)..at(fractions.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_stay_close_whatever_the_order() {
        for n in [0, 1, 7, 8, 9, 64, 128, 129, 1000] {
            let v: Vec<f64> = (0..n).map(|i| 1.0 / (i + 1) as f64).collect();
            let exact: f64 = v.iter().rev().sum();
            assert!((numpy_sum(&v) - exact).abs() < 1e-13, "{n}");
        }
    }

    #[test]
    fn bad_splits_are_refused() {
        use crate::config::DataSplit;
        let read = |text: &str| toml::Value::from(text).try_into::<DataSplit>();
        assert_eq!(read("98/2").unwrap().0, [98.0, 2.0, 0.0]);
        for bad in ["", "a,b", "1,2,3,4", "nan", "inf,1"] {
            assert!(read(bad).is_err(), "{bad}");
        }
        for bad in ["-1,2", "0,0,0"] {
            assert!(normalize(&read(bad).unwrap().0).is_err(), "{bad}");
        }
    }
}
