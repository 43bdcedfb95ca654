//! One model of the area, run under a layout.

use super::Case;
use super::weights::Named;
use ferrotron_core::Result;
use ferrotron_core::data::Batch;
use ferrotron_core::grid::RankLayout as Ranks;
use ferrotron_core::model::generate::to_host;
use ferrotron_core::model::{Input, Model, ModelOptions, MtpTraining, PipelineLayout};
use ferrotron_core::pipeline::{PipelinePlan, ScheduleKind};
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{
    LogicalValues, MicroBatch, StepMode, execute, gather_all_stages, upload_mtp_inputs, upload_targets,
};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::moe::AuxLossKind;
use ferrotron_engine::{GradBuffer, ParamId, Rank, StepContext};
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{Category, DType, Float, Tensor, bf16};
use std::sync::Arc;

/// What a run yields.
pub struct Got {
    /// Of all tokens.
    pub logits: Vec<f32>,
    /// Of each MTP depth; on one rank only.
    pub mtp_logits: Vec<Vec<f32>>,
    /// The mean loss, then that of each MTP depth.
    pub losses: Vec<f64>,
    /// AuxLossKind losses without their coefficients, by MoE layer, in the order of [`AuxLossKind::ALL`].
    pub balance: Vec<Vec<f32>>,
    /// Z-loss without its coefficient, by MoE layer.
    pub z: Vec<f64>,
    pub gradients: Named,
    /// Tokens of each expert, by layer.
    pub loads: Vec<(usize, Vec<i64>)>,
}

/// Little-endian bytes of a tensor in the type it has in the model; expert biases are always f32.
fn bytes(name: &str, values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 if !name.ends_with(".expert_bias") => {
            values.iter().flat_map(|x| <bf16 as Float>::from_f32(*x).to_le_bytes()).collect()
        }
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Values of the tokens `by` places further on in their row; zeros behind its end.
fn rolled(values: &[f32], seq: usize, by: usize) -> Vec<f32> {
    let row = |row: &[f32]| {
        let mut row = row[by.min(seq)..].to_vec();
        row.resize(seq, 0.0);
        row
    };
    values.chunks(seq).flat_map(row).collect()
}

/// The batch of a case, and the weight of every label in the loss and in that of each MTP depth.
struct Work {
    rows: Layout,
    batch: Batch,
    weights: Vec<Vec<f32>>,
}

impl Work {
    fn new(case: &Case) -> Work {
        let shape = case.expected.shape("input_ids");
        let &[count, seq] = &shape[..] else { panic!("input_ids {shape:?}") };
        let ints = |name: &str| -> Vec<i32> { case.expected.i64(name).iter().map(|x| *x as i32).collect() };
        let mask = case.expected.f32("loss_mask");
        let labels: Vec<i32> =
            ints("labels").iter().zip(&mask).map(|(l, m)| if *m == 0.0 { IGNORE } else { *l }).collect();
        let depths = case.model.mtp_depth();
        let weights = (0..=depths).map(|d| {
            let mask = rolled(&mask, seq, d);
            let sum: f32 = mask.iter().sum();
            let factor = if d == 0 { 1.0 } else { case.mtp_factor as f32 / depths as f32 };
            mask.iter().map(|m| factor * m / sum.max(1e-30)).collect()
        });
        let positions = (0..count * seq).map(|i| (i % seq) as i32).collect();
        Work {
            rows: Layout::Rows { count, len: seq },
            weights: weights.collect(),
            batch: Batch {
                tokens: ints("input_ids"),
                labels,
                positions,
                cu_seqlens: None,
                padding: None,
                varies: false,
            },
        }
    }

    fn seq(&self) -> usize {
        let Layout::Rows { len, .. } = self.rows else { panic!("packed rows") };
        len
    }

    /// What a rank is given, with the tokens ahead that MTP layers need.
    fn input(&self, model: &Model) -> Result<Input> {
        let rank = &model.rank;
        let mut input = model.decoder.input(rank, &self.batch.tokens, None, self.rows.clone())?;
        let ones = vec![1.0; self.weights.len() - 1];
        input.mtp = upload_mtp_inputs(rank, &model.decoder, &self.batch, (self.seq(), &input), &ones)?;
        for (d, depth) in input.mtp.iter_mut().enumerate() {
            depth.targets.weights = self.weights_of(rank, &input.tokens, d + 1)?;
        }
        Ok(input)
    }

    fn weights_of(&self, rank: &Rank, tokens: &ferrotron_engine::Tokens, depth: usize) -> Result<Tensor> {
        let mine = tokens.take(&self.weights[depth], 0.0)?;
        Ok(rank.compute.upload(&mine, &[mine.len()], Category::Activations)?)
    }

    /// One pass over the batch, as one micro-batch.
    fn pass(&self, model: &Model, aim: StepMode, train: bool) -> Result<Vec<Tensor>> {
        let place = model.decoder.placement();
        let kind = if train { ScheduleKind::OneForwardOneBackward } else { ScheduleKind::ForwardOnly };
        let schedule = PipelinePlan { kind, ..PipelinePlan::new(place.pp(), place.vp(), 1) }.schedule()?;
        let mut load = |_| {
            let input = self.input(model)?;
            let mut wanted = None;
            if train {
                let mut t = upload_targets(&model.rank, &input.tokens, &self.batch.labels, 1.0)?;
                t.weights = self.weights_of(&model.rank, &input.tokens, 0)?;
                wanted = Some(t);
            }
            Ok(MicroBatch { input, targets: wanted, position: None })
        };
        execute(model.pass(), &model.decoder, &schedule, &mut load, aim)
    }
}

/// Runs a model on threads that are ranks; the result is that of all.
pub fn run(case: &Case, dtype: DType, layout: &Ranks) -> Got {
    let work = Work::new(case);
    let alone = *layout == Ranks::default();
    // What ranks share.
    let (config, moe, weights, factor) = (&case.model, &case.moe, &case.weights, case.mtp_factor);
    let on_rank = |rank: Rank| {
        let source = |name: &str| {
            let values = weights.get(name).unwrap_or_else(|| panic!("{name} is not in the folder"));
            Ok(bytes(name, values, dtype))
        };
        let settings = ModelOptions {
            moe_training: Arc::new(moe.clone()),
            mtp: MtpTraining { loss_weight: factor, ..MtpTraining::default() },
            ..ModelOptions::default()
        };
        let stages = PipelineLayout { vp: layout.vp, layout: None };
        let model = Model::load_with(rank, config, work.seq(), dtype, (&stages, &settings), &source)?;
        let logits = work.pass(&model, StepMode::Logits, false)?;
        let logits = logits.first().map_or(Ok(Vec::new()), |l: &Tensor| to_host(&model.pass(), l))?;
        let logits = model.join_logits(&work.rows, &logits)?;
        let mut mtp_logits = Vec::new();
        if alone && config.mtp_depth() > 0 {
            let pass = StepContext { train: false, ..model.pass() };
            for l in model.decoder.chunks()[0].mtp_logits(&pass, &work.input(&model)?)? {
                mtp_logits.push(to_host(&pass, &l)?);
            }
        }
        let mut grads = GradBuffer::new(model.params.specs());
        // Counters of the passes above do not belong to the step.
        model.step_state.moe().map_or(Ok(()), |m| m.begin_step(&model.rank.compute))?;
        let mut losses = vec![0.0; work.weights.len()];
        for l in work.pass(&model, StepMode::Train(&mut grads), true)? {
            let values = model.rank.compute.download::<f32>(&l)?;
            losses.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(x));
        }
        let loads = model.tokens_per_expert()?;
        let (mut balance, mut z) = (Vec::new(), Vec::new());
        if let Some(state) = model.step_state.moe() {
            let counted = state.end_step(&model.rank, 1, moe)?;
            let by_kind = model.rank.compute.download::<f32>(&counted.losses)?;
            balance = by_kind.chunks(AuxLossKind::ALL.len()).map(<[f32]>::to_vec).collect();
            z = model.rank.compute.download::<f64>(&counted.z)?.chunks(2).map(|c| c[0] / c[1]).collect();
        }
        grads.reduce(&model.rank)?;
        let mut mine = Vec::new();
        for (i, spec) in model.params.specs().iter().enumerate().filter(|(_, spec)| !spec.mirror) {
            let values: Vec<f32> = model.rank.compute.download(&grads.get(ParamId(i))?)?;
            for (part, _, r) in spec.held() {
                let values = model.rank.gather_tensor(spec.experts, part, &values[r])?;
                mine.push(LogicalValues { name: part.name.clone(), shape: part.shape.clone(), values });
            }
        }
        let all = gather_all_stages(&model.rank, config, mine)?;
        let gradients = all.into_iter().map(|v| (v.name, v.values)).collect();
        Ok(Got { logits, mtp_logits, losses, balance, z, gradients, loads })
    };
    let mut all =
        on_threads(layout, || Ok(Rank::cpu(1, 1)?), on_rank).unwrap_or_else(|e| panic!("{layout}: {e}"));
    // Each rank has the losses of its own tokens and stage; tensor-parallel ranks have the same ones.
    let mut losses = vec![0.0; work.weights.len()];
    for got in &all {
        losses.iter_mut().zip(&got.losses).for_each(|(sum, x)| *sum += x / layout.tp as f64);
    }
    let mut first = all.swap_remove(0);
    first.losses = losses;
    first
}
