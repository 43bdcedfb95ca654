//! Benchmark of training steps.

use crate::Result;
use crate::config::{OffloadedActivations, Resolved};
use crate::data::{Batches, Row};
use crate::train::{CudaGraphDecision, Observer, StepMetrics, Trainer};
use ferrotron_engine::Rank;
use ferrotron_engine::offload::OffloadReport;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_tensor::{MemoryReport, Profile};
use std::time::Instant;

/// Random tokens: every step does the same work, and nothing is read from disk.
pub struct RandomTokens {
    seq: usize,
    vocab: u64,
    /// Tokens per document; attention does not cross documents.
    document: usize,
}

impl RandomTokens {
    fn of(r: &Resolved, document: Option<usize>) -> RandomTokens {
        let seq = r.plan.seq_len;
        let document = document.unwrap_or(seq).clamp(1, seq.max(1));
        RandomTokens { seq, vocab: r.model.vocab.max(1) as u64, document }
    }
}

impl Batches for RandomTokens {
    fn seq(&self) -> usize {
        self.seq
    }
    fn samples(&self) -> u64 {
        u64::MAX
    }
    fn resets(&self) -> bool {
        self.document < self.seq
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let stream = RandomStream::named(n, "random tokens");
        let ids: Vec<i32> =
            (0..=self.seq as u64).map(|i| (u64::from(stream.word(i)) % self.vocab) as i32).collect();
        row.tokens.extend_from_slice(&ids[..self.seq]);
        row.labels.extend_from_slice(&ids[1..]);
        row.positions.extend((0..self.seq).map(|i| (i % self.document) as i32));
        row.starts.extend((0..self.seq).step_by(self.document));
        Ok(())
    }
}

/// Measurements of a training benchmark.
#[derive(Clone, Debug)]
pub struct TrainBench {
    /// Seconds of each timed step, sorted.
    pub step_s: Vec<f64>,
    /// CPU launch overhead of each step in seconds, sorted. On the CPU that is the step itself.
    pub host_s: Vec<f64>,
    /// Control frames per step that this rank's host sent to others.
    pub frames: f64,
    /// Tokens per step.
    pub tokens: u64,
    /// Tokens per document.
    pub context: usize,
    /// Model FLOPs per token.
    pub flops_per_token: f64,
    /// Seconds from building the trainer to the first timed step.
    pub start_s: f64,
    /// Seconds from the start of the process to the end of its first step.
    pub first_step_s: f64,
    /// Memory by category.
    pub memory: MemoryReport,
    /// Time by kernel over the timed steps, if the device profiles.
    pub profile: Profile,
    /// Loss of the last step.
    pub loss: f64,
    /// Was every timed step replayed as a CUDA graph?
    pub graph: bool,
    /// Why, or why not.
    pub cuda_graph_decision: CudaGraphDecision,
    /// How tokens were routed; none without MoE layers.
    pub routing: Option<RoutingReport>,
    /// What the offloading of activations does.
    pub offload: Option<OffloadReport>,
}

/// How tokens were routed to experts.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingReport {
    /// Was routing random and nearly balanced, instead of the router's?
    pub forced: bool,
    /// Routing metrics of the last step, by name.
    pub loads: StepMetrics,
    /// Timed steps whose MoE messages of expected size did not hold their tokens: each ran again, and so did the one launched
    /// after it.
    pub overflows: u64,
}

impl RoutingReport {
    /// `forced` or `learned`.
    pub fn name(&self) -> &'static str {
        if self.forced { "forced" } else { "learned" }
    }

    /// Tokens of the most loaded expert over the mean, of the worst layer in the last step.
    pub fn imbalance(&self) -> Option<f64> {
        self.loads.get("imbalance")?.as_f64()
    }
}

impl TrainBench {
    /// Median seconds of a step.
    pub fn median(&self) -> f64 {
        self.step_s.get(self.step_s.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// Least CPU launch overhead of a step: with an empty queue before it. Later steps also wait for space in the
    /// launch queue.
    pub fn host_least(&self) -> f64 {
        self.host_s.first().copied().unwrap_or(f64::NAN)
    }

    /// Tokens per second at the median.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.median()
    }

    /// Model TFLOP/s at the median.
    pub fn tflops(&self) -> f64 {
        self.tokens_per_s() * self.flops_per_token / 1e12
    }
}

/// Steps after which the trainer has decided at the latest whether to replay a CUDA graph, and uses expected split sizes of MoE
/// messages. New sizes start the warm-up of a graph anew.
const LAUNCH_DECIDED: u64 = 16;
/// Steps after which the trainer has chosen at the latest what to offload.
const OFFLOAD_CHOSEN: u64 = 32;

/// Times `steps` optimizer steps after `warmup` untimed ones, on random tokens, packed into documents of `document`
/// tokens if that is given. `begun` is when the process started.
pub fn train(
    rank: Rank,
    r: &Resolved,
    warmup: usize,
    steps: usize,
    document: Option<usize>,
    begun: Instant,
) -> Result<TrainBench> {
    let begin = Instant::now();
    let data = RandomTokens::of(r, document);
    let mut trainer = Trainer::new(rank, r)?;
    let mut first_step_s = None;
    let mut note_first_step = || _ = first_step_s.get_or_insert_with(|| begun.elapsed().as_secs_f64());
    // Timed steps are all replayed or all launched, and the host reads the counts of MoE messages in all or in none: that is
    // decided before them.
    let is_undecided = |t: &Trainer| t.cuda_graph_undecided() || t.awaits_split_sizes();
    while trainer.step() < warmup as u64 || (is_undecided(&trainer) && trainer.step() < LAUNCH_DECIDED) {
        trainer.train_step(&data)?;
        note_first_step();
        trainer.share_gemm_choices()?;
    }
    if r.config.offload.activations == OffloadedActivations::Auto {
        // Until the choice is made less moves, or more.
        while !trainer.offload_is_settled() && trainer.step() < OFFLOAD_CHOSEN {
            trainer.train_step(&data)?;
        }
        trainer.rank.device().restart_memory_peaks();
    }
    let launched = trainer.step() - trainer.steps_replayed();
    let overflows = trainer.split_overflows();
    trainer.rank.device().take_profile()?;
    let start_s = begin.elapsed().as_secs_f64();
    // As in a run: on a GPU a step is launched before the loss of the previous one is read.
    let ahead = trainer.rank.device().gpu().is_some();
    let (mut host_s, mut tokens, mut loss) = (Vec::with_capacity(steps), 0, f64::NAN);
    let mut events = vec![trainer.rank.compute.record()?];
    let mut last = None;
    let before = trainer.rank.world.host_cost();
    for _ in 0..steps {
        let begin = Instant::now();
        let in_flight = trainer.begin_step(&data)?;
        host_s.push(begin.elapsed().as_secs_f64());
        events.push(trainer.rank.compute.record()?);
        if let Some(before) = last.replace(in_flight) {
            trainer.end_step(before, &mut last)?;
            note_first_step();
        }
        if let Some(step) = last.take_if(|_| !ahead) {
            let report = trainer.end_step(step, &mut None)?;
            note_first_step();
            (tokens, loss) = (report.tokens, report.loss);
        }
    }
    if let Some(last) = last {
        let report = trainer.end_step(last, &mut None)?;
        note_first_step();
        (tokens, loss) = (report.tokens, report.loss);
    }
    let frames = trainer.rank.world.host_cost().since(&before).frames as f64 / steps as f64;
    let loads = trainer.take_moe_metrics()?;
    let mut step_s =
        events.windows(2).map(|w| Ok(w[1].since(&w[0])?.as_secs_f64())).collect::<Result<Vec<f64>>>()?;
    step_s.sort_by(f64::total_cmp);
    host_s.sort_by(f64::total_cmp);
    Ok(TrainBench {
        step_s,
        host_s,
        frames,
        tokens,
        context: data.document,
        flops_per_token: r.flops_per_token(data.document as f64)?.total(),
        start_s,
        first_step_s: first_step_s.unwrap_or(f64::NAN),
        memory: trainer.rank.device().memory(),
        profile: trainer.rank.device().take_profile()?,
        loss,
        graph: trainer.steps_replayed() > 0 && trainer.step() - trainer.steps_replayed() == launched,
        cuda_graph_decision: trainer.cuda_graph_decision(),
        routing: r.model.moe.is_some().then_some(RoutingReport {
            forced: r.config.moe.force_balance.is_some(),
            loads,
            overflows: trainer.split_overflows() - overflows,
        }),
        offload: trainer.offload_report(),
    })
}

/// Runs `steps` optimizer steps on random tokens, after `warmup` others. An observer is told when the first begins and when the
/// last has ended: on a GPU they are launched ahead, as in a run.
pub fn train_with_observer(
    rank: Rank,
    r: &Resolved,
    warmup: usize,
    steps: usize,
    observer: &mut dyn Observer,
) -> Result<()> {
    let data = RandomTokens::of(r, None);
    let mut trainer = Trainer::new(rank, r)?;
    for _ in 0..warmup {
        trainer.train_step(&data)?;
        trainer.share_gemm_choices()?;
    }
    let ahead = trainer.rank.device().gpu().is_some();
    let mut last = None;
    observer.before_step(&trainer.rank, steps as u64)?;
    for _ in 0..steps {
        let step = trainer.begin_step(&data)?;
        let before = last.replace(step);
        before.map(|done| trainer.end_step(done, &mut last)).transpose()?;
        last.take_if(|_| !ahead).map(|done| trainer.end_step(done, &mut None)).transpose()?;
    }
    last.map(|done| trainer.end_step(done, &mut None)).transpose()?;
    trainer.rank.compute.synchronize()?;
    observer.after_step(&trainer.rank, steps as u64)
}
