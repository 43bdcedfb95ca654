//! FP8 quantization by definition: value tables and f64 arithmetic, one value at a time; and adversarial matrices.

use super::devices::{TestDevice, devices, numbers};
use ferrotron_kernels::{Fp8Tensor, Kernels, ScalingMode};
use ferrotron_tensor::{Category, DType, Float, Tensor, bf16, f16};

/// Runs a test on every device.
pub fn everywhere(test: impl Fn(&TestDevice, &dyn Kernels)) {
    for h in devices() {
        test(&h, h.k.as_ref());
    }
}

/// Non-negative finite values of a format, in the order of their codes.
pub fn values(format: DType) -> Vec<f64> {
    let (mantissa, bias, codes) = if format == DType::E4M3 { (3, 7, 0x7f) } else { (2, 15, 0x7c) };
    let value = |code: i32| {
        let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
        match code >> mantissa {
            0 => fraction * 2f64.powi(1 - bias),
            e => (1.0 + fraction) * 2f64.powi(e - bias),
        }
    };
    (0..codes).map(value).collect()
}

/// A format's table.
pub struct Table {
    pub format: DType,
    values: Vec<f64>,
}

impl Table {
    pub fn new(format: DType) -> Table {
        Table { format, values: values(format) }
    }

    pub fn largest(&self) -> f64 {
        self.values[self.values.len() - 1]
    }

    /// Code of the nearest value, ties to even; `None` for NaN, where any NaN code is accepted.
    pub fn code(&self, x: f32) -> Option<u8> {
        if x.is_nan() {
            return None;
        }
        let size = f64::from(x.abs()).min(self.largest());
        let above = self.values.partition_point(|v| *v < size);
        let code = if above == 0 {
            0
        } else {
            let (down, up) = (size - self.values[above - 1], self.values[above] - size);
            if down < up || (down == up && above % 2 == 1) { above - 1 } else { above }
        };
        Some(code as u8 | if x.is_sign_negative() { 0x80 } else { 0 })
    }

    /// The value of a code.
    pub fn value(&self, code: u8) -> f64 {
        let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
        match (self.values.get(usize::from(code & 0x7f)), self.format, code & 0x7f) {
            (Some(v), ..) => sign * v,
            (None, DType::E5M2, 0x7c) => sign * f64::INFINITY,
            _ => f64::NAN,
        }
    }
}

/// Scale for an amax.
pub fn scale(table: &Table, amax: f32, pow2: bool, beyond: f32) -> f32 {
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    // f64 has more than twice the mantissa of f32, so rounding the quotient again to f32 is correct rounding.
    let mut s = (table.largest() / f64::from(amax)) as f32;
    if s.is_infinite() {
        s = beyond;
    }
    if pow2 {
        let mut p = 1.0f64;
        while p * 2.0 <= f64::from(s) {
            p *= 2.0;
        }
        while p > f64::from(s) {
            p /= 2.0;
        }
        s = p as f32;
    }
    s
}

/// Largest finite value of an input dtype.
pub fn biggest(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 65504.0,
        DType::BF16 => (2.0 - 2f64.powi(-7)).mul_add(2f64.powi(127), 0.0) as f32,
        _ => f32::MAX,
    }
}

pub fn amax<'a>(x: impl Iterator<Item = &'a f32>) -> f32 {
    x.filter(|x| !x.is_nan()).fold(0.0, |m, x| m.max(x.abs()))
}

/// A matrix in row-major order.
pub struct Matrix {
    pub r: usize,
    pub c: usize,
    pub x: Vec<f32>,
}

impl Matrix {
    pub fn transposed(&self) -> Matrix {
        let x = (0..self.c).flat_map(|j| (0..self.r).map(move |i| self.x[i * self.c + j])).collect();
        Matrix { r: self.c, c: self.r, x }
    }

    /// Padded codes and padded inverse scales of this matrix as a rowwise operand; `scale_of` maps the amax of a block to its
    /// scale.
    pub fn codes(
        &self,
        table: &Table,
        scaling: ScalingMode,
        scale_of: impl Fn(f32) -> f32,
    ) -> (Vec<Option<u8>>, Vec<f32>) {
        let (r, c) = (self.r, self.c);
        let mut codes = vec![Some(0); r * c.next_multiple_of(16)];
        let shape = scaling.scales(r, c);
        let mut inverse = vec![0f32; shape.iter().product()];
        let (h, w) = match scaling {
            ScalingMode::PerTensor => (r.max(1), c.max(1)),
            ScalingMode::Block1x128 => (1, 128),
            ScalingMode::Block128x128 => (128, 128),
        };
        if scaling == ScalingMode::PerTensor {
            inverse[0] = 1.0 / scale_of(amax(self.x.iter()));
        }
        for top in (0..r).step_by(h) {
            for left in (0..c).step_by(w) {
                let (rows, cols) = (top..(top + h).min(r), left..(left + w).min(c));
                let inside =
                    || rows.clone().flat_map(|i| cols.clone().map(move |j| (i, j)).collect::<Vec<_>>());
                let found: Vec<f32> = inside().map(|(i, j)| self.x[i * c + j]).collect();
                let s = scale_of(amax(found.iter()));
                for (i, j) in inside() {
                    let moved = f64::from(self.x[i * c + j]) * f64::from(s);
                    codes[i * c.next_multiple_of(16) + j] = table.code(moved as f32);
                }
                let at = match scaling {
                    ScalingMode::PerTensor => 0,
                    ScalingMode::Block1x128 => left / 128 * shape[1] + top,
                    ScalingMode::Block128x128 => top / 128 * shape[1] + left / 128,
                };
                inverse[at] = 1.0 / s;
            }
        }
        (codes, inverse)
    }
}

/// Fills a matrix with ordinary or adversarial values.
pub const KINDS: [&str; 9] =
    ["plain", "zeros", "tiny", "huge", "infinite", "some NaN", "all NaN", "outlier", "spread"];

pub fn hostile(kind: &str, dtype: DType, seed: u64, n: usize) -> Vec<f32> {
    let raw = numbers(DType::F32, seed, n);
    let smallest = match dtype {
        DType::F16 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-133),
        _ => 2f64.powi(-149),
    };
    let value = |i: usize, x: f64| match kind {
        "zeros" => 0.0 * x,
        "tiny" => (x * 9.0).round() * smallest,
        "huge" => x * f64::from(biggest(dtype)),
        "infinite" if i % 57 == 11 => x.signum() * f64::INFINITY,
        "some NaN" if i % 7 == 3 => f64::NAN,
        "all NaN" => f64::NAN,
        "outlier" if i == n / 2 => 3e4,
        "outlier" => x * 1e-3,
        "spread" => x * 2f64.powi(((i * 13) % 24) as i32 - 14),
        _ => x * 3.0,
    };
    raw.iter().enumerate().map(|(i, x)| rounded(dtype, value(i, *x) as f32)).collect()
}

pub fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// A matrix on the device: contiguous, or as a view into a larger buffer of NaN.
pub fn place(h: &TestDevice, dtype: DType, m: &Matrix, framed: bool) -> Tensor {
    let (top, left, width, height) = if framed { (1, 3, m.c + 5, m.r + 2) } else { (0, 0, m.c, m.r) };
    let mut all = vec![f32::NAN; width * height];
    for i in 0..m.r {
        all[(top + i) * width + left..][..m.c].copy_from_slice(&m.x[i * m.c..][..m.c]);
    }
    fn up<T: Float>(h: &TestDevice, all: &[f32], shape: &[usize]) -> Tensor {
        let all: Vec<T> = all.iter().map(|x| T::from_f32(*x)).collect();
        h.s.upload(&all, shape, Category::Workspace).unwrap()
    }
    let shape = [height, width];
    let whole = match dtype {
        DType::F16 => up::<f16>(h, &all, &shape),
        DType::BF16 => up::<bf16>(h, &all, &shape),
        _ => up::<f32>(h, &all, &shape),
    };
    whole.narrow(0, top, m.r).unwrap().narrow(1, left, m.c).unwrap()
}

/// FP8 tensor filled with a value that the kernel must overwrite.
pub fn poisoned(h: &TestDevice, shape: [usize; 2], format: DType, scaling: ScalingMode) -> Fp8Tensor {
    let b = Fp8Tensor::empty(&h.s, shape, format, scaling, Category::Workspace).unwrap();
    h.s.upload_into(&b.data.as_bytes().unwrap(), &vec![0x55u8; b.data.numel()]).unwrap();
    h.s.upload_into(&b.scale_inv, &vec![f32::NAN; b.scale_inv.numel()]).unwrap();
    b
}

pub fn raw(h: &TestDevice, b: &Fp8Tensor) -> Vec<u8> {
    h.s.download(&b.data.as_bytes().unwrap()).unwrap()
}

pub fn host(h: &TestDevice, t: &Tensor) -> Vec<f32> {
    match t.dtype() {
        DType::F32 => h.s.download::<f32>(t).unwrap(),
        DType::BF16 => h.s.download::<bf16>(t).unwrap().into_iter().map(|x| x.to_f32()).collect(),
        DType::F16 => h.s.download::<f16>(t).unwrap().into_iter().map(|x| x.to_f32()).collect(),
        other => panic!("{other}"),
    }
}

/// Equal bits, except that any NaN matches NaN.
pub fn same(what: &str, ours: &[f32], wanted: &[f32]) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        let equal = o.to_bits() == w.to_bits() || (o.is_nan() && w.is_nan());
        assert!(equal, "{what} [{i}]: {o:e} instead of {w:e}");
    }
}
