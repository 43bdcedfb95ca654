//! Checks of the kernels that assemble the keys of multi-head latent attention (MLA).

use crate::checks::dtypes;
use crate::cpu::rows::Rows;
use ferrotron_tensor::{Result, Tensor, shape_error};

/// Checks `nope [tokens, heads, a]`, `rope [tokens, b]` and `k [tokens, heads, a + b]`; returns their rows.
pub(crate) fn check_keys(op: &'static str, own: &Tensor, shared: &Tensor, k: &Tensor) -> Result<[Rows; 3]> {
    dtypes(op, k.dtype(), &[own, shared])?;
    let (&[t, n, a], &[tokens, b], &[..]) = (own.shape(), shared.shape(), k.shape()) else {
        return shape_error(op, format!("{own:?}, {shared:?} and {k:?} do not belong together"));
    };
    if t != tokens || k.shape() != [t, n, a + b] || a == 0 || b == 0 {
        return shape_error(op, format!("{own:?}, {shared:?} and {k:?} do not belong together"));
    }
    let rows = |x: &Tensor, n: usize| match *x.strides() {
        [token, head, c] if c == 1 || x.shape()[2] == 1 => Some(Rows::heads(t, token, n, head, x.shape()[2])),
        [token, c] if c == 1 || x.shape()[1] == 1 => Some(Rows::strided(t, x.shape()[1], token)),
        _ => None,
    };
    match (rows(own, n), rows(shared, 1), rows(k, n)) {
        (Some(own), Some(shared), Some(k)) => Ok([own, shared, k]),
        _ => shape_error(op, "the last axis must be contiguous"),
    }
}
