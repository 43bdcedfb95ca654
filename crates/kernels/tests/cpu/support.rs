//! Random inputs, comparisons, and the contexts that tests run in.

#[path = "../../../../tests/support/rng.rs"]
mod rng;

pub use rng::SeededRng as Random;

use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_tensor::{DType, Float, Threads};

/// Pools of one, two and five threads.
pub fn pools() -> Vec<Threads> {
    [1, 2, 5].map(|n| Threads::new(n).unwrap()).to_vec()
}

/// Runs with every thread count and instruction-set level; all results must be bit-equal. Returns the result.
pub fn everywhere<R: PartialEq + std::fmt::Debug>(run: impl Fn(CpuContext<'_>) -> R) -> R {
    let mut results = each_isa(run);
    let first = results.remove(0);
    for (level, result) in results.iter().enumerate() {
        assert!(first == *result, "instruction-set level {}: other bits", level + 1);
    }
    first
}

/// Runs with every thread count: at one instruction-set level all results must be bit-equal. Returns the result of each level,
/// which may differ where a level has fused multiply-add.
pub fn each_isa<R: PartialEq + std::fmt::Debug>(run: impl Fn(CpuContext<'_>) -> R) -> Vec<R> {
    let of = |isa: Isa| {
        let mut results: Vec<R> = pools().iter().map(|threads| run(CpuContext::new(threads, isa))).collect();
        results.push(run(CpuContext::new(&Threads::new(2).unwrap(), isa)));
        let first = results.remove(0);
        assert!(results.iter().all(|r| *r == first), "{}: other bits on other threads", isa.name());
        first
    };
    Isa::all().into_iter().map(of).collect()
}

impl Random {
    /// Approximately normal.
    pub fn normal(&mut self) -> f32 {
        (0..4).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum::<f32>() * 1.7
    }

    pub fn vec<T: Float>(&mut self, n: usize, scale: f32) -> Vec<T> {
        (0..n).map(|_| T::from_f32(self.normal() * scale)).collect()
    }
}

pub fn wide<T: Float>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// Relative rounding error of the dtype.
pub fn eps<T: Float>() -> f64 {
    match T::DTYPE {
        DType::BF16 => 2f64.powi(-8),
        DType::F32 => 2f64.powi(-24),
        other => panic!("{other}"),
    }
}

/// `|ours − wanted| <= rounding to T + relative·|wanted| + absolute`, element by element.
pub fn close<T: Float>(name: &str, ours: &[T], wanted: &[f64], relative: f64, absolute: f64) {
    assert_eq!(ours.len(), wanted.len(), "{name}: lengths");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        let (o, room) = (o.to_f64(), (1.001 * eps::<T>() + relative) * w.abs() + absolute);
        let same = (o.is_nan() && w.is_nan()) || o == *w || (o - w).abs() <= room;
        assert!(same, "{name}[{i}]: {o} instead of {w}, off by {:e}, allowed {room:e}", (o - w).abs());
    }
}
