//! DoRA: `y = m / ‖W + s·B·A‖ ⊙ (x·(W + s·B·A)ᵀ) + b`, against f64. Finite differences hold the norm at its value, since backward
//! takes it as a constant.

use super::lora::{CASES, merged, policy, setup};
use super::support::*;
use super::tensor_parallel::{check, run_linear};
use super::{linear, mlp};
use ferrotron_engine::lora::{LoraPolicy, row_norms};
use ferrotron_engine::{Declarations, Linear, Mlp, MlpConfig, Rank, Recompute, Split, StepContext};
use ferrotron_kernels::Act;
use ferrotron_tensor::DType;

fn dora(targets: &[&str], fused: bool, scale: f32) -> LoraPolicy {
    LoraPolicy { dora: true, ..policy(targets, fused, scale) }
}

fn norms(v: &[f64], rows: usize) -> Vec<f64> {
    v.chunks(v.len() / rows).map(|row| dot(row, row).sqrt()).collect()
}

/// The rows of `v [Σout, in]` with the lengths `m`, whose norm was `norm`; those of outputs that are not covered as they are.
fn rescaled(v: &[f64], norm: &[f64], m: &[f64], outputs: &[usize], covered: &[bool]) -> Vec<f64> {
    let width = v.len() / norm.len();
    let is_covered = outputs.iter().zip(covered).flat_map(|(n, c)| vec![*c; *n]);
    let mut m = m.iter();
    let factors = is_covered.zip(norm).map(|(c, norm)| if c { m.next().unwrap() / norm } else { 1.0 });
    v.chunks(width).zip(factors).flat_map(|(row, f)| row.iter().map(move |x| x * f)).collect()
}

#[test]
fn linear_matches_the_reference() {
    let (tokens, input, outputs) = (5, 7, [3usize, 4, 2]);
    for dtype in DTYPES {
        for (targets, covered, fused, scale) in CASES {
            for (bias, frozen) in [(false, true), (true, true), (true, false)] {
                let mut d = Declarations::default().with_lora(dora(targets, fused, scale));
                let named = [("m.q", 3), ("m.k", 4), ("m.v", 2)].map(|(name, n)| (name.into(), n));
                let linear =
                    Linear::declare(&mut d, input, &named, bias, Split::Rows { unit: 1 }, 0.1).unwrap();
                let s = setup(d, dtype, frozen);
                let (x, xs) = s.input(10, &[tokens, input]);
                let (dy, dys) = s.input(20, &[tokens, 9]);
                let run = || {
                    let (y, mut saved) = linear.forward(&s.pass(), &x).unwrap();
                    assert_eq!(move_saved(&s.rank, &s.params, &mut saved), 3);
                    let (dx, work) = linear.backward(&s.pass(), saved, &dy).unwrap();
                    (s.host(&y), s.host(&dx), s.gradients(work))
                };
                let ours = run();
                s.state.begin_step(0, 1);
                assert_eq!(run(), ours, "norms that are kept for a step");
                s.state.end_step(&s.rank).unwrap();
                let weight = |v: &[Vec<f64>]| {
                    let rest = if bias { &v[3..] } else { &v[2..] };
                    merged(&v[1], &rest[0], &rest[1], &outputs, &covered, f64::from(scale))
                };
                let norm = norms(&weight(&s.arrays(&xs)), 9);
                let f = |v: &[Vec<f64>]| {
                    let w = rescaled(&weight(v), &norm, v.last().unwrap(), &outputs, &covered);
                    linear::reference(&v[0], &w, if bias { Some(&v[2]) } else { None }, 9)
                };
                let what = format!("DoRA on {targets:?}, fused {fused}, bias {bias}, frozen {frozen}");
                s.compare(&what, &f, &xs, &dys, ours);
            }
        }
    }
}

/// m as it is initialized: the output is that of the base, bit for bit.
#[test]
fn training_begins_at_the_base() {
    let named = [("m.q", 40), ("m.k", 24)].map(|(name, n)| (name.to_string(), n));
    for dtype in DTYPES {
        let run = |lora: LoraPolicy| {
            let is_dora = lora.dora;
            let mut d = Declarations::default().with_lora(lora);
            let linear = Linear::declare(&mut d, 48, &named, false, Split::Rows { unit: 1 }, 0.1).unwrap();
            let s = Setup::frozen(d, dtype, 1, 1.0);
            let (x, _) = s.input(10, &[6, 48]);
            if is_dora {
                write(&s.rank, &s.params.values()[2], &[0.0; 64 * super::lora::RANK]);
                let norms = row_norms(&s.rank, &s.params, id(0)).unwrap();
                write(
                    &s.rank,
                    &s.params.values()[3],
                    &norms.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
                );
            }
            s.host(&linear.forward(&s.pass(), &x).unwrap().0)
        };
        assert_eq!(run(dora(&["all-linear"], false, 2.0)), run(LoraPolicy::default()), "{dtype}");
    }
}

#[test]
fn linear_over_ranks_matches_the_reference() {
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
                    *d = std::mem::take(d).with_lora(dora(&["all-linear"], fused, 2.0));
                    Linear::declare(d, input, &named, true, split, 0.1).unwrap()
                };
                let mut d = Declarations::default();
                build(&mut d, &Rank::cpu(1, 1).unwrap());
                let s = setup(d, dtype, frozen);
                let (xs, dys) = (s.input(10, &[tokens, input]).1, s.input(20, &[tokens, out]).1);
                let sizes: Vec<usize> = outputs.iter().map(|o| o.1).collect();
                let covered = vec![true; sizes.len()];
                let weight = |v: &[Vec<f64>]| merged(&v[1], &v[3], &v[4], &sizes, &covered, 2.0);
                let norm = norms(&weight(&s.arrays(&xs)), out);
                let twin = |v: &[Vec<f64>]| {
                    let w = rescaled(&weight(v), &norm, &v[5], &sizes, &covered);
                    linear::reference(&v[0], &w, Some(&v[2]), out)
                };
                let what = format!("DoRA {split:?}, fused {fused}, frozen {frozen}");
                check(&what, &s, (&xs, &dys), &twin, build, |s, linear| {
                    run_linear(s, linear, split, (&xs, input), (&dys, out))
                });
            }
        }
    }
}

/// Gated and plain MLPs, saved, recomputed and in chunks.
#[test]
fn mlp_matches_the_reference() {
    let (tokens, hidden, ffn) = (5, 6, 9);
    for dtype in DTYPES {
        for (gated, targets) in
            [(true, &["all-linear"][..]), (false, &["all-linear"]), (true, &["down"]), (false, &["up"])]
        {
            let mut d = Declarations::default().with_lora(dora(targets, false, 2.0));
            let c = MlpConfig { hidden, ffn, act: Act::Silu, gated, bias: false, std: (0.1, 0.1) };
            let mlp = Mlp::declare(&mut d, "mlp", c).unwrap();
            let s = Setup::frozen(d, dtype, 4, 1.0);
            let (x, xs) = s.input(14, &[tokens, hidden]);
            let (dy, dys) = s.input(24, &[tokens, hidden]);
            let names: Vec<String> = (1..=s.weights.len()).map(|i| s.name(i)).collect();
            let first = s.arrays(&xs);
            let f = |v: &[Vec<f64>]| {
                let place = |what: String| names.iter().position(|n| n.contains(&what)).map(|i| i + 1);
                let weight = |end: &str, outputs: &[usize]| {
                    let covered = vec![true; outputs.len()];
                    let at = |what: &str| place(format!("{end}.{what}"));
                    let w = at("weight").unwrap();
                    match (at("lora_a"), at("lora_b"), at("lora_m")) {
                        (Some(a), Some(b), Some(m)) => {
                            let of = |v: &[Vec<f64>]| merged(&v[w], &v[a], &v[b], outputs, &covered, 2.0);
                            let norm = norms(&of(&first), outputs.iter().sum());
                            rescaled(&of(v), &norm, &v[m], outputs, &covered)
                        }
                        _ => v[w].clone(),
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
            s.compare(&format!("MLP with DoRA on {targets:?}, gated {gated}"), &f, &xs, &dys, kept);
            let chunks = run(&StepContext { mlp_chunk: Some(2), ..s.pass() });
            s.compare(&format!("in chunks, DoRA on {targets:?}, gated {gated}"), &f, &xs, &dys, chunks);
        }
    }
}

#[test]
fn only_trained_rows_have_an_m() {
    let mut d = Declarations::default().with_lora(dora(&["q"], false, 1.0));
    let named = [("m.q", 8), ("m.k", 4)].map(|(name, n)| (name.to_string(), n));
    Linear::declare(&mut d, 6, &named, false, Split::Rows { unit: 1 }, 0.1).unwrap();
    let s = Setup::frozen(d, DType::F32, 1, 1.0);
    assert_eq!(s.name(4), "m.q.lora_m.weight");
    assert_eq!(s.params.specs()[3].shape, [8]);
    assert!(!s.params.specs()[3].group.frozen && !s.params.specs()[3].decays());
}
