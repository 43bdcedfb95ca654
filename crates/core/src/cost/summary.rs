//! What a recipe costs, in numbers that are known before anything is allocated.

use super::memory::MemoryBytes;
use super::{ByGroup, MemoryEstimate, step_volume};
use crate::Result;
use crate::config::Resolved;
use crate::model::PipelineLayout;
use crate::model::description::ModelDescription;
use crate::pipeline::{Costs, PipelinePlan, Schedule, Timeline};
use serde::Serialize;

/// Parameters, memory, FLOPs and communication of a recipe.
#[derive(Clone, Debug, Serialize)]
pub struct CostSummary {
    /// Parameters of the model; a tied matrix counts once.
    pub parameters: usize,
    /// Parameters that one token uses: of the experts, top-k.
    pub active_parameters: usize,
    /// FLOPs of training one token.
    pub flops_per_token: f64,
    /// Ranks of the layout.
    pub ranks: usize,
    /// One rank of every pipeline stage.
    pub stages: Vec<StageCost>,
    /// Idle fraction of a pipeline with equal stages; none without a pipeline.
    pub bubble: Option<f64>,
}

/// One rank of a pipeline stage.
#[derive(Clone, Debug, Serialize)]
pub struct StageCost {
    /// Parameters on the rank.
    pub parameters: usize,
    /// Memory in bytes.
    pub memory: MemoryBytes,
    /// Bytes it sends in a step, by process group.
    pub sent: ByGroup,
}

impl CostSummary {
    /// The costs of a recipe.
    pub fn of(r: &Resolved) -> Result<CostSummary> {
        let estimate = MemoryEstimate::of(r)?;
        let mut stages = Vec::new();
        for shape in &estimate.stages {
            let parameters = ModelDescription::params(shape)?.iter().map(|p| p.numel()).sum();
            let (memory, sent) = (estimate.stage(shape)?, step_volume(shape)?);
            stages.push(StageCost { parameters, memory, sent });
        }
        let pipelined = r.config.parallel.pp > 1;
        Ok(CostSummary {
            parameters: r.model.parameters(),
            active_parameters: r.model.active_parameters(),
            flops_per_token: r.flops_per_token(r.plan.seq_len as f64)?.total(),
            ranks: r.config.parallel.layout().world()?,
            stages,
            bubble: pipelined.then(|| Ok::<_, crate::Error>(timeline(r)?.bubble())).transpose()?,
        })
    }

    /// The stage whose rank needs most memory.
    pub fn largest(&self) -> Option<&StageCost> {
        self.stages.iter().max_by_key(|s| s.memory.total())
    }

    /// Bytes of all ranks together.
    pub fn total_bytes(&self) -> usize {
        let each = self.ranks / self.stages.len().max(1);
        self.stages.iter().map(|s| s.memory.total().saturating_mul(each)).fold(0, usize::saturating_add)
    }
}

/// The pipeline schedule of a recipe's full batch.
pub fn schedule(r: &Resolved) -> Result<Schedule> {
    let p = &r.config.parallel;
    let placement = PipelineLayout { vp: p.vp, layout: p.stages.clone() }.place(&r.model, p.pp)?;
    let micro_batches = r.config.train.global_batch / (r.plan.micro_batch * p.dp).max(1);
    let kind = p.schedule.schedule_kind();
    PipelinePlan { kind, ..PipelinePlan::new(p.pp, placement.vp(), micro_batches) }.schedule()
}

/// That schedule in time, with equal stages and backward twice as long as forward.
pub fn timeline(r: &Resolved) -> Result<Timeline> {
    Timeline::new(&schedule(r)?, &Costs::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Recipe;
    use crate::train::Trainer;
    use ferrotron_engine::Rank;

    fn summary(set: &[&str]) -> (Resolved, CostSummary) {
        let mut recipe = Recipe::named("tiny").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        let r = recipe.resolve(None).unwrap();
        let summary = CostSummary::of(&r).unwrap();
        (r, summary)
    }

    #[test]
    fn one_rank_holds_the_model_and_sends_nothing() {
        let (r, s) = summary(&["moe.experts=8", "moe.topk=2", "moe.ffn=64"]);
        let trainer = Trainer::new(Rank::cpu(1, 0).unwrap(), &r).unwrap();
        assert_eq!(s.parameters, trainer.model.params.numel());
        let [one] = &s.stages[..] else { panic!("{s:?}") };
        assert!(one.parameters == s.parameters && one.sent.is_empty() && s.bubble.is_none());
        // Six of eight experts of each of four layers: gate, up and down.
        assert_eq!(s.parameters - s.active_parameters, 4 * 6 * 3 * 256 * 64);
        assert_eq!(s.total_bytes(), one.memory.total());
    }

    #[test]
    fn stages_share_the_model() {
        let (_, s) = summary(&["parallel.pp=4", "parallel.dp=2", "parallel.tp=2"]);
        assert_eq!((s.ranks, s.stages.len()), (16, 4));
        assert!(s.stages.iter().all(|x| x.sent.contains_key("tp") && x.parameters < s.parameters / 2));
        // Eight micro-batches on four stages.
        let bubble = s.bubble.unwrap();
        assert!((bubble - 3.0 / 11.0).abs() < 1e-9, "{bubble}");
        let most = s.largest().unwrap().memory.total();
        assert!(s.total_bytes() <= 16 * most && s.total_bytes() > 8 * most);
    }
}
