use super::{CpuKernels, same_contiguous};
use crate::checks::dtypes;
use crate::cpu::muon::{MomentumSlices, adamuon, apply, combine, mirror, momentum, normalize, normuon};
use crate::cpu::optimizer::UpdateSlices;
use crate::cpu::optimizer_chunks::{Grad, Param, State};
use crate::muon::{check_apply, check_combine, check_mirror, check_momentum, check_normalize, check_normuon};
use crate::optimizer::check_scalars;
use crate::{AdaptiveScale, ApplyUpdate, MomentumUpdate, MuonKernels, MuonMomentum, WeightDecay, scalars};
use ferrotron_tensor::{Arg, DType, Result, Stream, Tensor, bf16, read, write};

/// Parameters per launch, which takes at most 64 arguments.
const PER_LAUNCH: usize = 12;

impl MuonKernels for CpuKernels {
    fn muon_momentum(
        &self,
        s: &Stream,
        m: MuonMomentum,
        scalars: &Tensor,
        list: &[MomentumUpdate],
    ) -> Result<()> {
        const OP: &str = "muon_momentum";
        check_scalars(OP, scalars)?;
        list.iter().try_for_each(|u| check_momentum(OP, u))?;
        for batch in list.chunks(PER_LAUNCH) {
            let mut args: Vec<Arg> = vec![read(scalars)];
            for u in batch {
                args.extend([read(u.grad), write(u.momentum), write(u.update)]);
                args.extend(u.l2.map(read));
            }
            s.launch(OP, &args, |l| {
                let values = l.slice::<f32>(0)?;
                if !values[scalars::GRAD_NORM].is_finite() {
                    return Ok(());
                }
                let mut at = 1;
                for u in batch {
                    let (grad, update) = (l.slice(at)?, l.slice_mut(at + 2)?);
                    let l2 = match u.l2 {
                        Some(_) => Some((l.slice(at + 3)?, values[scalars::WEIGHT_DECAY] * u.wd_mult)),
                        None => None,
                    };
                    let (cpu, clip) = (self.context(l), values[scalars::CLIP]);
                    match u.momentum.dtype() {
                        DType::F32 => {
                            let held = l.slice_mut::<f32>(at + 1)?;
                            momentum(cpu, m, clip, MomentumSlices { grad, momentum: held, l2, update });
                        }
                        _ => {
                            let held = l.slice_mut::<bf16>(at + 1)?;
                            momentum(cpu, m, clip, MomentumSlices { grad, momentum: held, l2, update });
                        }
                    }
                    at += 3 + usize::from(u.l2.is_some());
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn apply_update(
        &self,
        s: &Stream,
        decay: WeightDecay,
        scalars: &Tensor,
        list: &[ApplyUpdate],
    ) -> Result<()> {
        const OP: &str = "apply_update";
        check_scalars(OP, scalars)?;
        list.iter().try_for_each(|u| check_apply(OP, u))?;
        for batch in list.chunks(PER_LAUNCH) {
            let mut args: Vec<Arg> = vec![read(scalars)];
            for u in batch {
                args.extend([write(u.master), read(u.update)]);
                args.extend(u.weight.map(write));
            }
            s.launch(OP, &args, |l| {
                let values = l.slice::<f32>(0)?;
                if !values[scalars::GRAD_NORM].is_finite() {
                    return Ok(());
                }
                let (mut at, mut slices) = (1, Vec::with_capacity(batch.len()));
                for u in batch {
                    let param = match (u.master.dtype(), u.weight) {
                        (DType::I16, _) => Param::Split(l.slice_mut(at + 2)?, l.slice_mut(at)?),
                        (_, None) => Param::Master(l.slice_mut(at)?),
                        (_, Some(w)) if w.dtype() == DType::F16 => {
                            Param::Half(l.slice_mut(at)?, l.slice_mut(at + 2)?)
                        }
                        (_, Some(_)) => Param::Copied(l.slice_mut(at)?, l.slice_mut(at + 2)?),
                    };
                    slices.push(UpdateSlices {
                        param,
                        grad: Grad::F32(l.slice(at + 1)?),
                        first: State::None,
                        second: State::None,
                        lr: values[scalars::LR] * u.lr_mult,
                        weight_decay: values[scalars::WEIGHT_DECAY] * u.wd_mult,
                        fp8: None,
                    });
                    at += 2 + usize::from(u.weight.is_some());
                }
                apply(self.context(l), decay, slices)
            })?;
        }
        Ok(())
    }

    fn normalize(&self, s: &Stream, x: &Tensor, square: &Tensor, eps: f32, out: &Tensor) -> Result<()> {
        const OP: &str = "normalize";
        check_normalize(OP, x, square, out)?;
        s.launch(OP, &[read(square), read(x), write(out)], |l| {
            let norm = (l.slice::<f64>(0)?[0].sqrt() as f32).max(eps);
            match out.dtype() {
                DType::F32 => normalize(self.context(l), l.slice(1)?, norm, l.slice_mut::<f32>(2)?),
                _ => normalize(self.context(l), l.slice(1)?, norm, l.slice_mut::<bf16>(2)?),
            }
            Ok(())
        })
    }

    fn combine(&self, s: &Stream, factors: [f32; 2], x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "combine";
        check_combine(OP, x, y)?;
        s.launch(OP, &[write(x), read(y)], |l| {
            match x.dtype() {
                DType::F32 => combine(self.context(l), factors, l.slice_mut::<f32>(0)?, l.slice(1)?),
                _ => combine(self.context(l), factors, l.slice_mut::<bf16>(0)?, l.slice(1)?),
            }
            Ok(())
        })
    }

    fn mirror(&self, s: &Stream, x: &Tensor, from: usize) -> Result<()> {
        const OP: &str = "mirror";
        let [_, side] = check_mirror(OP, x, from)?;
        s.launch(OP, &[write(x)], |l| {
            match x.dtype() {
                DType::F32 => mirror(self.context(l), l.slice_mut::<f32>(0)?, side, from),
                _ => mirror(self.context(l), l.slice_mut::<bf16>(0)?, side, from),
            }
            Ok(())
        })
    }

    fn adamuon(&self, s: &Stream, a: AdaptiveScale, scalars: &Tensor, o: &Tensor, v: &Tensor) -> Result<()> {
        const OP: &str = "adamuon";
        check_scalars(OP, scalars)?;
        same_contiguous(OP, &[o, v])?;
        dtypes(OP, DType::F32, &[o, v])?;
        s.launch(OP, &[read(scalars), write(o), write(v)], |l| {
            if l.slice::<f32>(0)?[scalars::GRAD_NORM].is_finite() {
                adamuon(self.context(l), a, l.slice_mut(1)?, l.slice_mut(2)?);
            }
            Ok(())
        })
    }

    fn normuon(&self, s: &Stream, a: AdaptiveScale, scalars: &Tensor, o: &Tensor, v: &Tensor) -> Result<()> {
        const OP: &str = "normuon";
        check_scalars(OP, scalars)?;
        let shape = check_normuon(OP, o, v)?;
        s.launch(OP, &[read(scalars), write(o), write(v)], |l| {
            if l.slice::<f32>(0)?[scalars::GRAD_NORM].is_finite() {
                normuon(self.context(l), a, shape, l.slice_mut(1)?, l.slice_mut(2)?);
            }
            Ok(())
        })
    }
}
