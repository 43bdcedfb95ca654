//! Module contracts: saved activations can be moved and hold no parameter, weight gradients can be deferred, gradient
//! accumulation needs no zeroing, recomputation is bit-equal.

use super::attention::cases;
use super::support::*;
use ferrotron_engine::{
    Declarations, GradBuffer, Linear, Mlp, MlpConfig, NormLayer, Saved, Split, WeightGrad,
};
use ferrotron_kernels::{Act, Norm};
use ferrotron_tensor::DType;

/// A small network of every module with saved state: norm, attention, residual + norm, MLP.
struct Net {
    case: super::attention::Case,
    attention: ferrotron_engine::attention::Attention,
    s: Setup,
    norm: NormLayer,
    mlp: Mlp,
    rest: Setup,
}

const HIDDEN: usize = 6;

impl Net {
    fn new(case: super::attention::Case, dtype: DType) -> Net {
        let (attention, s) = case.build(dtype);
        let mut d = Declarations::default();
        let norm = Norm { subtract_mean: true, eps: 1e-5, zero_centred: false };
        let norm = NormLayer::declare(&mut d, "norm", HIDDEN, norm).unwrap();
        let mlp = Mlp::declare(
            &mut d,
            "mlp",
            MlpConfig { hidden: HIDDEN, ffn: 8, act: Act::Silu, gated: true, bias: true, std: (0.1, 0.1) },
        )
        .unwrap();
        let rest = Setup::on(s.rank.clone(), d, dtype, 40, 0.8);
        Net { case, attention, s, norm, mlp, rest }
    }

    /// Input gradient and deferred weight gradients; `between` visits all saved activations before backward.
    fn run(&self, seed: u64, between: &dyn Fn(&mut dyn Saved)) -> (Vec<f64>, WeightGrad, WeightGrad) {
        let tokens = self.case.tokens();
        let (x, _) = self.s.input(seed, &[tokens, HIDDEN]);
        let (dy, _) = self.s.input(seed + 1, &[tokens, HIDDEN]);
        let positions = self.s.integers(&self.case.positions());
        let (p, q) = (self.s.pass(), self.rest.pass());
        let (a, mut saved) = self.attention.forward(&p, &x, &self.case.layout, &positions).unwrap();
        let (normed, _, mut norm_saved) = self.norm.add_forward(&q, &a, &x, false).unwrap();
        let (_, mut mlp_saved) = self.mlp.forward(&q, &normed).unwrap();
        drop(normed);
        between(&mut mlp_saved);
        between(&mut norm_saved);
        between(&mut saved);
        let (dn, mut work) = self.mlp.backward(&q, mlp_saved, &dy).unwrap();
        let (dr, more) = self.norm.backward(&q, norm_saved, &dn, None).unwrap();
        work = work.and(more);
        let (dx, first) = self.attention.backward(&p, saved, &self.case.layout, &positions, &dr).unwrap();
        (self.s.host(&dx), first, work)
    }
}

#[test]
fn saved_activations_can_be_moved() {
    for dtype in DTYPES {
        for case in cases() {
            let what = format!("{case:?} {dtype}");
            let net = Net::new(case, dtype);
            let stay = |_: &mut dyn Saved| {};
            let (dx, first, work) = net.run(50, &stay);
            let kept = (dx, net.s.gradients(first), net.rest.gradients(work));
            let moves = |saved: &mut dyn Saved| {
                assert!(move_saved(&net.s.rank, &net.s.params, saved) >= 2);
                move_saved(&net.rest.rank, &net.rest.params, saved);
            };
            let (dx, first, work) = net.run(50, &moves);
            assert!(kept == (dx, net.s.gradients(first), net.rest.gradients(work)), "{what}");
        }
    }
}

#[test]
fn weight_gradients_can_be_deferred() {
    for dtype in DTYPES {
        let net = Net::new(cases().pop().unwrap(), dtype);
        let stay = |_: &mut dyn Saved| {};
        let seeds = [60, 70, 80];
        let ready = |s: &Setup, b: &GradBuffer| {
            (0..s.params.specs().len()).map(|i| b.is_ready(id(i))).collect::<Vec<_>>()
        };
        let mut now = (net.s.buffer(), net.rest.buffer());
        for seed in seeds {
            let (_, first, work) = net.run(seed, &stay);
            first.run(&net.s.rank, &mut now.0).unwrap();
            work.run(&net.rest.rank, &mut now.1).unwrap();
        }
        // All dgrads first, then all wgrads.
        let mut late = (net.s.buffer(), net.rest.buffer());
        let waiting: Vec<_> = seeds.iter().map(|seed| net.run(*seed, &stay)).collect();
        assert!(ready(&net.s, &late.0).iter().chain(&ready(&net.rest, &late.1)).all(|r| !r));
        assert!(late.0.get(id(0)).is_err(), "a gradient exists before anything made it");
        late.0.begin_step(seeds.len());
        late.1.begin_step(seeds.len());
        for (i, (_, first, work)) in waiting.into_iter().enumerate() {
            let last = i + 1 == seeds.len();
            assert!(ready(&net.s, &late.0).iter().all(|r| !r));
            first.run(&net.s.rank, &mut late.0).unwrap();
            assert!(ready(&net.s, &late.0).iter().all(|r| *r == last));
            assert!(ready(&net.rest, &late.1).iter().all(|r| !r));
            work.run(&net.rest.rank, &mut late.1).unwrap();
            assert!(ready(&net.rest, &late.1).iter().all(|r| *r == last));
        }
        assert!(net.s.all(&mut now.0) == net.s.all(&mut late.0), "{dtype}");
        assert!(net.rest.all(&mut now.1) == net.rest.all(&mut late.1), "{dtype}");
    }
}

/// Two micro-batches accumulate, a new step starts over, and prior buffer contents never matter.
#[test]
fn gradients_accumulate_without_zeroing() {
    for dtype in DTYPES {
        let net = Net::new(cases().pop().unwrap(), dtype);
        let stay = |_: &mut dyn Saved| {};
        let one = |seed: u64| {
            let (_, first, work) = net.run(seed, &stay);
            [net.s.gradients(first), net.rest.gradients(work)].concat()
        };
        let (a, b) = (one(90), one(100));
        let mut buffers = (net.s.buffer(), net.rest.buffer());
        for round in 0..2 {
            buffers.0.begin_step(2);
            buffers.1.begin_step(2);
            for seed in [90, 100] {
                let (_, first, work) = net.run(seed, &stay);
                first.run(&net.s.rank, &mut buffers.0).unwrap();
                work.run(&net.rest.rank, &mut buffers.1).unwrap();
            }
            let both = [net.s.all(&mut buffers.0), net.rest.all(&mut buffers.1)].concat();
            for (i, (sum, (a, b))) in both.iter().zip(a.iter().zip(&b)).enumerate() {
                let want: Vec<f64> = a.iter().zip(b).map(|(a, b)| a + b).collect();
                close(&format!("{dtype} round {round} gradient {i}"), DType::F32, sum, &want);
            }
            // The second step begins with garbage in every gradient.
            for (s, buffer) in [(&net.s, &buffers.0), (&net.rest, &buffers.1)] {
                for i in 0..s.params.specs().len() {
                    let g = buffer.get(id(i)).unwrap();
                    write(&s.rank, &g, &vec![f64::NAN; g.numel()]);
                }
            }
        }
        // A parameter without a gradient in a step gets zeros, not old contents.
        buffers.0.begin_step(2);
        for g in net.s.all(&mut buffers.0) {
            assert!(g.iter().all(|x| *x == 0.0));
        }
    }
}

/// A precomputed gradient, a GEMM and a column sum: the first write of a step overwrites, later ones accumulate.
#[test]
fn one_parameter_used_many_times_in_a_step() {
    let mut d = Declarations::default();
    let linear = Linear::declare(&mut d, 3, &[("a".into(), 4)], true, Split::Rows { unit: 1 }, 0.1).unwrap();
    let s = Setup::new(d, DType::F32, 41, 1.0);
    let mut buffer = s.buffer();
    let mut sum = vec![vec![0.0; 12], vec![0.0; 4]];
    for seed in 0..5 {
        let ((x, _), (dy, _)) = (s.input(seed, &[2, 3]), s.input(seed + 9, &[2, 4]));
        let saved = linear.forward(&s.pass(), &x).unwrap().1;
        let work = || linear.backward(&s.pass(), linear.forward(&s.pass(), &x).unwrap().1, &dy).unwrap().1;
        for (sum, g) in sum.iter_mut().zip(s.gradients(work())) {
            sum.iter_mut().zip(g).for_each(|(s, g)| *s += g);
        }
        drop(saved);
        work().run(&s.rank, &mut buffer).unwrap();
    }
    for (ours, theirs) in s.all(&mut buffer).iter().zip(&sum) {
        close("five uses", DType::F32, ours, theirs);
    }
}

#[test]
fn activation_memory_is_freed() {
    let net = Net::new(cases().pop().unwrap(), DType::F32);
    let live = |n: &Net| n.s.rank.device().memory().total_now + n.rest.rank.device().memory().total_now;
    let before = live(&net);
    let (_, first, work) = net.run(110, &|_| {});
    assert!(live(&net) > before, "work owns its operands");
    drop((first, work));
    assert_eq!(live(&net), before);
}
