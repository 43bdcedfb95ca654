//! Ring attention: keys and values are sent around the ring; the next block arrives while the current one is computed.

use super::blocks::{backward_source, forward_source};
use super::partial::{KvWidths, OnlineSoftmax, PartialGrads, add};
use super::{ContextParallel, Gradients, Inputs};
use crate::SavedTensor;
use ferrotron_tensor::{DType, Event, Result, Stream, Tensor};

/// Activations that backward needs besides q, k and v.
pub(super) struct RingSaved {
    pub(super) lse: SavedTensor,
    /// The keys and values of forward's last step, with which backward begins.
    pub(super) last: SavedTensor,
}

/// Sends and receives on the communication stream.
struct RingNeighbours<'a> {
    context: &'a ContextParallel<'a>,
    /// The ranks to send to and to receive from.
    to: usize,
    from: usize,
}

impl RingNeighbours<'_> {
    /// Starts sends and receives of (sent, received) pairs, ordered after the compute stream so far.
    fn start(&self, pairs: &[(&Tensor, &Tensor)], label: &'static str) -> Result<Option<Event>> {
        let rank = self.context.rank;
        let stream: &Stream = if rank.overlap {
            rank.comm_stream.wait(&rank.compute.record()?)?;
            &rank.comm_stream
        } else {
            &rank.compute
        };
        let sends: Vec<_> = pairs.iter().map(|(x, _)| (self.to, *x)).collect();
        let receives: Vec<_> = pairs.iter().map(|(_, x)| (self.from, *x)).collect();
        rank.cp.send_recv(stream, &sends, &receives, label)?;
        rank.overlap.then(|| rank.comm_stream.record()).transpose()
    }

    /// Makes the compute stream wait: received tensors may be read, sent ones overwritten.
    fn end(&self, flight: Option<Event>) -> Result<()> {
        flight.map_or(Ok(()), |e| self.context.rank.compute.wait(&e))
    }
}

impl ContextParallel<'_> {
    fn neighbours(&self, forward: bool) -> RingNeighbours<'_> {
        let (r, c) = (self.place.rank, self.place.size);
        let (before, after) = ((r + c - 1) % c, (r + 1) % c);
        if forward {
            RingNeighbours { context: self, to: after, from: before }
        } else {
            RingNeighbours { context: self, to: before, from: after }
        }
    }

    pub(super) fn ring_forward(&self, x: &Inputs, out: &Tensor) -> Result<RingSaved> {
        let (rank, c) = (self.rank, self.place.size);
        let widths = KvWidths::of(x.k, x.v);
        let mut here = widths.pack(rank, x.k, x.v)?;
        let mut spare: Option<Tensor> = None;
        let mut joined = OnlineSoftmax::new(self, x.q, x.sink, out)?;
        let neighbours = self.neighbours(true);
        for step in 0..c {
            let last = step + 1 == c;
            let next = match spare.take() {
                Some(t) => t,
                None if last => here.clone(),
                None => rank.activation(here.shape(), here.dtype())?,
            };
            let flight = if last { None } else { neighbours.start(&[(&here, &next)], "keys and values")? };
            let block = self.plan.ring(self.scores, forward_source(self.place, step))?;
            let (k, v) = widths.split(&here)?;
            joined.attend(&block, &k, &v)?;
            if !last {
                neighbours.end(flight)?;
                // Double buffering: the block just used receives the block after the next.
                spare = Some(std::mem::replace(&mut here, next));
            }
        }
        Ok(RingSaved {
            lse: SavedTensor::activation(&joined.finish()?),
            last: SavedTensor::activation(&here),
        })
    }

    /// At each step a rank holds another rank's keys and adds to their gradients, which are sent one step behind the keys.
    /// Last, the gradients of its own keys arrive, complete but for its own contribution.
    pub(super) fn ring_backward(&self, saved: &RingSaved, x: &Inputs, y: &Gradients) -> Result<()> {
        let (rank, c) = (self.rank, self.place.size);
        let widths = KvWidths::of(x.k, x.v);
        let neighbours = self.neighbours(false);
        let mut gradients = PartialGrads::new(self, x.q, &saved.lse, y);
        let mut here: Tensor = (*saved.last).clone();
        let mut sums: Option<Tensor> = None;
        for step in 0..c {
            // The last step uses the rank's own keys, which need no transfer.
            let next = match step + 2 < c {
                true => Some(rank.activation(here.shape(), here.dtype())?),
                false => None,
            };
            let arriving = match &sums {
                Some(sums) => Some(rank.activation(sums.shape(), DType::F32)?),
                None => None,
            };
            let mut pairs = Vec::new();
            pairs.extend(sums.as_ref().zip(arriving.as_ref()));
            pairs.extend(next.as_ref().map(|next| (&here, next)));
            let flight = match pairs.is_empty() {
                true => None,
                false => neighbours.start(&pairs, "keys, values and their gradients")?,
            };
            let block = self.plan.ring(self.scores, backward_source(self.place, step))?;
            let (k, v) = match step + 1 < c {
                true => widths.split(&here)?,
                false => (x.k.clone(), x.v.clone()),
            };
            let dkv = gradients.of(&block, &k, &v)?;
            neighbours.end(flight)?;
            sums = Some(add(rank, arriving, dkv)?);
            here = next.unwrap_or(here);
        }
        if let Some(sums) = sums {
            widths.write_grads(rank, &sums, y.dk, y.dv)?;
        }
        gradients.finish(y.dq)
    }
}
