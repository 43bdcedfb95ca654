//! Storage formats of moments and masters: against f64, bit-equal on every device, and unchanged by a step whose gradient
//! norm is not finite.

use super::devices::*;
use ferrotron_kernels::cpu::{CpuKernels, Isa};
use ferrotron_kernels::{Adam, Kernels, Lion, Moment, MomentOrder, ParamUpdate, Sgd, counter, scalars};
use ferrotron_tensor::{Category, DType, Device, Stream, Tensor, Threads, bf16};

const MOMENTS: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::U8];
/// Sizes with and without vectorized GPU accesses, and with a partial last block.
const SIZES: [usize; 6] = [1, 33, 0, 64, 4096, 9001];
const ADAM: Adam = Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled: true };

type Kept = (Tensor, Option<Tensor>);

/// A parameter on a device.
struct Held {
    master: Tensor,
    weight: Tensor,
    grad: Tensor,
    first: Kept,
    second: Kept,
}

fn moment(m: &Kept) -> Moment<'_> {
    Moment { values: &m.0, scales: m.1.as_ref() }
}

/// `n` elements that begin `by` elements into their buffer: not aligned for vectorized accesses where `by` is odd.
fn room(h: &TestDevice, dtype: DType, n: usize, by: usize) -> Tensor {
    h.s.zeros(&[n + by], dtype, Category::Workspace).unwrap().narrow(0, by, n).unwrap()
}

fn packed(h: &TestDevice, order: MomentOrder, dtype: DType, values: &[f64], by: usize) -> Kept {
    let n = values.len();
    let scales = matches!(dtype, DType::F16 | DType::U8).then(|| room(h, DType::U8, n.div_ceil(32), by));
    let kept = (room(h, dtype, n, by), scales);
    h.k.pack_moment(&h.s, order, &h.tensor(DType::F32, &[n], values), moment(&kept)).unwrap();
    kept
}

fn unpacked(h: &TestDevice, order: MomentOrder, m: &Kept) -> Vec<f64> {
    let out = h.poisoned(DType::F32, m.0.shape());
    h.k.unpack_moment(&h.s, order, moment(m), &out).unwrap();
    h.host(&out)
}

/// Moments over many orders of magnitude, some zero.
fn spread(seed: u64, n: usize) -> Vec<f64> {
    let powers = numbers(DType::F32, seed + 7, n);
    let spread = |(x, p): (f64, f64)| if p > 0.9 { 0.0 } else { rounded(DType::F32, x * (9.0 * p).exp2()) };
    numbers(DType::F32, seed, n).into_iter().zip(powers).map(spread).collect()
}

fn held(h: &TestDevice, i: usize, dtype: DType, split: bool) -> Held {
    let (n, by, seed) = (SIZES[i], i % 2, 100 * i as u64);
    let square = |x: f64| rounded(DType::F32, x * x);
    let whole = h.tensor(DType::F32, &[n], &numbers(DType::F32, seed + 1, n));
    let weight = room(h, DType::BF16, n, by);
    let master = room(h, if split { DType::I16 } else { DType::F32 }, n, by);
    match split {
        true => h.k.split_master(&h.s, &whole, &weight, &master).unwrap(),
        false => h.k.copy(&h.s, &whole, &master).unwrap(),
    }
    // As in training, squared gradients are of the magnitude of the second moment.
    let second: Vec<f64> = spread(seed + 3, n).into_iter().map(square).collect();
    Held {
        master,
        weight,
        grad: h.tensor(DType::F32, &[n], &numbers(DType::F32, seed + 2, n)),
        first: packed(h, MomentOrder::First, dtype, &spread(seed + 3, n), by),
        second: packed(h, MomentOrder::Second, dtype, &second, by),
    }
}

fn update(t: &Held, adam: bool) -> ParamUpdate<'_> {
    ParamUpdate {
        master: &t.master,
        weight: Some(&t.weight),
        grad: &t.grad,
        first: moment(&t.first),
        second: adam.then(|| moment(&t.second)),
        lr_mult: 1.0,
        wd_mult: 1.0,
        fp8: None,
    }
}

fn masters(h: &TestDevice, t: &Held) -> Vec<f64> {
    let out = h.poisoned(DType::F32, t.master.shape());
    match t.master.dtype() {
        DType::I16 => h.k.join_master(&h.s, &t.weight, &t.master, &out).unwrap(),
        _ => h.k.copy(&h.s, &t.master, &out).unwrap(),
    }
    h.host(&out)
}

/// All stored bytes of a parameter and its state.
fn bytes(h: &TestDevice, t: &Held) -> Vec<Vec<u8>> {
    let moments = [&t.first, &t.second].into_iter().flat_map(|m| [Some(&m.0), m.1.as_ref()]);
    let all = [Some(&t.master), Some(&t.weight)].into_iter().chain(moments).flatten();
    all.map(|x| h.s.download(&x.as_bytes().unwrap()).unwrap()).collect()
}

fn step_scalars(h: &TestDevice, norm: f64) -> Tensor {
    let mut s = vec![0.0; scalars::COUNT];
    (s[scalars::LR], s[scalars::WEIGHT_DECAY], s[scalars::CLIP]) = (0.01, 0.1, 0.7);
    (s[scalars::BIAS1], s[scalars::BIAS2]) = (0.271, 0.142_625);
    (s[scalars::GRAD_NORM], s[scalars::STEPS_DONE]) = (norm, 2.0);
    h.tensor(DType::F32, &[scalars::COUNT], &s)
}

/// Distance of neighbouring values near `x` in a block whose amax is `top`.
fn unit(dtype: DType, order: MomentOrder, x: f64, top: f64) -> f64 {
    // Mantissa bits, number of normal exponents, and the largest mantissa: above it the block has the next scale.
    let (mantissa, binades, largest) = match (dtype, order) {
        (DType::F16, _) => (10, 30, 2.0 - 2f64.powi(-10)),
        (_, MomentOrder::First) => (3, 15, 1.75),
        (_, MomentOrder::Second) => (3, 31, 1.875),
    };
    let binade = |x: f64| x.log2().floor() as i32;
    let over = i32::from(top / 2f64.powi(binade(top)) > largest);
    let floor = binade(top) + over - binades + 1;
    2f64.powi(binade(x.abs().max(1e-300)).max(floor) - mantissa)
}

fn near(what: &str, dtype: DType, order: MomentOrder, ours: &[f64], wanted: &[f64]) {
    if matches!(dtype, DType::F32 | DType::BF16) {
        for (o, w) in ours.iter().zip(wanted) {
            // One rounding to the storage type and up to four in f32 before it; a sum with cancellation may be smaller than these.
            let room = (1.01 * eps(dtype) + 4.0 * eps(DType::F32)) * w.abs() + 1e-7;
            assert!((o - w).abs() <= room, "{what}: {o} instead of {w}, allowed {room:e}");
        }
        return;
    }
    for (o, w) in ours.chunks(32).zip(wanted.chunks(32)) {
        let top = w.iter().fold(0f64, |a, x| a.max(x.abs()));
        for (o, w) in o.iter().zip(w) {
            let room = unit(dtype, order, *w, top) * 1.0001 + 1e-6 * w.abs();
            assert!((o - w).abs() <= room, "{what}: {o} instead of {w}, allowed {room:e}");
            assert!(order == MomentOrder::First || (*o > 0.0) == (*w > 0.0), "{what}: {o} instead of {w}");
        }
    }
}

#[test]
fn adam_with_every_state_dtype() {
    let [b1, b2, eps] = [ADAM.beta1, ADAM.beta2, ADAM.eps].map(f64::from);
    for h in devices() {
        for (dtype, split) in MOMENTS.into_iter().flat_map(|d| [(d, false), (d, true)]) {
            let all: Vec<Held> = (0..SIZES.len()).map(|i| held(&h, i, dtype, split)).collect();
            let before: Vec<_> = all
                .iter()
                .map(|t| {
                    (
                        masters(&h, t),
                        unpacked(&h, MomentOrder::First, &t.first),
                        unpacked(&h, MomentOrder::Second, &t.second),
                    )
                })
                .collect();
            let st = step_scalars(&h, 1.0);
            let s = h.host(&st);
            h.k.adam(&h.s, ADAM, &st, &all.iter().map(|t| update(t, true)).collect::<Vec<_>>()).unwrap();
            for (t, (p, m, v)) in all.iter().zip(before) {
                let what = format!("{} {dtype} split {split} {} elements", h.name, p.len());
                let g: Vec<f64> = h.host(&t.grad).iter().map(|g| g * s[scalars::CLIP]).collect();
                let m: Vec<f64> = m.iter().zip(&g).map(|(m, g)| b1 * m + (1.0 - b1) * g).collect();
                let v: Vec<f64> = v.iter().zip(&g).map(|(v, g)| b2 * v + (1.0 - b2) * g * g).collect();
                let wanted: Vec<f64> = (0..p.len())
                    .map(|i| {
                        let u = m[i] / s[scalars::BIAS1] / ((v[i] / s[scalars::BIAS2]).sqrt() + eps);
                        p[i] - s[scalars::LR] * (u + s[scalars::WEIGHT_DECAY] * p[i])
                    })
                    .collect();
                close(&what, DType::F32, &masters(&h, t), &wanted, 2e-6);
                near(&what, dtype, MomentOrder::First, &unpacked(&h, MomentOrder::First, &t.first), &m);
                near(&what, dtype, MomentOrder::Second, &unpacked(&h, MomentOrder::Second, &t.second), &v);
                let weights = h.host(&t.weight);
                for (w, p) in weights.iter().zip(masters(&h, t)) {
                    let half_up = f32::from_bits(((p as f32).to_bits() + 0x8000) & 0xffff_0000);
                    let nearest = bf16::from_f32(p as f32).to_f64();
                    assert_eq!(*w, if split { f64::from(half_up) } else { nearest }, "{what}");
                }
            }
        }
    }
}

/// Every operation is rounded and random bits are integers, so all devices give the same bits, whatever else is in the
/// launch and however buffers are aligned.
#[test]
fn packed_moments_are_bit_equal_on_all_devices() {
    let cpu = TestDevice {
        name: "CPU".into(),
        k: Box::new(CpuKernels::with(Isa::detect())),
        s: Device::cpu(Threads::new(1).unwrap()).stream("compute").unwrap(),
    };
    let sgd = Sgd { momentum: 0.9, dampening: 0.1, nesterov: true };
    let run = |h: &TestDevice, dtype, split, adam: bool, together: bool| {
        let all: Vec<Held> = (0..SIZES.len()).map(|i| held(h, i, dtype, split)).collect();
        let count =
            h.s.upload(&counter::after(2, [0.9, 0.95]), &[counter::COUNT], Category::Workspace).unwrap();
        for _ in 0..3 {
            let st = step_scalars(h, 1.0);
            h.k.advance_step(&h.s, [0.9, 0.95], &count, &st).unwrap();
            let list: Vec<ParamUpdate> = all.iter().map(|t| update(t, adam)).collect();
            for list in list.chunks(if together { list.len() } else { 1 }) {
                match adam {
                    true => h.k.adam(&h.s, ADAM, &st, list).unwrap(),
                    false => h.k.sgd(&h.s, sgd, &st, list).unwrap(),
                }
            }
        }
        let made: Vec<_> = all.iter().flat_map(|t| bytes(h, t)).collect();
        (made, h.s.download::<f64>(&count).unwrap())
    };
    for h in devices() {
        for (dtype, split) in MOMENTS.into_iter().flat_map(|d| [(d, false), (d, true)]) {
            for adam in [true, false] {
                let ours = run(&h, dtype, split, adam, true);
                let what = format!("{} {dtype} split {split} adam {adam}", h.name);
                assert!(ours == run(&cpu, dtype, split, adam, true), "{what}: other bits than the CPU's");
                assert!(ours == run(&h, dtype, split, adam, false), "{what}: other bits one by one");
                assert_eq!(ours.1, counter::after(5, [0.9, 0.95]), "{what}");
            }
        }
    }
}

/// A step of a rule of single elements.
#[derive(Clone, Copy, Debug)]
enum Rule {
    Adam(Adam),
    Sgd(Sgd),
    Lion(Lion),
}

impl Rule {
    fn step(self, k: &dyn Kernels, s: &Stream, st: &Tensor, list: &[ParamUpdate]) {
        match self {
            Rule::Adam(adam) => k.adam(s, adam, st, list).unwrap(),
            Rule::Sgd(sgd) => k.sgd(s, sgd, st, list).unwrap(),
            Rule::Lion(lion) => k.lion(s, lion, st, list).unwrap(),
        }
    }
}

/// Optimizer state in host memory: CPU kernels in the order of a device's stream give the bits of the device's own kernels, for
/// every rule, master and state dtype, and where the step is skipped.
#[test]
fn cpu_updates_in_host_memory_equal_those_of_the_device() {
    let rules = [
        Rule::Adam(ADAM),
        Rule::Adam(Adam { decoupled: false, eps: 1e-3, ..ADAM }),
        Rule::Sgd(Sgd { momentum: 0.9, dampening: 0.1, nesterov: true }),
        Rule::Lion(Lion { beta1: 0.9, beta2: 0.99 }),
    ];
    let cpu = CpuKernels::detect();
    for h in devices() {
        let to_host = |t: &Tensor| {
            let host = Tensor::host(&h.s, t.shape(), t.dtype()).unwrap();
            h.s.copy(t, &host).unwrap();
            host
        };
        let to_device = |t: &Tensor| {
            let device = Tensor::empty(&h.s, t.shape(), t.dtype(), Category::Workspace).unwrap();
            h.s.copy(t, &device).unwrap();
            device
        };
        let each = |t: &Held, f: &dyn Fn(&Tensor) -> Tensor| {
            let kept = |(values, scales): &Kept| (f(values), scales.as_ref().map(f));
            let (first, second) = (kept(&t.first), kept(&t.second));
            Held { master: f(&t.master), weight: f(&t.weight), grad: f(&t.grad), first, second }
        };
        for (dtype, split) in MOMENTS.into_iter().flat_map(|d| [(d, false), (d, true)]) {
            for rule in rules {
                let what = format!("{} {dtype} split {split} {rule:?}", h.name);
                let two = matches!(rule, Rule::Adam(_));
                let filled = (0..SIZES.len()).filter(|i| SIZES[*i] > 0);
                let here: Vec<Held> = filled.map(|i| held(&h, i, dtype, split)).collect();
                let host: Vec<Held> = here.iter().map(|t| each(t, &to_host)).collect();
                for norm in [1.0, 1.0, f64::INFINITY, 1.0] {
                    let st = step_scalars(&h, norm);
                    let list = |all: &[Held], k: &dyn Kernels, st: &Tensor| {
                        rule.step(k, &h.s, st, &all.iter().map(|t| update(t, two)).collect::<Vec<_>>());
                    };
                    list(&here, &*h.k, &st);
                    let on_host = to_host(&st);
                    list(&host, &cpu, &on_host);
                    let skipped: Vec<ParamUpdate> = host.iter().map(|t| update(t, two)).collect();
                    cpu.round_skipped_weights(&h.s, &on_host, &skipped).unwrap();
                    for (a, b) in here.iter().zip(&host) {
                        let same = bytes(&h, a) == bytes(&h, &each(b, &to_device));
                        assert!(same, "{what}, norm {norm}: other bits of {} elements", a.grad.numel());
                    }
                }
            }
        }
    }
}

/// Weights of a skipped step are written only where they are rounded masters, and only if the step is skipped.
#[test]
fn weights_of_a_skipped_step_are_the_rounded_masters() {
    let cpu = CpuKernels::detect();
    let s = Device::cpu(Threads::new(2).unwrap()).stream("compute").unwrap();
    let h = TestDevice { name: "CPU".into(), k: Box::new(cpu), s };
    for split in [false, true] {
        let t = held(&h, 5, DType::F32, split);
        for norm in [1.0, f64::NAN] {
            h.s.zero(&t.weight).unwrap();
            cpu.round_skipped_weights(&h.s, &step_scalars(&h, norm), &[update(&t, true)]).unwrap();
            let masters: Vec<f64> = match split || norm == 1.0 {
                true => vec![0.0; SIZES[5]],
                false => h.host(&t.master).iter().map(|x| rounded(DType::BF16, *x)).collect(),
            };
            assert_eq!(h.host(&t.weight), masters, "split {split}, norm {norm}");
        }
    }
}

#[test]
fn a_step_with_a_non_finite_norm_changes_nothing() {
    let sgd = Sgd { momentum: 0.9, dampening: 0.0, nesterov: false };
    for h in devices() {
        for (dtype, split) in MOMENTS.into_iter().flat_map(|d| [(d, false), (d, true)]) {
            let all: Vec<Held> = (0..SIZES.len()).map(|i| held(&h, i, dtype, split)).collect();
            let state = || all.iter().map(|t| bytes(&h, t)).collect::<Vec<_>>();
            let before = state();
            for norm in [f64::NAN, f64::INFINITY, 1.0] {
                let st = step_scalars(&h, norm);
                let count = h.s.upload(&[2.0, 0.81, 0.9], &[counter::COUNT], Category::Workspace).unwrap();
                h.k.advance_step(&h.s, [0.9, 0.95], &count, &st).unwrap();
                let counted = h.s.download::<f64>(&count).unwrap()[counter::STEPS];
                h.k.adam(&h.s, ADAM, &st, &all.iter().map(|t| update(t, true)).collect::<Vec<_>>()).unwrap();
                h.k.sgd(&h.s, sgd, &st, &all.iter().map(|t| update(t, false)).collect::<Vec<_>>()).unwrap();
                assert_eq!(norm == 1.0, before != state(), "{} {dtype} norm {norm}", h.name);
                assert_eq!(counted, if norm == 1.0 { 3.0 } else { 2.0 });
            }
        }
    }
}

/// A checkpoint holds unpacked values; packing them again reproduces these values, though block scales may differ.
#[test]
fn packing_unpacked_moments_is_lossless() {
    for h in devices() {
        for dtype in MOMENTS {
            for order in [MomentOrder::First, MomentOrder::Second] {
                for n in [0, 1, 31, 32, 5000] {
                    let values: Vec<f64> = spread(3, n);
                    let values: Vec<f64> = if order == MomentOrder::Second {
                        values.iter().map(|x| x.abs()).collect()
                    } else {
                        values
                    };
                    let once = unpacked(&h, order, &packed(&h, order, dtype, &values, 1));
                    let what = format!("{} {dtype} {order:?}", h.name);
                    near(&what, dtype, order, &once, &values);
                    assert_eq!(once, unpacked(&h, order, &packed(&h, order, dtype, &once, 0)), "{what}");
                    if dtype == DType::U8 {
                        assert!(once.iter().all(|x| rounded(DType::BF16, *x) == *x), "{what}: not bf16");
                    }
                }
            }
        }
    }
}
