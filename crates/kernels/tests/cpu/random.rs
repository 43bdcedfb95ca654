use super::support::{Random, everywhere};
use ferrotron_kernels::cpu::random::{DropoutMask, dropout, fill_normal};
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_kernels::philox::{RandomStream, philox4x32};
use ferrotron_kernels::{NormalFill, RngKey};
use ferrotron_tensor::{Float, Threads, bf16};
use std::collections::HashSet;

#[test]
fn philox_known_answers() {
    let ones = u32::MAX;
    for (counter, key, wanted) in [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ] {
        assert_eq!(philox4x32(counter, key), wanted);
    }
}

const KEY: RngKey = RngKey { seed: 1, step: 2, layer: 4, site: 5 };

#[test]
fn every_field_of_a_key_changes_the_stream() {
    let mut streams = HashSet::new();
    let mut add = |s: RandomStream| assert!(streams.insert((s.key, s.lane)), "{s:?} again");
    add(RandomStream::dropout(KEY));
    add(RandomStream::dropout(RngKey { seed: 1 << 40, ..KEY }));
    add(RandomStream::dropout(RngKey { seed: 9, ..KEY }));
    add(RandomStream::dropout(RngKey { step: 3, ..KEY }));
    add(RandomStream::dropout(RngKey { step: 2 + (1 << 32), ..KEY }));
    add(RandomStream::dropout(RngKey { layer: 3, ..KEY }));
    add(RandomStream::dropout(RngKey { layer: 5, site: 4, ..KEY }));
    for name in ["", "a", "b", "ab", "ba", "layers.0.weight", "layers.1.weight", "layers.0.weight\0"] {
        add(RandomStream::named(1, name));
        add(RandomStream::named(2, name));
    }
}

#[test]
fn random_streams_do_not_change() {
    // A seed must give the same run on every device and in every version.
    let stream = RandomStream::named(42, "layers.0.attention.wq");
    let words: Vec<u32> = (0..6).map(|i| stream.word(i)).collect();
    let normals: Vec<u64> = [0, 1, 2, 3, 1 << 40].iter().map(|i| stream.normal(*i).to_bits()).collect();
    assert_eq!(words, PINNED_WORDS);
    assert_eq!(normals, PINNED_NORMALS);
    assert!((0..1000).all(|i| (0.0..1.0).contains(&stream.uniform(i))));
}

const PINNED_WORDS: [u32; 6] =
    [246_728_507, 961_056_984, 2_924_578_292, 1_424_118_550, 3_834_354_236, 666_974_354];
const PINNED_NORMALS: [u64; 5] = [
    0x3fd9_1ae0_7cc5_a301,
    0x4002_dd17_370a_32b2,
    0xbfdb_8442_6f26_4905,
    0x3fe8_72e2_2868_7339,
    0x3ff6_f12c_b816_bcd1,
];

#[test]
fn normal_values_have_normal_moments_and_do_not_depend_on_chunks() {
    let stream = RandomStream::named(7, "w");
    let draw = |cpu: CpuContext, first: usize, n: usize| {
        let mut out = vec![0f32; n];
        let runs = NormalFill { stream, first: 3 + first as u64, stride: 0, std: 2.0 };
        fill_normal(cpu, runs, n, &mut out);
        out
    };
    let n = 200_001;
    let whole = everywhere(|cpu| draw(cpu, 0, n));
    for (first, len) in [(0, 10), (1, 1), (17, 50), (99_999, 100_002), (5, 0)] {
        let threads = Threads::new(2).unwrap();
        let cpu = CpuContext::new(&threads, Isa::detect());
        let part = draw(cpu, first, len);
        assert_eq!(part, whole[first..first + len]);
    }
    let z: Vec<f64> = whole.iter().map(|x| f64::from(*x) / 2.0).collect();
    let moment = |k: i32| z.iter().map(|z| z.powi(k)).sum::<f64>() / n as f64;
    // Five standard errors of each moment.
    let room = |variance: f64| 5.0 * (variance / n as f64).sqrt();
    assert!(moment(1).abs() < room(1.0) && (moment(2) - 1.0).abs() < room(2.0));
    assert!(moment(3).abs() < room(15.0) && (moment(4) - 3.0).abs() < room(96.0));
    let neighbours = z.windows(2).map(|w| w[0] * w[1]).sum::<f64>() / n as f64;
    assert!(neighbours.abs() < room(1.0));
}

fn drop_all<T: Float>(p: f32, x: &[T], width: usize, rows: &[i32]) -> Vec<T> {
    everywhere(|cpu| {
        let mut y = vec![T::from_f32(9.0); x.len()];
        let mask = DropoutMask { p, stream: RandomStream::dropout(KEY), rows, width };
        dropout(cpu, mask, x, &mut y).unwrap();
        y
    })
}

#[test]
fn dropout_keeps_scales_and_does_not_depend_on_the_layout() {
    let (rows, width, p) = (301, 103, 0.3);
    let x: Vec<f32> = Random(2).vec(rows * width, 1.0);
    let numbers: Vec<i32> = (0..rows as i32).collect();
    let whole = drop_all(p, &x, width, &numbers);
    let stream = RandomStream::dropout(KEY);
    for (i, (x, y)) in x.iter().zip(&whole).enumerate() {
        let dropped = f64::from(stream.word(i as u64)) < f64::from(p) * 4_294_967_296.0;
        assert_eq!(*y, if dropped { 0.0 } else { x * (1.0 / (1.0 - p)) }, "{i}");
    }
    let rate = whole.iter().filter(|y| **y == 0.0).count() as f64 / whole.len() as f64;
    assert!((rate - f64::from(p)).abs() < 0.02, "{rate}");
    // A subset of rows, and rows in reverse order.
    assert_eq!(drop_all(p, &x[width * 50..], width, &numbers[50..]), whole[width * 50..]);
    let back = |all: &[f32]| -> Vec<f32> { all.chunks(width).rev().flatten().copied().collect() };
    let reversed: Vec<i32> = numbers.iter().rev().copied().collect();
    assert_eq!(drop_all(p, &back(&x), width, &reversed), back(&whole));
    // The backward pass drops the same elements.
    let ones = vec![bf16::ONE; x.len()];
    assert!(
        drop_all(p, &ones, width, &numbers)
            .iter()
            .zip(&whole)
            .all(|(d, y)| (d.to_f32() == 0.0) == (*y == 0.0))
    );
}

#[test]
fn dropout_with_p_0_and_1_and_invalid_arguments() {
    let x: Vec<f32> = Random(2).vec(64, 1.0);
    let (rows, one) = (&[0, 1, 2, 3, 4, 5, 6, 7][..], &[0][..]);
    assert_eq!(drop_all(0.0, &x, 8, rows), x);
    assert!(drop_all(1.0, &x, 8, rows).iter().all(|y| *y == 0.0));
    assert!(drop_all(0.5, &[f32::INFINITY; 8], 8, one).iter().all(|y| *y == 0.0 || *y == f32::INFINITY));
    assert!(drop_all::<f32>(0.5, &[], 8, &[]).is_empty());
    let threads = Threads::new(1).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let mask = DropoutMask { p: 0.5, stream: RandomStream::dropout(KEY), rows, width: 8 };
    for p in [-0.1, 1.1, f32::NAN] {
        assert!(dropout(cpu, DropoutMask { p, ..mask }, &x, &mut [0f32; 64]).is_err());
    }
    assert!(dropout(cpu, DropoutMask { width: 7, ..mask }, &x, &mut [0f32; 64]).is_err());
}
