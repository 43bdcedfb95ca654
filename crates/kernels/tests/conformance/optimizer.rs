//! Optimizer steps over lists.

use super::devices::*;
use ferrotron_kernels::{Adam, ParamUpdate, Sgd, scalars};
use ferrotron_tensor::{Category, DType, Tensor};

/// One parameter with its state, as values.
#[derive(Clone)]
struct Values {
    master: Vec<f64>,
    grad: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
    lr_mult: f32,
    wd_mult: f32,
}

/// The same on a device.
struct Tensors {
    master: Tensor,
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
}

/// More parameters than fit in one launch, of many sizes.
fn many(moments: DType) -> Vec<Values> {
    (0..31)
        .map(|i| {
            let n = [1, 7, 64, 5000, 0, 33][i % 6];
            let v = |seed| numbers(DType::F32, seed + 100 * i as u64, n);
            let m = |seed| numbers(moments, seed + 100 * i as u64, n);
            Values {
                master: v(1),
                grad: v(2),
                first: m(3),
                second: m(4).iter().map(|x| x.abs()).collect(),
                lr_mult: [1.0, 0.5][i % 2],
                wd_mult: [1.0, 0.0, 2.0][i % 3],
            }
        })
        .collect()
}

fn upload(h: &TestDevice, v: &Values, moments: DType) -> Tensors {
    let n = [v.master.len()];
    Tensors {
        master: h.tensor(DType::F32, &n, &v.master),
        weight: h.poisoned(DType::BF16, &n),
        grad: h.tensor(DType::F32, &n, &v.grad),
        first: h.tensor(moments, &n, &v.first),
        second: h.tensor(moments, &n, &v.second),
    }
}

fn updates<'a>(v: &[Values], t: &'a [Tensors], weights: bool, second: bool) -> Vec<ParamUpdate<'a>> {
    v.iter()
        .zip(t)
        .map(|(v, t)| ParamUpdate {
            master: &t.master,
            weight: weights.then_some(&t.weight),
            grad: &t.grad,
            first: (&t.first).into(),
            second: second.then(|| (&t.second).into()),
            lr_mult: v.lr_mult,
            wd_mult: v.wd_mult,
            fp8: None,
        })
        .collect()
}

fn step_scalars(h: &TestDevice, done: f64, clip: f64) -> (Tensor, Vec<f64>) {
    let mut s = vec![0.0; scalars::COUNT];
    s[scalars::LR] = rounded(DType::F32, 0.01);
    s[scalars::WEIGHT_DECAY] = rounded(DType::F32, 0.1);
    s[scalars::BIAS1] = rounded(DType::F32, 1.0 - 0.9f64.powf(done + 1.0));
    s[scalars::BIAS2] = rounded(DType::F32, 1.0 - 0.95f64.powf(done + 1.0));
    s[scalars::CLIP] = rounded(DType::F32, clip);
    s[scalars::STEPS_DONE] = done;
    (h.tensor(DType::F32, &[scalars::COUNT], &s), s)
}

#[test]
fn adam_over_a_long_list() {
    for h in devices() {
        for moments in [DType::F32, DType::BF16] {
            for decoupled in [false, true] {
                let adam = Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled };
                let (b1, b2, eps) = (f64::from(0.9f32), f64::from(0.95f32), f64::from(1e-8f32));
                let values = many(moments);
                let tensors: Vec<_> = values.iter().map(|v| upload(&h, v, moments)).collect();
                let (st, s) = step_scalars(&h, 2.0, 0.7);
                h.k.adam(&h.s, adam, &st, &updates(&values, &tensors, true, true)).unwrap();
                for (i, (v, t)) in values.iter().zip(&tensors).enumerate() {
                    let what = format!("{} moments {moments} decoupled {decoupled} tensor {i}", h.name);
                    let (lr, wd) = (
                        s[scalars::LR] * f64::from(v.lr_mult),
                        s[scalars::WEIGHT_DECAY] * f64::from(v.wd_mult),
                    );
                    let (mut p, mut m, mut q) = (vec![], vec![], vec![]);
                    for j in 0..v.master.len() {
                        let g = v.grad[j] * s[scalars::CLIP] + if decoupled { 0.0 } else { wd * v.master[j] };
                        let (first, second) =
                            (b1 * v.first[j] + (1.0 - b1) * g, b2 * v.second[j] + (1.0 - b2) * g * g);
                        let update = first / s[scalars::BIAS1] / ((second / s[scalars::BIAS2]).sqrt() + eps);
                        p.push(v.master[j] - lr * (update + if decoupled { wd * v.master[j] } else { 0.0 }));
                        m.push(first);
                        q.push(second);
                    }
                    close(&format!("{what} m"), moments, &h.host(&t.first), &m, 1e-6);
                    close(&format!("{what} v"), moments, &h.host(&t.second), &q, 1e-6);
                    close(&format!("{what} p"), DType::F32, &h.host(&t.master), &p, 2e-6);
                    let rounded: Vec<f64> =
                        h.host(&t.master).iter().map(|x| rounded(DType::BF16, *x)).collect();
                    assert_eq!(h.host(&t.weight), rounded, "{what}: the copy is the rounded master");
                }
                // One parameter at a time and without a bf16 weight, masters get the same bits.
                let again: Vec<_> = values.iter().map(|v| upload(&h, v, moments)).collect();
                for u in updates(&values, &again, false, true).chunks(1) {
                    h.k.adam(&h.s, adam, &st, u).unwrap();
                }
                for (a, b) in tensors.iter().zip(&again) {
                    assert_eq!(h.host(&a.master), h.host(&b.master));
                    assert_eq!(h.host(&a.first), h.host(&b.first));
                    assert_eq!(h.host(&a.second), h.host(&b.second));
                    assert_eq!(h.host(&a.grad), h.host(&b.grad));
                }
            }
        }
    }
}

#[test]
fn sgd_over_a_long_list() {
    for h in devices() {
        for moments in [DType::F32, DType::BF16] {
            for (dampening, nesterov) in [(0.0, false), (0.2, false), (0.0, true)] {
                for done in [0.0, 3.0] {
                    let sgd = Sgd { momentum: 0.9, dampening, nesterov };
                    let values = many(moments);
                    let tensors: Vec<_> = values.iter().map(|v| upload(&h, v, moments)).collect();
                    if done == 0.0 {
                        // Before the first step the momentum buffer is uninitialized.
                        tensors.iter().for_each(|t| {
                            let nonsense = h.poisoned(moments, t.first.shape());
                            h.k.copy(&h.s, &nonsense, &t.first).unwrap();
                        });
                    }
                    let (st, s) = step_scalars(&h, done, 0.7);
                    h.k.sgd(&h.s, sgd, &st, &updates(&values, &tensors, true, false)).unwrap();
                    let mu = f64::from(0.9f32);
                    for (i, (v, t)) in values.iter().zip(&tensors).enumerate() {
                        let lr = s[scalars::LR] * f64::from(v.lr_mult);
                        let wd = s[scalars::WEIGHT_DECAY] * f64::from(v.wd_mult);
                        let want: Vec<f64> = (0..v.master.len())
                            .map(|j| {
                                let g = v.grad[j] * s[scalars::CLIP] + wd * v.master[j];
                                let b = if done == 0.0 {
                                    g
                                } else {
                                    mu * v.first[j] + (1.0 - f64::from(dampening)) * g
                                };
                                v.master[j] - lr * if nesterov { g + mu * b } else { b }
                            })
                            .collect();
                        let what = format!("{} {moments} {sgd:?} after {done} tensor {i}", h.name);
                        close(&what, DType::F32, &h.host(&t.master), &want, 2e-7);
                    }
                }
            }
        }
    }
}

#[test]
fn norms_and_clip_factors_of_long_lists() {
    for h in devices() {
        for max in [None, Some(0.5f32), Some(1e6)] {
            for count in [0usize, 1, 5, 150] {
                let grads: Vec<Vec<f64>> =
                    (0..count).map(|i| numbers(DType::F32, i as u64, [3, 0, 1000][i % 3])).collect();
                let tensors: Vec<_> = grads.iter().map(|g| h.tensor(DType::F32, &[g.len()], g)).collect();
                let (s, before) = step_scalars(&h, 1.0, 0.3);
                h.k.clip_factor(&h.s, &tensors.iter().collect::<Vec<_>>(), max, &s).unwrap();
                let norm = grads.iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
                let factor = max.map_or(1.0, |m| (f64::from(m) / (norm + 1e-6)).min(1.0));
                let after = h.host(&s);
                let what = format!("{} {count} gradients, at most {max:?}", h.name);
                close(&what, DType::F32, &[after[scalars::GRAD_NORM]], &[norm], 1e-6 * norm);
                close(&what, DType::F32, &[after[scalars::CLIP]], &[factor], 1e-6);
                for i in (0..scalars::COUNT).filter(|i| ![scalars::GRAD_NORM, scalars::CLIP].contains(i)) {
                    assert_eq!(after[i], before[i], "{what}");
                }
                // In two kernels, with the all-reduce over ranks between them: the same bits.
                let square = h.s.zeros(&[1], DType::F64, Category::Workspace).unwrap();
                h.k.grad_square_sum(&h.s, &tensors.iter().collect::<Vec<_>>(), &square).unwrap();
                let sum = h.s.download::<f64>(&square).unwrap()[0];
                assert!((sum - norm * norm).abs() <= 1e-12 * norm * norm, "{what}: {sum}");
                let zeros = h.s.zeros(&[1], DType::F64, Category::Workspace).unwrap();
                h.k.count_zeros(&h.s, &tensors.iter().collect::<Vec<_>>(), &zeros).unwrap();
                let counted = grads.iter().flatten().filter(|g| **g == 0.0).count() as f64;
                assert_eq!(h.s.download::<f64>(&zeros).unwrap(), [counted], "{what}: zeros");
                let (s, _) = step_scalars(&h, 1.0, 0.3);
                h.k.clip_factor_from_square_sum(&h.s, &square, max, &s).unwrap();
                assert_eq!(h.host(&s), after, "{what}");
            }
        }
    }
}
