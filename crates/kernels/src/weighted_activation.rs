//! Gated non-linearities whose rows have a weight: what an expert computes between its two maps, times the probability of its
//! choice.

use crate::Act;
use crate::checks::contiguous;
use ferrotron_tensor::{Result, Stream, Tensor, shape_error};

/// Weighted gated (or plain) non-linearities.
pub trait WeightedActivationKernels {
    /// `y[r] = p[r]·act(x[r, :f])·x[r, f:]` (gated; plain: `p[r]·act(x[r])`), the product in f32 and rounded once; `p` f32 `[N]`.
    /// With `p[r] = 0` a row is zeros whatever is in x.
    fn weighted_act(
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
    fn weighted_act_backward(
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

/// Rows N and width f, of `wide [N, 2f]` (plain: `[N, f]`), values `[N]` each and `narrow [N, f]`; all contiguous.
pub(crate) fn sizes(
    op: &'static str,
    (act, gated): (Act, bool),
    wide: &Tensor,
    values: &[&Tensor],
    narrow: &Tensor,
) -> Result<[usize; 2]> {
    if !gated && matches!(act, Act::ClampedSilu { .. }) {
        return shape_error(op, "the clamped SiLU exists with a gate only");
    }
    contiguous(op, &[wide, narrow])?;
    contiguous(op, values)?;
    match (wide.shape(), narrow.shape()) {
        ([rows, w], [r, f])
            if rows == r
                && *w == if gated { 2 * f } else { *f }
                && values.iter().all(|v| v.shape() == [*rows]) =>
        {
            Ok([*rows, *f])
        }
        (x, y) => {
            let values: Vec<_> = values.iter().map(|v| v.shape()).collect();
            let halves = if gated { "2f" } else { "f" };
            shape_error(op, format!("{x:?}, {y:?}, {values:?} must be [N, {halves}], [N, f], [N]"))
        }
    }
}
