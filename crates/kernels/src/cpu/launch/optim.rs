use super::{CpuKernels, same_contiguous};
use crate::cpu::grad_norm::{NormType, clip_factor, norm_total};
use crate::cpu::optim::{AdamFactors, UpdateSlices, adam, sgd};
use crate::cpu::optim_list::{Grad, Param, State};
use crate::optim::{check_scalars, check_square};
use crate::{Adam, OptimKernels, Sgd, Update, scalars};
use ferrotron_tensor::{Arg, DType, Error, Launch, Result, Stream, Tensor, read, write};

/// A launch names at most 64 arguments: this many updates of up to five tensors each.
const AT_ONCE: usize = 12;

/// Runs `step` over the list in portions, with the step scalars and slices of each update.
fn each_portion(
    s: &Stream,
    op: &'static str,
    scalars: &Tensor,
    list: &[Update],
    step: impl Fn(&Launch, &[f32], Vec<UpdateSlices>) -> Result<()>,
) -> Result<()> {
    check_scalars(op, scalars)?;
    for portion in list.chunks(AT_ONCE) {
        let mut args: Vec<Arg> = vec![read(scalars)];
        for u in portion {
            let mut all = vec![u.master, u.grad, u.first];
            all.extend(u.weight.into_iter().chain(u.second));
            same_contiguous(op, &all)?;
            args.extend([write(u.master), read(u.grad), write(u.first)]);
            args.extend(u.weight.into_iter().chain(u.second).map(write));
        }
        s.launch(op, &args, |l| {
            let values = l.slice::<f32>(0)?;
            let mut at = 1;
            let mut slices = Vec::with_capacity(portion.len());
            for u in portion {
                let master = l.slice_mut(at)?;
                let (grad, first) = (Grad::F32(l.slice(at + 1)?), state(l, at + 2, Some(u.first))?);
                at += 3;
                let param = match u.weight {
                    None => Param::Master(master),
                    Some(_) => {
                        at += 1;
                        Param::Copied(master, l.slice_mut(at - 1)?)
                    }
                };
                let second = state(l, at, u.second)?;
                at += usize::from(u.second.is_some());
                let lr = values[scalars::LR] * u.lr_mult;
                let weight_decay = values[scalars::WEIGHT_DECAY] * u.wd_mult;
                slices.push(UpdateSlices { param, grad, first, second, lr, weight_decay });
            }
            step(l, values, slices)
        })?;
    }
    Ok(())
}

fn state<'a>(l: &Launch<'a>, at: usize, t: Option<&Tensor>) -> Result<State<'a>> {
    match t.map(Tensor::dtype) {
        None => Ok(State::None),
        Some(DType::F32) => Ok(State::F32(l.slice_mut(at)?)),
        Some(DType::BF16) => Ok(State::Bf16(l.slice_mut(at)?)),
        Some(found) => Err(Error::DType { op: l.op(), found, wanted: DType::F32 }),
    }
}

/// The norm and the factor it asks for.
fn write_clip(square: f64, max_norm: Option<f32>, out: &mut [f32]) {
    let norm = NormType::L2.finish(square);
    out[scalars::GRAD_NORM] = norm as f32;
    out[scalars::CLIP] = max_norm.map_or(1.0, |max| clip_factor(norm, f64::from(max)));
}

impl OptimKernels for CpuKernels {
    fn adam(&self, s: &Stream, a: Adam, scalars: &Tensor, list: &[Update]) -> Result<()> {
        each_portion(s, "adam", scalars, list, |l, values, slices| {
            let factors = AdamFactors {
                beta1: a.beta1,
                new1: 1.0 - a.beta1,
                beta2: a.beta2,
                new2: 1.0 - a.beta2,
                eps: a.eps,
                bias1: values[scalars::BIAS1],
                bias2: values[scalars::BIAS2],
                decoupled: a.decoupled,
                grad_scale: values[scalars::CLIP],
            };
            adam(l.threads(), self.isa, factors, slices)
        })
    }

    fn sgd(&self, s: &Stream, rule: Sgd, scalars: &Tensor, list: &[Update]) -> Result<()> {
        each_portion(s, "sgd", scalars, list, |l, values, slices| {
            let first = values[scalars::STEPS_DONE] == 0.0;
            sgd(l.threads(), self.isa, rule, first, values[scalars::CLIP], slices)
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
        let mut args = vec![write(scalars)];
        args.extend(grads.iter().map(|g| read(g)));
        grads.iter().try_for_each(|g| same_contiguous(OP, &[g]))?;
        s.launch(OP, &args, |l| {
            let slices = (1..=grads.len()).map(|i| l.slice::<f32>(i)).collect::<Result<Vec<_>>>()?;
            let square = norm_total(l.threads(), self.isa, NormType::L2, &slices);
            write_clip(square, max_norm, l.slice_mut(0)?);
            Ok(())
        })
    }

    fn square_sum(&self, s: &Stream, grads: &[&Tensor], square: &Tensor) -> Result<()> {
        const OP: &str = "square_sum";
        check_square(OP, square)?;
        grads.iter().try_for_each(|g| same_contiguous(OP, &[g]))?;
        let args: Vec<Arg> = [write(square)].into_iter().chain(grads.iter().map(|g| read(g))).collect();
        s.launch(OP, &args, |l| {
            let slices = (1..=grads.len()).map(|i| l.slice::<f32>(i)).collect::<Result<Vec<_>>>()?;
            l.slice_mut::<f64>(0)?[0] = norm_total(l.threads(), self.isa, NormType::L2, &slices);
            Ok(())
        })
    }

    fn clip_from(&self, s: &Stream, square: &Tensor, max_norm: Option<f32>, scalars: &Tensor) -> Result<()> {
        const OP: &str = "clip_from";
        check_square(OP, square)?;
        check_scalars(OP, scalars)?;
        s.launch(OP, &[write(scalars), read(square)], |l| {
            write_clip(l.slice::<f64>(1)?[0], max_norm, l.slice_mut(0)?);
            Ok(())
        })
    }
}
