//! Optimizer steps, gradient norms, and storage of moments and masters.

use super::{column, z};
use crate::devices::*;
use ferrotron_kernels::*;
use ferrotron_tensor::DType::{BF16, F32, I32};
use ferrotron_tensor::{Category, DType};

#[test]
fn optimizers() {
    for h in devices() {
        let f = |n: usize| z(&h, F32, &[n]);
        let scalars_t = f(scalars::COUNT);
        let adam = Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled: true };
        let sgd = Sgd { momentum: 0.9, dampening: 0.0, nesterov: false };
        let (p, g, m, v) = (f(4), f(4), f(4), f(4));
        let base = || ParamUpdate {
            master: &p,
            weight: None,
            grad: &g,
            first: (&m).into(),
            second: Some((&v).into()),
            lr_mult: 1.0,
            wd_mult: 1.0,
            fp8: None,
        };
        let go = |what: &str, u: ParamUpdate| {
            let one = [u];
            refused(&h, what, h.k.adam(&h.s, adam, &scalars_t, &one));
            let [mut u] = one;
            u.second = None;
            if !what.contains("second") {
                let one = [u];
                refused(&h, what, h.k.sgd(&h.s, sgd, &scalars_t, &one));
                refused(&h, what, h.k.lion(&h.s, Lion { beta1: 0.9, beta2: 0.9 }, &scalars_t, &one));
            }
        };
        go("a short gradient", ParamUpdate { grad: &f(3), ..base() });
        go("a short copy", ParamUpdate { weight: Some(&z(&h, BF16, &[3])), ..base() });
        go("a wide copy", ParamUpdate { weight: Some(&f(4)), ..base() });
        go("a short moment", ParamUpdate { first: (&f(3)).into(), ..base() });
        go("a short second moment", ParamUpdate { second: Some((&f(3)).into()), ..base() });
        go("no second moment", ParamUpdate { second: None, ..base() });
        go(
            "a second moment of another type",
            ParamUpdate { second: Some((&z(&h, BF16, &[4])).into()), ..base() },
        );
        go("a 16-bit master", ParamUpdate { master: &z(&h, BF16, &[4]), ..base() });
        go("a 16-bit gradient", ParamUpdate { grad: &z(&h, BF16, &[4]), ..base() });
        go("integer moments", ParamUpdate { first: (&z(&h, I32, &[4])).into(), ..base() });
        let (codes, scale) = (z(&h, DType::U8, &[4]), z(&h, DType::U8, &[1]));
        let coded = |scales| Moment { values: &codes, scales };
        let (two, wide) = (z(&h, DType::U8, &[2]), f(1));
        go("codes without scales", ParamUpdate { first: coded(None), second: Some(coded(None)), ..base() });
        for (what, scales) in [("too many scales", &two), ("wide scales", &wide)] {
            go(what, ParamUpdate { first: coded(Some(scales)), second: Some(coded(Some(scales))), ..base() });
        }
        let (amax, e4m3, e5m2) = (f(1), z(&h, DType::E4M3, &[4]), z(&h, DType::E5M2, &[4]));
        let few = z(&h, DType::E4M3, &[3]);
        let taken = |amax, data, scale, scale_inv| {
            Some(Fp8WeightOut { amax, data: Some(Fp8DataOut { data, scale, scale_inv }) })
        };
        for (what, fp8) in [
            ("many magnitudes", taken(&p, &e4m3, &wide, &wide)),
            ("bytes of another format", taken(&amax, &e5m2, &wide, &wide)),
            ("too few bytes", taken(&amax, &few, &wide, &wide)),
            ("many scales", taken(&amax, &e4m3, &p, &wide)),
            ("many inverse scales", taken(&amax, &e4m3, &wide, &p)),
        ] {
            go(what, ParamUpdate { fp8, ..base() });
        }
        let with_amax =
            ParamUpdate { second: None, fp8: Some(Fp8WeightOut { amax: &amax, data: None }), ..base() };
        refused(&h, "SGD with amax", h.k.sgd(&h.s, sgd, &scalars_t, &[with_amax]));
        let (low, high) = (z(&h, DType::I16, &[4]), z(&h, BF16, &[4]));
        let halves = ParamUpdate {
            master: &low,
            weight: Some(&high),
            fp8: taken(&amax, &e4m3, &wide, &amax),
            ..base()
        };
        refused(&h, "bytes of halves", h.k.adam(&h.s, adam, &scalars_t, &[halves]));
        go("scales of f32", ParamUpdate { first: Moment { values: &m, scales: Some(&scale) }, ..base() });
        go("half a master", ParamUpdate { master: &z(&h, DType::I16, &[4]), ..base() });
        refused(&h, "codes without scales", h.k.pack_moment(&h.s, MomentOrder::First, &g, coded(None)));
        refused(
            &h,
            "16-bit values",
            h.k.unpack_moment(&h.s, MomentOrder::First, coded(Some(&scale)), &codes),
        );
        refused(&h, "short values", h.k.unpack_moment(&h.s, MomentOrder::First, coded(Some(&scale)), &f(3)));
        let (high, low) = (z(&h, BF16, &[4]), z(&h, DType::I16, &[4]));
        refused(&h, "a short half", h.k.split_master(&h.s, &p, &high, &z(&h, DType::I16, &[3])));
        refused(&h, "halves changed", h.k.join_master(&h.s, &low, &high, &p));
        refused(&h, "an f32 counter", h.k.advance_step(&h.s, [0.9, 0.9], &f(counter::COUNT), &scalars_t));
        go("a strided master", ParamUpdate { master: &column(&h, F32, 4), ..base() });
        go("a moment over the master", ParamUpdate { first: (&p).into(), ..base() });
        for wrong in [0, 1, scalars::COUNT - 1, scalars::COUNT + 1] {
            refused(&h, "a scalar buffer of another size", h.k.adam(&h.s, adam, &f(wrong), &[base()]));
            refused(&h, "a scalar buffer of another size", h.k.sgd(&h.s, sgd, &f(wrong), &[base()]));
            refused(&h, "a scalar buffer of another size", h.k.clip_factor(&h.s, &[&g], None, &f(wrong)));
        }
        refused(&h, "16-bit scalars", h.k.adam(&h.s, adam, &z(&h, BF16, &[scalars::COUNT]), &[base()]));
        refused(&h, "16-bit scalars", h.k.clip_factor(&h.s, &[&g], None, &z(&h, BF16, &[scalars::COUNT])));
        refused(&h, "strided scalars", h.k.clip_factor(&h.s, &[&g], None, &column(&h, F32, scalars::COUNT)));
        refused(&h, "strided scalars", h.k.adam(&h.s, adam, &column(&h, F32, scalars::COUNT), &[base()]));
        refused(&h, "a 16-bit gradient", h.k.clip_factor(&h.s, &[&z(&h, BF16, &[4])], None, &scalars_t));
        refused(&h, "a strided gradient", h.k.clip_factor(&h.s, &[&column(&h, F32, 4)], None, &scalars_t));
        let two = h.s.zeros(&[2], DType::F64, Category::Workspace).unwrap();
        let square = two.narrow(0, 0, 1).unwrap();
        refused(&h, "two sums of squares", h.k.grad_square_sum(&h.s, &[&g], &two));
        refused(&h, "an f32 sum of squares", h.k.grad_square_sum(&h.s, &[&g], &f(1)));
        refused(&h, "a 16-bit gradient", h.k.grad_square_sum(&h.s, &[&z(&h, BF16, &[4])], &square));
        refused(&h, "an f32 count of zeros", h.k.count_zeros(&h.s, &[&g], &f(1)));
        refused(&h, "a 16-bit gradient", h.k.count_zeros(&h.s, &[&z(&h, BF16, &[4])], &square));
        refused(&h, "an f32 sum of squares", h.k.clip_factor_from_square_sum(&h.s, &f(1), None, &scalars_t));
        refused(
            &h,
            "a scalar buffer of another size",
            h.k.clip_factor_from_square_sum(&h.s, &square, None, &f(3)),
        );
        // One invalid parameter rejects the whole list before any parameter is updated.
        let bad = f(3);
        let list: Vec<ParamUpdate> =
            (0..2).map(|i| if i == 0 { base() } else { ParamUpdate { grad: &bad, ..base() } }).collect();
        refused(&h, "one bad among good", h.k.adam(&h.s, adam, &scalars_t, &list));
    }
}

#[test]
fn muon() {
    for h in devices() {
        let f = |shape: &[usize]| z(&h, F32, shape);
        let (scalars_t, square) =
            (f(&[scalars::COUNT]), h.s.zeros(&[1], DType::F64, Category::Workspace).unwrap());
        let (m, a) =
            (MuonMomentum { momentum: 0.9, nesterov: true }, AdaptiveScale { beta2: 0.9, eps: 1e-8 });
        let (g, b, u, short, narrow) = (f(&[6]), f(&[6]), f(&[6]), f(&[5]), z(&h, BF16, &[6]));
        let base = || MomentumUpdate { grad: &g, momentum: &b, l2: None, wd_mult: 1.0, update: &u };
        for (what, one) in [
            ("a short gradient", MomentumUpdate { grad: &short, ..base() }),
            ("a 16-bit update", MomentumUpdate { update: &narrow, ..base() }),
            ("an integer momentum", MomentumUpdate { momentum: &z(&h, I32, &[6]), ..base() }),
            ("a 16-bit weight", MomentumUpdate { l2: Some(&narrow), ..base() }),
        ] {
            refused(&h, what, h.k.muon_momentum(&h.s, m, &scalars_t, &[one]));
        }
        refused(&h, "short scalars", h.k.muon_momentum(&h.s, m, &short, &[base()]));
        let base = || ApplyUpdate { master: &g, weight: None, update: &u, lr_mult: 1.0, wd_mult: 1.0 };
        for (what, one) in [
            ("a short update", ApplyUpdate { update: &short, ..base() }),
            ("an f32 copy", ApplyUpdate { weight: Some(&b), ..base() }),
            ("half a master", ApplyUpdate { master: &z(&h, DType::I16, &[6]), ..base() }),
        ] {
            refused(&h, what, h.k.apply_update(&h.s, WeightDecay::L2, &scalars_t, &[one]));
        }
        refused(&h, "an f32 square", h.k.normalize(&h.s, &g, &short, 1e-15, &b));
        refused(&h, "a short result", h.k.normalize(&h.s, &g, &square, 1e-15, &short));
        refused(&h, "a short operand", h.k.combine(&h.s, [1.0, 2.0], &g, &short));
        refused(&h, "a vector", h.k.mirror(&h.s, &g, 0));
        refused(&h, "matrices that are not square", h.k.mirror(&h.s, &f(&[2, 3, 4]), 1));
        refused(&h, "a boundary beyond the last row", h.k.mirror(&h.s, &f(&[2, 3, 3]), 4));
        let (stack, two) = (f(&[2, 3, 3]), f(&[3, 3, 3]));
        let unequal = BatchedGemm { a: &stack, trans_a: false, b: &two, trans_b: false, c: &stack };
        refused(&h, "stacks of different numbers of matrices", h.k.gemm_batched(&h.s, &unequal));
        refused(&h, "a short moment", h.k.adamuon(&h.s, a, &scalars_t, &g, &short));
        refused(&h, "moments of the shorter side", h.k.normuon(&h.s, a, &scalars_t, &f(&[2, 3]), &f(&[2])));
        let ns = NewtonSchulz { coefficients: &[], bf16: false, gram: GramSide::Rows, sum: None };
        refused(&h, "a vector", newton_schulz(&*h.k, &h.s, &ns, &g));
        let xs = [&f(&[2, 3]), &f(&[3, 2])];
        refused(&h, "matrices of two shapes", newton_schulz_batched(&*h.k, &h.s, &ns, &xs));
    }
}
