//! MXFP8 and NVFP4 operands and their GEMMs against the emulation of these formats.

use super::devices::{TestDevice, numbers};
use super::microscaling::ways;
use super::quant_oracle::*;
use ferrotron_kernels::cpu::CpuKernels;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{
    BlockAxis, EmulatedFormat, Gemm, Kernels, MicroscaledGemm, MicroscaledTensor, MicroscalingKernels,
};
use ferrotron_tensor::{Category, DType, Tensor, bf16};

fn filled_with(h: &TestDevice, how: EmulatedFormat, shape: [usize; 2], byte: u8) -> MicroscaledTensor {
    let q = MicroscaledTensor::empty(&h.s, how, shape, Category::Workspace).unwrap();
    for t in [&q.data, &q.scales] {
        let bytes = t.as_bytes().unwrap();
        h.s.upload_into(&bytes, &vec![byte; bytes.numel()]).unwrap();
    }
    q
}

fn raw_bytes(h: &TestDevice, t: &Tensor) -> Vec<u8> {
    h.s.download::<u8>(&t.as_bytes().unwrap()).unwrap()
}

/// Codes and scales are the host's, byte for byte and padding included, and dequantize to the bits of the emulation.
#[test]
fn operands_have_the_bits_of_the_emulation() {
    everywhere(|h, _| {
        let host_kernels = CpuKernels::detect();
        let mut number = 0;
        for [r, c] in [[1, 1], [15, 127], [129, 33], [64, 96], [37, 50], [2, 300], [0, 3], [3, 0]] {
            for kind in KINDS {
                for how in ways(RandomStream { key: [number as u32, 2], lane: [3, 4] }) {
                    number += 1;
                    let dtype = [DType::F32, DType::BF16, DType::F16][number % 3];
                    let what = format!("{} {kind} {dtype} [{r}, {c}] {how:?}", h.name);
                    let m = Matrix { r, c, x: hostile(kind, dtype, number as u64, r * c) };
                    let x = place(h, dtype, &m, true);
                    let (ours, reference) =
                        (filled_with(h, how, [r, c], 0xa5), filled_with(h, how, [r, c], 0x5a));
                    h.k.microscale(&h.s, how, &x, &ours).unwrap();
                    host_kernels.microscale(&h.s, how, &x, &reference).unwrap();
                    assert!(raw_bytes(h, &ours.scales) == raw_bytes(h, &reference.scales), "{what}: scales");
                    // NaN has several codes.
                    if !m.x.iter().any(|x| x.is_nan()) {
                        assert!(raw_bytes(h, &ours.data) == raw_bytes(h, &reference.data), "{what}: codes");
                    }
                    let [back, rounded] =
                        [0, 1].map(|_| Tensor::empty(&h.s, &[r, c], dtype, Category::Workspace).unwrap());
                    h.k.dequantize_microscaled(&h.s, &ours, &back).unwrap();
                    h.k.emulate(&h.s, how, &x, &rounded).unwrap();
                    same(&what, &host(h, &back), &host(h, &rounded));
                }
            }
        }
    });
}

/// The formats of a linear layer's GEMMs: fprop, dgrad, wgrad.
fn gemms() -> Vec<[EmulatedFormat; 2]> {
    use BlockAxis::{Cols, Rows};
    let mx = |format, along| EmulatedFormat::Mxfp8 { format, along, square: false };
    let stream = RandomStream { key: [7, 8], lane: [9, 10] };
    let nv = |along, square, hadamard, random: bool| EmulatedFormat::Nvfp4 {
        along,
        square,
        hadamard,
        stochastic: random.then_some(stream),
    };
    vec![
        [mx(DType::E4M3, Rows), mx(DType::E4M3, Rows)],
        [mx(DType::E5M2, Rows), mx(DType::E4M3, Cols)],
        [mx(DType::E5M2, Cols), mx(DType::E4M3, Cols)],
        [nv(Rows, false, false, false), nv(Rows, true, false, false)],
        [nv(Rows, false, false, true), nv(Cols, true, false, false)],
        [nv(Cols, false, true, true), nv(Cols, false, true, false)],
    ]
}

/// Where tensor cores multiply the formats, the result is close to that of f64; elsewhere it has the bits of the emulation.
#[test]
fn gemms_match_the_emulation() {
    everywhere(|h, _| {
        let in_hardware = h.k.takes_microscaled();
        if h.name == "CUDA" && !in_hardware {
            eprintln!("hardware MXFP8 and NVFP4 GEMMs skipped: needs compute capability 10.0");
        }
        let mut number = 0;
        for [m, n, depth] in [[1, 8, 32], [128, 128, 128], [144, 80, 96], [40, 33, 300], [256, 272, 544]] {
            for formats in gemms() {
                for (dtype, accumulate, biased) in
                    [(DType::BF16, false, true), (DType::F32, true, false), (DType::F32, false, false)]
                {
                    number += 1;
                    check(h, number, [m, n, depth], formats, (dtype, accumulate, biased));
                }
            }
        }
    });
}

fn check(
    h: &TestDevice,
    number: u64,
    [m, n, depth]: [usize; 3],
    formats: [EmulatedFormat; 2],
    (dtype, accumulate, biased): (DType, bool, bool),
) {
    let k: &dyn Kernels = &*h.k;
    let what = format!("{} {m}x{n}x{depth} {formats:?} {dtype} onto {accumulate} bias {biased}", h.name);
    // A matrix, its operand, and its emulated values.
    let operand = |seed, rows, how: EmulatedFormat| {
        let is_stored = how.along() == BlockAxis::Rows;
        let shape = if is_stored { [rows, depth] } else { [depth, rows] };
        let values = numbers(DType::BF16, seed, rows * depth).iter().map(|x| *x as f32).collect();
        let x = place(h, DType::BF16, &Matrix { r: shape[0], c: shape[1], x: values }, false);
        let q = filled_with(h, how, shape, 0x7f);
        k.microscale(&h.s, how, &x, &q).unwrap();
        let rounded = Tensor::empty(&h.s, &shape, DType::BF16, Category::Workspace).unwrap();
        k.emulate(&h.s, how, &x, &rounded).unwrap();
        (q, rounded, is_stored)
    };
    let (a, a_rounded, a_stored) = operand(number, m, formats[0]);
    let (b, b_rounded, b_stored) = operand(number + 1000, n, formats[1]);
    let before: Vec<f32> = numbers(DType::F32, number, m * n).iter().map(|x| *x as f32).collect();
    let start = if accumulate { before.clone() } else { vec![f32::NAN; m * n] };
    let [c, emulated] = [0, 1].map(|_| place(h, dtype, &Matrix { r: m, c: n, x: start.clone() }, false));
    let bias_values: Vec<bf16> = numbers(DType::BF16, number, n).iter().map(|x| bf16::from_f64(*x)).collect();
    let bias = h.s.upload(&bias_values, &[n], Category::Workspace).unwrap();
    let bias = biased.then_some(&bias);
    let name = "gemm (output, fp8)";
    k.microscaled_gemm(&h.s, &MicroscaledGemm { a: &a, b: &b, bias, accumulate, name, c: &c }).unwrap();
    let (trans_a, trans_b) = (!a_stored, b_stored);
    let g = Gemm { a: &a_rounded, trans_a, b: &b_rounded, trans_b, bias, accumulate, c: &emulated };
    k.gemm(&h.s, &g).unwrap();
    let ours = host(h, &c);
    if !k.takes_microscaled() {
        return same(&what, &ours, &host(h, &emulated));
    }
    // In f32, where the emulation rounds to bf16.
    let values = |q: &MicroscaledTensor| {
        let out = Tensor::empty(&h.s, &q.matrix_shape(), DType::F32, Category::Workspace).unwrap();
        k.dequantize_microscaled(&h.s, q, &out).unwrap();
        host(h, &out)
    };
    let (av, bv) = (values(&a), values(&b));
    let at = |v: &[f32], stored: bool, rows: usize, i: usize, d: usize| {
        f64::from(if stored { v[i * depth + d] } else { v[d * rows + i] })
    };
    for i in 0..m {
        let terms = |j: usize| {
            let term = |d| at(&av, a_stored, m, i, d) * at(&bv, b_stored, n, j, d);
            (0..depth).map(term).collect::<Vec<_>>()
        };
        // Expected norm of a row with random signs: single sums may cancel.
        let norm = (0..n).map(|j| terms(j).iter().map(|t| t * t).sum::<f64>()).sum::<f64>().sqrt();
        let room = 2e-3 * norm;
        for j in 0..n {
            let old = if accumulate { f64::from(before[i * n + j]) } else { 0.0 };
            let extra = if biased { bias_values[j].to_f64() } else { 0.0 };
            let want = terms(j).iter().sum::<f64>() + old + extra;
            let digits = if dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-22) };
            let off = (f64::from(ours[i * n + j]) - want).abs();
            let allowed = room + digits * (want.abs() + old.abs() + extra.abs());
            assert!(off <= allowed, "{what} [{i}, {j}]: off {off:e} of {want}, {allowed:e}");
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    everywhere(|h, _| {
        let mx = |format, along| EmulatedFormat::Mxfp8 { format, along, square: false };
        let nv = |hadamard| EmulatedFormat::Nvfp4 {
            along: BlockAxis::Rows,
            square: false,
            hadamard,
            stochastic: None,
        };
        let make = |how, shape| filled_with(h, how, shape, 0);
        let rows = mx(DType::E4M3, BlockAxis::Rows);
        let x = place(h, DType::F32, &Matrix { r: 8, c: 32, x: vec![1.0; 256] }, false);
        for (what, out) in [
            ("format", make(mx(DType::E5M2, BlockAxis::Rows), [8, 32])),
            ("orientation", make(mx(DType::E4M3, BlockAxis::Cols), [8, 32])),
            ("shape", make(rows, [8, 33])),
            ("FP4", make(nv(false), [8, 32])),
        ] {
            assert!(h.k.microscale(&h.s, rows, &x, &out).is_err(), "{what}");
        }
        let c = place(h, DType::F32, &Matrix { r: 8, c: 8, x: vec![0.0; 64] }, false);
        let e5 = make(mx(DType::E5M2, BlockAxis::Rows), [8, 32]);
        let good = make(rows, [8, 32]);
        for (what, a, b) in [
            ("two E5M2", &e5, &e5),
            ("sizes", &good, &make(rows, [8, 64])),
            ("formats", &good, &make(nv(false), [8, 32])),
            ("transform", &make(nv(true), [8, 32]), &make(nv(false), [8, 32])),
            ("rows", &make(rows, [9, 32]), &good),
        ] {
            let g = MicroscaledGemm { a, b, bias: None, accumulate: false, name: "gemm", c: &c };
            assert!(h.k.microscaled_gemm(&h.s, &g).is_err(), "{what}");
        }
    });
}
