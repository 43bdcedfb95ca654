//! Attention and MLP with FP8 GEMMs: close to bf16, saved activations minimal and movable, bit-equal under recomputation
//! and with or without overlap.

use super::fp8_oracle::*;
use super::support::*;
use super::tensor_parallel::{join_rows, local_rows, on_ranks};
use ferrotron_engine::attention::{Attention, AttentionConfig, Layout};
use ferrotron_engine::quant::{Method, Policy, Recipe};
use ferrotron_engine::{
    Declarations, Mlp, MlpConfig, NormLayer, NormSaved, Rank, Recompute, Saved, SavedTensor, StepContext,
    WeightGrad,
};
use ferrotron_kernels::{Act, AttentionParams, MaskAlign, Norm};
use ferrotron_tensor::{DType, Instrumentation, Tensor};
use std::collections::BTreeMap;

const HIDDEN: usize = 64;
const FFN: usize = 96;
const HEADS: usize = 4;
const GROUPS: usize = 2;
const DIM: usize = 16;
const TOKENS: usize = 48;

/// A layer without residual additions: norm, attention, norm, MLP.
struct Net {
    norms: [NormLayer; 2],
    attention: Attention,
    mlp: Mlp,
    positions: Tensor,
    /// Whether producers compute the amax, as decoder layers do.
    measured: bool,
}

const LAYOUT: Layout = Layout::Rows { count: 2, len: TOKENS / 2 };

fn declare(policy: &Policy, gated: bool) -> impl Fn(&mut Declarations, &Rank) -> Net {
    let policy = policy.clone();
    move |d: &mut Declarations, rank: &Rank| {
        *d = std::mem::take(d).with_policy(policy.clone());
        let norm = Norm { subtract_mean: false, eps: 1e-5, zero_centred: true };
        let scores = AttentionParams {
            scale: 0.25,
            softcap: None,
            causal: true,
            align: MaskAlign::TopLeft,
            left: None,
            right: None,
            fp8: false,
        };
        let config = AttentionConfig {
            hidden: HIDDEN,
            heads: HEADS,
            kv_heads: GROUPS,
            head_dim: DIM,
            qkv_bias: true,
            out_bias: false,
            scores,
            qk_norm: None,
            qk_norm_all_heads: false,
            sink: false,
            std: (0.1, 0.1),
        };
        let name = |n: &str| format!("layers.0.{n}");
        let positions =
            [(0..TOKENS as i32 / 2).collect::<Vec<_>>(), (0..TOKENS as i32 / 2).collect()].concat();
        Net {
            norms: ["attn_norm", "mlp_norm"].map(|n| NormLayer::declare(d, &name(n), HIDDEN, norm).unwrap()),
            attention: Attention::declare(d, &name("attn"), config, None).unwrap(),
            mlp: Mlp::declare(
                d,
                &name("mlp"),
                MlpConfig { hidden: HIDDEN, ffn: FFN, act: Act::Silu, gated, bias: true, std: (0.1, 0.1) },
            )
            .unwrap(),
            measured: true,
            positions: rank
                .compute
                .upload(&positions, &[TOKENS], ferrotron_tensor::Category::Activations)
                .unwrap(),
        }
    }
}

impl Net {
    /// As a decoder layer does: dropped activations are recomputed before their backward.
    fn run(
        &self,
        p: &StepContext,
        x: &Tensor,
        dy: &Tensor,
        between: &dyn Fn(&str, &mut dyn Saved),
    ) -> (Tensor, Tensor, WeightGrad) {
        let r = p.recompute;
        let wanted = match self.measured {
            true => [self.attention.needs_input_amax(p), self.mlp.needs_input_amax(p)],
            false => [false; 2],
        };
        let forward = || {
            let (n, mut norm) = self.norms[0].forward_with_amax(p, x, wanted[0]).unwrap();
            let (a, mut attention) = self.attention.forward(p, &n, &LAYOUT, &self.positions).unwrap();
            let (m, mut mlp_norm) = self.norms[1].forward_with_amax(p, &a, wanted[1]).unwrap();
            let (y, mut mlp) = self.mlp.forward(p, &m).unwrap();
            if r.norm {
                attention.drop_input();
                mlp.drop_input();
            }
            between("attention", &mut attention);
            between("mlp", &mut mlp);
            between("norm", &mut norm);
            between("norm", &mut mlp_norm);
            (y, norm, (!r.attention).then_some(attention), mlp_norm, (!r.mlp).then_some(mlp))
        };
        let mut made = forward();
        if r.layer {
            made = forward();
        }
        let (y, norm, attention, mlp_norm, mlp) = made;
        let again =
            |i: usize, saved: &NormSaved, measure| self.norms[i].recompute(p, saved, measure).unwrap();
        let mlp = match mlp {
            None => self.mlp.forward(p, again(1, &mlp_norm, wanted[1])).unwrap().1,
            Some(mut kept) => {
                if r.norm {
                    kept.restore_input(&again(1, &mlp_norm, false).values);
                }
                kept
            }
        };
        let (dm, work) = self.mlp.backward(p, mlp, dy).unwrap();
        let (da, more) = self.norms[1].backward(p, mlp_norm, &dm, None).unwrap();
        let work = work.and(more);
        let attention = match attention {
            None => {
                let x = again(0, &norm, wanted[0]);
                self.attention.forward(p, &x, &LAYOUT, &self.positions).unwrap().1
            }
            Some(mut kept) => {
                if r.norm {
                    kept.restore_input(&again(0, &norm, false).values);
                }
                kept
            }
        };
        let (dn, more) = self.attention.backward(p, attention, &LAYOUT, &self.positions, &da).unwrap();
        let work = work.and(more);
        let (dx, more) = self.norms[0].backward(p, norm, &dn, None).unwrap();
        (y, dx, work.and(more))
    }
}

fn stay(_: &str, _: &mut dyn Saved) {}

fn all_recipes() -> Vec<Recipe> {
    [recipes(), vec![DELAYED]].concat()
}

fn setup(policy: &Policy, gated: bool) -> (Net, Setup, Tensor, Tensor) {
    let (mut d, rank) = (Declarations::default(), Rank::cpu(2, 1).unwrap());
    let net = declare(policy, gated)(&mut d, &rank);
    let s = Setup::on(rank, d, DType::BF16, 1, 0.04);
    let x = s.input(10, &[TOKENS, HIDDEN]).0;
    let dys: Vec<f64> = numbers(20, TOKENS * HIDDEN).iter().map(|x| 0.04 * x).collect();
    let dy = s.upload(&dys, &[TOKENS, HIDDEN]);
    (net, s, x, dy)
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    let apart: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    (dot(&apart, &apart) / dot(b, b).max(1e-12)).sqrt()
}

/// Output, input gradient and weight gradients are close to bf16.
fn near(
    what: &str,
    recipe: Recipe,
    ours: &super::tensor_parallel::Numbers,
    theirs: &super::tensor_parallel::Numbers,
) {
    let tensors =
        |n: &super::tensor_parallel::Numbers| [vec![n.0.clone(), n.1.clone()], n.2.clone()].concat();
    let wide = recipe.hybrid || recipe.method == Method::Nvfp4;
    let (relative, absolute) = if wide { (0.25, 0.125) } else { (0.125, 0.0625) };
    // Six GEMMs in sequence, each off by up to half a step of its coarser operand's format.
    let most = 2f64.powi(if wide { -2 } else { -3 }) * if recipe.method == Method::Nvfp4 { 2.0 } else { 1.0 };
    for (i, (a, b)) in tensors(ours).iter().zip(&tensors(theirs)).enumerate() {
        for (a, b) in a.iter().zip(b) {
            assert!((a - b).abs() <= relative * b.abs() + absolute, "{what} tensor {i}: {a} instead of {b}");
        }
        let d = distance(a, b);
        assert!(d <= most, "{what} tensor {i}: {d:.3} apart, more than {most}");
    }
}

#[test]
fn fp8_blocks_are_close_to_bf16() {
    for gated in [false, true] {
        let go = |policy: &Policy| {
            let (net, s, x, dy) = setup(policy, gated);
            s.state.quant().into_iter().for_each(|e| e.begin_step(1, 1));
            let (y, dx, work) = net.run(&s.pass(), &x, &dy, &stay);
            (s.host(&y), s.host(&dx), s.gradients(work))
        };
        let plain = go(&Policy::default());
        for recipe in all_recipes() {
            near(&format!("{recipe:?} gated {gated}"), recipe, &go(&policy(recipe, &[])), &plain);
        }
    }
}

#[test]
fn fp8_blocks_are_bit_equal_when_offloaded_or_recomputed() {
    for (recipe, gated) in all_recipes().into_iter().flat_map(|r| [(r, true), (r, false)]) {
        let (net, s, x, dy) = setup(&policy(recipe, &[]), gated);
        let state = s.state.quant().unwrap();
        let go = |recompute: Recompute, between: &dyn Fn(&str, &mut dyn Saved)| {
            state.begin_step(1, 1);
            let (y, dx, work) = net.run(&StepContext { recompute, ..s.pass() }, &x, &dy, between);
            (s.host(&y), s.host(&dx), s.gradients(work))
        };
        let none = Recompute::default();
        let kept = go(none, &stay);
        let moves = |_: &str, saved: &mut dyn Saved| {
            move_saved(&s.rank, &s.params, saved);
        };
        assert!(kept == go(none, &moves), "{recipe:?}: moved");
        for recompute in [
            Recompute { attention: true, ..none },
            Recompute { mlp: true, ..none },
            Recompute { norm: true, ..none },
            Recompute { activation: true, ..none },
            Recompute { layer: true, ..none },
            Recompute { norm: true, activation: true, ..none },
            Recompute { mlp: true, activation: true, norm: true, ..none },
        ] {
            assert!(kept == go(recompute, &stay), "{recipe:?} gated {gated} {recompute:?}");
        }
        if let Some(delayed) = state.delayed() {
            // Recomputation does not change what statistics record.
            let history = s.host(&delayed.history);
            go(Recompute { layer: true, ..none }, &stay);
            assert_eq!(history, s.host(&delayed.history));
        }
    }
}

/// Saved bytes per module.
fn saved_bytes(policy: &Policy, gated: bool, recompute: Recompute) -> BTreeMap<String, f64> {
    let (net, s, x, dy) = setup(policy, gated);
    let all = std::cell::RefCell::new(BTreeMap::<String, BTreeMap<u64, usize>>::new());
    let count = |what: &str, saved: &mut dyn Saved| {
        saved.tensors(&mut |t: &mut SavedTensor| {
            let mut all = all.borrow_mut();
            let known = all.entry(what.into()).or_default().entry(t.allocation_id()).or_default();
            *known = (*known).max(t.bytes());
        });
    };
    let _ = net.run(&StepContext { recompute, ..s.pass() }, &x, &dy, &count);
    let all = all.into_inner();
    all.into_iter().map(|(k, v)| (k, v.values().sum::<usize>() as f64 / TOKENS as f64)).collect()
}

#[test]
fn fp8_blocks_save_fp8_operands() {
    let none = Recompute::default();
    for gated in [false, true] {
        let up = if gated { 2 * FFN } else { FFN };
        // q, k, v and the attention output (shared with the output projection) in bf16, and the log-sum-exp per head.
        let scores = 2 * (HEADS + 2 * GROUPS) * DIM + 2 * HEADS * DIM + 4 * HEADS;
        for (recipe, input) in [(None, 2), (Some(CURRENT), 1), (Some(DELAYED), 1)] {
            let p = recipe.map(|r| policy(r, &[])).unwrap_or_default();
            let found = saved_bytes(&p, gated, none);
            // The amax of what backward quantizes again.
            let amax = if recipe == Some(CURRENT) { 4.0 / TOKENS as f64 } else { 0.0 };
            assert_eq!(found["attention"], (input * HIDDEN + scores) as f64 + amax, "{recipe:?}");
            assert_eq!(found["mlp"], (input * HIDDEN + 2 * up + input * FFN) as f64, "{recipe:?}");
            // What is recomputed is not saved, not even in FP8.
            let found = saved_bytes(&p, gated, Recompute { norm: true, activation: true, ..none });
            assert_eq!(found["attention"], scores as f64 + amax, "{recipe:?}");
            assert_eq!(found["mlp"], (2 * up) as f64 + amax, "{recipe:?}");
        }
        // Block scaling has one scale per 128 tokens of a channel; there are fewer tokens here.
        let found = saved_bytes(&policy(BLOCK, &[]), gated, none);
        let scales = |channels: usize| (4 * channels) as f64 / TOKENS as f64;
        assert_eq!(found["attention"], (HIDDEN + scores) as f64 + scales(HIDDEN));
        assert_eq!(found["mlp"], (HIDDEN + 2 * up + FFN) as f64 + scales(HIDDEN + FFN));
    }
}

/// The amax of each operand is computed once, by its producer or by the quantizer, with equal bits.
#[test]
fn amax_is_computed_once_per_operand() {
    let none = Recompute::default();
    for gated in [false, true] {
        let rank = Rank::cpu_instrumented(
            1,
            1,
            Instrumentation { kernel_times: true, ..Instrumentation::default() },
        )
        .unwrap();
        let mut d = Declarations::default();
        let mut net = declare(&policy(CURRENT, &[]), gated)(&mut d, &rank);
        let s = Setup::on(rank, d, DType::BF16, 1, 0.04);
        let (x, dy) = (s.input(10, &[TOKENS, HIDDEN]).0, s.input(20, &[TOKENS, HIDDEN]).0);
        let mut first = None;
        for measured in [false, true] {
            net.measured = measured;
            for recompute in [none, Recompute { norm: true, activation: true, ..none }] {
                s.state.quant().unwrap().begin_step(0, 1);
                s.rank.device().take_profile().unwrap();
                let (y, dx, work) = net.run(&StepContext { recompute, ..s.pass() }, &x, &dy, &stay);
                let profile = s.rank.device().take_profile().unwrap();
                let calls = |name: &str| profile.get(name).map_or(0, |(calls, _)| *calls);
                // Input, weight and output gradient of four linear layers.
                assert_eq!((calls("amax"), calls("zero")), (12, 1), "gated {gated} {measured} {recompute:?}");
                let made = (s.host(&y), s.host(&dx), s.gradients(work));
                assert!(*first.get_or_insert_with(|| made.clone()) == made, "gated {gated} {measured}");
            }
        }
    }
}

#[test]
fn fp8_blocks_over_tensor_parallel_ranks() {
    for gated in [false, true] {
        let (net, s, x, dy) = setup(&Policy::default(), gated);
        let (y, dx, work) = net.run(&s.pass(), &x, &dy, &stay);
        let plain = (s.host(&y), s.host(&dx), s.gradients(work));
        let (xs, dys) = (s.host(&x), s.host(&dy));
        for recipe in all_recipes() {
            let p = policy(recipe, &[]);
            for t in [2, 4] {
                let go = |overlap: bool, recompute: Recompute| {
                    on_ranks(t, overlap, &s, declare(&p, gated), |s, net: &Net| {
                        s.state.quant().unwrap().begin_step(1, 1);
                        let (x, dy) = (local_rows(s, &xs, HIDDEN), local_rows(s, &dys, HIDDEN));
                        let (y, dx, work) = net.run(&StepContext { recompute, ..s.pass() }, &x, &dy, &stay);
                        (join_rows(s, &y), join_rows(s, &dx), work)
                    })
                };
                let what = format!("{recipe:?} gated {gated} tp={t}");
                let none = Recompute::default();
                let ours = go(true, none);
                near(&what, recipe, &ours, &plain);
                assert!(ours == go(false, none), "{what}: overlap changes bits");
                let some = Recompute { norm: true, activation: true, ..none };
                assert!(ours == go(true, some), "{what}: recomputed");
            }
        }
    }
}
