//! RoPE on heads inside a larger buffer.

use super::devices::*;
use ferrotron_kernels::{Rope, RopeStyle};
use ferrotron_tensor::DType;

#[test]
fn rope_and_its_inverse() {
    let positions = [4, 0, 4, 1, 6];
    everywhere(|h, dtype| {
        for style in [RopeStyle::Half, RopeStyle::Interleaved, RopeStyle::PairsToHalves] {
            let sizes =
                [(1, 2, 2), (3, 8, 8), (2, 10, 6), (2, 40, 32), (5, 128, 128), (9, 64, 48), (2, 304, 280)];
            for ((heads, dim, rot), framed) in sizes.into_iter().flat_map(|s| [(s, true), (s, false)]) {
                let half = rot / 2;
                let angle = |p: usize, i: usize| p as f64 * 7f64.powf(-(i as f64) / half as f64);
                let table = |f: fn(f64) -> f64| -> Vec<f64> {
                    (0..7 * half).map(|i| rounded(DType::F32, f(angle(i / half, i % half)))).collect()
                };
                let (cos, sin) = (table(f64::cos), table(f64::sin));
                let shape = [positions.len(), heads, dim];
                let x = numbers(dtype, 1, shape.iter().product());
                let mut want = x.clone();
                for (r, (row, out)) in x.chunks(dim).zip(want.chunks_mut(dim)).enumerate() {
                    let p = positions[r / heads] as usize;
                    for i in 0..half {
                        let (a, b) =
                            if style == RopeStyle::Half { (i, i + half) } else { (2 * i, 2 * i + 1) };
                        let to = if style == RopeStyle::Interleaved { (a, b) } else { (i, i + half) };
                        let (c, s) = (cos[p * half + i], sin[p * half + i]);
                        out[to.0] = row[a] * c - row[b] * s;
                        out[to.1] = row[b] * c + row[a] * s;
                    }
                }
                let t = h.placed(framed, dtype, &shape, &x);
                let (cos, sin) =
                    (h.tensor(DType::F32, &[7, half], &cos), h.tensor(DType::F32, &[7, half], &sin));
                let places = h.ids(&positions);
                let rope =
                    |inverse| Rope { x: &t.view, cos: &cos, sin: &sin, positions: &places, style, inverse };
                h.k.rope(&h.s, &rope(false)).unwrap();
                let what =
                    format!("{} {dtype} {style:?} {heads}x{dim} rotating {rot} framed {framed}", h.name);
                close(&what, dtype, &h.inside(&t), &want, 3e-7);
                h.k.rope(&h.s, &rope(true)).unwrap();
                close(&format!("{what} and back"), dtype, &h.inside(&t), &x, 4.0 * eps(dtype));
            }
        }
    });
}
