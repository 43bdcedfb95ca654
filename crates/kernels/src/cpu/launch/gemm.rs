use super::{CpuKernels, floats};
use crate::cpu::gemm::{Epilogue, GemmShape, gemm_bf16, gemm_f16, gemm_f32};
use crate::cpu::quant::{Fp8Operand, fp8_gemm};
use crate::cpu::rows::RowsViewMut;
use crate::quant::check::matrix;
use crate::{Fp8Gemm, Gemm, GemmKernels};
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
            let (cpu, accumulate) = (self.context(l), g.accumulate);
            match (g.a.dtype(), g.c.dtype()) {
                (DType::F32, _) => {
                    let epilogue = Epilogue { bias: g.bias.map(|_| l.slice(3)).transpose()?, accumulate };
                    gemm_f32(cpu, shape, l.slice(0)?, l.slice(1)?, epilogue, l.slice_mut(2)?);
                }
                (DType::BF16, out) => {
                    let (a, b) = (l.slice::<bf16>(0)?, l.slice::<bf16>(1)?);
                    let epilogue = Epilogue { bias: g.bias.map(|_| l.slice(3)).transpose()?, accumulate };
                    if out == DType::BF16 {
                        gemm_bf16::<bf16>(cpu, shape, a, b, epilogue, l.slice_mut(2)?);
                    } else {
                        gemm_bf16::<f32>(cpu, shape, a, b, epilogue, l.slice_mut(2)?);
                    }
                }
                (DType::F16, out) => {
                    let (a, b) = (l.slice::<f16>(0)?, l.slice::<f16>(1)?);
                    let epilogue = Epilogue { bias: g.bias.map(|_| l.slice(3)).transpose()?, accumulate };
                    if out == DType::F16 {
                        gemm_f16::<f16>(cpu, shape, a, b, epilogue, l.slice_mut(2)?);
                    } else {
                        gemm_f16::<f32>(cpu, shape, a, b, epilogue, l.slice_mut(2)?);
                    }
                }
                (found, _) => return Err(Error::DType { op: "gemm", found, wanted: DType::F32 }),
            }
            Ok(())
        })
    }

    fn fp8_gemm(&self, s: &Stream, g: &Fp8Gemm) -> Result<()> {
        const OP: &str = "fp8_gemm";
        let [m, n, k] = g.check(OP)?;
        let rows = matrix(OP, g.c)?;
        let mut args =
            vec![read(&g.a.data), read(&g.a.scale_inv), read(&g.b.data), read(&g.b.scale_inv), write(g.c)];
        args.extend(g.bias.map(read));
        s.launch(g.name, &args, |l| {
            let isa = self.isa;
            let a = Fp8Operand::argument(l, isa, 0, g.a.data.dtype(), g.a.scaling, [m, k])?;
            let b = Fp8Operand::argument(l, isa, 2, g.b.data.dtype(), g.b.scaling, [n, k])?;
            let bias = g.bias.map(|_| l.slice(5)).transpose()?;
            let epilogue = Epilogue { bias, accumulate: g.accumulate };
            floats!(OP, g.c.dtype(), C => {
                let c = RowsViewMut::<C> { data: l.slice_mut(4)?, rows };
                fp8_gemm(self.context(l), a.whole(), b.whole(), k, epilogue, c)
            })
        })
    }
}
