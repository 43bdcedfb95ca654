use super::{CpuKernels, floats, same_contiguous};
use crate::checks::dtypes;
use crate::cpu::grad_norm::{NormType, clip_factor, count_zeros, norm_total};
use crate::cpu::lion::lion;
use crate::cpu::optimizer::{AdamFactors, UpdateSlices, adam, adam_skipped, sgd};
use crate::cpu::optimizer_chunks::{self, Fp8WeightSlices, Grad, Param, State, round_rows};
use crate::cpu::optimizer_packed::{pack_nearest, unpack};
use crate::grad_scaler::ScalerConfig;
use crate::moments::{FirstMoment8, FirstMoment16, SecondMoment8, SecondMoment16, seed};
use crate::optimizer::{
    check_counter, check_halves, check_numbers, check_scalars, check_scaler, check_total, check_update,
    check_values,
};
use crate::{Adam, Lion, Moment, MomentOrder, OptimizerKernels, ParamUpdate, Sgd, counter, scalars, scaler};
use ferrotron_tensor::{Arg, DType, Error, Float, Launch, Result, Stream, Tensor, bf16, read, write};

/// Parameters per launch, which takes at most 64 arguments: seven tensors each, or eleven with FP8 outputs.
const PER_LAUNCH: usize = 9;
const PER_LAUNCH_FP8: usize = 5;
/// Weights per launch that are only rounded: two tensors each.
const WEIGHTS_PER_LAUNCH: usize = 31;

/// How one parameter of a batch is stored, and its factors.
#[derive(Clone, Copy)]
struct UpdateKind {
    master: DType,
    weight: Option<DType>,
    first: DType,
    second: Option<DType>,
    /// Whether there are FP8 outputs, with data.
    fp8: Option<bool>,
    lr_mult: f32,
    wd_mult: f32,
}

impl UpdateKind {
    fn of(u: &ParamUpdate) -> UpdateKind {
        UpdateKind {
            master: u.master.dtype(),
            weight: u.weight.map(Tensor::dtype),
            first: u.first.values.dtype(),
            second: u.second.map(|m| m.values.dtype()),
            fp8: u.fp8.map(|n| n.data.is_some()),
            lr_mult: u.lr_mult,
            wd_mult: u.wd_mult,
        }
    }

    /// The slices of a parameter whose arguments begin at the next of `at`; `values` are the step scalars.
    fn slices<'a>(
        &self,
        l: &Launch<'a>,
        at: &mut impl FnMut() -> usize,
        values: &[f32],
    ) -> Result<UpdateSlices<'a>> {
        let master = at();
        let grad = Grad::F32(l.slice(at())?);
        let param = match (self.master, self.weight) {
            (DType::I16, _) => Param::Split(l.slice_mut(at())?, l.slice_mut(master)?),
            (_, None) => Param::Master(l.slice_mut(master)?),
            (_, Some(DType::F16)) => Param::Half(l.slice_mut(master)?, l.slice_mut(at())?),
            (_, Some(_)) => Param::Copied(l.slice_mut(master)?, l.slice_mut(at())?),
        };
        let first = state(l, at, Some(self.first))?;
        let second = state(l, at, self.second)?;
        let fp8 = match self.fp8 {
            None => None,
            Some(data) => Some(Fp8WeightSlices {
                amax: &mut l.slice_mut(at())?[0],
                bytes: match data {
                    false => None,
                    true => {
                        let (data, scale) = (l.slice_mut(at())?, l.slice::<f32>(at())?[0]);
                        Some((data, scale, &mut l.slice_mut(at())?[0]))
                    }
                },
            }),
        };
        let lr = values[scalars::LR] * self.lr_mult;
        let weight_decay = values[scalars::WEIGHT_DECAY] * self.wd_mult;
        Ok(UpdateSlices { param, grad, first, second, lr, weight_decay, fp8 })
    }
}

/// Runs `step` over the list in batches, with the step scalars and the slices of each parameter. `step` checks whether
/// the gradient norm is finite. `two`: whether there are second moments. On a GPU's stream it runs on the host, on tensors in
/// host memory.
fn for_each_batch(
    s: &Stream,
    op: &'static str,
    scalars: &Tensor,
    list: &[ParamUpdate],
    two: bool,
    step: impl Fn(&Launch, &[f32], Vec<UpdateSlices>) -> Result<()> + Copy + Send + 'static,
) -> Result<()> {
    check_scalars(op, scalars)?;
    list.iter().try_for_each(|u| check_update(op, u, two))?;
    let fp8 = list.iter().any(|u| u.fp8.is_some());
    for batch in list.chunks(if fp8 { PER_LAUNCH_FP8 } else { PER_LAUNCH }) {
        let mut args: Vec<Arg> = vec![read(scalars)];
        for u in batch {
            args.extend([write(u.master), read(u.grad)]);
            args.extend(u.weight.map(write));
            for m in [u.first].into_iter().chain(u.second) {
                args.push(write(m.values));
                args.extend(m.scales.map(write));
            }
            if let Some(n) = &u.fp8 {
                args.push(write(n.amax));
                args.extend(n.data.iter().flat_map(|b| [write(b.data), read(b.scale), write(b.scale_inv)]));
            }
        }
        let kinds: Vec<UpdateKind> = batch.iter().map(UpdateKind::of).collect();
        s.launch_on_host(op, &args, move |l| {
            let values = l.slice::<f32>(0)?;
            let mut next = 1..;
            let mut at = || next.next().unwrap_or_default();
            let slices = kinds.iter().map(|k| k.slices(l, &mut at, values)).collect::<Result<_>>()?;
            step(l, values, slices)
        })?;
    }
    Ok(())
}

fn state<'a>(l: &Launch<'a>, at: &mut impl FnMut() -> usize, moment: Option<DType>) -> Result<State<'a>> {
    match moment {
        None => Ok(State::None),
        Some(DType::F32) => Ok(State::F32(l.slice_mut(at())?)),
        Some(DType::BF16) => Ok(State::Bf16(l.slice_mut(at())?)),
        Some(DType::F16) => Ok(State::F16(l.slice_mut(at())?, l.slice_mut(at())?)),
        Some(DType::U8) => Ok(State::Fp8(l.slice_mut(at())?, l.slice_mut(at())?)),
        Some(found) => Err(Error::DType { op: l.op(), found, wanted: DType::F32 }),
    }
}

impl CpuKernels {
    /// Where the step was skipped, writes the model weights of f32 masters all the same: `weight = master`, rounded. For
    /// weights in memory that is copied to the model whether or not the step was skipped.
    pub fn round_skipped_weights(&self, s: &Stream, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()> {
        const OP: &str = "round_skipped_weights";
        check_scalars(OP, scalars)?;
        let pairs = list.iter().filter(|u| u.master.dtype() == DType::F32);
        let pairs: Vec<(&Tensor, &Tensor)> = pairs.filter_map(|u| Some((u.master, u.weight?))).collect();
        pairs.iter().try_for_each(|(master, weight)| same_contiguous(OP, &[master, weight]))?;
        for batch in pairs.chunks(WEIGHTS_PER_LAUNCH) {
            let pairs = batch.iter().flat_map(|(master, weight)| [read(master), write(weight)]);
            let args: Vec<Arg> = [read(scalars)].into_iter().chain(pairs).collect();
            let (kernels, dtypes) = (*self, batch.iter().map(|(_, w)| w.dtype()).collect::<Vec<_>>());
            s.launch_on_host(OP, &args, move |l| {
                if l.slice::<f32>(0)?[scalars::GRAD_NORM].is_finite() {
                    return Ok(());
                }
                dtypes.iter().enumerate().try_for_each(|(i, dtype)| {
                    floats!(OP, *dtype, T => {
                        round_rows(kernels.context(l), l.slice(1 + 2 * i)?, l.slice_mut::<T>(2 + 2 * i)?);
                        Ok(())
                    })
                })
            })?;
        }
        Ok(())
    }
}

/// Writes the norm and its clipping factor.
fn write_clip(square: f64, max_norm: Option<f32>, out: &mut [f32]) {
    let norm = NormType::L2.finish(square);
    out[scalars::GRAD_NORM] = norm as f32;
    out[scalars::CLIP] = max_norm.map_or(1.0, |max| clip_factor(norm, f64::from(max)));
}

impl OptimizerKernels for CpuKernels {
    fn adam(&self, s: &Stream, a: Adam, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()> {
        let kernels = *self;
        for_each_batch(s, "adam", scalars, list, true, move |l, values, slices| {
            if !values[scalars::GRAD_NORM].is_finite() {
                return adam_skipped(kernels.context(l), slices);
            }
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
                seed: seed(values[scalars::STEPS_DONE]),
            };
            adam(kernels.context(l), factors, slices)
        })
    }

    fn sgd(&self, s: &Stream, rule: Sgd, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()> {
        let kernels = *self;
        for_each_batch(s, "sgd", scalars, list, false, move |l, values, slices| {
            if !values[scalars::GRAD_NORM].is_finite() {
                return Ok(());
            }
            let done = values[scalars::STEPS_DONE];
            sgd(kernels.context(l), rule, done == 0.0, values[scalars::CLIP], seed(done), slices)
        })
    }

    fn lion(&self, s: &Stream, rule: Lion, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()> {
        let kernels = *self;
        for_each_batch(s, "lion", scalars, list, false, move |l, values, slices| {
            if !values[scalars::GRAD_NORM].is_finite() {
                return Ok(());
            }
            lion(kernels.context(l), rule, values[scalars::CLIP], seed(values[scalars::STEPS_DONE]), slices)
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
            let square = norm_total(self.context(l), NormType::L2, &slices);
            write_clip(square, max_norm, l.slice_mut(0)?);
            Ok(())
        })
    }

    fn grad_square_sum(&self, s: &Stream, grads: &[&Tensor], square: &Tensor) -> Result<()> {
        const OP: &str = "grad_square_sum";
        check_total(OP, square)?;
        grads.iter().try_for_each(|g| same_contiguous(OP, &[g]))?;
        let args: Vec<Arg> = [write(square)].into_iter().chain(grads.iter().map(|g| read(g))).collect();
        s.launch(OP, &args, |l| {
            let slices = (1..=grads.len()).map(|i| l.slice::<f32>(i)).collect::<Result<Vec<_>>>()?;
            l.slice_mut::<f64>(0)?[0] = norm_total(self.context(l), NormType::L2, &slices);
            Ok(())
        })
    }

    fn count_zeros(&self, s: &Stream, grads: &[&Tensor], count: &Tensor) -> Result<()> {
        const OP: &str = "count_zeros";
        check_total(OP, count)?;
        grads.iter().try_for_each(|g| same_contiguous(OP, &[g]))?;
        let args: Vec<Arg> = [write(count)].into_iter().chain(grads.iter().map(|g| read(g))).collect();
        s.launch(OP, &args, |l| {
            let slices = (1..=grads.len()).map(|i| l.slice::<f32>(i)).collect::<Result<Vec<_>>>()?;
            l.slice_mut::<f64>(0)?[0] = count_zeros(self.context(l), &slices) as f64;
            Ok(())
        })
    }

    fn clip_factor_from_square_sum(
        &self,
        s: &Stream,
        square: &Tensor,
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()> {
        const OP: &str = "clip_factor_from_square_sum";
        check_total(OP, square)?;
        check_scalars(OP, scalars)?;
        s.launch(OP, &[write(scalars), read(square)], |l| {
            write_clip(l.slice::<f64>(1)?[0], max_norm, l.slice_mut(0)?);
            Ok(())
        })
    }

    fn advance_step(&self, s: &Stream, betas: [f32; 2], counter: &Tensor, scalars: &Tensor) -> Result<()> {
        const OP: &str = "advance_step";
        check_counter(OP, counter)?;
        check_scalars(OP, scalars)?;
        s.launch(OP, &[write(counter), write(scalars)], |l| {
            let (count, out) = (l.slice_mut::<f64>(0)?, l.slice_mut::<f32>(1)?);
            if !out[scalars::GRAD_NORM].is_finite() {
                return Ok(());
            }
            out[scalars::STEPS_DONE] = count[counter::STEPS] as f32;
            count[counter::STEPS] += 1.0;
            let powers = [(counter::BETA1_POWER, scalars::BIAS1), (counter::BETA2_POWER, scalars::BIAS2)];
            for ((power, bias), beta) in powers.into_iter().zip(betas) {
                count[power] *= f64::from(beta);
                out[bias] = (1.0 - count[power]) as f32;
            }
            Ok(())
        })
    }

    fn scale_loss(&self, s: &Stream, state: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "scale_loss";
        check_scaler(OP, state)?;
        same_contiguous(OP, &[x, out])?;
        dtypes(OP, DType::F32, &[x, out])?;
        s.launch(OP, &[read(state), read(x), write(out)], |l| {
            let scale = l.slice::<f64>(0)?[scaler::SCALE] as f32;
            let pairs = l.slice_mut::<f32>(2)?.iter_mut().zip(l.slice::<f32>(1)?);
            pairs.for_each(|(out, x)| *out = x * scale);
            Ok(())
        })
    }

    fn unscale_square(&self, s: &Stream, state: &Tensor, square: &Tensor) -> Result<()> {
        const OP: &str = "unscale_square";
        check_scaler(OP, state)?;
        check_total(OP, square)?;
        s.launch(OP, &[read(state), write(square)], |l| {
            let scale = l.slice::<f64>(0)?[scaler::SCALE];
            l.slice_mut::<f64>(1)?[0] /= scale * scale;
            Ok(())
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
        s.launch(OP, &[write(state), write(scalars)], |l| {
            let (state, out) = (l.slice_mut::<f64>(0)?, l.slice_mut::<f32>(1)?);
            let mut now = scaler::from(config, state);
            out[scalars::LOSS_SCALE] = now.scale;
            out[scalars::CLIP] *= now.inverse();
            now.update(!out[scalars::GRAD_NORM].is_finite());
            state.copy_from_slice(&scaler::of(&now));
            Ok(())
        })
    }

    fn reset_amax(&self, s: &Stream, scalars: &Tensor, numbers: &Tensor) -> Result<()> {
        const OP: &str = "reset_amax";
        check_scalars(OP, scalars)?;
        check_numbers(OP, numbers)?;
        s.launch(OP, &[read(scalars), write(numbers)], |l| {
            if l.slice::<f32>(0)?[scalars::GRAD_NORM].is_finite() {
                l.slice_mut::<f32>(1)?.fill(0.0);
            }
            Ok(())
        })
    }

    fn pack_moment(&self, s: &Stream, order: MomentOrder, values: &Tensor, moment: Moment) -> Result<()> {
        const OP: &str = "pack_moment";
        check_values(OP, &moment, values)?;
        let args: Vec<Arg> =
            [read(values), write(moment.values)].into_iter().chain(moment.scales.map(write)).collect();
        s.launch(OP, &args, |l| {
            let (x, isa) = (l.slice::<f32>(0)?, self.isa);
            match (moment.values.dtype(), order) {
                (DType::F32, _) => l.slice_mut::<f32>(1)?.copy_from_slice(x),
                (DType::BF16, _) => {
                    let out = l.slice_mut::<bf16>(1)?.iter_mut();
                    out.zip(x).for_each(|(o, x)| *o = <bf16 as Float>::from_f32(*x));
                }
                (DType::F16, MomentOrder::First) => {
                    pack_nearest(isa, FirstMoment16, x, l.slice_mut(1)?, l.slice_mut(2)?);
                }
                (DType::F16, MomentOrder::Second) => {
                    pack_nearest(isa, SecondMoment16, x, l.slice_mut(1)?, l.slice_mut(2)?);
                }
                (_, MomentOrder::First) => {
                    pack_nearest(isa, FirstMoment8, x, l.slice_mut(1)?, l.slice_mut(2)?)
                }
                (_, MomentOrder::Second) => {
                    pack_nearest(isa, SecondMoment8, x, l.slice_mut(1)?, l.slice_mut(2)?)
                }
            }
            Ok(())
        })
    }

    fn unpack_moment(&self, s: &Stream, order: MomentOrder, moment: Moment, values: &Tensor) -> Result<()> {
        const OP: &str = "unpack_moment";
        check_values(OP, &moment, values)?;
        let args: Vec<Arg> =
            [write(values), read(moment.values)].into_iter().chain(moment.scales.map(read)).collect();
        s.launch(OP, &args, |l| {
            let (x, isa) = (l.slice_mut::<f32>(0)?, self.isa);
            match (moment.values.dtype(), order) {
                (DType::F32, _) => x.copy_from_slice(l.slice(1)?),
                (DType::BF16, _) => {
                    x.iter_mut().zip(l.slice::<bf16>(1)?).for_each(|(x, m)| *x = m.to_f32());
                }
                (DType::F16, MomentOrder::First) => unpack(isa, FirstMoment16, l.slice(1)?, l.slice(2)?, x),
                (DType::F16, MomentOrder::Second) => unpack(isa, SecondMoment16, l.slice(1)?, l.slice(2)?, x),
                (_, MomentOrder::First) => unpack(isa, FirstMoment8, l.slice(1)?, l.slice(2)?, x),
                (_, MomentOrder::Second) => unpack(isa, SecondMoment8, l.slice(1)?, l.slice(2)?, x),
            }
            Ok(())
        })
    }

    fn split_master(&self, s: &Stream, master: &Tensor, high: &Tensor, low: &Tensor) -> Result<()> {
        const OP: &str = "split_master";
        check_halves(OP, master, high, low)?;
        s.launch(OP, &[read(master), write(high), write(low)], |l| {
            optimizer_chunks::split(self.isa, l.slice(0)?, l.slice_mut(1)?, l.slice_mut(2)?);
            Ok(())
        })
    }

    fn join_master(&self, s: &Stream, high: &Tensor, low: &Tensor, master: &Tensor) -> Result<()> {
        const OP: &str = "join_master";
        check_halves(OP, master, high, low)?;
        s.launch(OP, &[write(master), read(high), read(low)], |l| {
            optimizer_chunks::join(self.isa, l.slice(1)?, l.slice(2)?, l.slice_mut(0)?);
            Ok(())
        })
    }
}
