//! Replays a step as a CUDA graph: a few eager steps, one capture, then one copy and one launch per step.
//!
//! A small model's step is hundreds of launches that take the host longer than the GPU takes to run them. A replay runs
//! the same kernels on the same values, so its results are bit-identical. Everything that changes from step to step is
//! in the memory that [`GraphInputs`] fills; a step that would need other launches runs eagerly.

mod policy;

pub use policy::CudaGraphDecision;
pub(super) use policy::{StepShape, StepTimer};

use super::global_batch::GlobalBatch;
use super::graph_inputs::GraphInputs;
use super::model_state::ModelState;
use super::step_runner::StepRunner;
use super::trainer::LaunchedStep;
use crate::Result;
use crate::config::{Config, CudaGraphMode};
use crate::optimizer::{Optimizer, StepRates, outcome};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, DType, Event, Graph, Stream, Tensor};
use policy::{GraphPolicy, LaunchMode};

/// The hook that replaces the launches of a step by a replay.
pub(super) struct CudaGraph {
    policy: GraphPolicy,
    captured: Option<CapturedStep>,
}

/// A step as a graph, with its input and output memory.
struct CapturedStep {
    shape: StepShape,
    graph: Graph,
    inputs: GraphInputs,
    /// f32 `[outcome::COUNT + micro-batches]`: the optimizer's outcome, then the loss of each micro-batch.
    results: Tensor,
}

impl CudaGraph {
    /// Reads `train.cuda_graph`; an error if it is `on` where a step cannot be captured.
    pub(super) fn new(c: &Config, rank: &Rank) -> Result<CudaGraph> {
        Ok(CudaGraph { policy: GraphPolicy::new(c, rank)?, captured: None })
    }

    pub(super) fn decision(&self) -> CudaGraphDecision {
        self.policy.decision()
    }

    pub(super) fn steps_replayed(&self) -> u64 {
        self.policy.replayed
    }

    /// Whether the next step may be replayed.
    pub(super) fn may_replay(&self) -> bool {
        self.policy.decision().value == CudaGraphMode::On || self.policy.is_open()
    }

    pub(super) fn is_undecided(&self) -> bool {
        let pays = self.policy.decision().value == CudaGraphMode::On;
        self.policy.is_open() || (pays && self.captured.is_none())
    }

    /// Starts to time an eager step, if times can still change the decision.
    pub(super) fn timer(&self, s: &Stream) -> Result<Option<StepTimer>> {
        self.policy.timer(s)
    }

    pub(super) fn finish_timer(&mut self, timer: &StepTimer, done: &Event) -> Result<()> {
        self.policy.finish_timer(timer, done)
    }

    /// Replays a step, capturing it first if it is time to; nothing if the step is to be launched eagerly.
    pub(super) fn run(
        &mut self,
        rank: &Rank,
        model: &mut ModelState,
        optimizer: &Optimizer,
        runner: &mut StepRunner,
        (batch, rates): (&GlobalBatch, StepRates),
    ) -> Result<Option<LaunchedStep>> {
        let shape = StepShape::of(&batch.micro_batches, batch.seq);
        let (captured, is_idle) =
            self.captured.as_ref().map_or((None, false), |c| (Some(c.shape), c.graph.is_ready()));
        match (self.policy.next(shape, captured, is_idle), shape) {
            (LaunchMode::Capture, Some(shape)) => {
                // Frees the memory of a graph of another shape before the capture allocates its own.
                self.captured = None;
                match CapturedStep::capture(rank, model, optimizer, runner, shape) {
                    Ok(step) => self.captured = Some(step),
                    Err(e) => return self.policy.capture_failed(e).map(|()| None),
                }
            }
            (LaunchMode::Replay, _) => {}
            _ => return Ok(None),
        }
        let Some(step) = &self.captured else { return Ok(None) };
        let launched = step.replay(rank, model, optimizer, batch, rates)?;
        self.policy.replayed += 1;
        Ok(Some(launched))
    }
}

impl CapturedStep {
    fn capture(
        rank: &Rank,
        model: &mut ModelState,
        optimizer: &Optimizer,
        runner: &mut StepRunner,
        shape: StepShape,
    ) -> Result<CapturedStep> {
        let s = &rank.compute;
        let inputs = GraphInputs::new(rank, shape)?;
        let words = outcome::COUNT + shape.micro_batches;
        let results = Tensor::empty(s, &[words], DType::F32, Category::Workspace)?;
        let graph = s.capture(|| -> Result<()> {
            s.copy(&inputs.scalars()?, optimizer.scalars())?;
            let load = &mut |rank: &Rank, _: &_, i| inputs.micro_batch(rank, i);
            let passes =
                runner.forward_backward(rank, model, optimizer.loss_scale(), shape.micro_batches, load)?;
            let outcome = optimizer.apply(rank, &model.params, &model.step_state, &model.grads)?;
            s.copy(&outcome, &results.narrow(0, 0, outcome::COUNT)?)?;
            for (i, loss) in passes.losses.iter().enumerate() {
                s.copy(loss, &results.narrow(0, outcome::COUNT + i, 1)?)?;
            }
            Ok(())
        })?;
        Ok(CapturedStep { shape, graph, inputs, results })
    }

    fn replay(
        &self,
        rank: &Rank,
        model: &ModelState,
        optimizer: &Optimizer,
        batch: &GlobalBatch,
        rates: StepRates,
    ) -> Result<LaunchedStep> {
        let s = &rank.compute;
        let scalars = optimizer.scalar_values(rates);
        self.inputs.fill(rank, &model.decoder, &batch.micro_batches, batch.label_weights[0], &scalars)?;
        self.graph.replay()?;
        // Copied, because the next replay overwrites them.
        let out = Tensor::empty(s, self.results.shape(), DType::F32, Category::Workspace)?;
        s.copy(&self.results, &out)?;
        let loss = |i: usize| Ok(out.narrow(0, outcome::COUNT + i, 1)?);
        let losses = (0..self.shape.micro_batches).map(loss).collect::<Result<_>>()?;
        Ok(LaunchedStep { losses, outcome: out.narrow(0, 0, outcome::COUNT)?, moe_counters: None })
    }
}
