use super::support::{Random, close, everywhere};
use ferrotron_kernels::RopeStyle;
use ferrotron_kernels::cpu::rope::{Angles, Rotation, rope};
use ferrotron_kernels::cpu::rows::{Rows, RowsViewMut};
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_kernels::rope_tables::{RopeScaling, RopeTables, inv_freq};
use ferrotron_tensor::{DType, Float, Threads, bf16};

const STYLES: [RopeStyle; 3] = [RopeStyle::Half, RopeStyle::Interleaved, RopeStyle::PairsToHalves];

/// Rotation of one head by complex multiplication in f64.
fn oracle(x: &[f64], half: usize, position: usize, theta: f64, style: RopeStyle, inverse: bool) -> Vec<f64> {
    let mut y = x.to_vec();
    let pair = |i: usize| (2 * i, 2 * i + 1);
    let halves = |i: usize| (i, half + i);
    for i in 0..half {
        let (from, to) = match style {
            RopeStyle::Half => (halves(i), halves(i)),
            RopeStyle::Interleaved => (pair(i), pair(i)),
            RopeStyle::PairsToHalves if inverse => (halves(i), pair(i)),
            RopeStyle::PairsToHalves => (pair(i), halves(i)),
        };
        let angle = position as f64 * theta.powf(-(i as f64) / half as f64);
        let (s, c) = if inverse { (-angle).sin_cos() } else { angle.sin_cos() };
        (y[to.0], y[to.1]) = (x[from.0] * c - x[from.1] * s, x[from.0] * s + x[from.1] * c);
    }
    y
}

fn check<T: Float>(tokens: usize, heads: usize, d: usize, rot: usize, gap: usize) {
    let mut random = Random((tokens * heads * d) as u64);
    let stride = heads * (d + gap) + 5;
    let x: Vec<T> = random.vec(tokens * stride, 1.0);
    let positions: Vec<i32> = (0..tokens).map(|_| random.below(90) as i32).collect();
    let tables = RopeTables::new(1e4, rot, &RopeScaling::None, 90).unwrap();
    let angles = Angles { cos: &tables.cos, sin: &tables.sin, half: rot / 2 };
    let view = Rows::heads(tokens, stride, heads, d + gap, d);
    for style in STYLES {
        for inverse in [false, true] {
            let y = everywhere(|cpu| {
                let mut y = x.clone();
                let x = RowsViewMut { data: &mut y, rows: view };
                rope(cpu, x, angles, &positions, Rotation { style, inverse }).unwrap();
                y
            });
            let mut wanted: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
            for (t, position) in positions.iter().enumerate() {
                for h in 0..heads {
                    let at = t * stride + h * (d + gap);
                    let head = oracle(&wanted[at..at + d], rot / 2, *position as usize, 1e4, style, inverse);
                    wanted[at..at + d].copy_from_slice(&head);
                }
            }
            // Angles are f32: up to 90 radians with a rounding of 4e-6.
            close(&format!("{style:?} {inverse}"), &y, &wanted, 1e-6, 2e-5);
        }
        // Forward and inverse.
        let round = everywhere(|cpu| {
            let mut y = x.clone();
            for inverse in [false, true] {
                let x = RowsViewMut { data: &mut y, rows: view };
                rope(cpu, x, angles, &positions, Rotation { style, inverse }).unwrap();
            }
            y
        });
        let before: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
        close(
            &format!("{style:?} there and back"),
            &round,
            &before,
            0.0,
            if T::DTYPE == DType::BF16 { 0.04 } else { 1e-6 },
        );
    }
}

#[test]
fn rotations_match_complex_numbers() {
    for (tokens, heads, d, rot, gap) in
        [(0, 2, 4, 4, 0), (1, 1, 2, 2, 0), (40, 3, 20, 12, 1), (300, 4, 64, 64, 0)]
    {
        check::<f32>(tokens, heads, d, rot, gap);
        check::<bf16>(tokens, heads, d, rot, gap);
    }
}

#[test]
fn wrong_arguments_are_errors() {
    let threads = Threads::new(1).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let tables = RopeTables::new(1e4, 4, &RopeScaling::None, 3).unwrap();
    let run = |positions: &[i64], half: usize, d: usize| {
        let (mut x, view) = (vec![0f32; 2 * d], Rows::heads(2, d, 1, d, d));
        let (x, angles) =
            (RowsViewMut { data: &mut x, rows: view }, Angles { cos: &tables.cos, sin: &tables.sin, half });
        rope(cpu, x, angles, positions, Rotation { style: RopeStyle::Half, inverse: false })
    };
    run(&[0, 2], 2, 6).unwrap();
    assert!(run(&[0, 3], 2, 6).is_err() && run(&[-1, 0], 2, 6).is_err());
    assert!(run(&[0], 2, 6).is_err() && run(&[0, 1], 2, 3).is_err());
    assert!(
        inv_freq(1e4, 5, &RopeScaling::None, 1).is_err() && inv_freq(0.0, 4, &RopeScaling::None, 1).is_err()
    );
    assert!(inv_freq(f64::NAN, 4, &RopeScaling::None, 1).is_err());
}

#[test]
fn given_attention_factor_wins_and_exact_ramp_ends_differ() {
    let yarn = |truncate, attention_factor| RopeScaling::Yarn {
        factor: 32.0,
        original_max_positions: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        truncate,
        attention_factor,
    };
    assert_eq!(yarn(true, Some(0.75)).attention_scaling(), 0.75);
    assert!((yarn(true, None).attention_scaling() - (0.1 * 32f64.ln() + 1.0)).abs() < 1e-15);
    let plain = inv_freq(1.5e5, 64, &RopeScaling::None, 1).unwrap();
    let (whole, exact) = (
        inv_freq(1.5e5, 64, &yarn(true, None), 1).unwrap(),
        inv_freq(1.5e5, 64, &yarn(false, None), 1).unwrap(),
    );
    // Ends of the ramp by the definition: the dimension that rotates beta times in 4096 positions.
    let end = |beta: f64| 64.0 * (4096.0 / (beta * std::f64::consts::TAU)).ln() / (2.0 * 1.5e5f64.ln());
    for i in 0..32 {
        let ramp = |low: f64, high: f64| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        for (ours, r) in
            [(whole[i], ramp(end(32.0).floor(), end(1.0).ceil())), (exact[i], ramp(end(32.0), end(1.0)))]
        {
            let wanted = f64::from(plain[i]) * (1.0 - r + r / 32.0);
            assert!((f64::from(ours) - wanted).abs() < 1e-6 * wanted);
        }
    }
    assert_ne!(whole, exact);
}
