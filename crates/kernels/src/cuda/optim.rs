//! Optimizer kernels: parameter updates, gradient norm, loss scale and the scalars of a step that stay on the GPU.

use super::CudaKernels;
use super::args::kernel_args;
use super::grad_norm::{clip, kernel};
use super::grid::{blocks, line};
use crate::checks::{dtypes, same_contiguous};
use crate::grad_scaler::ScalerConfig;
use crate::optimizer::{check_counter, check_numbers, check_scalars, check_scaler, check_total};
use crate::{Adam, Lion, Moment, MomentOrder, OptimizerKernels, ParamUpdate, Sgd};
use ferrotron_tensor::{DType, Result, Stream, Tensor, read, write};

const THREADS: u32 = 256;

kernel_args! {
    header "args/optim.cuh", includes [];

    /// Advances the optimizer's step counter.
    struct StepArgs {
        /// f64: steps done, beta1^steps, beta2^steps.
        counter: u64,
        scalars: u64,
        beta1: f32,
        beta2: f32,
    }

    /// Multiplies by the loss scale, or divides a sum of squares by its square.
    struct LossScaleArgs {
        /// State of the gradient scaler, f64.
        state: u64,
        x: u64,
        out: u64,
        n: i64,
    }

    /// Updates the dynamic loss scale after a step.
    struct GradScalerArgs {
        state: u64,
        scalars: u64,
        /// Smallest scale.
        least: f32,
        /// Factors applied after `interval` good steps, and after an overflow.
        growth: f32,
        backoff: f32,
        interval: u32,
        /// Overflows tolerated before the scale is reduced.
        hysteresis: i32,
        pad: u32,
    }

    /// Zeroes n amax values, unless the step is skipped.
    struct ResetAmaxArgs {
        scalars: u64,
        amax: u64,
        n: i64,
    }
}

impl OptimizerKernels for CudaKernels {
    fn adam(&self, s: &Stream, a: Adam, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()> {
        self.adam_list(s, a, scalars, list)
    }

    fn sgd(&self, s: &Stream, rule: Sgd, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()> {
        self.sgd_list(s, rule, scalars, list)
    }

    fn lion(&self, s: &Stream, rule: Lion, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()> {
        self.lion_list(s, rule, scalars, list)
    }

    fn clip_factor(
        &self,
        s: &Stream,
        grads: &[&Tensor],
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()> {
        const OP: &str = "clip_factor";
        check_scalars(OP, scalars)?;
        self.grad_parts(s, (OP, "square_parts"), grads, scalars, |l, parts, n| {
            self.launch_kernel(
                l,
                kernel("clip_factor"),
                line(1, 1024),
                &clip(parts, l.address(0)?, n, max_norm),
            )
        })
    }

    fn grad_square_sum(&self, s: &Stream, grads: &[&Tensor], square: &Tensor) -> Result<()> {
        const OP: &str = "grad_square_sum";
        check_total(OP, square)?;
        self.grad_parts(s, (OP, "square_parts"), grads, square, |l, parts, n| {
            self.launch_kernel(l, kernel("grad_total"), line(1, 1024), &clip(parts, l.address(0)?, n, None))
        })
    }

    fn count_zeros(&self, s: &Stream, grads: &[&Tensor], count: &Tensor) -> Result<()> {
        const OP: &str = "count_zeros";
        check_total(OP, count)?;
        self.grad_parts(s, (OP, "zero_parts"), grads, count, |l, parts, n| {
            self.launch_kernel(l, kernel("grad_total"), line(1, 1024), &clip(parts, l.address(0)?, n, None))
        })
    }

    fn clip_factor_from_square_sum(
        &self,
        s: &Stream,
        square: &Tensor,
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()> {
        const OP: &str = "clip_factor_from_square_sum";
        check_total(OP, square)?;
        check_scalars(OP, scalars)?;
        s.launch(OP, &[write(scalars), read(square)], |l| {
            let args = clip(l.address(1)?, l.address(0)?, 1, max_norm);
            self.launch_kernel(l, kernel("clip_factor"), line(1, 1024), &args)
        })
    }

    fn advance_step(&self, s: &Stream, betas: [f32; 2], counter: &Tensor, scalars: &Tensor) -> Result<()> {
        const OP: &str = "advance_step";
        check_counter(OP, counter)?;
        check_scalars(OP, scalars)?;
        s.launch(OP, &[write(counter), write(scalars)], |l| {
            let [beta1, beta2] = betas;
            let args = StepArgs { counter: l.address(0)?, scalars: l.address(1)?, beta1, beta2 };
            self.launch_kernel(l, kernel(OP), line(1, 1), &args)
        })
    }

    fn scale_loss(&self, s: &Stream, state: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "scale_loss";
        check_scaler(OP, state)?;
        same_contiguous(OP, &[x, out])?;
        dtypes(OP, DType::F32, &[x, out])?;
        let n = x.numel();
        s.launch(OP, &[read(state), read(x), write(out)], |l| {
            let args =
                LossScaleArgs { state: l.address(0)?, x: l.address(1)?, out: l.address(2)?, n: n as i64 };
            self.launch_kernel(l, kernel(OP), line(blocks(OP, n, THREADS as usize)?, THREADS), &args)
        })
    }

    fn unscale_square(&self, s: &Stream, state: &Tensor, square: &Tensor) -> Result<()> {
        const OP: &str = "unscale_square";
        check_scaler(OP, state)?;
        check_total(OP, square)?;
        s.launch(OP, &[read(state), write(square)], |l| {
            let args = LossScaleArgs { state: l.address(0)?, x: 0, out: l.address(1)?, n: 1 };
            self.launch_kernel(l, kernel(OP), line(1, 1), &args)
        })
    }

    fn update_scaler(
        &self,
        s: &Stream,
        config: ScalerConfig,
        state: &Tensor,
        scalars: &Tensor,
    ) -> Result<()> {
        const OP: &str = "update_scaler";
        check_scaler(OP, state)?;
        check_scalars(OP, scalars)?;
        s.launch(OP, &[write(state), write(scalars)], |l| {
            let args = GradScalerArgs {
                state: l.address(0)?,
                scalars: l.address(1)?,
                least: config.min,
                growth: config.growth,
                backoff: config.backoff,
                interval: config.growth_interval,
                hysteresis: config.hysteresis,
                pad: 0,
            };
            self.launch_kernel(l, kernel(OP), line(1, 1), &args)
        })
    }

    fn reset_amax(&self, s: &Stream, scalars: &Tensor, numbers: &Tensor) -> Result<()> {
        const OP: &str = "reset_amax";
        check_scalars(OP, scalars)?;
        check_numbers(OP, numbers)?;
        let n = numbers.numel();
        s.launch(OP, &[read(scalars), write(numbers)], |l| {
            let args = ResetAmaxArgs { scalars: l.address(0)?, amax: l.address(1)?, n: n as i64 };
            self.launch_kernel(l, kernel(OP), line(blocks(OP, n, THREADS as usize)?, THREADS), &args)
        })
    }

    fn pack_moment(&self, s: &Stream, order: MomentOrder, values: &Tensor, moment: Moment) -> Result<()> {
        self.pack_values(s, order, values, moment)
    }

    fn unpack_moment(&self, s: &Stream, order: MomentOrder, moment: Moment, values: &Tensor) -> Result<()> {
        self.unpack_values(s, order, moment, values)
    }

    fn split_master(&self, s: &Stream, master: &Tensor, high: &Tensor, low: &Tensor) -> Result<()> {
        self.split_master_weights(s, master, high, low)
    }

    fn join_master(&self, s: &Stream, high: &Tensor, low: &Tensor, master: &Tensor) -> Result<()> {
        self.join_master_weights(s, high, low, master)
    }
}
