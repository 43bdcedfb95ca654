//! Replays a step as a CUDA graph: a few eager steps, one capture, then one copy and one launch per step.
//!
//! A small model's step is hundreds of launches that take the host longer than the GPU takes to run them. A replay runs
//! the same kernels on the same values, so its results are bit-identical. Everything that changes from step to step is
//! in the memory that [`GraphInputs`] fills; a step that would need other launches runs eagerly.
//!
//! Over ranks the graph holds the collectives too, which NCCL can capture. All ranks must then replay the same steps: a
//! rank that launched its collectives while another replays them would wait forever. So everything that decides is the
//! same on all ranks: the shape of the step, the mean of their launch times, whether every rank could capture, and memory
//! that nobody else uses.

mod policy;

pub use policy::CudaGraphDecision;
pub(super) use policy::{StepShape, StepTimer};

use super::global_batch::GlobalBatch;
use super::graph_inputs::GraphInputs;
use super::model_state::ModelState;
use super::split_sizes::ExpectedSplits;
use super::step_runner::StepRunner;
use super::trainer::LaunchedStep;
use crate::config::{Config, CudaGraphMode};
use crate::cost::Traffic;
use crate::optimizer::{Optimizer, StepRates, outcome};
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_engine::moe::MoeCounters;
use ferrotron_engine::offload::HostSlots;
use ferrotron_tensor::{Category, DType, Event, Graph, GraphMemory, Stream, Tensor};
use policy::{GraphPolicy, LaunchMode};

/// The hook that replaces the launches of a step by a replay.
pub(super) struct CudaGraph {
    policy: GraphPolicy,
    captured: Option<CapturedStep>,
    /// Every rank has chosen what to offload: steps launch the same copies from now on.
    offload_settled: bool,
}

/// A step as a graph, with its input and output memory.
struct CapturedStep {
    shape: StepShape,
    graph: Graph,
    inputs: GraphInputs,
    /// f32 `[outcome::COUNT + micro-batches·(1 + D)]`: the optimizer's outcome, then the losses of each micro-batch: of the
    /// language model and of each MTP depth.
    results: Tensor,
    /// Losses of a micro-batch: `1 + D`.
    losses: usize,
    /// The counters of MoE layers.
    moe_counters: Option<MoeCounters>,
    /// What its collectives send.
    sent: Traffic,
    /// The host memory that it copies activations to.
    _host_slots: Option<HostSlots>,
    /// Its communicators, dropped after the graph: NCCL does not destroy one while a graph holds its collectives.
    rank: Rank,
}

impl CudaGraph {
    /// Reads `train.cuda_graph`; an error if it is `on` where a step cannot be captured.
    pub(super) fn new(c: &Config, rank: &Rank) -> Result<CudaGraph> {
        Ok(CudaGraph { policy: GraphPolicy::new(c, rank)?, captured: None, offload_settled: false })
    }

    pub(super) fn decision(&self) -> CudaGraphDecision {
        self.policy.decision()
    }

    pub(super) fn steps_replayed(&self) -> u64 {
        self.policy.replayed
    }

    /// A replayed step has ended, and counts.
    pub(super) fn replay_ended(&mut self) {
        self.policy.replayed += 1;
    }

    /// Whether the next step may be replayed.
    pub(super) fn may_replay(&self) -> bool {
        self.policy.decision().value == CudaGraphMode::On || self.policy.is_open()
    }

    pub(super) fn is_undecided(&self) -> bool {
        let pays = self.policy.decision().value == CudaGraphMode::On;
        self.policy.is_open() || (pays && self.captured.is_none())
    }

    /// Drops a graph whose MoE messages have other sizes than those of the next step: they never return, and the graph holds the
    /// activations of a step. All ranks do so at the same step.
    pub(super) fn drop_other_splits(&mut self, splits: &ExpectedSplits) {
        self.captured.take_if(|step| step.shape.splits != splits.epoch());
    }

    /// Starts to time an eager step, if times can still change the decision.
    pub(super) fn timer(&self, s: &Stream) -> Result<Option<StepTimer>> {
        self.policy.timer(s)
    }

    pub(super) fn finish_timer(
        &mut self,
        timer: &StepTimer,
        done: &Event,
        mean: impl FnOnce([f64; 2]) -> Result<[f64; 2]>,
    ) -> Result<()> {
        self.policy.finish_timer(timer, done, mean)
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
        if self.policy.is_off() || !self.is_offload_settled(rank, runner)? {
            return Ok(None);
        }
        // How many tokens an expert may have follows from the number of tokens, of which padding is none.
        let capacity = model.decoder.moe_training().capacity.is_some_and(|c| !c.per_rank);
        let sizes = (batch.seq, batch.sequences);
        let splits = runner.splits.as_ref().and_then(ExpectedSplits::epoch);
        let shape = StepShape::of(&batch.micro_batches, sizes, splits);
        // Whether there is padding was agreed: another rank's micro-batches may have some where these have none.
        let shape = shape.filter(|s| !(batch.is_padded && (capacity || s.sequences.is_none())));
        let (captured, is_idle) =
            self.captured.as_ref().map_or((None, false), |c| (Some(c.shape), c.graph.is_ready()));
        let mode = self.policy.next(shape, captured, is_idle);
        if mode == LaunchMode::Eager {
            return Ok(None);
        }
        // A graph waits for no event of other streams: all weights are there before it starts.
        model.params.wait_params(rank)?;
        if let (LaunchMode::Capture, Some(shape)) = (mode, self.policy.shape()) {
            // Frees the memory of a graph of another shape before the capture allocates its own.
            self.captured = None;
            let captured = CapturedStep::capture(rank, (model, optimizer, runner), shape, batch);
            match agreed(rank, captured)? {
                Ok(step) => self.captured = Some(step),
                Err(e) => return self.policy.capture_failed(e).map(|()| None),
            }
        }
        let Some(step) = &self.captured else { return Ok(None) };
        let launched = step.replay(model, optimizer, (batch, runner.progress.step), rates)?;
        if mode == LaunchMode::Replay {
            step.sent.add_replayed(rank);
        }
        Ok(Some(launched))
    }
}

impl CudaGraph {
    /// Whether every rank has chosen what to offload. Ranks measure for themselves, and must capture together.
    fn is_offload_settled(&mut self, rank: &Rank, runner: &StepRunner) -> Result<bool> {
        if !self.offload_settled && runner.offloads() {
            let mine = [u8::from(runner.offload_is_settled())];
            self.offload_settled = match rank.world.size() {
                1 => mine == [1],
                _ => rank.world.all().all_gather_bytes(&mine, "offload")?.iter().all(|rank| rank[..] == [1]),
            };
        }
        Ok(self.offload_settled || !runner.offloads())
    }
}

/// The captured step, if every rank has captured its own: all of them replay, or none.
fn agreed(rank: &Rank, captured: Result<CapturedStep>) -> Result<Result<CapturedStep>> {
    if rank.world.size() == 1 {
        return Ok(captured);
    }
    let mine = captured.as_ref().err().map_or(String::new(), |e| e.to_string());
    let all = rank.world.all().all_gather_bytes(mine.as_bytes(), "captured")?;
    let failed = all.iter().enumerate().find(|(_, error)| !error.is_empty());
    Ok(match (captured, failed) {
        (Ok(_), Some((r, error))) => Err(Error::Invalid(format!(
            "rank {r} cannot capture the step: {}",
            String::from_utf8_lossy(error)
        ))),
        (captured, _) => captured,
    })
}

impl CapturedStep {
    fn capture(
        rank: &Rank,
        (model, optimizer, runner): (&mut ModelState, &Optimizer, &mut StepRunner),
        shape: StepShape,
        batch: &GlobalBatch,
    ) -> Result<CapturedStep> {
        // Collectives run on the compute stream, with the same results; only copies to and from the host have their own.
        let rank = Rank { overlap: false, ..rank.clone() };
        let s = &rank.compute;
        let before = Traffic::of(&rank);
        let depth = model.decoder.config().mtp_depth();
        let inputs = GraphInputs::new(&rank, shape, depth, model.decoder.config().moe.is_some())?;
        let inputs = inputs.with_positions(&rank, &model.decoder, batch, runner.dropout)?;
        let losses = 1 + depth;
        let words = outcome::COUNT + shape.micro_batches * losses;
        let results = Tensor::empty(s, &[words], DType::F32, Category::Workspace)?;
        let moe_counters = model.step_state.moe().map(|moe| moe.empty_counters(s)).transpose()?;
        // Ranks must replay together, so that a replay must not depend on what else a rank does with the memory.
        let memory = if rank.world.size() == 1 { GraphMemory::Lent } else { GraphMemory::Reserved };
        let host_slots = runner.begin_capture();
        let streams = runner.copy_streams();
        let streams: Vec<&Stream> = streams.iter().collect();
        let graph = s.capture_with(memory, &streams, || -> Result<()> {
            s.copy(&inputs.scalars()?, optimizer.scalars())?;
            let load = &mut |rank: &Rank, _: &_, i| inputs.micro_batch(rank, i);
            let passes = runner.forward_backward(
                &rank,
                model,
                optimizer.loss_scale(),
                (shape.micro_batches, None),
                load,
            )?;
            let outcome = optimizer.apply(&rank, &model.params, &model.step_state, &model.grads)?;
            s.copy(&outcome, &results.narrow(0, 0, outcome::COUNT)?)?;
            for (i, loss) in passes.losses.iter().enumerate() {
                s.copy(loss, &results.narrow(0, outcome::COUNT + i * losses, losses)?)?;
            }
            if let (Some(from), Some(to)) = (&passes.moe_counters, &moe_counters) {
                from.copy_to(s, to)?;
            }
            Ok(())
        })?;
        let sent = Traffic::of(&rank).since(&before);
        let _host_slots = host_slots;
        Ok(CapturedStep { shape, graph, inputs, results, losses, moe_counters, sent, _host_slots, rank })
    }

    fn replay(
        &self,
        model: &ModelState,
        optimizer: &Optimizer,
        (batch, step): (&GlobalBatch, u64),
        rates: StepRates,
    ) -> Result<LaunchedStep> {
        let (rank, s) = (&self.rank, &self.rank.compute);
        let scalars = optimizer.scalar_values(rates);
        self.inputs.fill(rank, &model.decoder, batch, step, &scalars)?;
        rank.world.replay(s, || self.graph.replay())?;
        // Copied, because the next replay overwrites them.
        let out = Tensor::empty(s, self.results.shape(), DType::F32, Category::Workspace)?;
        s.copy(&self.results, &out)?;
        let loss = |i: usize| Ok(out.narrow(0, outcome::COUNT + i * self.losses, self.losses)?);
        let losses = (0..self.shape.micro_batches).map(loss).collect::<Result<_>>()?;
        let moe_counters = self.moe_counters.as_ref().map(|c| c.copied(s)).transpose()?;
        Ok(LaunchedStep { losses, outcome: out.narrow(0, 0, outcome::COUNT)?, moe_counters })
    }
}
