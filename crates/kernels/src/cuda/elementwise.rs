use super::copy::StridedArgs;
use super::{CudaKernels, Grid, Kernel, typed};
use crate::checks::{dtypes, same_contiguous};
use crate::elementwise::{check_columns, check_dropout, check_one};
use crate::philox::RandomStream;
use crate::{DropoutKey, ElementwiseKernels};
use ferrotron_tensor::{Category, DType, Error, Launch, Result, Stream, Tensor, read, shape_error, write};

/// As in elementwise.cu.
const THREADS: u32 = 256;
const UNROLL: usize = 4;
/// Groups of elements of a block.
const GROUPS: usize = THREADS as usize * UNROLL;
/// Elements whose products one block of a dot product adds up.
const DOT_PART: usize = 16 * THREADS as usize;
/// Rows of a part of a column sum at least, and parts at most: partial rows stay small beside the input.
const PART_ROWS: usize = 64;
const MAX_PARTS: usize = 128;

/// Blocks for `n` things, `each` to a block.
pub(super) fn blocks(op: &'static str, n: usize, each: usize) -> Result<u32> {
    match u32::try_from(n.div_ceil(each)) {
        Ok(b) if b <= i32::MAX as u32 => Ok(b),
        _ => shape_error(op, format!("{n} elements are more than a card can be asked for at once")),
    }
}

/// Are all addresses fit for 16-byte accesses?
pub(super) fn wide(addresses: &[u64]) -> bool {
    addresses.iter().all(|a| a.is_multiple_of(16))
}

/// A line of `blocks` blocks.
pub(super) fn line(blocks: u32, threads: u32) -> Grid {
    Grid { blocks: [blocks, 1, 1], threads, shared: 0 }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel { source: "elementwise", name }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MapArgs {
    a: u64,
    b: u64,
    out: u64,
    n: i64,
    factor: f32,
    wide: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DropoutArgs {
    x: u64,
    y: u64,
    rows: u64,
    n: i64,
    width: i64,
    key: [u32; 2],
    lane: [u32; 2],
    scale: f32,
    threshold: u32,
    wide: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ColumnArgs {
    x: u64,
    out: u64,
    rows: i64,
    n: i64,
    stride: i64,
    part_rows: i64,
    accumulate: u32,
    wide: u32,
}

impl CudaKernels {
    /// A map from `a` (and `b`) to `out`, `n` elements of which the widest has `size` bytes.
    fn map(
        &self,
        l: &Launch,
        kernel: Kernel,
        [a, b, out]: [u64; 3],
        n: usize,
        size: usize,
        factor: f32,
    ) -> Result<()> {
        let args = MapArgs { a, b, out, n: n as i64, factor, wide: wide(&[a, b, out]).into() };
        self.queue(l, kernel, line(blocks(l.op(), n, GROUPS * (16 / size))?, THREADS), &args)
    }
}

impl ElementwiseKernels for CudaKernels {
    fn add(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "add";
        same_contiguous(OP, &[a, b, out])?;
        dtypes(OP, a.dtype(), &[b, out])?;
        let kernel = typed!(OP, a.dtype(), "elementwise", "add")?;
        s.launch(OP, &[read(a), read(b), write(out)], |l| {
            let at = [l.address(0)?, l.address(1)?, l.address(2)?];
            self.map(l, kernel, at, a.numel(), a.dtype().size(), 0.0)
        })
    }

    fn add_assign(&self, s: &Stream, x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "add_assign";
        same_contiguous(OP, &[x, y])?;
        let kernel = match y.dtype() {
            DType::F32 => typed!(OP, x.dtype(), "elementwise", "add_assign_f32")?,
            DType::BF16 => typed!(OP, x.dtype(), "elementwise", "add_assign_bf16")?,
            found => return Err(Error::DType { op: OP, found, wanted: DType::F32 }),
        };
        s.launch(OP, &[write(x), read(y)], |l| {
            let at = [l.address(0)?, l.address(1)?, l.address(0)?];
            self.map(l, kernel, at, x.numel(), x.dtype().size().max(y.dtype().size()), 0.0)
        })
    }

    fn scale(&self, s: &Stream, x: &Tensor, factor: f32) -> Result<()> {
        const OP: &str = "scale";
        same_contiguous(OP, &[x])?;
        let kernel = typed!(OP, x.dtype(), "elementwise", "scale")?;
        s.launch(OP, &[write(x)], |l| {
            let at = l.address(0)?;
            self.map(l, kernel, [at, 0, at], x.numel(), x.dtype().size(), factor)
        })
    }

    fn copy(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "copy";
        if x.dtype() == out.dtype() {
            return self.copy_same(s, x, out);
        }
        same_contiguous(OP, &[x, out])?;
        let name = match (x.dtype(), out.dtype()) {
            (DType::F32, DType::BF16) => "cast_f32_bf16",
            (DType::BF16, DType::F32) => "cast_bf16_f32",
            (DType::F32, DType::F16) => "cast_f32_f16",
            (DType::F16, DType::F32) => "cast_f16_f32",
            (DType::F16, DType::BF16) => "cast_f16_bf16",
            (DType::BF16, DType::F16) => "cast_bf16_f16",
            (found, wanted) => return Err(Error::DType { op: OP, found, wanted }),
        };
        s.launch(OP, &[read(x), write(out)], |l| {
            let at = [l.address(0)?, 0, l.address(1)?];
            self.map(l, kernel(name), at, x.numel(), x.dtype().size().max(out.dtype().size()), 0.0)
        })
    }

    fn column_sum(&self, s: &Stream, x: &Tensor, accumulate: bool, sums: &Tensor) -> Result<()> {
        const OP: &str = "column_sum";
        let [rows, n, stride] = check_columns(x, sums)?;
        dtypes(OP, DType::F32, &[sums])?;
        let first = typed!(OP, x.dtype(), "elementwise", "column_parts")?;
        let part_rows = PART_ROWS.max(rows.div_ceil(MAX_PARTS));
        let parts = rows.div_ceil(part_rows).max(1);
        // One part needs no second pass.
        let several = parts > 1;
        let scratch_size = if several { parts * n } else { 0 };
        let scratch = Tensor::empty(s, &[scratch_size], DType::F32, Category::Workspace)?;
        s.launch(OP, &[read(x), write(sums), write(&scratch)], |l| {
            let (from, to) = (l.address(0)?, l.address(1)?);
            let size = x.dtype().size();
            let args = ColumnArgs {
                x: from,
                out: if several { l.address(2)? } else { to },
                rows: rows as i64,
                n: n as i64,
                stride: stride as i64,
                part_rows: part_rows as i64,
                accumulate: (accumulate && !several).into(),
                wide: (wide(&[from]) && (rows <= 1 || (stride * size).is_multiple_of(16))).into(),
            };
            let across = blocks(OP, n, 32 * (16 / size))?;
            let grid = Grid { blocks: [across, parts as u32, 1], threads: THREADS, shared: 0 };
            self.queue(l, first, grid, &args)?;
            if several {
                let rows = parts as i64;
                let args = ColumnArgs { x: args.out, out: to, rows, accumulate: accumulate.into(), ..args };
                self.queue(l, kernel("column_total"), line(blocks(OP, n, 32)?, THREADS), &args)?;
            }
            Ok(())
        })
    }

    fn dot(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "dot";
        same_contiguous(OP, &[a, b])?;
        check_one(out)?;
        dtypes(OP, DType::F32, &[a, b, out])?;
        let parts = blocks(OP, a.numel(), DOT_PART)?;
        let scratch = Tensor::empty(s, &[parts as usize], DType::F64, Category::Workspace)?;
        s.launch(OP, &[read(a), read(b), write(out), write(&scratch)], |l| {
            let (a_at, b_at, middle) = (l.address(0)?, l.address(1)?, l.address(3)?);
            let (n, wide) = (a.numel() as i64, wide(&[a_at, b_at]).into());
            let args = MapArgs { a: a_at, b: b_at, out: middle, n, factor: 0.0, wide };
            self.queue(l, kernel("dot_parts"), line(parts, THREADS), &args)?;
            let args = MapArgs { a: middle, b: 0, out: l.address(2)?, n: parts.into(), ..args };
            self.queue(l, kernel("dot_total"), line(1, 1024), &args)
        })
    }

    fn softcap_forward(&self, s: &Stream, cap: f32, x: &Tensor) -> Result<()> {
        const OP: &str = "softcap_forward";
        same_contiguous(OP, &[x])?;
        let kernel = typed!(OP, x.dtype(), "elementwise", "softcap_forward")?;
        s.launch(OP, &[write(x)], |l| {
            let at = l.address(0)?;
            self.map(l, kernel, [at, 0, at], x.numel(), x.dtype().size(), cap)
        })
    }

    fn softcap_backward(&self, s: &Stream, cap: f32, y: &Tensor, dy: &Tensor) -> Result<()> {
        const OP: &str = "softcap_backward";
        same_contiguous(OP, &[y, dy])?;
        dtypes(OP, y.dtype(), &[dy])?;
        let kernel = typed!(OP, y.dtype(), "elementwise", "softcap_backward")?;
        s.launch(OP, &[read(y), write(dy)], |l| {
            let at = [l.address(1)?, l.address(0)?, l.address(1)?];
            self.map(l, kernel, at, y.numel(), y.dtype().size(), cap)
        })
    }

    fn dropout(
        &self,
        s: &Stream,
        p: f32,
        key: DropoutKey,
        rows: &Tensor,
        x: &Tensor,
        y: &Tensor,
    ) -> Result<()> {
        const OP: &str = "dropout";
        same_contiguous(OP, &[x, y])?;
        let width = check_dropout(p, rows, x)? as i64;
        dtypes(OP, x.dtype(), &[y])?;
        let kernel = typed!(OP, x.dtype(), "elementwise", "dropout")?;
        let RandomStream { key, lane } = RandomStream::dropout(key);
        s.launch(OP, &[read(x), write(y), read(rows)], |l| {
            let (from, to) = (l.address(0)?, l.address(1)?);
            let args = DropoutArgs {
                x: from,
                y: to,
                rows: l.address(2)?,
                width,
                n: x.numel() as i64,
                key,
                lane,
                scale: 1.0 / (1.0 - p),
                // Dropped words are those below p·2³², which is below 2³² for every p < 1.
                threshold: (f64::from(p) * 4_294_967_296.0) as u32,
                wide: wide(&[from, to]).into(),
                pad: 0,
            };
            let grid = line(blocks(OP, x.numel(), GROUPS * (16 / x.dtype().size()))?, THREADS);
            self.queue(l, kernel, grid, &args)
        })
    }
}

impl CudaKernels {
    /// `out = x` of one type: bytes where both are contiguous, else by strides; one launch either way.
    fn copy_same(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "copy";
        if !matches!(x.dtype(), DType::F32 | DType::BF16 | DType::I32) {
            return Err(Error::DType { op: OP, found: x.dtype(), wanted: DType::F32 });
        }
        let strides = super::copy::strides(x, out)?;
        s.launch(OP, &[read(x), write(out)], |l| {
            let (from, to) = (l.address(0)?, l.address(1)?);
            if x.is_contiguous() && out.is_contiguous() {
                return self.map(l, kernel("copy_bytes"), [from, 0, to], x.bytes(), 1, 0.0);
            }
            let (args, unit) = StridedArgs::new(&strides, x.dtype().size(), from, to);
            let name = match unit {
                2 => "copy_strided_2",
                4 => "copy_strided_4",
                _ => "copy_strided_16",
            };
            self.queue(l, kernel(name), line(blocks(OP, args.count as usize, GROUPS)?, THREADS), &args)
        })
    }
}
