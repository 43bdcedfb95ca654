use super::grad_norm::{clip, kernel};
use super::groups::{blocks, line};
use super::sources::half_of;
use super::{CudaKernels, Kernel};
use crate::checks::{dtypes, same_contiguous};
use crate::grad_scaler::ScalerConfig;
use crate::optim::{
    check_counter, check_halves, check_numbers, check_scalars, check_scaler, check_square, check_update,
    check_values,
};
use crate::{Adam, Moment, OptimKernels, Order, Sgd, Update};
use ferrotron_tensor::{Arg, DType, Error, Launch, Result, Stream, Tensor, read, write};

/// As in optim_list.cuh: tensors of a launch, elements of a block.
const LIST: usize = 36;
const UPDATES: usize = 4096;
const THREADS: u32 = 256;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    master: u64,
    weight: u64,
    grad: u64,
    first: u64,
    first_scales: u64,
    second: u64,
    second_scales: u64,
    amax: u64,
    bytes: u64,
    scale: u64,
    scale_inv: u64,
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
#[derive(Clone, Copy)]
struct CountArgs {
    counter: u64,
    scalars: u64,
    beta1: f32,
    beta2: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScaleArgs {
    state: u64,
    x: u64,
    out: u64,
    n: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScalerArgs {
    state: u64,
    scalars: u64,
    least: f32,
    growth: f32,
    backoff: f32,
    interval: u32,
    hysteresis: i32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ClearArgs {
    scalars: u64,
    numbers: u64,
    n: i64,
}

/// Values, codes, scales; or master, high, low.
#[repr(C)]
#[derive(Clone, Copy)]
struct ThreeArgs {
    three: [u64; 3],
    n: i64,
}

/// Tensors of one launch, and where their blocks begin.
pub(super) struct Portion<T, const N: usize> {
    pub(super) list: [T; N],
    pub(super) start: [u32; N],
    pub(super) count: u32,
    pub(super) blocks: u32,
}

impl<T: Copy + Default, const N: usize> Portion<T, N> {
    pub(super) fn new() -> Self {
        Portion { list: [T::default(); N], start: [0; N], count: 0, blocks: 0 }
    }

    pub(super) fn push(&mut self, op: &'static str, item: T, n: usize, each: usize) -> Result<()> {
        let at = self.count as usize;
        (self.list[at], self.start[at]) = (item, self.blocks);
        self.count += 1;
        self.blocks = blocks(op, self.blocks as usize + n.div_ceil(each), 1)?;
        Ok(())
    }
}

/// How parameters of a launch are kept: the type of their moments, whether masters are in halves, and whether there are f16
/// copies of them.
type Kept = (DType, bool, bool);

fn kept(u: &Update) -> Kept {
    let half = u.weight.is_some_and(|w| w.dtype() == DType::F16);
    (u.first.values.dtype(), u.master.dtype() == DType::I16, half)
}

/// The kernel of a source for parameters kept so.
fn of_copies(kernel: Kernel, (_, _, half): Kept) -> Kernel {
    if half { Kernel { source: half_of(kernel.source), ..kernel } } else { kernel }
}

/// The kernel of a rule for parameters kept so.
macro_rules! steps {
    ($op:expr, $kept:expr, $plain:literal, $packed:literal, $name:literal) => {
        match ($kept.0, $kept.1) {
            (DType::F32, false) => Ok(Kernel { source: $plain, name: concat!($name, "_f32") }),
            (DType::F32, true) => Ok(Kernel { source: $plain, name: concat!($name, "_split_f32") }),
            (DType::BF16, false) => Ok(Kernel { source: $plain, name: concat!($name, "_bf16") }),
            (DType::BF16, true) => Ok(Kernel { source: $plain, name: concat!($name, "_split_bf16") }),
            (DType::F16, false) => Ok(Kernel { source: $packed, name: concat!($name, "_f16") }),
            (DType::F16, true) => Ok(Kernel { source: $packed, name: concat!($name, "_split_f16") }),
            (DType::U8, false) => Ok(Kernel { source: $packed, name: concat!($name, "_fp8") }),
            (DType::U8, true) => Ok(Kernel { source: $packed, name: concat!($name, "_split_fp8") }),
            (found, _) => Err(Error::DType { op: $op, found, wanted: DType::F32 }),
        }
    };
}

/// The kernel between f32 and a moment.
macro_rules! moments {
    ($op:expr, $moment:expr, $order:expr, $name:literal) => {
        match ($moment.values.dtype(), $order) {
            (DType::F32, _) => Ok(concat!($name, "_f32")),
            (DType::BF16, _) => Ok(concat!($name, "_bf16")),
            (DType::F16, Order::First) => Ok(concat!($name, "_first_f16")),
            (DType::F16, Order::Second) => Ok(concat!($name, "_second_f16")),
            (DType::U8, Order::First) => Ok(concat!($name, "_first_fp8")),
            (DType::U8, Order::Second) => Ok(concat!($name, "_second_fp8")),
            (found, _) => Err(Error::DType { op: $op, found, wanted: DType::F32 }),
        }
        .map(|name| Kernel { source: "moments", name })
    };
}

/// Checks a whole list before anything of it is done. `two`: whether there is a second moment.
fn check_list(op: &'static str, scalars: &Tensor, list: &[Update], two: bool) -> Result<()> {
    check_scalars(op, scalars)?;
    dtypes(op, DType::F32, &[scalars])?;
    list.iter().try_for_each(|u| check_update(op, u, two))
}

/// Runs `step` over a checked list in portions that are kept alike.
fn each_portion(
    s: &Stream,
    op: &'static str,
    scalars: &Tensor,
    list: &[Update],
    step: impl Fn(&Launch, Kept, &Portion<Entry, LIST>) -> Result<()>,
) -> Result<()> {
    let mut ways: Vec<Kept> = Vec::new();
    for way in list.iter().map(kept) {
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    for way in ways {
        let alike: Vec<&Update> = list.iter().filter(|u| kept(u) == way && u.grad.numel() > 0).collect();
        for portion in alike.chunks(LIST) {
            let mut args: Vec<Arg> = vec![read(scalars)];
            for u in portion {
                args.extend([write(u.master), read(u.grad), write(u.first.values)]);
                let second = u.second.map(|m| (m.values, m.scales));
                let rest = [u.weight, u.first.scales, second.map(|m| m.0), second.and_then(|m| m.1)];
                args.extend(rest.into_iter().flatten().map(write));
                if let Some(n) = &u.narrow {
                    args.push(write(n.amax));
                    args.extend(
                        n.bytes.iter().flat_map(|b| [write(b.data), read(b.scale), write(b.scale_inv)]),
                    );
                }
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
                    let n = u.grad.numel();
                    let bytes = u.narrow.is_some_and(|n| n.bytes.is_some());
                    let entry = Entry {
                        master: next(true)?,
                        grad: next(true)?,
                        first: next(true)?,
                        weight: next(u.weight.is_some())?,
                        first_scales: next(u.first.scales.is_some())?,
                        second: next(u.second.is_some())?,
                        second_scales: next(u.second.is_some_and(|m| m.scales.is_some()))?,
                        amax: next(u.narrow.is_some())?,
                        bytes: next(bytes)?,
                        scale: next(bytes)?,
                        scale_inv: next(bytes)?,
                        n: n as i64,
                        lr_mult: u.lr_mult,
                        wd_mult: u.wd_mult,
                    };
                    p.push(op, entry, n, UPDATES)?;
                }
                step(l, way, &p)
            })?;
        }
    }
    Ok(())
}

impl OptimKernels for CudaKernels {
    fn adam(&self, s: &Stream, a: Adam, scalars: &Tensor, list: &[Update]) -> Result<()> {
        const OP: &str = "adam";
        check_list(OP, scalars, list, true)?;
        each_portion(s, OP, scalars, list, |l, kept, p| {
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
            let takes = p.list.iter().any(|e| e.amax != 0);
            let kernel: Result<Kernel> = match takes {
                true => steps!(OP, kept, "adam_taken", "adam_packed_taken", "adam_taken"),
                false => steps!(OP, kept, "adam", "adam_packed", "adam"),
            };
            self.queue(l, of_copies(kernel?, kept), line(p.blocks, THREADS), &args)
        })
    }

    fn sgd(&self, s: &Stream, rule: Sgd, scalars: &Tensor, list: &[Update]) -> Result<()> {
        const OP: &str = "sgd";
        check_list(OP, scalars, list, false)?;
        each_portion(s, OP, scalars, list, |l, kept, p| {
            let args = SgdArgs {
                list: p.list,
                scalars: l.address(0)?,
                start: p.start,
                count: p.count,
                momentum: rule.momentum,
                fresh: 1.0 - rule.dampening,
                nesterov: rule.nesterov.into(),
            };
            let kernel: Result<Kernel> = steps!(OP, kept, "sgd", "sgd", "sgd");
            self.queue(l, of_copies(kernel?, kept), line(p.blocks, THREADS), &args)
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

    fn count_step(&self, s: &Stream, betas: [f32; 2], counter: &Tensor, scalars: &Tensor) -> Result<()> {
        const OP: &str = "count_step";
        check_counter(OP, counter)?;
        check_scalars(OP, scalars)?;
        dtypes(OP, DType::F32, &[scalars])?;
        s.launch(OP, &[write(counter), write(scalars)], |l| {
            let [beta1, beta2] = betas;
            let args = CountArgs { counter: l.address(0)?, scalars: l.address(1)?, beta1, beta2 };
            self.queue(l, kernel(OP), line(1, 1), &args)
        })
    }

    fn scale_loss(&self, s: &Stream, state: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "scale_loss";
        check_scaler(OP, state)?;
        same_contiguous(OP, &[x, out])?;
        dtypes(OP, DType::F32, &[x, out])?;
        let n = x.numel();
        s.launch(OP, &[read(state), read(x), write(out)], |l| {
            let args = ScaleArgs { state: l.address(0)?, x: l.address(1)?, out: l.address(2)?, n: n as i64 };
            self.queue(l, kernel(OP), line(blocks(OP, n, THREADS as usize)?, THREADS), &args)
        })
    }

    fn unscale_square(&self, s: &Stream, state: &Tensor, square: &Tensor) -> Result<()> {
        const OP: &str = "unscale_square";
        check_scaler(OP, state)?;
        check_square(OP, square)?;
        s.launch(OP, &[read(state), write(square)], |l| {
            let args = ScaleArgs { state: l.address(0)?, x: 0, out: l.address(1)?, n: 1 };
            self.queue(l, kernel(OP), line(1, 1), &args)
        })
    }

    fn update_scaler(
        &self,
        s: &Stream,
        config: ScalerConfig,
        state: &Tensor,
        scalars: &Tensor,
    ) -> Result<()> {
        const OP: &str = "update_scaler";
        check_scaler(OP, state)?;
        check_scalars(OP, scalars)?;
        dtypes(OP, DType::F32, &[scalars])?;
        s.launch(OP, &[write(state), write(scalars)], |l| {
            let args = ScalerArgs {
                state: l.address(0)?,
                scalars: l.address(1)?,
                least: config.min,
                growth: config.growth,
                backoff: config.backoff,
                interval: config.growth_interval,
                hysteresis: config.hysteresis,
                pad: 0,
            };
            self.queue(l, kernel(OP), line(1, 1), &args)
        })
    }

    fn clear_for_step(&self, s: &Stream, scalars: &Tensor, numbers: &Tensor) -> Result<()> {
        const OP: &str = "clear_for_step";
        check_scalars(OP, scalars)?;
        dtypes(OP, DType::F32, &[scalars])?;
        check_numbers(OP, numbers)?;
        let n = numbers.numel();
        s.launch(OP, &[read(scalars), write(numbers)], |l| {
            let args = ClearArgs { scalars: l.address(0)?, numbers: l.address(1)?, n: n as i64 };
            self.queue(l, kernel(OP), line(blocks(OP, n, THREADS as usize)?, THREADS), &args)
        })
    }

    fn pack_moment(&self, s: &Stream, order: Order, values: &Tensor, moment: Moment) -> Result<()> {
        const OP: &str = "pack_moment";
        check_values(OP, &moment, values)?;
        let kernel: Result<Kernel> = moments!(OP, moment, order, "pack");
        let args = [read(values), write(moment.values)].into_iter().chain(moment.scales.map(write));
        self.element_wise(s, OP, kernel?, &args.collect::<Vec<_>>(), values.numel())
    }

    fn unpack_moment(&self, s: &Stream, order: Order, moment: Moment, values: &Tensor) -> Result<()> {
        const OP: &str = "unpack_moment";
        check_values(OP, &moment, values)?;
        let kernel: Result<Kernel> = moments!(OP, moment, order, "unpack");
        let args = [write(values), read(moment.values)].into_iter().chain(moment.scales.map(read));
        self.element_wise(s, OP, kernel?, &args.collect::<Vec<_>>(), values.numel())
    }

    fn split_master(&self, s: &Stream, master: &Tensor, high: &Tensor, low: &Tensor) -> Result<()> {
        const OP: &str = "split_master";
        check_halves(OP, master, high, low)?;
        let kernel = Kernel { source: "moments", name: OP };
        self.element_wise(s, OP, kernel, &[read(master), write(high), write(low)], master.numel())
    }

    fn join_master(&self, s: &Stream, high: &Tensor, low: &Tensor, master: &Tensor) -> Result<()> {
        const OP: &str = "join_master";
        check_halves(OP, master, high, low)?;
        let kernel = Kernel { source: "moments", name: OP };
        self.element_wise(s, OP, kernel, &[write(master), read(high), read(low)], master.numel())
    }
}

impl CudaKernels {
    /// A kernel with a thread for each of `n` elements of up to three tensors.
    fn element_wise(
        &self,
        s: &Stream,
        op: &'static str,
        kernel: Kernel,
        args: &[Arg],
        n: usize,
    ) -> Result<()> {
        s.launch(op, args, |l| {
            let mut three = [0; 3];
            for (i, at) in three.iter_mut().enumerate().take(args.len()) {
                *at = l.address(i)?;
            }
            let grid = line(blocks(op, n, THREADS as usize)?, THREADS);
            self.queue(l, kernel, grid, &ThreeArgs { three, n: n as i64 })
        })
    }
}
