//! FP8 GEMM on the CPU. FP8 values are exact in bf16, so it runs the bf16 GEMM on decoded operands.

use super::decode;
use super::encode::{Format, formats};
use crate::cpu::gemm::{Epilogue, GemmShape, gemm_bf16};
use crate::cpu::rows::{PIECE, RowsViewMut, check_len};
use crate::cpu::{CpuContext, Isa, multiversion};
use crate::{ALIGN, BLOCK, ScalingMode};
use ferrotron_tensor::{DType, Float, Launch, Result, bf16};

/// An FP8 operand `[r, k]` in the layout of [`crate::Fp8Tensor`], decoded to bf16.
pub struct Fp8Operand<'a> {
    values: Vec<bf16>,
    scale_inv: &'a [f32],
    scaling: ScalingMode,
    /// Row stride of the scales.
    stride: usize,
    /// Row stride of the values.
    width: usize,
}

/// A view of an operand from a row and column on, which start a block under block scaling. In a stack of matrices with one
/// scale each it lies in matrix `which`.
#[derive(Clone, Copy)]
pub struct Fp8OperandRows<'a> {
    /// The whole operand.
    pub operand: &'a Fp8Operand<'a>,
    /// First row.
    pub row: usize,
    /// First column.
    pub column: usize,
    /// Index of the per-matrix scale.
    pub which: usize,
}

impl Fp8OperandRows<'_> {
    /// Values from column `from` of the view.
    fn values(&self, from: usize) -> &[bf16] {
        let at = self.row * self.operand.width + self.column + from;
        self.operand.values.get(at..).unwrap_or_default()
    }

    /// Inverse scale of block `block` in row `row`.
    fn scale(&self, row: usize, block: usize) -> f32 {
        let f = self.operand;
        let (row, block) = (self.row + row, self.column / BLOCK + block);
        match f.scaling {
            ScalingMode::PerTensor => f.scale_inv[self.which],
            ScalingMode::Block1x128 => f.scale_inv[block * f.stride + row],
            ScalingMode::Block128x128 => f.scale_inv[row / BLOCK * f.stride + block],
        }
    }
}

impl<'a> Fp8Operand<'a> {
    /// Decodes FP8 data.
    pub fn new<F: Format>(
        cpu: CpuContext,
        data: &[F],
        scale_inv: &'a [f32],
        scaling: ScalingMode,
        [rows, k]: [usize; 2],
    ) -> Result<Fp8Operand<'a>> {
        const OP: &str = "fp8_gemm";
        check_len(OP, "data", data.len(), rows * k.next_multiple_of(ALIGN))?;
        let shape = scaling.scales(rows, k);
        if scaling != ScalingMode::PerTensor || scale_inv.is_empty() {
            check_len(OP, "scale_inv", scale_inv.len(), shape.iter().product())?;
        }
        let mut values = vec![bf16::ZERO; data.len()];
        decode(cpu, data, &mut values);
        let (stride, width) = (shape.last().copied().unwrap_or(0), k.next_multiple_of(ALIGN));
        Ok(Fp8Operand { values, scale_inv, scaling, stride, width })
    }

    /// From arguments `at` (FP8 data) and `at + 1` (scales) of a launch.
    pub(crate) fn argument(
        l: &Launch<'a>,
        isa: Isa,
        at: usize,
        format: DType,
        scaling: ScalingMode,
        shape: [usize; 2],
    ) -> Result<Fp8Operand<'a>> {
        let cpu = CpuContext { threads: l.threads(), isa };
        formats!(l.op(), format, F =>
            Fp8Operand::new::<F>(cpu, l.slice(at)?, l.slice(at + 1)?, scaling, shape))
    }

    /// The whole operand as a view.
    pub fn whole(&self) -> Fp8OperandRows<'_> {
        Fp8OperandRows { operand: self, row: 0, column: 0, which: 0 }
    }
}

/// `c [m, n] = a·bᵀ (+ bias) (+ c)`: f32 partial sums per block of shared scales, multiplied by the scales and summed in f32
/// over blocks, then rounded once.
pub fn fp8_gemm<C: Float>(
    cpu: CpuContext,
    a: Fp8OperandRows<'_>,
    b: Fp8OperandRows<'_>,
    k: usize,
    epilogue: Epilogue<'_, bf16>,
    c: RowsViewMut<'_, C>,
) -> Result<()> {
    c.check("fp8_gemm", "c")?;
    let RowsViewMut { data: c, rows: c_rows } = c;
    let (m, n) = (c_rows.outer, c_rows.width);
    if m * n == 0 {
        return Ok(());
    }
    let length = if a.operand.scaling == ScalingMode::PerTensor { k.max(1) } else { BLOCK };
    let blocks = k.div_ceil(length);
    let mut sums = vec![0f32; m * n];
    let mut part = vec![0f32; if blocks > 1 { m * n } else { 0 }];
    let grain = (PIECE / n).max(1);
    for block in 0..blocks {
        let from = block * length;
        let shape = GemmShape {
            m,
            n,
            k: length.min(k - from),
            trans_a: false,
            trans_b: true,
            lda: a.operand.width,
            ldb: b.operand.width,
            ldc: n,
        };
        let into = if blocks > 1 { &mut part } else { &mut sums };
        gemm_bf16::<f32>(cpu, shape, a.values(from), b.values(from), Epilogue::OVERWRITE, into);
        // In f64, since the product of two scales may overflow f32 where the scaled result does not.
        let across: Vec<f64> = (0..n).map(|j| f64::from(b.scale(j, block))).collect();
        let part = &part;
        cpu.threads.parallel_chunks(&mut sums, grain * n, &|i, sums| {
            for (row, sums) in sums.chunks_mut(n).enumerate() {
                let row = i * grain + row;
                let down = f64::from(a.scale(row, block));
                if blocks > 1 {
                    add_scaled(cpu.isa, &part[row * n..][..n], down, &across, sums);
                } else {
                    scale(cpu.isa, down, &across, sums);
                }
            }
        });
    }
    let bias: Vec<f32> = epilogue.bias.unwrap_or_default().iter().map(|b| b.to_f32()).collect();
    let grain = c_rows.grain();
    let mut pieces: Vec<_> = c_rows.cut_mut(c, grain).collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        for c in pieces {
            let view = c_rows.piece(i * grain, grain);
            for row in 0..view.count() {
                let sums = &sums[(i * grain + row) * n..][..n];
                store(cpu.isa, sums, &bias, epilogue.accumulate, view.row_mut(c, row));
            }
        }
    });
    Ok(())
}

multiversion! {
    fn add_scaled(part: &[f32], down: f64, across: &[f64], sums: &mut [f32]) {
        for ((sum, part), across) in sums.iter_mut().zip(part).zip(across) {
            *sum += (f64::from(*part) * (down * across)) as f32;
        }
    }
}

multiversion! {
    fn scale(down: f64, across: &[f64], sums: &mut [f32]) {
        for (sum, across) in sums.iter_mut().zip(across) {
            *sum = (f64::from(*sum) * (down * across)) as f32;
        }
    }
}

multiversion! {
    fn store<C: Float>(sums: &[f32], bias: &[f32], accumulate: bool, c: &mut [C]) {
        if bias.is_empty() && !accumulate {
            for (c, sum) in c.iter_mut().zip(sums) {
                *c = C::from_f32(*sum);
            }
            return;
        }
        for (j, (c, sum)) in c.iter_mut().zip(sums).enumerate() {
            let bias = bias.get(j).copied().unwrap_or(0.0);
            let old = if accumulate { c.to_f32() } else { 0.0 };
            *c = C::from_f32(sum + bias + old);
        }
    }
}
