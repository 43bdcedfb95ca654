//! One factor of a product, whatever it is made of.

use super::Product;
use crate::{Pass, Rank, Saved, SavedTensor};
use ferrotron_kernels::{BLOCK, Bytes, Gemm, Gemm8, Scaling};
use ferrotron_tensor::{Category, Result, Tensor, shape_error};

/// A factor `[r, k]`, contracted along k.
#[derive(Clone, Debug)]
pub(crate) enum Side {
    /// Numbers in the type the model computes in: `[r, k]`, or `[k, r]` with `trans`.
    Values {
        /// The matrix.
        t: Tensor,
        /// Is it stored the other way round?
        trans: bool,
    },
    /// Bytes.
    Bytes(Bytes),
}

/// What a product does besides multiplying.
#[derive(Clone, Copy)]
pub(crate) struct Multiply<'a> {
    /// Which it is.
    pub(crate) product: Product,
    /// `[n]`
    pub(crate) bias: Option<&'a Tensor>,
    /// Add to what is there.
    pub(crate) accumulate: bool,
    /// Let the matrix unit keep sums short.
    pub(crate) fast: bool,
}

impl Side {
    /// Values, contracted along their last axis.
    pub(crate) fn rows_of(t: &Tensor) -> Side {
        Side::Values { t: t.clone(), trans: false }
    }

    /// Values, contracted along their first axis.
    pub(crate) fn cols_of(t: &Tensor) -> Side {
        Side::Values { t: t.clone(), trans: true }
    }

    /// r.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Side::Values { t, trans } => t.shape()[usize::from(*trans)],
            Side::Bytes(b) => b.rows(),
        }
    }

    /// What moves between ranks: rows of numbers or of bytes. The scale of a whole tensor is known to all; those of blocks
    /// are [`Side::scales`].
    pub(crate) fn memory(&self) -> &Tensor {
        match self {
            Side::Values { t, .. } => t,
            Side::Bytes(b) => &b.data,
        }
    }

    /// Scales that move with the memory.
    pub(crate) fn scales(&self) -> Option<&Tensor> {
        match self {
            Side::Bytes(b) if b.scaling == Scaling::Rows => Some(&b.scale_inv),
            _ => None,
        }
    }

    /// Everything that moves.
    pub(crate) fn moves(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(self.memory()).chain(self.scales())
    }

    /// Rows back to back with one scale or none: pieces of them are factors too.
    pub(crate) fn divides(&self) -> bool {
        match self {
            Side::Values { trans, .. } => !trans,
            Side::Bytes(b) => b.scaling == Scaling::Tensor,
        }
    }

    /// The same kind of factor in other memory.
    pub(crate) fn with(&self, memory: Tensor) -> Side {
        match self {
            Side::Values { trans, .. } => Side::Values { t: memory, trans: *trans },
            Side::Bytes(b) => Side::Bytes(Bytes { data: memory, ..b.clone() }),
        }
    }

    /// Memory for so many rows of the same kind.
    pub(crate) fn empty_like(&self, rank: &Rank, rows: usize) -> Result<Side> {
        if let (Side::Bytes(b), Some(_)) = (self, self.scales()) {
            let (s, format) = (&rank.compute, b.data.dtype());
            let made = Bytes::empty(s, [rows, b.cols], format, b.scaling, Category::Activations)?;
            return Ok(Side::Bytes(made));
        }
        let t = self.memory();
        Ok(self.with(rank.activation(&[rows, t.shape()[1]], t.dtype())?))
    }

    /// Some of the rows.
    pub(crate) fn narrow(&self, start: usize, len: usize) -> Result<Side> {
        if !self.divides() {
            return shape_error("rows of a factor", "its scales do not divide by rows");
        }
        Ok(self.with(self.memory().narrow(0, start, len)?))
    }

    /// The first rows. Scales of rows must be those of all of them.
    pub(crate) fn first_rows(self, rows: usize) -> Result<Side> {
        if rows == self.rows() {
            return Ok(self);
        }
        match self {
            Side::Values { t, trans } => {
                Ok(Side::Values { t: t.narrow(usize::from(trans), 0, rows)?, trans })
            }
            bytes => bytes.narrow(0, rows),
        }
    }

    /// A weight `[out, in]` as if it had more outputs, which are zeros: a factor of `product`.
    pub(crate) fn padded(self, rank: &Rank, product: Product, out: usize) -> Result<Side> {
        // Transposed bytes are padded as they are.
        if let (Side::Bytes(b), Product::InputGrad) = (&self, product) {
            return match b.data.shape()[1] == out {
                true => Ok(Side::Bytes(Bytes { cols: out, ..b.clone() })),
                false => shape_error("padded weight", "bytes are padded to multiples of 16"),
            };
        }
        let (s, t) = (&rank.compute, self.memory());
        let [rows, width] = [t.shape()[0], t.shape()[1]];
        let padded = rank.activation(&[out, width], t.dtype())?;
        s.copy(t, &padded.narrow(0, 0, rows)?)?;
        s.zero(&padded.narrow(0, rows, out - rows)?)?;
        // Scales of tiles are as many, if the padding is less than a tile and ends with one.
        match &self {
            Side::Bytes(b) if b.scaling.scales(out, width) != b.scaling.scales(rows, width) => {
                shape_error("padded weight", "its scales do not cover the padding")
            }
            _ => Ok(self.with(padded)),
        }
    }

    /// `c [m, n] = self [m, k] · otherᵀ [n, k]`, and what `how` says.
    pub(crate) fn times(&self, rank: &Rank, other: &Side, how: Multiply, c: &Tensor) -> Result<()> {
        let (s, Multiply { bias, accumulate, fast, .. }) = (&rank.compute, how);
        match (self, other) {
            (Side::Values { t: a, trans: trans_a }, Side::Values { t: b, trans }) => {
                let g = Gemm { a, trans_a: *trans_a, b, trans_b: !trans, bias, accumulate, c };
                rank.kernels.gemm(s, &g)
            }
            (Side::Bytes(a), Side::Bytes(b)) => {
                let name = how.product.kernel();
                rank.kernels.gemm8(s, &Gemm8 { a, b, bias, accumulate, fast, name, c })
            }
            _ => shape_error(how.product.kernel(), "one factor is in bytes and the other is not"),
        }
    }
}

impl Product {
    /// What profiles call it in bytes.
    fn kernel(self) -> &'static str {
        match self {
            Product::Output => "gemm (output, fp8)",
            Product::InputGrad => "gemm (input gradient, fp8)",
            Product::WeightGrad => "gemm (weight gradient, fp8)",
        }
    }
}

impl Pass<'_> {
    /// All rows of a factor, from every rank's.
    pub(crate) fn all_rows_of(&self, x: &Side, label: &'static str) -> Result<Side> {
        let (Side::Bytes(b), Some(mine), true) = (x, x.scales(), self.rank.tp.size() > 1) else {
            return Ok(x.with(self.all_rows(x.memory(), label)?));
        };
        // Scales of a block lie across all rows: those of each rank go to their places.
        let (m, blocks, all) = (b.rows(), mine.shape()[0], self.all_rows(mine, label)?);
        let side = x.empty_like(self.rank, m * self.rank.tp.size())?;
        let side = side.with(self.all_rows(&b.data, label)?);
        if let Some(scales) = side.scales() {
            self.rank.compute.zero(scales)?;
            for r in 0..self.rank.tp.size() {
                let from = all.narrow(0, r * blocks, blocks)?.narrow(1, 0, m)?;
                self.rank.kernels.copy(&self.rank.compute, &from, &scales.narrow(1, r * m, m)?)?;
            }
        }
        Ok(side)
    }

    /// Columns of all rows, contracted along tokens, from what each rank has made of its own: `[k, n/t]` with scales of
    /// blocks that no rank shares, of which each brought the bytes and scales that have arrived here, `[t·k, n/t]` and
    /// `[t·blocks, k]`.
    pub(crate) fn join_cols(rank: &Rank, mine: &Bytes, data: &Tensor, scales: &Tensor) -> Result<Bytes> {
        let (s, t, [k, m]) = (&rank.compute, rank.tp.size(), [mine.rows(), mine.cols]);
        let all = Bytes::empty(s, [k, t * m], mine.data.dtype(), mine.scaling, Category::Activations)?;
        if all.scale_inv.shape() != scales.shape() || !m.is_multiple_of(BLOCK) {
            return shape_error("columns of all rows", "ranks share blocks");
        }
        // In words: each row of bytes is of whole blocks.
        let (from, to) = (data.as_words()?.view(&[t, k, m / 4])?, all.data.as_words()?.view(&[k, t, m / 4])?);
        rank.kernels.copy(s, &from.transpose(0, 1)?, &to)?;
        Ok(Bytes { scale_inv: scales.clone(), ..all })
    }
}

/// A factor kept for backward.
#[derive(Clone, Debug)]
pub(crate) struct SavedSide {
    side: Side,
    memory: SavedTensor,
    /// Scales of blocks.
    scales: Option<SavedTensor>,
}

impl SavedSide {
    /// Keeps it.
    pub(crate) fn of(side: &Side) -> SavedSide {
        let scales = match side {
            Side::Bytes(b) if b.scaling != Scaling::Tensor => Some(SavedTensor::small(&b.scale_inv)),
            _ => None,
        };
        SavedSide { side: side.clone(), memory: SavedTensor::activation(side.memory()), scales }
    }

    /// The factor, wherever its memory is by now.
    pub(crate) fn side(&self) -> Side {
        let side = self.side.with((*self.memory).clone());
        match (side, &self.scales) {
            (Side::Bytes(b), Some(scales)) => Side::Bytes(Bytes { scale_inv: (**scales).clone(), ..b }),
            (side, _) => side,
        }
    }
}

impl Saved for SavedSide {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.memory);
        self.scales.tensors(f);
        // What was moved away must not stay here.
        self.side = self.side();
    }
}
