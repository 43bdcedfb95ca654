//! The formats of packed moments, by definition.

use super::support::Random;
use ferrotron_kernels::moments::{
    FirstMoment8, FirstMoment16, Format, Scale, SecondMoment8, SecondMoment16, pack, pack_nearest,
    random_bits, seed, unpack,
};
use ferrotron_tensor::fp8::E4m3;
use ferrotron_tensor::{Float, f16};

/// Values of all codes without sign, in order, at scale 1.
fn magnitudes<F: Format>() -> Vec<f64> {
    (0..=F::LARGEST).map(|c| f64::from(unpack::<F>(F::code(c), 127))).collect()
}

#[test]
fn codes_match_the_declared_formats() {
    for (c, x) in magnitudes::<FirstMoment8>().into_iter().enumerate() {
        assert_eq!(x, E4m3(c as u8).to_f64());
        assert_eq!(unpack::<FirstMoment8>(c as u8 | 0x80, 127), -x as f32);
    }
    for (c, x) in magnitudes::<FirstMoment16>().into_iter().enumerate() {
        assert_eq!(x, f16::from_bits(c as u16).to_f64());
        assert_eq!(magnitudes_at::<SecondMoment16>(c as u32), x);
    }
    for (c, x) in magnitudes::<SecondMoment8>().into_iter().enumerate() {
        let (e, m) = ((c >> 3) as i32, (c & 7) as f64);
        let wanted = if e == 0 { m / 8.0 * 2f64.powi(-14) } else { (1.0 + m / 8.0) * 2f64.powi(e - 15) };
        assert_eq!(x, wanted, "code {c}");
    }
    // Scales are powers of two with an exponent bias of 127; zeroed memory decodes to zeros.
    assert_eq!(unpack::<FirstMoment8>(0x38, 130), 8.0);
    assert_eq!(unpack::<SecondMoment8>(0, 0), 0.0);
}

fn magnitudes_at<F: Format>(code: u32) -> f64 {
    f64::from(unpack::<F>(F::code(code), 127))
}

fn check<F: Format>() {
    let all = magnitudes::<F>();
    let mut random = Random(5);
    for round in 0..3000 {
        let top = f32::from_bits((random.next() as u32) & 0x7fff_ffff);
        if !(1e-25..1e30).contains(&top) {
            continue;
        }
        let scale = Scale::of::<F>(top);
        let one = f64::from(scale.inverse());
        // The smallest scale under which the amax is in range.
        assert!(f64::from(top) * one <= all[all.len() - 1], "{top}");
        assert!(f64::from(top) * one * 2.0 > all[all.len() - 1], "{top}");
        for x in [top, top * 0.37, top * 1e-3, top * 1e-6, 0.0] {
            let y = f64::from(x) * one;
            let above = all.partition_point(|a| *a <= y);
            let (low, high) = (all[above - 1], all.get(above).copied().unwrap_or(f64::INFINITY));
            let value = |code| f64::from(unpack::<F>(code, scale.byte())) * one;
            let near = value(pack_nearest::<F>(x, scale.inverse()));
            let mut nearest = if y - low <= high - y { low } else { high };
            if F::ABOVE_ZERO && x > 0.0 && nearest == 0.0 {
                nearest = all[1];
            }
            let tie = (y - low) == (high - y);
            assert!(near == nearest || (tie && near == high), "{x} in {top}: {near} instead of {nearest}");
            // Any random bits give one of the two neighbours; representable values stay unchanged.
            let got = value(pack::<F>(x, scale.inverse(), random.next() as u32));
            let kept = F::ABOVE_ZERO && low == 0.0 && x > 0.0;
            assert!(
                got == low || (got == high && y > low) || (kept && got == all[1]),
                "round {round}: {x}: {got}"
            );
        }
    }
    for top in [0.0, 1e-45, f32::MIN_POSITIVE] {
        // Values below the smallest code are handled, too.
        let scale = Scale::of::<F>(top);
        let back = unpack::<F>(pack::<F>(top, scale.inverse(), u32::MAX), scale.byte());
        assert!(back.is_finite() && back < 1e-30, "{top}: {back}");
        assert!((back == 0.0) == (top == 0.0) || !F::ABOVE_ZERO);
        assert!(top > 0.0 || back == 0.0);
    }
    for broken in [f32::INFINITY, f32::NAN] {
        let scale = Scale::of::<F>(f32::INFINITY);
        assert_eq!(F::bits(pack::<F>(broken, scale.inverse(), 7)), F::LARGEST);
    }
}

#[test]
fn stochastic_rounding_picks_a_neighbour() {
    check::<FirstMoment8>();
    check::<SecondMoment8>();
    check::<FirstMoment16>();
    check::<SecondMoment16>();
}

/// The mean over many elements is unbiased, and a moving average follows updates smaller than a step.
#[test]
fn stochastic_rounding_is_unbiased() {
    let mut random = Random(9);
    let n = 200_000;
    for x in [1.0f32, 1.01, 1.05, 1.12, 0.013, 0.000_4] {
        let scale = Scale::of::<SecondMoment8>(1.5);
        let (mut first, mut second) = (0.0, 0.0);
        for i in 0..n {
            let (p, m) =
                (f32::from_bits(0x3c00_0000 + (random.next() as u32 >> 9)), x * (1.0 + i as f32 * 1e-7));
            let d = random_bits(seed((i % 7) as f32), p, m);
            first += f64::from(unpack::<FirstMoment8>(
                pack::<FirstMoment8>(x, Scale::of::<FirstMoment8>(1.5).inverse(), d),
                Scale::of::<FirstMoment8>(1.5).byte(),
            ));
            let code = pack::<SecondMoment8>(x, scale.inverse(), d.rotate_left(16));
            second += f64::from(unpack::<SecondMoment8>(code, scale.byte()));
        }
        for mean in [first, second].map(|sum| sum / f64::from(n)) {
            // Neighbours are 1/8 apart: six standard errors of the mean of n.
            let room = 6.0 * 0.125 * f64::from(x) / 2.0 / f64::from(n).sqrt();
            assert!((mean - f64::from(x)).abs() <= room, "{x}: {mean}");
        }
    }
}
