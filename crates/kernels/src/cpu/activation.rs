//! The non-linearities of the MLP and their gated forms, forward and backward. Arithmetic is f32.
//!
//! Gated input is `[rows, 2f]`: the first half goes through the activation, the second is the linear gate.

use super::math::{normal_cdf_pdf, sigmoid, sigmoid_pair};
use super::rows::{PIECE, check_len};
use super::{Isa, multiversion};
use crate::Act;
use ferrotron_tensor::{Float, Result, Threads};

/// An activation as code: value, slope, and what it does to the gate.
trait Curve: Copy + Sync {
    fn value(self, x: f32) -> f32;
    /// Value and derivative.
    fn slope(self, x: f32) -> (f32, f32);
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
struct GeluTanh;
#[derive(Clone, Copy)]
struct GeluErf;
#[derive(Clone, Copy)]
struct Silu;
#[derive(Clone, Copy)]
struct ClampedSilu {
    limit: f32,
    alpha: f32,
    offset: f32,
}

/// √(2/π), and twice it: `½(1 + tanh u) = σ(2u)`.
const GELU_A: f32 = 0.797_884_6;
const GELU_B: f32 = 0.044_715;

/// GELU's slope is 0 or 1 to the last bit beyond ±20; staying there keeps powers of x from overflowing.
#[inline(always)]
fn flat_beyond(x: f32) -> f32 {
    let x = if x > 20.0 { 20.0 } else { x };
    if x < -20.0 { -20.0 } else { x }
}

impl Curve for GeluTanh {
    #[inline(always)]
    fn value(self, x: f32) -> f32 {
        x * sigmoid(2.0 * GELU_A * (x + GELU_B * (x * x * x)))
    }
    #[inline(always)]
    fn slope(self, x: f32) -> (f32, f32) {
        let c = flat_beyond(x);
        let (s, rest) = sigmoid_pair(2.0 * GELU_A * (c + GELU_B * (c * c * c)));
        let inner = 2.0 * GELU_A * (1.0 + 3.0 * GELU_B * (c * c));
        (x * s, s + c * (s * rest * inner))
    }
}

impl Curve for GeluErf {
    #[inline(always)]
    fn value(self, x: f32) -> f32 {
        x * normal_cdf_pdf(x).0
    }
    #[inline(always)]
    fn slope(self, x: f32) -> (f32, f32) {
        let c = flat_beyond(x);
        let (cdf, pdf) = normal_cdf_pdf(c);
        (x * cdf, cdf + c * pdf)
    }
}

impl Curve for Silu {
    #[inline(always)]
    fn value(self, x: f32) -> f32 {
        x * sigmoid(x)
    }
    #[inline(always)]
    fn slope(self, x: f32) -> (f32, f32) {
        let (s, rest) = sigmoid_pair(x);
        (x * s, s + x * (s * rest))
    }
}

impl Curve for ClampedSilu {
    #[inline(always)]
    fn value(self, x: f32) -> f32 {
        let a = if x > self.limit { self.limit } else { x };
        a * sigmoid(self.alpha * a)
    }
    #[inline(always)]
    fn slope(self, x: f32) -> (f32, f32) {
        let a = if x > self.limit { self.limit } else { x };
        let (s, rest) = sigmoid_pair(self.alpha * a);
        let slope = s + self.alpha * a * (s * rest);
        (a * s, if x > self.limit { 0.0 } else { slope })
    }
    #[inline(always)]
    fn gate(self, u: f32) -> f32 {
        let u = if u > self.limit { self.limit } else { u };
        let u = if u < -self.limit { -self.limit } else { u };
        u + self.offset
    }
    #[inline(always)]
    fn gate_slope(self, u: f32, d: f32) -> f32 {
        if u.abs() > self.limit { 0.0 } else { d }
    }
}

macro_rules! with_curve {
    ($act:expr, $curve:ident => $body:expr) => {
        match $act {
            Act::GeluTanh => {
                let $curve = GeluTanh;
                $body
            }
            Act::GeluErf => {
                let $curve = GeluErf;
                $body
            }
            Act::Silu => {
                let $curve = Silu;
                $body
            }
            Act::ClampedSilu { limit, alpha, offset } => {
                let $curve = ClampedSilu { limit, alpha, offset };
                $body
            }
        }
    };
}

/// `y = act(x)`, any shape.
pub fn activation<T: Float>(threads: &Threads, isa: Isa, act: Act, x: &[T], y: &mut [T]) -> Result<()> {
    check_len("activation", "y", y.len(), x.len())?;
    threads.chunks(y, PIECE, &|i, y| {
        let x = &x[i * PIECE..][..y.len()];
        with_curve!(act, curve => forward(isa, curve, x, y));
    });
    Ok(())
}

/// `dx = act'(x)·dy`, any shape.
pub fn activation_backward<T: Float>(
    threads: &Threads,
    isa: Isa,
    act: Act,
    x: &[T],
    dy: &[T],
    dx: &mut [T],
) -> Result<()> {
    check_len("activation_backward", "dy", dy.len(), x.len())?;
    check_len("activation_backward", "dx", dx.len(), x.len())?;
    threads.chunks(dx, PIECE, &|i, dx| {
        let (x, dy) = (&x[i * PIECE..][..dx.len()], &dy[i * PIECE..][..dx.len()]);
        with_curve!(act, curve => backward(isa, curve, x, dy, dx));
    });
    Ok(())
}

/// `y = act(x₁)·gate(x₂)`: x is `[rows, 2f]`, y is `[rows, f]`.
pub fn gated<T: Float>(threads: &Threads, isa: Isa, act: Act, f: usize, x: &[T], y: &mut [T]) -> Result<()> {
    let rows = y.len() / f.max(1);
    check_len("gated activation", "y", y.len(), rows * f)?;
    check_len("gated activation", "x", x.len(), 2 * y.len())?;
    let piece = (PIECE / f.max(1)).max(1) * f;
    threads.chunks(y, piece, &|i, y| {
        let x = &x[2 * i * piece..][..2 * y.len()];
        with_curve!(act, curve => gated_forward(isa, curve, f, x, y));
    });
    Ok(())
}

/// Gradient of [`gated`]: `dx₁ = act'(x₁)·gate(x₂)·dy`, `dx₂ = act(x₁)·gate'(x₂)·dy`; dx is `[rows, 2f]`.
pub fn gated_backward<T: Float>(
    threads: &Threads,
    isa: Isa,
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
    threads.chunks(dx, 2 * piece, &|i, dx| {
        let (x, dy) = (&x[2 * i * piece..][..dx.len()], &dy[i * piece..][..dx.len() / 2]);
        with_curve!(act, curve => gated_back(isa, curve, f, x, dy, dx));
    });
    Ok(())
}

multiversion! {
    fn forward<T: Float, A: Curve>(act: A, x: &[T], y: &mut [T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(act.value(x.to_f32()));
        }
    }
}

multiversion! {
    fn backward<T: Float, A: Curve>(act: A, x: &[T], dy: &[T], dx: &mut [T]) {
        for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = T::from_f32(act.slope(x.to_f32()).1 * dy.to_f32());
        }
    }
}

multiversion! {
    fn gated_forward<T: Float, A: Curve>(act: A, f: usize, x: &[T], y: &mut [T]) {
        for (x, y) in x.chunks_exact(2 * f).zip(y.chunks_exact_mut(f)) {
            let (x1, x2) = x.split_at(f);
            for ((y, a), u) in y.iter_mut().zip(x1).zip(x2) {
                *y = T::from_f32(act.value(a.to_f32()) * act.gate(u.to_f32()));
            }
        }
    }
}

multiversion! {
    fn gated_back<T: Float, A: Curve>(act: A, f: usize, x: &[T], dy: &[T], dx: &mut [T]) {
        for ((x, dy), dx) in x.chunks_exact(2 * f).zip(dy.chunks_exact(f)).zip(dx.chunks_exact_mut(2 * f)) {
            let (x1, x2) = x.split_at(f);
            let (dx1, dx2) = dx.split_at_mut(f);
            for ((((dx1, dx2), a), u), dy) in dx1.iter_mut().zip(dx2).zip(x1).zip(x2).zip(dy) {
                let (dy, u) = (dy.to_f32(), u.to_f32());
                let (value, slope) = act.slope(a.to_f32());
                *dx1 = T::from_f32(slope * act.gate(u) * dy);
                *dx2 = T::from_f32(act.gate_slope(u, value * dy));
            }
        }
    }
}
