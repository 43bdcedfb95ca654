//! Norms and RoPE.

use super::z;
use crate::devices::*;
use ferrotron_kernels::*;
use ferrotron_tensor::DType::{BF16, F32, I32, I64};

#[test]
fn norms() {
    for h in devices() {
        let f = |shape: &[usize]| z(&h, F32, shape);
        let layer = Norm { subtract_mean: true, eps: 1e-5, zero_centred: false };
        let rms = Norm { subtract_mean: false, ..layer };
        let (x, y, g, r) = (f(&[3, 4]), f(&[3, 4]), f(&[4]), f(&[3]));
        let (b, m) = (f(&[4]), f(&[3]));
        let base = || NormForward { x: &x, gamma: &g, beta: None, y: &y, mean: None, rstd: &r };
        let go = |what: &str, norm, n: NormForward| refused(&h, what, h.k.norm_forward(&h.s, norm, &n));
        go("LayerNorm without mean and bias", layer, base());
        go("LayerNorm without bias", layer, NormForward { mean: Some(&m), ..base() });
        go("RMSNorm with bias", rms, NormForward { beta: Some(&b), ..base() });
        go("another shape", rms, NormForward { y: &f(&[4, 3]), ..base() });
        go("a short gain", rms, NormForward { gamma: &f(&[3]), ..base() });
        go("a long gain", rms, NormForward { gamma: &f(&[5]), ..base() });
        go("few statistics", rms, NormForward { rstd: &f(&[2]), ..base() });
        go("16-bit statistics", rms, NormForward { rstd: &z(&h, BF16, &[3]), ..base() });
        go("a gain of another type", rms, NormForward { gamma: &z(&h, BF16, &[4]), ..base() });
        go("a result of another type", rms, NormForward { y: &z(&h, BF16, &[3, 4]), ..base() });
        go("in place", rms, NormForward { y: &x, ..base() });
        go("columns apart", rms, NormForward { x: &f(&[4, 3]).transpose(0, 1).unwrap(), ..base() });
        let deep = h.framed(F32, &[2, 2, 2, 3], &[0.0; 24]);
        let n =
            NormForward { x: &deep.view, gamma: &f(&[3]), y: &f(&[2, 2, 2, 3]), rstd: &f(&[8]), ..base() };
        go("more strides than rows have", rms, n);
        let (sum, short) = (f(&[3, 4]), f(&[2, 4]));
        refused(
            &h,
            "a short residual",
            h.k.add_norm_forward(&h.s, rms, &ResidualAdd { residual: &short, sum: &sum }, &base()),
        );
        refused(
            &h,
            "a short sum",
            h.k.add_norm_forward(&h.s, rms, &ResidualAdd { residual: &sum, sum: &short }, &base()),
        );
        refused(
            &h,
            "a residual of another type",
            h.k.add_norm_forward(
                &h.s,
                rms,
                &ResidualAdd { residual: &z(&h, BF16, &[3, 4]), sum: &sum },
                &base(),
            ),
        );

        let (dy, dx, dg) = (f(&[3, 4]), f(&[3, 4]), f(&[h.k.norm_partials(F32, 3, 4), 4]));
        let base = || NormBackward {
            x: &x,
            gamma: &g,
            mean: None,
            rstd: &r,
            dy: &dy,
            residual: None,
            dx: &dx,
            dgamma: &dg,
            dbeta: None,
        };
        let go = |what: &str, norm, n: NormBackward| refused(&h, what, h.k.norm_backward(&h.s, norm, &n));
        go("LayerNorm without mean and bias gradient", layer, base());
        go("RMSNorm with a bias gradient", rms, NormBackward { dbeta: Some(&b), ..base() });
        go("dy of another shape", rms, NormBackward { dy: &f(&[3, 3]), ..base() });
        go("dx of another shape", rms, NormBackward { dx: &f(&[2, 4]), ..base() });
        go("a residual of another shape", rms, NormBackward { residual: Some(&f(&[2, 4])), ..base() });
        let wide = f(&[3, 8]).narrow(1, 0, 4).unwrap();
        go("a residual of other strides", rms, NormBackward { residual: Some(&wide), ..base() });
        go("a short gain gradient", rms, NormBackward { dgamma: &f(&[3]), ..base() });
        go("a 16-bit gain gradient", rms, NormBackward { dgamma: &z(&h, BF16, &[4]), ..base() });
        go("few statistics", rms, NormBackward { rstd: &f(&[2]), ..base() });
        go("over its input", rms, NormBackward { dx: &x, ..base() });
    }
}

#[test]
fn rotations() {
    for h in devices() {
        let f = |shape: &[usize]| z(&h, F32, shape);
        let (x, cos, sin, positions) = (f(&[3, 2, 8]), f(&[5, 4]), f(&[5, 4]), h.ids(&[0, 1, 4]));
        let base = || Rope {
            x: &x,
            cos: &cos,
            sin: &sin,
            positions: &positions,
            style: RopeStyle::Half,
            inverse: false,
        };
        let go = |what: &str, r: Rope| refused(&h, what, h.k.rope(&h.s, &r));
        go("two axes", Rope { x: &f(&[6, 8]), ..base() });
        go("tables of different sizes", Rope { sin: &f(&[4, 4]), ..base() });
        go("a vector as table", Rope { cos: &f(&[20]), sin: &f(&[20]), ..base() });
        go("more rotated than there is", Rope { x: &f(&[3, 2, 6]), ..base() });
        go("few positions", Rope { positions: &h.ids(&[0, 1]), ..base() });
        go("a position past the table", Rope { positions: &h.ids(&[0, 5, 1]), ..base() });
        go("a negative position", Rope { positions: &h.ids(&[0, -1, 1]), ..base() });
        go("positions of another type", Rope { positions: &z(&h, I64, &[3]), ..base() });
        go("16-bit tables", Rope { cos: &z(&h, BF16, &[5, 4]), ..base() });
        go("channels apart", Rope { x: &f(&[3, 8, 2]).transpose(1, 2).unwrap(), ..base() });
        go("integers", Rope { x: &z(&h, I32, &[3, 2, 8]), ..base() });
    }
}
