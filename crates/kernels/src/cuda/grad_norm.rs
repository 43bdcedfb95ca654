//! Global gradient norm, and zeros in gradients.

use super::args::kernel_args;
use super::grid::{LaunchList, line};
use super::{CudaKernels, Kernel};
use crate::checks::{dtypes, same_contiguous};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, write};

/// As in grad_norm.cu: gradients of a launch, elements of a partial sum.
const GRADS: usize = 128;
const PART: usize = 16384;
const THREADS: u32 = 256;

kernel_args! {
    header "args/grad_norm.cuh", includes [];

    /// A gradient: f32 `[n]`.
    #[derive(Default)]
    struct GradSlice {
        x: u64,
        n: i64,
    }

    /// Partial sums over a list of gradients.
    struct GradPartsArgs {
        list: [GradSlice; GRADS],
        /// f64, one for each block.
        parts: u64,
        /// First block of each gradient.
        start: [u32; GRADS],
        /// Gradients in the list.
        count: u32,
        pad: u32,
    }

    /// The gradient norm and the clip factor from n partial sums of squares; or their total.
    pub(super) struct ClipArgs {
        parts: u64,
        /// The step's scalars; or f64 `[1]`, where only the sum is wanted.
        scalars: u64,
        n: i64,
        max_norm: f32,
        /// There is a maximum.
        limited: u32,
    }
}

/// A kernel of grad_norm.cu.
pub(super) fn kernel(name: &'static str) -> Kernel {
    Kernel::new("grad_norm", name)
}

/// Arguments of `clip_factor` and `grad_total`.
pub(super) fn clip(parts: u64, out: u64, n: usize, max_norm: Option<f32>) -> ClipArgs {
    let (max, limited) = (max_norm.unwrap_or_default(), max_norm.is_some().into());
    ClipArgs { parts, scalars: out, n: n as i64, max_norm: max, limited }
}

impl CudaKernels {
    /// Partial sums over the gradients by a kernel, then `end(address of the sums, how many)`, which writes `out`.
    pub(super) fn grad_parts(
        &self,
        s: &Stream,
        (op, kernel_name): (&'static str, &'static str),
        grads: &[&Tensor],
        out: &Tensor,
        end: impl Fn(&Launch, u64, usize) -> Result<()>,
    ) -> Result<()> {
        dtypes(op, DType::F32, grads)?;
        grads.iter().try_for_each(|g| same_contiguous(op, &[g]))?;
        let total: usize = grads.iter().map(|g| g.numel().div_ceil(PART)).sum();
        let scratch = Tensor::empty(s, &[total], DType::F64, Category::Workspace)?;
        let mut args = vec![write(out), write(&scratch)];
        args.extend(grads.iter().map(|g| read(g)));
        s.launch(op, &args, |l| {
            let parts = l.address(1)?;
            let (mut done, mut rest) =
                (0u64, grads.iter().enumerate().filter(|(_, g)| g.numel() > 0).peekable());
            while rest.peek().is_some() {
                let mut p = LaunchList::<GradSlice, GRADS>::new();
                for (i, g) in rest.by_ref().take(GRADS) {
                    p.push(op, GradSlice { x: l.address(2 + i)?, n: g.numel() as i64 }, g.numel(), PART)?;
                }
                let args = GradPartsArgs {
                    list: p.list,
                    parts: parts + 8 * done,
                    start: p.start,
                    count: p.count,
                    pad: 0,
                };
                self.launch_kernel(l, kernel(kernel_name), line(p.blocks, THREADS), &args)?;
                done += u64::from(p.blocks);
            }
            end(l, parts, total)
        })
    }
}
