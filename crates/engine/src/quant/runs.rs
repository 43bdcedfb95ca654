//! Ranges of stacked weight matrices that one kernel launch can process.

use ferrotron_kernels::ALIGN;
use ferrotron_tensor::{Result, Tensor, shape_error};
use std::ops::Range;

/// Width of the rows into which a flat range is reshaped for kernels that take a matrix.
const WIDTH: usize = 4096;

/// A range for one launch: whole matrices of a stack, or part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Elements of the weight.
    pub(super) elements: Range<usize>,
    /// The matrices they belong to.
    pub(super) matrices: Range<usize>,
    /// Whether these are complete.
    pub(super) whole: bool,
}

/// Splits elements `inside` of a stack of matrices of `each` elements into runs of at most `most` elements (or one
/// matrix).
pub(super) fn runs(inside: &Range<usize>, each: usize, most: usize) -> Vec<Run> {
    let (mut all, mut at) = (Vec::new(), inside.start);
    while at < inside.end {
        let (first, left) = (at / each, (inside.end - at) / each);
        let whole = at.is_multiple_of(each) && left > 0;
        let end = match whole {
            true => at + left.min((most / each).max(1)) * each,
            false => ((first + 1) * each).min(inside.end),
        };
        all.push(Run { elements: at..end, matrices: first..end.div_ceil(each), whole });
        at = end;
    }
    all
}

/// A flat tensor as rows of equal length, as long as possible.
pub(super) fn matrix(flat: &Tensor) -> Result<Tensor> {
    let n = flat.numel();
    let width = if n == 0 { ALIGN } else { 1 << n.trailing_zeros().min(WIDTH.trailing_zeros()) };
    if width < ALIGN {
        return shape_error(
            "FP8-resident weights",
            format!("{n} elements do not divide into rows of {ALIGN}"),
        );
    }
    flat.view(&[n / width, width])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_whole_matrices_or_parts_of_one() {
        let of = |inside: Range<usize>, most| {
            let all = runs(&inside, 10, most);
            all.iter().map(|r| (r.elements.clone(), r.matrices.clone(), r.whole)).collect::<Vec<_>>()
        };
        assert_eq!(of(0..40, 100), [(0..40, 0..4, true)]);
        assert_eq!(of(10..40, 25), [(10..30, 1..3, true), (30..40, 3..4, true)]);
        assert_eq!(of(5..38, 100), [(5..10, 0..1, false), (10..30, 1..3, true), (30..38, 3..4, false)]);
        assert_eq!(of(12..17, 100), [(12..17, 1..2, false)]);
        assert_eq!(of(10..20, 3), [(10..20, 1..2, true)]);
        assert_eq!(of(17..17, 3), []);
    }

    /// Every element is covered once, in order, and no partial run spans two matrices.
    #[test]
    fn runs_cover_what_is_inside() {
        for each in [1, 7, 16] {
            for start in 0..40 {
                for end in start..60 {
                    for most in [1, 20, 1000] {
                        let mut at = start;
                        for r in runs(&(start..end), each, most) {
                            assert_eq!(r.elements.start, at);
                            let matrices = r.matrices.start * each..r.matrices.end * each;
                            assert!(matrices.start <= at && r.elements.end <= matrices.end);
                            assert_eq!(r.whole, matrices == r.elements);
                            assert!(r.matrices.len() == 1 || (r.whole && r.elements.len() <= most));
                            at = r.elements.end;
                        }
                        assert_eq!(at, end);
                    }
                }
            }
        }
    }
}
