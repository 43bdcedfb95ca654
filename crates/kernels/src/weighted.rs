//! Gated non-linearities whose rows have a weight: what an expert computes between its two maps, times the probability of its
//! choice.

use crate::Act;
use ferrotron_tensor::{Result, Stream, Tensor};

/// Weighted gated (or plain) non-linearities.
pub trait WeightedKernels {
    /// `y[r] = p[r]·act(x[r, :f])·x[r, f:]` (gated; plain: `p[r]·act(x[r])`), the product in f32 and rounded once; `p` f32 `[N]`.
    /// With `p[r] = 0` a row is zeros whatever is in x.
    fn act_weighted(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        p: &Tensor,
        y: &Tensor,
    ) -> Result<()>;

    /// `dx [N, 2f]` and `dp` f32 `[N] = Σ act(g)·u·dy` from `x`, `p`, `dy [N, f]`. Rows with `live[r] < 0` (i32 `[N]`, a row map's
    /// source) belong to nobody: their dx is zeros and dp 0 whatever x and dy hold.
    #[allow(clippy::too_many_arguments)]
    fn act_weighted_backward(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        p: &Tensor,
        live: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        dp: &Tensor,
    ) -> Result<()>;
}
