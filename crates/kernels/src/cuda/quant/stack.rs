//! Quantization and transposition of stacks of FP8 matrices (expert weights).

use super::quantize::{QuantizeArgs, THREADS, kernel};
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{aligned16, blocks};
use crate::cuda::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::quant::stack::check_transpose;
use crate::{ALIGN, BLOCK, Fp8Tensor, QuantizeStack, ScaleSource, ScalingMode};
use ferrotron_tensor::{Category, DType, Result, Stream, read, shape_error, write};

kernel_args! {
    header "args/transpose_stack.cuh", includes [];

    /// Transposes every FP8 matrix of a stack.
    struct TransposeStackArgs {
        from: u64,
        to: u64,
        scale: u64,
        to_scale: u64,
        /// Rows and columns of one matrix.
        r: i64,
        c: i64,
        /// Tiles along the columns.
        across: u32,
        /// One scale per 128×128 block; otherwise one per matrix.
        block_scaled: u32,
        /// 8-byte loads of `from`, and 16-byte stores to `to`.
        vectorized: u32,
        vectorized_to: u32,
    }
}

/// Number of matrices of a stack as the y dimension of a grid.
pub(super) fn stacked(op: &'static str, count: usize) -> Result<u32> {
    match u16::try_from(count) {
        Ok(n) => Ok(n.into()),
        Err(_) => {
            shape_error(op, format!("{count} matrices exceed the y dimension of a grid; split the stack"))
        }
    }
}

impl CudaKernels {
    pub(super) fn launch_amax_quantize_stack(&self, s: &Stream, q: &QuantizeStack) -> Result<()> {
        let ([_, n, k], ..) = q.check("quantize_stack")?;
        let tiles = n.div_ceil(BLOCK) * k.div_ceil(BLOCK);
        // The kernel waits for the amax of all blocks of a matrix, so they must be resident at once, beside other kernels' blocks:
        // three fit per SM, or two of f32.
        let per_sm = if q.x.dtype() == DType::F32 { 1 } else { 2 };
        let once = (1..=per_sm * self.multiprocessors() as usize).contains(&tiles);
        if once && matches!(q.range, ScaleSource::Amax { .. }) {
            return self.launch_quantize_stack(s, q, true);
        }
        if let ScaleSource::Amax { amax, .. } = q.range {
            self.launch_amax_stack(s, q.x, amax)?;
        }
        self.launch_quantize_stack(s, q, false)
    }

    pub(super) fn launch_transpose_stack(
        &self,
        s: &Stream,
        count: usize,
        rows: &Fp8Tensor,
        cols: &Fp8Tensor,
    ) -> Result<()> {
        const OP: &str = "transpose_stack";
        let [n, k] = check_transpose(OP, count, rows, cols)?;
        if count == 0 {
            return Ok(());
        }
        let args = [read(&rows.data), read(&rows.scale_inv), write(&cols.data), write(&cols.scale_inv)];
        s.launch(OP, &args, |l| {
            let (from, to) = (l.address(0)?, l.address(2)?);
            let across = blocks(OP, k, BLOCK)?.max(1);
            let a = TransposeStackArgs {
                from,
                to,
                scale: l.address(1)?,
                to_scale: l.address(3)?,
                r: n as i64,
                c: k as i64,
                across,
                block_scaled: (rows.scaling == ScalingMode::Block128x128).into(),
                vectorized: from.is_multiple_of(8).into(),
                vectorized_to: aligned16(&[to]).into(),
            };
            // Empty matrices still have scales.
            let tiles = blocks(OP, n.div_ceil(BLOCK).max(1) * across as usize, 1)?;
            let grid = LaunchConfig { blocks: [tiles, stacked(OP, count)?, 1], threads: THREADS, shared: 0 };
            self.launch_kernel(l, Kernel::new("quant/transpose_stack", "transpose_stack"), grid, &a)
        })
    }
}

impl CudaKernels {
    /// With `measure`, the same kernel computes amax first.
    pub(super) fn launch_quantize_stack(&self, s: &Stream, q: &QuantizeStack, measure: bool) -> Result<()> {
        const OP: &str = "quantize_stack";
        let ([count, n, k], scaling, format) = q.check(OP)?;
        if count == 0 {
            return Ok(());
        }
        let arrived = measure.then(|| s.zeros(&[count], DType::I32, Category::Workspace)).transpose()?;
        let mut args = vec![read(q.x)];
        let (mut scale, mut amax, mut pow2) = (None, None, false);
        match q.range {
            ScaleSource::Amax { amax: found, pow2: wanted } => {
                (amax, pow2) = (Some(args.len()), wanted);
                args.push(if measure { write(found) } else { read(found) });
            }
            ScaleSource::Given { scale: given, amax: collected } => {
                (scale, amax) = (Some(args.len()), Some(args.len() + 1));
                args.extend([read(given), write(collected)]);
            }
            ScaleSource::Blocks { pow2: wanted } => pow2 = wanted,
        }
        // Argument index of each output's FP8 data; its scales follow.
        let mut places = [None; 2];
        for (place, fp8) in places.iter_mut().zip([q.rows, q.cols]) {
            if let Some(fp8) = fp8 {
                *place = Some(args.len());
                args.extend([write(&fp8.data), write(&fp8.scale_inv)]);
            }
        }
        let waiting = arrived.as_ref().map(|t| {
            args.push(write(t));
            args.len() - 1
        });
        let kernel = match measure {
            true => typed!(OP, q.x.dtype(), "quant/quantize", "quantize_with_amax")?,
            false => kernel(OP, q.x.dtype(), scaling)?,
        };
        let scales = |r: usize, c: usize| match scaling {
            ScalingMode::PerTensor => 1,
            _ => scaling.scales(r, c).iter().product::<usize>() as i64,
        };
        s.launch(OP, &args, |l| {
            let address = |place: Option<usize>, after: usize| place.map_or(Ok(0), |i| l.address(i + after));
            let (x, rows, cols) = (l.address(0)?, address(places[0], 0)?, address(places[1], 0)?);
            let size = q.x.dtype().size();
            let even = (k * size).is_multiple_of(16) || (n <= 1 && count == 1);
            let a = QuantizeArgs {
                x,
                rows,
                cols,
                rows_scale: address(places[0], 1)?,
                cols_scale: address(places[1], 1)?,
                scale: address(scale, 0)?,
                amax: address(amax, 0)?,
                arrived: address(waiting, 0)?,
                r: n as i64,
                c: k as i64,
                stride: k as i64,
                x_step: (n * k) as i64,
                rows_step: (n * k.next_multiple_of(ALIGN)) as i64,
                cols_step: (k * n.next_multiple_of(ALIGN)) as i64,
                rows_scales: scales(n, k),
                cols_scales: scales(k, n),
                amax_step: matches!(q.range, ScaleSource::Amax { .. }).into(),
                across: blocks(OP, k, BLOCK)?.max(1),
                e5m2: (format == Some(DType::E5M2)).into(),
                pow2: pow2.into(),
                vectorized: (aligned16(&[x]) && even).into(),
                vectorized_rows: aligned16(&[rows]).into(),
                vectorized_cols: aligned16(&[cols]).into(),
                ..QuantizeArgs::default()
            };
            // Empty matrices still have scales.
            let tiles = match (n * k, scaling) {
                (0, ScalingMode::PerTensor) => 1,
                _ => blocks(OP, n.div_ceil(BLOCK) * k.div_ceil(BLOCK), 1)?,
            };
            let grid = LaunchConfig { blocks: [tiles, stacked(OP, count)?, 1], threads: THREADS, shared: 0 };
            self.launch_kernel(l, kernel, grid, &a)
        })
    }
}
