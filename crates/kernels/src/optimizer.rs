//! Optimizer steps over lists of tensors.

use crate::checks::{dtypes, same_contiguous};
use crate::grad_scaler::ScalerConfig;
use crate::moments::BLOCK;
use crate::quant::check::one;
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};

/// Entries of the step-scalar buffer (f32): what changes from step to step is read from device memory, so
/// that a captured step can be replayed.
pub mod scalars {
    /// Learning rate.
    pub const LR: usize = 0;
    /// Weight decay.
    pub const WEIGHT_DECAY: usize = 1;
    /// `1 − β1^t`
    pub const BIAS1: usize = 2;
    /// `1 − β2^t`
    pub const BIAS2: usize = 3;
    /// Factor on gradients from clipping.
    pub const CLIP: usize = 4;
    /// Global gradient norm before clipping. Where it is not finite, a step changes nothing: no weight, no moment,
    /// no count of steps.
    pub const GRAD_NORM: usize = 5;
    /// Zero on the first step (SGD starts its momentum from the gradient).
    pub const STEPS_DONE: usize = 6;
    /// Factor that was on the loss, where there is one.
    pub const LOSS_SCALE: usize = 7;
    /// Entries in all.
    pub const COUNT: usize = 8;
}

/// Entries of the counter (f64), which stays on the device because only the device knows whether a step was made.
pub mod counter {
    /// Steps made.
    pub const STEPS: usize = 0;
    /// `β1^t`, a product of t factors.
    pub const POWER1: usize = 1;
    /// `β2^t`
    pub const POWER2: usize = 2;
    /// Entries in all.
    pub const COUNT: usize = 3;

    /// The counter after `steps` steps, to the bit as the device counts it.
    pub fn after(steps: u64, betas: [f32; 2]) -> [f64; COUNT] {
        let power = |beta: f32| {
            let mut power = 1.0;
            for _ in 0..steps {
                power *= f64::from(beta);
                // Zero and one stay what they are.
                if power == 0.0 || beta == 1.0 {
                    break;
                }
            }
            power
        };
        [steps as f64, power(betas[0]), power(betas[1])]
    }
}

/// Entries of the state of a loss scale (f64), which stays on the device for the same reason. What they mean is in
/// [`crate::grad_scaler`].
pub mod scaler {
    use crate::grad_scaler::{DynamicScaler, ScalerConfig};

    /// The factor on the loss.
    pub const SCALE: usize = 0;
    /// Good steps since the last overflow or growth.
    pub const GROWTH: usize = 1;
    /// Overflows left.
    pub const HYSTERESIS: usize = 2;
    /// Entries in all.
    pub const COUNT: usize = 3;

    /// As numbers.
    pub fn of(s: &DynamicScaler) -> [f64; COUNT] {
        [f64::from(s.scale), f64::from(s.growth_tracker), f64::from(s.hysteresis_tracker)]
    }

    /// From numbers.
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

/// Constants of Adam.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// AdamW (decay beside the gradient) or Adam with L2 (decay inside it).
    pub decoupled: bool,
}

/// Constants of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Decay of the momentum.
    pub momentum: f32,
    /// One minus the weight of a new gradient.
    pub dampening: f32,
    /// Look ahead.
    pub nesterov: bool,
}

/// A moment in memory.
#[derive(Clone, Copy)]
pub struct Moment<'a> {
    /// f32; bf16, rounded to nearest even; f16 or u8 ([`crate::moments`]), codes with scales.
    pub values: &'a Tensor,
    /// u8 `[⌈n/32⌉]`: the scales of codes.
    pub scales: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for Moment<'a> {
    fn from(values: &'a Tensor) -> Moment<'a> {
        Moment { values, scales: None }
    }
}

/// Which moment: codes of the two mean different things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentOrder {
    /// The mean of gradients.
    First,
    /// The mean of their squares.
    Second,
}

/// One parameter in an optimizer step. All tensors but scales are contiguous and of equal size.
pub struct ParamUpdate<'a> {
    /// f32: the parameter the arithmetic is on. Or i16: the low halves of these f32, whose high halves are `weight`,
    /// one more where the low half is negative.
    pub master: &'a Tensor,
    /// bf16 or f16 copy to write in the same pass, where the model computes in that.
    pub weight: Option<&'a Tensor>,
    /// f32 gradient.
    pub grad: &'a Tensor,
    /// First moment (Adam) or momentum (SGD).
    pub first: Moment<'a>,
    /// Second moment (Adam), kept like the first.
    pub second: Option<Moment<'a>>,
    /// Factor on the learning rate.
    pub lr_mult: f32,
    /// Factor on the weight decay.
    pub wd_mult: f32,
    /// What narrow products need of the new weight; of Adam.
    pub narrow: Option<Fp8WeightOut<'a>>,
}

/// What narrow products need of a new weight, made in the pass that makes it. The weight is the master rounded to bf16,
/// whether there is a copy of it or not.
#[derive(Clone, Copy)]
pub struct Fp8WeightOut<'a> {
    /// f32 `[1]`: becomes the larger of itself and the weight's largest magnitude; NaN is passed over.
    pub amax: &'a Tensor,
    /// The weight as bytes. They are made in a step that changes nothing, too, and its magnitude with them: the scale may
    /// be a new one.
    pub bytes: Option<Fp8DataOut<'a>>,
}

/// Bytes under a scale that is known, as [`crate::ScaleSource::Given`] makes them.
#[derive(Clone, Copy)]
pub struct Fp8DataOut<'a> {
    /// E4M3, as many as the master has elements.
    pub data: &'a Tensor,
    /// f32 `[1]`
    pub scale: &'a Tensor,
    /// f32 `[1]`: gets its inverse, if there is any element.
    pub scale_inv: &'a Tensor,
}

/// Optimizers and the norms they need.
pub trait OptimizerKernels {
    /// One Adam step: `m, v` updated; `p −= lr·(m̂/(√v̂ + ε) + wd·p)` (decoupled). Nothing changes where
    /// `scalars[GRAD_NORM]` is not finite.
    fn adam(&self, s: &Stream, adam: Adam, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()>;

    /// One SGD step with momentum. Nothing changes where `scalars[GRAD_NORM]` is not finite.
    fn sgd(&self, s: &Stream, sgd: Sgd, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()>;

    /// Writes the joint l2 norm of f32 gradients into `scalars[GRAD_NORM]`, and
    /// `min(1, max_norm/(norm + 1e-6))` into `scalars[CLIP]` (1 where `max_norm` is none).
    fn clip_factor(
        &self,
        s: &Stream,
        grads: &[&Tensor],
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()>;

    /// `square[0] = Σ g²` over f32 gradients; `square` f64 `[1]`. Squares of several ranks add up before
    /// [`OptimizerKernels::clip_factor_from_square_sum`].
    fn grad_square_sum(&self, s: &Stream, grads: &[&Tensor], square: &Tensor) -> Result<()>;

    /// The same as [`OptimizerKernels::clip_factor`], from the sum of squares.
    fn clip_factor_from_square_sum(
        &self,
        s: &Stream,
        square: &Tensor,
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()>;

    /// Counts a step, unless `scalars[GRAD_NORM]` is not finite: `scalars[STEPS_DONE]` is what `counter` (f64, see
    /// [`counter`]) held, `scalars[BIAS1]` and `[BIAS2]` are `1 − βᵗ` with this step.
    fn advance_step(&self, s: &Stream, betas: [f32; 2], counter: &Tensor, scalars: &Tensor) -> Result<()>;

    /// `out = x` times the loss scale; f32, contiguous. `state` as [`scaler`] says.
    fn scale_loss(&self, s: &Stream, state: &Tensor, x: &Tensor, out: &Tensor) -> Result<()>;

    /// `square[0] /= scale²`: the sum of squares of gradients whose loss was scaled, f64 `[1]`.
    fn unscale_square(&self, s: &Stream, state: &Tensor, square: &Tensor) -> Result<()>;

    /// After [`OptimizerKernels::clip_factor_from_square_sum`]: `scalars[LOSS_SCALE]` is the scale, `scalars[CLIP]` is divided by it, so that
    /// gradients are unscaled where they are clipped, and the scale moves: [`crate::grad_scaler::DynamicScaler::update`],
    /// with an overflow where `scalars[GRAD_NORM]` is not finite.
    fn update_scaler(&self, s: &Stream, config: ScalerConfig, state: &Tensor, scalars: &Tensor)
    -> Result<()>;

    /// Zeros f32 `numbers`, unless `scalars[GRAD_NORM]` is not finite: before a step that measures.
    fn reset_amax(&self, s: &Stream, scalars: &Tensor, numbers: &Tensor) -> Result<()>;

    /// Rounds f32 values into a moment: to nearest, f16 and u8 under new scales.
    fn pack_moment(&self, s: &Stream, order: MomentOrder, values: &Tensor, moment: Moment) -> Result<()>;

    /// The f32 values of a moment, exactly.
    fn unpack_moment(&self, s: &Stream, order: MomentOrder, moment: Moment, values: &Tensor) -> Result<()>;

    /// f32 masters as the bf16 `high` half, rounded half away from zero, and the i16 `low` half ([`ParamUpdate::master`]).
    fn split_master(&self, s: &Stream, master: &Tensor, high: &Tensor, low: &Tensor) -> Result<()>;

    /// The f32 masters that [`OptimizerKernels::split_master`] split.
    fn join_master(&self, s: &Stream, high: &Tensor, low: &Tensor, master: &Tensor) -> Result<()>;
}

/// A moment of `n` elements.
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
        _ => shape_error(op, "moments of f16 and u8 have scales, others have none"),
    }
}

/// One entry of a list. `two`: whether there is a second moment.
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
        // Halves complete bf16, and so do narrow products.
        Some(w) if w.dtype() == DType::F16 && !split && u.narrow.is_none() => {}
        Some(w) => dtypes(op, DType::BF16, &[w])?,
        None if split => return shape_error(op, "low halves of masters need the weights, their high halves"),
        None => {}
    }
    check_moment(op, &u.first, u.grad)?;
    if let Some(second) = &u.second {
        check_moment(op, second, u.grad)?;
    }
    if u.second.is_some() != two || u.second.is_some_and(|m| m.values.dtype() != u.first.values.dtype()) {
        return shape_error(op, "Adam needs two moments of one type, SGD one momentum");
    }
    let Some(narrow) = &u.narrow else { return Ok(()) };
    if !two {
        return shape_error(op, "only Adam measures new weights");
    }
    one(op, narrow.amax)?;
    let Some(bytes) = &narrow.bytes else { return Ok(()) };
    if split {
        return shape_error(op, "bytes are made of whole masters");
    }
    one(op, bytes.scale)?;
    one(op, bytes.scale_inv)?;
    dtypes(op, DType::E4M3, &[bytes.data])?;
    same_contiguous(op, &[u.master, bytes.data])
}

/// The counter of steps.
pub(crate) fn check_counter(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [counter::COUNT] || t.dtype() != DType::F64 || !t.is_contiguous() {
        return shape_error(op, format!("a counter of steps is {} f64 numbers, not {t:?}", counter::COUNT));
    }
    Ok(())
}

/// The state of a loss scale.
pub(crate) fn check_scaler(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [scaler::COUNT] || t.dtype() != DType::F64 || !t.is_contiguous() {
        return shape_error(
            op,
            format!("the state of a loss scale is {} f64 numbers, not {t:?}", scaler::COUNT),
        );
    }
    Ok(())
}

/// What a step raises magnitudes in.
pub(crate) fn check_numbers(op: &'static str, t: &Tensor) -> Result<()> {
    same_contiguous(op, &[t])?;
    dtypes(op, DType::F32, &[t])
}

/// Halves of masters.
pub(crate) fn check_halves(op: &'static str, master: &Tensor, high: &Tensor, low: &Tensor) -> Result<()> {
    same_contiguous(op, &[master, high, low])?;
    dtypes(op, DType::F32, &[master])?;
    dtypes(op, DType::BF16, &[high])?;
    dtypes(op, DType::I16, &[low])
}

/// A moment and its f32 values.
pub(crate) fn check_values(op: &'static str, moment: &Moment, values: &Tensor) -> Result<()> {
    dtypes(op, DType::F32, &[values])?;
    check_moment(op, moment, values)
}

/// A sum of squares.
pub(crate) fn check_square(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [1] || t.dtype() != DType::F64 {
        return shape_error(op, format!("a sum of squares is one f64 number, not {t:?}"));
    }
    Ok(())
}

/// The buffer of step scalars.
pub(crate) fn check_scalars(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [scalars::COUNT] || !t.is_contiguous() {
        return shape_error(
            op,
            format!("the buffer of step scalars is {:?}, not [{}]", t.shape(), scalars::COUNT),
        );
    }
    dtypes(op, DType::F32, &[t])
}
