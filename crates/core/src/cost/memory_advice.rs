//! The cheapest change that makes a step fit.

use super::memory::MemoryBytes;
use super::offload::USABLE_PERCENT;
use super::{CostSummary, MemoryEstimate};
use crate::config::{PipelineSchedule, Resolved, StateDtype};
use crate::model::description::{ModelDescription, StepShape};
use crate::plan::{self, Hardware, Machine};
use crate::{Error, Result};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::data_parallel::HostShards;
use ferrotron_engine::offload::OffloadChoice;
use ferrotron_engine::{Rank, Recompute};
use ferrotron_tensor::{Error as TensorError, format_bytes};

/// Bytes per second of pinned copies over 16 lanes of PCIe 5.
const USUAL_LINK: f64 = 50e9;

impl MemoryEstimate {
    /// The estimate with `change` applied to every stage.
    fn with(&self, change: impl Fn(&mut StepShape)) -> MemoryEstimate {
        let mut new = self.clone();
        new.stages.iter_mut().for_each(change);
        new
    }

    /// The estimate with micro-batches of `count` sequences.
    fn with_micro_batch(&self, count: usize) -> MemoryEstimate {
        self.with(|s| {
            if let Layout::Rows { count: old, .. } = &mut s.micro_batch {
                s.micro_batches = s.micro_batches * *old / count.max(1);
                *old = count;
            }
        })
    }

    /// Sequences of a micro-batch.
    fn micro_batch(&self) -> usize {
        match self.stages.first().map(|s| &s.micro_batch) {
            Some(Layout::Rows { count, .. }) => *count,
            _ => 1,
        }
    }

    /// The estimate with optimizer state or activations offloaded.
    fn offloading(&self, optimizer: f64, activations: Option<usize>) -> MemoryEstimate {
        let mut new = self.clone();
        new.offload.optimizer = new.offload.optimizer.max(optimizer);
        new.offload.activations = activations.map(OffloadChoice::Layers).or(new.offload.activations);
        new
    }

    /// Changes that save memory, the cheapest in time first, each with the keys to set.
    fn changes(&self) -> Vec<(String, MemoryEstimate)> {
        let mut out = Vec::new();
        if self.schedule == PipelineSchedule::Paired {
            let plain = MemoryEstimate { schedule: PipelineSchedule::OneForwardOneBackward, ..self.clone() };
            out.push(("parallel.schedule=1f1b".to_string(), plain));
        }
        let halves =
            std::iter::successors(Some(self.micro_batch() / 2), |n| Some(n / 2)).take_while(|n| *n > 0);
        out.extend(halves.map(|n| (format!("train.micro_batch={n}"), self.with_micro_batch(n))));
        let (last, least) = out.last().cloned().unwrap_or((String::new(), self.clone()));
        let and = |change: &str| if last.is_empty() { change.into() } else { format!("{last} {change}") };
        let full = least.with(|s| s.recompute = Recompute { layer: true, ..Recompute::default() });
        let selective = least.with(|s| (s.recompute.norm, s.recompute.activation) = (true, true));
        let few = "train.recompute=[\"norm\",\"activation\"]";
        out.push((and(few), selective.clone()));
        out.push((
            and(&format!("{few} offload.activations=auto")),
            selective.offloading(0.0, Some(self.half())),
        ));
        out.push((and("offload.optimizer=1"), least.offloading(1.0, None)));
        out.push((and("train.recompute=full"), full.clone()));
        out.push((and("train.recompute=full offload.optimizer=1"), full.offloading(1.0, None)));
        let bf16 = MemoryEstimate { moments: Some(StateDtype::Bf16), ..full.clone() };
        out.push((and("train.recompute=full optimizer.state_dtype=bf16"), bf16));
        let all = full.offloading(1.0, Some(usize::MAX));
        let most = "train.recompute=full offload.activations=auto offload.optimizer=1";
        out.push((and(most), all.clone()));
        let host = HostShards { weights: true, gradients: true };
        let shards = "parallel.zero=3 offload.weights=true offload.gradients=true";
        out.push((and(&format!("{most} {shards}")), all.with(|s| (s.zero, s.host) = (3, host))));
        out
    }

    /// Half of the layers of the shortest chunk.
    fn half(&self) -> usize {
        let chunks = self.stages.iter().flat_map(|s| &s.stages);
        chunks.map(|s| s.layers.len()).min().unwrap_or(0) / 2
    }

    /// The cheapest change of batch, recomputation and offloading with which a step fits in `capacity` bytes, as a clause.
    pub fn cheapest_change(&self, capacity: usize) -> Result<Option<String>> {
        let usable = capacity / 100 * USABLE_PERCENT;
        for (change, estimate) in self.changes() {
            let bytes = estimate.largest()?;
            if bytes.total() <= usable {
                let set: Vec<String> = change.split(' ').map(|c| format!("--set {c}")).collect();
                let (set, about) = (set.join(" "), format_bytes(bytes.total()));
                let moved = estimate.moved_text(&bytes)?;
                return Ok(Some(format!("the cheapest change that fits is {set} (about {about}{moved})")));
            }
        }
        Ok(None)
    }

    /// What to change so that a step fits in `capacity` bytes, in one sentence, where no plan can be made: on a CPU, or on a GPU
    /// without a description.
    pub(super) fn advice(&self, capacity: usize) -> Result<String> {
        let needed = format_bytes(self.largest()?.total());
        let needs = format!("this recipe needs about {needed} of {}", format_bytes(capacity));
        Ok(match self.cheapest_change(capacity)? {
            Some(change) => format!("{needs}; {change}"),
            None => format!(
                "{needs}, and no change of batch, recomputation or offloading makes it fit; use more devices (parallel.tp, \
                 parallel.pp) or a smaller model"
            ),
        })
    }

    /// What offloading costs, at most: copies that computation does not hide.
    fn moved_text(&self, bytes: &MemoryBytes) -> Result<String> {
        if bytes.host == 0 {
            return Ok(String::new());
        }
        let mut most = 0;
        for shape in &self.stages {
            let moved = self.offload.activations(shape, &ModelDescription::new(shape)?).moved;
            let (host, without) =
                (self.stage(shape)?.host, StepShape { host: HostShards::default(), ..shape.clone() });
            // Every micro-batch fetches weights for forward and backward, and gradients once.
            let shards = host.saturating_sub(self.stage(&without)?.host);
            let state = host.saturating_sub(moved + shards);
            most = most.max((moved + 2 * shards) * shape.micro_batches + state);
        }
        Ok(format!(
            ", and {} on the host; {} each way in a step, {:.1} s at {:.0} GB/s if nothing hides them",
            format_bytes(bytes.host),
            format_bytes(most),
            most as f64 / USUAL_LINK,
            USUAL_LINK / 1e9
        ))
    }
}

/// Refuses a recipe whose `ranks` on one machine need more than its `memory`, before anything is allocated.
pub fn check_fits(r: &Resolved, ranks: usize, memory: usize) -> Result<()> {
    let summary = CostSummary::of(r)?;
    let most = summary.largest().map_or(0, |s| s.memory.total());
    let needed = summary.total_bytes().min(most.saturating_mul(ranks));
    if needed <= memory {
        return Ok(());
    }
    let advice = MemoryEstimate::of(r)?.advice(memory / ranks.max(1))?;
    let shared = match ranks {
        1 => String::new(),
        n => format!("{n} ranks share the {} of this machine; for one, ", format_bytes(memory)),
    };
    Err(Error::DoesNotFit { needed, memory, advice: shared + &advice })
}

/// Adds to an out-of-memory error what to change; other errors pass unchanged.
pub(crate) fn advise<T>(result: Result<T>, rank: &Rank, r: &Resolved) -> Result<T> {
    result.map_err(|error| match error {
        Error::Tensor(table @ TensorError::OutOfMemory { .. }) => {
            let advice = advice_on(rank, r)
                .ok()
                .flatten()
                .unwrap_or_else(|| "use a smaller train.micro_batch or a smaller model".into());
            Error::OutOfMemory { table, advice }
        }
        other => other,
    })
}

/// What to change in a recipe that does not fit on the GPUs of a running job: by plan, where the GPU has a description. Ranks
/// that are threads share one GPU, for which there are no plans.
fn advice_on(rank: &Rank, r: &Resolved) -> Result<Option<String>> {
    let Some(gpu) = rank.device().gpu() else { return Ok(None) };
    let gpus = rank.world.size();
    let hardware = match gpus == 1 || rank.world.only_enqueues() {
        true => Hardware::of_gpu(&gpu.name)?,
        false => None,
    };
    Ok(Some(match hardware {
        Some(hardware) => {
            let memory_gib = gpu.memory as f64 / f64::from(1 << 30);
            plan::advice(r, &Machine { gpus, hardware: Hardware { memory_gib, ..hardware } })?
        }
        None => MemoryEstimate::of(r)?.advice(gpu.memory)?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload;

    fn refusal(set: &[&str], ranks: usize, memory: usize) -> Option<String> {
        let mut recipe = workload("llama-1b").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        check_fits(&recipe.resolve(None).unwrap(), ranks, memory).err().map(|e| e.to_string())
    }

    #[test]
    fn a_machine_that_is_too_small_is_refused_with_what_to_change() {
        let set = ["train.micro_batch=64", "train.global_batch=64"];
        assert_eq!(refusal(&set, 1, 4 << 40), None);
        let e = refusal(&set, 1, 60 << 30).unwrap();
        assert!(e.contains("--set train.micro_batch=") && e.contains("60"), "{e}");
        let e = refusal(&set, 1, 1 << 30).unwrap();
        assert!(e.contains("a smaller model"), "{e}");
    }

    /// Where nothing else fits, weights and gradients leave the device.
    #[test]
    fn weights_and_gradients_are_the_last_to_move() {
        let set = ["train.micro_batch=1", "train.global_batch=8"];
        let mut recipe = workload("llama-1b").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        let changes = MemoryEstimate::of(&recipe.resolve(None).unwrap()).unwrap().changes();
        let total = |(_, e): &(String, MemoryEstimate)| e.largest().unwrap().total();
        let (last, others) = changes.split_last().unwrap();
        let before = others.last().unwrap();
        assert!(total(last) < total(before) / 10 * 9, "{} of {}", total(last), total(before));
        let e = refusal(&set, 1, total(before)).unwrap();
        let keys = "--set parallel.zero=3 --set offload.weights=true --set offload.gradients=true";
        assert!(e.contains(keys), "{e}");
    }

    /// Two ranks as threads need about twice the memory of one.
    #[test]
    fn ranks_of_one_machine_share_its_memory() {
        let set = ["train.micro_batch=1", "train.global_batch=8", "parallel.dp=2", "parallel.zero=0"];
        let one = MemoryEstimate::of(&{
            let mut recipe = workload("llama-1b").unwrap();
            set.iter().for_each(|s| recipe.set(s).unwrap());
            recipe.resolve(None).unwrap()
        });
        let one = one.unwrap().largest().unwrap().total();
        assert_eq!(refusal(&set, 2, 2 * one), None);
        let e = refusal(&set, 2, 2 * one - 1).unwrap();
        assert!(e.contains("2 ranks share the"), "{e}");
        // Of a launched job, the other rank may be on another machine.
        assert_eq!(refusal(&set, 1, one), None);
    }
}
