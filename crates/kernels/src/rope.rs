//! Rotary position embedding.

use crate::checks::dtypes;
use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

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

impl Rope<'_> {
    /// The heads as rows and the number of pairs, after the checks every home makes.
    pub(crate) fn check(&self, op: &'static str) -> Result<(Rows, usize)> {
        let (&[tokens, heads, dim], &[token, head, channel]) = (self.x.shape(), self.x.strides()) else {
            return shape_error(op, format!("{:?} is not [tokens, heads, channels]", self.x.shape()));
        };
        let &[_, half] = self.cos.shape() else {
            return shape_error(op, format!("tables {:?} are not [positions, pairs]", self.cos.shape()));
        };
        let contiguous =
            self.cos.is_contiguous() && self.sin.is_contiguous() && self.positions.is_contiguous();
        if self.cos.shape() != self.sin.shape() || !contiguous || (channel != 1 && dim > 1) {
            return shape_error(op, "tables must be alike, and channels contiguous");
        }
        if self.positions.numel() != tokens || 2 * half > dim {
            let found = self.positions.numel();
            return shape_error(
                op,
                format!("{found} positions for {tokens} tokens, or {} rotated channels of {dim}", 2 * half),
            );
        }
        dtypes(op, DType::F32, &[self.cos, self.sin])?;
        dtypes(op, DType::I32, &[self.positions])?;
        Ok((Rows::heads(tokens, token, heads, head, dim), half))
    }
}

/// Rotary position embedding.
pub trait RopeKernels {
    /// See [`Rope`].
    fn rope(&self, s: &Stream, r: &Rope) -> Result<()>;
}
