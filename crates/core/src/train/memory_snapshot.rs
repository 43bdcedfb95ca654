//! Snapshots of the training state in host memory: what a rank needs to go on from a step, as it is stored on the device.
//!
//! A checkpoint holds logical tensors, which any layout of ranks reads. A snapshot holds this rank's tensors bit by bit: it
//! is read by the same rank of the same layout only, by this process or by the one that replaces it, and that without
//! converting, exchanging or reading from disk.

use super::best_eval::BestEval;
use super::gemm_choices::GemmTable;
use super::skipped_samples::SkippedSamples;
use super::step_runner::Progress;
use super::{Trainer, moe_state};
use crate::{Error, Result};
use ferrotron_tensor::{HostBuffer, Tensor};
use serde::{Deserialize, Serialize};

/// What a snapshot says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotHeader {
    /// Steps done.
    pub step: u64,
    /// The rank whose state it is.
    pub rank: usize,
    samples: u64,
    tokens: u64,
    /// Steps under delayed scaling.
    scaled_steps: u64,
    /// Non-finite steps in a row.
    nonfinite_steps: u64,
    skipped: SkippedSamples,
    best: Option<BestEval>,
    gemms: Option<GemmTable>,
    /// Names and bytes of the tensors, which lie back to back.
    tensors: Vec<(String, usize)>,
}

impl SnapshotHeader {
    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// The state of one rank after a step, in host memory.
pub struct MemorySnapshot {
    /// What it is.
    pub header: SnapshotHeader,
    /// The tensors. Copies from the device may still be under way; reading waits for them.
    pub buffer: HostBuffer,
}

impl Trainer {
    /// Every tensor of this rank that persists between steps, by name. Weights that follow from master weights are not among
    /// them.
    pub(crate) fn persistent_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        let mut all = self.optimizer.persistent_tensors(&self.rank, &self.model.params)?;
        all.extend(self.step_tensors());
        Ok(all)
    }

    /// Those that change before the optimizer's part of a step: scales of delayed scaling, tables of MoE layers.
    pub(super) fn step_tensors(&self) -> Vec<(String, Tensor)> {
        let mut all = Vec::new();
        if let Some(d) = self.model.step_state.quant().and_then(|q| q.delayed()) {
            all.push(("fp8 scales".to_string(), d.scale.clone()));
            all.push(("fp8 amax history".to_string(), d.history.clone()));
        }
        if let Some(moe) = self.model.step_state.moe() {
            all.extend(moe_state::persistent(moe));
        }
        all
    }

    /// Starts to copy the state after the last launched step to host memory, to `buffer` if that is large enough. The copy of
    /// the optimizer's state leaves on a stream of its own while the next step computes; its update waits for it.
    pub(crate) fn begin_memory_snapshot(&mut self, buffer: Option<HostBuffer>) -> Result<MemorySnapshot> {
        let (rank, copies) = (&self.rank, &self.staging);
        self.model.params.wait_params(rank)?;
        self.optimizer.wait_state(rank)?;
        copies.wait(&rank.compute.record()?)?;
        let later = self.optimizer.persistent_tensors(rank, &self.model.params)?;
        let now = self.step_tensors();
        let all = later.iter().map(|t| (copies, t)).chain(now.iter().map(|t| (&rank.compute, t)));
        let tensors: Vec<(String, usize)> =
            all.clone().map(|(_, (name, t))| (name.clone(), t.bytes())).collect();
        let bytes = tensors.iter().map(|(_, bytes)| bytes).sum();
        let mut buffer = match buffer.filter(|b| b.len() == bytes) {
            Some(buffer) => buffer,
            None => HostBuffer::new(rank.device(), bytes)?,
        };
        let mut at = 0;
        for (stream, (_, tensor)) in all {
            stream.copy_to_host(tensor, &mut buffer, at)?;
            at += tensor.bytes();
        }
        let copied = copies.record()?;
        if later.iter().any(|(_, t)| t.is_on_host()) {
            // State in host memory may be updated there by threads, which no stream holds back.
            buffer.wait()?;
        }
        self.staged = Some(copied);
        let Progress { step, samples, tokens } = self.runner.progress;
        let header = SnapshotHeader {
            step,
            rank: self.rank.world.rank(),
            samples,
            tokens,
            scaled_steps: self.runner.delayed_scaling.steps,
            nonfinite_steps: self.runner.nonfinite_steps(),
            skipped: self.runner.skipped.clone(),
            best: self.best,
            gemms: self.gemms.clone(),
            tensors,
        };
        Ok(MemorySnapshot { header, buffer })
    }

    /// Goes back, or forward, to a snapshot of this rank. Collective: every rank has one of the same step.
    pub(crate) fn restore_memory_snapshot(&mut self, snapshot: &mut MemorySnapshot) -> Result<()> {
        let MemorySnapshot { header, buffer } = snapshot;
        let (rank, s) = (&self.rank, &self.rank.compute);
        let tensors = self.persistent_tensors()?;
        let own: Vec<(String, usize)> = tensors.iter().map(|(name, t)| (name.clone(), t.bytes())).collect();
        if header.rank != rank.world.rank() || own != header.tensors || buffer.len() != header.bytes() {
            let what = format!(
                "the snapshot of step {} belongs to rank {} of another layout, this is rank {}",
                header.step,
                header.rank,
                rank.world.rank()
            );
            return Err(Error::Invalid(what));
        }
        self.staged.take().map_or(Ok(()), |copied| s.wait(&copied))?;
        self.model.params.wait_params(rank)?;
        self.optimizer.wait_state(rank)?;
        let mut rest = buffer.bytes()?;
        for (_, tensor) in &tensors {
            let (bytes, more) = rest.split_at(tensor.bytes());
            rest = more;
            s.upload_into(&tensor.as_bytes()?, bytes)?;
        }
        let SnapshotHeader { step, samples, tokens, .. } = *header;
        self.runner.progress = Progress { step, samples, tokens };
        self.runner.delayed_scaling.steps = header.scaled_steps;
        self.runner.set_nonfinite_steps(header.nonfinite_steps);
        self.runner.skipped = header.skipped.clone();
        self.best = header.best;
        self.forget_split_sizes()?;
        // Choices made since are of steps that are done again: they are used from the same step on.
        self.merge_gemm_choices(header.gemms.clone());
        self.optimizer.sync_params(&self.rank, &self.model.params, &self.model.step_state)
    }
}
