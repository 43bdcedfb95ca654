//! Quantizes a matrix, as it lies and transposed.

use super::input;
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{aligned16, blocks, line};
use crate::cuda::reduce::ColumnArgs;
use crate::cuda::{CudaKernels, Kernel};
use crate::{BLOCK, Fp8Tensor, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, write};

/// As in quantize.cu.
pub(super) const THREADS: u32 = 256;

kernel_args! {
    header "args/quantize.cuh", includes [];

    /// Quantizes x, or each matrix of a stack, to FP8 as it lies and transposed.
    #[derive(Default)]
    pub(super) struct QuantizeArgs {
        pub(super) x: u64,
        /// FP8 of x and of xᵀ, or 0, and f32 inverses of their scales.
        pub(super) rows: u64,
        pub(super) cols: u64,
        pub(super) rows_scale: u64,
        pub(super) cols_scale: u64,
        /// f32 `[1]`, or 0: a scale that is known (delayed scaling).
        pub(super) scale: u64,
        /// f32: amax that scales follow from, or that is raised.
        pub(super) amax: u64,
        /// f32 `[⌈r/128⌉, c]`, or 0: partial column sums of x.
        pub(super) parts: u64,
        /// u32 `[matrices]`, zeroed: blocks that have contributed to each matrix's amax.
        pub(super) arrived: u64,
        pub(super) r: i64,
        pub(super) c: i64,
        pub(super) stride: i64,
        /// Of a stack, from a matrix to the next: elements of x, bytes, scales, amax.
        pub(super) x_step: i64,
        pub(super) rows_step: i64,
        pub(super) cols_step: i64,
        pub(super) rows_scales: i64,
        pub(super) cols_scales: i64,
        pub(super) amax_step: i64,
        /// Tiles along the columns.
        pub(super) across: u32,
        pub(super) e5m2: u32,
        /// Scales are powers of two.
        pub(super) pow2: u32,
        pub(super) vectorized: u32,
        pub(super) vectorized_rows: u32,
        pub(super) vectorized_cols: u32,
    }
}

/// Positions of a launch's arguments.
#[derive(Clone, Copy, Default)]
struct ArgPositions {
    rows: Option<usize>,
    cols: Option<usize>,
    scale: Option<usize>,
    amax: Option<usize>,
    sums: Option<usize>,
    parts: Option<usize>,
}

/// The kernel of a scaling mode.
pub(super) fn kernel(op: &'static str, input: DType, scaling: ScalingMode) -> Result<Kernel> {
    match scaling {
        ScalingMode::PerTensor => input!(op, input, "quant/quantize", "quantize_tensor"),
        ScalingMode::Block1x128 => input!(op, input, "quant/quantize", "quantize_blocks_1x128"),
        ScalingMode::Block128x128 => input!(op, input, "quant/quantize", "quantize_blocks_128x128"),
    }
}

impl CudaKernels {
    pub(super) fn launch_quantize(&self, s: &Stream, q: &Quantize) -> Result<()> {
        const OP: &str = "quantize";
        let (view, format) = q.check(OP)?;
        let (r, c) = (view.outer, view.width);
        // One kernel writes both orientations in the same scaling mode; otherwise each has a launch of its own.
        let one = match (q.rows, q.cols) {
            (Some(rows), Some(cols)) => rows.scaling == cols.scaling,
            _ => true,
        };
        let mut args = vec![read(q.x)];
        let mut add = |arg| {
            args.push(arg);
            args.len() - 1
        };
        let mut at = ArgPositions::default();
        let mut pow2 = false;
        match q.range {
            ScaleSource::Amax { amax, pow2: wanted } => (at.amax, pow2) = (Some(add(read(amax))), wanted),
            ScaleSource::Given { scale, amax } => {
                (at.scale, at.amax) = (Some(add(read(scale))), Some(add(write(amax))))
            }
            ScaleSource::Blocks { pow2: wanted } => pow2 = wanted,
        }
        // Data, followed by scales.
        let mut output = |b: &'_ Fp8Tensor| (b.data.clone(), b.scale_inv.clone());
        let outputs = [q.rows.map(&mut output), q.cols.map(&mut output)];
        for (place, output) in [&mut at.rows, &mut at.cols].into_iter().zip(&outputs) {
            if let Some((data, scales)) = output {
                *place = Some(add(write(data)));
                add(write(scales));
            }
        }
        let down = r.div_ceil(BLOCK);
        let parts = match q.sums {
            Some((sums, _)) => {
                at.sums = Some(add(write(sums)));
                Some(Tensor::empty(s, &[down * c], DType::F32, Category::Workspace)?)
            }
            None => None,
        };
        at.parts = parts.as_ref().map(|t| add(write(t)));
        let scaling = q.rows.or(q.cols).map(|b| b.scaling);
        let scaling = scaling.unwrap_or(match q.range {
            ScaleSource::Blocks { .. } => ScalingMode::Block128x128,
            _ => ScalingMode::PerTensor,
        });
        let first = kernel(OP, q.x.dtype(), scaling)?;
        s.launch(OP, &args, |l| {
            let from = l.address(0)?;
            let address = |place: Option<usize>, after: usize| place.map_or(Ok(0), |i| l.address(i + after));
            let even = r <= 1 || (view.outer_stride * q.x.dtype().size()).is_multiple_of(16);
            let (rows, cols) = (address(at.rows, 0)?, address(at.cols, 0)?);
            let a = QuantizeArgs {
                x: from,
                rows,
                cols,
                rows_scale: address(at.rows, 1)?,
                cols_scale: address(at.cols, 1)?,
                scale: address(at.scale, 0)?,
                amax: address(at.amax, 0)?,
                parts: address(at.parts, 0)?,
                r: r as i64,
                c: c as i64,
                stride: view.outer_stride as i64,
                across: blocks(OP, c, BLOCK)?.max(1),
                e5m2: (format == Some(DType::E5M2)).into(),
                pow2: pow2.into(),
                vectorized: (aligned16(&[from]) && even).into(),
                vectorized_rows: aligned16(&[rows]).into(),
                vectorized_cols: aligned16(&[cols]).into(),
                ..QuantizeArgs::default()
            };
            // An empty matrix still has a scale.
            let all = match (r * c, scaling) {
                (0, ScalingMode::PerTensor) => 1,
                _ => blocks(OP, down * c.div_ceil(BLOCK), 1)?,
            };
            let grid = line(all, THREADS);
            if one {
                self.launch_kernel(l, first, grid, &a)?;
            } else {
                self.launch_kernel(l, first, grid, &QuantizeArgs { cols: 0, ..a })?;
                let other = q.cols.map_or(scaling, |b| b.scaling);
                let rest = QuantizeArgs { rows: 0, parts: 0, ..a };
                self.launch_kernel(l, kernel(OP, q.x.dtype(), other)?, grid, &rest)?;
            }
            match (q.sums, at.sums) {
                (Some((_, onto)), Some(sums)) => {
                    self.add_parts(l, a.parts, [down, c], l.address(sums)?, onto)
                }
                _ => Ok(()),
            }
        })
    }

    /// sums (+)= Σ of the rows of parts f32 `[down, c]`.
    fn add_parts(&self, l: &Launch, parts: u64, [down, c]: [usize; 2], sums: u64, onto: bool) -> Result<()> {
        let args = ColumnArgs {
            x: parts,
            out: sums,
            rows: down as i64,
            n: c as i64,
            stride: c as i64,
            part_rows: 0,
            accumulate: onto.into(),
            vectorized: 0,
        };
        let grid = line(blocks("quantize", c, 32)?, 1024);
        self.launch_kernel(l, Kernel::new("reduce", "column_total"), grid, &args)
    }
}
