use super::groups::{blocks, line};
use super::{CudaKernels, Kernel, typed};
use crate::checks::{dtypes, same_contiguous};
use crate::optim::{check_scalars, check_square};
use crate::{Adam, OptimKernels, Sgd, Update};
use ferrotron_tensor::{
    Arg, Category, DType, Error, Launch, Result, Stream, Tensor, read, shape_error, write,
};

/// As in optim.cu: tensors of a launch, elements of a block.
const LIST: usize = 64;
const UPDATES: usize = 4096;
const GRADS: usize = 128;
const PART: usize = 16384;
const THREADS: u32 = 256;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    master: u64,
    weight: u64,
    grad: u64,
    first: u64,
    second: u64,
    n: i64,
    lr_mult: f32,
    wd_mult: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AdamArgs {
    list: [Entry; LIST],
    scalars: u64,
    start: [u32; LIST],
    count: u32,
    beta1: f32,
    new1: f32,
    beta2: f32,
    new2: f32,
    eps: f32,
    decoupled: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SgdArgs {
    list: [Entry; LIST],
    scalars: u64,
    start: [u32; LIST],
    count: u32,
    momentum: f32,
    fresh: f32,
    nesterov: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Slice {
    x: u64,
    n: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SquareArgs {
    list: [Slice; GRADS],
    parts: u64,
    start: [u32; GRADS],
    count: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ClipArgs {
    parts: u64,
    scalars: u64,
    n: i64,
    max_norm: f32,
    limited: u32,
}

fn kernel(name: &'static str) -> Kernel {
    Kernel { source: "optim", name }
}

/// Tensors of one launch, and where their blocks begin.
struct Portion<T, const N: usize> {
    list: [T; N],
    start: [u32; N],
    count: u32,
    blocks: u32,
}

impl<T: Copy + Default, const N: usize> Portion<T, N> {
    fn new() -> Self {
        Portion { list: [T::default(); N], start: [0; N], count: 0, blocks: 0 }
    }

    fn push(&mut self, op: &'static str, item: T, n: usize, each: usize) -> Result<()> {
        let at = self.count as usize;
        (self.list[at], self.start[at]) = (item, self.blocks);
        self.count += 1;
        self.blocks = blocks(op, self.blocks as usize + n.div_ceil(each), 1)?;
        Ok(())
    }
}

/// Checks a whole list before anything of it is done. `two`: whether there is a second moment.
fn check_list(op: &'static str, scalars: &Tensor, list: &[Update], two: bool) -> Result<()> {
    check_scalars(op, scalars)?;
    dtypes(op, DType::F32, &[scalars])?;
    for u in list {
        let mut all = vec![u.master, u.grad, u.first];
        all.extend(u.weight.into_iter().chain(u.second));
        same_contiguous(op, &all)?;
        dtypes(op, DType::F32, &[u.master, u.grad])?;
        if let Some(w) = u.weight {
            dtypes(op, DType::BF16, &[w])?;
        }
        if !matches!(u.first.dtype(), DType::F32 | DType::BF16) {
            return Err(Error::DType { op, found: u.first.dtype(), wanted: DType::F32 });
        }
        if u.second.is_some() != two || u.second.is_some_and(|t| t.dtype() != u.first.dtype()) {
            return shape_error(op, "Adam needs two moments of one type, SGD one momentum or none");
        }
    }
    Ok(())
}

/// Runs `step` over a checked list in portions of one moment type each.
fn each_portion(
    s: &Stream,
    op: &'static str,
    scalars: &Tensor,
    list: &[Update],
    step: impl Fn(&Launch, DType, &Portion<Entry, LIST>) -> Result<()>,
) -> Result<()> {
    for moments in [DType::F32, DType::BF16] {
        let alike: Vec<&Update> =
            list.iter().filter(|u| u.first.dtype() == moments && u.master.numel() > 0).collect();
        for portion in alike.chunks(LIST) {
            let mut args: Vec<Arg> = vec![read(scalars)];
            for u in portion {
                args.extend([write(u.master), read(u.grad), write(u.first)]);
                args.extend(u.weight.into_iter().chain(u.second).map(write));
            }
            s.launch(op, &args, |l| {
                let (mut at, mut p) = (1, Portion::new());
                let mut next = |there: bool| -> Result<u64> {
                    if !there {
                        return Ok(0);
                    }
                    at += 1;
                    l.address(at - 1)
                };
                for u in portion {
                    let n = u.master.numel();
                    let entry = Entry {
                        master: next(true)?,
                        grad: next(true)?,
                        first: next(true)?,
                        weight: next(u.weight.is_some())?,
                        second: next(u.second.is_some())?,
                        n: n as i64,
                        lr_mult: u.lr_mult,
                        wd_mult: u.wd_mult,
                    };
                    p.push(op, entry, n, UPDATES)?;
                }
                step(l, moments, &p)
            })?;
        }
    }
    Ok(())
}

impl OptimKernels for CudaKernels {
    fn adam(&self, s: &Stream, a: Adam, scalars: &Tensor, list: &[Update]) -> Result<()> {
        const OP: &str = "adam";
        check_list(OP, scalars, list, true)?;
        each_portion(s, OP, scalars, list, |l, moments, p| {
            let args = AdamArgs {
                list: p.list,
                scalars: l.address(0)?,
                start: p.start,
                count: p.count,
                beta1: a.beta1,
                new1: 1.0 - a.beta1,
                beta2: a.beta2,
                new2: 1.0 - a.beta2,
                eps: a.eps,
                decoupled: a.decoupled.into(),
                pad: 0,
            };
            self.queue(l, typed!(OP, moments, "optim", "adam")?, line(p.blocks, THREADS), &args)
        })
    }

    fn sgd(&self, s: &Stream, rule: Sgd, scalars: &Tensor, list: &[Update]) -> Result<()> {
        const OP: &str = "sgd";
        check_list(OP, scalars, list, false)?;
        each_portion(s, OP, scalars, list, |l, moments, p| {
            let args = SgdArgs {
                list: p.list,
                scalars: l.address(0)?,
                start: p.start,
                count: p.count,
                momentum: rule.momentum,
                fresh: 1.0 - rule.dampening,
                nesterov: rule.nesterov.into(),
            };
            self.queue(l, typed!(OP, moments, "optim", "sgd")?, line(p.blocks, THREADS), &args)
        })
    }

    fn clip_factor(
        &self,
        s: &Stream,
        grads: &[&Tensor],
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()> {
        const OP: &str = "clip_factor";
        check_scalars(OP, scalars)?;
        dtypes(OP, DType::F32, &[scalars])?;
        self.squares(s, OP, grads, scalars, |l, parts, n| {
            self.queue(l, kernel("clip_factor"), line(1, 1024), &clip(parts, l.address(0)?, n, max_norm))
        })
    }

    fn square_sum(&self, s: &Stream, grads: &[&Tensor], square: &Tensor) -> Result<()> {
        const OP: &str = "square_sum";
        check_square(OP, square)?;
        self.squares(s, OP, grads, square, |l, parts, n| {
            self.queue(l, kernel("square_total"), line(1, 1024), &clip(parts, l.address(0)?, n, None))
        })
    }

    fn clip_from(&self, s: &Stream, square: &Tensor, max_norm: Option<f32>, scalars: &Tensor) -> Result<()> {
        const OP: &str = "clip_from";
        check_square(OP, square)?;
        check_scalars(OP, scalars)?;
        dtypes(OP, DType::F32, &[scalars])?;
        s.launch(OP, &[write(scalars), read(square)], |l| {
            let args = clip(l.address(1)?, l.address(0)?, 1, max_norm);
            self.queue(l, kernel("clip_factor"), line(1, 1024), &args)
        })
    }
}

fn clip(parts: u64, out: u64, n: usize, max_norm: Option<f32>) -> ClipArgs {
    let (max, limited) = (max_norm.unwrap_or_default(), max_norm.is_some().into());
    ClipArgs { parts, scalars: out, n: n as i64, max_norm: max, limited }
}

impl CudaKernels {
    /// Sums of squares of parts of the gradients, then `end(address of the sums, how many)`, which writes `out`.
    fn squares(
        &self,
        s: &Stream,
        op: &'static str,
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
                let mut p = Portion::<Slice, GRADS>::new();
                for (i, g) in rest.by_ref().take(GRADS) {
                    p.push(op, Slice { x: l.address(2 + i)?, n: g.numel() as i64 }, g.numel(), PART)?;
                }
                let args = SquareArgs {
                    list: p.list,
                    parts: parts + 8 * done,
                    start: p.start,
                    count: p.count,
                    pad: 0,
                };
                self.queue(l, kernel("square_parts"), line(p.blocks, THREADS), &args)?;
                done += u64::from(p.blocks);
            }
            end(l, parts, total)
        })
    }
}
