//! GEMM: by cuBLASLt, with the algorithm autotuned for the shape. What the library does not take (alignments, mixed
//! dtypes), or would round twice, the generic kernel computes.

use super::CudaKernels;
use super::cublaslt::{Epilogue, GemmKey, Stacks};
use super::gemm_cache::Operands;
use crate::{
    BatchedGemm, Fp8Gemm, Gemm, GemmChoice, GemmKernels, GemmLibrary, GemmSizes, LinearAct, LinearWgrad,
    NewChoices,
};
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, read, write};

/// Whether rows of `t` start on 16-byte boundaries.
pub(super) fn rows_aligned16(t: &Tensor, ld: usize) -> bool {
    t.alignment() >= 16 && (ld * t.dtype().size()).is_multiple_of(16)
}

impl Gemm<'_> {
    /// The autotuning key.
    pub(super) fn key(&self, sizes: GemmSizes, epilogue: Epilogue, aux: Option<&Tensor>) -> GemmKey {
        GemmKey {
            sizes,
            trans: [self.trans_a, self.trans_b],
            types: [self.a.dtype(), self.c.dtype()],
            epilogue,
            align: [Some(self.a), Some(self.b), Some(self.c), aux].map(|t| t.map_or(256, Tensor::alignment)),
            fp8: None,
            stacks: None,
        }
    }

    /// Whether every row of every operand starts on a 16-byte boundary.
    pub(super) fn rows_aligned16(&self, z: &GemmSizes) -> bool {
        let matrices = [(self.a, z.lda), (self.b, z.ldb), (self.c, z.ldc)];
        matrices.iter().all(|(t, ld)| rows_aligned16(t, *ld)) && self.bias.is_none_or(|t| t.alignment() >= 16)
    }
}

impl CudaKernels {
    /// A GEMM; with `rounds_twice` the library may add its rounded product to a 16-bit result.
    fn launch_gemm(&self, s: &Stream, g: &Gemm, rounds_twice: bool) -> Result<()> {
        let sizes = g.sizes()?;
        let input = g.a.dtype();
        if !matches!(input, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::DType { op: "gemm", found: input, wanted: DType::BF16 });
        }
        if sizes.m == 0 || sizes.n == 0 {
            return Ok(());
        }
        // 16-bit results are rounded once. The library rounds before it adds to an existing result, and before it adds
        // a bias where rows are not aligned to 16 bytes: those cases go to the generic kernel.
        let onto = g.accumulate && (g.bias.is_some() || (g.c.dtype() != DType::F32 && !rounds_twice));
        if sizes.k > 0 && !onto && (g.bias.is_none() || g.rows_aligned16(&sizes)) {
            let epilogue = if g.bias.is_some() { Epilogue::Bias } else { Epilogue::None };
            let (bias, accumulate) = (g.bias.map(read), g.accumulate);
            let (aux, scales) = (None, None);
            let operands = Operands { a: g.a, b: g.b, c: g.c, bias, aux, scales, factors: None, accumulate };
            if self.gemm_cache.gemm(s, g.name(), g.key(sizes, epilogue, g.bias), &operands, None)? {
                return Ok(());
            }
        }
        let args = [read(g.a), read(g.b), write(g.c), read(g.bias.unwrap_or(g.a))];
        let count = if g.bias.is_some() { 4 } else { 3 };
        s.launch(g.name(), &args[..count], |l| self.generic_gemm(l, g, &sizes))
    }
}

impl GemmKernels for CudaKernels {
    fn gemm(&self, s: &Stream, g: &Gemm) -> Result<()> {
        self.launch_gemm(s, g, false)
    }

    fn gemm_add(&self, s: &Stream, g: &Gemm) -> Result<()> {
        self.launch_gemm(s, g, true)
    }

    fn gemm_batched(&self, s: &Stream, g: &BatchedGemm) -> Result<()> {
        let (count, sizes) = g.sizes()?;
        let input = g.a.dtype();
        // The algorithm, and so the rounding, depends on the number of matrices. f32 products are taken one by one: their
        // bits are those of any other grouping, such as that of another number of ranks.
        // The library counts them in 32 bits.
        let batched = matches!(input, DType::BF16 | DType::F16) && i32::try_from(count).is_ok();
        if batched && count > 1 && [sizes.m, sizes.n, sizes.k].iter().all(|n| *n > 0) {
            let all = [g.a, g.b, g.c];
            let align = |t: &Tensor| {
                let stride = t.strides()[0] * t.dtype().size();
                t.alignment().min(1 << stride.trailing_zeros().min(8))
            };
            let key = GemmKey {
                sizes,
                trans: [g.trans_a, g.trans_b],
                types: [input, g.c.dtype()],
                epilogue: Epilogue::None,
                align: [align(g.a), align(g.b), align(g.c), 256],
                fp8: None,
                stacks: Some(Stacks { count, strides: all.map(|t| t.strides()[0]) }),
            };
            let (bias, aux, scales) = (None, None, None);
            let operands =
                Operands { a: g.a, b: g.b, c: g.c, bias, aux, scales, factors: None, accumulate: false };
            if self.gemm_cache.gemm(s, "gemm (batched)", key, &operands, None)? {
                return Ok(());
            }
        }
        (0..count).try_for_each(|i| g.with(i, |g| self.gemm(s, g)))
    }

    fn fp8_gemm(&self, s: &Stream, g: &Fp8Gemm) -> Result<()> {
        self.launch_fp8_gemm(s, g)
    }

    fn linear_act_forward(&self, s: &Stream, f: &LinearAct) -> Result<()> {
        self.launch_linear_act_forward(s, f)
    }

    fn linear_wgrad(&self, s: &Stream, f: &LinearWgrad) -> Result<()> {
        self.launch_linear_wgrad(s, f)
    }

    fn gemm_library(&self) -> Option<GemmLibrary> {
        Some(self.gemm_cache.description().clone())
    }

    fn use_gemm_choices(&self, choices: &[GemmChoice], new: NewChoices) {
        self.gemm_cache.use_choices(choices, new);
    }

    fn has_new_gemm_choices(&self) -> bool {
        self.gemm_cache.has_new_choices()
    }

    fn take_gemm_choices(&self) -> Vec<GemmChoice> {
        self.gemm_cache.take_choices()
    }
}
