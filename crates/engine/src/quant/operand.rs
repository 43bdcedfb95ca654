//! One operand of a GEMM, in the model's dtype or quantized.

use super::LinearGemm;
use crate::{Rank, Saved, SavedTensor, StepContext};
use ferrotron_kernels::{BLOCK, Fp8Gemm, Fp8Tensor, Gemm, MicroscaledGemm, MicroscaledTensor, ScalingMode};
use ferrotron_tensor::{Category, Result, Tensor, shape_error};

/// A GEMM operand `[r, k]`, contracted along k.
#[derive(Clone, Debug)]
pub(crate) enum GemmOperand {
    /// In the model's dtype: `[r, k]`, or stored as `[k, r]` with `trans`.
    HighPrecision {
        /// The matrix.
        t: Tensor,
        /// Whether it is stored transposed.
        trans: bool,
    },
    /// Quantized, with its scales.
    Fp8(Fp8Tensor),
    /// In MXFP8 or NVFP4. It is not communicated: those formats are quantized after a gather.
    Microscaled(MicroscaledTensor),
}

/// Options of a GEMM.
#[derive(Clone, Copy)]
pub(crate) struct GemmOptions<'a> {
    /// Which GEMM of the linear it is.
    pub(crate) product: LinearGemm,
    /// `[n]`
    pub(crate) bias: Option<&'a Tensor>,
    /// Accumulate onto the output.
    pub(crate) accumulate: bool,
    /// Allow fast FP8 accumulation.
    pub(crate) fast: bool,
}

impl GemmOperand {
    /// Unquantized, contracted along the last axis.
    pub(crate) fn rowwise(t: &Tensor) -> GemmOperand {
        GemmOperand::HighPrecision { t: t.clone(), trans: false }
    }

    /// Unquantized, contracted along the first axis.
    pub(crate) fn columnwise(t: &Tensor) -> GemmOperand {
        GemmOperand::HighPrecision { t: t.clone(), trans: true }
    }

    /// r.
    pub(crate) fn rows(&self) -> usize {
        match self {
            GemmOperand::HighPrecision { t, trans } => t.shape()[usize::from(*trans)],
            GemmOperand::Fp8(b) => b.rows(),
            GemmOperand::Microscaled(q) => q.rows(),
        }
    }

    /// The data that communication moves. A per-tensor scale is known to all ranks; block scales are
    /// [`GemmOperand::scales`].
    pub(crate) fn memory(&self) -> &Tensor {
        match self {
            GemmOperand::HighPrecision { t, .. } => t,
            GemmOperand::Fp8(b) => &b.data,
            GemmOperand::Microscaled(q) => &q.data,
        }
    }

    /// Block scales that are communicated with the data.
    pub(crate) fn scales(&self) -> Option<&Tensor> {
        match self {
            GemmOperand::Fp8(b) if b.scaling == ScalingMode::Block1x128 => Some(&b.scale_inv),
            _ => None,
        }
    }

    /// Everything that is communicated: data, then scales.
    pub(crate) fn moves(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(self.memory()).chain(self.scales())
    }

    /// Whether a range of rows is an operand of its own: contiguous rows with one scale or none.
    pub(crate) fn divides(&self) -> bool {
        match self {
            GemmOperand::HighPrecision { trans, .. } => !trans,
            GemmOperand::Fp8(b) => b.scaling == ScalingMode::PerTensor,
            GemmOperand::Microscaled(_) => true,
        }
    }

    /// The same kind of operand over other memory.
    pub(crate) fn with(&self, memory: Tensor) -> GemmOperand {
        match self {
            GemmOperand::HighPrecision { trans, .. } => {
                GemmOperand::HighPrecision { t: memory, trans: *trans }
            }
            GemmOperand::Fp8(b) => GemmOperand::Fp8(Fp8Tensor { data: memory, ..b.clone() }),
            GemmOperand::Microscaled(q) => {
                GemmOperand::Microscaled(MicroscaledTensor { data: memory, ..q.clone() })
            }
        }
    }

    /// Memory for an operand of `rows` rows of the same kind.
    pub(crate) fn empty_like(&self, rank: &Rank, rows: usize) -> Result<GemmOperand> {
        if let (GemmOperand::Fp8(b), Some(_)) = (self, self.scales()) {
            let (s, format) = (&rank.compute, b.data.dtype());
            let fp8 = Fp8Tensor::empty(s, [rows, b.cols], format, b.scaling, Category::Activations)?;
            return Ok(GemmOperand::Fp8(Fp8Tensor { pow2: b.pow2, ..fp8 }));
        }
        let t = self.memory();
        Ok(self.with(rank.activation(&[rows, t.shape()[1]], t.dtype())?))
    }

    /// A range of rows.
    pub(crate) fn narrow(&self, start: usize, len: usize) -> Result<GemmOperand> {
        if !self.divides() {
            return shape_error("rows of a GEMM operand", "its block scales cannot be split by rows");
        }
        if let GemmOperand::Microscaled(q) = self {
            return q.narrow(start, len).map(GemmOperand::Microscaled);
        }
        Ok(self.with(self.memory().narrow(0, start, len)?))
    }

    /// The first rows; block scales must cover exactly those.
    pub(crate) fn first_rows(self, rows: usize) -> Result<GemmOperand> {
        if rows == self.rows() {
            return Ok(self);
        }
        match self {
            GemmOperand::HighPrecision { t, trans } => {
                Ok(GemmOperand::HighPrecision { t: t.narrow(usize::from(trans), 0, rows)?, trans })
            }
            quantized => quantized.narrow(0, rows),
        }
    }

    /// A weight `[out, in]` with its output features padded with zeros, as operand of `product`.
    pub(crate) fn padded(self, rank: &Rank, product: LinearGemm, out: usize) -> Result<GemmOperand> {
        // A transposed FP8 weight is allocated padded already.
        if let (GemmOperand::Fp8(b), LinearGemm::Dgrad) = (&self, product) {
            return match b.data.shape()[1] == out {
                true => Ok(GemmOperand::Fp8(Fp8Tensor { cols: out, ..b.clone() })),
                false => shape_error("padded weight", "FP8 weights are padded to multiples of 16"),
            };
        }
        // Lines of a microscaled weight are padded already, too.
        if let (GemmOperand::Microscaled(q), LinearGemm::Dgrad) = (&self, product) {
            return match out <= q.depth() {
                true => Ok(GemmOperand::Microscaled(MicroscaledTensor { cols: out, ..q.clone() })),
                false => shape_error("padded weight", "microscaled weights are padded to multiples of 32"),
            };
        }
        let pad = |t: &Tensor| -> Result<Tensor> {
            let [rows, width] = [t.shape()[0], t.shape()[1]];
            let padded = rank.activation(&[out, width], t.dtype())?;
            rank.compute.copy(t, &padded.narrow(0, 0, rows)?)?;
            rank.compute.zero(&padded.narrow(0, rows, out - rows)?)?;
            Ok(padded)
        };
        let t = self.memory();
        let ([rows, width], padded) = ([t.shape()[0], t.shape()[1]], pad(t)?);
        // The number of 128×128 scales is unchanged if the padding ends within the last tile.
        match &self {
            GemmOperand::Fp8(b) if b.scaling.scales(out, width) != b.scaling.scales(rows, width) => {
                shape_error("padded weight", "its scales do not cover the padding")
            }
            GemmOperand::Microscaled(q) => {
                let (data, scales) = (padded, pad(&q.scales)?);
                Ok(GemmOperand::Microscaled(MicroscaledTensor { data, scales, ..q.clone() }))
            }
            _ => Ok(self.with(padded)),
        }
    }

    /// GEMM `c [m, n] = self [m, k] · otherᵀ [n, k]`, with options `how`.
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
            (GemmOperand::Microscaled(a), GemmOperand::Microscaled(b)) => {
                let name = how.product.kernel();
                rank.kernels.microscaled_gemm(s, &MicroscaledGemm { a, b, bias, accumulate, name, c })
            }
            _ => shape_error(how.product.kernel(), "one operand is quantized and the other is not"),
        }
    }
}

impl LinearGemm {
    /// Name of the FP8 GEMM in profiles.
    fn kernel(self) -> &'static str {
        match self {
            LinearGemm::Fprop => "gemm (output, fp8)",
            LinearGemm::Dgrad => "gemm (input gradient, fp8)",
            LinearGemm::Wgrad => "gemm (weight gradient, fp8)",
        }
    }
}

impl StepContext<'_> {
    /// All-gathers the rows of an operand over the tensor-parallel group.
    pub(crate) fn all_gather_operand(&self, x: &GemmOperand, label: &'static str) -> Result<GemmOperand> {
        let (GemmOperand::Fp8(b), Some(mine), true) = (x, x.scales(), self.rank.tp.size() > 1) else {
            return Ok(x.with(self.all_gather(x.memory(), label)?));
        };
        // Scales are stored block-major over all rows: each rank's go to their own columns.
        let (m, blocks) = (b.rows(), mine.shape()[0]);
        let [all, data] = self.all_gather_pair([mine, &b.data], [label; 2])?;
        let operand = x.empty_like(self.rank, m * self.rank.tp.size())?;
        let operand = operand.with(data);
        if let Some(scales) = operand.scales() {
            self.rank.compute.zero(scales)?;
            for r in 0..self.rank.tp.size() {
                let from = all.narrow(0, r * blocks, blocks)?.narrow(1, 0, m)?;
                self.rank.kernels.copy(&self.rank.compute, &from, &scales.narrow(1, r * m, m)?)?;
            }
        }
        Ok(operand)
    }

    /// Joins the gathered columnwise shards of all ranks, `[k, n/t]` each, whose 128-token blocks no two ranks share.
    /// `data [t·k, n/t]` and `scales [t·blocks, k]` are the all-gathered ones.
    pub(crate) fn join_columnwise(
        rank: &Rank,
        mine: &Fp8Tensor,
        data: &Tensor,
        scales: &Tensor,
    ) -> Result<Fp8Tensor> {
        let (s, t, [k, m]) = (&rank.compute, rank.tp.size(), [mine.rows(), mine.cols]);
        let all = Fp8Tensor::empty(s, [k, t * m], mine.data.dtype(), mine.scaling, Category::Activations)?;
        if all.scale_inv.shape() != scales.shape() || !m.is_multiple_of(BLOCK) {
            return shape_error("columnwise all-gather", "ranks share 128-token blocks");
        }
        // Copied as 4-byte words: every row has whole blocks.
        let (from, to) =
            (data.as_i32_words()?.view(&[t, k, m / 4])?, all.data.as_i32_words()?.view(&[k, t, m / 4])?);
        rank.kernels.copy(s, &from.transpose(0, 1)?, &to)?;
        Ok(Fp8Tensor { scale_inv: scales.clone(), pow2: mine.pow2, ..all })
    }
}

/// A GEMM operand saved for backward.
#[derive(Clone, Debug)]
pub(crate) struct SavedOperand {
    operand: GemmOperand,
    memory: SavedTensor,
    /// Block scales.
    scales: Option<SavedTensor>,
}

impl SavedOperand {
    /// Saves an operand.
    pub(crate) fn of(operand: &GemmOperand) -> SavedOperand {
        let scales = match operand {
            GemmOperand::Fp8(b) if b.scaling != ScalingMode::PerTensor => {
                Some(SavedTensor::small(&b.scale_inv))
            }
            GemmOperand::Microscaled(q) => Some(SavedTensor::small(&q.scales)),
            _ => None,
        };
        SavedOperand { operand: operand.clone(), memory: SavedTensor::activation(operand.memory()), scales }
    }

    /// The operand, wherever offloading has put its memory.
    pub(crate) fn operand(&self) -> GemmOperand {
        let operand = self.operand.with((*self.memory).clone());
        match (operand, &self.scales) {
            (GemmOperand::Fp8(b), Some(scales)) => {
                GemmOperand::Fp8(Fp8Tensor { scale_inv: (**scales).clone(), ..b })
            }
            (GemmOperand::Microscaled(q), Some(scales)) => {
                GemmOperand::Microscaled(MicroscaledTensor { scales: (**scales).clone(), ..q })
            }
            (operand, _) => operand,
        }
    }
}

impl Saved for SavedOperand {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.memory);
        self.scales.tensors(f);
        // Do not keep the memory that was offloaded alive.
        self.operand = self.operand();
    }
}
