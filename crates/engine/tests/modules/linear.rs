//! `y = x·Wᵀ + b`

use super::support::*;
use ferrotron_engine::{Declarations, Linear, Split};

/// `x [tokens, in]`, `w [out, in]`, `b [out]`.
pub fn reference(x: &[f64], w: &[f64], b: Option<&[f64]>, out: usize) -> Vec<f64> {
    let input = w.len() / out;
    x.chunks(input)
        .flat_map(|row| (0..out).map(|o| dot(row, &w[o * input..(o + 1) * input]) + b.map_or(0.0, |b| b[o])))
        .collect()
}

#[test]
fn linear_matches_the_reference() {
    for dtype in DTYPES {
        // Fused outputs, odd sizes, one token.
        for (tokens, input, outputs, bias) in [
            (5, 7, &[3usize, 4, 2][..], true),
            (1, 3, &[1], false),
            (33, 16, &[40], true),
            (4, 65, &[2, 1], false),
        ] {
            let mut d = Declarations::default();
            let named: Vec<_> = outputs.iter().enumerate().map(|(i, n)| (format!("part{i}"), *n)).collect();
            let linear = Linear::declare(&mut d, input, &named, bias, Split::Rows { unit: 1 }, 0.1).unwrap();
            let s = Setup::new(d, dtype, 1, 1.0);
            let out: usize = outputs.iter().sum();
            let (x, xs) = s.input(10, &[tokens, input]);
            let (dy, dys) = s.input(20, &[tokens, out]);
            let (y, saved) = linear.forward(&s.pass(), &x).unwrap();
            let (dx, work) = linear.backward(&s.pass(), saved, &dy).unwrap();
            let ours = (s.host(&y), s.host(&dx), s.gradients(work));
            let f = |a: &[Vec<f64>]| reference(&a[0], &a[1], a.get(2).map(|b| &b[..]), out);
            s.compare(&format!("linear {tokens}x{input}->{outputs:?}"), &f, &xs, &dys, ours);
        }
    }
}
