//! Block GEMM engines. The forward and backward loops are generic over [`Engine`].

use super::block_gemm_vector::{Operands, gemm};
use super::tiles::widen;
use super::transpose::transpose;
use super::{KEYS, QUERIES, padded};
use crate::cpu::Isa;
use ferrotron_tensor::{DType, Element, Float};

/// A left operand: row-major, `ld` elements from row to row.
#[derive(Clone, Copy)]
pub(super) struct Left<'a, E> {
    /// The elements.
    pub data: &'a [E],
    /// Row stride.
    pub ld: usize,
}

/// A right operand in the engine's own layout.
#[derive(Clone, Copy)]
pub(super) struct Right<'a, E> {
    /// The elements.
    pub data: &'a [E],
    /// Row capacity.
    pub rows: usize,
    /// Column capacity.
    pub cols: usize,
}

/// Output of a block GEMM, row-major.
pub(super) struct Output<'a> {
    /// The elements.
    pub data: &'a mut [f32],
    /// Row stride.
    pub ld: usize,
}

/// A block GEMM implementation. Sizes of operands are multiples of the grain; a *tile* is up to 64 tokens row by row,
/// `[padded(tokens), padded(channels)]`, and a *block* is f32 `[keys, QUERIES]`.
pub(super) trait Engine {
    /// Element type of operands.
    type E: Element;
    /// Whether blocks and right operands are packed into separate buffers.
    const COPIES: bool;

    /// Sets the engine up on this thread until it is dropped.
    fn start(isa: Isa) -> Self;
    /// Read `rows` tokens of `cols` channels, `stride` apart, into a tile.
    fn stage<T: Float>(&self, src: &[T], stride: usize, rows: usize, cols: usize, tile: &mut [Self::E]);
    /// The transpose of a tile as a left operand `[cols, KEYS]`.
    fn transpose_left(&self, rows: usize, cols: usize, tile: &[Self::E], left: &mut [Self::E]);
    /// A tile as a right operand of `[QUERIES, cols]`.
    fn right<'a>(
        &self,
        rows: usize,
        cols: usize,
        tile: &'a [Self::E],
        room: &'a mut [Self::E],
    ) -> Right<'a, Self::E>;
    /// The transpose of a tile as a right operand of `[cols, QUERIES]`.
    fn right_transposed(&self, rows: usize, cols: usize, tile: &[Self::E], right: &mut [Self::E]);
    /// A block as a left operand `[keys, QUERIES]`.
    fn block_left<'a>(&self, keys: usize, block: &'a [f32], room: &'a mut [Self::E]) -> Left<'a, Self::E>;
    /// A block as a right operand of `[KEYS, QUERIES]`.
    fn block_right<'a>(&self, keys: usize, block: &'a [f32], room: &'a mut [Self::E]) -> Right<'a, Self::E>;
    /// `c[m, n] = left[m, k] · right[k, n]`, or `+=` with `add`; the size is `(m, k, n)`.
    fn multiply(
        &self,
        size: (usize, usize, usize),
        left: Left<'_, Self::E>,
        right: Right<'_, Self::E>,
        c: Output<'_>,
        add: bool,
    );
}

/// Available engines.
pub(super) enum EngineKind {
    /// [`Plain`].
    Plain,
    /// AMX tiles.
    #[cfg(target_arch = "x86_64")]
    Matrix,
}

/// The engine for elements of type `T`. AMX multiplies bf16, so it is used for bf16 only.
pub(super) fn best<T: Element>(isa: Isa) -> EngineKind {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Amx && T::DTYPE == DType::BF16 {
        return EngineKind::Matrix;
    }
    let _ = isa;
    EngineKind::Plain
}

/// f32 on vector units.
pub(super) struct Plain(Isa);

impl Engine for Plain {
    type E = f32;
    const COPIES: bool = false;

    fn start(isa: Isa) -> Plain {
        Plain(isa)
    }

    fn stage<T: Float>(&self, src: &[T], stride: usize, rows: usize, cols: usize, tile: &mut [f32]) {
        widen(self.0, src, stride, rows, cols, tile);
    }

    fn transpose_left(&self, rows: usize, cols: usize, tile: &[f32], left: &mut [f32]) {
        let (tile, left) = (bytemuck::cast_slice(tile), bytemuck::cast_slice_mut(left));
        transpose(self.0, [padded(rows), cols], tile, cols, left, KEYS);
    }

    fn right<'a>(&self, _: usize, cols: usize, tile: &'a [f32], _: &'a mut [f32]) -> Right<'a, f32> {
        Right { data: tile, rows: QUERIES, cols }
    }

    fn right_transposed(&self, rows: usize, cols: usize, tile: &[f32], right: &mut [f32]) {
        let (tile, right) = (bytemuck::cast_slice(tile), bytemuck::cast_slice_mut(right));
        transpose(self.0, [padded(rows), cols], tile, cols, right, QUERIES);
    }

    fn block_left<'a>(&self, _: usize, block: &'a [f32], _: &'a mut [f32]) -> Left<'a, f32> {
        Left { data: block, ld: QUERIES }
    }

    fn block_right<'a>(&self, _: usize, block: &'a [f32], _: &'a mut [f32]) -> Right<'a, f32> {
        Right { data: block, rows: KEYS, cols: QUERIES }
    }

    fn multiply(
        &self,
        (m, k, n): (usize, usize, usize),
        left: Left<'_, f32>,
        right: Right<'_, f32>,
        c: Output<'_>,
        add: bool,
    ) {
        let (a, lda, b, ldb) = (left.data, left.ld, right.data, right.cols);
        gemm(self.0, [m, k, n], Operands { a, lda, b, ldb, c: c.data, ldc: c.ld }, add);
    }
}
