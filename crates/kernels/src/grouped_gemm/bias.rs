//! Expert bias times routing probability: the bias of an expert's second linear layer, weighted per row.

use crate::Segments;
use crate::checks::{contiguous, dtypes};
use ferrotron_tensor::{DType, Result, Tensor, shape_error};

/// A bias per segment and a weight per row. Segment offsets ascend.
#[derive(Clone, Copy)]
pub struct GroupedBias<'a> {
    /// Segments of the rows.
    pub segments: Segments<'a>,
    /// `[E, n]`, of the rows' type
    pub bias: &'a Tensor,
    /// f32 `[N]`: weight of each row, its routing probability; none if all are 1.
    pub weights: Option<&'a Tensor>,
}

/// Checks a bias and its rows `y [N, n]`; returns N, n and E.
pub(crate) fn sizes(op: &'static str, b: &GroupedBias, y: &Tensor) -> Result<[usize; 3]> {
    let (offsets, counts) = (b.segments.offsets, b.segments.counts);
    contiguous(op, &[offsets, counts, b.bias, y])?;
    dtypes(op, DType::I32, &[offsets, counts])?;
    if let Some(weights) = b.weights {
        contiguous(op, &[weights])?;
        dtypes(op, DType::F32, &[weights])?;
    }
    dtypes(op, y.dtype(), &[b.bias])?;
    match (y.shape(), b.bias.shape()) {
        ([rows, n], [experts, m])
            if n == m
                && b.weights.is_none_or(|w| w.shape() == [*rows])
                && counts.shape() == [*experts]
                && offsets.shape() == [experts + 1]
                && i32::try_from(*rows).is_ok() =>
        {
            Ok([*rows, *n, *experts])
        }
        (y, bias) => shape_error(
            op,
            format!(
                "rows {y:?}, bias {bias:?}, weights {:?}, offsets {:?}, counts {:?} have inconsistent shapes",
                b.weights.map(|w| w.shape()),
                offsets.shape(),
                counts.shape()
            ),
        ),
    }
}

/// [`sizes`], and the shapes of the gradients.
pub(crate) fn gradient_sizes(
    op: &'static str,
    b: &GroupedBias,
    dy: &Tensor,
    dbias: &Tensor,
    dweights: Option<&Tensor>,
) -> Result<[usize; 3]> {
    let [rows, n, experts] = sizes(op, b, dy)?;
    let fits = |t: &Tensor, shape: &[usize]| t.shape() == shape && t.is_contiguous();
    dtypes(op, DType::F32, &[dbias])?;
    if !fits(dbias, &[experts, n]) {
        return shape_error(op, format!("the bias's gradient {dbias:?} must be contiguous [{experts}, {n}]"));
    }
    if let Some(dweights) = dweights {
        dtypes(op, DType::F32, &[dweights])?;
        if !fits(dweights, &[rows]) {
            return shape_error(
                op,
                format!("the weights' gradient {dweights:?} must be contiguous [{rows}]"),
            );
        }
    }
    Ok([rows, n, experts])
}
