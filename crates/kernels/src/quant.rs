//! FP8 quantization and FP8 GEMM operands.
//!
//! An FP8 GEMM contracts the last axis of both operands, so a matrix is quantized once per orientation: row-wise (as stored)
//! and column-wise (transposed). Both are quantized from the same high-precision values, never from each other; with one scale
//! per tensor or per 128x128 block they hold the same FP8 values.

pub(crate) mod check;
pub mod microscaling;
pub mod scale;
pub(crate) mod stack;
pub mod stats;

use ferrotron_tensor::{Category, DType, Error, Result, Stream, Tensor, shape_error};
use microscaling::EmulatedFormat;
use stack::QuantizeStack;
use stats::QuantStats;

/// Block size of block scaling.
pub const BLOCK: usize = 128;
/// FP8 rows are zero-padded to a multiple of this, as tensor cores require.
pub const ALIGN: usize = 16;

/// Which values of an operand `[r, c]`, contracted along c, share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScalingMode {
    /// All values. Scales f32 `[1]`.
    PerTensor,
    /// 1x128 blocks along c. Scales f32 `[⌈c/128⌉, r rounded up to a multiple of 4]`.
    Block1x128,
    /// 128x128 blocks. Scales f32 `[⌈r/128⌉, ⌈c/128⌉ rounded up to a multiple of 4]`.
    Block128x128,
}

impl ScalingMode {
    /// Shape of the scales of an operand `[r, c]`.
    pub fn scales(self, r: usize, c: usize) -> Vec<usize> {
        match self {
            ScalingMode::PerTensor => vec![1],
            ScalingMode::Block1x128 => vec![c.div_ceil(BLOCK), r.next_multiple_of(4)],
            ScalingMode::Block128x128 => vec![r.div_ceil(BLOCK), c.div_ceil(BLOCK).next_multiple_of(4)],
        }
    }
}

/// An FP8 GEMM operand `[r, c]` with its scales, contracted along c.
#[derive(Clone, Debug)]
pub struct Fp8Tensor {
    /// E4M3 or E5M2 `[r, c rounded up to a multiple of 16]`, contiguous; zeros beyond c.
    pub data: Tensor,
    /// f32 inverse scales: `value = data·scale_inv`; see [`ScalingMode::scales`]. Padding is zero.
    pub scale_inv: Tensor,
    /// Scaling mode.
    pub scaling: ScalingMode,
    /// c, without padding.
    pub cols: usize,
    /// Scales are known to be powers of two: block scales can be read as MXFP8 scales.
    pub pow2: bool,
}

impl Fp8Tensor {
    /// Allocates an operand `[r, c]`.
    pub fn empty(
        s: &Stream,
        [r, c]: [usize; 2],
        format: DType,
        scaling: ScalingMode,
        category: Category,
    ) -> Result<Fp8Tensor> {
        let data = Tensor::empty(s, &[r, c.next_multiple_of(ALIGN)], format, category)?;
        let scale_inv = Tensor::empty(s, &scaling.scales(r, c), DType::F32, category)?;
        Ok(Fp8Tensor { data, scale_inv, scaling, cols: c, pow2: false })
    }

    /// Rows r.
    pub fn rows(&self) -> usize {
        self.data.shape()[0]
    }

    /// Checks types, shapes and contiguity for an operand `[r, c]`.
    pub fn check(&self, op: &'static str, [r, c]: [usize; 2]) -> Result<()> {
        if !matches!(self.data.dtype(), DType::E4M3 | DType::E5M2) {
            return Err(Error::DType { op, found: self.data.dtype(), wanted: DType::E4M3 });
        }
        if self.scale_inv.dtype() != DType::F32 {
            return Err(Error::DType { op, found: self.scale_inv.dtype(), wanted: DType::F32 });
        }
        let fits = self.cols == c
            && self.data.shape() == [r, c.next_multiple_of(ALIGN)]
            && self.scale_inv.shape() == self.scaling.scales(r, c)
            && self.data.is_contiguous()
            && self.scale_inv.is_contiguous();
        if !fits {
            return shape_error(
                op,
                format!(
                    "FP8 data {:?} with scales {:?} ({:?}) does not fit an operand [{r}, {c}]",
                    self.data.shape(),
                    self.scale_inv.shape(),
                    self.scaling
                ),
            );
        }
        Ok(())
    }
}

/// Where quantization scales come from.
#[derive(Clone, Copy, Debug)]
pub enum ScaleSource<'a> {
    /// Current scaling: one scale from the amax f32 `[1]`, already computed and all-reduced.
    Amax {
        /// f32 `[1]`
        amax: &'a Tensor,
        /// Round the scale down to a power of two.
        pow2: bool,
    },
    /// Delayed scaling: one scale f32 `[1]` from earlier steps. `amax` f32 `[1]` becomes the larger of itself and the amax.
    Given {
        /// f32 `[1]`
        scale: &'a Tensor,
        /// f32 `[1]`
        amax: &'a Tensor,
    },
    /// Block scaling: a scale per block of the outputs' scaling mode.
    Blocks {
        /// Round scales down to powers of two.
        pow2: bool,
    },
}

/// Quantizes `x [r, c]` (f32, bf16 or f16; contiguous rows of any stride) into up to two operands, reading it once.
#[derive(Clone, Copy, Debug)]
pub struct Quantize<'a> {
    /// `[r, c]`
    pub x: &'a Tensor,
    /// Source of the scales.
    pub range: ScaleSource<'a>,
    /// Row-wise output: `x` as stored, `[r, c]`.
    pub rows: Option<&'a Fp8Tensor>,
    /// Column-wise output: `xᵀ`, `[c, r]`.
    pub cols: Option<&'a Fp8Tensor>,
    /// f32 `[c]`: column sums of `x` before quantization (the bias gradient), and whether to accumulate.
    pub sums: Option<(&'a Tensor, bool)>,
}

/// FP8 GEMM: `c = a·bᵀ (+ bias) (+ c)`; `c [m, n]` bf16 or f32, `bias [n]` bf16.
/// At most one operand is E5M2, and at most one has [`ScalingMode::Block128x128`].
#[derive(Clone, Copy, Debug)]
pub struct Fp8Gemm<'a> {
    /// `[m, k]`
    pub a: &'a Fp8Tensor,
    /// `[n, k]`
    pub b: &'a Fp8Tensor,
    /// `[n]`
    pub bias: Option<&'a Tensor>,
    /// Accumulate into `c`, which must be f32.
    pub accumulate: bool,
    /// Allow fast accumulation in the tensor cores' reduced-precision accumulators (about 14 bits).
    pub fast: bool,
    /// Profile label, such as `gemm (output, fp8)`.
    pub name: &'static str,
    /// `[m, n]`
    pub c: &'a Tensor,
}

/// How delayed scaling derives a scale from the amax history.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayedScaling {
    /// Headroom: the scale is divided by `2^margin`.
    pub margin: i32,
    /// Use the most recent amax instead of the maximum of the history.
    pub most_recent: bool,
}

/// End-of-step update of delayed scaling for n tensors: the step's amax enters the history, the oldest entry leaves it, and
/// the next scale is `largest/(2^margin·amax)`. A tensor whose amax is 0 was not cast in this step and keeps its history and
/// scale.
#[derive(Clone, Copy)]
pub struct DelayedUpdate<'a> {
    /// How scales follow from the history.
    pub scaling: DelayedScaling,
    /// f32 `[len, n]`: row 0 collects a step's amax and is zeroed here; the other rows are earlier steps, oldest first.
    pub history: &'a Tensor,
    /// f32 `[n]`: row 0 after the all-reduce (row 0 itself on a single rank).
    pub reduced: &'a Tensor,
    /// f32 `[n]`: the largest finite value of each tensor's format.
    pub largest: &'a Tensor,
    /// f32 `[n]`: the scales, overwritten.
    pub scale: &'a Tensor,
}

/// Quantization kernels: FP8 with per-tensor or block scaling, and emulated microscaling formats.
pub trait QuantKernels {
    /// `amax[0] = max(amax[0], max |x|)` over a matrix; NaN is ignored. `amax` f32 `[1]`.
    fn amax(&self, s: &Stream, x: &Tensor, amax: &Tensor) -> Result<()>;

    /// See [`Quantize`]: `q = round(x·scale)` to nearest even, saturating at the largest finite value; NaN stays NaN.
    fn quantize(&self, s: &Stream, q: &Quantize) -> Result<()>;

    /// `out [r, c]` (f32 or bf16) `= q·scale_inv`.
    fn dequantize(&self, s: &Stream, q: &Fp8Tensor, out: &Tensor) -> Result<()>;

    /// Transposes FP8 data: `out [c, r] = q [r, c]ᵀ`, with the same scale. Per-tensor scaling only.
    fn fp8_transpose(&self, s: &Stream, q: &Fp8Tensor, out: &Fp8Tensor) -> Result<()>;

    /// `amax[e] = max(amax[e], max |x[e]|)` of a stack `x [E, n, k]`, f32 or bf16, contiguous; NaN is ignored. `amax` f32 `[E]`.
    fn amax_stack(&self, s: &Stream, x: &Tensor, amax: &Tensor) -> Result<()>;

    /// See [`QuantizeStack`].
    fn quantize_stack(&self, s: &Stream, q: &QuantizeStack) -> Result<()>;

    /// [`QuantKernels::amax_stack`] into the amax that `q` scales by ([`ScaleSource::Amax`]), then
    /// [`QuantKernels::quantize_stack`].
    fn amax_quantize_stack(&self, s: &Stream, q: &QuantizeStack) -> Result<()> {
        if let ScaleSource::Amax { amax, .. } = q.range {
            self.amax_stack(s, q.x, amax)?;
        }
        self.quantize_stack(s, q)
    }

    /// Transposes each of `count` FP8 matrices: `rows [count·n, k]` into `cols [count·k, n]`, and their scales: one per matrix,
    /// f32 `[count]`, or 128x128 blocks, where n and k are multiples of 128.
    fn transpose_stack(&self, s: &Stream, count: usize, rows: &Fp8Tensor, cols: &Fp8Tensor) -> Result<()>;

    /// See [`DelayedUpdate`].
    fn delayed_update(&self, s: &Stream, d: &DelayedUpdate) -> Result<()>;

    /// Rounds `x [r, c]` (f32, bf16 or f16) to an emulated format and back into `out [r, c]`, contiguous and of the type of `x`.
    /// The same bits on every device; the default runs on the host.
    fn emulate(&self, s: &Stream, how: EmulatedFormat, x: &Tensor, out: &Tensor) -> Result<()> {
        microscaling::emulate_over_host(s, how, x, out)
    }

    /// Quantization error of `x [r, c]` against its FP8 form `q`, `[r, c]` or, `transposed`, `[c, r]`. Synchronizes with the host;
    /// the default runs there.
    fn quant_stats(&self, s: &Stream, x: &Tensor, q: &Fp8Tensor, transposed: bool) -> Result<QuantStats> {
        stats::over_host(self, s, x, q, transposed)
    }
}
