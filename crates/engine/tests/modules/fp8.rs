//! FP8 linear layers: against GEMMs of reference-quantized operands, and against bf16.

use super::fp8_oracle::*;
use super::support::*;
use ferrotron_engine::quant::{Method, Recipe, Role};
use ferrotron_engine::{Declarations, Linear, Split, StepContext};
use ferrotron_kernels::DelayedScaling;
use ferrotron_tensor::{DType, Tensor};

/// Output, input gradient and parameter gradients.
pub type Numbers = (Vec<f64>, Vec<f64>, Vec<Vec<f64>>);

/// Sizes of a linear layer, and whether it has a bias.
#[derive(Clone, Debug)]
pub struct Map {
    pub tokens: usize,
    pub input: usize,
    pub outputs: Vec<usize>,
    pub bias: bool,
}

impl Map {
    pub fn new(tokens: usize, input: usize, outputs: &[usize], bias: bool) -> Map {
        Map { tokens, input, outputs: outputs.to_vec(), bias }
    }

    pub fn out(&self) -> usize {
        self.outputs.iter().sum()
    }

    pub fn declare(&self, d: &mut Declarations, split: Split) -> Linear {
        let named: Vec<_> =
            self.outputs.iter().enumerate().map(|(i, n)| (format!("layers.0.mlp.p{i}"), *n)).collect();
        Linear::declare(d, self.input, &named, self.bias, split, 0.1).unwrap()
    }

    /// With an FP8 recipe (`except` skips GEMMs), or in bf16; the same weights for both.
    pub fn build(&self, recipe: Option<Recipe>, except: &[&str]) -> (Linear, Setup) {
        let mut d = Declarations::default();
        if let Some(recipe) = recipe {
            d = d.with_policy(policy(recipe, except));
        }
        let linear = self.declare(&mut d, Split::Rows { unit: 1 });
        // A standard deviation of 0.023, which the tolerances are made for.
        (linear, Setup::new(d, DType::BF16, 1, 0.04))
    }

    /// Input and output gradient, on the device and as f64. Some values are zero, some rows much larger than others.
    pub fn operands(&self, s: &Setup, size: f64) -> [(Tensor, Vec<f64>); 2] {
        let values = |seed, shape: [usize; 2], size: f64| {
            let row = |i: usize| if i % 5 == 3 { 8.0 } else { 1.0 };
            let x = numbers(seed, shape[0] * shape[1]);
            let x = x
                .iter()
                .enumerate()
                .map(|(i, x)| if i % 17 == 4 { 0.0 } else { x * size * row(i / shape[1]) });
            let x = rounded(DType::BF16, x.collect());
            (s.upload(&x, &shape), x)
        };
        [values(10, [self.tokens, self.input], size), values(20, [self.tokens, self.out()], 0.1 * size)]
    }
}

pub fn run(linear: &Linear, s: &Setup, p: &StepContext, x: &Tensor, dy: &Tensor) -> Numbers {
    let (y, saved) = linear.forward(p, x).unwrap();
    let (dx, work) = linear.backward(p, saved, dy).unwrap();
    (s.host(&y), s.host(&dx), s.gradients(work))
}

/// How x, W and dy are split into parts that are quantized separately, and the number of partial sums of y and dx.
#[derive(Clone, Copy)]
pub struct OperandShards {
    pub operands: [Parts; 3],
    pub sums: [usize; 2],
}

pub const WHOLE: OperandShards = OperandShards { operands: [ONE; 3], sums: [1; 2] };

/// Checks the three GEMMs against the reference.
pub fn check(
    what: &str,
    recipe: Recipe,
    map: &Map,
    ([xs, ws, dys], bias): ([&[f64]; 3], Option<&[f64]>),
    (cut, given): (OperandShards, [Given; 3]),
    ours: &Numbers,
) {
    let (t, k, n) = (map.tokens, map.input, map.out());
    let made = |i: usize, how| {
        let (x, shape) = ([xs, ws, dys][i], [[t, k], [n, k], [t, n]][i]);
        quantized(recipe, Role::ALL[i], how, (x, shape), cut.operands[i], given[i])
    };
    let (mut y, mut room) = product(&made(0, Use::Rows), &made(1, Use::Rows), k, cut.sums[0]);
    if let Some(bias) = bias {
        for ((y, room), b) in y.iter_mut().zip(&mut room).zip(bias.iter().cycle()) {
            // Partial sums are rounded before the bias is added.
            *room += if cut.sums[0] > 1 { 2f64.powi(-8) * y.abs() } else { 0.0 };
            *y += b;
        }
    }
    same(&format!("{what} output"), true, &ours.0, &y, &room);
    let (dx, room) = product(&made(2, Use::Rows), &transposed(&made(1, Use::Cols), k), n, cut.sums[1]);
    same(&format!("{what} input gradient"), true, &ours.1, &dx, &room);
    let (dw, room) = product(&transposed(&made(2, Use::Cols), n), &transposed(&made(0, Use::Cols), k), t, 1);
    same(&format!("{what} weight gradient"), false, &ours.2[0], &dw, &room);
    if bias.is_some() {
        let columns = transposed(dys, n);
        let sums: Vec<f64> = columns.chunks(t).map(|c| c.iter().sum()).collect();
        let room: Vec<f64> =
            columns.chunks(t).map(|c| c.iter().map(|x| x.abs()).sum::<f64>() * 1e-5).collect();
        same(&format!("{what} bias gradient"), false, &ours.2[1], &sums, &room);
    }
    assert_eq!(ours.2.len(), 1 + usize::from(bias.is_some()), "{what}");
}

/// Within the FP8 formats' own rounding error, and elementwise within the tolerances of Transformer Engine's tests.
pub fn near_bf16(what: &str, recipe: Recipe, ours: &Numbers, theirs: &Numbers) {
    let tensors = |n: &Numbers| -> Vec<Vec<f64>> { [vec![n.0.clone(), n.1.clone()], n.2.clone()].concat() };
    for (i, (a, b)) in tensors(ours).iter().zip(&tensors(theirs)).enumerate() {
        let four = recipe.method == Method::Nvfp4;
        let wide = four || (recipe.hybrid && i > 0);
        let (relative, absolute) = if wide { (0.25, 0.125) } else { (0.125, 0.0675) };
        for (a, b) in a.iter().zip(b) {
            let room = relative * b.abs() + absolute;
            assert!((a - b).abs() <= room, "{what} tensor {i}: {a} instead of {b}");
        }
        // At most half a step of the coarser operand's format, overall.
        let most = if four { 0.25 } else { 2f64.powi(if wide { -3 } else { -4 }) };
        let apart: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
        let distance = (dot(&apart, &apart) / dot(b, b).max(1e-12)).sqrt();
        assert!(distance <= most, "{what} tensor {i}: {distance:.3} apart, more than {most}");
    }
}

fn maps() -> Vec<Map> {
    let mut maps = vec![
        Map::new(1, 16, &[32], false),
        Map::new(15, 48, &[24, 8], true),
        Map::new(16, 17, &[9], true),
        Map::new(33, 130, &[48, 16, 16], true),
        Map::new(129, 64, &[40], false),
        Map::new(129, 16, &[145], true),
    ];
    // All token counts with one odd and one even layer.
    for tokens in [1, 15, 16, 33, 129] {
        maps.push(Map::new(tokens, 40, &[3, 4, 2], tokens % 2 == 0));
        maps.push(Map::new(tokens, 32, &[16, 16], true));
    }
    maps
}

#[test]
fn fp8_linears_match_gemms_of_quantized_operands() {
    for recipe in recipes() {
        for map in maps() {
            let what = format!("{recipe:?} {map:?}");
            let (linear, s) = map.build(Some(recipe), &[]);
            let [(x, xs), (dy, dys)] = map.operands(&s, 1.0);
            s.state.quant().unwrap().begin_step(3, 1);
            let ours = run(&linear, &s, &s.pass(), &x, &dy);
            let given = Given { scale: 1.0, draw: (3 << 32) + 1 };
            let all = [&xs[..], &s.weights[0], &dys];
            let bias = map.bias.then(|| &s.weights[1][..]);
            check(&what, recipe, &map, (all, bias), (WHOLE, [given; 3]), &ours);
            // The tolerances hold for values without outliers.
            let gentle = |recipe: Option<Recipe>| {
                let (linear, s) = map.build(recipe, &[]);
                let x = s.input(10, &[map.tokens, map.input]).0;
                let dys: Vec<f64> = numbers(20, map.tokens * map.out()).iter().map(|x| 0.04 * x).collect();
                run(&linear, &s, &s.pass(), &x, &s.upload(&dys, &[map.tokens, map.out()]))
            };
            near_bf16(&what, recipe, &gentle(Some(recipe)), &gentle(None));
        }
    }
}

/// Reference of delayed scaling: the scale follows the largest amax of the history.
#[derive(Clone, Default)]
pub struct Delays {
    pub seen: [Vec<f32>; 3],
}

impl Delays {
    pub fn given(&self, recipe: Recipe) -> [Given; 3] {
        let Method::Delayed { update, history } = recipe.method else { panic!() };
        let scale = |i: usize| {
            let kept = self.seen[i].iter().rev().take(if update.most_recent { 1 } else { history });
            match kept.copied().reduce(f32::max) {
                None => 1.0,
                Some(most) => largest(recipe.format(Role::ALL[i])) * 2f32.powi(-update.margin) / most,
            }
        };
        [0, 1, 2].map(|i| Given { scale: scale(i), draw: 0 })
    }

    pub fn end_step(&mut self, operands: [&[f64]; 3]) {
        for (seen, x) in self.seen.iter_mut().zip(operands) {
            let most = x.iter().fold(0.0f64, |m, x| m.max(x.abs())) as f32;
            seen.extend((most != 0.0).then_some(most));
        }
    }
}

#[test]
fn delayed_scales_come_from_earlier_steps() {
    for (update, history, hybrid) in [
        (DelayedScaling { margin: 0, most_recent: false }, 3, true),
        (DelayedScaling { margin: 2, most_recent: false }, 1, false),
        (DelayedScaling { margin: 1, most_recent: true }, 4, true),
    ] {
        let recipe = Recipe { method: Method::Delayed { update, history }, hybrid, pow2: false };
        for map in [Map::new(33, 48, &[24, 8], true), Map::new(15, 17, &[9], false)] {
            let (linear, s) = map.build(Some(recipe), &[]);
            let state = s.state.quant().unwrap();
            let mut delays = Delays::default();
            // Growing beyond the previous scale, shrinking until the largest amax leaves the history, all zeros.
            for (step, size) in
                [300.0, 2000.0, 9000.0, 1.0, 0.5, 0.25, 0.0, 0.01, 4.0].into_iter().enumerate()
            {
                let what = format!("{recipe:?} {map:?} step {step}");
                let [(x, xs), (dy, dys)] = map.operands(&s, size);
                state.begin_step(step as u64, 1 + step % 2);
                let given = delays.given(recipe);
                // Evaluation does not enter the amax history.
                let (huge, _) = s.input(99, &[2, map.input]);
                linear.forward(&StepContext { train: false, ..s.pass() }, &huge).unwrap();
                for _ in 0..=step % 2 {
                    let ours = run(&linear, &s, &s.pass(), &x, &dy);
                    let all = [&xs[..], &s.weights[0], &dys];
                    let bias = map.bias.then(|| &s.weights[1][..]);
                    check(&what, recipe, &map, (all, bias), (WHOLE, given), &ours);
                }
                state.end_step(&s.rank).unwrap();
                state.weights_changed();
                delays.end_step([&xs, &s.weights[0], &dys]);
                let scales = s.host(&state.delayed().unwrap().scale);
                let want = delays.given(recipe).map(|g| f64::from(g.scale));
                assert_eq!(scales, want, "{what}");
            }
        }
    }
}

/// A skipped GEMM is bit-equal to bf16, and the others to a layer without skips.
#[test]
fn skipped_gemms_match_bf16() {
    let mut recipes = recipes();
    recipes.push(DELAYED);
    for recipe in recipes {
        for map in [Map::new(33, 48, &[24, 8], true), Map::new(16, 32, &[16], false)] {
            let (plain, s) = map.build(None, &[]);
            let [(x, _), (dy, _)] = map.operands(&s, 1.0);
            let high = run(&plain, &s, &s.pass(), &x, &dy);
            let go = |except: &[&str]| {
                let (linear, s) = map.build(Some(recipe), except);
                s.state.quant().unwrap().begin_step(0, 1);
                let [(x, _), (dy, _)] = map.operands(&s, 1.0);
                run(&linear, &s, &s.pass(), &x, &dy)
            };
            let low = go(&[]);
            assert!(low.0 != high.0 && low.1 != high.1 && low.2[0] != high.2[0]);
            let names = ["mlp:output", "mlp:input_grad", "mlp:weight_grad"];
            for off in 1..7usize {
                let except: Vec<&str> = (0..3).filter(|i| off >> i & 1 == 1).map(|i| names[i]).collect();
                let what = format!("{recipe:?} {map:?} without {except:?}");
                let ours = go(&except);
                let from = |i: usize| if off >> i & 1 == 1 { &high } else { &low };
                assert_eq!(ours.0, from(0).0, "{what}: output");
                assert_eq!(ours.1, from(1).1, "{what}: input gradient");
                assert_eq!(ours.2[0], from(2).2[0], "{what}: weight gradient");
                assert_eq!(ours.2.get(1), high.2.get(1), "{what}: bias gradient");
            }
        }
    }
}

#[test]
fn models_of_other_types_are_refused() {
    let map = Map::new(4, 16, &[16], false);
    let mut d = Declarations::default().with_policy(policy(CURRENT, &[]));
    map.declare(&mut d, Split::Rows { unit: 1 });
    let rank = ferrotron_engine::Rank::cpu(1, 1).unwrap();
    let refused = ferrotron_engine::Params::allocate(&rank, d.finish(), DType::F32).err().unwrap();
    assert!(refused.to_string().contains("bf16"), "{refused}");
}
