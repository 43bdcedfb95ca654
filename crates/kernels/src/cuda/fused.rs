//! Products with what follows them in one kernel of cuBLASLt, where that proves faster than one after the other.
//! The library's slope of GELU is off by 1e-5 in its tail, more than bf16 rounds small results by: backward stays apart.

use super::CudaKernels;
use super::cublaslt::Epilogue;
use super::gemm::rows_aligned16;
use super::gemm_cache::Operands;
use crate::{Act, ActForward, ActivationKernels, ElementwiseKernels, GemmKernels, LinearAct, LinearWgrad};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, write};

/// Have all of them rows of bf16, contiguous and of the shape of the first?
fn alike(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|t| t.dtype() == DType::BF16 && t.shape() == tensors[0].shape() && t.is_contiguous())
}

impl CudaKernels {
    pub(super) fn launch_linear_act_forward(&self, s: &Stream, f: &LinearAct) -> Result<()> {
        let apart = |y: &Tensor| {
            self.gemm(s, &f.gemm(f.h))?;
            self.act_forward(s, &ActForward { y, ..f.activation() })
        };
        let g = f.gemm(f.y);
        let z = g.sizes()?;
        let known = f.act == Act::GeluTanh && alike(&[f.y, f.h]) && f.x.dtype() == DType::BF16;
        if known && z.m * z.n * z.k > 0 && g.rows_aligned16(&z) && rows_aligned16(f.h, z.n) {
            let epilogue = Epilogue::Gelu { bias: f.bias.is_some(), ld: z.n };
            let (bias, aux) = (f.bias.map(read), Some(write(f.h)));
            let o = Operands { a: g.a, b: g.b, c: g.c, bias, aux, scales: None, accumulate: false };
            let key = g.key(z, epilogue, Some(f.h));
            if self.gemm_cache.gemm(s, "gemm (output, gelu)", key, &o, Some(&apart))? {
                return Ok(());
            }
        }
        apart(f.y)
    }

    pub(super) fn launch_linear_wgrad(&self, s: &Stream, f: &LinearWgrad) -> Result<()> {
        let ((dw, _), (db, onto)) = (f.dw, f.db);
        let g = f.gemm(dw);
        let z = g.sizes()?;
        let fits = db.shape() == [z.m] && db.is_contiguous();
        let known = fits && [dw, db].iter().all(|t| t.dtype() == DType::F32) && f.dy.dtype() == DType::BF16;
        if known && z.m * z.n * z.k > 0 && g.rows_aligned16(&z) {
            // The library overwrites.
            let sums = match onto || db.alignment() < 16 {
                true => Tensor::empty(s, &[z.m], DType::F32, Category::Workspace)?,
                false => db.clone(),
            };
            let apart = |dw: &Tensor| {
                self.gemm(s, &f.gemm(dw))?;
                self.column_sum(s, f.dy, false, &sums)
            };
            let o = Operands {
                a: g.a,
                b: g.b,
                c: g.c,
                bias: Some(write(&sums)),
                aux: None,
                scales: None,
                accumulate: g.accumulate,
            };
            let key = g.key(z, Epilogue::BiasGrad, Some(&sums));
            if self.gemm_cache.gemm(s, "gemm (weight gradient, bias)", key, &o, Some(&apart))? {
                return match (sums.same_memory(db), onto) {
                    (true, _) => Ok(()),
                    (false, true) => self.add_assign(s, db, &sums),
                    (false, false) => self.copy(s, &sums, db),
                };
            }
        }
        self.gemm(s, &g)?;
        self.column_sum(s, f.dy, onto, db)
    }
}
