//! FP8 outputs of Adam: bit for bit those of separate amax and quantize passes.

use super::devices::*;
use ferrotron_kernels::{
    ALIGN, Adam, Fp8DataOut, Fp8Tensor, Fp8WeightOut, Moment, MomentOrder, ParamUpdate, Quantize,
    ScaleSource, ScalingMode, scalars,
};
use ferrotron_tensor::{Category, DType, Tensor, bf16};

const ADAM: Adam = Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled: true };
const MOMENTS: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::U8];
/// Multiples of 16 (rows of FP8), with and without vectorized GPU accesses, and with a partial last block.
const SIZES: [usize; 6] = [16, 48, 0, 4096, 9008, 50_000];
/// More parameters than fit in one launch.
const COUNT: usize = 42;

/// A parameter and its FP8 outputs.
struct Held {
    master: Tensor,
    weight: Option<Tensor>,
    grad: Tensor,
    moments: [(Tensor, Option<Tensor>); 2],
    amax: Tensor,
    bytes: Option<(Tensor, Tensor, Tensor)>,
}

fn room(h: &TestDevice, dtype: DType, n: usize, by: usize) -> Tensor {
    h.s.zeros(&[n + by], dtype, Category::Workspace).unwrap().narrow(0, by, n).unwrap()
}

/// Parameter i: with and without a bf16 weight, amax, FP8 data, and alignment.
fn held(h: &TestDevice, i: usize, dtype: DType, split: bool, odd: Option<f64>) -> Held {
    let (n, by, seed) = (SIZES[i % SIZES.len()], [0, 1, 0, 16][i % 4], 100 * i as u64);
    let mut values = numbers(DType::F32, seed + 1, n);
    if let (Some(odd), Some(at)) = (odd, values.get_mut(n / 2)) {
        *at = odd;
    }
    let whole = h.tensor(DType::F32, &[n], &values);
    let master = room(h, if split { DType::I16 } else { DType::F32 }, n, by);
    let weight = (split || i % 3 != 1).then(|| room(h, DType::BF16, n, by));
    match &weight {
        Some(weight) if split => h.k.split_master(&h.s, &whole, weight, &master).unwrap(),
        _ => h.k.copy(&h.s, &whole, &master).unwrap(),
    }
    let moment = |order, seed| {
        let scaled = matches!(dtype, DType::F16 | DType::U8);
        let kept = (room(h, dtype, n, by), scaled.then(|| room(h, DType::U8, n.div_ceil(32), by)));
        let values: Vec<f64> = numbers(DType::F32, seed, n).iter().map(|x| x.abs()).collect();
        let to = Moment { values: &kept.0, scales: kept.1.as_ref() };
        h.k.pack_moment(&h.s, order, &h.tensor(DType::F32, &[n], &values), to).unwrap();
        kept
    };
    let one = |x: f64| h.tensor(DType::F32, &[1], &[x]);
    // Sometimes larger than any weight: then amax keeps it.
    let seen = if i % 7 == 6 { 1e9 } else { 0.0 };
    let bytes = || (room(h, DType::E4M3, n, by), one([37.5, 1.0, 1e4][i % 3]), one(f64::NAN));
    Held {
        master,
        weight,
        grad: h.tensor(DType::F32, &[n], &numbers(DType::F32, seed + 2, n)),
        moments: [moment(MomentOrder::First, seed + 3), moment(MomentOrder::Second, seed + 4)],
        amax: one(seen),
        bytes: (!split && i % 5 != 2).then(bytes),
    }
}

fn update(t: &Held, takes: bool) -> ParamUpdate<'_> {
    let [first, second] = t.moments.each_ref().map(|m| Moment { values: &m.0, scales: m.1.as_ref() });
    let bytes = t.bytes.as_ref().map(|(data, scale, scale_inv)| Fp8DataOut { data, scale, scale_inv });
    ParamUpdate {
        master: &t.master,
        weight: t.weight.as_ref(),
        grad: &t.grad,
        first,
        second: Some(second),
        lr_mult: 1.0,
        wd_mult: 1.0,
        fp8: takes.then_some(Fp8WeightOut { amax: &t.amax, data: bytes }),
    }
}

fn step_scalars(h: &TestDevice, norm: f64) -> Tensor {
    let mut s = vec![0.0; scalars::COUNT];
    (s[scalars::LR], s[scalars::WEIGHT_DECAY], s[scalars::CLIP]) = (0.01, 0.1, 0.7);
    (s[scalars::BIAS1], s[scalars::BIAS2]) = (0.271, 0.142_625);
    (s[scalars::GRAD_NORM], s[scalars::STEPS_DONE]) = (norm, 2.0);
    h.tensor(DType::F32, &[scalars::COUNT], &s)
}

fn state(h: &TestDevice, t: &Held) -> Vec<Vec<u8>> {
    let moments = t.moments.iter().flat_map(|m| [Some(&m.0), m.1.as_ref()]);
    let all = [Some(&t.master), t.weight.as_ref()].into_iter().chain(moments).flatten();
    all.map(|x| h.s.download(&x.as_bytes().unwrap()).unwrap()).collect()
}

/// Amax, FP8 codes and inverse scale.
type Taken = (u32, Vec<u8>, u32);

fn taken(h: &TestDevice, t: &Held) -> Taken {
    let bits = |t: &Tensor| h.s.download::<f32>(t).unwrap()[0].to_bits();
    let bytes = t.bytes.as_ref();
    (
        bits(&t.amax),
        bytes.map(|b| h.s.download(&b.0.as_bytes().unwrap()).unwrap()).unwrap_or_default(),
        bytes.map_or(0, |b| bits(&b.2)),
    )
}

/// The same outputs from separate amax and quantize kernels on the current weight.
fn by_passes(h: &TestDevice, t: &Held, before: &Taken) -> Taken {
    let n = t.grad.numel();
    let weight = match &t.weight {
        Some(w) => w.clone(),
        None => {
            let w = room(h, DType::BF16, n, 0);
            h.k.copy(&h.s, &t.master, &w).unwrap();
            w
        }
    };
    let x = weight.view(&[n / ALIGN, ALIGN]).unwrap();
    let amax = h.tensor(DType::F32, &[1], &[f64::from(f32::from_bits(before.0))]);
    let Some((_, scale, _)) = &t.bytes else {
        h.k.amax(&h.s, &x, &amax).unwrap();
        return (h.s.download::<f32>(&amax).unwrap()[0].to_bits(), Vec::new(), 0);
    };
    let shape = [n / ALIGN, ALIGN];
    let rows =
        Fp8Tensor::empty(&h.s, shape, DType::E4M3, ScalingMode::PerTensor, Category::Workspace).unwrap();
    let range = ScaleSource::Given { scale, amax: &amax };
    h.k.quantize(&h.s, &Quantize { x: &x, range, rows: Some(&rows), cols: None, sums: None }).unwrap();
    let bits = |t: &Tensor| h.s.download::<f32>(t).unwrap()[0].to_bits();
    // An empty weight has no outputs.
    let inverse = if n == 0 { before.2 } else { bits(&rows.scale_inv) };
    (bits(&amax), h.s.download(&rows.data.as_bytes().unwrap()).unwrap(), inverse)
}

#[test]
fn fused_adam_matches_separate_quantization() {
    for h in devices() {
        for (dtype, split) in MOMENTS.into_iter().flat_map(|d| [(d, false), (d, true)]) {
            for odd in [None, Some(f64::NAN), Some(f64::INFINITY)] {
                let what = format!("{} moments {dtype} split {split} odd {odd:?}", h.name);
                let all = |takes: bool| -> Vec<Held> {
                    let all: Vec<Held> = (0..COUNT).map(|i| held(&h, i, dtype, split, odd)).collect();
                    // Some weights have no FP8 outputs.
                    let list: Vec<ParamUpdate> =
                        all.iter().enumerate().map(|(i, t)| update(t, takes && i % 8 != 3)).collect();
                    h.k.adam(&h.s, ADAM, &step_scalars(&h, 1.0), &list).unwrap();
                    all
                };
                let (with, without) = (all(true), all(false));
                for (i, (t, plain)) in with.iter().zip(&without).enumerate() {
                    let before = taken(&h, plain);
                    assert_eq!(state(&h, t), state(&h, plain), "{what} {i}: taking changes the step");
                    let wanted = if i % 8 == 3 { before } else { by_passes(&h, t, &before) };
                    assert_eq!(taken(&h, t), wanted, "{what} {i}");
                }
            }
        }
    }
}

#[test]
fn a_skipped_step_only_requantizes_weights() {
    for h in devices() {
        for (dtype, split) in [(DType::F32, false), (DType::F32, true), (DType::U8, false)] {
            for norm in [f64::NAN, f64::INFINITY] {
                let what = format!("{} moments {dtype} split {split} norm {norm}", h.name);
                let all: Vec<Held> = (0..COUNT).map(|i| held(&h, i, dtype, split, None)).collect();
                let before: Vec<_> = all.iter().map(|t| (state(&h, t), taken(&h, t))).collect();
                // bf16 weights that were never written differ from their masters, and a skipped step leaves them.
                let list: Vec<ParamUpdate> = all.iter().map(|t| update(t, true)).collect();
                h.k.adam(&h.s, ADAM, &step_scalars(&h, norm), &list).unwrap();
                for (i, (t, (state_before, taken_before))) in all.iter().zip(before).enumerate() {
                    assert_eq!(state(&h, t), state_before, "{what} {i}");
                    let wanted = match &t.bytes {
                        None => taken_before,
                        Some(_) => {
                            let bare = Held { weight: None, ..held(&h, i, dtype, split, None) };
                            by_passes(&h, &bare, &taken_before)
                        }
                    };
                    assert_eq!(taken(&h, t), wanted, "{what} {i}");
                }
            }
        }
    }
}

#[test]
fn amax_is_reset_unless_the_step_is_skipped() {
    for h in devices() {
        for n in [0, 1, 5, 300] {
            for (norm, cleared) in [(1.0, true), (f64::NAN, false), (f64::INFINITY, false)] {
                let values = numbers(DType::F32, 5, n);
                let t = h.tensor(DType::F32, &[n], &values);
                h.k.reset_amax(&h.s, &step_scalars(&h, norm), &t).unwrap();
                assert_eq!(h.host(&t), if cleared { vec![0.0; n] } else { values }, "{} {n} {norm}", h.name);
            }
        }
    }
}

/// By definition: the master is rounded to bf16, and its product with the scale to E4M3.
#[test]
fn fp8_weights_are_quantized_from_the_bf16_weight() {
    for h in devices() {
        let n = 32;
        // Between two bf16 values and near a rounding boundary of E4M3: the result shows that rounding happens twice.
        let values: Vec<f64> = (0..n).map(|i| f64::from(1.0625f32 + 2f32.powi(-20) * i as f32)).collect();
        let t = Held {
            bytes: Some((
                room(&h, DType::E4M3, n, 0),
                h.tensor(DType::F32, &[1], &[1.0]),
                h.tensor(DType::F32, &[1], &[0.0]),
            )),
            ..held(&h, 0, DType::F32, false, None)
        };
        let [master, grad] = [values, vec![0.0; n]].map(|v| h.tensor(DType::F32, &[n], &v));
        let zeros = || (room(&h, DType::F32, n, 0), None);
        let t = Held { master, grad, weight: None, moments: [zeros(), zeros()], ..t };
        let mut s = vec![0.0; scalars::COUNT];
        (s[scalars::BIAS1], s[scalars::BIAS2], s[scalars::CLIP]) = (1.0, 1.0, 1.0);
        let st = h.tensor(DType::F32, &[scalars::COUNT], &s);
        h.k.adam(&h.s, ADAM, &st, &[update(&t, true)]).unwrap();
        let (amax, bytes, _) = taken(&h, &t);
        let master = h.host(&t.master);
        let weights: Vec<f32> = master.iter().map(|x| bf16::from_f32(*x as f32).to_f32()).collect();
        assert!(weights.iter().zip(&master).any(|(w, m)| f64::from(*w) != *m), "{}", h.name);
        let wanted: Vec<u8> = weights.iter().map(|w| ferrotron_tensor::fp8::E4m3::encode(*w).0).collect();
        assert_eq!(
            (f32::from_bits(amax), bytes),
            (weights.iter().copied().fold(0.0, f32::max), wanted),
            "{}",
            h.name
        );
    }
}
