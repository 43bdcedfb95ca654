//! Orthogonalization of a matrix by Newton–Schulz iterations: polynomials that take every singular value towards 1.

use crate::{Gemm, Kernels};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, shape_error};

/// Norms below this are taken as this.
const LEAST_NORM: f32 = 1e-15;

/// Coefficients `(a, b, c)` of an iteration `x ← a·x + b·x³ + c·x⁵` on singular values.
pub type Coefficients = [f32; 3];

/// Named sets of coefficients, one row per iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoefficientSet {
    /// One row, tuned for steepness at 0; singular values end in [0.68, 1.13].
    Simple,
    /// Five rows; after five iterations singular values from 0.01 on are in [0.978, 1.032].
    Quintic,
    /// Eight rows, each optimal for the interval that the last one leaves.
    PolarExpress,
    /// Five rows of Chebyshev-accelerated iterations.
    Cans,
    /// Four rows for almost-orthogonal preconditioning.
    Aol,
    /// Eight times [`CoefficientSet::Simple`], then two convergent rows.
    DeepseekV4,
    /// Five rows without a fifth power.
    Cubic5,
}

const SIMPLE: Coefficients = [3.4445, -4.7750, 2.0315];
const LAST: Coefficients = [2.0, -1.5, 0.5];

impl CoefficientSet {
    /// Every set.
    pub const ALL: [CoefficientSet; 7] = [
        CoefficientSet::Simple,
        CoefficientSet::Quintic,
        CoefficientSet::PolarExpress,
        CoefficientSet::Cans,
        CoefficientSet::Aol,
        CoefficientSet::DeepseekV4,
        CoefficientSet::Cubic5,
    ];

    /// The rows.
    pub fn rows(self) -> &'static [Coefficients] {
        match self {
            CoefficientSet::Simple => &[SIMPLE],
            CoefficientSet::Quintic => &[
                [4.0848, -6.8946, 2.9270],
                [3.9505, -6.3029, 2.6377],
                [3.7418, -5.5913, 2.3037],
                [2.8769, -3.1427, 1.2046],
                [2.8366, -3.0525, 1.2012],
            ],
            CoefficientSet::PolarExpress => &[
                [8.2051, -22.9019, 16.4607],
                [4.0664, -2.8612, 0.5184],
                [3.9096, -2.8234, 0.5250],
                [3.2856, -2.4153, 0.4853],
                [2.2779, -1.6198, 0.3985],
                [1.8726, -1.2307, 0.3585],
                [1.8564, -1.2132, 0.3568],
                [1.8750, -1.2500, 0.3750],
            ],
            CoefficientSet::Cans => &[
                [8.4703, -25.1081, 18.6293],
                [4.1828, -3.1087, 0.5806],
                [3.9619, -2.9541, 0.5630],
                [3.2866, -2.4647, 0.5074],
                [2.2737, -1.6447, 0.4162],
            ],
            CoefficientSet::Aol => &[
                [4.0098, -7.0585, 2.4635],
                [3.4585, -5.5479, 2.5959],
                [2.7573, -3.2939, 1.4254],
                [2.7215, -3.0494, 1.3169],
            ],
            CoefficientSet::DeepseekV4 => {
                &[SIMPLE, SIMPLE, SIMPLE, SIMPLE, SIMPLE, SIMPLE, SIMPLE, SIMPLE, LAST, LAST]
            }
            CoefficientSet::Cubic5 => &[
                [3.3656576, -3.3420992, 0.0],
                [2.5744352, -1.4957376, 0.0],
                [2.5368962, -1.431257, 0.0],
                [2.4418906, -1.276404, 0.0],
                [2.2230472, -0.963065, 0.0],
            ],
        }
    }

    /// The coefficients of `steps` iterations. Beyond its rows a convergent set repeats the last one, others begin anew.
    pub fn schedule(self, steps: usize) -> Vec<Coefficients> {
        let rows = self.rows();
        let converges =
            matches!(self, CoefficientSet::PolarExpress | CoefficientSet::Cans | CoefficientSet::DeepseekV4);
        let row = |i: usize| if converges { rows[i.min(rows.len() - 1)] } else { rows[i % rows.len()] };
        (0..steps).map(row).collect()
    }
}

/// Factor on an orthogonalized update, from the rows (outputs) and columns (inputs) of the whole matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleMode {
    /// `√max(rows, cols)`; times 0.2 it has about the RMS of AdamW's updates.
    Spectral,
    /// `√max(1, rows/cols)`
    ShapeScaling,
    /// `√(rows/cols)`
    UnitRmsNorm,
}

impl ScaleMode {
    /// The factor.
    pub fn factor(self, [rows, cols]: [usize; 2]) -> f64 {
        let (rows, cols) = (rows as f64, cols as f64);
        match self {
            ScaleMode::Spectral => rows.max(cols).sqrt(),
            ScaleMode::ShapeScaling => (rows / cols).max(1.0).sqrt(),
            ScaleMode::UnitRmsNorm => (rows / cols).sqrt(),
        }
    }
}

/// Which product of the matrix with itself is iterated on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GramSide {
    /// `x·xᵀ [rows, rows]`
    Rows,
    /// `xᵀ·x [cols, cols]`
    Columns,
}

impl GramSide {
    /// The smaller product.
    pub fn shorter([rows, cols]: [usize; 2]) -> GramSide {
        if rows > cols { GramSide::Columns } else { GramSide::Rows }
    }
}

/// Sums a tensor over the ranks that a matrix is sharded over.
pub type SumOverRanks<'a> = dyn Fn(&Tensor) -> Result<()> + 'a;

/// An orthogonalization: `x ← x/‖x‖`, then for every row `(a, b, c)` of the coefficients, with the Gram matrix `A = x·xᵀ`,
/// `x ← a·x + (b·A + c·A²)·x`, or the same from the other side.
pub struct NewtonSchulz<'a> {
    /// One row per iteration.
    pub coefficients: &'a [Coefficients],
    /// The matrix and its Gram matrices are rounded to bf16, products are summed in f32.
    pub bf16: bool,
    /// Side of the Gram matrix; with `sum` the one that is not sharded.
    pub gram: GramSide,
    /// Sums over the shards of the matrix: its squared norm, f64 `[1]`, and the Gram matrix of each iteration, f32.
    pub sum: Option<&'a SumOverRanks<'a>>,
}

/// FLOPs of an iteration are proportional to this.
pub fn newton_schulz_cost([rows, cols]: [usize; 2]) -> f64 {
    let (short, long) = (rows.min(cols) as f64, rows.max(cols) as f64);
    long * short * short
}

/// Orthogonalizes `x [rows, cols]`, f32 and contiguous, in place; see [`NewtonSchulz`].
pub fn newton_schulz(k: &dyn Kernels, s: &Stream, ns: &NewtonSchulz, x: &Tensor) -> Result<()> {
    const OP: &str = "newton_schulz";
    let &[rows, cols] = x.shape() else {
        return shape_error(OP, format!("{:?} is not a matrix", x.shape()));
    };
    if x.numel() == 0 && ns.sum.is_none() {
        return Ok(());
    }
    let side = match ns.gram {
        GramSide::Rows => rows,
        GramSide::Columns => cols,
    };
    let new = |shape: &[usize], dtype| Tensor::empty(s, shape, dtype, Category::Workspace);
    let square = new(&[1], DType::F64)?;
    let (gram, gram2) = (new(&[side, side], DType::F32)?, new(&[side, side], DType::F32)?);
    let product = new(&[rows, cols], DType::F32)?;
    let narrow = match ns.bf16 {
        true => Some((new(&[rows, cols], DType::BF16)?, new(&[side, side], DType::BF16)?)),
        false => None,
    };
    // The operands of the products.
    let (x16, gram16) = (narrow.as_ref().map(|n| &n.0), narrow.as_ref().map(|n| &n.1));
    let (x_in, gram_in) = (x16.unwrap_or(x), gram16.unwrap_or(&gram));
    let sum = |t: &Tensor| ns.sum.map_or(Ok(()), |sum| sum(t));
    let multiply = |a: &Tensor, b: &Tensor, [trans_a, trans_b]: [bool; 2], c: &Tensor| {
        k.gemm(s, &Gemm { a, trans_a, b, trans_b, bias: None, accumulate: false, c })
    };
    k.grad_square_sum(s, &[&x.view(&[x.numel()])?], &square)?;
    sum(&square)?;
    k.normalize(s, x, &square, LEAST_NORM, x16)?;
    for &[a, b, c] in ns.coefficients {
        match ns.gram {
            GramSide::Rows => multiply(x_in, x_in, [false, true], &gram)?,
            GramSide::Columns => multiply(x_in, x_in, [true, false], &gram)?,
        }
        sum(&gram)?;
        if let Some(narrow) = gram16 {
            // Both powers come from the same rounded matrix: their errors would not cancel otherwise.
            k.copy(s, &gram, narrow)?;
            k.copy(s, narrow, &gram)?;
        }
        // A cubic polynomial needs no square.
        let weight = if c == 0.0 { b } else { 1.0 };
        if c != 0.0 {
            multiply(gram_in, gram_in, [false, false], &gram2)?;
            k.combine(s, [b, c], &gram, &gram2, gram16)?;
        }
        match ns.gram {
            GramSide::Rows => multiply(gram_in, x_in, [false, false], &product)?,
            GramSide::Columns => multiply(x_in, gram_in, [false, false], &product)?,
        }
        k.combine(s, [a, weight], x, &product, x16)?;
    }
    Ok(())
}
