//! Token and position embeddings.

use super::support::*;
use ferrotron_engine::{Declarations, Embedding, EmbeddingConfig};

#[test]
fn embedding_matches_the_reference() {
    let (vocab, hidden) = (7, 5);
    let ids = [3, 0, 6, 3, 3, 1];
    let places = [0, 1, 2, 0, 1, 3];
    for dtype in DTYPES {
        for (positions, scale) in [(None, 1.0), (Some(4), 1.0), (None, 2.25), (Some(4), 0.5)] {
            let mut d = Declarations::default();
            let e = Embedding::declare(
                &mut d,
                "embed",
                EmbeddingConfig { vocab, hidden, positions, scale, std: 0.1 },
            )
            .unwrap();
            let s = Setup::new(d, dtype, 6, 1.0);
            let (dy, dys) = s.input(27, &[ids.len(), hidden]);
            let (y, saved) = e.forward(&s.pass(), &s.integers(&ids), &s.integers(&places)).unwrap();
            let grads = s.gradients(e.backward(&s.pass(), saved, &dy).unwrap());
            let f = |a: &[Vec<f64>]| -> Vec<f64> {
                let row = |table: &[f64], i: i32, c: usize| table[i as usize * hidden + c];
                (0..ids.len() * hidden)
                    .map(|i| {
                        let (t, c) = (i / hidden, i % hidden);
                        let place = a.get(1).map_or(0.0, |p| row(p, places[t], c));
                        f64::from(scale) * row(&a[0], ids[t], c) + place
                    })
                    .collect()
            };
            let what = format!("positions {positions:?}, scale {scale}");
            close(&format!("{what} {dtype} output"), dtype, &s.host(&y), &f(&s.weights));
            let theirs = differences(&|a: &[Vec<f64>]| dot(&f(a), &dys), &s.weights);
            assert_eq!(grads.len(), theirs.len());
            for (ours, theirs) in grads.iter().zip(&theirs) {
                close(&format!("{what} {dtype} gradient"), dtype, ours, theirs);
            }
            // Rows that no token uses have a gradient of exactly 0.
            for row in [2, 4, 5] {
                assert!(grads[0][row * hidden..(row + 1) * hidden].iter().all(|g| *g == 0.0), "{what}");
            }
        }
    }
}

#[test]
fn ids_outside_the_embedding_are_errors() {
    let mut d = Declarations::default();
    let e = Embedding::declare(
        &mut d,
        "embed",
        EmbeddingConfig { vocab: 7, hidden: 5, positions: Some(4), scale: 1.0, std: 0.1 },
    )
    .unwrap();
    let s = Setup::new(d, DTYPES[0], 6, 1.0);
    for (ids, places) in [([0, 7], [0, 0]), ([0, -1], [0, 0]), ([0, 1], [0, 4]), ([i32::MIN, 0], [0, 0])] {
        let done = e.forward(&s.pass(), &s.integers(&ids), &s.integers(&places));
        assert!(done.is_err(), "{ids:?} {places:?}");
    }
}
