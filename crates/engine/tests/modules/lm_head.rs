//! The LM head and the fused cross-entropy.

use super::linear;
use super::support::*;
use ferrotron_engine::{Declarations, Embedding, EmbeddingConfig, LmHead, LmHeadSaved, Targets};
use ferrotron_kernels::{IGNORE, LabelSmoothing};
use ferrotron_tensor::{Category, DType, Tensor};

pub const HIDDEN: usize = 6;
pub const VOCAB: usize = 11;
pub const LABELS: [i32; 9] = [3, IGNORE, 0, 10, 10, 1, IGNORE, 5, 2];

/// Per-token loss; 0 for ignored labels.
pub fn reference(softcap: Option<f32>, smoothing: LabelSmoothing, x: &[f64], w: &[f64]) -> Vec<f64> {
    let logits = linear::reference(x, w, None, VOCAB);
    let rows = logits.chunks(VOCAB).zip(LABELS);
    rows.map(|(z, label)| {
        if label == IGNORE {
            return 0.0;
        }
        let cap = |z: f64| softcap.map_or(z, |c| f64::from(c) * (z / f64::from(c)).tanh());
        let lse = z.iter().map(|z| cap(*z).exp()).sum::<f64>().ln();
        let (hit, miss) = match smoothing {
            LabelSmoothing::None => (1.0, 0.0),
            LabelSmoothing::Torch(e) => {
                let e = f64::from(e);
                (1.0 - e + e / VOCAB as f64, e / VOCAB as f64)
            }
            LabelSmoothing::Megatron(e) => (1.0 - f64::from(e), f64::from(e) / (VOCAB - 1) as f64),
        };
        (0..VOCAB).map(|v| if v as i32 == label { hit } else { miss } * (lse - cap(z[v]))).sum()
    })
    .collect()
}

pub fn weights() -> Vec<f64> {
    rounded(
        DType::F32,
        LABELS
            .iter()
            .enumerate()
            .map(|(i, l)| if *l == IGNORE { 0.0 } else { 0.1 + 0.05 * i as f64 })
            .collect(),
    )
}

fn targets(s: &Setup) -> Targets {
    let weights: Vec<f32> = weights().iter().map(|w| *w as f32).collect();
    Targets {
        labels: s.integers(&LABELS),
        weights: s.rank.compute.upload(&weights, &[LABELS.len()], Category::Activations).unwrap(),
    }
}

type Numbers = (Vec<f64>, Vec<f64>, Vec<Vec<f64>>);

fn run(s: &Setup, head: &LmHead, x: &Tensor) -> Numbers {
    let (rows, saved) = head.loss(&s.pass(), x, &targets(s), true).unwrap();
    let saved = saved.unwrap();
    assert_eq!(
        matches!(saved, LmHeadSaved::Chunked { .. }),
        head.loss.chunk.is_some_and(|n| n < LABELS.len())
    );
    let (dx, work) = head.backward(&s.pass(), saved).unwrap();
    (s.host(&rows), s.host(&dx), s.gradients(work))
}

#[test]
fn lm_head_matches_the_reference() {
    for dtype in DTYPES {
        for softcap in [None, Some(2.0)] {
            for smoothing in [LabelSmoothing::None, LabelSmoothing::Torch(0.1), LabelSmoothing::Megatron(0.2)]
            {
                let mut d = Declarations::default();
                let mut head = head_of(&mut d, [VOCAB, HIDDEN], softcap, None);
                head.loss.label_smoothing = smoothing;
                let s = Setup::new(d, dtype, 7, 1.0);
                let (x, xs) = s.input(18, &[LABELS.len(), HIDDEN]);
                let what = format!("softcap {softcap:?}, {smoothing:?}");
                let f = |a: &[Vec<f64>]| reference(softcap, smoothing, &a[0], &a[1]);
                let whole = run(&s, &head, &x);
                s.compare(&what, &f, &xs, &weights(), whole.clone());
                // Ignored rows have a loss and gradient of exactly 0.
                for (t, _) in LABELS.iter().enumerate().filter(|l| *l.1 == IGNORE) {
                    assert_eq!(whole.0[t], 0.0);
                    assert!(whole.1[t * HIDDEN..(t + 1) * HIDDEN].iter().all(|g| *g == 0.0), "{what}");
                }
                for chunk in [1, 2, 4, 8] {
                    head.loss.chunk = Some(chunk);
                    let parts = run(&s, &head, &x);
                    let what = format!("{what} in chunks of {chunk} {dtype}");
                    assert_eq!(parts.0, whole.0, "{what}: losses");
                    assert_eq!(parts.1, whole.1, "{what}: input gradient");
                    // Chunks change the order of sums over tokens.
                    close(&what, DType::F32, &parts.2[0], &whole.2[0]);
                }
            }
        }
    }
}

#[test]
fn padded_vocabulary_gives_the_same_lm_head() {
    for dtype in DTYPES {
        for smoothing in [LabelSmoothing::None, LabelSmoothing::Torch(0.1), LabelSmoothing::Megatron(0.2)] {
            let mut d = Declarations::default();
            let mut head = head_of(&mut d, [VOCAB, HIDDEN], None, None);
            head.loss.label_smoothing = smoothing;
            let s = Setup::new(d, dtype, 7, 1.0);
            let (x, xs) = s.input(18, &[LABELS.len(), HIDDEN]);
            let f = |a: &[Vec<f64>]| reference(None, smoothing, &a[0], &a[1]);
            for (even, chunk) in [(VOCAB + 1, usize::MAX), (64, usize::MAX), (64, 2), (64, 4)] {
                (head.pad_vocab_to, head.loss.chunk) = (Some(even), Some(chunk));
                s.compare(
                    &format!("{smoothing:?}, {even}, {chunk}"),
                    &f,
                    &xs,
                    &weights(),
                    run(&s, &head, &x),
                );
            }
        }
    }
}

#[test]
fn evaluation_has_equal_losses_and_saves_nothing() {
    for dtype in DTYPES {
        let mut d = Declarations::default();
        let mut head = head_of(&mut d, [VOCAB, HIDDEN], Some(2.0), None);
        let s = Setup::new(d, dtype, 8, 1.0);
        let (x, _) = s.input(19, &[LABELS.len(), HIDDEN]);
        let (trained, _, _) = run(&s, &head, &x);
        for chunk in [usize::MAX, 2] {
            head.loss.chunk = Some(chunk);
            let (rows, saved) = head.loss(&s.pass(), &x, &targets(&s), false).unwrap();
            assert!(saved.is_none());
            assert_eq!(s.host(&rows), trained);
        }
        // And they are the losses of the returned logits.
        let logits = s.host(&head.logits(&s.pass(), &x).unwrap());
        for (t, label) in LABELS.iter().enumerate().filter(|l| *l.1 != IGNORE) {
            let z = &logits[t * VOCAB..(t + 1) * VOCAB];
            let loss = z.iter().map(|z| z.exp()).sum::<f64>().ln() - z[*label as usize];
            assert!((loss - trained[t]).abs() < 1e-5, "{loss} {}", trained[t]);
        }
    }
}

/// A tied embedding accumulates both gradients and is ready after both.
#[test]
fn tied_weights_are_used_twice() {
    for dtype in DTYPES {
        let ids: Vec<i32> = (0..LABELS.len() as i32).map(|i| (i * 4) % VOCAB as i32).collect();
        let build = |tie: bool| {
            let mut d = Declarations::default();
            let e = Embedding::declare(
                &mut d,
                "embed",
                EmbeddingConfig { vocab: VOCAB, hidden: HIDDEN, positions: None, scale: 1.5, std: 0.1 },
            )
            .unwrap();
            let head = head_of(&mut d, [VOCAB, HIDDEN], None, tie.then_some(e.tokens));
            let mut s = Setup::new(d, dtype, 9, 1.0);
            if !tie {
                // Two embeddings with equal values.
                s.weights[1] = s.weights[0].clone();
                write(&s.rank, &s.params.values()[1].clone(), &s.weights[0]);
            }
            (e, head, s)
        };
        let gather = |e: &Embedding, head: &LmHead, s: &Setup, ready: &[[bool; 2]; 2]| {
            let mut buffer = s.buffer();
            let ids = s.integers(&ids);
            let (x, e_saved) = e.forward(&s.pass(), &ids, &ids).unwrap();
            let (_, saved) = head.loss(&s.pass(), &x, &targets(s), true).unwrap();
            let (dx, work) = head.backward(&s.pass(), saved.unwrap()).unwrap();
            let all = |b: &ferrotron_engine::GradBuffer| -> Vec<bool> {
                (0..s.params.specs().len()).map(|i| b.is_ready(id(i))).collect()
            };
            work.run(&s.rank, &mut buffer).unwrap();
            assert_eq!(all(&buffer), ready[0][..s.params.specs().len()]);
            e.backward(&s.pass(), e_saved, &dx).unwrap().run(&s.rank, &mut buffer).unwrap();
            assert_eq!(all(&buffer), ready[1][..s.params.specs().len()]);
            s.all(&mut buffer)
        };
        let (e, head, s) = build(true);
        assert_eq!(s.params.specs().iter().map(|p| p.uses).collect::<Vec<_>>(), [2]);
        let tied = gather(&e, &head, &s, &[[false, false], [true, true]]);
        let (e, head, s) = build(false);
        assert_eq!(s.params.specs().iter().map(|p| p.uses).collect::<Vec<_>>(), [1, 1]);
        let apart = gather(&e, &head, &s, &[[false, true], [true, true]]);
        let sum: Vec<f64> = apart[0].iter().zip(&apart[1]).map(|(a, b)| a + b).collect();
        close("tied", DType::F32, &tied[0], &sum);
    }
}
