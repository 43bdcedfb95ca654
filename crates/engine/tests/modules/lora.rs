//! LoRA: `y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ`, with an adapter for each stacked output or one for all; DoRA is in [`super::dora`].

use super::support::*;
use super::tensor_parallel::{check, run_linear};
use super::{linear, mlp};
use ferrotron_engine::lora::{LoraPolicy, LoraTargets};
use ferrotron_engine::{Declarations, Linear, Mlp, MlpConfig, Rank, Recompute, Split, StepContext};
use ferrotron_kernels::Act;
use ferrotron_tensor::DType;

pub const RANK: usize = 3;

pub fn policy(targets: &[&str], fused: bool, scale: f32) -> LoraPolicy {
    let include = targets.iter().map(|t| t.to_string()).collect();
    let targets = LoraTargets { include, exclude: Vec::new() };
    LoraPolicy { rank: RANK, scale, targets, fused, dora: false }
}

/// `W + s·B·A` of outputs of the given sizes, of which `covered` have an adapter: `w [Σout, in]`, `a [Σr, in]`, `b [Σout, r]`.
pub fn merged(w: &[f64], a: &[f64], b: &[f64], outputs: &[usize], covered: &[bool], scale: f64) -> Vec<f64> {
    let input = w.len() / outputs.iter().sum::<usize>();
    let fused = a.len() == RANK * input;
    let (mut out, mut row, mut b_row, mut adapter) = (w.to_vec(), 0, 0, 0);
    for (n, covered) in outputs.iter().zip(covered) {
        for _ in 0..*n {
            for i in (0..input).filter(|_| *covered) {
                let first = if fused { 0 } else { adapter * RANK };
                let products = (0..RANK).map(|r| b[b_row * RANK + r] * a[(first + r) * input + i]);
                out[row * input + i] += scale * products.sum::<f64>();
            }
            b_row += usize::from(*covered);
            row += 1;
        }
        adapter += usize::from(*covered);
    }
    out
}

/// Targets, whether they cover each of three outputs, fused, scale.
pub const CASES: [(&[&str], [bool; 3], bool, f32); 4] = [
    (&["all-linear"], [true, true, true], false, 1.0),
    (&["all-linear"], [true, true, true], true, 0.5),
    (&["q", "v"], [true, false, true], false, 2.0),
    (&["k"], [false, true, false], true, 1.5),
];

pub fn setup(d: Declarations, dtype: DType, frozen: bool) -> Setup {
    if frozen { Setup::frozen(d, dtype, 1, 1.0) } else { Setup::new(d, dtype, 1, 1.0) }
}

#[test]
fn linear_with_adapters_matches_the_reference() {
    let (tokens, input, outputs) = (5, 7, [3usize, 4, 2]);
    for dtype in DTYPES {
        for (targets, covered, fused, scale) in CASES {
            for (bias, frozen) in [(false, true), (true, true), (true, false)] {
                let mut d = Declarations::default().with_lora(policy(targets, fused, scale));
                let named = [("m.q", 3), ("m.k", 4), ("m.v", 2)].map(|(name, n)| (name.into(), n));
                let linear =
                    Linear::declare(&mut d, input, &named, bias, Split::Rows { unit: 1 }, 0.1).unwrap();
                let s = setup(d, dtype, frozen);
                let (x, xs) = s.input(10, &[tokens, input]);
                let (dy, dys) = s.input(20, &[tokens, 9]);
                let (y, saved) = linear.forward(&s.pass(), &x).unwrap();
                let (dx, work) = linear.backward(&s.pass(), saved, &dy).unwrap();
                let ours = (s.host(&y), s.host(&dx), s.gradients(work));
                let f = |v: &[Vec<f64>]| {
                    let (x, w, rest) = (&v[0], &v[1], &v[2..]);
                    let (b, rest) = if bias { (Some(&rest[0][..]), &rest[1..]) } else { (None, rest) };
                    let w = merged(w, &rest[0], &rest[1], &outputs, &covered, f64::from(scale));
                    linear::reference(x, &w, b, 9)
                };
                let what = format!("LoRA on {targets:?}, fused {fused}, bias {bias}, frozen {frozen}");
                s.compare(&what, &f, &xs, &dys, ours);
            }
        }
    }
}

#[test]
fn linear_with_adapters_over_ranks_matches_the_reference() {
    let (tokens, input) = (8, 12);
    for dtype in DTYPES {
        for (fused, frozen) in [(false, true), (true, true), (false, false)] {
            for split in [Split::Rows { unit: 1 }, Split::Columns { unit: 1 }, Split::Replicated] {
                // Outputs that lie side by side cannot be joined by columns.
                let outputs: &[(&str, usize)] = match split {
                    Split::Rows { .. } => &[("m.q", 8)],
                    _ => &[("m.q", 8), ("m.k", 4)],
                };
                let out = outputs.iter().map(|o| o.1).sum();
                let build = |d: &mut Declarations, _: &Rank| {
                    let named: Vec<_> = outputs.iter().map(|(name, n)| (name.to_string(), *n)).collect();
                    let declared = std::mem::take(d).with_lora(policy(&["all-linear"], fused, 2.0));
                    *d = declared;
                    Linear::declare(d, input, &named, false, split, 0.1).unwrap()
                };
                let mut d = Declarations::default();
                build(&mut d, &Rank::cpu(1, 1).unwrap());
                let s = setup(d, dtype, frozen);
                let (xs, dys) = (s.input(10, &[tokens, input]).1, s.input(20, &[tokens, out]).1);
                let sizes: Vec<usize> = outputs.iter().map(|o| o.1).collect();
                let covered = vec![true; sizes.len()];
                let twin = |v: &[Vec<f64>]| {
                    linear::reference(&v[0], &merged(&v[1], &v[2], &v[3], &sizes, &covered, 2.0), None, out)
                };
                let what = format!("LoRA {split:?}, fused {fused}, frozen {frozen}");
                check(&what, &s, (&xs, &dys), &twin, build, |s, linear| {
                    run_linear(s, linear, split, (&xs, input), (&dys, out))
                });
            }
        }
    }
}

/// Gated and plain MLPs (whose activation is fused into the GEMM without adapters), saved, recomputed and in chunks.
#[test]
fn mlp_with_adapters_matches_the_reference() {
    let (tokens, hidden, ffn) = (5, 6, 9);
    for dtype in DTYPES {
        for (gated, targets) in
            [(true, &["all-linear"][..]), (false, &["all-linear"]), (true, &["down"]), (false, &["up"])]
        {
            let mut d = Declarations::default().with_lora(policy(targets, false, 2.0));
            let c = MlpConfig { hidden, ffn, act: Act::Silu, gated, bias: false, std: (0.1, 0.1) };
            let mlp = Mlp::declare(&mut d, "mlp", c).unwrap();
            let s = Setup::frozen(d, dtype, 4, 1.0);
            let (x, xs) = s.input(14, &[tokens, hidden]);
            let (dy, dys) = s.input(24, &[tokens, hidden]);
            let names: Vec<String> = (1..=s.weights.len()).map(|i| s.name(i)).collect();
            let f = |v: &[Vec<f64>]| {
                let at = |what: &str| names.iter().position(|n| n.contains(what)).map(|i| &v[i + 1]);
                let weight = |end: &str, outputs: &[usize]| {
                    let (module, covered) = (format!("{end}.weight"), vec![true; outputs.len()]);
                    let w = at(&module).unwrap();
                    match (at(&format!("{end}.lora_a")), at(&format!("{end}.lora_b"))) {
                        (Some(a), Some(b)) => merged(w, a, b, outputs, &covered, 2.0),
                        _ => w.clone(),
                    }
                };
                let up = if gated { weight("gate", &[ffn, ffn]) } else { weight("up", &[ffn]) };
                let h = linear::reference(&v[0], &up, None, up.len() / hidden);
                let h: Vec<f64> = match gated {
                    true => h
                        .chunks(2 * ffn)
                        .flat_map(|r| (0..ffn).map(|i| mlp::gated(Act::Silu, r[i], r[ffn + i])))
                        .collect(),
                    false => h.iter().map(|x| mlp::gated(Act::Silu, *x, 1.0)).collect(),
                };
                linear::reference(&h, &weight("down", &[hidden]), None, hidden)
            };
            let run = |p: &StepContext| {
                let (y, saved) = mlp.forward(p, &x).unwrap();
                let (dx, work) = mlp.backward(p, saved, &dy).unwrap();
                (s.host(&y), s.host(&dx), s.gradients(work))
            };
            let kept = run(&s.pass());
            let recompute = Recompute { activation: true, ..Recompute::default() };
            assert_eq!(kept, run(&StepContext { recompute, ..s.pass() }), "recomputed");
            s.compare(&format!("MLP with LoRA on {targets:?}, gated {gated}"), &f, &xs, &dys, kept);
            let chunks = run(&StepContext { mlp_chunk: Some(2), ..s.pass() });
            s.compare(&format!("in chunks, LoRA on {targets:?}, gated {gated}"), &f, &xs, &dys, chunks);
        }
    }
}
