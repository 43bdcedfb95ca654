//! Products of segments of rows, each with a matrix of its own: the experts of a mixture.
//!
//! Segment e is `counts[e]` rows from `offsets[e]`, both i32 on the device, so nobody waits for the host to know them. Rows in
//! no segment are not read, and where a product writes rows they become zeros.

use crate::quant::Bytes;
use ferrotron_tensor::{Result, Stream, Tensor};

/// Segments of N rows.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// i32 `[E + 1]`
    pub offsets: &'a Tensor,
    /// i32 `[E]`
    pub counts: &'a Tensor,
}

/// `y[r] = x[r]·op(w[e]) (+ bias[e])` for the rows r of segment e; `x [N, k]`, `y [N, n]`, `bias [E, n]`.
#[derive(Clone, Copy)]
pub struct Grouped<'a> {
    /// `[N, k]`, bf16 or f32
    pub x: &'a Tensor,
    /// `[E, n, k]` used transposed (forward), or `[E, k, n]` with `as_stored` (gradient of the input).
    pub w: &'a Tensor,
    /// Is w `[E, k, n]`?
    pub as_stored: bool,
    /// Whose rows.
    pub segments: Segments<'a>,
    /// `[E, n]`, of x's type.
    pub bias: Option<&'a Tensor>,
    /// `[N, n]`, of x's type
    pub y: &'a Tensor,
}

/// `dw[e] (+)= Σ_r dy[r]ᵀ·x[r]` over segment e; `dy [N, n]`, `x [N, k]`, `dw` f32 `[E, n, k]`.
/// Without rows a segment's is zero, or stays where it is added to.
#[derive(Clone, Copy)]
pub struct GroupedGrad<'a> {
    /// `[N, n]`
    pub dy: &'a Tensor,
    /// `[N, k]`
    pub x: &'a Tensor,
    /// Whose rows.
    pub segments: Segments<'a>,
    /// `[E, n, k]`, and whether to add to what it holds.
    pub dw: (&'a Tensor, bool),
}

/// Eight-bit factors of a grouped product, both contracted along their last axis: `y[r] = x[r]·w[e]ᵀ`.
#[derive(Clone, Copy)]
pub struct Grouped8<'a> {
    /// `[N, k]`, one scale for all or scales of 128 along k.
    pub x: &'a Bytes,
    /// `[E·n, k]`, scales f32 `[E]` (one an expert) in place of the tensor's one, or tiles.
    pub w: &'a Bytes,
    /// Whose rows.
    pub segments: Segments<'a>,
    /// `[N, n]` bf16
    pub y: &'a Tensor,
    /// Sums may be kept in the matrix unit's narrow registers.
    pub fast: bool,
}

/// Grouped products.
pub trait GroupedKernels {
    /// See [`Grouped`].
    fn grouped(&self, s: &Stream, g: &Grouped) -> Result<()>;

    /// See [`GroupedGrad`].
    fn grouped_grad(&self, s: &Stream, g: &GroupedGrad) -> Result<()>;
}
