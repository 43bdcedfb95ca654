//! Scales in the layout of cuBLASLt, and what happens where the library refuses microscaling formats. A GPU below compute
//! capability 10.0 is told to ask the library here, as it does nowhere else.

use super::microscale::StoredScales;
use super::tests::{empty_fp8, numbers};
use crate::cpu::quant::{global_scale, swizzle};
use crate::cuda::CudaKernels;
use crate::cuda::cublaslt::MatmulDesc;
use crate::cuda::test_support::gpu;
use crate::{
    BlockAxis, EmulatedFormat, Fp8Gemm, Fp8Tensor, GemmKernels, MicroscaledGemm, MicroscaledTensor,
    MicroscalingKernels, QuantKernels, Quantize, ScaleSource, ScalingMode,
};
use ferrotron_tensor::{Category, DType, Stream, Tensor};

fn values(s: &Stream, seed: u64, [r, c]: [usize; 2]) -> Tensor {
    s.upload(&numbers(seed, r, c), &[r, c], Category::Workspace).unwrap()
}

fn bytes(s: &Stream, t: &Tensor) -> Vec<u8> {
    s.download::<u8>(&t.as_bytes().unwrap()).unwrap()
}

/// The formats of wgrad: E5M2 by E4M3 in MXFP8, and NVFP4 after the Hadamard transform.
fn wgrad_formats() -> [[EmulatedFormat; 2]; 2] {
    let along = BlockAxis::Cols;
    let mx = |format| EmulatedFormat::Mxfp8 { format, along, square: false };
    let nv = EmulatedFormat::Nvfp4 { along, square: false, hadamard: true, stochastic: None };
    [[mx(DType::E5M2), mx(DType::E4M3)], [nv; 2]]
}

fn microscaled(k: &CudaKernels, s: &Stream, how: EmulatedFormat, x: &Tensor) -> MicroscaledTensor {
    let shape = [x.shape()[0], x.shape()[1]];
    let q = MicroscaledTensor::empty(s, how, shape, Category::Workspace).unwrap();
    k.microscale(s, how, x, &q).unwrap();
    q
}

fn block_scaled(k: &CudaKernels, s: &Stream, x: &Tensor, scaling: ScalingMode) -> Fp8Tensor {
    let out = empty_fp8(s, [x.shape()[0], x.shape()[1]], DType::E4M3, scaling);
    let range = ScaleSource::Blocks { pow2: true };
    k.quantize(s, &Quantize { x, range, rows: Some(&out), cols: None, sums: None }).unwrap();
    Fp8Tensor { pow2: true, ..out }
}

#[test]
fn scales_are_swizzled_as_on_the_host() {
    let Some((k, s)) = gpu() else { return };
    for [r, c] in [[1, 32], [128, 128], [129, 33], [300, 544], [5, 1000]] {
        for how in wgrad_formats().into_iter().flatten() {
            let q = microscaled(&k, &s, how, &values(&s, 5, [c, r]));
            let amax = q.amax.as_ref().map(|amax| [amax, amax]);
            let found = k.launch_swizzle(&s, [StoredScales::from(&q); 2], amax, true).unwrap();
            let shape = [q.rows(), q.scales.shape()[1]];
            let want = swizzle(&bytes(&s, &q.scales), shape);
            for scales in &found.scales {
                assert!(bytes(&s, scales) == want, "{how:?} [{r}, {c}]");
            }
            let factors = found.factors.map(|t| s.download::<f32>(&t).unwrap());
            let inverse = q.amax.map(|t| 1.0 / global_scale(s.download::<f32>(&t).unwrap()[0]));
            assert_eq!(factors, inverse.map(|x| vec![x * x, 1.0]), "{how:?} [{r}, {c}]");
        }
        // Power-of-two scales of blocks of 128 as E8M0 scales of 32 values.
        for scaling in [ScalingMode::Block1x128, ScalingMode::Block128x128] {
            let q = block_scaled(&k, &s, &values(&s, 6, [r, c]), scaling);
            let of = || StoredScales::of_blocks(&q).unwrap();
            let found = k.launch_swizzle(&s, [of(), of()], None, false).unwrap();
            assert!(found.factors.is_none());
            let (scales, width) = (s.download::<f32>(&q.scale_inv).unwrap(), q.scale_inv.shape()[1]);
            let across = q.data.shape()[1].div_ceil(32);
            let code = |at: usize| {
                let (row, block) = (at / across, at % across / 4);
                let scale = match scaling {
                    ScalingMode::Block1x128 => scales[block * width + row],
                    _ => scales[row / 128 * width + block],
                };
                assert!(scale > 0.0 && scale.to_bits() & 0x7f_ffff == 0, "{scale} is no power of two");
                (scale.to_bits() >> 23) as u8
            };
            let want = swizzle(&(0..r * across).map(code).collect::<Vec<_>>(), [r, across]);
            assert!(bytes(&s, &found.scales[0]) == want, "{scaling:?} [{r}, {c}]");
        }
    }
}

/// The library takes the descriptors, and where it has no algorithm the GEMM is emulated with the bits of the emulation.
#[test]
fn a_refused_gemm_is_emulated() {
    let Some((mut k, s)) = gpu() else { return };
    let own = k.capability;
    k.capability = (10, 0);
    let [m, n, deep] = [256, 384, 512];
    let (x, y) = (values(&s, 1, [deep, m]), values(&s, 2, [deep, n]));
    for formats in wgrad_formats() {
        let (a, b) = (microscaled(&k, &s, formats[0], &x), microscaled(&k, &s, formats[1], &y));
        let out = || s.zeros(&[m, n], DType::F32, Category::Workspace).unwrap();
        let (c, emulated) = (out(), out());
        let g = MicroscaledGemm { a: &a, b: &b, bias: None, accumulate: true, name: "gemm", c: &c };
        let key = g.key([m, n], n);
        let desc = MatmulDesc::new(&key).unwrap();
        let offered = k.gemm_cache.library().algorithms(&key, &desc).unwrap().len();
        println!("{formats:?}: {offered} algorithms on compute capability {own:?}");
        k.microscaled_gemm(&s, &g).unwrap();
        if own < (10, 0) {
            assert_eq!(offered, 0, "{formats:?}");
            assert!(k.gemm_cache.has_reported_refusal());
            crate::quant::microscaling::gemm::emulated_gemm(&k, &s, &MicroscaledGemm { c: &emulated, ..g })
                .unwrap();
            assert!(bytes(&s, &c) == bytes(&s, &emulated), "{formats:?}");
        }
    }
    if own < (10, 0) {
        refused_block_scales(&k, &s, own);
    }
}

/// Block scales that the library refuses as MXFP8 go to the generic kernel.
fn refused_block_scales(k: &CudaKernels, s: &Stream, own: (u32, u32)) {
    let [m, n, deep] = [256, 384, 512];
    let a = block_scaled(k, s, &values(s, 3, [m, deep]), ScalingMode::Block1x128);
    let b = block_scaled(k, s, &values(s, 4, [n, deep]), ScalingMode::Block128x128);
    let [c, generic] = [0, 1].map(|_| Tensor::empty(s, &[m, n], DType::BF16, Category::Workspace).unwrap());
    let g = Fp8Gemm { a: &a, b: &b, bias: None, accumulate: false, fast: false, name: "gemm", c: &c };
    k.fp8_gemm(s, &g).unwrap();
    k.launch_generic_fp8_gemm(s, &Fp8Gemm { c: &generic, ..g }, n).unwrap();
    assert!(bytes(s, &c) == bytes(s, &generic), "block scales on {own:?}");
}
