//! The random Hadamard transform: outliers are spread over sixteen numbers before they are rounded.

use crate::cpu::rows::Rows;
use crate::quant::micro::Along;
use ferrotron_tensor::{Float, Threads};

/// Numbers turned together.
pub const TURNED: usize = 16;
/// The fixed random signs.
pub const SIGNS: [f32; TURNED] =
    [1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0];

/// `H·v` with Sylvester's matrix over √16, its own inverse.
fn butterfly(v: &mut [f32; TURNED]) {
    let mut half = 1;
    while half < TURNED {
        for i in (0..TURNED).filter(|i| i & half == 0) {
            (v[i], v[i + half]) = (v[i] + v[i + half], v[i] - v[i + half]);
        }
        half *= 2;
    }
    v.iter_mut().for_each(|v| *v *= 0.25);
}

/// `x [r, c]` with every 16 neighbours along the axis turned: `H·(signs∘v)`. The axis is padded with zeros to a
/// multiple of 16; gives the values and the padded shape.
pub fn turn<T: Float>(threads: &Threads, along: Along, x: &[T], rows: Rows) -> (Vec<f32>, [usize; 2]) {
    let (r, c) = (rows.outer, rows.width);
    let shape = match along {
        Along::Rows => [r, c.next_multiple_of(TURNED)],
        Along::Cols => [r.next_multiple_of(TURNED), c],
    };
    let mut out = vec![0f32; shape[0] * shape[1]];
    if r * c > 0 {
        for i in 0..r {
            let to = &mut out[i * shape[1]..][..c];
            to.iter_mut().zip(rows.row(x, i)).for_each(|(to, x)| *to = x.to_f32());
        }
        each(threads, along, shape, &mut out, &|v| {
            v.iter_mut().zip(SIGNS).for_each(|(v, s)| *v *= s);
            butterfly(v);
        });
    }
    (out, shape)
}

/// Back: `signs∘(H·v)`, in place.
pub fn turn_back(threads: &Threads, along: Along, shape: [usize; 2], x: &mut [f32]) {
    each(threads, along, shape, x, &|v| {
        butterfly(v);
        v.iter_mut().zip(SIGNS).for_each(|(v, s)| *v *= s);
    });
}

/// Applies `f` to every 16 neighbours along the axis.
fn each(
    threads: &Threads,
    along: Along,
    [_, c]: [usize; 2],
    x: &mut [f32],
    f: &(dyn Fn(&mut [f32; TURNED]) + Sync),
) {
    threads.chunks(x, TURNED * c, &|_, band| match along {
        Along::Rows => band.as_chunks_mut::<TURNED>().0.iter_mut().for_each(f),
        Along::Cols => {
            for j in 0..c {
                let mut v: [f32; TURNED] = std::array::from_fn(|i| band[i * c + j]);
                f(&mut v);
                (0..TURNED).for_each(|i| band[i * c + j] = v[i]);
            }
        }
    });
}
