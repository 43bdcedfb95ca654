//! Eight-bit matrices: bringing values into their range, and multiplying them.
//!
//! A product contracts the last axis of both factors, so a matrix is quantized once for each way it is used: as it is
//! stored, and transposed. Both are made from the same high-precision values, never from each other (one scale for a
//! whole tensor or a whole tile makes them the same bytes either way).

pub(crate) mod check;
pub mod microscaling;
pub mod scale;
pub(crate) mod stack;
pub mod stats;

use ferrotron_tensor::{Category, DType, Error, Result, Stream, Tensor, shape_error};
use microscaling::EmulatedFormat;
use stack::QuantizeStack;
use stats::QuantStats;

/// Values that share a scale where they do not all do.
pub const BLOCK: usize = 128;
/// Rows of bytes are padded with zeros to a multiple of this: the matrix units want it.
pub const ALIGN: usize = 16;

/// Which values of a matrix `[r, c]`, contracted along c, share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScalingMode {
    /// All. Scales f32 `[1]`.
    PerTensor,
    /// 128 along c. Scales f32 `[⌈c/128⌉, r up to a multiple of 4]`.
    Block1x128,
    /// Tiles of 128 x 128. Scales f32 `[⌈r/128⌉, ⌈c/128⌉ up to a multiple of 4]`.
    Block128x128,
}

impl ScalingMode {
    /// Shape of the scales of a matrix `[r, c]`.
    pub fn scales(self, r: usize, c: usize) -> Vec<usize> {
        match self {
            ScalingMode::PerTensor => vec![1],
            ScalingMode::Block1x128 => vec![c.div_ceil(BLOCK), r.next_multiple_of(4)],
            ScalingMode::Block128x128 => vec![r.div_ceil(BLOCK), c.div_ceil(BLOCK).next_multiple_of(4)],
        }
    }
}

/// A factor of a product: a matrix `[r, c]` in bytes, contracted along c.
#[derive(Clone, Debug)]
pub struct Fp8Tensor {
    /// E4M3 or E5M2 `[r, c up to a multiple of 16]`, contiguous; zeros behind c.
    pub data: Tensor,
    /// f32: what a byte's value is multiplied by to be the number again; see [`ScalingMode::scales`]. Padding is zero.
    pub scale_inv: Tensor,
    /// Which values share a scale.
    pub scaling: ScalingMode,
    /// c.
    pub cols: usize,
}

impl Fp8Tensor {
    /// Memory for a matrix `[r, c]`.
    pub fn empty(
        s: &Stream,
        [r, c]: [usize; 2],
        format: DType,
        scaling: ScalingMode,
        category: Category,
    ) -> Result<Fp8Tensor> {
        let data = Tensor::empty(s, &[r, c.next_multiple_of(ALIGN)], format, category)?;
        let scale_inv = Tensor::empty(s, &scaling.scales(r, c), DType::F32, category)?;
        Ok(Fp8Tensor { data, scale_inv, scaling, cols: c })
    }

    /// r.
    pub fn rows(&self) -> usize {
        self.data.shape()[0]
    }

    /// Is it what a matrix `[r, c]` needs?
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
                    "bytes {:?} with scales {:?} ({:?}) for a matrix [{r}, {c}]",
                    self.data.shape(),
                    self.scale_inv.shape(),
                    self.scaling
                ),
            );
        }
        Ok(())
    }
}

/// Where scales come from.
#[derive(Clone, Copy, Debug)]
pub enum ScaleSource<'a> {
    /// One scale, from the largest magnitude f32 `[1]`, already measured (and agreed on by ranks).
    Amax {
        /// f32 `[1]`
        amax: &'a Tensor,
        /// Round the scale down to a power of two.
        pow2: bool,
    },
    /// One scale f32 `[1]`, from earlier steps. `amax` f32 `[1]` becomes the larger of itself and the largest magnitude.
    Given {
        /// f32 `[1]`
        scale: &'a Tensor,
        /// f32 `[1]`
        amax: &'a Tensor,
    },
    /// Every block's own, as the outputs' scaling says.
    Blocks {
        /// Round scales down to powers of two.
        pow2: bool,
    },
}

/// Quantizes `x [r, c]` (f32, bf16 or f16; contiguous rows of any stride), once read, into up to two factors.
#[derive(Clone, Copy, Debug)]
pub struct Quantize<'a> {
    /// `[r, c]`
    pub x: &'a Tensor,
    /// Where scales come from.
    pub range: ScaleSource<'a>,
    /// `x` as it is stored: `[r, c]`.
    pub rows: Option<&'a Fp8Tensor>,
    /// `xᵀ`: `[c, r]`.
    pub cols: Option<&'a Fp8Tensor>,
    /// f32 `[c]`: the column sums of `x` itself (the gradient of a bias), and whether to add to what is there.
    pub sums: Option<(&'a Tensor, bool)>,
}

/// `c = a·bᵀ (+ bias) (+ c)` of `a [m, k]`, `b [n, k]` in bytes; `c [m, n]` bf16 or f32, `bias [n]` in bf16.
/// At most one factor is in E5M2, at most one has [`ScalingMode::Block128x128`].
#[derive(Clone, Copy, Debug)]
pub struct Fp8Gemm<'a> {
    /// `[m, k]`
    pub a: &'a Fp8Tensor,
    /// `[n, k]`
    pub b: &'a Fp8Tensor,
    /// `[n]`
    pub bias: Option<&'a Tensor>,
    /// Add to what `c` (f32) holds.
    pub accumulate: bool,
    /// Sums may be kept in the matrix unit's own narrow registers: faster, 14 bits or so.
    pub fast: bool,
    /// What it is in a layer, for profiles: such as `gemm (output, fp8)`.
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
