//! Auxiliary load-balancing loss and z-loss.

use super::{code, row_blocks, sized};
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{blocks, line};
use crate::cuda::{CudaKernels, Kernel};
use crate::router::check;
use crate::router::check::Sizes;
use crate::{AuxLoss, ZLossBackward};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, write};

/// Rows of a warp, as in balance.cu and z_loss.cu.
const ROWS: usize = 4;

kernel_args! {
    header "args/router_losses.cuh", includes [];

    /// Statistics of the auxiliary load-balancing loss, and its gradient.
    #[derive(Default)]
    struct AuxLossArgs {
        /// `[tokens, experts]`.
        logits: u64,
        /// i32 `[tokens]`: negative for padding.
        segments: u64,
        /// f32 `[segments, experts]`: gradient of the loss by each sum of scores.
        weights: u64,
        /// `[tokens, experts]`, added to.
        dlogits: u64,
        /// `[segments, experts]`: i64 sums in units of 1/`unit`, u32 whether a score was NaN, i64 token counts, f32 sums.
        fixed: u64,
        nan: u64,
        counts: u64,
        sums: u64,
        fault: u64,
        tokens: i64,
        /// segments·experts.
        cells: i64,
        /// A power of two.
        unit: f64,
        experts: i32,
        k: i32,
        /// `Score` of router/common.cuh.
        score: i32,
        /// Segments.
        count: i32,
    }

    /// Router z-loss, and its gradient.
    struct ZLossArgs {
        logits: u64,
        segments: u64,
        /// f64 `[2]`: Σ lse² and rows.
        sums: u64,
        /// f64 `[blocks, 2]`.
        parts: u64,
        dlogits: u64,
        tokens: i64,
        blocks: i64,
        experts: i32,
        factor: f32,
    }
}

impl AuxLossArgs {
    fn new(b: &AuxLoss, z: Sizes, segments: usize) -> AuxLossArgs {
        // The sum of a column over all rows, each at most 1 and a rounding, stays below 2⁶³.
        let bits = usize::BITS - z.tokens.leading_zeros();
        AuxLossArgs {
            tokens: z.tokens as i64,
            cells: (segments * z.experts) as i64,
            unit: 2f64.powi(62 - bits as i32),
            experts: z.experts as i32,
            k: z.k as i32,
            score: code(b.score),
            count: i32::try_from(segments).unwrap_or(i32::MAX),
            ..AuxLossArgs::default()
        }
    }
}

fn balance_kernel(name: &'static str) -> Kernel {
    Kernel::new("router/balance", name)
}

impl CudaKernels {
    pub(super) fn launch_aux_loss_stats(
        &self,
        s: &Stream,
        b: &AuxLoss,
        sums: &Tensor,
        counts: &Tensor,
    ) -> Result<()> {
        const OP: &str = "aux_loss_stats";
        let (z, segments) = check::balance(OP, b, sums)?;
        check::statistics(OP, sums, counts)?;
        let kernel = sized!(OP, b.logits.dtype(), z.experts, "router/balance", "balance")?;
        let cells = segments * z.experts;
        let fixed = Tensor::empty(s, &[cells], DType::I64, Category::Workspace)?;
        let nan = Tensor::empty(s, &[cells], DType::I32, Category::Workspace)?;
        let args = [read(b.logits), read(b.segments), write(sums), write(counts), write(&fixed), write(&nan)];
        s.launch(OP, &args, |l| {
            let args = AuxLossArgs {
                logits: l.address(0)?,
                segments: l.address(1)?,
                sums: l.address(2)?,
                counts: l.address(3)?,
                fixed: l.address(4)?,
                nan: l.address(5)?,
                fault: l.fault()?,
                ..AuxLossArgs::new(b, z, segments)
            };
            let each = line(blocks(OP, cells, 256)?, 256);
            self.launch_kernel(l, balance_kernel("balance_clear"), each, &args)?;
            self.launch_kernel(l, kernel, row_blocks(OP, z.tokens, z.experts, ROWS)?, &args)?;
            self.launch_kernel(l, balance_kernel("balance_total"), each, &args)
        })
    }

    pub(super) fn launch_aux_loss_backward(
        &self,
        s: &Stream,
        b: &AuxLoss,
        weights: &Tensor,
        dlogits: &Tensor,
    ) -> Result<()> {
        const OP: &str = "aux_loss_backward";
        let (z, segments) = check::balance(OP, b, weights)?;
        check::exactly(OP, "gradients of logits", dlogits, b.logits.dtype(), b.logits.shape())?;
        let kernel = sized!(OP, b.logits.dtype(), z.experts, "router/balance", "aux_loss_backward")?;
        s.launch(OP, &[read(b.logits), read(b.segments), read(weights), write(dlogits)], |l| {
            let args = AuxLossArgs {
                logits: l.address(0)?,
                segments: l.address(1)?,
                weights: l.address(2)?,
                dlogits: l.address(3)?,
                fault: l.fault()?,
                ..AuxLossArgs::new(b, z, segments)
            };
            self.launch_kernel(l, kernel, row_blocks(OP, z.tokens, z.experts, 1)?, &args)
        })
    }

    pub(super) fn launch_z_loss(
        &self,
        s: &Stream,
        logits: &Tensor,
        segments: &Tensor,
        sums: &Tensor,
    ) -> Result<()> {
        const OP: &str = "z_loss";
        let [tokens, experts] = check::z_loss(OP, logits, segments, sums, None)?;
        let kernel = sized!(OP, logits.dtype(), experts, "router/z_loss", "z_loss")?;
        let grid = row_blocks(OP, tokens, experts, ROWS)?;
        let blocks = grid.blocks[0] as usize;
        let parts = Tensor::empty(s, &[2 * blocks], DType::F64, Category::Workspace)?;
        s.launch(OP, &[read(logits), read(segments), write(sums), write(&parts)], |l| {
            let args = ZLossArgs {
                logits: l.address(0)?,
                segments: l.address(1)?,
                sums: l.address(2)?,
                parts: l.address(3)?,
                dlogits: 0,
                tokens: tokens as i64,
                blocks: blocks as i64,
                experts: experts as i32,
                factor: 0.0,
            };
            self.launch_kernel(l, kernel, grid, &args)?;
            self.launch_kernel(l, Kernel::new("router/z_loss", "z_loss_total"), line(1, 512), &args)
        })
    }

    pub(super) fn launch_z_loss_backward(&self, s: &Stream, z: &ZLossBackward) -> Result<()> {
        const OP: &str = "z_loss_backward";
        let &ZLossBackward { coefficient: factor, sums, logits, segments, dlogits } = z;
        let [tokens, experts] = check::z_loss(OP, logits, segments, sums, Some(dlogits))?;
        let kernel = sized!(OP, logits.dtype(), experts, "router/z_loss", "z_loss_backward")?;
        s.launch(OP, &[read(logits), read(segments), read(sums), write(dlogits)], |l| {
            let args = ZLossArgs {
                logits: l.address(0)?,
                segments: l.address(1)?,
                sums: l.address(2)?,
                parts: 0,
                dlogits: l.address(3)?,
                tokens: tokens as i64,
                blocks: 0,
                experts: experts as i32,
                factor,
            };
            self.launch_kernel(l, kernel, row_blocks(OP, tokens, experts, 1)?, &args)
        })
    }
}
