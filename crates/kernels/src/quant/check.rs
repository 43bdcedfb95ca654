//! Argument checks of the quantization kernels, shared by all devices.

use super::{Fp8Gemm, Fp8Tensor, Quantize, ScaleSource, ScalingMode};
use crate::checks::{dtypes, rows_of};
use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// Checks that it is f32 `[1]`.
pub(crate) fn one(op: &'static str, t: &Tensor) -> Result<()> {
    dtypes(op, DType::F32, &[t])?;
    if t.numel() != 1 {
        return shape_error(op, format!("{t:?} must hold one element"));
    }
    Ok(())
}

/// Checks a matrix `[r, c]`; returns its rows.
pub(crate) fn matrix(op: &'static str, t: &Tensor) -> Result<Rows> {
    let &[r, c] = t.shape() else {
        return shape_error(op, format!("{t:?} must be a matrix [r, c]"));
    };
    let [rows] = rows_of(op, [t])?;
    Ok(Rows { outer: r, inner: 1, width: c, ..rows })
}

impl Quantize<'_> {
    /// Checks shapes, types, and that scales fit their source; returns the rows of `x` and the FP8 format.
    pub(crate) fn check(&self, op: &'static str) -> Result<(Rows, Option<DType>)> {
        let x = matrix(op, self.x)?;
        if !matches!(self.x.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::DType { op, found: self.x.dtype(), wanted: DType::F32 });
        }
        let (r, c) = (x.outer, x.width);
        let outputs = [self.rows.map(|b| (b, [r, c])), self.cols.map(|b| (b, [c, r]))];
        let mut format = None;
        for (bytes, shape) in outputs.into_iter().flatten() {
            bytes.check(op, shape)?;
            let whole = bytes.scaling == ScalingMode::PerTensor;
            if whole == matches!(self.range, ScaleSource::Blocks { .. }) {
                let what = format!("{:?} scales from {:?}", bytes.scaling, self.range);
                return shape_error(op, what);
            }
            let found = bytes.data.dtype();
            if *format.get_or_insert(found) != found {
                return shape_error(op, "both orientations must have one FP8 format");
            }
        }
        match self.range {
            ScaleSource::Amax { amax, .. } => one(op, amax)?,
            ScaleSource::Given { scale, amax } => [scale, amax].into_iter().try_for_each(|t| one(op, t))?,
            ScaleSource::Blocks { .. } => {}
        }
        if let Some((sums, _)) = self.sums {
            dtypes(op, DType::F32, &[sums])?;
            if sums.shape() != [c] || !sums.is_contiguous() {
                return shape_error(op, format!("bias gradient {:?} for {c} columns", sums.shape()));
            }
        }
        Ok((x, format))
    }
}

impl Fp8Gemm<'_> {
    /// Checks shapes, types and scales; returns m, n and k.
    pub(crate) fn check(&self, op: &'static str) -> Result<[usize; 3]> {
        let (a, b) = (self.a, self.b);
        let [m, n, k] = [a.rows(), b.rows(), a.cols];
        a.check(op, [m, k])?;
        b.check(op, [n, k])?;
        let pair = |f: fn(&Fp8Tensor) -> bool| f(a) && f(b);
        if pair(|x| x.data.dtype() == DType::E5M2) {
            return shape_error(
                op,
                "both operands are E5M2, which tensor cores do not multiply; quantize one of them to E4M3",
            );
        }
        if pair(|x| x.scaling == ScalingMode::Block128x128) {
            return shape_error(
                op,
                "both operands have 128x128 block scales; quantize one of them with 1x128 blocks",
            );
        }
        if (a.scaling == ScalingMode::PerTensor) != (b.scaling == ScalingMode::PerTensor) {
            return shape_error(
                op,
                "one operand has a per-tensor scale and the other block scales; use one mode for both",
            );
        }
        let c = matrix(op, self.c)?;
        if (c.outer, c.width) != (m, n) {
            return shape_error(op, format!("[{m}, {k}]·[{n}, {k}]ᵀ into {:?}", self.c));
        }
        if !matches!(self.c.dtype(), DType::F32 | DType::BF16) {
            return Err(Error::DType { op, found: self.c.dtype(), wanted: DType::F32 });
        }
        if self.accumulate {
            dtypes(op, DType::F32, &[self.c])?;
        }
        if let Some(bias) = self.bias {
            dtypes(op, DType::BF16, &[bias])?;
            if bias.shape() != [n] || !bias.is_contiguous() {
                return shape_error(op, format!("bias {:?} of {n} columns", bias.shape()));
            }
        }
        Ok([m, n, k])
    }
}

/// Checks an amax history and its scales; returns `len` and `n`.
pub(crate) fn check_delayed(
    op: &'static str,
    history: &Tensor,
    reduced: &Tensor,
    largest: &Tensor,
    scale: &Tensor,
) -> Result<[usize; 2]> {
    let all = [history, reduced, largest, scale];
    dtypes(op, DType::F32, &all)?;
    let n = scale.numel();
    match history.shape() {
        &[len, columns]
            if len > 0
                && columns == n
                && all.iter().all(|t| t.is_contiguous())
                && all[1..].iter().all(|t| t.shape() == [n]) =>
        {
            Ok([len, n])
        }
        _ => {
            let shapes = all.map(|t| t.shape().to_vec());
            shape_error(
                op,
                format!("history, reduced, largest and scale are {shapes:?}, not [len, n], [n], [n], [n]"),
            )
        }
    }
}

/// Checks of [`crate::QuantKernels::fp8_transpose`]: returns r and c.
pub(crate) fn check_transpose(op: &'static str, q: &Fp8Tensor, out: &Fp8Tensor) -> Result<[usize; 2]> {
    let (r, c) = (q.rows(), q.cols);
    q.check(op, [r, c])?;
    out.check(op, [c, r])?;
    if q.scaling != ScalingMode::PerTensor
        || out.scaling != ScalingMode::PerTensor
        || q.data.dtype() != out.data.dtype()
    {
        return shape_error(op, "both must have one FP8 format and per-tensor scaling");
    }
    Ok([r, c])
}
