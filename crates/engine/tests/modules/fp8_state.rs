//! FP8 state between passes (weight caches, scales) and operand statistics.

use super::fp8::{Map, run};
use super::fp8_oracle::*;
use super::support::*;
use super::tensor_parallel::gather;
use ferrotron_comm::World;
use ferrotron_engine::quant::{Recipe, Role};
use ferrotron_engine::{Declarations, Linear, Params, Rank, Split, StepContext, StepState};
use ferrotron_tensor::{DType, Instrumentation};
use std::time::Duration;

/// Kernel launches since the last call.
fn launches(s: &Setup, names: [&str; 2]) -> [u64; 2] {
    let profile = s.rank.device().take_profile().unwrap();
    names.map(|n| profile.get(n).map_or(0, |(calls, _)| *calls))
}

fn timed(recipe: Recipe, map: &Map) -> (Linear, Setup) {
    let rank =
        Rank::cpu_instrumented(1, 1, Instrumentation { kernel_times: true, ..Instrumentation::default() })
            .unwrap();
    let mut d = Declarations::default().with_policy(policy(recipe, &[]));
    let linear = map.declare(&mut d, Split::Rows { unit: 1 });
    (linear, Setup::on(rank, d, DType::BF16, 1, 0.04))
}

#[test]
fn weights_are_quantized_once_per_step() {
    let map = Map::new(16, 32, &[16], false);
    for recipe in [CURRENT, DELAYED, BLOCK, MXFP8, NVFP4] {
        let (linear, s) = timed(recipe, &map);
        let state = s.state.quant().unwrap();
        let kernel = if recipe.emulated() { "emulate" } else { "quantize" };
        let [(x, _), (dy, _)] = map.operands(&s, 1.0);
        let seen = || launches(&s, [kernel, "amax"]);
        let live = || s.rank.device().memory().total_now;
        // Quantize launches of x, dy (both orientations) and W; amax launches of x and dy.
        let (pair, weight) = if recipe.emulated() { (4, 2) } else { (2, 1) };
        let amax = u64::from(recipe == CURRENT);
        for step in 0..3u64 {
            state.begin_step(step, 3);
            seen();
            let first = run(&linear, &s, &s.pass(), &x, &dy);
            assert_eq!(seen(), [pair + weight, 3 * amax], "{recipe:?}");
            for _ in 0..2 {
                let again = run(&linear, &s, &s.pass(), &x, &dy);
                // NVFP4 gradients use stochastic rounding, with new random bits each time.
                assert!(recipe == NVFP4 && again.0 == first.0 || again == first);
                assert_eq!(seen(), [pair, 2 * amax], "{recipe:?}");
            }
            state.weights_changed();
        }
        // With one micro-batch each orientation is quantized on demand and only the amax is cached.
        let before = live();
        for step in 0..2u64 {
            state.begin_step(step, 1);
            run(&linear, &s, &s.pass(), &x, &dy);
            assert_eq!(seen(), [pair + 2, 3 * amax], "{recipe:?}");
            assert!(live() - before <= 512, "{recipe:?}: {} bytes stay", live() - before);
            state.weights_changed();
        }
        // Evaluation leaves no cached weights, so that no invalidation is needed when weights change.
        let evaluate = || linear.forward(&StepContext { train: false, ..s.pass() }, &x).unwrap().0;
        let one = if recipe.emulated() { [2, 0] } else { [2, 2 * amax] };
        for micro_batches in [1, 2] {
            state.begin_step(9, micro_batches);
            seen();
            for _ in 0..2 {
                evaluate();
                assert_eq!(seen(), one, "{recipe:?}");
            }
        }
        run(&linear, &s, &s.pass(), &x, &dy);
        assert_eq!(seen(), [pair + weight, 3 * amax], "{recipe:?}");
        // Unless the passes are declared to belong to one evaluation.
        state.begin_evaluation();
        evaluate();
        assert_eq!(seen(), one, "{recipe:?}");
        evaluate();
        assert_eq!(seen(), [1, amax], "{recipe:?}");
        state.begin_step(10, 2);
        evaluate();
        assert_eq!(seen(), one, "{recipe:?}");
    }
}

/// Changed weights are quantized again.
#[test]
fn changed_weights_are_seen() {
    let map = Map::new(16, 32, &[16], false);
    for recipe in [CURRENT, BLOCK, NVFP4] {
        let go = |weights: &[f64]| {
            let (linear, s) = map.build(Some(recipe), &[]);
            let state = s.state.quant().unwrap();
            let [(x, _), (dy, _)] = map.operands(&s, 1.0);
            let mut last = None;
            for factor in weights {
                let w: Vec<f64> = s.weights[0].iter().rev().map(|w| w * factor).collect();
                write(&s.rank, &s.params.values()[0], &w);
                state.weights_changed();
                state.begin_step(0, 2);
                last = Some(run(&linear, &s, &s.pass(), &x, &dy));
            }
            last.unwrap()
        };
        assert!(go(&[1.0, 3.0]) == go(&[3.0]), "{recipe:?}");
    }
}

/// Reference statistics, element by element.
fn expected(recipe: Recipe, role: Role, x: &[f64], shape: [usize; 2], given: Given) -> [f64; 4] {
    let made = quantized(recipe, role, Use::Rows, (x, shape), ONE, given);
    let n = x.len() as f64;
    let most = x.iter().fold(0f64, |m, x| m.max(x.abs()));
    let limit = f64::from(largest(recipe.format(role))) / f64::from(given.scale);
    let vanished = x.iter().zip(&made).filter(|(x, m)| **x != 0.0 && **m == 0.0).count() as f64;
    let saturated = x.iter().filter(|x| given.scale != 0.0 && x.abs() > limit * 1.0001).count() as f64;
    let apart: Vec<f64> = x.iter().zip(&made).map(|(a, b)| a - b).collect();
    let error = if most == 0.0 { 0.0 } else { (dot(&apart, &apart) / dot(x, x)).sqrt() };
    [100.0 * saturated / n, 100.0 * vanished / n, most, error]
}

#[test]
fn statistics_are_those_of_the_operands() {
    let map = Map::new(33, 48, &[24], true);
    let shapes = [[33, 48], [24, 48], [33, 24]];
    for recipe in [recipes(), vec![DELAYED]].concat() {
        let (linear, s) = map.build(Some(recipe), &[]);
        let state = s.state.quant().unwrap();
        let mut operands = map.operands(&s, 900.0);
        // Small beside large values, so that some underflow.
        for (t, x) in &mut operands {
            x.iter_mut().step_by(3).for_each(|x| *x *= 2f64.powi(-30));
            write(&s.rank, t, x);
        }
        let [(x, xs), (dy, dys)] = &operands;
        state.begin_step(0, 1);
        run(&linear, &s, &s.pass(), x, dy);
        assert!(state.take_stats().is_empty(), "nobody asked");
        state.record_stats(true);
        for round in 0..2 {
            state.begin_step(0, 1);
            // Two passes over the same values: rates stay, counts double.
            let passes = 1 + round;
            for _ in 0..passes {
                state.begin_step(0, 1);
                run(&linear, &s, &s.pass(), x, dy);
            }
            let all = state.take_stats();
            assert_eq!(all.iter().map(|a| a.slot.role).collect::<Vec<_>>(), Role::ALL);
            for (i, found) in all.iter().enumerate() {
                let (role, values) = (Role::ALL[i], [&xs[..], &s.weights[0], dys][i]);
                let what = format!("{recipe:?} {role:?}");
                assert_eq!(found.slot.param, id(0));
                let uses = if role == Role::Weight { 2 } else { 1 };
                assert_eq!(found.stats.elements as usize, uses * passes * values.len(), "{what}");
                let delayed = recipe.per_tensor() && recipe == DELAYED;
                let given = Given { scale: if delayed { 1.0 } else { 0.0 }, draw: 1 };
                let want = expected(recipe, role, values, shapes[i], given);
                let ours = [
                    found.stats.saturation(),
                    found.stats.underflow(),
                    f64::from(found.stats.amax),
                    found.stats.relative_error(),
                ];
                // A weight is recorded in both orientations, whose blocks differ.
                let both = role == Role::Weight && !recipe.per_tensor();
                for (o, w) in ours.iter().zip(want).take(if both { 3 } else { 4 }) {
                    assert!(
                        (o - w).abs() <= 1e-6 * w.abs().max(1e-3),
                        "{what}: {ours:?} instead of {want:?}"
                    );
                }
                if recipe == CURRENT {
                    let scale = scale(recipe.format(role), want[2] as f32, false, f32::MAX);
                    assert_eq!(found.stats.scale_inv, (1.0 / scale, 1.0 / scale), "{what}");
                    assert_eq!(found.stats.saturated, 0, "{what}");
                    assert!(role == Role::Weight || found.stats.vanished > 0, "{what}");
                }
                if recipe == DELAYED && role == Role::Input {
                    assert!(found.stats.saturated > 0, "{what}");
                }
            }
        }
        state.record_stats(false);
        run(&linear, &s, &s.pass(), x, dy);
        assert!(state.take_stats().is_empty(), "nobody asks any more");
    }
}

/// amax is all-reduced over tp: scales equal one rank's; each rank reports statistics of its own shard.
#[test]
fn scales_match_one_rank_under_tensor_parallelism() {
    let map = Map::new(8, 16, &[16], false);
    for split in [Split::Rows { unit: 1 }, Split::Columns { unit: 1 }] {
        let run = |world: World| {
            let rank = Rank { tp: world.all(), world, ..Rank::cpu(1, 1).unwrap() };
            let mut d = Declarations::at(rank.place()).with_policy(policy(CURRENT, &[]));
            let linear = map.declare(&mut d, split);
            let params = Params::allocate(&rank, d.finish(), DType::BF16).unwrap();
            let (t, me) = (rank.tp.size(), rank.tp.rank());
            let state = StepState::new(&rank, &params, &[]).unwrap();
            let s = Setup { rank, params, state, weights: Vec::new() };
            // Every rank has other values, the last rank the largest.
            let fill = |n: usize| vec![0.125 * (me + 1) as f64; n];
            write(&s.rank, &s.params.values()[0], &fill(256 / t));
            let (rows, cols) = ([8 / t, 16], [8, 16 / t]);
            let (x, dy) = if split == (Split::Rows { unit: 1 }) { (rows, cols) } else { (cols, rows) };
            s.state.quant().unwrap().record_stats(true);
            let (_, saved) = linear.forward(&s.pass(), &s.upload(&fill(128 / t), &x)).unwrap();
            let (_, work) = linear.backward(&s.pass(), saved, &s.upload(&fill(128 / t), &dy)).unwrap();
            s.gradients(work);
            let all = s.state.quant().unwrap().take_stats();
            let scales: Vec<f64> =
                all.iter().flat_map(|a| [a.stats.scale_inv.0, a.stats.scale_inv.1]).map(f64::from).collect();
            gather(&s.rank, &scales)
        };
        std::thread::scope(|scope| {
            let run = &run;
            let worlds = World::threads(4, Duration::from_secs(60));
            let all: Vec<_> = worlds.into_iter().map(|w| scope.spawn(move || run(w))).collect();
            for found in all {
                for scales in found.join().unwrap() {
                    assert_eq!(scales.len(), 6);
                    let [e4m3, e5m2] = [448f32, 57344.0].map(|most| f64::from(1.0 / (most / 0.5)));
                    assert_eq!(scales, [e4m3, e4m3, e4m3, e4m3, e5m2, e5m2], "{split:?}");
                }
            }
        });
    }
}
