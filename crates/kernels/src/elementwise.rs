//! Elementwise operations: casts, sums, soft caps, dropout, random values.

use crate::checks::{dtypes, same_contiguous};
use crate::philox::RandomStream;
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// Key of a random stream: every (seed, step, layer, site) has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RngKey {
    /// Seed of the run.
    pub seed: u64,
    /// Step of the run.
    pub step: u64,
    /// Global layer number.
    pub layer: u32,
    /// Use inside the layer, such as dropout after attention.
    pub site: u32,
}

/// Key of a random stream whose step may be known on the device only: a CUDA graph replays the same launch in every step.
#[derive(Clone, Copy)]
pub struct StepKey<'a> {
    /// The key.
    pub key: RngKey,
    /// i32 `[1]`, added to the step of the key.
    pub step: Option<&'a Tensor>,
}

impl From<RngKey> for StepKey<'_> {
    fn from(key: RngKey) -> Self {
        StepKey { key, step: None }
    }
}

impl StepKey<'_> {
    /// The key, given the number on the device.
    pub(crate) fn at(&self, step: Option<&[i32]>) -> RngKey {
        let later = step.and_then(|s| s.first()).map_or(0, |n| *n as u64);
        RngKey { step: self.key.step.wrapping_add(later), ..self.key }
    }

    /// Checks the number on the device.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        let Some(step) = self.step else { return Ok(()) };
        dtypes(op, DType::I32, &[step])?;
        match step.numel() {
            1 => Ok(()),
            _ => shape_error(op, format!("the number of the step must be one i32, not {step:?}")),
        }
    }
}

/// Normal values of a random stream by rows: row r holds values `first + r·stride` and following.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormalFill {
    /// The random stream.
    pub stream: RandomStream,
    /// Index of the first value.
    pub first: u64,
    /// Distance between the first values of consecutive rows.
    pub stride: u64,
    /// Standard deviation.
    pub std: f64,
}

impl NormalFill {
    /// Index of the first value of row `r`.
    pub(crate) fn start(&self, r: usize) -> u64 {
        self.first.wrapping_add(self.stride.wrapping_mul(r as u64))
    }
}

/// Dropout: `y = x·mask/(1 − p)` over `x`, `y` `[rows, n]`. Element c of row r is dropped by random word `rows[r]·n + c` of the
/// stream of `key`, on whatever rank the row is. The backward pass applies the same kernel to gradients; no mask is saved.
#[derive(Clone, Copy)]
pub struct Dropout<'a> {
    /// Probability of dropping an element, in `[0, 1)`.
    pub p: f32,
    /// Random stream.
    pub key: StepKey<'a>,
    /// i32 `[rows]`: number of each row among all rows of the step.
    pub rows: &'a Tensor,
    /// `[rows, n]`
    pub x: &'a Tensor,
    /// `[rows, n]`
    pub y: &'a Tensor,
}

/// Elementwise kernels and column sums. Shapes are equal unless stated; the last axis is contiguous.
pub trait ElementwiseKernels {
    /// `out = a + b`
    fn add(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()>;

    /// `x += y`
    fn add_assign(&self, s: &Stream, x: &Tensor, y: &Tensor) -> Result<()>;

    /// `x = max(x, y)`, NaN where either is NaN; both of one dtype.
    fn max_assign(&self, s: &Stream, x: &Tensor, y: &Tensor) -> Result<()>;

    /// `x *= factor`
    fn scale(&self, s: &Stream, x: &Tensor, factor: f32) -> Result<()>;

    /// `out = x`, converted to the type of `out`. Both may be strided where the types are equal.
    fn copy(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()>;

    /// `out[i] = i`, i32 and contiguous, counted over all axes.
    fn iota(&self, s: &Stream, out: &Tensor) -> Result<()>;

    /// `sums[c] (+)= Σ_r x[r, c]` in f32; `x [rows, n]`, `sums [n]`.
    fn column_sum(&self, s: &Stream, x: &Tensor, accumulate: bool, sums: &Tensor) -> Result<()>;

    /// `out[0] = Σ a·b` over f32 vectors, in a fixed order.
    fn dot(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()>;

    /// `x = cap·tanh(x/cap)` in place.
    fn softcap_forward(&self, s: &Stream, cap: f32, x: &Tensor) -> Result<()>;

    /// `dy *= 1 − (y/cap)²` in place, `y` being the output of the forward pass.
    fn softcap_backward(&self, s: &Stream, cap: f32, y: &Tensor, dy: &Tensor) -> Result<()>;

    /// See [`Dropout`].
    fn dropout(&self, s: &Stream, d: &Dropout) -> Result<()>;

    /// `out[r, c] = std·z` with z the standard normal value `first + r·stride + c` of the stream; `out [rows, n]` f32,
    /// contiguous. The same bits on every device, defined by
    /// [`RandomStream::normal`](crate::philox::RandomStream::normal).
    fn normal(&self, s: &Stream, runs: NormalFill, out: &Tensor) -> Result<()>;
}

/// Checks the output of [`ElementwiseKernels::iota`].
pub(crate) fn check_iota(out: &Tensor) -> Result<()> {
    const OP: &str = "iota";
    same_contiguous(OP, &[out])?;
    dtypes(OP, DType::I32, &[out])?;
    if i32::try_from(out.numel()).is_err() {
        return shape_error(OP, format!("{:?} has more elements than i32 counts", out.shape()));
    }
    Ok(())
}

/// Checks a column sum of `x [rows, n]` into contiguous `sums [n]`; returns rows, columns and the row stride.
pub(crate) fn check_columns(x: &Tensor, sums: &Tensor) -> Result<[usize; 3]> {
    const OP: &str = "column_sum";
    let (&[rows, n], &[stride, step]) = (x.shape(), x.strides()) else {
        return shape_error(OP, format!("column sums of {:?} do not fit {:?}", x.shape(), sums.shape()));
    };
    if sums.shape() != [n] || !sums.is_contiguous() {
        return shape_error(OP, format!("column sums of {:?} do not fit {:?}", x.shape(), sums.shape()));
    }
    if n > 1 && step != 1 {
        return shape_error(OP, "the last axis must be contiguous");
    }
    Ok([rows, n, stride])
}

/// Checks the output of [`ElementwiseKernels::normal`]; returns rows and columns.
pub(crate) fn check_normal(out: &Tensor) -> Result<[usize; 2]> {
    const OP: &str = "normal";
    same_contiguous(OP, &[out])?;
    dtypes(OP, DType::F32, &[out])?;
    match *out.shape() {
        [rows, n] => Ok([rows, n]),
        ref shape => shape_error(OP, format!("{shape:?} must be [rows, n]")),
    }
}

/// Checks that the output of a dot product holds one element.
pub(crate) fn check_one(out: &Tensor) -> Result<()> {
    if out.numel() != 1 {
        return shape_error("dot", format!("the output must hold one element, not {:?}", out.shape()));
    }
    Ok(())
}

/// Checks the probability and row numbers of dropout; returns the row width.
pub(crate) fn check_dropout(p: f32, rows: &Tensor, x: &Tensor) -> Result<usize> {
    const OP: &str = "dropout";
    if !(0.0..1.0).contains(&p) {
        return shape_error(OP, format!("the probability {p} must be in [0, 1)"));
    }
    dtypes(OP, DType::I32, &[rows])?;
    match (x.shape(), rows.shape()) {
        ([n, width], [m]) if n == m && rows.is_contiguous() => Ok(*width),
        (x, r) => shape_error(OP, format!("{x:?} needs one row number per row, not {r:?}")),
    }
}
