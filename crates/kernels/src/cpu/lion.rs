//! Lion over lists of tensors: the sign of an interpolated momentum.

use super::optimizer::UpdateSlices;
use super::optimizer_chunks::{Chunk, Grad, State, over_master, split_chunks};
use super::optimizer_packed::one_moment;
use super::{CpuContext, Isa, multiversion};
use crate::Lion;
use crate::moments::{FirstMoment8, FirstMoment16};
use ferrotron_tensor::{Float, Result, shape_error};

/// One Lion step on every tensor, with `g` the scaled gradient: `p −= lr·(sign(β1·m + (1−β1)·g) + wd·p)`, then
/// `m = β2·m + (1−β2)·g`.
pub fn lion(
    cpu: CpuContext,
    lion: Lion,
    grad_scale: f32,
    seed: u32,
    list: Vec<UpdateSlices<'_>>,
) -> Result<()> {
    let (mut chunks, _) = split_chunks("lion", list, false)?;
    if chunks.iter().any(|c| matches!(c.first, State::None)) {
        return shape_error("lion", "Lion needs a momentum");
    }
    cpu.threads.parallel_chunks(&mut chunks, 1, &|_, chunks| {
        for Chunk { param, grad, first, lr, weight_decay, .. } in chunks {
            let step = LionStep { lion, grad_scale, lr: *lr, weight_decay: *weight_decay };
            over_master(cpu.isa, param, &mut None, |r, p| {
                let grad = grad.part(r.clone());
                match &mut *first {
                    State::F32(m) => lion_any(cpu.isa, step, p, grad, &mut m[r]),
                    State::Bf16(m) => lion_any(cpu.isa, step, p, grad, &mut m[r]),
                    State::F16(m, scales) => {
                        one_moment::<FirstMoment16>(cpu.isa, seed, r, p, (m, scales), |p, m| {
                            lion_any(cpu.isa, step, p, grad, m);
                        })
                    }
                    State::Fp8(m, scales) => {
                        one_moment::<FirstMoment8>(cpu.isa, seed, r, p, (m, scales), |p, m| {
                            lion_any(cpu.isa, step, p, grad, m);
                        })
                    }
                    State::None => {}
                }
            });
        }
    });
    Ok(())
}

/// Factors of a Lion step on one tensor.
#[derive(Clone, Copy)]
struct LionStep {
    lion: Lion,
    grad_scale: f32,
    lr: f32,
    weight_decay: f32,
}

fn lion_any<M: Float>(isa: Isa, step: LionStep, p: &mut [f32], g: Grad, m: &mut [M]) {
    match g {
        Grad::F32(g) => lion_block(isa, step, p, g, m),
        Grad::Bf16(g) => lion_block(isa, step, p, g, m),
    }
}

/// −1, 0 or 1; NaN has none and gives 0, as on the GPU.
#[inline(always)]
fn sign(x: f32) -> f32 {
    f32::from(u8::from(x > 0.0)) - f32::from(u8::from(x < 0.0))
}

multiversion! {
    fn lion_block<G: Float, M: Float>(f: LionStep, p: &mut [f32], g: &[G], m: &mut [M]) {
        let Lion { beta1, beta2 } = f.lion;
        let (new1, new2) = (1.0 - beta1, 1.0 - beta2);
        for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
            let (g, held) = (g.to_f32() * f.grad_scale, m.to_f32());
            let update = sign(beta1 * held + new1 * g) + f.weight_decay * *p;
            *m = M::from_f32(beta2 * held + new2 * g);
            *p -= f.lr * update;
        }
    }
}
