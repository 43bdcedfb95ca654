//! Injected faults at the places of a step where they act; nothing where none is set.

use super::Trainer;
use super::execute::MicroBatch;
use super::model_state::ModelState;
use super::run::Run;
use super::run_folder::CHECKPOINTS;
use crate::fault::inject::{FaultKind, FlipTarget, Injection, Injector};
use crate::model::ChunkSaved;
use crate::{Error, Result};
use ferrotron_engine::{GradBuffer, ParamId, Rank, Saved};
use ferrotron_tensor::{Category, Stream, Tensor};
use std::time::{Duration, Instant};

/// Pause of a process that waits to be ended.
const FOREVER: Duration = Duration::from_secs(3600);

/// The faults of the step that is being launched.
#[derive(Clone, Copy)]
pub(super) struct StepFaults<'a> {
    injector: &'a Injector,
    /// The step, from 1.
    step: u64,
    /// Micro-batches of the step on this rank.
    micro_batches: usize,
}

impl<'a> StepFaults<'a> {
    /// None where nothing is injected on this rank.
    pub(super) fn of(injector: &'a Injector, step: u64, micro_batches: usize) -> Option<StepFaults<'a>> {
        (!injector.is_empty()).then_some(StepFaults { injector, step, micro_batches })
    }

    fn take(&self, kind: FaultKind, here: impl Fn(&Injection) -> bool) -> Result<Option<&'a Injection>> {
        self.injector.take(self.step, |e| e.kind == kind && here(e))
    }

    /// Before the forward pass of the step: faults of the process and of the communication.
    pub(super) fn begin(&self, rank: &Rank) -> Result<()> {
        if self.take(FaultKind::Kill, |_| true)?.is_some() {
            signal(rustix::process::Signal::KILL)?;
        }
        if self.take(FaultKind::Stop, |_| true)?.is_some() {
            signal(rustix::process::Signal::STOP)?;
        }
        if self.take(FaultKind::Hang, |_| true)?.is_some() {
            rank.compute.launch_on_host("hang", &[], |_| {
                loop {
                    std::thread::sleep(FOREVER);
                }
            })?;
        }
        if self.take(FaultKind::Lose, |_| true)?.is_some() {
            rank.world.lose_next_collective();
        }
        if let Some(entry) = self.take(FaultKind::Leak, |_| true)? {
            // Written, so that the system has to provide it.
            std::mem::forget(vec![1u8; entry.bytes]);
        }
        Ok(())
    }

    /// A micro-batch that has been brought to the device: its loss weights may become NaN.
    pub(super) fn loaded(&self, rank: &Rank, m: usize, batch: &mut MicroBatch) -> Result<()> {
        if self.take(FaultKind::Nan, |e| e.micro_batch.unwrap_or(0) == m)?.is_some()
            && let Some(targets) = &mut batch.targets
        {
            let (shape, nan) = (targets.weights.shape().to_vec(), vec![f32::NAN; targets.weights.numel()]);
            targets.weights = rank.compute.upload(&nan, &shape, Category::Activations)?;
        }
        Ok(())
    }

    /// Before the backward pass of micro-batch `m`.
    pub(super) fn saved(&self, rank: &Rank, m: usize, saved: &mut ChunkSaved) -> Result<()> {
        let kind = FaultKind::Flip(FlipTarget::Activation);
        let Some(entry) = self.take(kind, |e| e.micro_batch.unwrap_or(0) == m)? else { return Ok(()) };
        let mut all = Vec::new();
        saved.tensors(&mut |t| all.push((String::new(), (**t).clone())));
        flip(&rank.compute, &Injection { tensor: String::new(), ..entry.clone() }, all)
    }

    /// After the backward pass of micro-batch `m`, which is not the last: the sum of gradients so far.
    pub(super) fn accumulated(&self, rank: &Rank, m: usize, grads: &GradBuffer) -> Result<()> {
        let last = m + 1 == self.micro_batches;
        let kind = FaultKind::Flip(FlipTarget::Gradient);
        match self.take(kind, |e| !last && e.micro_batch == Some(m))? {
            Some(entry) => flip(&rank.compute, entry, accumulated_gradients(grads)),
            None => Ok(()),
        }
    }

    /// Before the optimizer, when gradients are reduced.
    pub(super) fn reduced(&self, rank: &Rank, model: &ModelState) -> Result<()> {
        if let Some(entry) = self.take(FaultKind::Scale, |_| true)? {
            let trained = model.params.specs().iter().enumerate().filter(|(_, s)| !s.group.frozen);
            for (i, _) in trained {
                let (_, gradient) = model.grads.piece(rank, ParamId(i))?;
                rank.kernels.scale(&rank.compute, &gradient, entry.factor)?;
            }
        }
        let (kind, last) = (FaultKind::Flip(FlipTarget::Gradient), self.micro_batches.saturating_sub(1));
        let Some(entry) = self.take(kind, |e| e.micro_batch.is_none_or(|m| m >= last))? else {
            return Ok(());
        };
        let mut all = Vec::new();
        for (i, spec) in model.params.specs().iter().enumerate().filter(|(_, s)| !s.group.frozen) {
            let name = spec.parts.first().map_or(String::new(), |p| p.name.clone());
            all.push((name, model.grads.piece(rank, ParamId(i))?.1));
        }
        flip(&rank.compute, entry, all)
    }

    /// A rank that is slower by some percent than `since` took.
    pub(super) fn slow(&self, rank: &Rank, since: Instant) -> Result<()> {
        if let Some(entry) = self.take(FaultKind::Slow, |_| true)? {
            rank.compute.synchronize()?;
            std::thread::sleep(since.elapsed().mul_f64(entry.percent / 100.0));
        }
        Ok(())
    }
}

/// Sums of gradients that no reduction has begun on.
fn accumulated_gradients(grads: &GradBuffer) -> Vec<(String, Tensor)> {
    grads.accumulated().map(|(name, t)| (name.to_string(), t)).collect()
}

impl Trainer {
    /// Before a step: weights and optimizer state of which a bit is to be inverted.
    pub(super) fn inject_before_step(&self, faults: &StepFaults) -> Result<()> {
        faults.begin(&self.rank)?;
        let s = &self.rank.compute;
        // Snapshots and checkpoints may still be copied from what is changed here.
        let copied = || self.staged.as_ref().map_or(Ok(()), |copied| s.wait(copied));
        let target = |t| -> Result<_> {
            let entry = faults.take(FaultKind::Flip(t), |_| true)?;
            if entry.is_some() {
                copied()?;
            }
            Ok(entry)
        };
        if let Some(entry) = target(FlipTarget::Weight)? {
            self.model.params.wait_params(&self.rank)?;
            flip(s, entry, self.weight_tensors())?;
        }
        if let Some(entry) = target(FlipTarget::Optimizer)? {
            self.optimizer.wait_state(&self.rank)?;
            self.model.params.wait_params(&self.rank)?;
            let state = self.optimizer.persistent_tensors(&self.rank, &self.model.params)?;
            let named = |(name, _): &(String, Tensor)| name.contains('/');
            flip(s, entry, state.into_iter().filter(named).collect())?;
        }
        Ok(())
    }

    /// The weights that this rank holds, flat, by name.
    fn weight_tensors(&self) -> Vec<(String, Tensor)> {
        let params = &self.model.params;
        let held = params.specs().iter().zip(params.values());
        held.map(|(spec, value)| {
            (spec.parts.first().map_or(String::new(), |p| p.name.clone()), value.clone())
        })
        .collect()
    }
}

impl Run {
    /// The error of a full disk, if one is injected into the save after step `step`.
    pub(super) fn injected_full_disk(&self, step: u64) -> Result<()> {
        match self.trainer.hooks.faults.take(step, |e| e.kind == FaultKind::Disk)? {
            None => Ok(()),
            Some(_) => {
                let full = std::io::Error::new(std::io::ErrorKind::StorageFull, "injected fault");
                Err(Error::io_doing(self.dir(), "save", full))
            }
        }
    }

    /// Damages a byte in the middle of the largest file of the checkpoint of `step`, if that is injected.
    pub(super) fn injected_damage(&self, step: u64) -> Result<()> {
        if self.trainer.hooks.faults.take(step, |e| e.kind == FaultKind::Corrupt)?.is_none() {
            return Ok(());
        }
        let folder = self.dir().join(CHECKPOINTS).join(crate::checkpoint::folder_name(step));
        let entries = std::fs::read_dir(&folder).map_err(Error::io(&folder))?.flatten();
        let files =
            entries.filter_map(|e| Some((e.metadata().ok().filter(|m| m.is_file())?.len(), e.path())));
        let Some((len, path)) = files.max() else { return Ok(()) };
        let mut bytes = std::fs::read(&path).map_err(Error::io(&path))?;
        bytes.iter_mut().skip(len as usize / 2).take(1).for_each(|b| *b ^= 0x40);
        std::fs::write(&path, bytes).map_err(Error::io(&path))
    }
}

/// Inverts the bit of an entry in one of the tensors that match it.
fn flip(s: &Stream, entry: &Injection, tensors: Vec<(String, Tensor)>) -> Result<()> {
    let fits = |(name, t): &(String, Tensor)| {
        name.contains(&entry.tensor) && t.dtype().is_float() && t.is_contiguous() && t.numel() > 0
    };
    let mut tensors: Vec<_> = tensors.into_iter().filter(fits).collect();
    let total: usize = tensors.iter().map(|(_, t)| t.numel()).sum();
    let mut at = entry.element.checked_rem(total).unwrap_or(0);
    let found = tensors.iter().position(|(_, t)| {
        let here = at < t.numel();
        at -= if here { 0 } else { t.numel() };
        here
    });
    let Some((name, tensor)) = found.map(|i| tensors.swap_remove(i)) else {
        let what = format!("fault.inject: no tensor of this rank has {:?} in its name", entry.tensor);
        return Err(Error::Invalid(what));
    };
    let bits = 8 * tensor.dtype().size();
    let bit = entry.bit.unwrap_or(bits - 2);
    if bit >= bits {
        let what = format!("fault.inject: bit={bit} of {}, which has {bits}", tensor.dtype());
        return Err(Error::Invalid(what));
    }
    let byte = tensor.as_bytes()?.narrow(0, at * bits / 8 + bit / 8, 1)?;
    let old = s.download::<u8>(&byte)?;
    tracing::warn!(name, at, bit, "a bit is inverted");
    Ok(s.upload_into(&byte, &[old[0] ^ (1 << (bit % 8))])?)
}

fn signal(signal: rustix::process::Signal) -> Result<()> {
    let own = rustix::process::getpid();
    rustix::process::kill_process(own, signal)
        .map_err(|e| Error::Invalid(format!("fault.inject: this process could not be signalled: {e}")))
}
