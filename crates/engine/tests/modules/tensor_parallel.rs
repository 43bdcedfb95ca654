//! Modules over tensor-parallel ranks, with the race checker on: equal to the f64 reference, and bit-equal with and
//! without overlapped communication.

use super::support::*;
use super::{attention, linear, lm_head, mla, mlp};
use ferrotron_comm::World;
use ferrotron_engine::attention::{Attention, Layout};
use ferrotron_engine::{
    Declarations, GroupRank, Linear, LossOptions, Mlp, MlpConfig, Params, Rank, Split, StepState, Targets,
    WeightGrad,
};
use ferrotron_kernels::{Act, IGNORE, LabelSmoothing, RopeStyle};
use ferrotron_tensor::{Category, Instrumentation, Tensor};
use std::time::Duration;

/// Output, input gradient, parameter gradients.
pub type Numbers = (Vec<f64>, Vec<f64>, Vec<Vec<f64>>);

/// All ranks' values, in rank order.
pub fn gather(rank: &Rank, mine: &[f64]) -> Vec<Vec<f64>> {
    let all = rank.tp.all_gather_bytes(bytemuck::cast_slice(mine), "numbers of a test").unwrap();
    all.iter().map(|b| b.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect()).collect()
}

/// This rank's shard of the rows (`width` values each), zero-padded.
pub fn local_rows(s: &Setup, whole: &[f64], width: usize) -> Tensor {
    let (t, rows) = (s.rank.tp.size(), (whole.len() / width).next_multiple_of(s.rank.tp.size()));
    let mut whole = whole.to_vec();
    whole.resize(rows * width, 0.0);
    let n = rows / t;
    s.upload(&whole[s.rank.tp.rank() * n * width..][..n * width], &[n, width])
}

/// This rank's shard of the columns.
pub fn local_columns(s: &Setup, whole: &[f64], width: usize) -> Tensor {
    let n = width / s.rank.tp.size();
    let mine: Vec<f64> = whole.chunks(width).flat_map(|r| r[s.rank.tp.rank() * n..][..n].to_vec()).collect();
    s.upload(&mine, &[whole.len() / width, n])
}

pub fn join_rows(s: &Setup, mine: &Tensor) -> Vec<f64> {
    gather(&s.rank, &s.host(mine)).concat()
}

pub fn join_columns(s: &Setup, mine: &Tensor) -> Vec<f64> {
    let (rows, n) = (mine.shape()[0], mine.shape()[1]);
    let all = gather(&s.rank, &s.host(mine));
    (0..rows).flat_map(|r| all.iter().flat_map(move |a| a[r * n..][..n].to_vec())).collect()
}

/// Runs a module with the weights of `alone` on `t` ranks. `work` gives the joined output and input gradient; weight
/// gradients run late, after other work has reused free memory.
pub fn on_ranks<M>(
    t: usize,
    overlap: bool,
    alone: &Setup,
    build: impl Fn(&mut Declarations, &Rank) -> M + Sync,
    work: impl Fn(&Setup, &M) -> (Vec<f64>, Vec<f64>, WeightGrad) + Sync,
) -> Numbers {
    let (dtype, weights) = (alone.params.dtype(), &alone.weights);
    let run = |world: World| {
        let watched =
            Rank::cpu_instrumented(1, 1, Instrumentation { race_check: true, ..Instrumentation::default() })
                .unwrap();
        let kernels = alone.rank.kernels.clone();
        let rank = Rank { tp: world.all(), world, overlap, kernels, ..watched };
        let mut d = Declarations::at(rank.place());
        let module = build(&mut d, &rank);
        let mut specs = d.finish();
        specs.iter_mut().zip(alone.params.specs()).for_each(|(s, whole)| s.group = whole.group);
        let params = Params::allocate(&rank, specs, dtype).unwrap();
        for ((spec, value), whole) in params.specs().iter().zip(params.values()).zip(weights) {
            let mut rest = &whole[..];
            let mut mine = Vec::new();
            for (part, cut, _) in spec.held() {
                let (part_values, others) = rest.split_at(part.shape.iter().product());
                mine.extend(cut.take(&part.shape, part_values));
                rest = others;
            }
            write(&rank, value, &mine);
        }
        let state = StepState::new(&rank, &params, &[]).unwrap();
        let s = Setup { rank, params, state, weights: Vec::new() };
        let (y, dx, grads) = work(&s, &module);
        let unused = work(&s, &module);
        assert_eq!((&unused.0, &unused.1), (&y, &dx));
        drop(unused);
        let between = work(&s, &module).2;
        let grads = join_grads(&s, grads);
        assert_eq!(join_grads(&s, between), grads, "formed at once and late");
        (y, dx, grads)
    };
    let mut all: Vec<Numbers> = std::thread::scope(|scope| {
        let run = &run;
        let worlds = World::threads(t, Duration::from_secs(60));
        let threads: Vec<_> = worlds.into_iter().map(|w| scope.spawn(move || run(w))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(all.windows(2).all(|w| w[0] == w[1]), "ranks disagree");
    all.swap_remove(0)
}

/// Unsharded gradients; replicated parameters sum the ranks' contributions.
fn join_grads(s: &Setup, work: WeightGrad) -> Vec<Vec<f64>> {
    let size = s.rank.tp.size();
    let join = |(spec, mine): (&ferrotron_engine::ParamSpec, Vec<f64>)| -> Vec<f64> {
        let parts = spec.held().flat_map(|(part, _, range)| {
            let mut whole = vec![0.0; part.shape.iter().product()];
            for (rank, share) in gather(&s.rank, &mine[range]).iter().enumerate() {
                let cut = part.cut(GroupRank { rank, size });
                let old = cut.take(&part.shape, &whole);
                let sum: Vec<f64> = old.iter().zip(share).map(|(a, b)| a + b).collect();
                cut.put(&part.shape, &sum, &mut whole);
            }
            whole
        });
        parts.collect()
    };
    s.params.specs().iter().zip(s.gradients(work)).map(join).collect()
}

/// On 2 and 4 ranks, with and without overlap: bit-equal, and equal to the reference.
pub fn check<M>(
    what: &str,
    alone: &Setup,
    (xs, dys): (&[f64], &[f64]),
    twin: &dyn Fn(&[Vec<f64>]) -> Vec<f64>,
    build: impl Fn(&mut Declarations, &Rank) -> M + Sync,
    work: impl Fn(&Setup, &M) -> (Vec<f64>, Vec<f64>, WeightGrad) + Sync,
) {
    for t in [2, 4] {
        let ours = on_ranks(t, true, alone, &build, &work);
        assert_eq!(ours, on_ranks(t, false, alone, &build, &work), "{what} tp={t}: overlap changes bits");
        alone.compare(&format!("{what} tp={t}"), twin, xs, dys, ours);
    }
}

/// Output, input gradient and weight gradient of a parallel linear layer for `xs` and the output gradient `dys`, each with its
/// width.
pub fn run_linear(
    s: &Setup,
    linear: &Linear,
    split: Split,
    (xs, input): (&[f64], usize),
    (dys, out): (&[f64], usize),
) -> (Vec<f64>, Vec<f64>, WeightGrad) {
    let p = &s.pass();
    let own = |columns: bool, v: &[f64], n| match columns {
        true => local_columns(s, v, n),
        false => local_rows(s, v, n),
    };
    let join = |columns: bool, t: &Tensor| match columns {
        true => join_columns(s, t),
        false => join_rows(s, t),
    };
    let inside = matches!(split, Split::Columns { .. });
    let outside = matches!(split, Split::Rows { .. });
    let (y, saved) = linear.forward(p, &own(inside, xs, input)).unwrap();
    let (dx, grads) = linear.backward(p, saved, &own(outside, dys, out)).unwrap();
    (join(outside, &y), join(inside, &dx), grads)
}

#[test]
fn linear_over_ranks_matches_the_reference() {
    for dtype in DTYPES {
        for (tokens, input, out, bias) in [(4, 8, 4, true), (12, 12, 20, false), (40, 36, 16, true)] {
            for split in [Split::Rows { unit: 1 }, Split::Columns { unit: 1 }, Split::Replicated] {
                let build = |d: &mut Declarations, _: &Rank| {
                    Linear::declare(d, input, &[("w".into(), out)], bias, split, 0.1).unwrap()
                };
                let mut d = Declarations::default();
                build(&mut d, &Rank::cpu(1, 1).unwrap());
                let s = Setup::new(d, dtype, 1, 1.0);
                let (xs, dys) = (s.input(10, &[tokens, input]).1, s.input(20, &[tokens, out]).1);
                let twin = |a: &[Vec<f64>]| linear::reference(&a[0], &a[1], a.get(2).map(|b| &b[..]), out);
                let what = format!("linear {tokens}x{input}->{out} {split:?}");
                check(&what, &s, (&xs, &dys), &twin, build, |s, linear| {
                    run_linear(s, linear, split, (&xs, input), (&dys, out))
                });
            }
        }
    }
}

#[test]
fn mlp_over_ranks_matches_the_reference() {
    let (tokens, hidden, ffn) = (8, 6, 12);
    for dtype in DTYPES {
        let build = |d: &mut Declarations, _: &Rank| {
            Mlp::declare(
                d,
                "mlp",
                MlpConfig { hidden, ffn, act: Act::Silu, gated: true, bias: true, std: (0.1, 0.1) },
            )
            .unwrap()
        };
        let mut d = Declarations::default();
        build(&mut d, &Rank::cpu(1, 1).unwrap());
        let s = Setup::new(d, dtype, 4, 1.0);
        let (xs, dys) = (s.input(14, &[tokens, hidden]).1, s.input(24, &[tokens, hidden]).1);
        let twin = |v: &[Vec<f64>]| {
            let h = linear::reference(&v[0], &v[1], Some(&v[2]), 2 * ffn);
            let a: Vec<f64> = h
                .chunks(2 * ffn)
                .flat_map(|r| (0..ffn).map(|i| mlp::gated(Act::Silu, r[i], r[ffn + i])))
                .collect();
            linear::reference(&a, &v[3], Some(&v[4]), hidden)
        };
        check("mlp", &s, (&xs, &dys), &twin, build, |s, mlp| {
            let (y, saved) = mlp.forward(&s.pass(), &local_rows(s, &xs, hidden)).unwrap();
            let (dx, grads) = mlp.backward(&s.pass(), saved, &local_rows(s, &dys, hidden)).unwrap();
            (join_rows(s, &y), join_rows(s, &dx), grads)
        });
    }
}

#[test]
fn attention_over_ranks_matches_the_reference() {
    let hidden = attention::HIDDEN;
    let rope = Some((RopeStyle::Half, 4));
    let layout = Layout::Packed { offsets: vec![0, 3, 7] };
    let cases = [
        attention::Case { heads: 4, kv_heads: 4, sink: true, rope, ..attention::plain() },
        // Replicated key/value heads, and a padding row.
        attention::Case { heads: 4, kv_heads: 2, bias: true, rope, layout, ..attention::plain() },
    ];
    for dtype in DTYPES {
        for case in &cases {
            let build = |d: &mut Declarations, rank: &Rank| {
                Attention::declare(d, "attn", case.config(), case.table(rank)).unwrap()
            };
            let (_, s) = case.build(dtype);
            let tokens = case.tokens();
            let (xs, dys) = (s.input(15, &[tokens, hidden]).1, s.input(25, &[tokens, hidden]).1);
            let twin = |a: &[Vec<f64>]| case.reference(a);
            check(&format!("{case:?}"), &s, (&xs, &dys), &twin, build, |s, attention| {
                let (p, x, dy) = (&s.pass(), local_rows(s, &xs, hidden), local_rows(s, &dys, hidden));
                let mut places = case.positions();
                places.resize(tokens.next_multiple_of(s.rank.tp.size()), 0);
                let places = s.integers(&places);
                let (y, saved) = attention.forward(p, &x, &case.layout, &places).unwrap();
                let (dx, grads) = attention.backward(p, saved, &case.layout, &places, &dy).unwrap();
                let real = |t: &Tensor| join_rows(s, t)[..tokens * hidden].to_vec();
                (real(&y), real(&dx), grads)
            });
        }
    }
}

#[test]
fn mla_over_ranks_matches_the_reference() {
    let hidden = mla::HIDDEN;
    // Seven tokens: one padding row.
    let layout = Layout::Packed { offsets: vec![0, 3, 7] };
    let cases = [
        mla::Case { heads: 4, sink: true, ..mla::plain() },
        mla::Case { heads: 4, q_rank: None, bias: true, layout, ..mla::plain() },
    ];
    for dtype in DTYPES {
        for case in &cases {
            let build = |d: &mut Declarations, rank: &Rank| case.declare(d, rank);
            let (_, s) = case.build(dtype);
            let tokens = case.tokens();
            let (xs, dys) = (s.input(15, &[tokens, hidden]).1, s.input(25, &[tokens, hidden]).1);
            let twin = |a: &[Vec<f64>]| case.reference(a);
            check(&format!("{case:?}"), &s, (&xs, &dys), &twin, build, |s, block| {
                let (p, x, dy) = (&s.pass(), local_rows(s, &xs, hidden), local_rows(s, &dys, hidden));
                let mut places = case.positions();
                places.resize(tokens.next_multiple_of(s.rank.tp.size()), 0);
                let places = s.integers(&places);
                let (y, saved) = block.forward(p, &x, &case.layout, &places).unwrap();
                let (dx, grads) = block.backward(p, saved, &case.layout, &places, &dy).unwrap();
                let real = |t: &Tensor| join_rows(s, t)[..tokens * hidden].to_vec();
                (real(&y), real(&dx), grads)
            });
        }
    }
}

#[test]
fn lm_head_over_ranks_matches_the_reference() {
    let (hidden, tokens) = (lm_head::HIDDEN, lm_head::LABELS.len());
    for dtype in DTYPES {
        for (softcap, chunk) in [(None, usize::MAX), (Some(2.0), usize::MAX), (Some(2.0), 5)] {
            let smoothing = LabelSmoothing::Torch(0.1);
            let build = |d: &mut Declarations, _: &Rank| {
                let mut h = head_of(d, [lm_head::VOCAB, hidden], softcap, None);
                h.loss = LossOptions { chunk: Some(chunk), label_smoothing: smoothing };
                h
            };
            let mut d = Declarations::default();
            build(&mut d, &Rank::cpu(1, 1).unwrap());
            let s = Setup::new(d, dtype, 7, 1.0);
            let xs = s.input(18, &[tokens, hidden]).1;
            let twin = |a: &[Vec<f64>]| lm_head::reference(softcap, smoothing, &a[0], &a[1]);
            let what = format!("head, softcap {softcap:?}, chunks of {chunk}");
            check(&what, &s, (&xs, &lm_head::weights()), &twin, build, |s, head| {
                let rows = tokens.next_multiple_of(s.rank.tp.size());
                let mut labels = lm_head::LABELS.to_vec();
                labels.resize(rows, IGNORE);
                let mut weights: Vec<f32> = lm_head::weights().iter().map(|w| *w as f32).collect();
                weights.resize(rows, 0.0);
                let weights = s.rank.compute.upload(&weights, &[rows], Category::Activations).unwrap();
                let targets = Targets { labels: s.integers(&labels), weights };
                let (loss, saved) =
                    head.loss(&s.pass(), &local_rows(s, &xs, hidden), &targets, true).unwrap();
                let (dx, grads) = head.backward(&s.pass(), saved.unwrap()).unwrap();
                (s.host(&loss)[..tokens].to_vec(), join_rows(s, &dx)[..tokens * hidden].to_vec(), grads)
            });
        }
    }
}
