//! Adam and SGD over lists of tensors: f32 arithmetic on the f32 master, every copy written in the same pass.

use super::optimizer_chunks::{
    Chunk, Fp8WeightSlices, Grad, Param, State, merge_amax, over_master, split_chunks,
};
use super::optimizer_packed::{one_moment, two_moments};
use super::{CpuContext, Isa, multiversion};
use crate::moments::{FirstMoment8, FirstMoment16, SecondMoment8, SecondMoment16};
use crate::{Adam, Sgd};
use ferrotron_tensor::{Float, Result};

/// One tensor of a step. All parts have one length.
#[derive(Debug)]
pub struct UpdateSlices<'a> {
    /// The parameter.
    pub param: Param<'a>,
    /// Its gradient.
    pub grad: Grad<'a>,
    /// First moment (Adam) or momentum (SGD).
    pub first: State<'a>,
    /// Second moment (Adam), of the type of the first.
    pub second: State<'a>,
    /// Learning rate of this tensor.
    pub lr: f32,
    /// Weight decay of this tensor.
    pub weight_decay: f32,
    /// FP8 outputs of the new weight (Adam).
    pub fp8: Option<Fp8WeightSlices<'a>>,
}

/// Factors of an Adam step that all tensors share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamFactors {
    /// β1
    pub beta1: f32,
    /// Weight of a new gradient in the first moment.
    pub new1: f32,
    /// β2
    pub beta2: f32,
    /// Weight of a new squared gradient in the second moment.
    pub new2: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
    /// `1 − β1ᵗ`
    pub bias1: f32,
    /// `1 − β2ᵗ`
    pub bias2: f32,
    /// Decoupled weight decay (AdamW); otherwise L2 regularization inside the gradient.
    pub decoupled: bool,
    /// Factor on gradients: clipping, loss scale.
    pub grad_scale: f32,
    /// Seed of the stochastic rounding of packed moments ([`crate::moments::seed`]).
    pub seed: u32,
}

impl AdamFactors {
    /// As PyTorch: `1 − β` and `1 − βᵗ` from f64 βs, then rounded. `step` counts from 1.
    pub fn torch(beta1: f64, beta2: f64, eps: f64, decoupled: bool, step: u64) -> AdamFactors {
        let step = step as f64;
        AdamFactors {
            beta1: beta1 as f32,
            new1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            new2: (1.0 - beta2) as f32,
            eps: eps as f32,
            bias1: (1.0 - libm::pow(beta1, step)) as f32,
            bias2: (1.0 - libm::pow(beta2, step)) as f32,
            decoupled,
            grad_scale: 1.0,
            seed: crate::moments::seed(step as f32 - 1.0),
        }
    }

    /// As Transformer Engine: βs are f32 first, `1 − β` is f32 arithmetic, the power is computed in f64.
    pub fn transformer_engine(adam: Adam, step: u64) -> AdamFactors {
        let bias = |beta: f32| (1.0 - libm::pow(f64::from(beta), step as f64)) as f32;
        AdamFactors {
            beta1: adam.beta1,
            new1: 1.0 - adam.beta1,
            beta2: adam.beta2,
            new2: 1.0 - adam.beta2,
            eps: adam.eps,
            bias1: bias(adam.beta1),
            bias2: bias(adam.beta2),
            decoupled: adam.decoupled,
            grad_scale: 1.0,
            seed: crate::moments::seed(step as f32 - 1.0),
        }
    }
}

/// One Adam step on every tensor, with `g` the scaled gradient (plus `wd·p` when not decoupled):
/// `m = β1·m + (1−β1)·g`, `v = β2·v + ((1−β2)·g)·g`, `p −= lr·((m/c1)/(√(v/c2) + ε) [+ wd·p])`.
pub fn adam(cpu: CpuContext, factors: AdamFactors, list: Vec<UpdateSlices<'_>>) -> Result<()> {
    let (mut chunks, amaxes) = split_chunks("adam", list, true)?;
    cpu.threads.parallel_chunks(&mut chunks, 1, &|_, chunks| {
        for Chunk { param, fp8, grad, first, second, lr, weight_decay } in chunks {
            let step = AdamStep { factors, lr: *lr, weight_decay: *weight_decay };
            over_master(cpu.isa, param, fp8, |range, p| {
                let (grad, r) = (grad.part(range.clone()), range);
                match (&mut *first, &mut *second) {
                    (State::F32(m), State::F32(v)) => {
                        adam_any(cpu.isa, step, p, grad, &mut m[r.clone()], &mut v[r]);
                    }
                    (State::Bf16(m), State::Bf16(v)) => {
                        adam_any(cpu.isa, step, p, grad, &mut m[r.clone()], &mut v[r]);
                    }
                    (State::F16(m, ms), State::F16(v, vs)) => {
                        let parts = (&mut **m, &mut **ms, &mut **v, &mut **vs);
                        let update = |p: &mut [f32], m: &mut [f32], v: &mut [f32]| {
                            adam_packed(cpu.isa, step, p, grad, m, v);
                        };
                        two_moments::<FirstMoment16, SecondMoment16>(
                            cpu.isa,
                            factors.seed,
                            r,
                            p,
                            parts,
                            update,
                        );
                    }
                    (State::Fp8(m, ms), State::Fp8(v, vs)) => {
                        let parts = (&mut **m, &mut **ms, &mut **v, &mut **vs);
                        let update = |p: &mut [f32], m: &mut [f32], v: &mut [f32]| {
                            adam_packed(cpu.isa, step, p, grad, m, v);
                        };
                        two_moments::<FirstMoment8, SecondMoment8>(
                            cpu.isa,
                            factors.seed,
                            r,
                            p,
                            parts,
                            update,
                        );
                    }
                    // `split_chunks` checked that both moments have one type.
                    _ => {}
                }
            });
        }
    });
    merge_amax(&chunks, amaxes);
    Ok(())
}

/// FP8 outputs of a skipped step: the unchanged weights quantized under the new scale, and their amax.
pub fn adam_skipped(cpu: CpuContext, list: Vec<UpdateSlices<'_>>) -> Result<()> {
    let list = list.into_iter().filter(|u| u.fp8.as_ref().is_some_and(|t| t.bytes.is_some())).collect();
    let (mut chunks, amaxes) = split_chunks("adam", list, true)?;
    cpu.threads.parallel_chunks(&mut chunks, 1, &|_, chunks| {
        for Chunk { param, fp8, .. } in chunks {
            if let Some(fp8) = fp8 {
                fp8.requantize(cpu.isa, param);
            }
        }
    });
    merge_amax(&chunks, amaxes);
    Ok(())
}

/// Factors of an Adam step on one tensor.
#[derive(Clone, Copy)]
struct AdamStep {
    factors: AdamFactors,
    lr: f32,
    weight_decay: f32,
}

impl AdamStep {
    /// Weight decay inside the gradient (L2 regularization), and beside the update (AdamW).
    #[inline(always)]
    fn decay(&self) -> (f32, f32) {
        if self.factors.decoupled { (0.0, self.weight_decay) } else { (self.weight_decay, 0.0) }
    }
}

fn adam_any<M: Float>(isa: Isa, step: AdamStep, p: &mut [f32], g: Grad, m: &mut [M], v: &mut [M]) {
    match g {
        Grad::F32(g) => adam_block(isa, step, p, g, m, v),
        Grad::Bf16(g) => adam_block(isa, step, p, g, m, v),
    }
}

fn adam_packed(isa: Isa, step: AdamStep, p: &mut [f32], g: Grad, m: &mut [f32], v: &mut [f32]) {
    match g {
        Grad::F32(g) => adam_packed_block(isa, step, p, g, m, v),
        Grad::Bf16(g) => adam_packed_block(isa, step, p, g, m, v),
    }
}

multiversion! {
    fn adam_block<G: Float, M: Float>(
        step: AdamStep, p: &mut [f32], g: &[G], m: &mut [M], v: &mut [M],
    ) {
        let ((inside, beside), AdamStep { factors: f, lr, .. }) = (step.decay(), step);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let (first, second) = averages(&f, g.to_f32() * f.grad_scale + inside * *p, m.to_f32(), v.to_f32());
            *m = M::from_f32(first);
            *v = M::from_f32(second);
            let update = first / f.bias1 / ((second / f.bias2).sqrt() + f.eps) + beside * *p;
            *p -= lr * update;
        }
    }
}

multiversion! {
    /// For packed moments bias correction multiplies by reciprocals, as the CUDA kernel does, which divisions would slow down.
    fn adam_packed_block<G: Float>(
        step: AdamStep, p: &mut [f32], g: &[G], m: &mut [f32], v: &mut [f32],
    ) {
        let ((inside, beside), AdamStep { factors: f, lr, .. }) = (step.decay(), step);
        let (unbias1, unbias2) = (1.0 / f.bias1, 1.0 / f.bias2);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            (*m, *v) = averages(&f, g.to_f32() * f.grad_scale + inside * *p, *m, *v);
            let update = *m * unbias1 / ((*v * unbias2).sqrt() + f.eps) + beside * *p;
            *p -= lr * update;
        }
    }
}

/// Both moments updated by a gradient.
#[inline(always)]
fn averages(f: &AdamFactors, g: f32, m: f32, v: f32) -> (f32, f32) {
    (f.beta1 * m + f.new1 * g, f.beta2 * v + f.new2 * g * g)
}

/// One SGD step on every tensor, with `g` the scaled gradient plus `wd·p`:
/// `b = g` on the first step, `b = µ·b + (1−dampening)·g` later; `p −= lr·b`, or `lr·(g + µ·b)` with nesterov.
/// Without momentum `first` is [`State::None`] and `p −= lr·g`.
pub fn sgd(
    cpu: CpuContext,
    sgd: Sgd,
    first_step: bool,
    grad_scale: f32,
    seed: u32,
    list: Vec<UpdateSlices<'_>>,
) -> Result<()> {
    let (mut chunks, _) = split_chunks("sgd", list, false)?;
    cpu.threads.parallel_chunks(&mut chunks, 1, &|_, chunks| {
        for Chunk { param, grad, first, lr, weight_decay, .. } in chunks {
            let step = SgdStep {
                momentum: if first_step { 0.0 } else { sgd.momentum },
                new: if first_step { 1.0 } else { 1.0 - sgd.dampening },
                lead: if sgd.nesterov { 1.0 } else { 0.0 },
                weight: if sgd.nesterov { sgd.momentum } else { 1.0 },
                grad_scale,
                lr: *lr,
                weight_decay: *weight_decay,
            };
            over_master(cpu.isa, param, &mut None, |r, p| {
                let grad = grad.part(r.clone());
                match &mut *first {
                    State::None => match grad {
                        Grad::F32(g) => plain_block(cpu.isa, step, p, g),
                        Grad::Bf16(g) => plain_block(cpu.isa, step, p, g),
                    },
                    State::F32(b) => sgd_any(cpu.isa, step, p, grad, &mut b[r]),
                    State::Bf16(b) => sgd_any(cpu.isa, step, p, grad, &mut b[r]),
                    State::F16(b, scales) => {
                        one_moment::<FirstMoment16>(cpu.isa, seed, r, p, (b, scales), |p, b| {
                            sgd_any(cpu.isa, step, p, grad, b);
                        })
                    }
                    State::Fp8(b, scales) => {
                        one_moment::<FirstMoment8>(cpu.isa, seed, r, p, (b, scales), |p, b| {
                            sgd_any(cpu.isa, step, p, grad, b);
                        })
                    }
                }
            });
        }
    });
    Ok(())
}

fn sgd_any<M: Float>(isa: Isa, step: SgdStep, p: &mut [f32], g: Grad, b: &mut [M]) {
    match g {
        Grad::F32(g) => sgd_block(isa, step, p, g, b),
        Grad::Bf16(g) => sgd_block(isa, step, p, g, b),
    }
}

/// Factors of an SGD step on one tensor: the new momentum is `momentum·old + new·g`, and the update `lead·g + weight·momentum`.
#[derive(Clone, Copy)]
struct SgdStep {
    momentum: f32,
    new: f32,
    lead: f32,
    weight: f32,
    grad_scale: f32,
    lr: f32,
    weight_decay: f32,
}

multiversion! {
    fn sgd_block<G: Float, M: Float>(f: SgdStep, p: &mut [f32], g: &[G], b: &mut [M]) {
        for ((p, g), b) in p.iter_mut().zip(g).zip(b) {
            let g = g.to_f32() * f.grad_scale + f.weight_decay * *p;
            // On the first step the buffer is uninitialized and may hold NaN.
            let old = if f.momentum == 0.0 { 0.0 } else { f.momentum * b.to_f32() };
            let momentum = old + f.new * g;
            *b = M::from_f32(momentum);
            *p -= f.lr * (f.lead * g + f.weight * momentum);
        }
    }
}

multiversion! {
    fn plain_block<G: Float>(f: SgdStep, p: &mut [f32], g: &[G]) {
        for (p, g) in p.iter_mut().zip(g) {
            *p -= f.lr * (g.to_f32() * f.grad_scale + f.weight_decay * *p);
        }
    }
}
