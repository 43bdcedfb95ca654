//! Invalid arguments return errors that name the kernel, on every device, and never panic.

mod attention;
mod embedding_loss;
mod gemm_elementwise;
mod norm_rope;
mod optimizer;
mod router;

use super::devices::TestDevice;
use ferrotron_tensor::{DType, Tensor};

/// Zeros of a shape and type.
fn z(h: &TestDevice, dtype: DType, shape: &[usize]) -> Tensor {
    h.tensor(dtype, shape, &vec![0.0; shape.iter().product()])
}

/// A column of a matrix: one axis, not contiguous.
fn column(h: &TestDevice, dtype: DType, n: usize) -> Tensor {
    z(h, dtype, &[n, 2]).select(1, 0).unwrap()
}
