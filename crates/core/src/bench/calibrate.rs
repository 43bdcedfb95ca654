//! `bench calibrate`: the curves of a GPU that the planner needs, measured with the kernels that training runs.

use super::ceiling::{attention_ceiling, memory_ceiling};
use super::kernels::{KernelBench, KernelWork, kernels_named};
use super::link::link_rates;
use super::yardsticks::workload;
use crate::config::Resolved;
use crate::plan::{AttentionRates, GemmDtype, GemmShape, Hardware};
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, DType};

/// What was measured of a GPU.
#[derive(Clone, Debug)]
pub struct GpuMeasurements {
    /// Device memory in GiB.
    pub memory_gib: f64,
    /// Streaming multiprocessors.
    pub sms: usize,
    /// GEMMs.
    pub gemms: Vec<MeasuredGemm>,
    /// Attention: head size, tokens of a sequence, TFLOP/s forward and backward.
    pub attention: Vec<(usize, usize, [f64; 2])>,
    /// GB/s of memory-bound kernels.
    pub memory_gb_s: f64,
    /// GB/s of the link to the host, one way.
    pub host_gb_s: f64,
    /// Microseconds of a kernel beside its work.
    pub kernel_us: f64,
}

/// A description of a GPU, and how well its curves describe what was measured.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The description.
    pub hardware: Hardware,
    /// Its curves.
    pub curves: Vec<FittedCurve>,
}

/// How well a curve describes what was measured.
#[derive(Clone, Debug)]
pub struct FittedCurve {
    /// What it describes.
    pub name: &'static str,
    /// Its values.
    pub values: String,
    /// Measurements.
    pub points: usize,
    /// Mean of the relative errors.
    pub error: f64,
}

/// A GEMM and its time.
#[derive(Clone, Copy, Debug)]
pub struct MeasuredGemm {
    /// Its operands.
    pub dtype: GemmDtype,
    /// Its sizes.
    pub shape: GemmShape,
    /// Median seconds.
    pub seconds: f64,
}

/// Models whose kernels are measured: narrow and wide ones, with head sizes of 64 and 128.
const MODELS: [&str; 3] = ["gpt2-124m", "llama-1b", "llama-8b-8l"];
/// Seconds for each kernel.
const BUDGET: f64 = 0.08;
/// Memory-bound kernels of a layer and of the loss.
const MEMORY: [&str; 6] = [
    "norm.add_forward",
    "norm.backward",
    "rope",
    "activation.forward",
    "activation.backward",
    "cross_entropy",
];
/// Attention that is measured: model, tokens of a sequence, sequences.
const ATTENTION: [(&str, usize, usize); 7] = [
    ("gpt2-124m", 1024, 32),
    ("llama-1b", 2048, 8),
    ("llama-1b", 4096, 4),
    ("llama-1b", 16_384, 1),
    ("llama-8b-8l", 2048, 4),
    ("llama-8b-8l", 8192, 1),
    ("llama-8b-8l", 32_768, 1),
];
/// Bytes of a copy in device memory: far more than the L2 cache holds.
const MEMORY_BYTES: usize = 4 << 30;
/// Bytes of a copy to and from the host.
const LINK_BYTES: usize = 256 << 20;

/// Measures the GPU of `rank`; `progress` hears what is measured.
pub fn measure_gpu(rank: &Rank, progress: &mut dyn FnMut(&str)) -> Result<GpuMeasurements> {
    let Some(gpu) = rank.device().gpu() else {
        let what = "bench calibrate measures a GPU; there is none here, or --device names another";
        return Err(Error::Invalid(what.into()));
    };
    // Before Ada and Hopper there is no FP8.
    let fp8 = gpu.capability >= (8, 9);
    let wanted = |k: &str| {
        let gemm = k.starts_with("gemm.") || k.starts_with("experts.") && !k.ends_with(".skewed");
        let quantized = k.starts_with("fp8.gemm.") || k.starts_with("fp8.experts.");
        gemm || (fp8 && quantized) || MEMORY.contains(&k)
    };
    // Seconds of memory-bound kernels, and of copies of as many bytes.
    let (mut gemms, mut seconds, mut copied) = (Vec::new(), 0.0, 0.0);
    for name in MODELS {
        let r = of_model(name, &[])?;
        let mut done = |k: &KernelBench| progress(&format!("{name} {}", k.name));
        for k in kernels_named(rank, &r, &wanted, BUDGET, &mut done)? {
            match (k.gemm, k.work) {
                (Some(shape), _) => {
                    let dtype = if k.name.starts_with("fp8.") { GemmDtype::Fp8 } else { GemmDtype::Bf16 };
                    gemms.push(MeasuredGemm { dtype, shape, seconds: k.seconds });
                }
                (None, KernelWork::Bytes(_)) => {
                    seconds += k.seconds;
                    // Faster than a copy is what finds its data in the L2 cache, as it does in no step.
                    copied += k.seconds * k.share().min(1.0);
                }
                _ => {}
            }
        }
    }
    progress("memory and launches");
    let memory_gb_s = memory_ceiling(rank, MEMORY_BYTES)? * copied / seconds;
    let kernel_us = launch_us(rank)?;
    progress("the link to the host");
    let link = link_rates(rank, LINK_BYTES)?;
    let mut attention = Vec::new();
    for (model, length, batch) in ATTENTION {
        progress(&format!("attention over {length} tokens"));
        let sizes = [
            format!("model.max_positions={length}"),
            format!("data.seq_len={length}"),
            format!("train.micro_batch={batch}"),
            format!("train.global_batch={batch}"),
        ];
        let r = of_model(model, &sizes)?;
        attention.push((r.model.head_dim, length, attention_ceiling(rank, &r, length)?.into()));
    }
    Ok(GpuMeasurements {
        memory_gib: (gpu.memory as f64 / f64::from(1 << 30) * 10.0).floor() / 10.0,
        sms: gpu.multiprocessors as usize,
        gemms,
        attention,
        memory_gb_s,
        host_gb_s: link.to_host.min(link.from_host) / 1e9,
        kernel_us,
    })
}

/// Fits the curves of a description to what was measured. What one GPU can't show (links between GPUs, overlap) is that of `known`.
pub fn calibrate(known: &Hardware, m: &GpuMeasurements) -> Calibration {
    let mut hw = known.clone();
    (hw.sms, hw.memory_gib) = (m.sms, m.memory_gib);
    (hw.memory_gb_s, hw.host_gb_s, hw.kernel_us) = (m.memory_gb_s, m.host_gb_s, m.kernel_us);
    let mut curves = vec![
        fit_gemms(&mut hw, GemmDtype::Bf16, &m.gemms),
        fit_gemms(&mut hw, GemmDtype::Fp8, &m.gemms),
        fit_grouped(&mut hw, &m.gemms),
    ];
    curves.push(fit_attention(&mut hw.attention, &m.attention));
    round(&mut hw);
    Calibration { hardware: hw, curves: curves.into_iter().filter(|c| c.points > 0).collect() }
}

fn of_model(name: &str, set: &[String]) -> Result<Resolved> {
    let mut recipe = workload(name)?;
    recipe.set_all(set)?;
    recipe.set("precision.dtype=bf16")?;
    recipe.resolve(None)
}

/// Microseconds of a kernel with next to no work among others, as in a step: queued behind a long one, so that the host's time
/// to launch them does not count.
fn launch_us(rank: &Rank) -> Result<f64> {
    const CALLS: usize = 200;
    let s = &rank.compute;
    let small = || s.zeros(&[1024], DType::F32, Category::Workspace);
    let (x, y, large) = (small()?, small()?, s.zeros(&[1 << 30], DType::F32, Category::Workspace)?);
    let mut least = f64::INFINITY;
    for _ in 0..5 {
        for _ in 0..4 {
            rank.kernels.scale(s, &large, 1.0)?;
        }
        let start = s.record()?;
        for _ in 0..CALLS {
            rank.kernels.copy(s, &x, &y)?;
        }
        least = least.min(s.record()?.since(&start)?.as_secs_f64());
    }
    Ok(least / CALLS as f64 * 1e6)
}

/// Values of a parameter to try: twelve in each factor of ten.
fn values(from: f64, to: f64) -> impl Iterator<Item = f64> {
    let steps = ((to / from).log10() * 12.0).ceil() as usize;
    (0..=steps).map(move |i| from * 10f64.powf(i as f64 / 12.0))
}

/// Mean of |log(ratio)|.
fn mean_error(ratios: impl Iterator<Item = f64>) -> f64 {
    let all: Vec<f64> = ratios.map(|r| r.ln().abs()).collect();
    all.iter().sum::<f64>() / all.len().max(1) as f64
}

/// The factor that centers ratios around 1.
fn center(ratios: impl Iterator<Item = f64>) -> f64 {
    let all: Vec<f64> = ratios.map(f64::ln).collect();
    (all.iter().sum::<f64>() / all.len().max(1) as f64).exp()
}

/// Fits `achieved` and `half_k` of a dtype to its dense GEMMs: the length at which half of the rate is reached by trial, the rate
/// by the mean of the ratios.
fn fit_gemms(hw: &mut Hardware, dtype: GemmDtype, all: &[MeasuredGemm]) -> FittedCurve {
    let points: Vec<&MeasuredGemm> =
        all.iter().filter(|g| g.dtype == dtype && g.shape.experts == 1).collect();
    let (name, mut best) = (if dtype == GemmDtype::Fp8 { "GEMM, fp8" } else { "GEMM, bf16" }, None);
    let Some(start) = hw.curve(dtype).filter(|_| !points.is_empty()) else {
        return FittedCurve { name, values: String::new(), points: 0, error: 0.0 };
    };
    for half_k in values(3.0, 3000.0) {
        let mut curve = crate::plan::GemmCurve { half_k, ..start };
        let mut error = f64::INFINITY;
        // Not every time is proportional to the rate: operands have to be read, too.
        for _ in 0..4 {
            hw.set_curve(dtype, curve);
            let ratios = || points.iter().map(|g| g.shape.seconds(hw, dtype) / g.seconds);
            error = mean_error(ratios());
            curve.achieved = (curve.achieved * center(ratios())).min(1.0);
        }
        if best.as_ref().is_none_or(|(least, _)| error < *least) {
            best = Some((error, hw.curve(dtype).unwrap_or(curve)));
        }
    }
    let (error, curve) = best.unwrap_or((0.0, start));
    hw.set_curve(dtype, curve);
    let rate = curve.peak * curve.achieved;
    FittedCurve {
        name,
        values: format!("{rate:.0} TFLOP/s, half of it with k = {:.0}", curve.half_k),
        points: points.len(),
        error,
    }
}

/// Fits the rate of grouped GEMMs over dense ones.
fn fit_grouped(hw: &mut Hardware, all: &[MeasuredGemm]) -> FittedCurve {
    let points: Vec<&MeasuredGemm> = all.iter().filter(|g| g.shape.experts > 1).collect();
    let mut error = 0.0;
    for _ in 0..4 {
        let ratios: Vec<f64> = points.iter().map(|g| g.shape.seconds(hw, g.dtype) / g.seconds).collect();
        error = mean_error(ratios.iter().copied());
        hw.gemm.grouped = (hw.gemm.grouped * center(ratios.into_iter())).min(1.0);
    }
    let values = format!("{:.0} % of a dense GEMM with as many tiles", hw.gemm.grouped * 1e2);
    FittedCurve { name: "grouped GEMM", values, points: points.len(), error }
}

/// Fits the rates of attention and the length at which half of them is reached.
fn fit_attention(rates: &mut AttentionRates, points: &[(usize, usize, [f64; 2])]) -> FittedCurve {
    let mut best = (f64::INFINITY, *rates);
    for half_length in values(10.0, 3000.0) {
        let mut of = AttentionRates { forward: 1.0, backward: 1.0, half_length };
        let part = |head: usize, length: usize| of.reached(head, length as f64 / 2.0);
        let ratios = |pass: usize| points.iter().map(move |(h, l, rate)| rate[pass] / part(*h, *l));
        let (forward, backward) = (center(ratios(0)), center(ratios(1)));
        let error =
            (mean_error(ratios(0).map(|r| r / forward)) + mean_error(ratios(1).map(|r| r / backward))) / 2.0;
        of = AttentionRates { forward, backward, ..of };
        if error < best.0 {
            best = (error, of);
        }
    }
    let (error, fitted) = best;
    *rates = fitted;
    let values = format!(
        "{:.0} and {:.0} TFLOP/s, half of it over {:.0} tokens",
        fitted.forward, fitted.backward, fitted.half_length
    );
    FittedCurve { name: "attention, forward and backward", values, points: 2 * points.len(), error }
}

/// Four digits are enough.
fn round(hw: &mut Hardware) {
    let digits = |x: &mut f64| {
        let unit = 10f64.powf(x.abs().max(1e-9).log10().floor() - 3.0);
        *x = (*x / unit).round() * unit;
        // Without the noise of binary fractions.
        *x = (*x * 1e6).round() / 1e6;
    };
    for dtype in [GemmDtype::Bf16, GemmDtype::Fp8] {
        if let Some(mut curve) = hw.curve(dtype) {
            digits(&mut curve.achieved);
            digits(&mut curve.half_k);
            hw.set_curve(dtype, curve);
        }
    }
    let a = &mut hw.attention;
    let rest = [&mut a.forward, &mut a.backward, &mut a.half_length];
    rest.into_iter().for_each(digits);
    [&mut hw.gemm.grouped, &mut hw.memory_gb_s, &mut hw.host_gb_s, &mut hw.kernel_us]
        .into_iter()
        .for_each(digits);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_engine::quant::LinearGemm;

    /// Curves are found again from times that they give.
    #[test]
    fn fits_recover_the_curves_of_generated_times() {
        let known = Hardware::find("H100").unwrap();
        let mut made = known.clone();
        made.gemm.bf16.achieved = 0.7;
        made.gemm.bf16.half_k = 150.0;
        made.gemm.grouped = 0.9;
        let mut gemms = Vec::new();
        for (m, n, k) in [(8192, 4096, 512), (16_384, 2048, 8192), (4096, 12_288, 1024), (65_536, 768, 768)] {
            for experts in [1, 16] {
                let shape = GemmShape { gemm: LinearGemm::Fprop, m, n, k, experts, accumulate: false };
                gemms.push(MeasuredGemm {
                    dtype: GemmDtype::Bf16,
                    shape,
                    seconds: shape.seconds(&made, GemmDtype::Bf16),
                });
            }
        }
        let mut hw = known.clone();
        let dense = fit_gemms(&mut hw, GemmDtype::Bf16, &gemms);
        let grouped = fit_grouped(&mut hw, &gemms);
        assert!(dense.error < 0.02 && grouped.error < 0.02, "{dense:?} {grouped:?}");
        assert!((hw.gemm.bf16.achieved / 0.7 - 1.0).abs() < 0.03, "{:?}", hw.gemm.bf16);
        assert!((hw.gemm.grouped / 0.9 - 1.0).abs() < 0.03, "{}", hw.gemm.grouped);
        let of = AttentionRates { forward: 600.0, backward: 500.0, half_length: 316.2 };
        let points: Vec<_> = [(64, 1024), (128, 4096), (128, 16_384)]
            .map(|(h, l)| (h, l, [of.forward, of.backward].map(|r| r * of.reached(h, l as f64 / 2.0))))
            .to_vec();
        let fitted = fit_attention(&mut hw.attention, &points);
        assert!(fitted.error < 0.01 && (hw.attention.forward / 600.0 - 1.0).abs() < 0.02, "{fitted:?}");
    }
}
