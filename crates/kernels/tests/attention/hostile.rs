//! NaN, infinities, extreme logits, empty sequences and invalid arguments.

use crate::launch::{Layout, launch, lse_strides};
use crate::oracle::{Answer, Dense, Inputs};
use crate::sweep::{Case, Random};
use ferrotron_kernels::cpu::attention::{
    AttentionGradients, AttentionInputs, AttentionOutputs, AttentionShape, Heads, HeadsMut, MaskAlign, Span,
    backward, forward,
};
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_tensor::{Float, Threads, bf16};

fn plain(r: &mut Random, tokens: usize, causal: bool) -> Case {
    let mut shape = AttentionShape {
        heads: 2,
        kv_heads: 1,
        d_qk: 16,
        d_v: 16,
        scale: 0.25,
        softcap: None,
        causal,
        align: MaskAlign::BottomRight,
        window: (None, None),
        fp8: false,
        lse_head: 0,
        lse_token: 0,
    };
    lse_strides(&mut shape);
    Case {
        layout: Layout::Bshd,
        spans: vec![Span { batch: 0, q_start: 0, q_len: tokens, k_start: 0, k_len: tokens, lse_base: 0 }],
        q: r.dense([1, tokens, 2, 16]),
        k: r.dense([1, tokens, 1, 16]),
        v: r.dense([1, tokens, 1, 16]),
        dout: r.dense([1, tokens, 2, 16]),
        sink: None,
        shape,
    }
}

fn run<T: Float>(case: &Case, isa: Isa) -> Answer {
    launch::<T>(&Threads::new(1).unwrap(), isa, case.layout, &case.inputs())
}

fn both(case: &Case, check: impl Fn(&str, Answer)) {
    for isa in Isa::all() {
        check(&format!("{isa:?} f32"), run::<f32>(case, isa));
        check(&format!("{isa:?} bf16"), run::<bf16>(case, isa));
    }
}

#[test]
fn huge_logits_give_a_one_hot_softmax() {
    let mut r = Random(1);
    let mut case = plain(&mut r, 80, false);
    // Query i is a huge multiple of key i, and all keys are different patterns of ±1.
    let pattern = |i: usize, c: usize| if (i >> (c % 8)) & 1 == 1 { 1.0 } else { -1.0 };
    for i in 0..80 {
        for c in 0..16 {
            for h in 0..2 {
                case.q.row_mut(0, i, h)[c] = 1e4 * pattern(i, c);
            }
            case.k.row_mut(0, i, 0)[c] = pattern(i, c);
        }
    }
    let v = case.rounded::<bf16>().v;
    case.v = v;
    both(&case, |what, a| {
        for i in 0..80 {
            for h in 0..2 {
                assert_eq!(a.out.row(0, i, h), case.v.row(0, i, 0), "{what} query {i}");
            }
        }
        assert!(a.dq.data.iter().chain(&a.dk.data).chain(&a.dv.data).all(|x| x.is_finite()), "{what}");
    });
}

#[test]
fn zero_scores_average_the_values() {
    let mut r = Random(2);
    let mut case = plain(&mut r, 70, true);
    case.q.data.fill(0.0);
    case.k.data.fill(0.0);
    case.v.data.fill(1.0);
    both(&case, |what, a| {
        for i in 0..70 {
            assert!((a.lse.row(0, i, 1)[0] - ((i + 1) as f64).ln()).abs() < 1e-5, "{what}");
            assert!(a.out.row(0, i, 0).iter().all(|x| (x - 1.0).abs() < 8e-3), "{what}");
        }
        assert!(a.dq.data.iter().all(|x| *x == 0.0), "{what}");
    });
}

#[test]
fn a_nan_query_changes_only_its_own_row() {
    let mut r = Random(3);
    let clean = plain(&mut r, 100, true);
    let mut case = clean.clone();
    case.q.row_mut(0, 37, 1)[3] = f64::NAN;
    for isa in Isa::all() {
        let (was, now) = (run::<f32>(&clean, isa), run::<f32>(&case, isa));
        for (i, h) in (0..100).flat_map(|i| [(i, 0), (i, 1)]) {
            if (i, h) == (37, 1) {
                assert!(now.out.row(0, i, h).iter().all(|x| x.is_nan()));
                assert!(now.lse.row(0, i, h)[0].is_nan());
            } else {
                assert_eq!(was.out.row(0, i, h), now.out.row(0, i, h), "{isa:?} {i} {h}");
                assert_eq!(was.lse.row(0, i, h), now.lse.row(0, i, h));
                assert_eq!(was.dq.row(0, i, h), now.dq.row(0, i, h));
            }
        }
    }
}

#[test]
fn a_nan_key_reaches_only_queries_that_attend_to_it() {
    let mut r = Random(4);
    let clean = plain(&mut r, 100, true);
    let mut case = clean.clone();
    case.k.row_mut(0, 70, 0)[0] = f64::NAN;
    for isa in Isa::all() {
        let (was, now) = (run::<bf16>(&clean, isa), run::<bf16>(&case, isa));
        for (i, h) in (0..100).flat_map(|i| [(i, 0), (i, 1)]) {
            if i >= 70 {
                assert!(now.out.row(0, i, h).iter().all(|x| x.is_nan()));
            } else {
                assert_eq!(was.out.row(0, i, h), now.out.row(0, i, h), "{isa:?} {i} {h}");
            }
        }
    }
}

#[test]
fn nan_does_not_cross_sequence_boundaries() {
    let mut r = Random(5);
    let mut clean = plain(&mut r, 90, true);
    let span = |q_start, q_len| Span {
        q_start,
        q_len,
        k_start: q_start,
        k_len: q_len,
        lse_base: q_start * 2,
        batch: 0,
    };
    clean.spans = vec![span(0, 31), span(31, 33), span(64, 26)];
    let mut case = clean.clone();
    for t in 31..64 {
        for x in [&mut case.k, &mut case.v] {
            x.row_mut(0, t, 0).fill(f64::NAN);
        }
    }
    for isa in Isa::all() {
        let (was, now) = (run::<bf16>(&clean, isa), run::<bf16>(&case, isa));
        for t in (0..31).chain(64..90) {
            for (a, b) in [(&was.out, &now.out), (&was.dq, &now.dq)] {
                assert_eq!((a.row(0, t, 0), a.row(0, t, 1)), (b.row(0, t, 0), b.row(0, t, 1)), "{isa:?} {t}");
            }
            for (a, b) in [(&was.dk, &now.dk), (&was.dv, &now.dv)] {
                assert_eq!(a.row(0, t, 0), b.row(0, t, 0), "{isa:?} {t}");
            }
        }
    }
}

#[test]
fn queries_without_keys_have_zero_output_and_gradient() {
    let mut r = Random(6);
    for sink in [None, Some(vec![0.7, -3.0])] {
        let mut case = plain(&mut r, 100, true);
        // 20 keys, bottom right: the first 80 queries see none.
        case.spans[0].k_len = 20;
        case.k = r.dense([1, 20, 1, 16]);
        case.v = r.dense([1, 20, 1, 16]);
        case.sink = sink.clone();
        both(&case, |what, a| {
            for (i, h) in (0..80).flat_map(|i| [(i, 0), (i, 1)]) {
                assert!(a.out.row(0, i, h).iter().chain(a.dq.row(0, i, h)).all(|x| *x == 0.0), "{what} {i}");
                let lse = sink.as_ref().map_or(f64::NEG_INFINITY, |s| f64::from(s[h] as f32));
                assert_eq!(a.lse.row(0, i, h)[0], lse, "{what} {i}");
            }
            assert!(a.out.row(0, 80, 0).iter().any(|x| *x != 0.0));
            let grads = [&a.dk.data, &a.dv.data, &a.dsink];
            assert!(grads.iter().all(|g| g.iter().all(|x| x.is_finite())), "{what}");
        });
    }
}

#[test]
fn minus_infinity_scores_equal_a_mask() {
    let mut r = Random(8);
    let mut case = plain(&mut r, 40, false);
    // q·k overflows to -inf for every key but the first two.
    case.q.data.fill(3e38);
    for t in 0..40 {
        case.k.row_mut(0, t, 0).fill(if t < 2 { 0.0 } else { -3e38 });
    }
    for isa in Isa::all() {
        let a = run::<f32>(&case, isa);
        let mean: Vec<f64> =
            (0..16).map(|c| (case.v.row(0, 0, 0)[c] + case.v.row(0, 1, 0)[c]) / 2.0).collect();
        for i in 0..40 {
            for (got, want) in a.out.row(0, i, 0).iter().zip(&mean) {
                assert!((got - want).abs() < 1e-6, "{isa:?} {got} {want}");
            }
        }
        assert!(a.dv.data.iter().all(|x| x.is_finite()));
        // All scores -inf: output and gradients are zero.
        let mut all = case.clone();
        all.k.data.fill(-3e38);
        let a = run::<f32>(&all, isa);
        assert!(a.out.data.iter().chain(&a.dv.data).all(|x| *x == 0.0), "{isa:?}");
        assert!(a.lse.data.iter().all(|x| *x == f64::NEG_INFINITY), "{isa:?}");
    }
}

#[test]
fn invalid_arguments_are_errors() {
    let threads = Threads::new(1).unwrap();
    let mut r = Random(9);
    let case = plain(&mut r, 8, true);
    let q = vec![0.0f32; 8 * 2 * 16];
    let k = vec![0.0f32; 8 * 16];
    let try_forward = |shape: &AttentionShape, spans: &[Span], sink: Option<&[f32]>, lse: usize| {
        let (mut out, mut lse) = (vec![0.0f32; 8 * 2 * 16], vec![0.0f32; lse]);
        // SAFETY: dense strides.
        let out = unsafe { HeadsMut::of(&mut out, 256, 32, 16) };
        let q = Heads { data: &q, batch: 256, token: 32, head: 16 };
        let k = Heads { data: &k, batch: 128, token: 16, head: 16 };
        let cpu = CpuContext::new(&threads, Isa::Portable);
        forward(cpu, shape, spans, AttentionInputs { q, k, v: k, sink }, &out, &mut lse)
            .map_err(|e| e.to_string())
    };
    let (shape, span) = (case.shape, case.spans[0]);
    assert!(try_forward(&shape, &[span], None, 16).is_ok());
    let bad = |result: Result<(), String>, words: &str| {
        let message = result.expect_err(words);
        assert!(message.contains(words), "{message}");
    };
    bad(try_forward(&AttentionShape { kv_heads: 0, ..shape }, &[span], None, 16), "key heads");
    bad(try_forward(&AttentionShape { heads: 3, kv_heads: 2, ..shape }, &[span], None, 16), "key heads");
    bad(try_forward(&AttentionShape { d_v: 0, ..shape }, &[span], None, 16), "at least 1");
    bad(try_forward(&AttentionShape { softcap: Some(0.0), ..shape }, &[span], None, 16), "softcap");
    bad(try_forward(&shape, &[Span { q_len: 9, ..span }], None, 18), "q has 256 elements");
    bad(try_forward(&shape, &[Span { k_len: 9, ..span }], None, 16), "k has 128 elements");
    bad(try_forward(&shape, &[Span { q_start: usize::MAX, ..span }], None, 16), "q has 256 elements");
    bad(try_forward(&shape, &[span, Span { q_start: 4, q_len: 2, ..span }], None, 16), "both write out");
    bad(try_forward(&shape, &[span], Some(&[0.0]), 16), "the sink has 1 values");
    bad(try_forward(&shape, &[span], None, 15), "log-sum-exp");
    assert!(try_forward(&shape, &[], None, 0).is_ok());

    // The backward pass rejects sequences that share keys: their gradients would overwrite each other.
    let spans = [Span { q_len: 4, ..span }, Span { q_start: 4, q_len: 4, lse_base: 8, ..span }];
    assert!(try_forward(&shape, &spans, None, 16).is_ok());
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), k.clone());
    let qs = Heads { data: &q, batch: 256, token: 32, head: 16 };
    let ks = Heads { data: &k, batch: 128, token: 16, head: 16 };
    // SAFETY: dense strides.
    let (dq, dk, dv) = unsafe {
        (
            HeadsMut::of(&mut dq, 256, 32, 16),
            HeadsMut::of(&mut dk, 128, 16, 16),
            HeadsMut::of(&mut dv, 128, 16, 16),
        )
    };
    let lse = [0.0f32; 16];
    let cpu = CpuContext::new(&threads, Isa::Portable);
    let inputs = AttentionInputs { q: qs, k: ks, v: ks, sink: None };
    let outputs = AttentionOutputs { out: qs, dout: qs, lse: &lse };
    let gradients = AttentionGradients { dq: &dq, dk: &dk, dv: &dv, dsink: None };
    let result = backward(cpu, &shape, &spans, inputs, outputs, gradients);
    bad(result.map_err(|e| e.to_string()), "both write dk");
}

#[test]
fn empty_sequences_are_accepted() {
    let mut r = Random(10);
    for (q_len, k_len) in [(0, 0), (0, 5), (5, 0), (1, 1)] {
        let mut case = plain(&mut r, 5, true);
        case.q = r.dense([1, q_len, 2, 16]);
        case.dout = r.dense([1, q_len, 2, 16]);
        (case.k, case.v) = (r.dense([1, k_len, 1, 16]), r.dense([1, k_len, 1, 16]));
        case.spans = vec![Span { batch: 0, q_start: 0, q_len, k_start: 0, k_len, lse_base: 0 }];
        both(&case, |what, a| {
            let zero = |x: &Dense| x.data.iter().all(|x| *x == 0.0);
            if q_len != 1 {
                assert!(zero(&a.out) && zero(&a.dq) && zero(&a.dk) && zero(&a.dv), "{what} {q_len} {k_len}");
            }
        });
        let _: Inputs<'_> = case.inputs();
    }
}
