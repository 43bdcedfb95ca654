//! Runs the forward and backward passes of a step in pipeline order, and keeps the counters of a run.

use super::execute::{MicroBatch, PassHooks, StepMode, execute, execute_with};
use super::model_state::ModelState;
use super::skipped_samples::SkippedSamples;
use super::split_sizes::ExpectedSplits;
use super::state;
use super::step_faults::StepFaults;
use crate::Result;
use crate::config::{QuantRecipe, Resolved};
use crate::cost::MemoryEstimate;
use crate::events::Offload;
use crate::fault::sections::{Section, SectionTimer};
use crate::model::Decoder;
use crate::optimizer::{LossScale, StepRates};
use crate::pipeline::{PipelinePlan, Schedule, ScheduleKind};
use crate::schedule::{BatchSchedule, LrSchedule, WdSchedule};
use ferrotron_comm::{Communicator, ReduceOp};
use ferrotron_engine::moe::MoeCounters;
use ferrotron_engine::offload::{ActivationOffload, HostSlots, OffloadChoice, OffloadReport};
use ferrotron_engine::{Rank, Recompute, StepContext, StepState};
use ferrotron_tensor::trace::READBACK;
use ferrotron_tensor::{Category, Stream, Tensor};
use std::sync::Arc;
use std::time::Instant;

/// Non-finite steps in a row after which a run ends even if `optimizer.skip_nonfinite` skips them.
const MAX_CONSECUTIVE_SKIPS: u64 = 10;

/// Progress of a run. The data position and every random draw are functions of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Optimizer steps.
    pub step: u64,
    /// Sequences consumed.
    pub samples: u64,
    /// Tokens consumed.
    pub tokens: u64,
}

/// What changes with the samples consumed: learning rate, weight decay, batch size.
#[derive(Clone)]
pub(super) struct Schedules {
    pub(super) lr: LrSchedule,
    pub(super) weight_decay: WdSchedule,
    pub(super) batch: BatchSchedule,
}

impl Schedules {
    /// Learning rate and weight decay of the step after which `samples` are consumed, without those of skipped steps.
    pub(super) fn rates(&self, samples: u64) -> StepRates {
        StepRates { lr: self.lr.at(samples), weight_decay: self.weight_decay.at(samples) }
    }
}

/// Delayed scaling over a run: its first steps may only record amax.
#[derive(Clone, Copy)]
pub(super) struct DelayedScaling {
    /// The recipe uses delayed scaling.
    pub(super) enabled: bool,
    /// Steps at the start that record amax and compute in high precision.
    calibration_steps: u64,
    /// Steps done under delayed scaling, calibration included.
    pub(super) steps: u64,
}

impl DelayedScaling {
    /// Switches calibration on or off for the next step; true if it is on.
    pub(super) fn begin(&self, state: &StepState) -> bool {
        let Some(quant) = state.quant() else { return false };
        quant.calibrate_only(self.steps < self.calibration_steps);
        quant.is_calibrating()
    }
}

/// Decides whether a run survives a step whose gradients are not finite. The optimizer has not applied such a step.
struct NonfinitePolicy {
    skip: bool,
    consecutive: u64,
}

impl NonfinitePolicy {
    /// True if the run continues after a step with this gradient norm. `scale` is the loss scale and its minimum: a
    /// scale that can still fall is the likelier cause than the model, so such a step does not count.
    fn continues(&mut self, grad_norm: f64, scale: Option<(f64, f64)>) -> bool {
        if grad_norm.is_finite() {
            self.consecutive = 0;
            return true;
        }
        self.consecutive += u64::from(scale.is_none_or(|(scale, least)| scale <= least));
        (self.skip || scale.is_some()) && self.consecutive < MAX_CONSECUTIVE_SKIPS
    }
}

/// Results of a step's passes, on the device.
pub(super) struct ForwardBackward {
    /// Per micro-batch f32 `[1 + D]`: `Σ weight·loss` of the language model and of each MTP depth. Last stage only.
    pub(super) losses: Vec<Tensor>,
    /// MoE counters.
    pub(super) moe_counters: Option<MoeCounters>,
}

/// Brings a micro-batch to the device.
pub(super) type LoadMicroBatch<'a> = dyn FnMut(&Rank, &Decoder, usize) -> Result<MicroBatch> + 'a;

/// Runs steps: owns the counters of the run, its schedules and the pipeline order.
pub(super) struct StepRunner {
    pub(super) progress: Progress,
    pub(super) schedules: Schedules,
    pub(super) delayed_scaling: DelayedScaling,
    pub(super) dropout: f32,
    /// The stream on which results of a step are read while the next one computes.
    pub(super) readback: Stream,
    recompute: Recompute,
    mlp_chunk: Option<usize>,
    offload: Option<ActivationOffload>,
    /// What offloading does, once it has been measured.
    pub(super) offload_report: Option<OffloadReport>,
    /// The same as an event that has not been written yet.
    pub(super) offload_event: Option<Offload>,
    schedule_kind: ScheduleKind,
    /// The pipeline schedule of the last step; the next step mostly has as many micro-batches.
    schedule: Option<Arc<Schedule>>,
    nonfinite: NonfinitePolicy,
    /// By which the schedules lag behind the data.
    pub(super) skipped: SkippedSamples,
    /// Measures the sections of steps, for `fault.straggler_every`.
    pub(super) sections: SectionTimer,
    /// Expected split sizes of MoE messages, where the run uses them.
    pub(super) splits: Option<ExpectedSplits>,
}

impl StepRunner {
    pub(super) fn new(rank: &Rank, r: &Resolved) -> Result<StepRunner> {
        let c = &r.config;
        Ok(StepRunner {
            progress: Progress::default(),
            schedules: state::schedules(r)?,
            delayed_scaling: DelayedScaling {
                enabled: c.precision.recipe == QuantRecipe::Fp8Delayed,
                calibration_steps: c.precision.calibrate,
                steps: 0,
            },
            dropout: c.dropout.hidden as f32,
            // Urgent: its small copies and collectives must not queue behind the kernels of the next step.
            readback: rank.device().urgent_stream(READBACK)?.with_rank(rank.world.rank()),
            recompute: c.train.recompute.modules(),
            mlp_chunk: c.train.mlp_chunk,
            offload: activation_offload(rank, r)?,
            offload_report: None,
            offload_event: None,
            schedule_kind: c.parallel.schedule.schedule_kind(),
            schedule: None,
            nonfinite: NonfinitePolicy { skip: c.optimizer.skip_nonfinite, consecutive: 0 },
            skipped: SkippedSamples::default(),
            sections: SectionTimer::new(rank, c.fault.straggler_every > 0),
            splits: None,
        })
    }

    /// Runs the forward and backward passes of `micro_batches` micro-batches, loaded by `load`. Gradients end up in
    /// the model's buckets, reduced over the data-parallel group.
    pub(super) fn forward_backward(
        &mut self,
        rank: &Rank,
        model: &mut ModelState,
        loss_scale: Option<&LossScale>,
        (micro_batches, faults): (usize, Option<StepFaults>),
        load: &mut LoadMicroBatch,
    ) -> Result<ForwardBackward> {
        let schedule = match self.schedule.take() {
            Some(s) if s.shape.micro_batches == micro_batches => s,
            _ => Arc::new(pipeline_schedule(&model.decoder, self.schedule_kind, micro_batches)?),
        };
        let ModelState { decoder, params, step_state, grads, .. } = model;
        grads.begin_step(micro_batches);
        step_state.begin_step(self.progress.step, micro_batches);
        if let Some(moe) = step_state.moe() {
            moe.begin_step(&rank.compute)?;
        }
        if self.offload.as_ref().is_some_and(ActivationOffload::host_became_full) {
            tracing::warn!(
                shown = true,
                "offload.activations = \"auto\" moves less than the link could: host memory is used up, and the rest stays on the \
                 device; raise offload.host_budget or give the process more memory to move more"
            );
        }
        if let Some(report) = self.offload.as_ref().map(ActivationOffload::begin_step).transpose()?.flatten()
        {
            self.offload_report = Some(report);
            self.offload_event = Some(Offload::new(self.progress.step + 1, &report));
        }
        let ctx = StepContext {
            recompute: self.recompute,
            mlp_chunk: self.mlp_chunk,
            offload: self.offload.as_ref(),
            ..StepContext::new(rank, params, step_state)
        };
        let since = Instant::now();
        let mut load = |i: usize| {
            let mut batch = load(rank, decoder, i)?;
            if let Some(faults) = &faults {
                faults.loaded(rank, i, &mut batch)?;
            }
            let mtp = batch.input.mtp.iter_mut().map(|m| &mut m.targets);
            for targets in batch.targets.iter_mut().chain(mtp) {
                if let Some(scale) = loss_scale {
                    targets.weights = scale.weights(rank, &targets.weights)?;
                }
            }
            Ok(batch)
        };
        let hooks = PassHooks { faults, sections: Some(&self.sections) };
        let losses = execute_with(ctx, decoder, &schedule, &mut load, StepMode::Train(grads), hooks)?;
        faults.map_or(Ok(()), |f| f.slow(rank, since))?;
        self.schedule = Some(schedule);
        self.sections.enter(rank, Section::Optimizer)?;
        grads.reduce(rank)?;
        step_state.end_step(rank)?;
        let counters =
            |moe: &ferrotron_engine::moe::MoeState| moe.end_step(rank, micro_batches, decoder.moe_training());
        let moe_counters = step_state.moe().map(counters).transpose()?;
        Ok(ForwardBackward { losses, moe_counters })
    }

    /// `Σ weight·loss` of `micro_batches` micro-batches without gradients, summed over them; 0 on all but the last stage.
    pub(super) fn forward_only(
        &self,
        rank: &Rank,
        model: &ModelState,
        micro_batches: usize,
        load: &mut LoadMicroBatch,
    ) -> Result<f64> {
        let (decoder, state) = (&model.decoder, &model.step_state);
        self.delayed_scaling.begin(state);
        if micro_batches == 0 {
            return Ok(0.0);
        }
        let schedule = pipeline_schedule(decoder, ScheduleKind::ForwardOnly, micro_batches)?;
        let ctx = StepContext {
            train: false,
            mlp_chunk: self.mlp_chunk,
            ..StepContext::new(rank, &model.params, state)
        };
        let mut load = |i: usize| load(rank, decoder, i);
        state.begin_evaluation();
        let losses = execute(ctx, decoder, &schedule, &mut load, StepMode::Loss);
        let total = losses.and_then(|all| all.iter().map(|l| super::read_scalar(rank, l)).sum());
        // Also after an error: a run whose data cannot be read saves its state.
        state.end_evaluation();
        total
    }

    /// Takes the pipeline schedule of the next step from elsewhere, such as from another rank of a simulated job: it is the same on
    /// every rank.
    pub(super) fn set_schedule(&mut self, schedule: Arc<Schedule>) {
        self.schedule = Some(schedule);
    }

    /// Whether activations are offloaded.
    pub(super) fn offloads(&self) -> bool {
        self.offload.is_some()
    }

    /// The streams of a step besides the compute stream that a CUDA graph holds.
    pub(super) fn copy_streams(&self) -> Vec<Stream> {
        self.offload.iter().flat_map(|o| o.copy_streams().map(Stream::clone)).collect()
    }

    /// The next step is captured: the host memory that the graph is to keep.
    pub(super) fn begin_capture(&mut self) -> Option<HostSlots> {
        self.offload.as_mut().map(ActivationOffload::begin_capture)
    }

    /// Whether what is offloaded will not change any more.
    pub(super) fn offload_is_settled(&self) -> bool {
        self.offload.as_ref().is_none_or(ActivationOffload::is_settled)
    }

    /// Counts a launched step of so many samples and tokens.
    pub(super) fn advance(&mut self, samples: u64, tokens: u64) {
        self.progress.step += 1;
        self.progress.samples += samples;
        self.progress.tokens += tokens;
        self.delayed_scaling.steps += u64::from(self.delayed_scaling.enabled);
    }

    /// Learning rate and weight decay of the next step, of so many samples. They are those of the samples that have moved the
    /// weights, including this step's, so that the first step moves.
    pub(super) fn next_rates(&mut self, samples: u64) -> StepRates {
        let skipped = self.skipped.count_for(self.progress.step + 1);
        self.schedules.rates(self.progress.samples.saturating_sub(skipped) + samples)
    }

    /// Non-finite steps in a row so far.
    pub(super) fn nonfinite_steps(&self) -> u64 {
        self.nonfinite.consecutive
    }

    /// Continues after so many non-finite steps in a row.
    pub(super) fn set_nonfinite_steps(&mut self, steps: u64) {
        self.nonfinite.consecutive = steps;
    }

    /// True if the run continues after step `step` of so many samples with this loss and gradient norm; see
    /// [`NonfinitePolicy::continues`].
    pub(super) fn continues(
        &mut self,
        (step, samples): (u64, u64),
        (loss, grad_norm): (f64, f64),
        scale: Option<(f64, f64)>,
    ) -> bool {
        let skipped = !grad_norm.is_finite();
        if skipped {
            self.skipped.add(step, samples);
        }
        let continues = self.nonfinite.continues(grad_norm, scale);
        continues && (skipped || loss.is_finite())
    }

    /// Sums numbers over a group, on the readback stream. Counts stay exact in f64.
    pub(super) fn all_reduce(
        &self,
        group: &Communicator,
        mine: Vec<f64>,
        label: &'static str,
    ) -> Result<Vec<f64>> {
        if group.size() == 1 {
            return Ok(mine);
        }
        let s = &self.readback;
        let t = s.upload(&mine, &[mine.len()], Category::Communication)?;
        group.all_reduce(s, &t, ReduceOp::Sum, label)?;
        Ok(s.download::<f64>(&t)?)
    }

    /// The mean over all ranks.
    pub(super) fn mean_of_ranks<const N: usize>(&self, rank: &Rank, mine: [f64; N]) -> Result<[f64; N]> {
        let ranks = rank.world.size() as f64;
        let sums = self.all_reduce(&rank.control, mine.to_vec(), "mean of all ranks")?;
        Ok(std::array::from_fn(|i| sums[i] / ranks))
    }

    /// Sums numbers that the last pipeline stage has over all data- and context-parallel ranks; every rank gets them, before what
    /// was launched later is done.
    pub(super) fn all_reduce_from_last_stage(
        &self,
        rank: &Rank,
        mine: Vec<f64>,
        label: &'static str,
    ) -> Result<Vec<f64>> {
        Ok(self.all_reduce_with_flags(rank, mine, Vec::new(), label)?.0)
    }

    /// The same, and flags that any rank may raise: how many have raised each of them.
    pub(super) fn all_reduce_with_flags(
        &self,
        rank: &Rank,
        mine: Vec<f64>,
        flags: Vec<bool>,
        label: &'static str,
    ) -> Result<(Vec<f64>, Vec<f64>)> {
        // Every stage but the last contributes zeros, and tensor-parallel ranks have the same numbers.
        let numbers = mine.len();
        let mut mine = if rank.tp.rank() == 0 { mine } else { vec![0.0; numbers] };
        mine.extend(flags.into_iter().map(|f| f64::from(u8::from(f))));
        let mut sums = self.all_reduce(&rank.control, mine, label)?;
        let flags = sums.split_off(numbers);
        Ok((sums, flags))
    }
}

/// The offloading of activations that a recipe asks for; an automatic one begins with what must move for a step to fit.
fn activation_offload(rank: &Rank, r: &Resolved) -> Result<Option<ActivationOffload>> {
    let c = &r.config.offload;
    let choice = match (c.activations.choice(), rank.device().gpu()) {
        (None, _) => return Ok(None),
        (Some(OffloadChoice::Auto { .. }), Some(gpu)) => {
            let (needed, layers) = MemoryEstimate::of(r)?.needed_offload(rank.pp.rank(), gpu.memory)?;
            OffloadChoice::Auto { needed, layers }
        }
        (Some(choice), _) => choice,
    };
    Ok(Some(ActivationOffload::new(rank, choice, c.min_bytes.0 as usize)?))
}

fn pipeline_schedule(decoder: &Decoder, kind: ScheduleKind, micro_batches: usize) -> Result<Schedule> {
    let placement = decoder.placement();
    PipelinePlan { kind, ..PipelinePlan::new(placement.pp(), placement.vp(), micro_batches) }.schedule()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_nonfinite_steps_in_a_row_end_a_run() {
        let mut p = NonfinitePolicy { skip: true, consecutive: 0 };
        assert!((0..9).all(|_| p.continues(f64::NAN, None)));
        assert!(p.continues(1.0, None), "a finite step starts the count anew");
        assert!((0..9).all(|_| p.continues(f64::INFINITY, None)));
        assert!(!p.continues(f64::NAN, None));
        assert!(!NonfinitePolicy { skip: false, consecutive: 0 }.continues(f64::NAN, None));
        // A loss scale above its minimum takes the blame as long as it can fall.
        let mut p = NonfinitePolicy { skip: false, consecutive: 0 };
        assert!((0..99).all(|_| p.continues(f64::NAN, Some((2.0, 1.0)))));
        assert!((0..9).all(|_| p.continues(f64::NAN, Some((1.0, 1.0)))));
        assert!(!p.continues(f64::NAN, Some((1.0, 1.0))));
    }
}
