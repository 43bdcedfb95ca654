//! The parts of logical tensors that this rank holds, and their copy to the host for a checkpoint.

use super::host_reader::HostReader;
use super::{Trainer, fp8_scales, line_moments, moe_state};
use crate::Result;
use crate::checkpoint::{Item, PartDecl, Slice, Staged, share};
use crate::tensorfile::TensorDecl;
use ferrotron_engine::data_parallel::{Placement, group_rank};
use ferrotron_engine::{ParamSpec, Part};
use ferrotron_tensor::{Event, HostBuffer};
use std::ops::Range;
use std::sync::Arc;

/// The parts that this rank writes.
pub(super) struct OwnParts {
    parts: Vec<PartDecl>,
    /// Where the bytes of each come from.
    origins: Vec<Origin>,
}

enum Origin {
    /// Elements of this rank's shard of a bucket of an optimizer state.
    Bucket { state: usize, bucket: usize, elements: Range<usize> },
    /// Small state that is on the host already.
    Host(Vec<u8>),
}

impl Origin {
    fn order(&self) -> Option<(usize, usize)> {
        match self {
            Origin::Bucket { state, bucket, .. } => Some((*state, *bucket)),
            Origin::Host(_) => None,
        }
    }

    /// Whether it is optimizer state in host memory.
    fn is_host_state(&self, t: &Trainer) -> bool {
        matches!(self, Origin::Bucket { state, bucket, .. } if t.optimizer.states()[*state].is_on_host(*bucket))
    }
}

impl OwnParts {
    /// The parts that this rank writes of what it holds; the ranks of a pipeline stage, which together hold the stage,
    /// share the writing of what several hold. Collective.
    pub(super) fn of(t: &Trainer) -> Result<OwnParts> {
        let small =
            fp8_scales::items(t)?.into_iter().chain(moe_state::items(t)?).chain(line_moments::items(t)?);
        let mut held: Vec<_> = small.map(|item| (item.part(), Origin::Host(item.bytes))).collect();
        for index in 0..t.optimizer.states().len() {
            held_state(t, index, &mut held);
        }
        // Bucket by bucket, as they are copied; before that what needs no copy from the device.
        held.sort_by_key(|(_, origin)| origin.order());
        let (parts, origins): (Vec<PartDecl>, Vec<Origin>) = held.into_iter().unzip();
        let mine = share(&parts, &t.rank.tp_dp_cp_group)?;
        let own = parts.into_iter().zip(origins).zip(mine).filter(|(_, mine)| *mine).map(|(own, _)| own);
        let (parts, origins) = own.unzip();
        Ok(OwnParts { parts, origins })
    }

    /// Number of bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(PartDecl::bytes).sum()
    }

    /// Bytes that [`OwnParts::stage`] copies: all but those of state in host memory.
    pub(super) fn staged_bytes(&self, t: &Trainer) -> usize {
        let staged = self.parts.iter().zip(&self.origins).filter(|(_, origin)| !origin.is_host_state(t));
        staged.map(|(part, _)| part.bytes() as usize).sum()
    }

    /// Starts to copy the parts to `buffer`, back to back, without waiting for the device. The optimizer must wait for the
    /// returned event before it changes its state.
    ///
    /// What is saved as it is leaves on a stream of its own, while the compute stream goes on. What is converted first
    /// (master weights from remainders, packed moments) is copied on the compute stream, so that the converted bucket is
    /// reused at once. State in host memory is not copied: the thread that writes the checkpoint reads it there
    /// ([`HostReader`]), and the next update waits for that thread.
    pub(super) fn stage(self, t: &Trainer, mut buffer: HostBuffer) -> Result<(Staged, Event)> {
        let (rank, params, copies) = (&t.rank, &t.model.params, &t.staging);
        params.wait_params(rank)?;
        // State on its way to host memory is there before it is copied from there.
        t.optimizer.wait_state(rank)?;
        copies.wait(&rank.compute.record()?)?;
        let host = self.origins.iter().any(|o| o.is_host_state(t)).then(|| Arc::new(HostReader::new(t)));
        let (mut at, mut current) = (0, None);
        let mut readers = Vec::with_capacity(self.parts.len());
        for (part, origin) in self.parts.iter().zip(self.origins) {
            let mut reader = None;
            match origin {
                Origin::Host(bytes) => buffer.put(at, &bytes)?,
                Origin::Bucket { state, bucket, elements } => {
                    let (saved, converted) = match current.take() {
                        Some((of, saved)) if of == (state, bucket) => saved,
                        _ => (Arc::new(t.optimizer.saved_bucket(rank, params, state, bucket)?), None),
                    };
                    let mut kept = converted;
                    match &host {
                        Some(host) if saved.is_on_host() => reader = Some(host.part(&saved, elements)),
                        _ => {
                            let stream = if saved.as_it_is() { copies } else { &rank.compute };
                            let all = match kept.take() {
                                Some(all) => all,
                                None => saved.elements(&*rank.kernels, stream, 0..saved.len())?,
                            };
                            let part = all.narrow(0, elements.start, elements.len())?;
                            stream.copy_to_host(&part, &mut buffer, at)?;
                            kept = Some(all);
                        }
                    }
                    current = Some(((state, bucket), (saved, kept)));
                }
            }
            at += if reader.is_none() { part.bytes() as usize } else { 0 };
            readers.push(reader);
        }
        Ok((Staged { parts: self.parts, buffer, readers }, copies.record()?))
    }
}

/// The parts with their bytes.
pub(super) fn items(staged: Staged) -> Result<Vec<Item>> {
    let Staged { parts, mut buffer, readers } = staged;
    let mut rest = buffer.bytes()?;
    let mut items = Vec::with_capacity(parts.len());
    for (part, reader) in parts.into_iter().zip(readers) {
        let len = part.bytes() as usize;
        let mut bytes = Vec::with_capacity(len);
        match reader {
            Some(reader) => reader.read(&mut |piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            })?,
            None => {
                let (own, more) = rest.split_at(len);
                rest = more;
                bytes.extend_from_slice(own);
            }
        }
        let TensorDecl { name, dtype, shape } = part.tensor;
        items.extend(dtype.native().map(|dtype| Item { name, dtype, shape, slice: part.slice, bytes }));
    }
    Ok(items)
}

/// What this rank holds of one optimizer state.
fn held_state(t: &Trainer, index: usize, out: &mut Vec<(PartDecl, Origin)>) {
    let state = t.optimizer.states()[index];
    let held = t.model.params.specs().iter().zip(t.optimizer.pieces());
    for (spec, piece) in held.filter(|(s, p)| !s.mirror && state.covers(p.bucket)) {
        for (part, shard, range) in spec.held() {
            let (start, end) =
                (range.start.max(piece.param_range.start), range.end.min(piece.param_range.end));
            if start >= end || !is_chosen_holder(t, spec, part) {
                continue;
            }
            let elements = start - range.start..end - range.start;
            let slice = Slice::of_shard(&part.shape, shard, elements);
            let name = format!("{}/{}", state.name(), part.name);
            let tensor =
                TensorDecl { name, dtype: state.saved(piece.bucket).into(), shape: part.shape.clone() };
            let local = piece.local_range.start + start - piece.param_range.start;
            let elements = local..local + (end - start);
            out.push((
                PartDecl { tensor, slice },
                Origin::Bucket { state: index, bucket: piece.bucket, elements },
            ));
        }
    }
}

/// Where the optimizer state is sharded over replicas, tensor-parallel ranks that hold the same shard of a tensor may cut
/// it at other elements: their buckets can differ in length. One of them is chosen by the tensor's name, so that the cuts
/// fit together. Without that sharding all holders have the same, and share the writing.
fn is_chosen_holder(t: &Trainer, spec: &ParamSpec, part: &Part) -> bool {
    if t.optimizer.placement() == Placement::Replicate {
        return true;
    }
    let place = group_rank(t.rank.tp_group(spec.experts));
    let holders = part.holders(place);
    let number = part.name.bytes().fold(0usize, |n, b| n.wrapping_mul(31).wrapping_add(usize::from(b)));
    place.rank == holders.start + number % holders.len().max(1)
}
