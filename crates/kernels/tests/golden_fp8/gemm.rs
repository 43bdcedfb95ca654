//! GEMMs of quantized operands.

use super::areas;
use super::golden::{Tensors, count, list, only_keys, text};
use super::host::{Host, Input};
use ferrotron_kernels::cpu::CpuContext;
use ferrotron_kernels::cpu::quant::{MX_BLOCK, SmallBlocks, mxfp8_dequantize};
use ferrotron_kernels::{BlockAxis, Fp8Gemm, GemmKernels, QuantKernels, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::fp8::E4m3;
use ferrotron_tensor::{DType, Threads};

#[test]
fn golden_gemms() {
    let hosts = Host::all();
    for area in areas("gemm.safetensors") {
        let (json, t) = (area.json("quantize.json"), area.tensors("gemm.safetensors"));
        t.only_cases(list(&json, "gemm"));
        let mut report = area.report();
        for case in list(&json, "gemm") {
            let name = text(case, "name");
            report.case(&format!("gemm {name}"), || {
                only_keys(name, case, &["name", "m", "n", "k"]);
                hosts.iter().for_each(|h| gemms(h, case, &t));
            });
        }
        report.finish();
    }
}

/// Every GEMM of one case: `a [M, K]·b [N, K]ᵀ` of quantized operands.
fn gemms(h: &Host, case: &serde_json::Value, t: &Tensors) {
    let name = text(case, "name");
    let (a, [m, k]) = Input::read(t, &format!("{name}/a"), None);
    let (b, [n, _]) = Input::read(t, &format!("{name}/b"), None);
    assert_eq!([m, n, k], ["m", "n", "k"].map(|key| count(case, key)), "{name}");
    let mut kinds = t.names();
    kinds.retain(|full| {
        full.starts_with(&format!("{name}/")) && !full.ends_with("/a") && !full.ends_with("/b")
    });
    assert!(!kinds.is_empty(), "{name} has no results");
    for full in kinds {
        let wanted = t.f32(&full);
        let make = |x: &Input, shape: [usize; 2], format: DType, scaling: ScalingMode| {
            let (xt, out) = (x.tensor(h, shape), h.fp8_tensor(shape, format, scaling));
            let amax = h.up(&[0f32], &[1]);
            h.k.amax(&h.s, &xt, &amax).unwrap();
            let range = match scaling {
                ScalingMode::PerTensor => ScaleSource::Amax { amax: &amax, pow2: false },
                _ => ScaleSource::Blocks { pow2: true },
            };
            let q = Quantize { x: &xt, range, rows: Some(&out), cols: None, sums: None };
            h.k.quantize(&h.s, &q).unwrap();
            out
        };
        let gemm = |fa, sa, fb, sb| {
            let (a, b) = (make(&a, [m, k], fa, sa), make(&b, [n, k], fb, sb));
            let c = h.up(&vec![f32::NAN; m * n], &[m, n]);
            let g =
                Fp8Gemm { a: &a, b: &b, bias: None, accumulate: false, fast: false, name: "fp8_gemm", c: &c };
            h.k.fp8_gemm(&h.s, &g).unwrap();
            h.f32(&c)
        };
        let e4 = DType::E4M3;
        let ours = match full.rsplit_once('/').unwrap().1 {
            "current" => gemm(e4, ScalingMode::PerTensor, DType::E5M2, ScalingMode::PerTensor),
            "block_1d2d" => gemm(e4, ScalingMode::Block1x128, e4, ScalingMode::Block128x128),
            "block_1d1d" => gemm(e4, ScalingMode::Block1x128, e4, ScalingMode::Block1x128),
            "mxfp8" => {
                let (a, b) = (mx_values(h, &a, [m, k]), mx_values(h, &b, [n, k]));
                let dot = |i: usize, j: usize| {
                    let pairs = a[i * k..][..k].iter().zip(&b[j * k..][..k]);
                    pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
                };
                (0..m * n).map(|i| dot(i / n, i % n)).collect()
            }
            other => panic!("the format has no GEMM {other}"),
        };
        for (row, (ours, wanted)) in ours.chunks(n).zip(wanted.chunks(n)).enumerate() {
            let norm = wanted.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().sqrt();
            for (o, w) in ours.iter().zip(wanted) {
                let off = (f64::from(*o) - f64::from(*w)).abs();
                assert!(off <= 1e-5 * norm, "{full} {:?} row {row}: {o} {w}", h.isa);
            }
        }
    }
}

fn mx_values(h: &Host, x: &Input, shape: [usize; 2]) -> Vec<f32> {
    let grid = SmallBlocks::new(shape, MX_BLOCK, BlockAxis::Rows, false);
    let (codes, scales) = x.mxfp8(h.isa, grid, DType::E4M3);
    let codes: Vec<E4m3> = codes.into_iter().map(E4m3).collect();
    let mut out = vec![0f32; codes.len()];
    mxfp8_dequantize(CpuContext::new(&Threads::new(1).unwrap(), h.isa), grid, &codes, &scales, &mut out)
        .unwrap();
    out
}
