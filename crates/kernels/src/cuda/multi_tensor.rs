//! Adam, SGD and Lion over lists of parameters, many tensors to a launch (multi-tensor apply).

use super::args::kernel_args;
use super::grid::{LaunchList, line};
use super::sources::Variant;
use super::{CudaKernels, Kernel};
use crate::optimizer::{check_scalars, check_update};
use crate::{Adam, Lion, ParamUpdate, Sgd};
use ferrotron_tensor::{Arg, DType, Error, Launch, Result, Stream, Tensor, read, write};

/// As in multi_tensor.cuh: tensors of a launch, elements of a block.
pub(super) const LIST: usize = 36;
pub(super) const UPDATES: usize = 4096;
const THREADS: u32 = 256;

kernel_args! {
    header "args/multi_tensor.cuh", includes [];

    /// One parameter tensor of an optimizer step; addresses of what it does not have are 0.
    #[derive(Default)]
    pub(super) struct TensorEntry {
        /// f32 master weights; or the low 16 bits of split ones.
        pub(super) master: u64,
        /// bf16 or f16 weights; or the high 16 bits of split master weights.
        pub(super) weight: u64,
        /// f32.
        pub(super) grad: u64,
        /// Moments, and scales of blocks where they are packed.
        pub(super) first: u64,
        pub(super) first_scales: u64,
        pub(super) second: u64,
        pub(super) second_scales: u64,
        /// f32 `[1]`, raised to the amax of the new weights.
        pub(super) amax: u64,
        /// E4M3 of the new weights under `scale`, f32 `[1]`; its inverse is stored, too.
        pub(super) fp8: u64,
        pub(super) scale: u64,
        pub(super) scale_inv: u64,
        pub(super) n: i64,
        pub(super) lr_mult: f32,
        pub(super) wd_mult: f32,
    }

    /// One step of Adam over a list of tensors.
    struct AdamArgs {
        list: [TensorEntry; LIST],
        /// The step's scalars, f32.
        scalars: u64,
        /// First block of each tensor.
        start: [u32; LIST],
        /// Tensors in the list.
        count: u32,
        beta1: f32,
        /// 1 - beta1.
        new1: f32,
        beta2: f32,
        /// 1 - beta2.
        new2: f32,
        eps: f32,
        /// Weight decay is decoupled from the gradient (AdamW).
        decoupled: u32,
        pad: u32,
    }

    /// One step of SGD with momentum over a list of tensors.
    struct SgdArgs {
        list: [TensorEntry; LIST],
        scalars: u64,
        start: [u32; LIST],
        count: u32,
        momentum: f32,
        /// 1 - dampening.
        fresh: f32,
        nesterov: u32,
    }

    /// One step of Lion over a list of tensors.
    struct LionArgs {
        list: [TensorEntry; LIST],
        scalars: u64,
        start: [u32; LIST],
        count: u32,
        beta1: f32,
        /// 1 - beta1.
        new1: f32,
        beta2: f32,
        /// 1 - beta2.
        new2: f32,
        pad: u32,
    }
}

/// Storage of the parameters of a launch: dtype of the moments, whether master weights are split, and whether weights
/// are f16.
type StateDtypes = (DType, bool, bool);

fn state_dtypes(u: &ParamUpdate) -> StateDtypes {
    let half = u.weight.is_some_and(|w| w.dtype() == DType::F16);
    (u.first.values.dtype(), u.master.dtype() == DType::I16, half)
}

/// The kernel for parameters stored so.
fn for_dtypes(kernel: Kernel, (_, _, half): StateDtypes) -> Kernel {
    if half { Kernel { variant: Variant::F16, ..kernel } } else { kernel }
}

/// The kernel of an update rule for parameters stored so.
macro_rules! steps {
    ($op:expr, $kept:expr, $plain:literal, $packed:literal, $name:literal) => {
        match ($kept.0, $kept.1) {
            (DType::F32, false) => Ok(Kernel::new($plain, concat!($name, "_f32"))),
            (DType::F32, true) => Ok(Kernel::new($plain, concat!($name, "_split_f32"))),
            (DType::BF16, false) => Ok(Kernel::new($plain, concat!($name, "_bf16"))),
            (DType::BF16, true) => Ok(Kernel::new($plain, concat!($name, "_split_bf16"))),
            (DType::F16, false) => Ok(Kernel::new($packed, concat!($name, "_f16"))),
            (DType::F16, true) => Ok(Kernel::new($packed, concat!($name, "_split_f16"))),
            (DType::U8, false) => Ok(Kernel::new($packed, concat!($name, "_fp8"))),
            (DType::U8, true) => Ok(Kernel::new($packed, concat!($name, "_split_fp8"))),
            (found, _) => Err(Error::DType { op: $op, found, wanted: DType::F32 }),
        }
    };
}

/// Checks a whole list before any of it is updated. `two`: whether there is a second moment.
fn check_list(op: &'static str, scalars: &Tensor, list: &[ParamUpdate], two: bool) -> Result<()> {
    check_scalars(op, scalars)?;
    list.iter().try_for_each(|u| check_update(op, u, two))
}

/// Runs `step` over a checked list, in launches of parameters with the same storage.
fn for_each_launch(
    s: &Stream,
    op: &'static str,
    scalars: &Tensor,
    list: &[ParamUpdate],
    step: impl Fn(&Launch, StateDtypes, &LaunchList<TensorEntry, LIST>) -> Result<()>,
) -> Result<()> {
    let mut groups: Vec<StateDtypes> = Vec::new();
    for dtypes in list.iter().map(state_dtypes) {
        if !groups.contains(&dtypes) {
            groups.push(dtypes);
        }
    }
    for dtypes in groups {
        let alike: Vec<&ParamUpdate> =
            list.iter().filter(|u| state_dtypes(u) == dtypes && u.grad.numel() > 0).collect();
        for portion in alike.chunks(LIST) {
            let mut args: Vec<Arg> = vec![read(scalars)];
            for u in portion {
                args.extend([write(u.master), read(u.grad), write(u.first.values)]);
                let second = u.second.map(|m| (m.values, m.scales));
                let rest = [u.weight, u.first.scales, second.map(|m| m.0), second.and_then(|m| m.1)];
                args.extend(rest.into_iter().flatten().map(write));
                if let Some(n) = &u.fp8 {
                    args.push(write(n.amax));
                    args.extend(
                        n.data.iter().flat_map(|b| [write(b.data), read(b.scale), write(b.scale_inv)]),
                    );
                }
            }
            s.launch(op, &args, |l| {
                let (mut at, mut p) = (1, LaunchList::new());
                let mut next = |there: bool| -> Result<u64> {
                    if !there {
                        return Ok(0);
                    }
                    at += 1;
                    l.address(at - 1)
                };
                for u in portion {
                    let n = u.grad.numel();
                    let fp8 = u.fp8.is_some_and(|n| n.data.is_some());
                    let entry = TensorEntry {
                        master: next(true)?,
                        grad: next(true)?,
                        first: next(true)?,
                        weight: next(u.weight.is_some())?,
                        first_scales: next(u.first.scales.is_some())?,
                        second: next(u.second.is_some())?,
                        second_scales: next(u.second.is_some_and(|m| m.scales.is_some()))?,
                        amax: next(u.fp8.is_some())?,
                        fp8: next(fp8)?,
                        scale: next(fp8)?,
                        scale_inv: next(fp8)?,
                        n: n as i64,
                        lr_mult: u.lr_mult,
                        wd_mult: u.wd_mult,
                    };
                    p.push(op, entry, n, UPDATES)?;
                }
                step(l, dtypes, &p)
            })?;
        }
    }
    Ok(())
}

impl CudaKernels {
    /// One step of Adam.
    pub(super) fn adam_list(
        &self,
        s: &Stream,
        a: Adam,
        scalars: &Tensor,
        list: &[ParamUpdate],
    ) -> Result<()> {
        const OP: &str = "adam";
        check_list(OP, scalars, list, true)?;
        for_each_launch(s, OP, scalars, list, |l, dtypes, p| {
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
                true => steps!(OP, dtypes, "adam_quantize", "adam_packed_quantize", "adam_quantize"),
                false => steps!(OP, dtypes, "adam", "adam_packed", "adam"),
            };
            self.launch_kernel(l, for_dtypes(kernel?, dtypes), line(p.blocks, THREADS), &args)
        })
    }

    /// One step of SGD.
    pub(super) fn sgd_list(
        &self,
        s: &Stream,
        rule: Sgd,
        scalars: &Tensor,
        list: &[ParamUpdate],
    ) -> Result<()> {
        const OP: &str = "sgd";
        check_list(OP, scalars, list, false)?;
        for_each_launch(s, OP, scalars, list, |l, dtypes, p| {
            let args = SgdArgs {
                list: p.list,
                scalars: l.address(0)?,
                start: p.start,
                count: p.count,
                momentum: rule.momentum,
                fresh: 1.0 - rule.dampening,
                nesterov: rule.nesterov.into(),
            };
            let kernel: Result<Kernel> = steps!(OP, dtypes, "sgd", "sgd", "sgd");
            self.launch_kernel(l, for_dtypes(kernel?, dtypes), line(p.blocks, THREADS), &args)
        })
    }

    /// One step of Lion.
    pub(super) fn lion_list(
        &self,
        s: &Stream,
        rule: Lion,
        scalars: &Tensor,
        list: &[ParamUpdate],
    ) -> Result<()> {
        const OP: &str = "lion";
        check_list(OP, scalars, list, false)?;
        for_each_launch(s, OP, scalars, list, |l, dtypes, p| {
            let args = LionArgs {
                list: p.list,
                scalars: l.address(0)?,
                start: p.start,
                count: p.count,
                beta1: rule.beta1,
                new1: 1.0 - rule.beta1,
                beta2: rule.beta2,
                new2: 1.0 - rule.beta2,
                pad: 0,
            };
            let kernel: Result<Kernel> = steps!(OP, dtypes, "lion", "lion", "lion");
            self.launch_kernel(l, for_dtypes(kernel?, dtypes), line(p.blocks, THREADS), &args)
        })
    }
}
