//! Batched GEMMs: one product for each matrix of a stack.

use super::{Gemm, GemmSizes};
use ferrotron_tensor::{Result, Tensor, shape_error};

/// `c[i] = op(a[i])·op(b[i])` for every matrix i of a stack; each is a [`Gemm`], whose dtypes and rounding it has.
///
/// Stacks are `[count, rows, cols]`, with any stride between matrices and between rows.
pub struct BatchedGemm<'a> {
    /// Left operands.
    pub a: &'a Tensor,
    /// Use `a[i]ᵀ`.
    pub trans_a: bool,
    /// Right operands.
    pub b: &'a Tensor,
    /// Use `b[i]ᵀ`.
    pub trans_b: bool,
    /// Outputs.
    pub c: &'a Tensor,
}

impl BatchedGemm<'_> {
    /// Checks shapes, strides and types; returns the number of matrices and the sizes of one product.
    pub fn sizes(&self) -> Result<(usize, GemmSizes)> {
        let count = match (self.a.shape(), self.b.shape(), self.c.shape()) {
            ([a, _, _], [b, _, _], [c, _, _]) if a == b && b == c => *a,
            (a, b, c) => {
                return shape_error(
                    "gemm (batched)",
                    format!("{a:?} · {b:?} -> {c:?}: stacks must hold as many matrices each"),
                );
            }
        };
        if count == 0 {
            return Ok((0, GemmSizes { m: 0, n: 0, k: 0, lda: 0, ldb: 0, ldc: 0 }));
        }
        Ok((count, self.with(0, |g| g.sizes())?))
    }

    /// Calls `f` with the product of matrix `i`.
    pub fn with<T>(&self, i: usize, f: impl FnOnce(&Gemm) -> Result<T>) -> Result<T> {
        let (a, b, c) = (self.a.select(0, i)?, self.b.select(0, i)?, self.c.select(0, i)?);
        let (trans_a, trans_b) = (self.trans_a, self.trans_b);
        f(&Gemm { a: &a, trans_a, b: &b, trans_b, bias: None, accumulate: false, c: &c })
    }
}
