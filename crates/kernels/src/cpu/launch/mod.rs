//! Tensors to slices: each kernel family's trait on the CPU. Shapes and types are checked here; the arithmetic
//! is in the modules beside this one.

mod activation;
mod attention;
mod elementwise;
mod embedding;
mod gemm;
mod loss;
mod norm;
mod optim;
mod rope;

use super::Isa;
use super::rows::Rows;
use ferrotron_tensor::{Result, Tensor, shape_error};

/// The kernels of the host's cores, at one instruction-set level.
#[derive(Clone, Copy, Debug)]
pub struct CpuKernels {
    isa: Isa,
}

impl CpuKernels {
    /// The best this machine has. Call before compute threads start.
    pub fn detect() -> CpuKernels {
        CpuKernels { isa: Isa::detect() }
    }

    /// A level from [`Isa::all`].
    pub fn with(isa: Isa) -> CpuKernels {
        CpuKernels { isa }
    }

    /// The level in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

impl crate::Kernels for CpuKernels {}

/// Picks the Rust type for a tensor's f32 or bf16 elements.
macro_rules! floats {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ferrotron_tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            ferrotron_tensor::DType::BF16 => {
                type $T = ferrotron_tensor::bf16;
                $body
            }
            found => {
                Err(ferrotron_tensor::Error::DType { op: $op, found, wanted: ferrotron_tensor::DType::F32 })
            }
        }
    };
}
use floats;

/// The rows (last axis) of tensors of equal shape, described alike so that row i of each is the same row.
fn rows_of<const N: usize>(op: &'static str, tensors: [&Tensor; N]) -> Result<[Rows; N]> {
    let shape = tensors[0].shape();
    if tensors.iter().any(|t| t.shape() != shape) {
        let shapes: Vec<_> = tensors.iter().map(|t| t.shape()).collect();
        return shape_error(op, format!("shapes differ: {shapes:?}"));
    }
    let width = shape.last().copied().unwrap_or(1);
    if tensors.iter().any(|t| t.strides().last().is_some_and(|s| *s != 1 && width > 1)) {
        return shape_error(op, "the last axis must be contiguous");
    }
    // Join leading axes that lie back to back in all tensors, until two are left.
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
        _ => return shape_error(op, format!("{shape:?} has too many strides; copy it first")),
    };
    Ok(std::array::from_fn(|i| Rows {
        outer: outer.0,
        outer_stride: outer.1[i],
        inner: inner.0,
        inner_stride: inner.1[i],
        width,
    }))
}

/// All contiguous and of equal size?
fn same_contiguous(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    let n = tensors.first().map_or(0, |t| t.numel());
    match tensors.iter().find(|t| !t.is_contiguous() || t.numel() != n) {
        None => Ok(()),
        Some(t) => shape_error(op, format!("{t:?} must be contiguous and hold {n} elements")),
    }
}
