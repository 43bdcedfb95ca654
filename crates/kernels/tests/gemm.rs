//! CPU GEMM against f64, on every instruction-set level of this machine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/support/rng.rs"]
mod rng;

use ferrotron_kernels::cpu::gemm::{Epilogue, GemmShape, gemm_bf16, gemm_f32};
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_tensor::{Float, Threads, bf16};
use rng::SeededRng as Random;

impl Random {
    /// Uniform in -1..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn flip(&mut self) -> bool {
        self.next() & 1 == 1
    }
}

/// A GEMM: operands in their storage layout, and C with the elements between its rows.
struct Case<T, C> {
    shape: GemmShape,
    a: Vec<T>,
    b: Vec<T>,
    bias: Option<Vec<T>>,
    accumulate: bool,
    c: Vec<C>,
}

impl<T: Float, C: Float> Case<T, C> {
    fn new(
        random: &mut Random,
        (m, n, k): (usize, usize, usize),
        value: &mut dyn FnMut(&mut Random) -> f32,
    ) -> Self {
        let (trans_a, trans_b) = (random.flip(), random.flip());
        let mut pad = |cols: usize| cols + random.below(3) * random.below(20);
        let (lda, ldb, ldc) = (pad(if trans_a { m } else { k }), pad(if trans_b { k } else { n }), pad(n));
        let shape = GemmShape { m, n, k, trans_a, trans_b, lda, ldb, ldc };
        let mut fill = |rows: usize, cols: usize, ld: usize| -> Vec<f32> {
            let len = if rows == 0 { 0 } else { (rows - 1) * ld + cols };
            (0..len).map(|_| value(random)).collect()
        };
        let (ar, ac) = if trans_a { (k, m) } else { (m, k) };
        let (br, bc) = if trans_b { (n, k) } else { (k, n) };
        let (a, b, bias, c) = (fill(ar, ac, lda), fill(br, bc, ldb), fill(1, n, n), fill(m, n, ldc));
        let narrow = |v: Vec<f32>| v.into_iter().map(T::from_f32).collect::<Vec<T>>();
        Case {
            shape,
            a: narrow(a),
            b: narrow(b),
            bias: random.flip().then(|| narrow(bias)),
            accumulate: random.flip(),
            c: c.into_iter().map(C::from_f32).collect(),
        }
    }

    fn a(&self, i: usize, l: usize) -> T {
        let s = &self.shape;
        self.a[if s.trans_a { l * s.lda + i } else { i * s.lda + l }]
    }

    fn b(&self, l: usize, j: usize) -> T {
        let s = &self.shape;
        self.b[if s.trans_b { j * s.ldb + l } else { l * s.ldb + j }]
    }

    /// The exact result of element `i, j`, the sum of the absolute values of its terms, and their number.
    /// With `flush`, subnormal operands count as zero.
    fn exact(&self, i: usize, j: usize, flush: bool) -> (f64, f64, usize) {
        let wide = |x: T| if flush && x.to_f32().is_subnormal() { 0.0 } else { x.to_f64() };
        let mut terms: Vec<f64> =
            (0..self.shape.k).map(|l| wide(self.a(i, l)) * wide(self.b(l, j))).collect();
        terms.extend(self.bias.as_ref().map(|b| b[j].to_f64()));
        terms.extend(self.accumulate.then(|| self.c[i * self.shape.ldc + j].to_f64()));
        (terms.iter().sum(), terms.iter().map(|t| t.abs()).sum(), terms.len())
    }

    fn epilogue(&self) -> Epilogue<'_, T> {
        Epilogue { bias: self.bias.as_deref(), accumulate: self.accumulate }
    }

    /// Checks `got` against the definition, elementwise; elements between the rows must be unchanged.
    fn check(&self, isa: Isa, flush: bool, got: &[C]) {
        let GemmShape { m, n, ldc, .. } = self.shape;
        let context = format!(
            "{} {isa:?} {:?} bias {} accumulate {}",
            std::any::type_name::<(T, C)>(),
            self.shape,
            self.bias.is_some(),
            self.accumulate
        );
        // Each multiplication and each addition rounds at most once in f32; a bf16 C rounds once more.
        let bf16_error = if size_of::<C>() == 2 { 2f64.powi(-8) } else { 0.0 };
        let tiny = if flush { 2f64.powi(-126) } else { 2f64.powi(-149) };
        for (at, (new, old)) in got.iter().zip(&self.c).enumerate() {
            let (i, j) = (at / ldc.max(1), at % ldc.max(1));
            if j >= n || i >= m {
                let (new, old) = (new.to_f32().to_bits(), old.to_f32().to_bits());
                assert_eq!(new, old, "{context} outside at {i},{j}");
                continue;
            }
            let (exact, size, terms) = self.exact(i, j, flush);
            let new = new.to_f64();
            let sum_error = 1.01 * (terms + 1) as f64 * 2f64.powi(-24) * size + (terms + 1) as f64 * tiny;
            let bound = sum_error + bf16_error * (exact.abs() + sum_error);
            let right = if exact.is_nan() {
                new.is_nan()
            } else if exact.is_infinite() {
                new == exact
            } else {
                (new - exact).abs() <= bound
            };
            assert!(right, "{context} at {i},{j}: {new} instead of {exact} ± {bound}");
        }
    }
}

trait CpuGemm: Sized {
    fn gemm<C: Float>(case: &Case<Self, C>, cpu: CpuContext) -> Vec<C>;
}

impl CpuGemm for f32 {
    fn gemm<C: Float>(case: &Case<f32, C>, cpu: CpuContext) -> Vec<C> {
        let mut c: Vec<f32> = case.c.iter().map(|x| x.to_f32()).collect();
        gemm_f32(cpu, case.shape, &case.a, &case.b, case.epilogue(), &mut c);
        c.into_iter().map(C::from_f32).collect()
    }
}

impl CpuGemm for bf16 {
    fn gemm<C: Float>(case: &Case<bf16, C>, cpu: CpuContext) -> Vec<C> {
        let mut c = case.c.clone();
        gemm_bf16(cpu, case.shape, &case.a, &case.b, case.epilogue(), &mut c);
        c
    }
}

fn threads(count: usize) -> Threads {
    Threads::new(count).unwrap()
}

/// Runs one shape with random layout, bias and accumulation on every level.
fn try_shape<T: Float + CpuGemm, C: Float>(
    random: &mut Random,
    threads: &Threads,
    size: (usize, usize, usize),
    value: &mut dyn FnMut(&mut Random) -> f32,
) {
    let case = Case::<T, C>::new(random, size, value);
    for isa in Isa::all() {
        let flush = isa == Isa::Amx && size_of::<T>() == 2;
        case.check(isa, flush, &T::gemm(&case, CpuContext::new(threads, isa)));
    }
}

fn try_types(
    random: &mut Random,
    threads: &Threads,
    size: (usize, usize, usize),
    value: &mut dyn FnMut(&mut Random) -> f32,
) {
    try_shape::<f32, f32>(random, threads, size, value);
    try_shape::<bf16, bf16>(random, threads, size, value);
    try_shape::<bf16, f32>(random, threads, size, value);
}

#[test]
fn random_shapes_match_the_f64_reference() {
    let (mut random, threads) = (Random(1), threads(2));
    const EDGES: [usize; 17] = [0, 1, 2, 3, 7, 13, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 97];
    for _ in 0..400 {
        let mut pick = || EDGES[random.below(EDGES.len())];
        let size = (pick(), pick(), pick());
        try_types(&mut random, &threads, size, &mut Random::unit);
    }
}

#[test]
fn every_layout_matches_the_f64_reference() {
    let (mut random, threads) = (Random(2), threads(2));
    for (m, n, k) in [(37, 41, 35), (64, 64, 64), (1, 33, 67), (65, 1, 31), (33, 34, 0)] {
        for bits in 0..16 {
            let mut case = Case::<bf16, bf16>::new(&mut random, (m, n, k), &mut Random::unit);
            let s = &mut case.shape;
            (s.trans_a, s.trans_b) = (bits & 1 != 0, bits & 2 != 0);
            (s.lda, s.ldb) = (if s.trans_a { m } else { k } + 1, if s.trans_b { k } else { n } + 2);
            let mut draw = |len: usize| (0..len).map(|_| bf16::from_f32(random.unit())).collect::<Vec<_>>();
            case.a = draw(if s.trans_a { k } else { m } * s.lda);
            case.b = draw(if s.trans_b { n } else { k } * s.ldb);
            case.bias = (bits & 4 != 0).then(|| draw(n));
            case.accumulate = bits & 8 != 0;
            for isa in Isa::all() {
                case.check(isa, isa == Isa::Amx, &bf16::gemm(&case, CpuContext::new(&threads, isa)));
            }
        }
    }
}

#[test]
fn shapes_of_several_tiles_match_the_f64_reference() {
    let (mut random, threads) = (Random(3), threads(2));
    for size in [
        (300, 70, 600),
        (70, 700, 150),
        (257, 515, 33),
        (33, 65, 2100),
        (129, 1100, 65),
        // Slabs of panels and of k; many blocks of k in a slab.
        (30, 2100, 300),
        (29, 40, 5000),
        // So many rows that each thread packs B for itself.
        (770, 40, 290),
    ] {
        try_types(&mut random, &threads, size, &mut Random::unit);
    }
}

#[test]
fn special_values_follow_ieee() {
    let (mut random, threads) = (Random(4), threads(2));
    // No values whose product could overflow f32 on the way to a finite sum.
    const VALUES: [f32; 12] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1e-30,
        -1e-30,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-40,
        -1e-40,
        1e18,
    ];
    for round in 0..200 {
        let size = (1 + random.below(40), 1 + random.below(40), random.below(70));
        // Special values are frequent in some rounds and rare in others, so that some results stay finite.
        let one_in = 1 + 60 * (round % 3);
        let value =
            &mut |r: &mut Random| if r.below(one_in) == 0 { VALUES[r.below(VALUES.len())] } else { 0.5 };
        try_types(&mut random, &threads, size, value);
    }
}

#[test]
fn old_output_is_not_read_without_accumulate() {
    let threads = threads(1);
    for isa in Isa::all() {
        let cpu = CpuContext::new(&threads, isa);
        let shape = GemmShape { m: 3, n: 5, k: 2, trans_a: false, trans_b: false, lda: 2, ldb: 5, ldc: 5 };
        let mut c = [f32::NAN; 15];
        gemm_f32(cpu, shape, &[1.0; 6], &[2.0; 10], Epilogue::OVERWRITE, &mut c);
        assert_eq!(c, [4.0; 15]);
        let mut c = [bf16::NAN; 15];
        gemm_bf16(cpu, shape, &[bf16::ONE; 6], &[bf16::ONE; 10], Epilogue::OVERWRITE, &mut c);
        assert_eq!(c, [bf16::from_f32(2.0); 15]);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut random = Random(5);
    for size in [
        (1, 1, 1),
        (70, 90, 50),
        (300, 300, 700),
        (600, 40, 300),
        (40, 1300, 90),
        (1, 9000, 513),
        (193, 257, 1537),
        // Few threads pack B for themselves, more of them share the packing; slabs of panels and of k.
        (780, 1100, 300),
        (780, 64, 5000),
    ] {
        let bf16_out = Case::<bf16, bf16>::new(&mut random, size, &mut Random::unit);
        let f32_out = Case::<bf16, f32>::new(&mut random, size, &mut Random::unit);
        let f32_in = Case::<f32, f32>::new(&mut random, size, &mut Random::unit);
        for isa in Isa::all() {
            let results = [1, 2, 3, 16].map(|count| {
                let threads = threads(count);
                let cpu = CpuContext::new(&threads, isa);
                let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                (
                    bf16::gemm(&bf16_out, cpu).into_iter().map(bf16::to_bits).collect::<Vec<_>>(),
                    bits(bf16::gemm(&f32_out, cpu)),
                    bits(f32::gemm(&f32_in, cpu)),
                )
            });
            assert!(results.iter().all(|r| *r == results[0]), "{isa:?} {size:?}");
        }
    }
}

#[test]
#[should_panic(expected = "B has 5 elements")]
fn a_short_operand_panics() {
    let shape = GemmShape { m: 2, n: 2, k: 3, trans_a: false, trans_b: false, lda: 3, ldb: 2, ldc: 2 };
    let threads = threads(1);
    let cpu = CpuContext::new(&threads, Isa::Portable);
    gemm_f32(cpu, shape, &[0.0; 6], &[0.0; 5], Epilogue::OVERWRITE, &mut [0.0; 4]);
}

/// A benchmark: `cargo test --release -p ferrotron-kernels --test gemm -- --ignored --nocapture speed`.
#[test]
#[ignore = "prints speeds"]
fn speed() {
    let only = std::env::var("GEMM_ISA").ok();
    let counts = std::env::var("GEMM_THREADS").ok().and_then(|t| t.parse().ok()).unwrap_or(2);
    let threads = threads(counts);
    // m, n, k, transposes, f32 output with accumulation.
    let shapes = [
        (4096, 768, 256, "NT", false),
        (4096, 256, 256, "NT", false),
        (4096, 1536, 256, "NT", false),
        (4096, 256, 768, "NT", false),
        (4096, 256, 768, "NN", false),
        (4096, 256, 256, "NN", false),
        (4096, 256, 1536, "NN", false),
        (4096, 768, 256, "NN", false),
        (768, 256, 4096, "TN", true),
        (256, 256, 4096, "TN", true),
        (1536, 256, 4096, "TN", true),
        (256, 768, 4096, "TN", true),
        (4096, 3072, 768, "NT", false),
        (1024, 1024, 1024, "NN", false),
        (2048, 2048, 2048, "NN", false),
    ];
    for (m, n, k, trans, wide) in shapes {
        let (trans_a, trans_b) = (&trans[..1] == "T", &trans[1..] == "T");
        let (lda, ldb) = (if trans_a { m } else { k }, if trans_b { k } else { n });
        let shape = GemmShape { m, n, k, trans_a, trans_b, lda, ldb, ldc: n };
        let (a, b) = (vec![bf16::from_f32(0.5); m * k], vec![bf16::from_f32(0.25); n * k]);
        let (mut c, mut cw) = (vec![bf16::ZERO; m * n], vec![0f32; m * n]);
        let (af, bf) = (vec![0.5f32; m * k], vec![0.25f32; n * k]);
        let flops = 2.0 * (m * n * k) as f64;
        let best = |work: &mut dyn FnMut()| {
            work();
            let start = std::time::Instant::now();
            let mut best = f64::MAX;
            while start.elapsed().as_secs_f64() < 0.25 {
                let t = std::time::Instant::now();
                work();
                best = best.min(t.elapsed().as_secs_f64());
            }
            flops / best / 1e9
        };
        print!("{m:5} {n:5} {k:5} {trans}:");
        for isa in Isa::all() {
            if isa == Isa::Portable || only.as_ref().is_some_and(|o| *o != format!("{isa:?}")) {
                continue;
            }
            let cpu = CpuContext::new(&threads, isa);
            let speed = best(&mut || match wide {
                true => gemm_bf16(cpu, shape, &a, &b, Epilogue::ACCUMULATE, &mut cw),
                false => gemm_bf16(cpu, shape, &a, &b, Epilogue::OVERWRITE, &mut c),
            });
            print!("  bf16 {isa:?} {speed:6.0}");
            if isa != Isa::Amx {
                let speed = best(&mut || {
                    gemm_f32(cpu, shape, &af, &bf, Epilogue { bias: None, accumulate: wide }, &mut cw)
                });
                print!("  f32 {isa:?} {speed:6.0}");
            }
        }
        println!(" GFLOP/s");
    }
}
