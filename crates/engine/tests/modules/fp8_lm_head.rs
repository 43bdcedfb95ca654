//! FP8 LM head: a linear layer whose output gradient comes from the fused cross-entropy.

use super::fp8::{Map, Numbers, OperandShards, WHOLE, check};
use super::fp8_oracle::*;
use super::support::*;
use super::tensor_parallel::{join_columns, join_rows, local_rows, on_ranks};
use ferrotron_engine::quant::{Policy, Recipe};
use ferrotron_engine::{
    Declarations, Embedding, EmbeddingConfig, LmHead, LmHeadSaved, Rank, StepContext, Targets,
};
use ferrotron_kernels::{IGNORE, LabelSmoothing};
use ferrotron_tensor::{Category, DType, Tensor};

fn with_head(recipe: Recipe, except: &[&str]) -> Policy {
    Policy { head: true, ..policy(recipe, except) }
}

/// Labels, some of them ignored, and loss weights.
fn targets(s: &Setup, tokens: usize, vocab: usize) -> Targets {
    let label = |i: usize| if i % 7 == 4 { IGNORE } else { (i * 5 % vocab) as i32 };
    let labels: Vec<i32> = (0..tokens).map(label).collect();
    let weight = |(i, l): (usize, &i32)| if *l == IGNORE { 0.0 } else { 0.1 + 0.01 * i as f32 };
    let weights: Vec<f32> = labels.iter().enumerate().map(weight).collect();
    let weights = s.rank.compute.upload(&weights, &[tokens], Category::Activations).unwrap();
    Targets { labels: s.integers(&labels), weights }
}

/// The LM head as a linear layer.
pub fn map(tokens: usize, hidden: usize, vocab: usize) -> Map {
    Map::new(tokens, hidden, &[vocab], false)
}

pub fn build(recipe: Option<Recipe>, except: &[&str], tied: bool, m: &Map) -> (LmHead, Setup) {
    let mut d = Declarations::default();
    if let Some(recipe) = recipe {
        d = d.with_policy(with_head(recipe, except));
    }
    let (v, h) = (m.out(), m.input);
    let table = tied.then(|| {
        Embedding::declare(
            &mut d,
            "embed",
            EmbeddingConfig { vocab: v, hidden: h, positions: None, scale: 1.0, std: 0.1 },
        )
        .unwrap()
        .tokens
    });
    let head = head_of(&mut d, [v, h], None, table);
    (head, Setup::new(d, DType::BF16, 1, 0.2))
}

fn columns(x: &[f64], from: usize, to: usize) -> Vec<f64> {
    x.chunks(from).flat_map(|r| r[..to].to_vec()).collect()
}

/// Logits, input gradient and weight gradient; the gradient of the logits; losses.
pub fn run(s: &Setup, head: &LmHead, m: &Map, x: &Tensor) -> (Numbers, Vec<f64>, Vec<f64>) {
    let (p, targets) = (s.pass(), targets(s, m.tokens, m.out()));
    let logits = s.host(&head.logits(&p, x).unwrap());
    let (rows, saved) = head.loss(&p, x, &targets, true).unwrap();
    let saved = saved.unwrap();
    let LmHeadSaved::Quantized { dlogits, .. } = &saved else { panic!("it is not narrow") };
    let width = dlogits.shape()[1];
    let padded = s.host(dlogits);
    assert!(padded.chunks(width).all(|r| r[m.out()..].iter().all(|x| *x == 0.0)), "padding has a gradient");
    let (dx, work) = head.backward(&p, saved).unwrap();
    let mut grads = s.gradients(work);
    let last = grads.pop().unwrap();
    ((logits, s.host(&dx), vec![last]), columns(&padded, width, m.out()), s.host(&rows))
}

fn maps() -> Vec<Map> {
    vec![map(9, 16, 32), map(33, 48, 59), map(16, 130, 145), map(40, 64, 272)]
}

#[test]
fn fp8_lm_heads_match_gemms_of_quantized_operands() {
    for recipe in recipes() {
        for m in maps() {
            for (tied, even) in [(false, None), (true, None), (false, Some(16))] {
                // Block scaling of padded logit gradients is refused by the recipe.
                if even.is_some() && !recipe.per_tensor() && !m.out().is_multiple_of(16) {
                    continue;
                }
                let what = format!("{recipe:?} {m:?} tied {tied} {even:?}");
                let (mut head, s) = build(Some(recipe), &[], tied, &m);
                head.pad_vocab_to = even;
                let [(x, xs), _] = m.operands(&s, 1.0);
                s.state.quant().unwrap().begin_step(3, 1);
                let (ours, dlogits, losses) = run(&s, &head, &m, &x);
                let given = Given { scale: 1.0, draw: (3 << 32) + 1 };
                let all = [&xs[..], &s.weights[0], &dlogits];
                check(&what, recipe, &m, (all, None), (WHOLE, [given; 3]), &ours);
                // Losses and gradients are those of the returned logits.
                let labels = s.rank.compute.download::<i32>(&targets(&s, m.tokens, m.out()).labels).unwrap();
                for (t, label) in labels.iter().enumerate() {
                    let z = &ours.0[t * m.out()..][..m.out()];
                    let lse = z.iter().map(|z| z.exp()).sum::<f64>().ln();
                    let loss = if *label == IGNORE { 0.0 } else { lse - z[*label as usize] };
                    assert!((loss - losses[t]).abs() < 1e-5, "{what}: {loss} {}", losses[t]);
                    let sum: f64 = dlogits[t * m.out()..][..m.out()].iter().sum();
                    assert!(sum.abs() < 0.02, "{what}: {sum}");
                }
                // Replicated rows give the same GEMM.
                let some = head.logits_of(&StepContext { train: false, ..s.pass() }, &x).unwrap();
                assert_eq!(s.host(&some), ours.0, "{what}");
            }
        }
    }
}

/// A skipped GEMM is bit-equal to bf16, and the others to an LM head without skips.
#[test]
fn skipped_gemms_of_an_lm_head_match_bf16() {
    for (m, even) in [(map(33, 48, 59), None), (map(33, 48, 59), Some(16)), (map(16, 32, 64), None)] {
        for recipe in [CURRENT, MXFP8] {
            let go = |except: &[&str]| {
                let (mut head, s) = build(Some(recipe), except, false, &m);
                head.pad_vocab_to = even;
                let [(x, _), _] = m.operands(&s, 1.0);
                s.state.quant().unwrap().begin_step(0, 1);
                run(&s, &head, &m, &x).0
            };
            let (low, high) = (go(&[]), go(&["head:output"]));
            assert_ne!(low.0, high.0);
            let (plain, s) = build(None, &[], false, &m);
            let [(x, _), _] = m.operands(&s, 1.0);
            assert_eq!(s.host(&plain.logits(&s.pass(), &x).unwrap()), high.0);
            let both = go(&["head:output", "head:input_grad"]);
            assert_eq!((&both.0, &both.2), (&high.0, &high.2));
            assert_ne!(both.1, high.1);
            // With only wgrad in bf16, it equals the bf16 head's.
            let (rows, saved) = plain.loss(&s.pass(), &x, &targets(&s, m.tokens, m.out()), true).unwrap();
            assert_eq!(rows.shape(), [m.tokens]);
            let (dx, _) = plain.backward(&s.pass(), saved.unwrap()).unwrap();
            assert_eq!(s.host(&dx), both.1);
        }
    }
}

#[test]
fn softcap_and_label_smoothing_act_on_fp8_logits() {
    let m = map(33, 48, 59);
    for even in [None, Some(16)] {
        let mut d = Declarations::default().with_policy(with_head(CURRENT, &[]));
        let mut head = head_of(&mut d, [59, 48], Some(2.0), None);
        (head.pad_vocab_to, head.loss.label_smoothing) = (even, LabelSmoothing::Torch(0.1));
        let s = Setup::new(d, DType::BF16, 1, 0.2);
        let [(x, _), _] = m.operands(&s, 1.0);
        let ((z, ..), dlogits, losses) = run(&s, &head, &m, &x);
        let labels = s.rank.compute.download::<i32>(&targets(&s, 33, 59).labels).unwrap();
        let weights = s.host(&targets(&s, 33, 59).weights);
        for t in (0..33).filter(|t| labels[*t] != IGNORE) {
            let z = &z[t * 59..][..59];
            assert!(z.iter().all(|z| z.abs() <= 2.0));
            let lse = z.iter().map(|z| z.exp()).sum::<f64>().ln();
            let target = |v: usize| 0.1 / 59.0 + if v as i32 == labels[t] { 0.9 } else { 0.0 };
            let loss: f64 = (0..59).map(|v| target(v) * (lse - z[v])).sum();
            assert!((loss - losses[t]).abs() < 1e-5, "{loss} {}", losses[t]);
            for v in 0..59 {
                let slope = 1.0 - (z[v] / 2.0).powi(2);
                let wanted = weights[t] * ((z[v] - lse).exp() - target(v)) * slope;
                let found = dlogits[t * 59 + v];
                assert!((found - wanted).abs() <= 0.01 * wanted.abs() + 1e-4, "{found} {wanted}");
            }
        }
    }
}

/// Hidden states are gathered in FP8 or bf16; every rank holds its vocabulary shard.
#[test]
fn fp8_lm_heads_over_tensor_parallel_ranks() {
    for recipe in recipes() {
        for m in [map(12, 16, 32), map(40, 36, 64), map(132, 64, 256)] {
            let build = |d: &mut Declarations, _: &Rank| {
                *d = std::mem::take(d).with_policy(with_head(recipe, &[]));
                head_of(d, [m.out(), m.input], None, None)
            };
            let mut d = Declarations::default();
            build(&mut d, &Rank::cpu(1, 1).unwrap());
            let alone = Setup::new(d, DType::BF16, 1, 0.2);
            let xs = m.operands(&alone, 1.0)[0].1.clone();
            for t in [2, 4] {
                let what = format!("{recipe:?} {m:?} tp={t}");
                let dlogits = std::sync::Mutex::new(Vec::new());
                let work = |s: &Setup, head: &LmHead| {
                    s.state.quant().unwrap().begin_step(5, 1);
                    let (p, x) = (&s.pass(), &local_rows(s, &xs, m.input));
                    let z = join_columns(s, &head.logits(p, x).unwrap());
                    let (_, saved) = head.loss(p, x, &targets(s, m.tokens, m.out()), true).unwrap();
                    let saved = saved.unwrap();
                    let LmHeadSaved::Quantized { dlogits: made, .. } = &saved else { panic!("not narrow") };
                    *dlogits.lock().unwrap() = join_columns(s, made);
                    let (dx, grads) = head.backward(p, saved).unwrap();
                    (z, join_rows(s, &dx), grads)
                };
                let ours = on_ranks(t, true, &alone, build, work);
                assert_eq!(ours, on_ranks(t, false, &alone, build, work), "{what}: overlap changes bits");
                let dys = dlogits.lock().unwrap().clone();
                let (down, across) = (Parts { down: t, across: 1 }, Parts { down: 1, across: t });
                let cut = OperandShards { operands: [ONE, down, across], sums: [1, t] };
                let given = Given { scale: 1.0, draw: (5 << 32) + 1 };
                let all = [&xs[..], &alone.weights[0], &dys];
                check(&what, recipe, &m, (all, None), (cut, [given; 3]), &ours);
            }
        }
    }
}

#[test]
fn chunked_fp8_lm_heads_are_refused() {
    let m = map(9, 16, 32);
    let (mut head, s) = build(Some(CURRENT), &[], false, &m);
    head.loss.chunk = Some(4);
    let [(x, _), _] = m.operands(&s, 1.0);
    let said = head.loss(&s.pass(), &x, &targets(&s, 9, 32), true).err().unwrap().to_string();
    assert!(said.contains("cannot compute the loss in chunks"), "{said}");
}
