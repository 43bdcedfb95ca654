//! Multi-tensor optimizer steps, gradient norm and clipping, loss scaling.

use crate::checks::{dtypes, same_contiguous};
use crate::grad_scaler::ScalerConfig;
use crate::moments::BLOCK;
use crate::quant::check::one;
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};

/// Entries of the step-scalar buffer (f32). Values that change from step to step are read from device memory, so that a
/// CUDA graph of a step can be replayed.
pub mod scalars {
    /// Learning rate.
    pub const LR: usize = 0;
    /// Weight decay.
    pub const WEIGHT_DECAY: usize = 1;
    /// `1 − β1^t`
    pub const BIAS1: usize = 2;
    /// `1 − β2^t`
    pub const BIAS2: usize = 3;
    /// Gradient clipping factor.
    pub const CLIP: usize = 4;
    /// Global gradient norm before clipping. A step whose norm is not finite is skipped: weights, moments and the step
    /// counter stay.
    pub const GRAD_NORM: usize = 5;
    /// Completed steps; 0 on the first step, where SGD initializes its momentum with the gradient.
    pub const STEPS_DONE: usize = 6;
    /// Loss scale of the step, where there is one.
    pub const LOSS_SCALE: usize = 7;
    /// Number of entries.
    pub const COUNT: usize = 8;
}

/// Entries of the step counter (f64), kept on the device, which alone knows whether a step was skipped.
pub mod counter {
    /// Completed steps.
    pub const STEPS: usize = 0;
    /// `β1^t`, accumulated by multiplication.
    pub const BETA1_POWER: usize = 1;
    /// `β2^t`
    pub const BETA2_POWER: usize = 2;
    /// Number of entries.
    pub const COUNT: usize = 3;

    /// The counter after `steps` steps, bit for bit as the device computes it.
    pub fn after(steps: u64, betas: [f32; 2]) -> [f64; COUNT] {
        let power = |beta: f32| {
            let mut power = 1.0;
            for _ in 0..steps {
                power *= f64::from(beta);
                // 0 and 1 are fixed points.
                if power == 0.0 || beta == 1.0 {
                    break;
                }
            }
            power
        };
        [steps as f64, power(betas[0]), power(betas[1])]
    }
}

/// Entries of the loss-scale state (f64), kept on the device for the same reason; see [`crate::grad_scaler`].
pub mod scaler {
    use crate::grad_scaler::{DynamicScaler, ScalerConfig};

    /// Loss scale.
    pub const SCALE: usize = 0;
    /// Steps since the last overflow or growth.
    pub const GROWTH: usize = 1;
    /// Overflows left before the scale is reduced.
    pub const HYSTERESIS: usize = 2;
    /// Number of entries.
    pub const COUNT: usize = 3;

    /// Entries of a scaler's state.
    pub fn of(s: &DynamicScaler) -> [f64; COUNT] {
        [f64::from(s.scale), f64::from(s.growth_tracker), f64::from(s.hysteresis_tracker)]
    }

    /// Scaler from its entries.
    pub fn from(config: ScalerConfig, state: &[f64]) -> DynamicScaler {
        let at = |i: usize| state.get(i).copied().unwrap_or_default();
        DynamicScaler {
            config,
            scale: at(SCALE) as f32,
            growth_tracker: at(GROWTH) as u32,
            hysteresis_tracker: at(HYSTERESIS) as i32,
        }
    }
}

/// Hyperparameters of Adam.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay (AdamW); otherwise L2 regularization inside the gradient.
    pub decoupled: bool,
}

/// Hyperparameters of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Momentum coefficient.
    pub momentum: f32,
    /// Dampening: the gradient enters the momentum with weight `1 − dampening`.
    pub dampening: f32,
    /// Nesterov momentum.
    pub nesterov: bool,
}

/// Hyperparameters of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Weight of the momentum in the update.
    pub beta1: f32,
    /// Decay of the momentum.
    pub beta2: f32,
}

/// Storage of a moment.
#[derive(Clone, Copy)]
pub struct Moment<'a> {
    /// f32; bf16, rounded to nearest even; or f16 or u8 codes with scales ([`crate::moments`]).
    pub values: &'a Tensor,
    /// u8 `[⌈n/32⌉]`: block scales of f16 and u8 codes.
    pub scales: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for Moment<'a> {
    fn from(values: &'a Tensor) -> Moment<'a> {
        Moment { values, scales: None }
    }
}

/// First or second moment: they have different storage formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentOrder {
    /// Moving average of gradients.
    First,
    /// Moving average of squared gradients.
    Second,
}

/// One parameter of an optimizer step. All tensors except scales are contiguous and of equal size.
pub struct ParamUpdate<'a> {
    /// f32 master weight. Or i16: the low halves of f32 masters whose high halves are the bf16 `weight`, one unit higher
    /// where the low half is negative.
    pub master: &'a Tensor,
    /// bf16 or f16 model weight, written in the same pass.
    pub weight: Option<&'a Tensor>,
    /// f32 gradient.
    pub grad: &'a Tensor,
    /// First moment (Adam) or momentum (SGD, Lion).
    pub first: Moment<'a>,
    /// Second moment (Adam), stored like the first.
    pub second: Option<Moment<'a>>,
    /// Factor on the learning rate.
    pub lr_mult: f32,
    /// Factor on the weight decay.
    pub wd_mult: f32,
    /// FP8 outputs of the new weight (Adam only).
    pub fp8: Option<Fp8WeightOut<'a>>,
}

/// FP8 outputs of an updated weight, written by the optimizer pass. They are computed from the master rounded to bf16,
/// whether or not a bf16 weight is stored.
#[derive(Clone, Copy)]
pub struct Fp8WeightOut<'a> {
    /// f32 `[1]`: becomes the larger of itself and the weight's amax; NaN is ignored.
    pub amax: &'a Tensor,
    /// The weight quantized to FP8. A skipped step writes it too, along with the amax, since the scale may have changed.
    pub data: Option<Fp8DataOut<'a>>,
}

/// FP8 data under a known scale, quantized as by [`crate::ScaleSource::Given`].
#[derive(Clone, Copy)]
pub struct Fp8DataOut<'a> {
    /// E4M3, as many elements as the master.
    pub data: &'a Tensor,
    /// f32 `[1]`
    pub scale: &'a Tensor,
    /// f32 `[1]`: the inverse of the scale is written, unless the weight is empty.
    pub scale_inv: &'a Tensor,
}

/// Optimizer kernels. A step whose `scalars[GRAD_NORM]` is not finite is skipped.
pub trait OptimizerKernels {
    /// One Adam step: updates m and v, then `p −= lr·(m̂/(√v̂ + ε) + wd·p)` (decoupled weight decay).
    fn adam(&self, s: &Stream, adam: Adam, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()>;

    /// One SGD step with momentum.
    fn sgd(&self, s: &Stream, sgd: Sgd, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()>;

    /// One Lion step: `p −= lr·(sign(β1·m + (1−β1)·g) + wd·p)`, then `m = β2·m + (1−β2)·g`.
    fn lion(&self, s: &Stream, lion: Lion, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()>;

    /// Writes the global L2 norm of f32 gradients into `scalars[GRAD_NORM]` and the clipping factor
    /// `min(1, max_norm/(norm + 1e-6))` into `scalars[CLIP]` (1 without `max_norm`).
    fn clip_factor(
        &self,
        s: &Stream,
        grads: &[&Tensor],
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()>;

    /// `square[0] = Σ g²` over f32 gradients; `square` f64 `[1]`, to be all-reduced before
    /// [`OptimizerKernels::clip_factor_from_square_sum`].
    fn grad_square_sum(&self, s: &Stream, grads: &[&Tensor], square: &Tensor) -> Result<()>;

    /// `count[0]` = number of zero elements of f32 gradients; `count` f64 `[1]`, which is exact and can be all-reduced.
    fn count_zeros(&self, s: &Stream, grads: &[&Tensor], count: &Tensor) -> Result<()>;

    /// [`OptimizerKernels::clip_factor`] from the sum of squares.
    fn clip_factor_from_square_sum(
        &self,
        s: &Stream,
        square: &Tensor,
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()>;

    /// Advances the step [`counter`] (f64) unless the step is skipped: `scalars[STEPS_DONE]` is the previous count,
    /// `scalars[BIAS1]` and `[BIAS2]` become `1 − βᵗ` of this step.
    fn advance_step(&self, s: &Stream, betas: [f32; 2], counter: &Tensor, scalars: &Tensor) -> Result<()>;

    /// `out = x·loss scale`; f32, contiguous. `state`: see [`scaler`].
    fn scale_loss(&self, s: &Stream, state: &Tensor, x: &Tensor, out: &Tensor) -> Result<()>;

    /// `square[0] /= scale²`: unscales the sum of squared gradients of a scaled loss, f64 `[1]`.
    fn unscale_square(&self, s: &Stream, state: &Tensor, square: &Tensor) -> Result<()>;

    /// After [`OptimizerKernels::clip_factor_from_square_sum`]: stores the scale in `scalars[LOSS_SCALE]`, divides
    /// `scalars[CLIP]` by it, so that clipping also unscales gradients, and updates the scale
    /// ([`DynamicScaler::update`](crate::grad_scaler::DynamicScaler::update)), with an overflow where `scalars[GRAD_NORM]` is not
    /// finite.
    fn update_scaler(&self, s: &Stream, config: ScalerConfig, state: &Tensor, scalars: &Tensor)
    -> Result<()>;

    /// Zeros f32 `amax` before an optimizer step that records it, unless the step is skipped.
    fn reset_amax(&self, s: &Stream, scalars: &Tensor, amax: &Tensor) -> Result<()>;

    /// Stores f32 values as a moment, rounded to nearest; f16 and u8 codes get new scales.
    fn pack_moment(&self, s: &Stream, order: MomentOrder, values: &Tensor, moment: Moment) -> Result<()>;

    /// Decodes a moment to f32, exactly.
    fn unpack_moment(&self, s: &Stream, order: MomentOrder, moment: Moment, values: &Tensor) -> Result<()>;

    /// Splits f32 masters into a bf16 `high` half, rounded half away from zero, and an i16 `low` half ([`ParamUpdate::master`]).
    fn split_master(&self, s: &Stream, master: &Tensor, high: &Tensor, low: &Tensor) -> Result<()>;

    /// Inverse of [`OptimizerKernels::split_master`].
    fn join_master(&self, s: &Stream, high: &Tensor, low: &Tensor, master: &Tensor) -> Result<()>;
}

/// Checks a moment with as many elements as `like`.
pub(crate) fn check_moment(op: &'static str, m: &Moment, like: &Tensor) -> Result<()> {
    same_contiguous(op, &[like, m.values])?;
    let scaled = match m.values.dtype() {
        DType::F32 | DType::BF16 => false,
        DType::F16 | DType::U8 => true,
        found => return Err(Error::DType { op, found, wanted: DType::F32 }),
    };
    match m.scales {
        None if !scaled => Ok(()),
        Some(scales) if scaled => {
            dtypes(op, DType::U8, &[scales])?;
            let blocks = m.values.numel().div_ceil(BLOCK);
            if scales.numel() == blocks && scales.is_contiguous() {
                return Ok(());
            }
            shape_error(op, format!("{scales:?} must be contiguous, one scale for each of {blocks} blocks"))
        }
        _ => shape_error(op, "f16 and u8 moments need scales, others have none"),
    }
}

/// Checks one parameter; `two`: whether the optimizer has a second moment.
pub(crate) fn check_update(op: &'static str, u: &ParamUpdate, two: bool) -> Result<()> {
    let mut all = vec![u.master, u.grad];
    all.extend(u.weight);
    same_contiguous(op, &all)?;
    dtypes(op, DType::F32, &[u.grad])?;
    let split = u.master.dtype() == DType::I16;
    if !split {
        dtypes(op, DType::F32, &[u.master])?;
    }
    match u.weight {
        // Split masters and FP8 outputs need bf16 weights.
        Some(w) if w.dtype() == DType::F16 && !split && u.fp8.is_none() => {}
        Some(w) => dtypes(op, DType::BF16, &[w])?,
        None if split => return shape_error(op, "split masters need the bf16 weights, their high halves"),
        None => {}
    }
    check_moment(op, &u.first, u.grad)?;
    if let Some(second) = &u.second {
        check_moment(op, second, u.grad)?;
    }
    if u.second.is_some() != two || u.second.is_some_and(|m| m.values.dtype() != u.first.values.dtype()) {
        return shape_error(op, "Adam needs two moments of one type, SGD and Lion one momentum");
    }
    let Some(fp8) = &u.fp8 else { return Ok(()) };
    if !two {
        return shape_error(op, "only Adam writes FP8 outputs");
    }
    one(op, fp8.amax)?;
    let Some(out) = &fp8.data else { return Ok(()) };
    if split {
        return shape_error(op, "FP8 data needs f32 masters, not split ones");
    }
    one(op, out.scale)?;
    one(op, out.scale_inv)?;
    dtypes(op, DType::E4M3, &[out.data])?;
    same_contiguous(op, &[u.master, out.data])
}

/// Checks a step counter.
pub(crate) fn check_counter(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [counter::COUNT] || t.dtype() != DType::F64 || !t.is_contiguous() {
        return shape_error(op, format!("the step counter must be f64 [{}], not {t:?}", counter::COUNT));
    }
    Ok(())
}

/// Checks the state of a loss scale.
pub(crate) fn check_scaler(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [scaler::COUNT] || t.dtype() != DType::F64 || !t.is_contiguous() {
        return shape_error(op, format!("the loss-scale state must be f64 [{}], not {t:?}", scaler::COUNT));
    }
    Ok(())
}

/// Checks the amax buffer of a step.
pub(crate) fn check_numbers(op: &'static str, t: &Tensor) -> Result<()> {
    same_contiguous(op, &[t])?;
    dtypes(op, DType::F32, &[t])
}

/// Checks the halves of split masters.
pub(crate) fn check_halves(op: &'static str, master: &Tensor, high: &Tensor, low: &Tensor) -> Result<()> {
    same_contiguous(op, &[master, high, low])?;
    dtypes(op, DType::F32, &[master])?;
    dtypes(op, DType::BF16, &[high])?;
    dtypes(op, DType::I16, &[low])
}

/// Checks a moment and its f32 values.
pub(crate) fn check_values(op: &'static str, moment: &Moment, values: &Tensor) -> Result<()> {
    dtypes(op, DType::F32, &[values])?;
    check_moment(op, moment, values)
}

/// Checks a sum over all gradients.
pub(crate) fn check_total(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [1] || t.dtype() != DType::F64 {
        return shape_error(op, format!("the sum must be f64 [1], not {t:?}"));
    }
    Ok(())
}

/// Checks the step-scalar buffer.
pub(crate) fn check_scalars(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [scalars::COUNT] || !t.is_contiguous() {
        return shape_error(
            op,
            format!("the step-scalar buffer is {:?}, not [{}]", t.shape(), scalars::COUNT),
        );
    }
    dtypes(op, DType::F32, &[t])
}
