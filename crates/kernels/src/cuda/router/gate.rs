//! Router GEMM with f64 accumulation.

use crate::cuda::args::kernel_args;
use crate::cuda::grid::blocks;
use crate::cuda::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::router::check;
use ferrotron_tensor::{Launch, Result, Stream, Tensor, read, write};

/// Tile size and threads, as in gate.cu.
const TILE: usize = 64;
const THREADS: u32 = 256;

kernel_args! {
    header "args/router_gate.cuh", includes [];

    /// c `[m, n]` (+)= Σ_k a[m, k]·b[n, k] in f64.
    struct GateArgs {
        a: u64,
        b: u64,
        c: u64,
        /// Strides along m (n) and along k.
        a_row: i64,
        a_step: i64,
        b_row: i64,
        b_step: i64,
        m: i64,
        n: i64,
        k: i64,
        accumulate: u32,
        pad: u32,
    }
}

/// `c [m, n] (+)= a·bᵀ`; operands have an address and strides along m (n) and k, and `sizes` is m, n, k.
struct GateGemm {
    a: (u64, [usize; 2]),
    b: (u64, [usize; 2]),
    c: u64,
    sizes: [usize; 3],
    accumulate: bool,
}

impl CudaKernels {
    fn launch_gate_gemm(&self, l: &Launch, kernel: Kernel, p: GateGemm) -> Result<()> {
        let [m, n, k] = p.sizes;
        let across = blocks(l.op(), n, TILE)?;
        let grid =
            LaunchConfig { blocks: [blocks(l.op(), m, TILE)?, across, 1], threads: THREADS, shared: 0 };
        let args = GateArgs {
            a: p.a.0,
            b: p.b.0,
            c: p.c,
            a_row: p.a.1[0] as i64,
            a_step: p.a.1[1] as i64,
            b_row: p.b.1[0] as i64,
            b_step: p.b.1[1] as i64,
            m: m as i64,
            n: n as i64,
            k: k as i64,
            accumulate: p.accumulate.into(),
            pad: 0,
        };
        self.launch_kernel(l, kernel, grid, &args)
    }

    pub(super) fn launch_gate(&self, s: &Stream, x: &Tensor, w: &Tensor, logits: &Tensor) -> Result<()> {
        const OP: &str = "gate_f64";
        let [tokens, experts, h] = check::gate(OP, x, w, logits)?;
        let kernel = typed!(OP, x.dtype(), "router/gate", "gate_logits")?;
        s.launch(OP, &[read(x), read(w), write(logits)], |l| {
            let (a, b, c) = ((l.address(0)?, [h, 1]), (l.address(1)?, [h, 1]), l.address(2)?);
            self.launch_gate_gemm(
                l,
                kernel,
                GateGemm { a, b, c, sizes: [tokens, experts, h], accumulate: false },
            )
        })
    }

    pub(super) fn launch_gate_backward(
        &self,
        s: &Stream,
        [x, w, dlogits, dx, dw]: [&Tensor; 5],
        accumulate: bool,
    ) -> Result<()> {
        const OP: &str = "gate_f64_backward";
        let [tokens, experts, h] = check::gate_backward(OP, x, w, dlogits, dx, dw)?;
        let to_x = typed!(OP, x.dtype(), "router/gate", "gate_dx")?;
        let to_w = typed!(OP, x.dtype(), "router/gate", "gate_dw")?;
        s.launch(OP, &[read(x), read(w), read(dlogits), write(dx), write(dw)], |l| {
            let d = l.address(2)?;
            let (a, b, c) = ((d, [experts, 1]), (l.address(1)?, [1, h]), l.address(3)?);
            let sizes = [tokens, h, experts];
            self.launch_gate_gemm(l, to_x, GateGemm { a, b, c, sizes, accumulate: false })?;
            let (a, b, c) = ((d, [1, experts]), (l.address(0)?, [1, h]), l.address(4)?);
            self.launch_gate_gemm(l, to_w, GateGemm { a, b, c, sizes: [experts, h, tokens], accumulate })
        })
    }
}
