//! Argument checks shared by all devices.

use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// Rows (last axis) of tensors of equal shape, with one decomposition of the leading axes, so that row i is the same row in
/// each.
pub(crate) fn rows_of<const N: usize>(op: &'static str, tensors: [&Tensor; N]) -> Result<[Rows; N]> {
    let shape = tensors[0].shape();
    if tensors.iter().any(|t| t.shape() != shape) {
        let shapes: Vec<_> = tensors.iter().map(|t| t.shape()).collect();
        return shape_error(op, format!("shapes differ: {shapes:?}"));
    }
    let width = shape.last().copied().unwrap_or(1);
    if tensors.iter().any(|t| t.strides().last().is_some_and(|s| *s != 1 && width > 1)) {
        return shape_error(op, "the last axis must be contiguous");
    }
    // Merge leading axes that are contiguous in all tensors, down to at most two.
    let mut axes: Vec<(usize, [usize; N])> = Vec::new();
    let leading = &shape[..shape.len().saturating_sub(1)];
    for (axis, &size) in leading.iter().enumerate().filter(|(_, n)| **n != 1) {
        let strides: [usize; N] = std::array::from_fn(|i| tensors[i].strides()[axis]);
        match axes.last_mut() {
            Some((n, s)) if (0..N).all(|i| s[i] == strides[i] * size) => (*n, *s) = (*n * size, strides),
            _ => axes.push((size, strides)),
        }
    }
    let (outer, inner) = match axes.as_slice() {
        [] => ((1, [width; N]), (1, [width; N])),
        [rows] => (*rows, (1, [width; N])),
        [outer, inner] => (*outer, *inner),
        _ => {
            return shape_error(
                op,
                format!("{shape:?} cannot be described by two row strides; make it contiguous first"),
            );
        }
    };
    Ok(std::array::from_fn(|i| Rows {
        outer: outer.0,
        outer_stride: outer.1[i],
        inner: inner.0,
        inner_stride: inner.1[i],
        width,
    }))
}

/// Checks that all are contiguous and of equal size.
pub(crate) fn same_contiguous(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    let n = tensors.first().map_or(0, |t| t.numel());
    match tensors.iter().find(|t| !t.is_contiguous() || t.numel() != n) {
        None => Ok(()),
        Some(t) => shape_error(op, format!("{t:?} must be contiguous and hold {n} elements")),
    }
}

/// Checks that all are contiguous.
pub(crate) fn contiguous(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().find(|t| !t.is_contiguous()) {
        None => Ok(()),
        Some(t) => shape_error(op, format!("{t:?} must be contiguous")),
    }
}

/// Checks that all have the element type `wanted`.
pub(crate) fn dtypes(op: &'static str, wanted: DType, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().find(|t| t.dtype() != wanted) {
        None => Ok(()),
        Some(t) => Err(Error::DType { op, found: t.dtype(), wanted }),
    }
}
