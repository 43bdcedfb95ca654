//! f32 GEMMs in bf16 parts (AMX) beside plain f32: errors against f64, infinities and NaN, huge and tiny values.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_kernels::cpu::gemm::{Epilogue, GemmShape, gemm_f32};
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_tensor::Threads;

/// Numbers in -1..1 from a linear congruential generator.
fn units(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// `C[m, n] = A[m, k]·B[k, n]` with operands in row-major order.
struct Product {
    m: usize,
    n: usize,
    k: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Product {
    fn random(seed: u64, [m, n, k]: [usize; 3]) -> Product {
        Product { m, n, k, a: units(seed, m * k), b: units(seed + 1, k * n) }
    }

    fn shape(&self) -> GemmShape {
        let Product { m, n, k, .. } = *self;
        GemmShape { m, n, k, trans_a: false, trans_b: false, lda: k, ldb: n, ldc: n }
    }

    fn run(&self, isa: Isa) -> Vec<f32> {
        let threads = Threads::new(2).unwrap();
        let mut c = vec![f32::NAN; self.m * self.n];
        let cpu = CpuContext { threads: &threads, isa };
        gemm_f32(cpu, self.shape(), &self.a, &self.b, Epilogue::OVERWRITE, &mut c);
        c
    }

    /// The same with both operands stored transposed.
    fn run_transposed(&self, isa: Isa) -> Vec<f32> {
        let Product { m, n, k, .. } = *self;
        let a: Vec<f32> = (0..k * m).map(|at| self.a[at % m * k + at / m]).collect();
        let b: Vec<f32> = (0..n * k).map(|at| self.b[at % k * n + at / k]).collect();
        let threads = Threads::new(1).unwrap();
        let mut c = vec![f32::NAN; m * n];
        let shape = GemmShape { trans_a: true, trans_b: true, lda: m, ldb: k, ..self.shape() };
        gemm_f32(CpuContext { threads: &threads, isa }, shape, &a, &b, Epilogue::OVERWRITE, &mut c);
        c
    }

    /// The largest error of an element in units of 2⁻²⁴ of the sum of its absolute terms.
    fn error(&self, c: &[f32]) -> f64 {
        let mut worst = 0.0f64;
        // Every seventh element, for speed.
        for (at, got) in c.iter().enumerate().step_by(7) {
            let (i, j) = (at / self.n, at % self.n);
            let terms =
                (0..self.k).map(|l| f64::from(self.a[i * self.k + l]) * f64::from(self.b[l * self.n + j]));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
            if size > 0.0 {
                worst = worst.max((f64::from(*got) - sum).abs() / size * 2f64.powi(24));
            }
        }
        worst
    }
}

/// Every level's error is below the bound of a plain f32 sum, and in parts it is no larger than with plain f32 vectors.
fn compare(what: &str, p: &Product) {
    let errors: Vec<(Isa, f64)> = Isa::all()
        .into_iter()
        .map(|isa| {
            let c = p.run(isa);
            assert!(c == p.run_transposed(isa), "{what} {isa:?}: the layout changes the result");
            (isa, p.error(&c))
        })
        .collect();
    println!("{what} {}x{}x{}, units of 2^-24: {errors:.2?}", p.m, p.n, p.k);
    assert!(errors.iter().all(|(_, error)| *error <= p.k as f64), "{what}: {errors:?}");
    if let [.., (Isa::Avx512, plain), (Isa::Amx, parts)] = errors[..] {
        assert!(parts <= plain, "{what}: {errors:?}");
    }
}

#[test]
fn errors_are_those_of_f32() {
    let sizes = [[128, 160, 128], [130, 133, 140], [129, 128, 256], [128, 140, 1100], [128, 128, 4096]];
    for (seed, size) in (1..).zip(sizes) {
        compare("random", &Product::random(seed, size));
        // Operands of 24 significant bits of one sign: no error cancels.
        let mut positive = Product::random(seed, size);
        positive.a.iter_mut().chain(&mut positive.b).for_each(|x| *x = x.abs() + 1.0);
        compare("positive", &positive);
        // Every row, column and term has its own scale.
        let mut scaled = Product::random(seed, size);
        let [m, n, k] = size;
        for at in 0..m * k {
            scaled.a[at] *= 2f32.powi((at / k % 23) as i32 * 2 - 22 + (at % k % 17) as i32);
        }
        for at in 0..k * n {
            scaled.b[at] *= 2f32.powi((at % n % 19) as i32 * 2 - 18 + (at / n % 7) as i32 * 3);
        }
        compare("badly scaled", &scaled);
        // Each term but the last is followed by its negative.
        let mut cancelling = Product::random(seed, size);
        for l in (1..k).step_by(2) {
            for j in 0..n {
                cancelling.b[l * n + j] = -cancelling.b[(l - 1) * n + j];
            }
            for i in 0..m {
                let x = cancelling.a[i * k + l - 1];
                cancelling.a[i * k + l] = x * (1.0 + 2f32.powi(-20));
            }
        }
        compare("cancelling", &cancelling);
    }
}

#[test]
fn infinities_and_nan_propagate_as_in_f32() {
    let clean = Product::random(5, [130, 140, 150]);
    let hostile = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::from_bits(0x7fff_ffff),
        f32::from_bits(0x7f80_0001),
    ];
    for value in hostile {
        let mut p = Product::random(5, [130, 140, 150]);
        // Zeros, and values whose lower parts are zero, meet it.
        for j in 0..p.n {
            p.b[7 * p.n + j] = [1.0, -2.0, 0.0, 0.7][j % 4];
        }
        let before: Vec<Vec<f32>> = Isa::all().into_iter().map(|isa| p.run(isa)).collect();
        p.a[3 * p.k + 7] = value;
        let want = p.run(Isa::Portable);
        for (isa, before) in Isa::all().into_iter().zip(before) {
            let got = p.run(isa);
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                let same = if at / p.n == 3 {
                    got == want || (got.is_nan() && want.is_nan())
                } else {
                    *got == before[at]
                };
                assert!(same, "{isa:?} {value}: {got} instead of {want} at {at}");
            }
        }
    }
    assert!(Isa::all().into_iter().all(|isa| clean.run(isa).iter().all(|x| x.is_finite())));
}

#[test]
fn huge_and_tiny_values_keep_their_bits() {
    // bf16 rounds the first to infinity; the lowest part of the second is just above the subnormals.
    for (a, b) in [(f32::MAX, 0.75), (-f32::MAX, 0.5), (1.999_999_9 * 2f32.powi(-103), 2f32.powi(60))] {
        let mut p = Product::random(6, [130, 128, 128]);
        p.a.fill(0.0);
        for i in 0..p.m {
            p.a[i * p.k + i % 128] = a;
        }
        p.b.fill(b);
        for isa in Isa::all() {
            assert!(p.run(isa).iter().all(|c| *c == a * b), "{isa:?} {a} * {b}: {}", p.run(isa)[0]);
        }
    }
}
