//! Activations of the MLP, plain and gated, forward and backward. Arithmetic is in f32.
//!
//! Gated input is `[rows, 2f]`: the first half goes through the activation, the second is the linear gate.

use super::CpuContext;
use super::math::{
    Fma, SIGMOID_HIGH, SIGMOID_LOW, at_least, at_most, multiversion_fma, normal_cdf_pdf, sigmoid_pair,
    sigmoid_range, times_sigmoid,
};
use super::rows::{PIECE, check_len};
use crate::Act;
use ferrotron_tensor::{Float, Result};

/// An activation: its value, derivative, and effect on the gate.
pub(super) trait Activation: Copy + Sync {
    fn value<F: Fma>(self, x: f32) -> f32;
    /// Value and derivative.
    fn slope<F: Fma>(self, x: f32) -> (f32, f32);
    #[inline(always)]
    fn gate(self, u: f32) -> f32 {
        u
    }
    /// Derivative of the gate times `d`.
    #[inline(always)]
    fn gate_slope(self, _u: f32, d: f32) -> f32 {
        d
    }
}

#[derive(Clone, Copy)]
pub(super) struct GeluTanh;
#[derive(Clone, Copy)]
pub(super) struct GeluErf;
#[derive(Clone, Copy)]
pub(super) struct SquaredRelu;
#[derive(Clone, Copy)]
pub(super) struct Silu;
#[derive(Clone, Copy)]
pub(super) struct ClampedSilu {
    pub(super) limit: f32,
    pub(super) alpha: f32,
    pub(super) offset: f32,
}

/// Below −20 GELU and its derivative are 0 in f32, above 20 the derivative is 1. Clamping there keeps powers of x finite and
/// avoids ∞·0.
const FLAT: f32 = 20.0;
/// `½(1 + tanh u) = σ(2u)`, so GELU is `x·σ(x·(A + B·x²))` with A = 2√(2/π), B = 0.044715·A.
const GELU_A: f32 = 1.595_769_2;
const GELU_B: f32 = 0.071_354_814;

impl Activation for GeluTanh {
    #[inline(always)]
    fn value<F: Fma>(self, x: f32) -> f32 {
        let low = at_least(x, -FLAT);
        times_sigmoid::<F>(low, sigmoid_range(low * F::fma(low * low, GELU_B, GELU_A)))
    }
    #[inline(always)]
    fn slope<F: Fma>(self, x: f32) -> (f32, f32) {
        let low = at_least(x, -FLAT);
        let c = at_most(low, FLAT);
        let z = c * c;
        let (s, rest) = sigmoid_pair::<F>(sigmoid_range(c * F::fma(z, GELU_B, GELU_A)));
        let inner = F::fma(z, 3.0 * GELU_B, GELU_A);
        (low * s, F::fma(c, s * rest * inner, s))
    }
}

impl Activation for SquaredRelu {
    #[inline(always)]
    fn value<F: Fma>(self, x: f32) -> f32 {
        let positive = at_least(x, 0.0);
        positive * positive
    }
    #[inline(always)]
    fn slope<F: Fma>(self, x: f32) -> (f32, f32) {
        let positive = at_least(x, 0.0);
        (positive * positive, 2.0 * positive)
    }
}

impl Activation for GeluErf {
    #[inline(always)]
    fn value<F: Fma>(self, x: f32) -> f32 {
        let low = at_least(x, -FLAT);
        low * normal_cdf_pdf::<F>(low).0
    }
    #[inline(always)]
    fn slope<F: Fma>(self, x: f32) -> (f32, f32) {
        let low = at_least(x, -FLAT);
        let c = at_most(low, FLAT);
        let (cdf, pdf) = normal_cdf_pdf::<F>(c);
        (low * cdf, F::fma(c, pdf, cdf))
    }
}

impl Activation for Silu {
    #[inline(always)]
    fn value<F: Fma>(self, x: f32) -> f32 {
        let low = at_least(x, SIGMOID_LOW);
        times_sigmoid::<F>(low, at_most(low, SIGMOID_HIGH))
    }
    #[inline(always)]
    fn slope<F: Fma>(self, x: f32) -> (f32, f32) {
        let low = at_least(x, SIGMOID_LOW);
        let c = at_most(low, SIGMOID_HIGH);
        let (s, rest) = sigmoid_pair::<F>(c);
        (low * s, F::fma(c, s * rest, s))
    }
}

impl ClampedSilu {
    /// Clamped from below, too, far beyond where σ(α·a) has become 0, to avoid −∞·0.
    #[inline(always)]
    fn bounded(self, x: f32) -> f32 {
        at_least(at_most(x, self.limit), -1e28)
    }
}

impl Activation for ClampedSilu {
    #[inline(always)]
    fn value<F: Fma>(self, x: f32) -> f32 {
        let a = self.bounded(x);
        times_sigmoid::<F>(a, sigmoid_range(self.alpha * a))
    }
    #[inline(always)]
    fn slope<F: Fma>(self, x: f32) -> (f32, f32) {
        let a = self.bounded(x);
        let (s, rest) = sigmoid_pair::<F>(sigmoid_range(self.alpha * a));
        let slope = F::fma(self.alpha * a, s * rest, s);
        (a * s, if x > self.limit { 0.0 } else { slope })
    }
    #[inline(always)]
    fn gate(self, u: f32) -> f32 {
        at_least(at_most(u, self.limit), -self.limit) + self.offset
    }
    #[inline(always)]
    fn gate_slope(self, u: f32, d: f32) -> f32 {
        if u.abs() > self.limit { 0.0 } else { d }
    }
}

/// Dispatches an [`Act`] to its type.
macro_rules! with_activation {
    ($act:expr, $curve:ident => $body:expr) => {
        match $act {
            Act::GeluTanh => {
                let $curve = $crate::cpu::activation::GeluTanh;
                $body
            }
            Act::GeluErf => {
                let $curve = $crate::cpu::activation::GeluErf;
                $body
            }
            Act::Silu => {
                let $curve = $crate::cpu::activation::Silu;
                $body
            }
            Act::SquaredRelu => {
                let $curve = $crate::cpu::activation::SquaredRelu;
                $body
            }
            Act::ClampedSilu { limit, alpha, offset } => {
                let $curve = $crate::cpu::activation::ClampedSilu { limit, alpha, offset };
                $body
            }
        }
    };
}
pub(super) use with_activation;

/// `y = act(x)`, any shape.
pub fn activation<T: Float>(cpu: CpuContext, act: Act, x: &[T], y: &mut [T]) -> Result<()> {
    check_len("activation", "y", y.len(), x.len())?;
    cpu.threads.parallel_chunks(y, PIECE, &|i, y| {
        let x = &x[i * PIECE..][..y.len()];
        with_activation!(act, curve => forward(cpu.isa, curve, x, y));
    });
    Ok(())
}

/// `dx = act'(x)·dy`, any shape.
pub fn activation_backward<T: Float>(
    cpu: CpuContext,
    act: Act,
    x: &[T],
    dy: &[T],
    dx: &mut [T],
) -> Result<()> {
    check_len("activation_backward", "dy", dy.len(), x.len())?;
    check_len("activation_backward", "dx", dx.len(), x.len())?;
    cpu.threads.parallel_chunks(dx, PIECE, &|i, dx| {
        let (x, dy) = (&x[i * PIECE..][..dx.len()], &dy[i * PIECE..][..dx.len()]);
        with_activation!(act, curve => backward(cpu.isa, curve, x, dy, dx));
    });
    Ok(())
}

/// `y = act(x₁)·gate(x₂)`: x is `[rows, 2f]`, y is `[rows, f]`.
pub fn gated<T: Float>(cpu: CpuContext, act: Act, f: usize, x: &[T], y: &mut [T]) -> Result<()> {
    let rows = y.len() / f.max(1);
    check_len("gated activation", "y", y.len(), rows * f)?;
    check_len("gated activation", "x", x.len(), 2 * y.len())?;
    let piece = (PIECE / f.max(1)).max(1) * f;
    cpu.threads.parallel_chunks(y, piece, &|i, y| {
        let x = &x[2 * i * piece..][..2 * y.len()];
        with_activation!(act, curve => gated_forward(cpu.isa, curve, f, x, y));
    });
    Ok(())
}

/// Gradient of [`gated`]: `dx₁ = act'(x₁)·gate(x₂)·dy`, `dx₂ = act(x₁)·gate'(x₂)·dy`; dx is `[rows, 2f]`.
pub fn gated_backward<T: Float>(
    cpu: CpuContext,
    act: Act,
    f: usize,
    x: &[T],
    dy: &[T],
    dx: &mut [T],
) -> Result<()> {
    let rows = dy.len() / f.max(1);
    check_len("gated activation backward", "dy", dy.len(), rows * f)?;
    check_len("gated activation backward", "x", x.len(), 2 * dy.len())?;
    check_len("gated activation backward", "dx", dx.len(), x.len())?;
    let piece = (PIECE / f.max(1)).max(1) * f;
    cpu.threads.parallel_chunks(dx, 2 * piece, &|i, dx| {
        let (x, dy) = (&x[2 * i * piece..][..dx.len()], &dy[i * piece..][..dx.len() / 2]);
        with_activation!(act, curve => gated_back(cpu.isa, curve, f, x, dy, dx));
    });
    Ok(())
}

multiversion_fma! {
    fn forward<F: Fma, T: Float, A: Activation>(act: A, x: &[T], y: &mut [T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(act.value::<F>(x.to_f32()));
        }
    }
}

multiversion_fma! {
    fn backward<F: Fma, T: Float, A: Activation>(act: A, x: &[T], dy: &[T], dx: &mut [T]) {
        for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = T::from_f32(act.slope::<F>(x.to_f32()).1 * dy.to_f32());
        }
    }
}

multiversion_fma! {
    fn gated_forward<F: Fma, T: Float, A: Activation>(act: A, f: usize, x: &[T], y: &mut [T]) {
        for (x, y) in x.chunks_exact(2 * f).zip(y.chunks_exact_mut(f)) {
            let (x1, x2) = x.split_at(f);
            for ((y, a), u) in y.iter_mut().zip(x1).zip(x2) {
                *y = T::from_f32(act.value::<F>(a.to_f32()) * act.gate(u.to_f32()));
            }
        }
    }
}

multiversion_fma! {
    fn gated_back<F: Fma, T: Float, A: Activation>(act: A, f: usize, x: &[T], dy: &[T], dx: &mut [T]) {
        for ((x, dy), dx) in x.chunks_exact(2 * f).zip(dy.chunks_exact(f)).zip(dx.chunks_exact_mut(2 * f)) {
            let (x1, x2) = x.split_at(f);
            let (dx1, dx2) = dx.split_at_mut(f);
            for ((((dx1, dx2), a), u), dy) in dx1.iter_mut().zip(dx2).zip(x1).zip(x2).zip(dy) {
                let (dy, u) = (dy.to_f32(), u.to_f32());
                let (value, slope) = act.slope::<F>(a.to_f32());
                *dx1 = T::from_f32(slope * act.gate(u) * dy);
                *dx2 = T::from_f32(act.gate_slope(u, value * dy));
            }
        }
    }
}
