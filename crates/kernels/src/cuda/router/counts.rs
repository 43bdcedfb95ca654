//! Tokens per expert, dropping over capacity, auxiliary-loss weights and expert bias.

use super::BLOCK_THREADS;
use crate::AuxLossWeights;
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{blocks, line};
use crate::cuda::{CudaKernels, Kernel};
use crate::router::check;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, shape_error, write};

kernel_args! {
    header "args/router_counts.cuh", includes [];

    /// Counts the tokens of each expert.
    struct TokenCountArgs {
        /// i32 `[tokens, k]`.
        index: u64,
        /// i32 `[tokens]`, negative for padding; a null pointer where there is none.
        segments: u64,
        /// i64 `[experts]`, added to.
        counts: u64,
        fault: u64,
        tokens: i64,
        experts: i32,
        k: i32,
    }

    /// Drops selections over an expert's capacity.
    struct DropArgs {
        /// i32 and f32 `[tokens, k]`: a dropped selection becomes -1 with probability 0.
        index: u64,
        probs: u64,
        /// i64 `[1]`, added to.
        dropped: u64,
        /// i64 `[experts]`.
        counts: u64,
        /// u32 scratch `[tokens·k]`.
        list: u64,
        /// tokens·k, below 2³¹.
        entries: i64,
        capacity: i64,
        /// The least probable selections are dropped instead of the last.
        by_probability: u32,
        pad: u32,
    }

    /// Auxiliary loss and its weights from token counts and sums of scores.
    struct AuxLossWeightsArgs {
        /// f32 and i64 `[segments, experts]`.
        sums: u64,
        counts: u64,
        /// f32 `[1]`: steps that the counts are of; 0 for one step.
        steps: u64,
        /// f32 `[segments, experts]`.
        weights: u64,
        /// f32 `[1]`, added to.
        loss: u64,
        /// segments·experts.
        cells: i64,
        experts: i32,
        k: i32,
        /// Segments.
        count: i32,
        factor: f32,
        /// Segments weigh by their own tokens, instead of each like the mean.
        by_tokens: u32,
        pad: u32,
    }

    /// Updates expert biases from token counts.
    struct ExpertBiasArgs {
        /// i64 `[experts]`, zeroed afterwards.
        counts: u64,
        /// f32 `[experts]`.
        bias: u64,
        experts: i32,
        rate: f32,
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("router/counts", name)
}

impl CudaKernels {
    pub(super) fn launch_count_tokens(
        &self,
        s: &Stream,
        index: &Tensor,
        segments: &Tensor,
        counts: &Tensor,
    ) -> Result<()> {
        const OP: &str = "count_tokens";
        let z = check::count_tokens(OP, index, segments, counts)?;
        s.launch(OP, &[read(index), read(segments), write(counts)], |l| {
            let args = TokenCountArgs {
                index: l.address(0)?,
                segments: l.address(1)?,
                counts: l.address(2)?,
                fault: l.fault()?,
                tokens: z.tokens as i64,
                experts: z.experts as i32,
                k: z.k as i32,
            };
            self.launch_kernel(l, kernel("count_tokens"), line(blocks(OP, z.tokens, 256)?, 256), &args)
        })
    }

    pub(super) fn launch_drop_over_capacity(
        &self,
        s: &Stream,
        capacity: usize,
        experts: usize,
        by_probability: bool,
        [index, probs, dropped]: [&Tensor; 3],
    ) -> Result<()> {
        const OP: &str = "drop_over_capacity";
        let z = check::drop_over_capacity(OP, experts, index, probs, dropped)?;
        let entries = index.numel();
        if i32::try_from(entries).is_err() {
            return shape_error(OP, format!("{entries} selections are too many to sort"));
        }
        // Where nothing stays, nothing need be compared.
        let by_probability = by_probability && capacity > 0;
        let counts = Tensor::empty(s, &[experts], DType::I64, Category::Workspace)?;
        let listed = if by_probability { entries } else { 0 };
        let list = Tensor::empty(s, &[listed], DType::I32, Category::Workspace)?;
        let args = [write(index), write(probs), write(dropped), write(&counts), write(&list)];
        s.launch(OP, &args, |l| {
            let count = TokenCountArgs {
                index: l.address(0)?,
                segments: 0,
                counts: l.address(3)?,
                fault: l.fault()?,
                tokens: z.tokens as i64,
                experts: experts as i32,
                k: z.k as i32,
            };
            self.launch_kernel(l, kernel("counts_clear"), line(blocks(OP, experts, 256)?, 256), &count)?;
            self.launch_kernel(l, kernel("count_tokens"), line(blocks(OP, z.tokens, 256)?, 256), &count)?;
            let args = DropArgs {
                index: l.address(0)?,
                probs: l.address(1)?,
                dropped: l.address(2)?,
                counts: l.address(3)?,
                list: l.address(4)?,
                entries: entries as i64,
                // No expert has more.
                capacity: capacity.min(entries) as i64,
                by_probability: by_probability.into(),
                pad: 0,
            };
            self.launch_kernel(
                l,
                kernel("drop_over_capacity"),
                line(blocks(OP, experts, 1)?, BLOCK_THREADS),
                &args,
            )
        })
    }

    pub(super) fn launch_aux_loss_weights(&self, s: &Stream, a: &AuxLossWeights) -> Result<()> {
        const OP: &str = "aux_loss_weights";
        let [segments, experts] = check::aux_loss_weights(OP, a)?;
        let &AuxLossWeights { coefficient: factor, k, sums, counts, steps, by_tokens, weights, loss } = a;
        let args = [read(sums), read(counts), write(weights), write(loss), read(steps.unwrap_or(sums))];
        s.launch(OP, &args, |l| {
            let args = AuxLossWeightsArgs {
                sums: l.address(0)?,
                counts: l.address(1)?,
                steps: if steps.is_some() { l.address(4)? } else { 0 },
                weights: l.address(2)?,
                loss: l.address(3)?,
                cells: (segments * experts) as i64,
                experts: experts as i32,
                k: k as i32,
                count: segments as i32,
                factor,
                by_tokens: u32::from(by_tokens),
                pad: 0,
            };
            self.launch_kernel(l, kernel("aux_loss_weights"), line(1, BLOCK_THREADS), &args)
        })
    }

    pub(super) fn launch_update_expert_bias(
        &self,
        s: &Stream,
        rate: f32,
        counts: &Tensor,
        bias: &Tensor,
    ) -> Result<()> {
        const OP: &str = "update_expert_bias";
        let experts = check::update_expert_bias(OP, counts, bias)?;
        s.launch(OP, &[write(counts), write(bias)], |l| {
            let args =
                ExpertBiasArgs { counts: l.address(0)?, bias: l.address(1)?, experts: experts as i32, rate };
            self.launch_kernel(l, kernel("update_expert_bias"), line(1, BLOCK_THREADS), &args)
        })
    }
}
