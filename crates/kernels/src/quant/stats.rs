//! Quantization error statistics.

use super::check::matrix;
use super::scale::largest;
use super::{Fp8Tensor, QuantKernels, ScalingMode};
use crate::BLOCK;
use ferrotron_tensor::{Category, DType, Error, Result, Stream, Tensor, bf16, f16};

/// Error of quantized values. Values that are not finite are ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantStats {
    /// Number of values.
    pub elements: u64,
    /// Values that saturated at the format's largest.
    pub saturated: u64,
    /// Nonzero values that became zero.
    pub vanished: u64,
    /// Largest magnitude.
    pub amax: f32,
    /// Smallest and largest inverse scale in use; NaN where unknown.
    pub scale_inv: (f32, f32),
    /// `Σ (quantized − x)²`
    pub error: f64,
    /// `Σ x²`
    pub size: f64,
}

impl Default for QuantStats {
    /// Statistics of no values.
    fn default() -> QuantStats {
        let (elements, saturated, vanished) = (0, 0, 0);
        QuantStats {
            elements,
            saturated,
            vanished,
            amax: 0.0,
            scale_inv: (f32::NAN, f32::NAN),
            error: 0.0,
            size: 0.0,
        }
    }
}

impl QuantStats {
    /// Percentage of values that saturated.
    pub fn saturation(&self) -> f64 {
        self.percent(self.saturated)
    }

    /// Percentage of nonzero values that became zero.
    pub fn underflow(&self) -> f64 {
        self.percent(self.vanished)
    }

    /// `‖quantized − x‖ / ‖x‖`; 0 for a zero tensor.
    pub fn relative_error(&self) -> f64 {
        if self.size == 0.0 { 0.0 } else { (self.error / self.size).sqrt() }
    }

    fn percent(&self, n: u64) -> f64 {
        100.0 * n as f64 / self.elements.max(1) as f64
    }

    /// Adds the statistics of further values.
    pub fn merge(&mut self, other: &QuantStats) {
        self.elements += other.elements;
        self.saturated += other.saturated;
        self.vanished += other.vanished;
        self.error += other.error;
        self.size += other.size;
        self.amax = self.amax.max(other.amax);
        // min and max ignore NaN.
        self.scale_inv = (self.scale_inv.0.min(other.scale_inv.0), self.scale_inv.1.max(other.scale_inv.1));
    }

    /// Statistics of `x [r, c]` against its quantized and dequantized form `rounded [r, c]`. Saturation is not known.
    pub fn rounded(s: &Stream, x: &Tensor, rounded: &Tensor) -> Result<QuantStats> {
        let mut stats = QuantStats::default();
        for (x, rounded) in numbers(s, x)?.into_iter().zip(numbers(s, rounded)?) {
            stats.add(x, rounded);
        }
        Ok(stats)
    }

    fn add(&mut self, x: f32, quantized: f32) {
        if !x.is_finite() {
            return;
        }
        self.elements += 1;
        self.amax = self.amax.max(x.abs());
        self.vanished += u64::from(x != 0.0 && quantized == 0.0);
        self.error += (f64::from(quantized) - f64::from(x)).powi(2);
        self.size += f64::from(x).powi(2);
    }
}

/// [`QuantKernels::quant_stats`] on the host, for devices without a kernel for it.
pub(super) fn over_host<K: QuantKernels + ?Sized>(
    k: &K,
    s: &Stream,
    x: &Tensor,
    q: &Fp8Tensor,
    transposed: bool,
) -> Result<QuantStats> {
    const OP: &str = "quant_stats";
    let rows = matrix(OP, x)?;
    let (r, c) = (rows.outer, rows.width);
    let [qr, qc] = if transposed { [c, r] } else { [r, c] };
    q.check(OP, [qr, qc])?;
    let back = Tensor::empty(s, &[qr, qc], DType::F32, Category::Workspace)?;
    k.dequantize(s, q, &back)?;
    let (x, back) = (numbers(s, x)?, s.download::<f32>(&back)?);
    let (inverse, shape) = (s.download::<f32>(&q.scale_inv)?, q.scaling.scales(qr, qc));
    let of = |i: usize, j: usize| match q.scaling {
        ScalingMode::PerTensor => inverse[0],
        ScalingMode::Block1x128 => inverse[j / BLOCK * shape[1] + i],
        ScalingMode::Block128x128 => inverse[i / BLOCK * shape[1] + j / BLOCK],
    };
    // Scales are rounded, so the amax itself may map to slightly above the largest value.
    let most = f64::from(largest(OP, q.data.dtype())?) * (1.0 + 4.0 * f64::from(f32::EPSILON));
    let mut stats = QuantStats::default();
    for (at, x) in x.into_iter().enumerate() {
        let (i, j) = if transposed { (at % c, at / c) } else { (at / c, at % c) };
        let inverse = of(i, j);
        stats.add(x, back[i * qc + j]);
        stats.saturated += u64::from(x.is_finite() && f64::from(x.abs()) > most * f64::from(inverse));
        stats.scale_inv = (stats.scale_inv.0.min(inverse), stats.scale_inv.1.max(inverse));
    }
    Ok(stats)
}

/// Downloads a matrix as f32.
fn numbers(s: &Stream, x: &Tensor) -> Result<Vec<f32>> {
    match x.dtype() {
        DType::F32 => s.download::<f32>(x),
        DType::BF16 => Ok(s.download::<bf16>(x)?.into_iter().map(bf16::to_f32).collect()),
        DType::F16 => Ok(s.download::<f16>(x)?.into_iter().map(f16::to_f32).collect()),
        found => Err(Error::DType { op: "quant_stats", found, wanted: DType::F32 }),
    }
}
