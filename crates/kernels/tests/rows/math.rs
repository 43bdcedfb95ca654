use ferrotron_kernels::cpu::math::{exp, normal_cdf_pdf, sigmoid, sigmoid_pair, tanh};

/// Every 37th float from −200 to 200, both signs, small and large.
fn samples() -> impl Iterator<Item = f32> {
    let top = 200f32.to_bits();
    (0..top).step_by(3701).map(f32::from_bits).flat_map(|x| [x, -x])
}

fn ulps(ours: f32, wanted: f64) -> f64 {
    let nearest = wanted as f32;
    let step = f64::from(f32::from_bits(nearest.abs().to_bits() + 1)) - f64::from(nearest.abs());
    (f64::from(ours) - wanted).abs() / step
}

fn worst(f: impl Fn(f32) -> f32, oracle: impl Fn(f64) -> f64, keep: impl Fn(f32) -> bool) -> (f64, f32) {
    samples()
        .filter(|x| keep(*x))
        .map(|x| (ulps(f(x), oracle(f64::from(x))), x))
        .fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
}

#[test]
fn exponentials_are_a_few_ulp_from_f64() {
    for (name, worst, limit) in [
        ("exp", worst(exp, f64::exp, |x| x.abs() < 86.9), 2.0),
        ("sigmoid", worst(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), |x| x.abs() < 86.0), 3.0),
        ("sigmoid pair", worst(|x| sigmoid_pair(x).0, |x| 1.0 / (1.0 + (-x).exp()), |x| x.abs() < 86.0), 4.0),
        ("complement", worst(|x| sigmoid_pair(x).1, |x| 1.0 / (1.0 + x.exp()), |x| x.abs() < 86.0), 4.0),
        ("tanh", worst(tanh, f64::tanh, |_| true), 3.0),
        ("cdf", worst(|x| normal_cdf_pdf(x).0, |x| 0.5 * libm::erfc(-x / 2f64.sqrt()), |x| x > -3.0), 8.0),
    ] {
        assert!(worst.0 <= limit, "{name}: {} ulp at {}", worst.0, worst.1);
    }
    // Far out the argument of the exponential carries the rounding of x²: relative x²·2⁻²³.
    for x in samples().filter(|x| (-12.0..-3.0).contains(x)) {
        let wanted = 0.5 * libm::erfc(-f64::from(x) / 2f64.sqrt());
        let off = (f64::from(normal_cdf_pdf(x).0) - wanted).abs() / wanted;
        assert!(off < f64::from(x * x) * 1.2e-7 + 4e-7, "cdf({x}) off by {off:e}");
    }
}

#[test]
fn special_values() {
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(88.73), f32::INFINITY);
    assert!(exp(88.72).is_finite());
    assert!((-200..-87).all(|x| exp(x as f32) < 1e-37));
    assert!(exp(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
    assert!(sigmoid_pair(f32::NAN).0.is_nan() && normal_cdf_pdf(f32::NAN).0.is_nan());
    assert_eq!((sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY)), (1.0, 0.0));
    assert_eq!((sigmoid_pair(f32::INFINITY), sigmoid_pair(f32::NEG_INFINITY)), ((1.0, 0.0), (0.0, 1.0)));
    assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
    assert_eq!(tanh(-0.0).to_bits(), (-0f32).to_bits());
    assert_eq!(normal_cdf_pdf(f32::INFINITY), (1.0, 0.0));
    assert_eq!(normal_cdf_pdf(f32::NEG_INFINITY), (0.0, 0.0));
    let tiny = f32::from_bits(1);
    assert_eq!((tanh(tiny), exp(tiny)), (tiny, 1.0));
}
