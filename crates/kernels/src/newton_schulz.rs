//! Orthogonalization of a matrix by Newton–Schulz iterations: polynomials that take every singular value towards 1.

use crate::{BatchedGemm, Kernels};
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
    /// Rows of the product.
    fn of(self, [rows, cols]: [usize; 2]) -> usize {
        match self {
            GramSide::Rows => rows,
            GramSide::Columns => cols,
        }
    }

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
    /// Sums over the shards of the matrix: its squared norm, f64, and the Gram matrix of each iteration, f32.
    pub sum: Option<&'a SumOverRanks<'a>>,
}

/// FLOPs of `steps` iterations on one matrix: Gram matrix, its square, and their product with the matrix. What symmetry spares
/// counts as done.
pub fn newton_schulz_flops([rows, cols]: [usize; 2], steps: usize) -> f64 {
    let (short, long) = (rows.min(cols) as f64, rows.max(cols) as f64);
    steps as f64 * (2.0 * (2.0 * short * short * long) + 2.0 * short.powi(3))
}

/// FLOPs of an iteration are proportional to this.
pub fn newton_schulz_cost([rows, cols]: [usize; 2]) -> f64 {
    let (short, long) = (rows.min(cols) as f64, rows.max(cols) as f64);
    long * short * short
}

/// Orthogonalizes `x [rows, cols]`, f32 and contiguous, in place; see [`NewtonSchulz`].
pub fn newton_schulz(k: &dyn Kernels, s: &Stream, ns: &NewtonSchulz, x: &Tensor) -> Result<()> {
    newton_schulz_batched(k, s, ns, &[x])
}

/// Bytes of the stacks that are iterated on together, at most, unless a single matrix needs more.
const STACK_BYTES: usize = 512 << 20;

/// Orthogonalizes matrices of one shape, each by itself, with batched GEMMs; in place, f32 and contiguous. With
/// [`NewtonSchulz::sum`] every rank must give as many, of shapes that need as much memory.
pub fn newton_schulz_batched(k: &dyn Kernels, s: &Stream, ns: &NewtonSchulz, xs: &[&Tensor]) -> Result<()> {
    const OP: &str = "newton_schulz";
    let Some(first) = xs.first() else { return Ok(()) };
    let &[rows, cols] = first.shape() else {
        return shape_error(OP, format!("{:?} is not a matrix", first.shape()));
    };
    if let Some(other) = xs.iter().find(|x| x.shape() != first.shape()) {
        return shape_error(
            OP,
            format!("{:?} and {:?} are of different shapes", first.shape(), other.shape()),
        );
    }
    if first.numel() == 0 && ns.sum.is_none() {
        return Ok(());
    }
    let stack = stack_of((ns.gram, ns.bf16), [rows, cols], xs.len());
    xs.chunks(stack).try_for_each(|xs| iterate(k, s, ns, [rows, cols], xs))
}

/// Bytes that iterations on one matrix take: it and its Gram matrix, as operands and as f32 sums.
fn matrix_bytes((gram, bf16): (GramSide, bool), [rows, cols]: [usize; 2]) -> usize {
    let side = gram.of([rows, cols]);
    let operand = if bf16 { DType::BF16 } else { DType::F32 };
    (rows * cols + side * side) * (operand.size() + DType::F32.size())
}

/// Matrices that are iterated on together, of `count`. Stacks are of about equal size: each number of matrices is another
/// GEMM to tune.
fn stack_of(how: (GramSide, bool), shape: [usize; 2], count: usize) -> usize {
    let most = (STACK_BYTES / matrix_bytes(how, shape).max(1)).clamp(1, count.max(1));
    count.div_ceil(count.div_ceil(most).max(1)).max(1)
}

/// Bytes of workspace that [`newton_schulz_batched`] takes for `count` matrices, with that side of the Gram matrix, in bf16
/// or f32.
pub fn newton_schulz_bytes((gram, bf16): (GramSide, bool), shape: [usize; 2], count: usize) -> usize {
    if count == 0 {
        return 0;
    }
    stack_of((gram, bf16), shape, count) * (matrix_bytes((gram, bf16), shape) + DType::F64.size())
}

/// Gram matrices from this size on are computed by their lower blocks. Of an m×n matrix with halves h = m/2, the blocks
/// [h, h] and [h, m] have 3/4 of the 2m²n FLOPs, two calls of which each fills the device from here on (m = 2048: 32 and 64
/// tiles of 128×256 for each matrix of the stack), and the missing block is 1/4 of a bf16 matrix to transpose: for m = 2048,
/// n = 8192, 17 GFLOP (25 µs at 700 TFLOP/s) less for 4 MB of traffic. Of the 2m³ FLOPs of A² the same would spare 4 GFLOP
/// (6 µs) for 8 MB of f32 traffic and a launch: it is computed in full, as is all below this size.
const SYMMETRIC_FROM: usize = 2048;

/// `A = x·xᵀ`, or `xᵀ·x`, of every matrix of a stack.
fn gram_matrix(k: &dyn Kernels, s: &Stream, side: GramSide, x: &Tensor, out: &Tensor) -> Result<()> {
    let product = |a: &Tensor, b: &Tensor, c: &Tensor| {
        let (trans_a, trans_b) = (side == GramSide::Columns, side == GramSide::Rows);
        k.gemm_batched(s, &BatchedGemm { a, trans_a, b, trans_b, c })
    };
    let m = out.shape()[1];
    if m < SYMMETRIC_FROM {
        return product(x, x, out);
    }
    // On a boundary of tiles.
    let half = m / 2 / 128 * 128;
    let axis = if side == GramSide::Rows { 1 } else { 2 };
    let (upper, lower) = (x.narrow(axis, 0, half)?, x.narrow(axis, half, m - half)?);
    product(&upper, &upper, &out.narrow(1, 0, half)?.narrow(2, 0, half)?)?;
    product(&lower, x, &out.narrow(1, half, m - half)?)?;
    k.mirror(s, out, half)
}

/// Iterates on one stack of matrices.
fn iterate(
    k: &dyn Kernels,
    s: &Stream,
    ns: &NewtonSchulz,
    [rows, cols]: [usize; 2],
    xs: &[&Tensor],
) -> Result<()> {
    let (n, side) = (xs.len(), ns.gram.of([rows, cols]));
    let operand = if ns.bf16 { DType::BF16 } else { DType::F32 };
    let new = |shape: &[usize], dtype| Tensor::empty(s, shape, dtype, Category::Workspace);
    let square = new(&[n], DType::F64)?;
    // Operands of the products, and what is added to them.
    let (x, gram) = (new(&[n, rows, cols], operand)?, new(&[n, side, side], operand)?);
    let (product, gram2) = (new(&[n, rows, cols], DType::F32)?, new(&[n, side, side], DType::F32)?);
    let multiply = |a: &Tensor, b: &Tensor, c: &Tensor| {
        k.gemm_batched(s, &BatchedGemm { a, trans_a: false, b, trans_b: false, c })
    };
    for (i, x) in xs.iter().enumerate() {
        k.grad_square_sum(s, &[&x.view(&[x.numel()])?], &square.narrow(0, i, 1)?)?;
    }
    ns.sum.map_or(Ok(()), |sum| sum(&square))?;
    for (i, from) in xs.iter().enumerate() {
        k.normalize(s, from, &square.narrow(0, i, 1)?, LEAST_NORM, &x.select(0, i)?)?;
    }
    for &[a, b, c] in ns.coefficients {
        match ns.sum {
            None => gram_matrix(k, s, ns.gram, &x, &gram)?,
            // Partial sums are added in f32, and the whole is rounded.
            Some(sum) => {
                gram_matrix(k, s, ns.gram, &x, &gram2)?;
                sum(&gram2)?;
                k.copy(s, &gram2, &gram)?;
            }
        }
        // A cubic polynomial needs no square. Both powers come from the same rounded matrix: their errors would not cancel
        // otherwise.
        let weight = if c == 0.0 { b } else { 1.0 };
        if c != 0.0 {
            multiply(&gram, &gram, &gram2)?;
            k.combine(s, [b, c], &gram, &gram2)?;
        }
        match ns.gram {
            GramSide::Rows => multiply(&gram, &x, &product)?,
            GramSide::Columns => multiply(&x, &gram, &product)?,
        }
        k.combine(s, [a, weight], &x, &product)?;
    }
    xs.iter().enumerate().try_for_each(|(i, to)| k.copy(s, &x.select(0, i)?, to))
}
