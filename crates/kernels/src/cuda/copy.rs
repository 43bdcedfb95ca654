//! Copies within one dtype: as bytes where both sides are contiguous, otherwise between strides in the widest accesses
//! that alignment allows.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::{CudaKernels, Kernel};
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, read, shape_error, write};

/// Axes of a tensor at most, as in copy.cu.
const AXES: usize = 5;

/// An axis of a copy: its size, and the strides of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Axis {
    size: usize,
    from: usize,
    to: usize,
}

kernel_args! {
    header "args/copy.cuh", includes [];

    /// Copies contiguous bytes.
    struct CopyArgs {
        from: u64,
        to: u64,
        /// Bytes.
        n: i64,
        vectorized: u32,
        pad: u32,
    }

    /// Copies between strides: sizes and strides in units of one access, the last axis the fastest.
    #[derive(Debug)]
    pub(super) struct StridedArgs {
        pub(super) from: u64,
        pub(super) to: u64,
        /// Units in all.
        pub(super) count: i64,
        sizes: [i64; AXES],
        from_steps: [i64; AXES],
        to_steps: [i64; AXES],
        /// Axes in use.
        axes: u32,
        pad: u32,
    }
}

/// The axes of a copy: axes that are contiguous with each other on both sides are merged, axes of size 1 dropped.
pub(super) fn strides(x: &Tensor, out: &Tensor) -> Result<Vec<Axis>> {
    const OP: &str = "copy";
    if x.shape() != out.shape() {
        return shape_error(OP, format!("shapes differ: {:?} and {:?}", x.shape(), out.shape()));
    }
    let width = x.shape().last().copied().unwrap_or(1);
    if [x, out].iter().any(|t| t.strides().last().is_some_and(|s| *s != 1 && width > 1)) {
        return shape_error(OP, "the last axis must be contiguous");
    }
    let all = x.shape().iter().zip(x.strides()).zip(out.strides());
    Ok(joined(all.map(|((size, from), to)| Axis { size: *size, from: *from, to: *to })))
}

fn joined(all: impl Iterator<Item = Axis>) -> Vec<Axis> {
    let mut axes: Vec<Axis> = Vec::with_capacity(AXES);
    for next in all.filter(|a| a.size != 1) {
        match axes.last_mut() {
            Some(last) if last.from == next.from * next.size && last.to == next.to * next.size => {
                *last = Axis { size: last.size * next.size, ..next };
            }
            _ => axes.push(next),
        }
    }
    axes
}

impl StridedArgs {
    /// The arguments, and the bytes of one access: 16 where rows and addresses are aligned, otherwise one element.
    pub(super) fn new(axes: &[Axis], element: usize, from: u64, to: u64) -> (StridedArgs, usize) {
        let even = |elements: usize| (elements * element).is_multiple_of(16);
        let (last, leading) = axes.split_last().unwrap_or((&Axis { size: 1, from: 1, to: 1 }, &[]));
        let vectorized = (from | to).is_multiple_of(16)
            && (last.from, last.to) == (1, 1)
            && even(last.size)
            && leading.iter().all(|a| even(a.from) && even(a.to));
        let unit = if vectorized { 16 } else { element };
        let per_unit = unit / element;
        let mut args = StridedArgs {
            from,
            to,
            count: 1,
            sizes: [1; AXES],
            from_steps: [0; AXES],
            to_steps: [0; AXES],
            axes: leading.len() as u32 + 1,
            pad: 0,
        };
        let in_units = leading
            .iter()
            .map(|a| Axis { size: a.size, from: a.from / per_unit, to: a.to / per_unit })
            .chain([Axis { size: last.size / per_unit, ..*last }]);
        for (i, a) in in_units.enumerate().take(AXES) {
            (args.sizes[i], args.from_steps[i], args.to_steps[i]) =
                (a.size as i64, a.from as i64, a.to as i64);
            args.count *= a.size as i64;
        }
        (args, unit)
    }
}

/// As in copy.cu: threads of a block, and accesses of a thread.
const THREADS: u32 = 256;
const UNROLL: usize = 4;

impl CudaKernels {
    /// `out = x` of the same dtype, in one launch.
    pub(super) fn copy_same(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "copy";
        if !matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16 | DType::I32) {
            return Err(Error::DType { op: OP, found: x.dtype(), wanted: DType::F32 });
        }
        let strides = strides(x, out)?;
        let kernel = |name| Kernel::new("copy", name);
        let moved = THREADS as usize * UNROLL;
        s.launch(OP, &[read(x), write(out)], |l| {
            let (from, to) = (l.address(0)?, l.address(1)?);
            if x.is_contiguous() && out.is_contiguous() {
                let grid = line(blocks(OP, x.bytes(), 16 * moved)?, THREADS);
                let vectorized = aligned16(&[from, to]).into();
                let args = CopyArgs { from, to, n: x.bytes() as i64, vectorized, pad: 0 };
                return self.launch_kernel(l, kernel("copy_bytes"), grid, &args);
            }
            let (args, unit) = StridedArgs::new(&strides, x.dtype().size(), from, to);
            let name = match unit {
                2 => "copy_strided_2",
                4 => "copy_strided_4",
                _ => "copy_strided_16",
            };
            self.launch_kernel(l, kernel(name), line(blocks(OP, args.count as usize, moved)?, THREADS), &args)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(size: usize, from: usize, to: usize) -> Axis {
        Axis { size, from, to }
    }

    /// The kernel's index arithmetic: where unit `i` is read and written.
    fn places(args: &StridedArgs, i: i64) -> (i64, i64) {
        let (mut rest, mut at) = (i, (0, 0));
        for a in (0..args.axes as usize).rev() {
            let here = if a == 0 { rest } else { rest % args.sizes[a] };
            rest /= args.sizes[a];
            at = (at.0 + here * args.from_steps[a], at.1 + here * args.to_steps[a]);
        }
        at
    }

    #[test]
    fn axes_contiguous_on_both_sides_are_merged() {
        let all = [axis(2, 60, 12), axis(3, 20, 4), axis(1, 7, 9), axis(4, 1, 1)];
        assert_eq!(joined(all.into_iter()), [axis(6, 20, 4), axis(4, 1, 1)]);
        assert_eq!(joined([axis(2, 12, 12), axis(3, 4, 4), axis(4, 1, 1)].into_iter()), [axis(24, 1, 1)]);
        assert_eq!(joined([axis(3, 4, 12), axis(2, 12, 4)].into_iter()).len(), 2);
        assert!(joined([axis(1, 5, 5)].into_iter()).is_empty());
    }

    #[test]
    fn every_unit_is_copied_to_its_place() {
        let axes = [axis(3, 8, 48), axis(2, 32, 16), axis(8, 1, 1)];
        for (from, unit) in [(32u64, 16usize), (34, 2)] {
            let (args, found) = StridedArgs::new(&axes, 2, from, 64);
            assert_eq!(found, unit);
            assert_eq!(args.count as usize * unit, 3 * 2 * 8 * 2);
            let per_unit = (unit / 2) as i64;
            for i in 0..args.count {
                let e = i * per_unit;
                let (a, b, c) = (e / 16, e / 8 % 2, e % 8);
                let (x, y) = places(&args, i);
                assert_eq!((x * per_unit, y * per_unit), (a * 8 + b * 32 + c, a * 48 + b * 16 + c));
            }
        }
        // Columns of one element.
        let (args, unit) = StridedArgs::new(&[axis(5, 3, 4)], 4, 16, 16);
        assert_eq!((unit, args.count, places(&args, 4)), (4, 5, (12, 16)));
        assert_eq!(StridedArgs::new(&[], 4, 16, 16).0.count, 1);
    }
}
