//! FP8 linear layers over tensor-parallel ranks, with the race checker on: FP8 values equal one rank's with per-tensor
//! scales, and those of each rank's shard with block scales; bit-equal with and without overlap.

use super::fp8::{self, Delays, Map, OperandShards, check};
use super::fp8_oracle::*;
use super::support::*;
use super::tensor_parallel::*;
use ferrotron_engine::quant::{Method, Recipe};
use ferrotron_engine::{Declarations, Linear, Rank, Split, WeightGrad};
use ferrotron_tensor::DType;

pub const ROWS: Split = Split::Rows { unit: 1 };
pub const COLUMNS: Split = Split::Columns { unit: 1 };

pub fn build(
    recipe: Option<Recipe>,
    except: &[&str],
    map: &Map,
    split: Split,
) -> impl Fn(&mut Declarations, &Rank) -> Linear {
    let policy = recipe.map(|r| policy(r, except)).unwrap_or_default();
    move |d: &mut Declarations, _: &Rank| {
        *d = std::mem::take(d).with_policy(policy.clone());
        map.declare(d, split)
    }
}

/// Forward and backward of this rank's shard; output and input gradient joined.
pub fn pass(
    s: &Setup,
    linear: &Linear,
    map: &Map,
    split: Split,
    xs: &[f64],
    dys: &[f64],
) -> (Vec<f64>, Vec<f64>, WeightGrad) {
    let (p, n) = (&s.pass(), map.out());
    if split == COLUMNS {
        let (y, saved) = linear.forward(p, &local_columns(s, xs, map.input)).unwrap();
        let (dx, grads) = linear.backward(p, saved, &local_rows(s, dys, n)).unwrap();
        (join_rows(s, &y), join_columns(s, &dx), grads)
    } else {
        let (y, saved) = linear.forward(p, &local_rows(s, xs, map.input)).unwrap();
        let (dx, grads) = linear.backward(p, saved, &local_columns(s, dys, n)).unwrap();
        (join_columns(s, &y), join_rows(s, &dx), grads)
    }
}

/// Shards of x, W and dy, and which sums are partial.
fn cut(split: Split, t: usize) -> OperandShards {
    let (down, across) = (Parts { down: t, across: 1 }, Parts { down: 1, across: t });
    match split == COLUMNS {
        true => OperandShards { operands: [across, across, ONE], sums: [t, 1] },
        false => OperandShards { operands: [ONE, down, across], sums: [1, t] },
    }
}

#[test]
fn fp8_linears_over_ranks_match_one_rank() {
    for recipe in recipes() {
        let mut maps = vec![Map::new(12, 12, &[20], false), Map::new(40, 36, &[16], true)];
        maps.push(if recipe.per_tensor() {
            Map::new(4, 8, &[4], true)
        } else {
            Map::new(132, 64, &[256], true)
        });
        // Multiples of 128 tokens per rank on 2 and on 4 ranks: column-wise blocks do not cross ranks.
        if recipe.method == Method::Block {
            maps.extend([Map::new(512, 36, &[64], true), Map::new(512, 160, &[36], false)]);
        }
        for map in maps {
            for split in [ROWS, COLUMNS] {
                let build = build(Some(recipe), &[], &map, split);
                let mut d = Declarations::default();
                let rank = Rank::cpu(2, 1).unwrap();
                let linear = build(&mut d, &rank);
                let alone = Setup::on(rank, d, DType::BF16, 1, 0.04);
                let [(x, xs), (dy, dys)] = map.operands(&alone, 1.0);
                let begin = |s: &Setup| s.state.quant().unwrap().begin_step(5, 1);
                begin(&alone);
                let one = fp8::run(&linear, &alone, &alone.pass(), &x, &dy);
                for t in [2, 4] {
                    let what = format!("{recipe:?} {map:?} {split:?} tp={t}");
                    let work = |s: &Setup, linear: &Linear| {
                        begin(s);
                        pass(s, linear, &map, split, &xs, &dys)
                    };
                    let ours = on_ranks(t, true, &alone, &build, work);
                    assert_eq!(
                        ours,
                        on_ranks(t, false, &alone, &build, work),
                        "{what}: overlap changes bits"
                    );
                    let all = [&xs[..], &alone.weights[0], &dys];
                    let bias = map.bias.then(|| &alone.weights[1][..]);
                    let given = Given { scale: 1.0, draw: (5 << 32) + 1 };
                    check(&what, recipe, &map, (all, bias), (cut(split, t), [given; 3]), &ours);
                    if recipe.per_tensor() {
                        // Without partial sums the GEMM runs over the same FP8 values in the same order.
                        assert_eq!(ours.2[0], one.2[0], "{what}: weight gradient of one rank");
                        let (ours, one) = if split == ROWS { (&ours.0, &one.0) } else { (&ours.1, &one.1) };
                        assert_eq!(ours, one, "{what}: bits of one rank");
                    }
                }
            }
        }
    }
}

/// A replicated linear layer on sequence shards: FP8 values equal one rank's; only amax is communicated.
#[test]
fn replicated_fp8_linears_match_one_rank() {
    let map = Map::new(40, 36, &[16], true);
    for recipe in [CURRENT, DELAYED] {
        let build = build(Some(recipe), &[], &map, Split::Replicated);
        let mut d = Declarations::default();
        let rank = Rank::cpu(2, 1).unwrap();
        let linear = build(&mut d, &rank);
        let alone = Setup::on(rank, d, DType::BF16, 1, 0.04);
        let [(x, xs), (dy, dys)] = map.operands(&alone, 1.0);
        alone.state.quant().unwrap().begin_step(5, 1);
        let one = fp8::run(&linear, &alone, &alone.pass(), &x, &dy);
        for t in [2, 4] {
            let ours = on_ranks(t, true, &alone, &build, |s, linear| {
                s.state.quant().unwrap().begin_step(5, 1);
                let (y, saved) = linear.forward(&s.pass(), &local_rows(s, &xs, map.input)).unwrap();
                let (dx, grads) = linear.backward(&s.pass(), saved, &local_rows(s, &dys, map.out())).unwrap();
                (join_rows(s, &y), join_rows(s, &dx), grads)
            });
            let what = format!("{recipe:?} tp={t}");
            assert_eq!((&ours.0, &ours.1), (&one.0, &one.1), "{what}: bits of one rank");
            for (ours, one) in ours.2.iter().zip(&one.2) {
                close(&format!("{what}: weight gradients"), DType::F32, ours, one);
            }
        }
    }
}

/// Ranks see different amax values and agree on the next step's scales.
#[test]
fn delayed_scales_agree_over_ranks() {
    let map = Map::new(40, 36, &[16], true);
    for split in [ROWS, COLUMNS] {
        let build = build(Some(DELAYED), &[], &map, split);
        let mut d = Declarations::default();
        build(&mut d, &Rank::cpu(1, 1).unwrap());
        let alone = Setup::new(d, DType::BF16, 1, 0.04);
        let operands = [50.0, 400.0, 3.0].map(|size| map.operands(&alone, size).map(|o| o.1));
        for t in [2, 4] {
            let what = format!("{split:?} tp={t}");
            let work = |s: &Setup, linear: &Linear| {
                let state = s.state.quant().unwrap();
                let delayed = state.delayed().unwrap();
                write(&s.rank, &delayed.scale, &[1.0; 3]);
                write(&s.rank, &delayed.history, &[0.0; 9]);
                let mut delays = Delays::default();
                let mut last = None;
                for [xs, dys] in &operands {
                    last = Some(pass(s, linear, &map, split, xs, dys));
                    assert_eq!(s.host(&delayed.scale), delays.given(DELAYED).map(|g| f64::from(g.scale)));
                    state.end_step(&s.rank).unwrap();
                    delays.end_step([xs, &alone.weights[0], dys]);
                }
                last.unwrap()
            };
            let ours = on_ranks(t, true, &alone, &build, work);
            assert_eq!(ours, on_ranks(t, false, &alone, &build, work), "{what}: overlap changes bits");
            let mut delays = Delays::default();
            operands[..2].iter().for_each(|[xs, dys]| delays.end_step([xs, &alone.weights[0], dys]));
            let [xs, dys] = &operands[2];
            let all = [&xs[..], &alone.weights[0], dys];
            let given = delays.given(DELAYED);
            check(&what, DELAYED, &map, (all, Some(&alone.weights[1])), (cut(split, t), given), &ours);
        }
    }
}

/// Over ranks, too, a skipped GEMM is bit-equal to bf16 and leaves the others unchanged.
#[test]
fn skipped_gemms_over_ranks_match_bf16() {
    let map = Map::new(40, 36, &[16], true);
    for recipe in [CURRENT, BLOCK, Recipe { method: Method::Mxfp8, ..BLOCK }, NVFP4] {
        for split in [ROWS, COLUMNS] {
            let mut d = Declarations::default();
            build(None, &[], &map, split)(&mut d, &Rank::cpu(1, 1).unwrap());
            let alone = Setup::new(d, DType::BF16, 1, 0.04);
            let [xs, dys] = map.operands(&alone, 1.0).map(|o| o.1);
            let go = |recipe: Option<Recipe>, except: &[&str], overlap: bool| {
                on_ranks(2, overlap, &alone, build(recipe, except, &map, split), |s, linear| {
                    s.state.quant().into_iter().for_each(|e| e.begin_step(0, 1));
                    pass(s, linear, &map, split, &xs, &dys)
                })
            };
            let (high, low) = (go(None, &[], true), go(Some(recipe), &[], true));
            let names = ["mlp:output", "mlp:input_grad", "mlp:weight_grad"];
            for off in 1..7usize {
                let except: Vec<&str> = (0..3).filter(|i| off >> i & 1 == 1).map(|i| names[i]).collect();
                let what = format!("{recipe:?} {split:?} without {except:?}");
                let ours = go(Some(recipe), &except, true);
                assert_eq!(ours, go(Some(recipe), &except, false), "{what}: overlap changes bits");
                let from = |i: usize| if off >> i & 1 == 1 { &high } else { &low };
                assert_eq!(ours.0, from(0).0, "{what}: output");
                assert_eq!(ours.1, from(1).1, "{what}: input gradient");
                assert_eq!(ours.2[0], from(2).2[0], "{what}: weight gradient");
                assert_eq!(ours.2[1], high.2[1], "{what}: bias gradient");
            }
        }
    }
}
