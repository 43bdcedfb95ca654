//! Keys of latent attention: some channels are each head's own, the others all heads of a token share.

use crate::checks::dtypes;
use crate::cpu::rows::Rows;
use ferrotron_tensor::{Result, Stream, Tensor, shape_error};

/// Keys from their two parts, and gradients the other way. `own [tokens, heads, a]`, `shared [tokens, b]`,
/// `k [tokens, heads, a + b]`, f32 or bf16 alike, any strides with contiguous channels.
pub trait MlaKernels {
    /// `k[t, h] = [own[t, h], shared[t]]`
    fn mla_concat_keys(&self, s: &Stream, own: &Tensor, shared: &Tensor, k: &Tensor) -> Result<()>;

    /// `own[t, h] = k[t, h, ..a]`, `shared[t] = Σ_h k[t, h, a..]`, summed in f32 and rounded once: the backward pass of
    /// [`MlaKernels::mla_concat_keys`].
    fn mla_split_keys(&self, s: &Stream, k: &Tensor, own: &Tensor, shared: &Tensor) -> Result<()>;
}

/// The rows of `own`, `shared` and `k`.
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
