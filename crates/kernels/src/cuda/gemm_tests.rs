//! Every algorithm that the library offers, not only the tuned one, must compute the product, with the same bits each
//! time.

use super::CudaKernels;
use super::cublaslt::{Algorithm, Epilogue, GemmPointers, MatmulDesc};
use super::test_support::{self, gpu, uniform, upload};
use crate::{Act, Gemm, GemmChoice, GemmKernels, LinearAct, LinearWgrad, NewChoices};
use ferrotron_tensor::{Category, DType, Stream, Tensor, bf16, read, write};

/// Values in (-size, size), exact in bf16.
fn numbers(seed: u64, n: usize, size: f32) -> Vec<f32> {
    let mut draw = uniform(seed);
    (0..n).map(|_| bf16::from_f32(size * draw()).to_f32()).collect()
}

fn host(s: &Stream, t: &Tensor) -> Vec<f64> {
    test_support::host(s, t).into_iter().map(f64::from).collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// Largest error of `ours` relative to the bound that `roundings` roundings and an absolute error of `slack` give.
fn apart(dtype: DType, ours: &[f64], wanted: &[f64], slack: f64, roundings: f64) -> f64 {
    let eps = if dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-24) };
    let one = |(o, w): (&f64, &f64)| {
        let room = 1.01 * roundings * eps * (w.abs() + slack) + slack;
        if o.is_finite() { (o - w).abs() / room } else { f64::INFINITY }
    };
    ours.iter().zip(wanted).map(one).fold(0.0, f64::max)
}

/// Operands and epilogue of a GEMM.
struct Case<'a> {
    g: Gemm<'a>,
    bias: Option<(&'a Tensor, bool)>,
    aux: Option<(&'a Tensor, bool)>,
    epilogue: Epilogue,
}

impl Case<'_> {
    fn algorithms(&self, k: &CudaKernels) -> (MatmulDesc, Vec<Algorithm>) {
        let key = self.g.key(self.g.sizes().unwrap(), self.epilogue, self.aux.map(|b| b.0));
        let desc = MatmulDesc::new(&key).unwrap();
        let all = k.gemm_cache.library().algorithms(&key, &desc).unwrap();
        (desc, all)
    }

    fn run(&self, k: &CudaKernels, s: &Stream, desc: &MatmulDesc, algorithm: &Algorithm) {
        let arg = |(t, w): (_, bool)| if w { write(t) } else { read(t) };
        let scratch =
            Tensor::empty(s, &[algorithm.workspace.max(1)], DType::U8, Category::Workspace).unwrap();
        let mut args = vec![read(self.g.a), read(self.g.b), write(self.g.c), write(&scratch)];
        args.extend(self.bias.map(arg));
        args.extend(self.aux.map(arg));
        s.launch("gemm", &args, |l| {
            let [a, b, c, workspace] = [0, 1, 2, 3].map(|i| l.address(i).unwrap());
            let bias = self.bias.map_or(0, |_| l.address(4).unwrap());
            let aux = self.aux.map_or(0, |_| l.address(args.len() - 1).unwrap());
            let at = GemmPointers { a, b, c, bias, aux, scales: [0; 2], factors: 0, workspace };
            k.gemm_cache.library().run(l, desc, algorithm, &at, self.g.accumulate)
        })
        .unwrap();
    }

    /// Runs every algorithm twice and compares each output with the expected one, within a slack and a number of
    /// roundings.
    fn check(&self, k: &CudaKernels, s: &Stream, name: &str, outputs: &[(&Tensor, &[f64], f64, f64)]) {
        let (desc, all) = self.algorithms(k);
        let mut worst = vec![0f64; outputs.len()];
        for algorithm in &all {
            self.run(k, s, &desc, algorithm);
            let once: Vec<Vec<f64>> = outputs.iter().map(|(t, ..)| host(s, t)).collect();
            for ((worst, (t, wanted, slack, roundings)), ours) in worst.iter_mut().zip(outputs).zip(&once) {
                *worst = worst.max(apart(t.dtype(), ours, wanted, *slack, *roundings));
                s.zero(t).unwrap();
            }
            self.run(k, s, &desc, algorithm);
            let twice: Vec<Vec<f64>> = outputs.iter().map(|(t, ..)| host(s, t)).collect();
            assert!(once == twice, "{name}: two runs of one algorithm differ");
        }
        println!("{name}: {} algorithms, at most {worst:.3?} of what rounding allows", all.len());
        assert!(worst.iter().all(|w| *w <= 1.0), "{name}: {worst:?}");
    }
}

#[test]
fn every_algorithm_matches_f64() {
    let Some((k, s)) = gpu() else { return };
    let (m, n, deep) = (256, 384, 320);
    let (a, b) = (numbers(1, m * deep, 1.0), numbers(2, n * deep, 0.5));
    let bias = numbers(3, n, 1.0);
    let (at, bt) = (upload(&s, &a, &[m, deep]), upload(&s, &b, &[n, deep]));
    let bias_t = upload(&s, &bias, &[n]);
    let product: Vec<f64> = (0..m * n)
        .map(|i| {
            let (row, column) = (&a[i / n * deep..][..deep], &b[i % n * deep..][..deep]);
            row.iter().zip(column).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
        })
        .collect();
    let biased: Vec<f64> = product.iter().enumerate().map(|(i, x)| x + f64::from(bias[i % n])).collect();
    let slack = (deep + 2) as f64 * 2f64.powi(-23);
    let out = |dtype| s.zeros(&[m, n], dtype, Category::Workspace).unwrap();
    let (c, aux) = (out(DType::BF16), out(DType::BF16));
    let g = Gemm { a: &at, trans_a: false, b: &bt, trans_b: true, bias: None, accumulate: false, c: &c };
    let plain = Case { g, bias: None, aux: None, epilogue: Epilogue::None };
    plain.check(&k, &s, "plain", &[(&c, &product, slack, 1.0)]);
    let g = || Gemm { a: &at, trans_a: false, b: &bt, trans_b: true, bias: None, accumulate: false, c: &c };
    let with = Case { g: g(), bias: Some((&bias_t, false)), aux: None, epilogue: Epilogue::Bias };
    with.check(&k, &s, "bias", &[(&c, &biased, slack, 1.0)]);
    let wanted: Vec<f64> = biased.iter().map(|x| gelu(*x)).collect();
    let epilogue = Epilogue::Gelu { bias: true, ld: n };
    let fused = Case { g: g(), bias: Some((&bias_t, false)), aux: Some((&aux, true)), epilogue };
    fused.check(&k, &s, "GELU", &[(&aux, &biased, slack, 1.0), (&c, &wanted, slack, 1.0)]);
    // Rows are the batch: dy [deep, m], x [deep, n].
    let (dy, x) = (upload(&s, &a, &[deep, m]), upload(&s, &b, &[deep, n]));
    let wanted: Vec<f64> = (0..m * n)
        .map(|i| (0..deep).map(|r| f64::from(a[r * m + i / n]) * f64::from(b[r * n + i % n])).sum())
        .collect();
    let sums: Vec<f64> = (0..m).map(|i| (0..deep).map(|r| f64::from(a[r * m + i])).sum()).collect();
    let (dw, db) = (out(DType::F32), s.zeros(&[m], DType::F32, Category::Workspace).unwrap());
    let g = Gemm { a: &dy, trans_a: true, b: &x, trans_b: false, bias: None, accumulate: false, c: &dw };
    let grad = Case { g, bias: Some((&db, true)), aux: None, epilogue: Epilogue::BiasGrad };
    grad.check(&k, &s, "column sums", &[(&dw, &wanted, slack, 1.0), (&db, &sums, slack, 1.0)]);
}

/// Prints the times of fused epilogues and of separate kernels at the sizes of a small GPT.
#[test]
#[ignore = "prints times"]
fn bench_fused_epilogues() {
    let Some((k, s)) = gpu() else { return };
    let (rows, wide, narrow) = (65_536, 3072, 768);
    let make = |seed, shape: [usize; 2]| {
        let part = numbers(seed, shape[1] * 256, 1.0);
        let all: Vec<f32> = part.iter().copied().cycle().take(shape[0] * shape[1]).collect();
        upload(&s, &all, &shape)
    };
    let (x, w, dy) = (make(1, [rows, narrow]), make(2, [wide, narrow]), make(3, [rows, wide]));
    let bias = upload(&s, &numbers(5, wide, 1.0), &[wide]);
    let (h, y) = (make(4, [rows, wide]), make(6, [rows, wide]));
    let dw = s.zeros(&[wide, narrow], DType::F32, Category::Workspace).unwrap();
    let db = s.zeros(&[wide], DType::F32, Category::Workspace).unwrap();
    let time = |f: &dyn Fn()| {
        (0..3).for_each(|_| f());
        let all = (0..8).map(|_| {
            let start = s.record().unwrap();
            f();
            s.record().unwrap().since(&start).unwrap().as_secs_f64() * 1e3
        });
        all.fold(f64::INFINITY, f64::min)
    };
    let forward = LinearAct { act: Act::GeluTanh, x: &x, w: &w, bias: Some(&bias), h: &h, y: &y };
    let grad = LinearWgrad { dy: &dy, x: &x, dw: (&dw, false), db: (&db, false) };
    let gelu = Epilogue::Gelu { bias: true, ld: wide };
    let cases: [(&str, Case, &dyn Fn()); 2] = [
        (
            "GELU",
            Case {
                g: Gemm { bias: None, ..forward.gemm(&y) },
                bias: Some((&bias, false)),
                aux: Some((&h, true)),
                epilogue: gelu,
            },
            &|| k.linear_act_forward(&s, &forward).unwrap(),
        ),
        (
            "column sums",
            Case { g: grad.gemm(&dw), bias: Some((&db, true)), aux: None, epilogue: Epilogue::BiasGrad },
            &|| k.linear_wgrad(&s, &grad).unwrap(),
        ),
    ];
    for (name, case, chosen) in cases {
        let (desc, all) = case.algorithms(&k);
        let times: Vec<f64> =
            all.iter().map(|algorithm| time(&|| case.run(&k, &s, &desc, algorithm))).collect();
        println!("{name}: {times:.3?} ms fused, {:.3} ms as chosen", time(chosen));
    }
}

/// Prints the CPU launch overhead: of the library alone, and in total.
#[test]
#[ignore = "prints times"]
fn bench_launch_overhead() {
    let Some((k, s)) = gpu() else { return };
    let (m, n, deep) = (256, 384, 320);
    let (a, b) = (
        upload(&s, &numbers(1, m * deep, 1.0), &[m, deep]),
        upload(&s, &numbers(2, n * deep, 1.0), &[n, deep]),
    );
    let c = s.zeros(&[m, n], DType::BF16, Category::Workspace).unwrap();
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: None, accumulate: false, c: &c };
    let case = Case { g, bias: None, aux: None, epilogue: Epilogue::None };
    let (desc, all) = case.algorithms(&k);
    let scratch = Tensor::empty(&s, &[32 << 20], DType::U8, Category::Workspace).unwrap();
    let args = [read(&a), read(&b), write(&c), write(&scratch)];
    let (mut bare, mut whole, mut other) = (vec![], vec![], vec![]);
    for _ in 0..200 {
        s.synchronize().unwrap();
        let start = std::time::Instant::now();
        (0..16).for_each(|_| crate::GemmKernels::gemm(&k, &s, &case.g).unwrap());
        whole.push(start.elapsed().as_secs_f64() / 16.0 * 1e6);
        s.synchronize().unwrap();
        s.launch("gemm", &args, |l| {
            let [a, b, c, workspace] = [0, 1, 2, 3].map(|i| l.address(i).unwrap());
            let at = GemmPointers { a, b, c, bias: 0, aux: 0, scales: [0; 2], factors: 0, workspace };
            let start = std::time::Instant::now();
            (0..16).for_each(|_| k.gemm_cache.library().run(l, &desc, &all[0], &at, false).unwrap());
            bare.push(start.elapsed().as_secs_f64() / 16.0 * 1e6);
            Ok(())
        })
        .unwrap();
        s.synchronize().unwrap();
        let start = std::time::Instant::now();
        (0..16).for_each(|_| crate::ElementwiseKernels::scale(&k, &s, &c, 1.0).unwrap());
        other.push(start.elapsed().as_secs_f64() / 16.0 * 1e6);
    }
    [&mut bare, &mut whole, &mut other].into_iter().for_each(|v| v.sort_by(f64::total_cmp));
    println!(
        "us of the host: {:.2} in the library, {:.2} in all; {:.2} for a kernel of ours",
        bare[100], whole[100], other[100]
    );
}

/// A GEMM that is large enough to be tuned.
fn large(s: &Stream) -> [Tensor; 3] {
    let n = 1536;
    let [a, b] = [1, 2].map(|seed| upload(s, &numbers(seed, n * n, 1.0), &[n, n]));
    [a, b, s.zeros(&[n, n], DType::F32, Category::Workspace).unwrap()]
}

#[test]
fn a_choice_of_the_job_is_used_and_a_proposal_is_not_until_it_is_shared() {
    let Some((k, s)) = gpu() else { return };
    let (library, [a, b, c]) = (k.gemm_library().unwrap(), large(&s));
    let product = Gemm { a: &a, trans_a: true, b: &b, trans_b: false, bias: None, accumulate: false, c: &c };
    let case = Case { g: product, bias: None, aux: None, epilogue: Epilogue::None };
    let (desc, all) = case.algorithms(&k);
    let of_algorithm = |algorithm| {
        case.run(&k, &s, &desc, algorithm);
        s.download::<f32>(&c).unwrap()
    };
    let run = |k: &CudaKernels| {
        s.zero(&c).unwrap();
        k.gemm(&s, &case.g).unwrap();
        s.download::<f32>(&c).unwrap()
    };
    // Proposed: the heuristics' favourite computes until the choice is shared.
    k.use_gemm_choices(&[], NewChoices::Proposed);
    assert!(run(&k) == of_algorithm(&all[0]));
    assert!(k.has_new_gemm_choices());
    let proposed = k.take_gemm_choices();
    assert_eq!((proposed.len(), k.has_new_gemm_choices()), (1, false));
    assert!(run(&k) == of_algorithm(&all[0]) && !k.has_new_gemm_choices());
    // Another rank uses what was chosen, whatever it is, and chooses nothing itself.
    let other = CudaKernels::load(s.device()).unwrap();
    assert_eq!(other.gemm_library().as_ref(), Some(&library));
    for algorithm in &all {
        let code: Vec<u8> = algorithm.code.data.iter().flat_map(|word| word.to_le_bytes()).collect();
        let word: String = [1].iter().chain(&code).map(|b| format!("{b:02x}")).collect();
        let choice = GemmChoice { gemm: proposed[0].gemm.clone(), algorithm: word };
        for k in [&k, &other] {
            k.use_gemm_choices(std::slice::from_ref(&choice), NewChoices::Proposed);
            assert!(run(k) == of_algorithm(algorithm));
            assert!(!k.has_new_gemm_choices());
        }
    }
    // What is no choice of this version is as if untuned.
    let unknown = GemmChoice { gemm: proposed[0].gemm.clone(), algorithm: "unknown".into() };
    k.use_gemm_choices(&[unknown], NewChoices::Used);
    assert!(run(&k) == of_algorithm(&all[0]));
    // Alone: the choice is used at once.
    k.use_gemm_choices(&[], NewChoices::Used);
    let at_once = run(&k);
    assert_eq!(k.take_gemm_choices(), proposed);
    other.use_gemm_choices(&proposed, NewChoices::Proposed);
    assert!(run(&other) == at_once);
}
