use super::{CpuKernels, floats, same_contiguous};
use crate::cpu::activation::{activation, activation_backward, gated as gated_forward, gated_backward};
use crate::{Act, ActivationKernels};
use ferrotron_tensor::{Result, Stream, Tensor, read, shape_error, write};

/// Width of a gated pair, checked: `wide [rows, 2f]`, `narrow [rows, f]`, both contiguous.
fn gate_width(op: &'static str, wide: &Tensor, narrow: &Tensor) -> Result<usize> {
    match (wide.shape(), narrow.shape()) {
        ([r, w], [r2, f]) if r == r2 && *w == 2 * f && wide.is_contiguous() && narrow.is_contiguous() => {
            Ok(*f)
        }
        (a, b) => {
            shape_error(op, format!("gated input {a:?} and output {b:?} must be [rows, 2f] and [rows, f]"))
        }
    }
}

/// The gate's width, or 0 without one; shapes checked.
fn width(op: &'static str, act: Act, gated: bool, x: &Tensor, y: &Tensor) -> Result<usize> {
    match (gated, act) {
        (true, _) => gate_width(op, x, y),
        (false, Act::ClampedSilu { .. }) => shape_error(op, "the clamped SiLU exists with a gate only"),
        (false, _) => same_contiguous(op, &[x, y]).map(|()| 0),
    }
}

impl ActivationKernels for CpuKernels {
    fn act_forward(&self, s: &Stream, act: Act, gated: bool, x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "act_forward";
        let f = width(OP, act, gated, x, y)?;
        s.launch(OP, &[read(x), write(y)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, y) = (l.slice::<T>(0)?, l.slice_mut::<T>(1)?);
                match gated {
                    true => gated_forward(l.threads(), self.isa, act, f, x, y),
                    false => activation(l.threads(), self.isa, act, x, y),
                }
            })
        })
    }

    fn act_backward(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<()> {
        const OP: &str = "act_backward";
        let f = width(OP, act, gated, x, dy)?;
        same_contiguous(OP, &[x, dx])?;
        s.launch(OP, &[read(x), read(dy), write(dx)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, dy, dx) = (l.slice::<T>(0)?, l.slice::<T>(1)?, l.slice_mut::<T>(2)?);
                match gated {
                    true => gated_backward(l.threads(), self.isa, act, f, x, dy, dx),
                    false => activation_backward(l.threads(), self.isa, act, x, dy, dx),
                }
            })
        })
    }
}
