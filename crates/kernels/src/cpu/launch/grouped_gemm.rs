use super::{CpuKernels, floats};
use crate::cpu::gemm::{Epilogue, GemmShape, gemm_bf16, gemm_f16, gemm_f32};
use crate::cpu::quant;
use crate::cpu::rows::{Rows, RowsViewMut};
use crate::cpu::{CpuContext, Isa};
use crate::grouped_gemm::GroupedSizes;
use crate::{
    BLOCK, Fp8GroupedGemm, Fp8GroupedWgrad, Fp8Tensor, GroupedBias, GroupedGemm, GroupedGemmKernels,
    GroupedWgrad, ScalingMode,
};
use ferrotron_tensor::{Float, Launch, Result, Stream, Tensor, bf16, f16, read, shape_error, write};
use std::ops::Range;

/// Element types with a GEMM whose output has their own type or f32.
trait GemmFloat: Float {
    /// `y = x·op(W) (+ bias)`
    fn output(
        cpu: CpuContext,
        shape: GemmShape,
        x: &[Self],
        w: &[Self],
        bias: Option<&[Self]>,
        y: &mut [Self],
    );
    /// `dW (+)= dyᵀ·x`
    fn gradient(cpu: CpuContext, shape: GemmShape, dy: &[Self], x: &[Self], accumulate: bool, dw: &mut [f32]);
}

macro_rules! gemm_float {
    ($T:ty, $gemm:ident) => {
        impl GemmFloat for $T {
            fn output(
                cpu: CpuContext,
                shape: GemmShape,
                x: &[$T],
                w: &[$T],
                bias: Option<&[$T]>,
                y: &mut [$T],
            ) {
                $gemm(cpu, shape, x, w, Epilogue { bias, accumulate: false }, y);
            }
            fn gradient(
                cpu: CpuContext,
                shape: GemmShape,
                dy: &[$T],
                x: &[$T],
                accumulate: bool,
                dw: &mut [f32],
            ) {
                $gemm(cpu, shape, dy, x, Epilogue { bias: None, accumulate }, dw);
            }
        }
    };
}
gemm_float!(f32, gemm_f32);
gemm_float!(bf16, gemm_bf16);
gemm_float!(f16, gemm_f16);

/// Rows of each segment; checks that they ascend and lie inside `rows`.
fn ranges(op: &'static str, offsets: &[i32], counts: &[i32], rows: usize) -> Result<Vec<Range<usize>>> {
    let mut end = 0;
    let mut all = Vec::with_capacity(counts.len());
    for (e, (offset, count)) in offsets.iter().zip(counts).enumerate() {
        match (usize::try_from(*offset), usize::try_from(*count)) {
            (Ok(first), Ok(n)) if first >= end && first + n <= rows => {
                end = first + n;
                all.push(first..end);
            }
            _ => {
                let what = format!("segment {e} is {count} rows from {offset}, of {rows}, after row {end}");
                return shape_error(op, what);
            }
        }
    }
    Ok(all)
}

/// Elements from `at`; empty where that is beyond the end, as for tensors without elements.
fn from<T>(x: &[T], at: usize) -> &[T] {
    x.get(at..).unwrap_or_default()
}
fn from_mut<T>(x: &mut [T], at: usize) -> &mut [T] {
    x.get_mut(at..).unwrap_or_default()
}

/// Zeroes the rows of y that are in no segment.
fn blank_gaps<T: Float>(segments: &[Range<usize>], y: &mut [T], z: &GroupedSizes) {
    let mut blank = |rows: Range<usize>| {
        for row in rows {
            let row = from_mut(y, row * z.y.row);
            let n = z.n.min(row.len());
            row[..n].fill(T::from_f32(0.0));
        }
    };
    let mut end = 0;
    for rows in segments {
        blank(end..rows.start);
        end = rows.end;
    }
    blank(end..z.rows);
}

/// An operand from arguments `at` (FP8 data) and `at + 1` (scales).
fn operand<'a>(l: &Launch<'a>, isa: Isa, at: usize, b: &Fp8Tensor) -> Result<quant::Fp8Operand<'a>> {
    quant::Fp8Operand::argument(l, isa, at, b.data.dtype(), b.scaling, [b.rows(), b.cols])
}

impl GroupedGemmKernels for CpuKernels {
    fn grouped_gemm(&self, s: &Stream, g: &GroupedGemm) -> Result<()> {
        let (op, z) = (g.name(), g.sizes()?);
        let mut args =
            vec![read(g.segments.offsets), read(g.segments.counts), read(g.x), read(g.w), write(g.y)];
        args.extend(g.bias.map(read));
        s.launch(op, &args, |l| {
            floats!(op, g.x.dtype(), T => {
                let segments = ranges(op, l.slice(0)?, l.slice(1)?, z.rows)?;
                let (x, w, y) = (l.slice::<T>(2)?, l.slice::<T>(3)?, l.slice_mut::<T>(4)?);
                let bias = g.bias.map(|_| l.slice::<T>(5)).transpose()?;
                blank_gaps(&segments, y, &z);
                for (e, rows) in segments.iter().enumerate() {
                    let shape = GemmShape {
                        m: rows.len(),
                        n: z.n,
                        k: z.k,
                        trans_a: false,
                        trans_b: !g.as_stored,
                        lda: z.x.row,
                        ldb: z.w.row,
                        ldc: z.y.row,
                    };
                    let (x, w) = (from(x, rows.start * z.x.row), from(w, e * z.w.matrix));
                    let y = from_mut(y, rows.start * z.y.row);
                    T::output(self.context(l), shape, x, w, bias.map(|b| from(b, e * z.n)), y);
                }
                Ok(())
            })
        })
    }

    fn grouped_wgrad(&self, s: &Stream, g: &GroupedWgrad) -> Result<()> {
        let (op, z) = (GroupedWgrad::NAME, g.sizes()?);
        let args = [read(g.segments.offsets), read(g.segments.counts), read(g.dy), read(g.x), write(g.dw.0)];
        s.launch(op, &args, |l| {
            floats!(op, g.x.dtype(), T => {
                let segments = ranges(op, l.slice(0)?, l.slice(1)?, z.rows)?;
                let (dy, x, dw) = (l.slice::<T>(2)?, l.slice::<T>(3)?, l.slice_mut::<f32>(4)?);
                for (e, rows) in segments.iter().enumerate() {
                    let shape = GemmShape {
                        m: z.n,
                        n: z.k,
                        k: rows.len(),
                        trans_a: true,
                        trans_b: false,
                        lda: z.y.row,
                        ldb: z.x.row,
                        ldc: z.w.row,
                    };
                    let (dy, x) = (from(dy, rows.start * z.y.row), from(x, rows.start * z.x.row));
                    T::gradient(self.context(l), shape, dy, x, g.dw.1, from_mut(dw, e * z.w.matrix));
                }
                Ok(())
            })
        })
    }

    fn fp8_grouped_gemm(&self, s: &Stream, g: &Fp8GroupedGemm) -> Result<()> {
        let z = g.sizes()?;
        let args = [
            read(g.segments.offsets),
            read(g.segments.counts),
            read(&g.x.data),
            read(&g.x.scale_inv),
            read(&g.w.data),
            read(&g.w.scale_inv),
            write(g.y),
        ];
        s.launch(g.name, &args, |l| {
            let segments = ranges(g.name, l.slice(0)?, l.slice(1)?, z.rows)?;
            let (x, w) = (operand(l, self.isa, 2, g.x)?, operand(l, self.isa, 4, g.w)?);
            let y = l.slice_mut::<bf16>(6)?;
            blank_gaps(&segments, y, &z);
            for (e, rows) in segments.iter().enumerate() {
                let a = quant::Fp8OperandRows { row: rows.start, ..x.whole() };
                let b = quant::Fp8OperandRows { row: e * z.n, which: e, ..w.whole() };
                let (data, rows) =
                    (from_mut(y, rows.start * z.y.row), Rows::strided(rows.len(), z.n, z.y.row));
                let y = RowsViewMut { data, rows };
                quant::fp8_gemm(self.context(l), a, b, z.k, Epilogue::OVERWRITE, y)?;
            }
            Ok(())
        })
    }

    fn fp8_grouped_wgrad(&self, s: &Stream, g: &Fp8GroupedWgrad) -> Result<()> {
        let (op, z) = (Fp8GroupedWgrad::NAME, g.sizes()?);
        let args = [
            read(g.segments.offsets),
            read(g.segments.counts),
            read(&g.dy.data),
            read(&g.dy.scale_inv),
            read(&g.x.data),
            read(&g.x.scale_inv),
            write(g.dw.0),
        ];
        s.launch(op, &args, |l| {
            let segments = ranges(op, l.slice(0)?, l.slice(1)?, z.rows)?;
            let (dy, x) = (operand(l, self.isa, 2, g.dy)?, operand(l, self.isa, 4, g.x)?);
            let dw = l.slice_mut::<f32>(6)?;
            for (e, rows) in segments.iter().enumerate() {
                let column = rows.start;
                if g.x.scaling == ScalingMode::Block1x128 && !column.is_multiple_of(BLOCK) && !rows.is_empty()
                {
                    return shape_error(
                        op,
                        format!("segment {e} starts at column {column}, inside a 128-column block"),
                    );
                }
                let (a, b) = (
                    quant::Fp8OperandRows { column, ..dy.whole() },
                    quant::Fp8OperandRows { column, ..x.whole() },
                );
                let epilogue = Epilogue { bias: None, accumulate: g.dw.1 };
                let view = Rows::strided(z.n, z.k, z.w.row);
                let dw = RowsViewMut { data: from_mut(dw, e * z.w.matrix), rows: view };
                quant::fp8_gemm(self.context(l), a, b, rows.len(), epilogue, dw)?;
            }
            Ok(())
        })
    }

    fn grouped_bias(&self, s: &Stream, b: &GroupedBias, y: &Tensor) -> Result<()> {
        self.launch_grouped_bias(s, b, y)
    }

    fn grouped_bias_backward(
        &self,
        s: &Stream,
        b: &GroupedBias,
        dy: &Tensor,
        dbias: (&Tensor, bool),
        dweights: Option<&Tensor>,
    ) -> Result<()> {
        self.launch_grouped_bias_backward(s, b, dy, dbias, dweights)
    }
}
