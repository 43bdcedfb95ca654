use super::CpuKernels;
use crate::cpu::gemm::{GemmShape, gemm_bf16, gemm_f16, gemm_f32};
use crate::{Gemm, GemmKernels};
use ferrotron_tensor::{DType, Error, Result, Stream, bf16, f16, read, write};

impl GemmKernels for CpuKernels {
    fn gemm(&self, s: &Stream, g: &Gemm) -> Result<()> {
        let z = g.sizes()?;
        let shape = GemmShape {
            m: z.m,
            n: z.n,
            k: z.k,
            trans_a: g.trans_a,
            trans_b: g.trans_b,
            lda: z.lda,
            ldb: z.ldb,
            ldc: z.ldc,
        };
        let (three, four);
        let args: &[_] = match g.bias {
            None => {
                three = [read(g.a), read(g.b), write(g.c)];
                &three
            }
            Some(bias) => {
                four = [read(g.a), read(g.b), write(g.c), read(bias)];
                &four
            }
        };
        s.launch(g.name(), args, |l| {
            let (t, isa, bias) = (l.threads(), self.isa, g.bias);
            match (g.a.dtype(), g.c.dtype()) {
                (DType::F32, _) => gemm_f32(
                    t,
                    isa,
                    shape,
                    l.slice(0)?,
                    l.slice(1)?,
                    bias.map(|_| l.slice(3)).transpose()?,
                    g.accumulate,
                    l.slice_mut(2)?,
                ),
                (DType::BF16, out) => {
                    let (a, b) = (l.slice::<bf16>(0)?, l.slice::<bf16>(1)?);
                    let bias = bias.map(|_| l.slice(3)).transpose()?;
                    if out == DType::BF16 {
                        gemm_bf16::<bf16>(t, isa, shape, a, b, bias, g.accumulate, l.slice_mut(2)?);
                    } else {
                        gemm_bf16::<f32>(t, isa, shape, a, b, bias, g.accumulate, l.slice_mut(2)?);
                    }
                }
                (DType::F16, out) => {
                    let (a, b) = (l.slice::<f16>(0)?, l.slice::<f16>(1)?);
                    let bias = bias.map(|_| l.slice(3)).transpose()?;
                    if out == DType::F16 {
                        gemm_f16::<f16>(t, isa, shape, a, b, bias, g.accumulate, l.slice_mut(2)?);
                    } else {
                        gemm_f16::<f32>(t, isa, shape, a, b, bias, g.accumulate, l.slice_mut(2)?);
                    }
                }
                (found, _) => return Err(Error::DType { op: "gemm", found, wanted: DType::F32 }),
            }
            Ok(())
        })
    }
}
