//! One factor of a product, whatever it is made of.

use super::LinearGemm;
use crate::{Rank, Saved, SavedTensor, StepContext};
use ferrotron_kernels::{BLOCK, Fp8Gemm, Fp8Tensor, Gemm, ScalingMode};
use ferrotron_tensor::{Category, Result, Tensor, shape_error};

/// A factor `[r, k]`, contracted along k.
#[derive(Clone, Debug)]
pub(crate) enum GemmOperand {
    /// Numbers in the type the model computes in: `[r, k]`, or `[k, r]` with `trans`.
    HighPrecision {
        /// The matrix.
        t: Tensor,
        /// Is it stored the other way round?
        trans: bool,
    },
    /// Bytes.
    Fp8(Fp8Tensor),
}

/// What a product does besides multiplying.
#[derive(Clone, Copy)]
pub(crate) struct GemmOptions<'a> {
    /// Which it is.
    pub(crate) product: LinearGemm,
    /// `[n]`
    pub(crate) bias: Option<&'a Tensor>,
    /// Add to what is there.
    pub(crate) accumulate: bool,
    /// Let the matrix unit keep sums short.
    pub(crate) fast: bool,
}

impl GemmOperand {
    /// Values, contracted along their last axis.
    pub(crate) fn rowwise(t: &Tensor) -> GemmOperand {
        GemmOperand::HighPrecision { t: t.clone(), trans: false }
    }

    /// Values, contracted along their first axis.
    pub(crate) fn columnwise(t: &Tensor) -> GemmOperand {
        GemmOperand::HighPrecision { t: t.clone(), trans: true }
    }

    /// r.
    pub(crate) fn rows(&self) -> usize {
        match self {
            GemmOperand::HighPrecision { t, trans } => t.shape()[usize::from(*trans)],
            GemmOperand::Fp8(b) => b.rows(),
        }
    }

    /// What moves between ranks: rows of numbers or of bytes. The scale of a whole tensor is known to all; those of blocks
    /// are [`GemmOperand::scales`].
    pub(crate) fn memory(&self) -> &Tensor {
        match self {
            GemmOperand::HighPrecision { t, .. } => t,
            GemmOperand::Fp8(b) => &b.data,
        }
    }

    /// Scales that move with the memory.
    pub(crate) fn scales(&self) -> Option<&Tensor> {
        match self {
            GemmOperand::Fp8(b) if b.scaling == ScalingMode::Block1x128 => Some(&b.scale_inv),
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
            GemmOperand::HighPrecision { trans, .. } => !trans,
            GemmOperand::Fp8(b) => b.scaling == ScalingMode::PerTensor,
        }
    }

    /// The same kind of factor in other memory.
    pub(crate) fn with(&self, memory: Tensor) -> GemmOperand {
        match self {
            GemmOperand::HighPrecision { trans, .. } => {
                GemmOperand::HighPrecision { t: memory, trans: *trans }
            }
            GemmOperand::Fp8(b) => GemmOperand::Fp8(Fp8Tensor { data: memory, ..b.clone() }),
        }
    }

    /// Memory for so many rows of the same kind.
    pub(crate) fn empty_like(&self, rank: &Rank, rows: usize) -> Result<GemmOperand> {
        if let (GemmOperand::Fp8(b), Some(_)) = (self, self.scales()) {
            let (s, format) = (&rank.compute, b.data.dtype());
            let made = Fp8Tensor::empty(s, [rows, b.cols], format, b.scaling, Category::Activations)?;
            return Ok(GemmOperand::Fp8(made));
        }
        let t = self.memory();
        Ok(self.with(rank.activation(&[rows, t.shape()[1]], t.dtype())?))
    }

    /// Some of the rows.
    pub(crate) fn narrow(&self, start: usize, len: usize) -> Result<GemmOperand> {
        if !self.divides() {
            return shape_error("rows of a factor", "its scales do not divide by rows");
        }
        Ok(self.with(self.memory().narrow(0, start, len)?))
    }

    /// The first rows. Scales of rows must be those of all of them.
    pub(crate) fn first_rows(self, rows: usize) -> Result<GemmOperand> {
        if rows == self.rows() {
            return Ok(self);
        }
        match self {
            GemmOperand::HighPrecision { t, trans } => {
                Ok(GemmOperand::HighPrecision { t: t.narrow(usize::from(trans), 0, rows)?, trans })
            }
            bytes => bytes.narrow(0, rows),
        }
    }

    /// A weight `[out, in]` as if it had more outputs, which are zeros: a factor of `product`.
    pub(crate) fn padded(self, rank: &Rank, product: LinearGemm, out: usize) -> Result<GemmOperand> {
        // Transposed bytes are padded as they are.
        if let (GemmOperand::Fp8(b), LinearGemm::Dgrad) = (&self, product) {
            return match b.data.shape()[1] == out {
                true => Ok(GemmOperand::Fp8(Fp8Tensor { cols: out, ..b.clone() })),
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
            GemmOperand::Fp8(b) if b.scaling.scales(out, width) != b.scaling.scales(rows, width) => {
                shape_error("padded weight", "its scales do not cover the padding")
            }
            _ => Ok(self.with(padded)),
        }
    }

    /// `c [m, n] = self [m, k] · otherᵀ [n, k]`, and what `how` says.
    pub(crate) fn gemm(&self, rank: &Rank, other: &GemmOperand, how: GemmOptions, c: &Tensor) -> Result<()> {
        let (s, GemmOptions { bias, accumulate, fast, .. }) = (&rank.compute, how);
        match (self, other) {
            (
                GemmOperand::HighPrecision { t: a, trans: trans_a },
                GemmOperand::HighPrecision { t: b, trans },
            ) => {
                let g = Gemm { a, trans_a: *trans_a, b, trans_b: !trans, bias, accumulate, c };
                rank.kernels.gemm(s, &g)
            }
            (GemmOperand::Fp8(a), GemmOperand::Fp8(b)) => {
                let name = how.product.kernel();
                rank.kernels.fp8_gemm(s, &Fp8Gemm { a, b, bias, accumulate, fast, name, c })
            }
            _ => shape_error(how.product.kernel(), "one factor is in bytes and the other is not"),
        }
    }
}

impl LinearGemm {
    /// What profiles call it in bytes.
    fn kernel(self) -> &'static str {
        match self {
            LinearGemm::Fprop => "gemm (output, fp8)",
            LinearGemm::Dgrad => "gemm (input gradient, fp8)",
            LinearGemm::Wgrad => "gemm (weight gradient, fp8)",
        }
    }
}

impl StepContext<'_> {
    /// All rows of a factor, from every rank's.
    pub(crate) fn all_gather_operand(&self, x: &GemmOperand, label: &'static str) -> Result<GemmOperand> {
        let (GemmOperand::Fp8(b), Some(mine), true) = (x, x.scales(), self.rank.tp.size() > 1) else {
            return Ok(x.with(self.all_gather(x.memory(), label)?));
        };
        // Scales of a block lie across all rows: those of each rank go to their places.
        let (m, blocks, all) = (b.rows(), mine.shape()[0], self.all_gather(mine, label)?);
        let side = x.empty_like(self.rank, m * self.rank.tp.size())?;
        let side = side.with(self.all_gather(&b.data, label)?);
        if let Some(scales) = side.scales() {
            self.rank.compute.zero(scales)?;
            for r in 0..self.rank.tp.size() {
                let from = all.narrow(0, r * blocks, blocks)?.narrow(1, 0, m)?;
                self.rank.kernels.copy(&self.rank.compute, &from, &scales.narrow(1, r * m, m)?)?;
            }
        }
        Ok(side)
    }

    /// WgradOperand of all rows, contracted along tokens, from what each rank has made of its own: `[k, n/t]` with scales of
    /// blocks that no rank shares, of which each brought the bytes and scales that have arrived here, `[t·k, n/t]` and
    /// `[t·blocks, k]`.
    pub(crate) fn join_columnwise(
        rank: &Rank,
        mine: &Fp8Tensor,
        data: &Tensor,
        scales: &Tensor,
    ) -> Result<Fp8Tensor> {
        let (s, t, [k, m]) = (&rank.compute, rank.tp.size(), [mine.rows(), mine.cols]);
        let all = Fp8Tensor::empty(s, [k, t * m], mine.data.dtype(), mine.scaling, Category::Activations)?;
        if all.scale_inv.shape() != scales.shape() || !m.is_multiple_of(BLOCK) {
            return shape_error("columns of all rows", "ranks share blocks");
        }
        // In words: each row of bytes is of whole blocks.
        let (from, to) =
            (data.as_i32_words()?.view(&[t, k, m / 4])?, all.data.as_i32_words()?.view(&[k, t, m / 4])?);
        rank.kernels.copy(s, &from.transpose(0, 1)?, &to)?;
        Ok(Fp8Tensor { scale_inv: scales.clone(), ..all })
    }
}

/// A factor kept for backward.
#[derive(Clone, Debug)]
pub(crate) struct SavedOperand {
    side: GemmOperand,
    memory: SavedTensor,
    /// Scales of blocks.
    scales: Option<SavedTensor>,
}

impl SavedOperand {
    /// Keeps it.
    pub(crate) fn of(side: &GemmOperand) -> SavedOperand {
        let scales = match side {
            GemmOperand::Fp8(b) if b.scaling != ScalingMode::PerTensor => {
                Some(SavedTensor::small(&b.scale_inv))
            }
            _ => None,
        };
        SavedOperand { side: side.clone(), memory: SavedTensor::activation(side.memory()), scales }
    }

    /// The factor, wherever its memory is by now.
    pub(crate) fn operand(&self) -> GemmOperand {
        let side = self.side.with((*self.memory).clone());
        match (side, &self.scales) {
            (GemmOperand::Fp8(b), Some(scales)) => {
                GemmOperand::Fp8(Fp8Tensor { scale_inv: (**scales).clone(), ..b })
            }
            (side, _) => side,
        }
    }
}

impl Saved for SavedOperand {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.memory);
        self.scales.tensors(f);
        // What was moved away must not stay here.
        self.side = self.operand();
    }
}
