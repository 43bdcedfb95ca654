//! DoRA: squared norms of rows, factors of rows, and columns scaled by them.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::row_grid::vec_width;
use super::{CudaKernels, typed};
use crate::dora::{check_columns, check_squares};
use crate::{DoraFactor, DoraKernels, DoraUpdate, ScaleColumns, ScaleColumnsBackward};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

/// As in dora.cu.
const THREADS: u32 = 256;
const WARPS: usize = THREADS as usize / 32;

kernel_args! {
    header "args/dora.cuh", includes [];

    /// Squared norms of the rows of `[rows, width]`.
    struct RowSquaresArgs {
        x: u64,
        out: u64,
        rows: i64,
        width: i64,
        vectorized: u32,
        pad: u32,
    }

    /// What an update adds to squared norms.
    struct DoraUpdateArgs {
        /// f32 `[groups, n, r]`.
        u: u64,
        /// `[groups, n, r]`, with `stride` elements between groups.
        b: u64,
        /// f32 `[groups, r, r]`.
        gram: u64,
        /// f32 `[groups, n]`.
        out: u64,
        groups: i64,
        n: i64,
        r: i64,
        stride: i64,
        scale: f32,
        pad: u32,
    }

    /// Factors of rows: `[groups, n]` each, with its stride between groups.
    struct DoraFactorArgs {
        base: u64,
        update: u64,
        m: u64,
        factor: u64,
        inv_norm: u64,
        groups: i64,
        n: i64,
        base_stride: i64,
        update_stride: i64,
        m_stride: i64,
        factor_stride: i64,
        inv_stride: i64,
    }

    /// Columns of `[rows, width]` scaled by factors, and the gradients.
    #[derive(Default)]
    struct ColumnScaleArgs {
        x: u64,
        dy: u64,
        /// f32 `[width]`, or `[experts, width]`.
        factor: u64,
        inv_norm: u64,
        /// `[width]`, or 0.
        bias: u64,
        /// i32 `[experts + 1]` and `[experts]`, or 0.
        offsets: u64,
        counts: u64,
        /// y, or dx.
        y: u64,
        products: u64,
        rows: i64,
        width: i64,
        experts: u32,
        vectorized: u32,
    }
}

impl DoraKernels for CudaKernels {
    fn row_squares(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "row_squares";
        let [rows, width] = check_squares(x, out)?;
        let kernel = typed!(OP, x.dtype(), "dora", "row_squares")?;
        s.launch(OP, &[read(x), write(out)], |l| {
            let from = l.address(0)?;
            let whole = width.is_multiple_of(vec_width(x.dtype()));
            let args = RowSquaresArgs {
                x: from,
                out: l.address(1)?,
                rows: rows as i64,
                width: width as i64,
                vectorized: (whole && aligned16(&[from])).into(),
                pad: 0,
            };
            self.launch_kernel(l, kernel, line(blocks(OP, rows, WARPS)?, THREADS), &args)
        })
    }

    fn dora_update(&self, s: &Stream, d: &DoraUpdate) -> Result<()> {
        const OP: &str = "dora_update";
        let [groups, n, r, stride] = d.sizes()?;
        let kernel = typed!(OP, d.b.dtype(), "dora", "dora_update")?;
        s.launch(OP, &[read(d.u), read(d.b), read(d.gram), write(d.out)], |l| {
            let args = DoraUpdateArgs {
                u: l.address(0)?,
                b: l.address(1)?,
                gram: l.address(2)?,
                out: l.address(3)?,
                groups: groups as i64,
                n: n as i64,
                r: r as i64,
                stride: stride as i64,
                scale: d.scale,
                pad: 0,
            };
            self.launch_kernel(l, kernel, line(blocks(OP, groups * n, WARPS)?, THREADS), &args)
        })
    }

    fn dora_factor(&self, s: &Stream, d: &DoraFactor) -> Result<()> {
        const OP: &str = "dora_factor";
        let ([groups, n], strides) = d.sizes()?;
        let [base_stride, update_stride, m_stride, factor_stride, inv_stride] = strides.map(|s| s as i64);
        let kernel = typed!(OP, d.m.dtype(), "dora", "dora_factor")?;
        let args = [read(d.base), read(d.update), read(d.m), write(d.factor), write(d.inv_norm)];
        s.launch(OP, &args, |l| {
            let args = DoraFactorArgs {
                base: l.address(0)?,
                update: l.address(1)?,
                m: l.address(2)?,
                factor: l.address(3)?,
                inv_norm: l.address(4)?,
                groups: groups as i64,
                n: n as i64,
                base_stride,
                update_stride,
                m_stride,
                factor_stride,
                inv_stride,
            };
            self.launch_kernel(l, kernel, line(blocks(OP, groups * n, THREADS as usize)?, THREADS), &args)
        })
    }

    fn scale_columns(&self, s: &Stream, c: &ScaleColumns) -> Result<()> {
        const OP: &str = "scale_columns";
        let [rows, width, experts] = check_columns(OP, &[c.x, c.y], &[c.factor], c.segments, c.bias)?;
        let kernel = typed!(OP, c.x.dtype(), "dora", "scale_columns")?;
        let mut tensors = vec![read(c.x), read(c.factor), write(c.y)];
        tensors.extend(c.segments.into_iter().flat_map(|s| [read(s.offsets), read(s.counts)]));
        tensors.extend(c.bias.map(read));
        s.launch(OP, &tensors, |l| {
            let mut args = ColumnScaleArgs {
                x: l.address(0)?,
                factor: l.address(1)?,
                y: l.address(2)?,
                rows: rows as i64,
                width: width as i64,
                experts: experts as u32,
                ..ColumnScaleArgs::default()
            };
            if c.segments.is_some() {
                (args.offsets, args.counts) = (l.address(3)?, l.address(4)?);
            } else if c.bias.is_some() {
                args.bias = l.address(3)?;
            }
            let whole = width.is_multiple_of(vec_width(c.x.dtype()));
            args.vectorized = (whole && aligned16(&[args.x, args.factor, args.y, args.bias])).into();
            self.launch_kernel(l, kernel, line(blocks(OP, rows, WARPS)?, THREADS), &args)
        })
    }

    fn scale_columns_backward(&self, s: &Stream, c: &ScaleColumnsBackward) -> Result<()> {
        const OP: &str = "scale_columns_backward";
        let all = [c.dy, c.x, c.dx, c.products];
        let [rows, width, experts] = check_columns(OP, &all, &[c.factor, c.inv_norm], c.segments, None)?;
        let kernel = typed!(OP, c.x.dtype(), "dora", "scale_columns_backward")?;
        let mut tensors =
            vec![read(c.dy), read(c.x), read(c.factor), read(c.inv_norm), write(c.dx), write(c.products)];
        tensors.extend(c.segments.into_iter().flat_map(|s| [read(s.offsets), read(s.counts)]));
        s.launch(OP, &tensors, |l| {
            let mut args = ColumnScaleArgs {
                dy: l.address(0)?,
                x: l.address(1)?,
                factor: l.address(2)?,
                inv_norm: l.address(3)?,
                y: l.address(4)?,
                products: l.address(5)?,
                rows: rows as i64,
                width: width as i64,
                experts: experts as u32,
                ..ColumnScaleArgs::default()
            };
            if c.segments.is_some() {
                (args.offsets, args.counts) = (l.address(6)?, l.address(7)?);
            }
            let at = [args.dy, args.x, args.factor, args.inv_norm, args.y, args.products];
            let whole = width.is_multiple_of(vec_width(c.x.dtype()));
            args.vectorized = (whole && aligned16(&at)).into();
            self.launch_kernel(l, kernel, line(blocks(OP, rows, WARPS)?, THREADS), &args)
        })
    }
}
