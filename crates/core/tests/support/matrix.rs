//! What the generated matrices share: which cases run, and when two results are equal. Test files include this module by `#[path]`.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)] // test code; each test uses its part

use ferrotron_core::grid::RankLayout;
use ferrotron_core::train::LogicalValues;

/// One rank.
pub fn one() -> RankLayout {
    RankLayout { dp: Some(1), ..RankLayout::default() }
}

/// Parses a layout.
pub fn layout(text: &str) -> RankLayout {
    let layout: RankLayout = text.parse().unwrap();
    RankLayout { dp: layout.dp.or(Some(1)), ..layout }
}

/// The cases that `FERROTRON_MATRIX` (`whole`, or the size of a sample), `FERROTRON_MATRIX_SEED` and `FERROTRON_MATRIX_ONLY`
/// (a part of the name) select. A selection that is misspelled or empty is a failure.
pub fn selected<C>(all: Vec<C>, default_count: usize, default_seed: u64, name: fn(&C) -> String) -> Vec<C> {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let seed = match variable("FERROTRON_MATRIX_SEED").as_str() {
        "" => default_seed,
        n => n.parse().expect("FERROTRON_MATRIX_SEED is a number"),
    };
    let mut cases = match variable("FERROTRON_MATRIX").as_str() {
        "whole" => all,
        "" => sample(all, default_count, seed),
        n => sample(all, n.parse().expect("FERROTRON_MATRIX is whole or a number"), seed),
    };
    let part = variable("FERROTRON_MATRIX_ONLY");
    cases.retain(|c| name(c).contains(&part));
    assert!(!cases.is_empty(), "no case of the matrix is selected");
    cases
}

/// A uniform sample by seed.
fn sample<C>(mut all: Vec<C>, count: usize, seed: u64) -> Vec<C> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    (0..count.min(all.len())).map(|_| all.swap_remove(next() % all.len())).collect()
}

fn largest(x: &[f32]) -> f64 {
    x.iter().fold(0.0, |m, v| m.max(f64::from(v.abs())))
}

/// The first tensor out of tolerance: f32 elementwise within 1e-5 of the largest value, bf16 within 1e-2 in l2 norm.
pub fn difference(ours: &[LogicalValues], wanted: &[LogicalValues], bf16: bool) -> Option<String> {
    if ours.len() != wanted.len() {
        return Some(format!("{} tensors instead of {}", ours.len(), wanted.len()));
    }
    for (o, w) in ours.iter().zip(wanted) {
        if (&o.name, &o.shape) != (&w.name, &w.shape) || o.values.len() != w.values.len() {
            return Some(format!("{} {:?} where {} {:?} belongs", o.name, o.shape, w.name, w.shape));
        }
        let pairs = || o.values.iter().zip(&w.values).map(|(a, b)| f64::from(a - b));
        if bf16 {
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
            let (apart, size) = (norm(&mut pairs()), norm(&mut w.values.iter().map(|v| f64::from(*v))));
            if apart.is_nan() || apart > 1e-2 * size + 1e-6 {
                return Some(format!("{}: {apart:.2e} of {size:.2e} apart", o.name));
            }
        } else {
            let room = 1e-5 * largest(&w.values) + 1e-7;
            if let Some((i, d)) = pairs().enumerate().find(|(_, d)| d.is_nan() || d.abs() > room) {
                let (a, b) = (o.values[i], w.values[i]);
                return Some(format!(
                    "{} [{i}]: {a} instead of {b}, {d:.1e} where {room:.1e} is allowed",
                    o.name
                ));
            }
        }
    }
    None
}
