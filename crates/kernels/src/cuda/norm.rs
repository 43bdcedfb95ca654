use super::rows::{blocks, columns, per_access, wide};
use super::{CudaKernels, Grid, Kernel, typed};
use crate::checks::{dtypes, rows_of, same_contiguous};
use crate::cpu::rows::Rows;
use crate::{Norm, NormBackward, NormForward, NormKernels};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, write};

const CENTRED: u32 = 1;
const WIDE: u32 = 2;
const WIDE_GAIN: u32 = 4;

#[repr(C)]
#[derive(Clone, Copy)]
struct ForwardArgs {
    x: u64,
    residual: u64,
    sum: u64,
    y: u64,
    gamma: u64,
    beta: u64,
    mean: u64,
    rstd: u64,
    x_outer: i64,
    x_inner: i64,
    y_outer: i64,
    y_inner: i64,
    rows: i64,
    inner: i64,
    width: i32,
    lanes: u32,
    flags: u32,
    eps: f32,
    one: f32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BackwardArgs {
    x: u64,
    gamma: u64,
    mean: u64,
    rstd: u64,
    dy: u64,
    residual: u64,
    dx: u64,
    gamma_parts: u64,
    beta_parts: u64,
    x_outer: i64,
    x_inner: i64,
    dy_outer: i64,
    dy_inner: i64,
    dx_outer: i64,
    dx_inner: i64,
    rows: i64,
    inner: i64,
    width: i32,
    lanes: u32,
    flags: u32,
    one: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PartsArgs {
    parts: u64,
    out: u64,
    groups: i64,
    width: i64,
    accumulate: u32,
    unused: u32,
}

/// Threads that share a row, and threads of a block. Follows from the width alone.
#[derive(Clone, Copy)]
struct Team {
    lanes: u32,
    threads: u32,
}

impl Team {
    /// A team of at least a `chunks`-th part of `work` lanes. Teams within a warp share a block with others, larger
    /// ones have their own.
    fn of(work: usize, chunks: usize) -> Team {
        let lanes = work.div_ceil(chunks).next_power_of_two() as u32;
        Team { lanes, threads: if lanes <= 32 { 128 } else { lanes } }
    }

    fn rows_per_block(self) -> usize {
        (self.threads / self.lanes) as usize
    }

    fn grid(self, blocks: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads: self.threads, shared: 0 }
    }
}

/// The kernel for rows of so many 16-byte chunks: in short ones a thread has one, in held ones up to four in
/// registers, long ones are read again.
fn forward_kernel(op: &'static str, dtype: DType, add: bool, chunks: usize) -> Result<(Kernel, Team)> {
    Ok(match (chunks, add) {
        (..=32, false) => (typed!(op, dtype, "norm", "norm_short")?, Team::of(chunks, 1)),
        (..=32, true) => (typed!(op, dtype, "norm", "add_norm_short")?, Team::of(chunks, 1)),
        (..=4096, false) => (typed!(op, dtype, "norm", "norm_held")?, Team::of(chunks.max(128), 4)),
        (..=4096, true) => (typed!(op, dtype, "norm", "add_norm_held")?, Team::of(chunks.max(128), 4)),
        (_, false) => (typed!(op, dtype, "norm", "norm_long")?, Team { lanes: 1024, threads: 1024 }),
        (_, true) => (typed!(op, dtype, "norm", "add_norm_long")?, Team { lanes: 1024, threads: 1024 }),
    })
}

/// The same backward, with how many blocks share the rows at most. What a block may keep in registers decides;
/// the counts fill a card of 132 multiprocessors once, on any card: sums do not depend on it.
enum Backward {
    /// A block sums several rows before it writes its parts.
    Held(Kernel, Team, usize),
    /// Rows too wide for registers: one kernel for `dx`, one for the parts.
    Long(Kernel, Kernel),
}

fn backward_kernel(op: &'static str, dtype: DType, layer: bool, chunks: usize) -> Result<Backward> {
    let pick = |of_layer: Result<Kernel>, of_rms: Result<Kernel>| if layer { of_layer } else { of_rms };
    let wide_limit = if layer { 3 * 512 } else { 4 * 512 };
    if chunks <= 32 {
        let kernel = pick(
            typed!(op, dtype, "norm", "layer_backward_short"),
            typed!(op, dtype, "norm", "rms_backward_short"),
        )?;
        return Ok(Backward::Held(kernel, Team::of(chunks, 1), 132 * 6));
    }
    if chunks <= 1024 {
        let kernel = pick(
            typed!(op, dtype, "norm", "layer_backward_held"),
            typed!(op, dtype, "norm", "rms_backward_held"),
        )?;
        let team = Team::of(chunks.max(64), 2);
        return Ok(Backward::Held(kernel, team, 132 * 512 / team.threads as usize));
    }
    if chunks <= wide_limit {
        let kernel = pick(
            typed!(op, dtype, "norm", "layer_backward_wide"),
            typed!(op, dtype, "norm", "rms_backward_wide"),
        )?;
        return Ok(Backward::Held(kernel, Team { lanes: 512, threads: 512 }, 132));
    }
    let dx = pick(
        typed!(op, dtype, "norm", "layer_backward_long"),
        typed!(op, dtype, "norm", "rms_backward_long"),
    )?;
    let parts = pick(
        typed!(op, dtype, "norm", "layer_backward_parts"),
        typed!(op, dtype, "norm", "rms_backward_parts"),
    )?;
    Ok(Backward::Long(dx, parts))
}

/// An argument that may be absent: its address, or 0.
fn optional(l: &Launch, i: Option<usize>) -> Result<u64> {
    i.map_or(Ok(0), |i| l.address(i))
}

/// What both forward kernels are given; `fused` are the residual and the sum.
struct Forward<'a> {
    op: &'static str,
    norm: Norm,
    n: &'a NormForward<'a>,
    x_rows: Rows,
    y_rows: Rows,
    fused: Option<[&'a Tensor; 2]>,
}

impl CudaKernels {
    fn forward(&self, s: &Stream, f: &Forward) -> Result<()> {
        let Forward { op, norm, n, x_rows, y_rows, fused } = *f;
        let dtype = n.x.dtype();
        let width = columns(op, x_rows.width)?;
        let chunks = x_rows.width.div_ceil(per_access(dtype));
        let (kernel, team) = forward_kernel(op, dtype, fused.is_some(), chunks)?;
        if x_rows.elements() == 0 {
            return Ok(());
        }
        let mut args = vec![read(n.x), write(n.y), read(n.gamma), write(n.rstd)];
        let mut add = |arg| {
            args.push(arg);
            args.len() - 1
        };
        let beta = n.beta.map(|t| add(read(t)));
        let mean = n.mean.map(|t| add(write(t)));
        let residual = fused.map(|[t, _]| add(read(t)));
        let sum = fused.map(|[_, t]| add(write(t)));
        let grid = team.grid(blocks(op, x_rows.count().div_ceil(team.rows_per_block()))?);
        s.launch(op, &args, |l| {
            let mut a = ForwardArgs {
                x: l.address(0)?,
                residual: optional(l, residual)?,
                sum: optional(l, sum)?,
                y: l.address(1)?,
                gamma: l.address(2)?,
                beta: optional(l, beta)?,
                mean: optional(l, mean)?,
                rstd: l.address(3)?,
                x_outer: x_rows.outer_stride as i64,
                x_inner: x_rows.inner_stride as i64,
                y_outer: y_rows.outer_stride as i64,
                y_inner: y_rows.inner_stride as i64,
                rows: x_rows.count() as i64,
                inner: x_rows.inner as i64,
                width,
                lanes: team.lanes,
                flags: if norm.subtract_mean { CENTRED } else { 0 },
                eps: norm.eps,
                one: if norm.zero_centred { 1.0 } else { 0.0 },
                unused: 0,
            };
            if wide(dtype, &[(a.x, x_rows), (a.y, y_rows), (a.residual, x_rows), (a.sum, x_rows)]) {
                a.flags |= WIDE;
            }
            if (a.gamma | a.beta).is_multiple_of(16) {
                a.flags |= WIDE_GAIN;
            }
            self.queue(l, kernel, grid, &a)
        })
    }
}

impl NormKernels for CudaKernels {
    fn norm_forward(&self, s: &Stream, norm: Norm, n: &NormForward) -> Result<()> {
        const OP: &str = "norm_forward";
        let [x_rows, y_rows] = rows_of(OP, [n.x, n.y])?;
        n.check(OP, norm, x_rows.count(), x_rows.width)?;
        self.forward(s, &Forward { op: OP, norm, n, x_rows, y_rows, fused: None })
    }

    fn add_norm_forward(
        &self,
        s: &Stream,
        norm: Norm,
        residual: &Tensor,
        sum: &Tensor,
        n: &NormForward,
    ) -> Result<()> {
        const OP: &str = "add_norm_forward";
        same_contiguous(OP, &[n.x, residual, sum, n.y])?;
        dtypes(OP, n.x.dtype(), &[residual, sum])?;
        let (count, width) = (n.rstd.numel(), n.gamma.numel());
        n.check(OP, norm, count, width)?;
        if count * width != n.x.numel() {
            let found = n.x.numel();
            return ferrotron_tensor::shape_error(
                OP,
                format!("x holds {found} elements, but {count} rows of {width} are needed"),
            );
        }
        let rows = Rows::dense(count, width);
        self.forward(
            s,
            &Forward { op: OP, norm, n, x_rows: rows, y_rows: rows, fused: Some([residual, sum]) },
        )
    }

    fn norm_backward(&self, s: &Stream, norm: Norm, n: &NormBackward) -> Result<()> {
        const OP: &str = "norm_backward";
        let [x_rows, dy_rows, dx_rows] = n.check(OP, norm)?;
        let (dtype, rows) = (n.x.dtype(), x_rows.count());
        let width = columns(OP, x_rows.width)?;
        let chunks = x_rows.width.div_ceil(per_access(dtype));
        let way = backward_kernel(OP, dtype, norm.subtract_mean, chunks)?;
        let groups = match &way {
            _ if x_rows.elements() == 0 => 0,
            Backward::Held(_, team, most) => rows.div_ceil(team.rows_per_block()).min(*most),
            Backward::Long(..) => rows.min(64),
        };
        let part = groups * x_rows.width;
        let parts = Tensor::empty(s, &[(2 * part).max(1)], DType::F32, Category::Workspace)?;
        let mut args = vec![read(n.x), read(n.gamma), read(n.rstd), read(n.dy), write(n.dx), write(n.dgamma)];
        let mut add = |arg| {
            args.push(arg);
            args.len() - 1
        };
        let scratch = add(write(&parts));
        let mean = n.mean.map(|t| add(read(t)));
        let dbeta = n.dbeta.map(|t| add(write(t)));
        let residual = n.residual.map(|t| add(read(t)));
        s.launch(OP, &args, |l| {
            let gamma_parts = l.address(scratch)?;
            let beta_parts = gamma_parts + 4 * part as u64;
            let mut a = BackwardArgs {
                x: l.address(0)?,
                gamma: l.address(1)?,
                mean: optional(l, mean)?,
                rstd: l.address(2)?,
                dy: l.address(3)?,
                residual: optional(l, residual)?,
                dx: l.address(4)?,
                gamma_parts,
                beta_parts,
                x_outer: x_rows.outer_stride as i64,
                x_inner: x_rows.inner_stride as i64,
                dy_outer: dy_rows.outer_stride as i64,
                dy_inner: dy_rows.inner_stride as i64,
                dx_outer: dx_rows.outer_stride as i64,
                dx_inner: dx_rows.inner_stride as i64,
                rows: rows as i64,
                inner: x_rows.inner as i64,
                width,
                lanes: 0,
                flags: 0,
                one: if norm.zero_centred { 1.0 } else { 0.0 },
            };
            if wide(dtype, &[(a.x, x_rows), (a.dy, dy_rows), (a.dx, dx_rows), (a.residual, dx_rows)]) {
                a.flags |= WIDE;
            }
            if a.gamma.is_multiple_of(16) {
                a.flags |= WIDE_GAIN;
            }
            let groups_u32 = blocks(OP, groups)?;
            match way {
                _ if groups == 0 => {}
                Backward::Held(kernel, team, _) => {
                    a.lanes = team.lanes;
                    self.queue(l, kernel, team.grid(groups_u32), &a)?;
                }
                Backward::Long(dx, parts) => {
                    let grid = Grid { blocks: [blocks(OP, rows)?, 1, 1], threads: 1024, shared: 0 };
                    self.queue(l, dx, grid, &a)?;
                    let across = blocks(OP, x_rows.width.div_ceil(256))?;
                    self.queue(
                        l,
                        parts,
                        Grid { blocks: [across, groups_u32, 1], threads: 256, shared: 0 },
                        &a,
                    )?;
                }
            }
            let sum = Kernel { source: "norm", name: "norm_sum_parts" };
            let grid =
                Grid { blocks: [blocks(OP, x_rows.width.div_ceil(32))?, 1, 1], threads: 1024, shared: 0 };
            for (parts, out) in [(gamma_parts, Some(5)), (beta_parts, dbeta)] {
                let Some(out) = out else { continue };
                let args = PartsArgs {
                    parts,
                    out: l.address(out)?,
                    groups: groups as i64,
                    width: i64::from(width),
                    accumulate: u32::from(n.accumulate),
                    unused: 0,
                };
                self.queue(l, sum, grid, &args)?;
            }
            Ok(())
        })
    }
}
