//! Products of bytes: by cuBLASLt, in the way that proved fastest for the shape.

use crate::cuda::CudaKernels;
use crate::cuda::blas::{Eight, Epilogue, Key};
use crate::cuda::gemm::even;
use crate::cuda::plans::Operands;
use crate::quant::check::matrix;
use crate::{Bytes, Gemm8, GemmSizes, Scaling};
use ferrotron_tensor::{Result, Stream, Tensor, read};

/// Can the library read it? It wants whole sectors, of scales too where there are many.
fn readable(b: &Bytes) -> bool {
    b.data.alignment() >= 16 && (b.scaling == Scaling::Tensor || b.scale_inv.alignment() >= 16)
}

impl Gemm8<'_> {
    /// What the way to make it depends on.
    pub(super) fn key(&self, [m, n, k]: [usize; 3], ldc: usize) -> Key {
        let (a, b) = (self.a, self.b);
        // Padding is zeros: it adds nothing.
        let ld = a.data.shape()[1];
        // The scales of a padded row are those of the row, unless there is a block more of them.
        debug_assert_eq!(ld.div_ceil(crate::BLOCK), k.div_ceil(crate::BLOCK));
        Key {
            sizes: GemmSizes { m, n, k: ld, lda: ld, ldb: ld, ldc },
            trans: [false, true],
            types: [a.data.dtype(), self.c.dtype()],
            epilogue: if self.bias.is_some() { Epilogue::Bias } else { Epilogue::None },
            align: [Some(&a.data), Some(&b.data), Some(self.c), self.bias]
                .map(|t| t.map_or(256, Tensor::alignment)),
            eight: Some(Eight {
                other: b.data.dtype(),
                scaling: [a.scaling, b.scaling],
                fast: self.fast && a.scaling == Scaling::Tensor,
            }),
        }
    }
}

impl CudaKernels {
    pub(super) fn queue_gemm8(&self, s: &Stream, g: &Gemm8) -> Result<()> {
        const OP: &str = "gemm8";
        let sizes = g.check(OP)?;
        let [m, n, k] = sizes;
        if m * n == 0 {
            return Ok(());
        }
        let view = matrix(OP, g.c)?;
        let ldc = if m > 1 { view.outer_stride } else { n.next_multiple_of(16) };
        let fits = readable(g.a) && readable(g.b) && even(g.c, ldc) && g.bias.is_none_or(|t| even(t, 16));
        // What is there is added before anything is rounded, the bias as well: the library does one of them.
        if k > 0 && fits && !(g.accumulate && g.bias.is_some()) {
            let o = Operands {
                a: &g.a.data,
                b: &g.b.data,
                c: g.c,
                bias: g.bias.map(read),
                beside: None,
                scales: Some([&g.a.scale_inv, &g.b.scale_inv]),
                accumulate: g.accumulate,
            };
            if self.plans.product(s, g.name, g.key(sizes, ldc), &o, None)? {
                return Ok(());
            }
        }
        self.queue_slow_gemm8(s, g, ldc)
    }
}
