//! Rotary position embedding.

use ferrotron_tensor::{Result, Stream, Tensor};

/// Which channels form the pairs that are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Channel `i` with `i + rot/2`.
    Half,
    /// Channel `2i` with `2i + 1`, written back in place.
    Interleaved,
    /// Channel `2i` with `2i + 1` of the input, written as halves (`i` and `i + rot/2`).
    PairsToHalves,
}

/// Rotates the first `rot` channels of every head in place.
pub struct Rope<'a> {
    /// `[tokens, heads, d]`, any strides with contiguous channels.
    pub x: &'a Tensor,
    /// f32 `[positions, rot/2]`.
    pub cos: &'a Tensor,
    /// f32 `[positions, rot/2]`.
    pub sin: &'a Tensor,
    /// i32 `[tokens]`: row of the tables for each token.
    pub positions: &'a Tensor,
    /// How channels pair up.
    pub style: RopeStyle,
    /// Rotate back: the backward pass.
    pub inverse: bool,
}

/// Rotary position embedding.
pub trait RopeKernels {
    /// See [`Rope`].
    fn rope(&self, s: &Stream, r: &Rope) -> Result<()>;
}
