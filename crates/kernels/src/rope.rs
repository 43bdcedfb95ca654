//! Rotary position embedding (RoPE).

use crate::checks::dtypes;
use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// Which channels form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Half-split pairs (NeoX): channel `i` with `i + rot/2`.
    Half,
    /// Interleaved pairs (GPT-J): channel `2i` with `2i + 1`, in place.
    Interleaved,
    /// Reads interleaved pairs (`2i`, `2i + 1`) and writes half-split pairs (`i`, `i + rot/2`), as DeepSeek does.
    PairsToHalves,
}

/// Rotates the first `rot` channels of every head in place.
pub struct Rope<'a> {
    /// `[tokens, heads, d]`, any strides with contiguous channels.
    pub x: &'a Tensor,
    /// Cosines, f32 `[positions, rot/2]`.
    pub cos: &'a Tensor,
    /// Sines, f32 `[positions, rot/2]`.
    pub sin: &'a Tensor,
    /// i32 `[tokens]`: position of each token, a row of the tables.
    pub positions: &'a Tensor,
    /// Pairing of channels.
    pub style: RopeStyle,
    /// Rotate by the negative angle: the backward pass.
    pub inverse: bool,
}

impl Rope<'_> {
    /// Checks all arguments; returns the heads as rows and the number of pairs.
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
            return shape_error(
                op,
                "cos and sin must have one shape and be contiguous, and channels contiguous",
            );
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

/// RoPE kernels.
pub trait RopeKernels {
    /// See [`Rope`].
    fn rope(&self, s: &Stream, r: &Rope) -> Result<()>;
}
