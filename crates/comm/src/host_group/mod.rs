//! Collectives and sends of one group of processes with tensors on the host, over any [`Transfer`] of bytes. Reductions
//! are computed here, in rank order, so that they give the same bits as the thread backend.

mod reduce;

use crate::backend::{Collective, Completion, Descriptors, GroupBackend, OpError, P2pOp, SplitSizes};
use crate::op_descriptor::OpDescriptor;
use crate::process_group::ProcessGroup;
use crate::threads::reduce::Reducible;
use ferrotron_tensor::{Arg, DType, Launch, Stream, Tensor, bf16, f16, read, shape_error, write};
use std::sync::Mutex;
use std::time::Instant;

pub(crate) type Done<T = ()> = Result<T, OpError>;

/// How one group of processes moves bytes.
pub(crate) trait Transfer: Send + Sync {
    /// A message that has been announced and not been taken yet.
    type Message;

    /// The group.
    fn group(&self) -> &ProcessGroup;

    /// Sends and receives everything, by rank of the group and never to this rank itself, and returns when all is
    /// complete. `owners` are the tensors that own the memory.
    fn run(
        &self,
        owners: &[&Tensor],
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
        deadline: Instant,
    ) -> Done;

    /// Sends the descriptor to all and collects theirs, in rank order; this rank's own entry is empty.
    fn gather_descriptors(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>>;

    /// Bytes of any length from every rank, in rank order.
    fn all_gather_bytes(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>>;

    /// Sends a message with its descriptor, without waiting for the receiver.
    fn post(&self, to: usize, descriptor: Vec<u8>, bytes: Vec<u8>) -> Done;

    /// Waits for the descriptor of the next message of `from`.
    fn next_message(&self, from: usize, deadline: Instant) -> Done<(Vec<u8>, Self::Message)>;

    /// The bytes of that message.
    fn take_message(
        &self,
        from: usize,
        message: Self::Message,
        owned: (&Tensor, &mut [u8]),
        deadline: Instant,
    ) -> Done;
}

/// A transfer, and the tensors that own the memory it is used for.
#[derive(Clone, Copy)]
struct Owned<'a, T> {
    transfer: &'a T,
    owners: &'a [&'a Tensor],
    /// Receive buffers of reductions.
    scratch: &'a Mutex<Vec<u64>>,
}

impl<T: Transfer> Owned<'_, T> {
    fn run(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])], deadline: Instant) -> Done {
        self.transfer.run(self.owners, sends, receives, deadline)
    }

    fn group(&self) -> &ProcessGroup {
        self.transfer.group()
    }
}

/// A group over a transfer.
pub(crate) struct HostGroupBackend<T> {
    transfer: T,
    scratch: Mutex<Vec<u64>>,
}

impl<X: Transfer> HostGroupBackend<X> {
    pub(crate) fn new(transfer: X) -> HostGroupBackend<X> {
        HostGroupBackend { transfer, scratch: Mutex::default() }
    }

    fn transfer<'a>(&'a self, owners: &'a [&'a Tensor]) -> Owned<'a, X> {
        Owned { transfer: &self.transfer, owners, scratch: &self.scratch }
    }

    fn group(&self) -> &ProcessGroup {
        self.transfer.group()
    }

    fn reduce<T: Reducible>(&self, s: &Stream, collective: &Collective, deadline: Instant) -> Done {
        match collective {
            Collective::AllReduce { t, op } => launch(s, "all-reduce", &[write(t)], |l| {
                reduce::all_reduce::<T, X>(&self.transfer(&[t]), l.slice_mut(0)?, *op, deadline)
            }),
            Collective::ReduceScatter { all, mine, op } if all.overlaps(mine) => {
                launch(s, "reduce-scatter", &[write(all)], |l| {
                    reduce::reduce_scatter::<T, X>(&self.transfer(&[all]), l.slice_mut(0)?, *op, deadline)
                })
            }
            Collective::ReduceScatter { all, mine, op } => {
                launch(s, "reduce-scatter", &[read(all), write(mine)], |l| {
                    let owners = [*all, *mine];
                    let (from, to) = (l.slice(0)?, l.slice_mut(1)?);
                    reduce::reduce_scatter_into::<T, X>(&self.transfer(&owners), from, to, *op, deadline)
                })
            }
            _ => Ok(()),
        }
    }

    /// All-gather in place: this rank's part is already in `all`.
    fn gather(&self, s: &Stream, all: &Tensor, counts: &[usize], deadline: Instant) -> Done {
        let bytes = all.as_bytes()?;
        launch(s, "all-gather", &[write(&bytes)], |l| {
            let mut parts = split(l.slice_mut::<u8>(0)?, &byte_counts(counts, all));
            let mine = std::mem::take(&mut parts[self.group().me]);
            let sends: Vec<(usize, &[u8])> = self.group().others().map(|r| (r, &*mine)).collect();
            let mut receives: Vec<_> = parts.into_iter().enumerate().collect();
            self.transfer(&[all]).run(&sends, &mut receives, deadline)
        })
    }

    fn all_to_all(
        &self,
        s: &Stream,
        (from, to): (&Tensor, &Tensor),
        SplitSizes { sent, received }: SplitSizes<'_>,
        deadline: Instant,
    ) -> Done {
        let (f, t) = (from.as_bytes()?, to.as_bytes()?);
        let me = self.group().me;
        launch(s, "all-to-all", &[read(&f), write(&t)], |l| {
            let mut parts = split(l.slice_mut::<u8>(1)?, &byte_counts(received, to));
            let mut rest = l.slice::<u8>(0)?;
            let mut sends = Vec::with_capacity(sent.len());
            for (r, len) in byte_counts(sent, from).into_iter().enumerate() {
                let (part, after) = rest.split_at(len);
                rest = after;
                sends.push((r, part));
            }
            let own = std::mem::take(&mut parts[me]);
            own.copy_from_slice(sends.remove(me).1);
            let mut receives: Vec<_> = parts.into_iter().enumerate().collect();
            self.transfer(&[from, to]).run(&sends, &mut receives, deadline)
        })
    }

    fn broadcast(&self, s: &Stream, t: &Tensor, root: usize, deadline: Instant) -> Done {
        let bytes = t.as_bytes()?;
        match root == self.group().me {
            true => launch(s, "broadcast", &[read(&bytes)], |l| {
                let data = l.slice::<u8>(0)?;
                let sends: Vec<(usize, &[u8])> = self.group().others().map(|r| (r, data)).collect();
                self.transfer(&[t]).run(&sends, &mut [], deadline)
            }),
            false => launch(s, "broadcast", &[write(&bytes)], |l| {
                self.transfer(&[t]).run(&[], &mut [(root, l.slice_mut::<u8>(0)?)], deadline)
            }),
        }
    }
}

impl<X: Transfer> GroupBackend for HostGroupBackend<X> {
    fn exchange_descriptors(
        &self,
        _: Option<&Stream>,
        descriptor: &OpDescriptor,
        _: &Collective,
        deadline: Instant,
    ) -> Done<Descriptors> {
        let all = self.transfer.gather_descriptors(&descriptor.encode(), deadline)?;
        self.group().compare_descriptors(descriptor, &all)
    }

    fn run(&self, s: &Stream, collective: &Collective, deadline: Instant) -> Done<Completion> {
        let n = self.group().ranks.len();
        let done: Done = match collective {
            Collective::Barrier | Collective::AllGatherBytes(_) => Ok(()),
            Collective::AllReduce { t, .. } | Collective::ReduceScatter { mine: t, .. } => match t.dtype() {
                _ if t.numel() == 0 => Ok(()),
                DType::F32 => self.reduce::<f32>(s, collective, deadline),
                DType::BF16 => self.reduce::<bf16>(s, collective, deadline),
                DType::F16 => self.reduce::<f16>(s, collective, deadline),
                DType::F64 => self.reduce::<f64>(s, collective, deadline),
                DType::I32 => self.reduce::<i32>(s, collective, deadline),
                DType::I64 => self.reduce::<i64>(s, collective, deadline),
                other => Ok(shape_error("reduce", format!("{other} cannot be reduced"))?),
            },
            Collective::AllGather { mine, all, counts } => {
                let equal = vec![all.numel() / n; n];
                let counts = counts.unwrap_or(&equal);
                if mine.numel() > 0 && !mine.overlaps(all) {
                    let start = counts[..self.group().me].iter().sum();
                    s.copy(mine, &all.view(&[all.numel()])?.narrow(0, start, mine.numel())?)?;
                }
                self.gather(s, all, counts, deadline)
            }
            Collective::AllToAll { from, to, splits } => {
                let equal = vec![from.numel() / n; n];
                self.all_to_all(
                    s,
                    (from, to),
                    splits.unwrap_or(SplitSizes { sent: &equal, received: &equal }),
                    deadline,
                )
            }
            Collective::Broadcast { t, root } => self.broadcast(s, t, *root, deadline),
        };
        done.map(|()| Completion::Done)
    }

    fn post_sends(&self, s: &Stream, sends: &[P2pOp], _deadline: Instant) -> Done {
        self.group().process.check_alive()?;
        for op in sends {
            let bytes = s.download::<u8>(&op.tensor.as_bytes()?)?;
            self.transfer.post(op.peer, op.descriptor.encode(), bytes)?;
        }
        Ok(())
    }

    fn complete_receives(
        &self,
        s: &Stream,
        _sends: &[P2pOp],
        receives: &[P2pOp],
        deadline: Instant,
    ) -> Done<Completion> {
        let me = self.group().me;
        for op in receives {
            let peer = op.peer;
            let (text, message) = self.transfer.next_message(peer, deadline)?;
            let theirs = self.group().decode(peer, &text)?;
            if op.descriptor.conflicts_with(me, &theirs, peer) {
                let mine = Box::new(op.descriptor.clone());
                return Err(OpError::Mismatch { peer, mine, theirs: Box::new(theirs) });
            }
            let bytes = op.tensor.as_bytes()?;
            launch(s, "receive", &[write(&bytes)], |l| {
                self.transfer.take_message(peer, message, (op.tensor, l.slice_mut::<u8>(0)?), deadline)
            })?;
        }
        Ok(Completion::Done)
    }

    fn all_gather_bytes(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>> {
        self.transfer.all_gather_bytes(mine, deadline)
    }
}

/// [`Stream::launch`] of a kernel that may fail with an [`OpError`].
fn launch<'a>(
    s: &'a Stream,
    op: &'static str,
    args: &'a [Arg<'a>],
    kernel: impl FnOnce(&Launch) -> Done,
) -> Done {
    let mut error = None;
    s.launch(op, args, |l| match kernel(l) {
        Err(OpError::Tensor(error)) => Err(error),
        Err(other) => {
            error = Some(other);
            Ok(())
        }
        Ok(()) => Ok(()),
    })?;
    error.map_or(Ok(()), Err)
}

/// Element counts as byte counts.
fn byte_counts(counts: &[usize], t: &Tensor) -> Vec<usize> {
    counts.iter().map(|c| c * t.dtype().size()).collect()
}

/// Splits `bytes` into consecutive parts of these lengths.
fn split<'a>(mut bytes: &'a mut [u8], lengths: &[usize]) -> Vec<&'a mut [u8]> {
    let mut parts = Vec::with_capacity(lengths.len());
    for len in lengths {
        let (part, rest) = bytes.split_at_mut(*len);
        parts.push(part);
        bytes = rest;
    }
    parts
}
