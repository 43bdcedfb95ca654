use ferrotron_kernels::cpu::math::{
    Fma, Fused, Plain, exp, normal_cdf_pdf, sigmoid_pair, sigmoid_range, tanh, times_sigmoid,
};

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

fn accurate<F: Fma>() {
    let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (name, worst, limit) in [
        ("exp", worst(exp::<F>, f64::exp, |x| (-87.3..88.3).contains(&x)), 2.0),
        ("sigmoid", worst(|x| sigmoid_pair::<F>(sigmoid_range(x)).0, sigma, |x| x > -86.0), 3.0),
        ("complement", worst(|x| sigmoid_pair::<F>(sigmoid_range(x)).1, |x| sigma(-x), |x| x < 86.0), 4.0),
        (
            "silu",
            worst(
                |x| times_sigmoid::<F>(x, sigmoid_range(x)),
                |x| x * sigma(x),
                |x| x.abs() < 86.0 && x != 0.0,
            ),
            4.0,
        ),
        ("tanh", worst(tanh::<F>, f64::tanh, |_| true), 3.0),
        (
            "cdf",
            worst(|x| normal_cdf_pdf::<F>(x).0, |x| 0.5 * libm::erfc(-x / 2f64.sqrt()), |x| x > -3.0),
            8.0,
        ),
    ] {
        assert!(worst.0 <= limit, "{name}: {} ulp at {}", worst.0, worst.1);
    }
    // Far out the argument of the exponential carries the rounding of x²: relative x²·2⁻²³.
    for x in samples().filter(|x| (-12.0..-3.0).contains(x)) {
        let wanted = 0.5 * libm::erfc(-f64::from(x) / 2f64.sqrt());
        let off = (f64::from(normal_cdf_pdf::<F>(x).0) - wanted).abs() / wanted;
        assert!(off < f64::from(x * x) * 1.2e-7 + 4e-7, "cdf({x}) off by {off:e}");
    }
}

#[test]
fn exponentials_are_a_few_ulp_from_f64() {
    accurate::<Plain>();
    accurate::<Fused>();
}

fn special<F: Fma>() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let exp = exp::<F>;
    assert_eq!((exp(-inf), exp(inf), exp(0.0)), (0.0, inf, 1.0));
    assert_eq!((exp(88.73), exp(1e30), exp(-1e30)), (inf, inf, 0.0));
    assert!(exp(88.3).is_finite());
    assert!((-200..-87).all(|x| exp(x as f32) < 1.2e-38));
    assert!(
        exp(nan).is_nan() && tanh::<F>(nan).is_nan() && times_sigmoid::<F>(1.0, sigmoid_range(nan)).is_nan()
    );
    assert!(sigmoid_pair::<F>(sigmoid_range(nan)).0.is_nan() && normal_cdf_pdf::<F>(nan).0.is_nan());
    let (low, high) = (sigmoid_pair::<F>(sigmoid_range(-inf)), sigmoid_pair::<F>(sigmoid_range(inf)));
    assert!(low.0 < 1e-37 && low.1 == 1.0 && high == (1.0, 0.0));
    assert_eq!((tanh::<F>(inf), tanh::<F>(-inf)), (1.0, -1.0));
    assert_eq!(tanh::<F>(-0.0).to_bits(), (-0f32).to_bits());
    assert_eq!((normal_cdf_pdf::<F>(inf), normal_cdf_pdf::<F>(-inf)), ((1.0, 0.0), (0.0, 0.0)));
    let tiny = f32::from_bits(1);
    assert_eq!((tanh::<F>(tiny), exp(tiny)), (tiny, 1.0));
}

#[test]
fn special_values() {
    special::<Plain>();
    special::<Fused>();
}
