//! GEMMs with a fused cuBLASLt epilogue (GELU, bias gradient), used where tuning finds them faster than separate kernels.
//! cuBLASLt's GELU derivative has an error of 1e-5 in its tail, more than bf16 rounding of small values: the GELU backward
//! pass is not fused.

use super::CudaKernels;
use super::cublaslt::Epilogue;
use super::gemm::rows_aligned16;
use super::gemm_cache::Operands;
use crate::{Act, ActForward, ActivationKernels, ElementwiseKernels, GemmKernels, LinearAct, LinearWgrad};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, write};

/// Whether all tensors are contiguous bf16 of one shape.
fn contiguous_bf16(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|t| t.dtype() == DType::BF16 && t.shape() == tensors[0].shape() && t.is_contiguous())
}

impl CudaKernels {
    pub(super) fn launch_linear_act_forward(&self, s: &Stream, f: &LinearAct) -> Result<()> {
        let unfused = |y: &Tensor| {
            self.gemm(s, &f.gemm(f.h))?;
            self.act_forward(s, &ActForward { y, ..f.activation() })
        };
        let g = f.gemm(f.y);
        let z = g.sizes()?;
        let supported = f.act == Act::GeluTanh && contiguous_bf16(&[f.y, f.h]) && f.x.dtype() == DType::BF16;
        if supported && z.m * z.n * z.k > 0 && g.rows_aligned16(&z) && rows_aligned16(f.h, z.n) {
            let epilogue = Epilogue::Gelu { bias: f.bias.is_some(), ld: z.n };
            let (bias, aux) = (f.bias.map(read), Some(write(f.h)));
            let o = Operands {
                a: g.a,
                b: g.b,
                c: g.c,
                bias,
                aux,
                scales: None,
                factors: None,
                accumulate: false,
            };
            let key = g.key(z, epilogue, Some(f.h));
            if self.gemm_cache.gemm(s, "gemm (output, gelu)", key, &o, Some(&unfused))? {
                return Ok(());
            }
        }
        unfused(f.y)
    }

    pub(super) fn launch_linear_wgrad(&self, s: &Stream, f: &LinearWgrad) -> Result<()> {
        let ((dw, _), (db, accumulate_db)) = (f.dw, f.db);
        let g = f.gemm(dw);
        let z = g.sizes()?;
        let fits = db.shape() == [z.m] && db.is_contiguous();
        let supported =
            fits && [dw, db].iter().all(|t| t.dtype() == DType::F32) && f.dy.dtype() == DType::BF16;
        if supported && z.m * z.n * z.k > 0 && g.rows_aligned16(&z) {
            // The bias-gradient epilogue overwrites its output.
            let sums = match accumulate_db || db.alignment() < 16 {
                true => Tensor::empty(s, &[z.m], DType::F32, Category::Workspace)?,
                false => db.clone(),
            };
            let unfused = |dw: &Tensor| {
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
                factors: None,
                accumulate: g.accumulate,
            };
            let key = g.key(z, Epilogue::BiasGrad, Some(&sums));
            if self.gemm_cache.gemm(s, "gemm (weight gradient, bias)", key, &o, Some(&unfused))? {
                return match (sums.same_memory(db), accumulate_db) {
                    (true, _) => Ok(()),
                    (false, true) => self.add_assign(s, db, &sums),
                    (false, false) => self.copy(s, &sums, db),
                };
            }
        }
        self.gemm(s, &g)?;
        self.column_sum(s, f.dy, accumulate_db, db)
    }
}
