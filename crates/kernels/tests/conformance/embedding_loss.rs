//! Embedding look-up, its gradient, and cross-entropy.

use super::devices::*;
use ferrotron_kernels::{CrossEntropy, EmbeddingBackward, EmbeddingForward, IGNORE, LabelSmoothing};
use ferrotron_tensor::DType;

#[test]
fn embedding_and_its_gradient() {
    everywhere(|h, dtype| {
        for (vocab, width, ids) in [
            (5, 3, vec![4, 0, 4, 4, 1]),
            (1, 1, vec![0]),
            (70, 33, (0..90).map(|i| (i * 37) % 70).collect()),
            (4, 6, vec![]),
        ] {
            let table = numbers(dtype, 1, vocab * width);
            let dy = numbers(dtype, 2, ids.len() * width);
            let old = numbers(dtype, 3, ids.len() * width);
            let (id_t, table_t) = (h.ids(&ids), h.tensor(dtype, &[vocab, width], &table));
            let dy_t = h.tensor(dtype, &[ids.len(), width], &dy);
            for add in [false, true] {
                let what = format!("{} {dtype} {vocab}x{width} add {add}", h.name);
                let shape = [ids.len(), width];
                let y = if add { h.tensor(dtype, &shape, &old) } else { h.poisoned(dtype, &shape) };
                h.k.embedding_forward(
                    &h.s,
                    &EmbeddingForward {
                        ids: &id_t,
                        table: &table_t,
                        first: 0,
                        vocab,
                        scale: 1.5,
                        add,
                        y: &y,
                    },
                )
                .unwrap();
                let want: Vec<f64> = (0..ids.len() * width)
                    .map(|i| {
                        let looked_up = 1.5 * table[ids[i / width] as usize * width + i % width];
                        looked_up + if add { old[i] } else { 0.0 }
                    })
                    .collect();
                close(&what, dtype, &h.host(&y), &want, 1e-6);
                let start = numbers(DType::F32, 4, vocab * width);
                let d = if add {
                    h.tensor(DType::F32, &[vocab, width], &start)
                } else {
                    h.poisoned(DType::F32, &[vocab, width])
                };
                h.k.embedding_backward(
                    &h.s,
                    &EmbeddingBackward {
                        ids: &id_t,
                        dy: &dy_t,
                        first: 0,
                        vocab,
                        scale: 1.5,
                        accumulate: add,
                        dtable: &d,
                    },
                )
                .unwrap();
                let mut want = if add { start } else { vec![0.0; vocab * width] };
                for (i, dy) in dy.iter().enumerate() {
                    want[ids[i / width] as usize * width + i % width] += 1.5 * dy;
                }
                close(&format!("{what} gradient"), DType::F32, &h.host(&d), &want, 1e-6);
            }
        }
    });
}

/// Losses of rows of `width` logits, of which the first `vocab` are valid, and their weighted gradients.
pub fn expected(
    z: &[f64],
    vocab: usize,
    width: usize,
    labels: &[i32],
    weights: &[f64],
    smoothing: LabelSmoothing,
) -> (Vec<f64>, Vec<f64>) {
    let (mut loss, mut grad) = (vec![0.0; labels.len()], vec![0.0; z.len()]);
    for r in (0..labels.len()).filter(|r| labels[*r] != IGNORE) {
        let row = &z[r * width..][..vocab];
        let lse = row.iter().map(|z| z.exp()).sum::<f64>().ln();
        let (hit, miss) = match smoothing {
            LabelSmoothing::None => (1.0, 0.0),
            LabelSmoothing::Torch(e) => {
                let share = f64::from(e) / vocab as f64;
                (1.0 - f64::from(e) + share, share)
            }
            LabelSmoothing::Megatron(e) => (1.0 - f64::from(e), f64::from(e) / (vocab - 1) as f64),
        };
        for (c, z) in row.iter().enumerate() {
            let target = if c as i32 == labels[r] { hit } else { miss };
            loss[r] += target * (lse - z);
            grad[r * width + c] = weights[r] * ((z - lse).exp() - target);
        }
    }
    (loss, grad)
}

/// Blocks of a GPU take one row after another and load the next while they overwrite one: more rows than blocks, some without a
/// label, of which few or many fit into shared memory, starting at and within a chunk of 16 bytes.
#[test]
fn cross_entropy_of_more_long_rows_than_blocks() {
    everywhere(|h, dtype| {
        for (rows, vocab, width) in [(700, 16_500, 16_512), (301, 20_001, 20_003), (290, 60_001, 60_001)] {
            let labels: Vec<i32> =
                (0..rows).map(|r| if r % 5 > 2 { IGNORE } else { (r * 7919 % vocab) as i32 }).collect();
            let z: Vec<f64> =
                numbers(dtype, 1, rows * width).iter().map(|x| rounded(dtype, 4.0 * x)).collect();
            let weights = numbers(DType::F32, 2, rows);
            let smoothing = LabelSmoothing::Torch(0.1);
            let (loss, grad) = expected(&z, vocab, width, &labels, &weights, smoothing);
            let what = format!("{} {dtype} {rows}x{vocab}/{width}", h.name);
            let (zt, out) = (h.tensor(dtype, &[rows, width], &z), h.poisoned(DType::F32, &[rows]));
            let c = CrossEntropy {
                logits: &zt,
                vocab,
                labels: &h.ids(&labels),
                weights: &h.tensor(DType::F32, &[rows], &weights),
                smoothing,
                loss: &out,
                gradient: true,
            };
            h.k.cross_entropy(&h.s, &c).unwrap();
            close(&what, DType::F32, &h.host(&out), &loss, 4e-6);
            close(&format!("{what} gradient"), dtype, &h.host(&zt), &grad, 1e-6);
        }
    });
}

#[test]
fn cross_entropy_and_its_gradient() {
    let smoothings = [LabelSmoothing::None, LabelSmoothing::Torch(0.1), LabelSmoothing::Megatron(0.15)];
    everywhere(|h, dtype| {
        for smoothing in smoothings {
            // Where the width is larger, the columns beyond the vocabulary are padding.
            let sizes = [
                (1, 2, 2),
                (9, 33, 33),
                (6, 50, 64),
                (0, 4, 4),
                (4, 5000, 5008),
                (3, 32000, 32000),
                (2, 50257, 50257),
            ];
            for ((rows, vocab, width), framed) in sizes.into_iter().flat_map(|s| [(s, true), (s, false)]) {
                let labels: Vec<i32> =
                    (0..rows).map(|r| if r % 4 == 2 { IGNORE } else { (r * 7 % vocab) as i32 }).collect();
                let z: Vec<f64> =
                    numbers(dtype, 1, rows * width).iter().map(|x| rounded(dtype, 4.0 * x)).collect();
                let weights = numbers(DType::F32, 2, rows);
                let (loss, grad) = expected(&z, vocab, width, &labels, &weights, smoothing);
                let what = format!("{} {dtype} {smoothing:?} {rows}x{vocab}/{width} framed {framed}", h.name);
                let weights_t = h.tensor(DType::F32, &[rows], &weights);
                for gradient in [false, true] {
                    let (zt, out) =
                        (h.placed(framed, dtype, &[rows, width], &z), h.poisoned(DType::F32, &[rows]));
                    let c = CrossEntropy {
                        logits: &zt.view,
                        vocab,
                        labels: &h.ids(&labels),
                        weights: &weights_t,
                        smoothing,
                        loss: &out,
                        gradient,
                    };
                    h.k.cross_entropy(&h.s, &c).unwrap();
                    close(&what, DType::F32, &h.host(&out), &loss, 4e-6);
                    let left = h.inside(&zt);
                    if gradient {
                        close(&format!("{what} gradient"), dtype, &left, &grad, 1e-6);
                        // Ignored rows and padding columns have a gradient of exactly 0.
                        for (i, g) in left.iter().enumerate() {
                            assert!(
                                (labels[i / width] != IGNORE && i % width < vocab) || *g == 0.0,
                                "{what}"
                            );
                        }
                    } else {
                        assert_eq!(left, z, "{what}: the logits changed");
                    }
                }
            }
        }
    });
}
