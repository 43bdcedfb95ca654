//! Collectives and sends of one group over NCCL: enqueued on the caller's stream, not waited for.

use super::comm::NcclComm;
use super::ffi::{Comm, CudaStream, Nccl, SUCCESS};
use crate::backend::{Collective, Completion, Descriptors, GroupBackend, OpError, P2pOp, SplitSizes};
use crate::control::Topic;
use crate::host_cost::LibraryClock;
use crate::op_descriptor::OpDescriptor;
use crate::process_group::ProcessGroup;
use crate::threads::reduce::reduce;
use crate::{ReduceKernels, ReduceOp};
use ferrotron_tensor::{Arg, Category, DType, Launch, Stream, Tensor, read, shape_error, write};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Instant;

pub(super) struct NcclGroupBackend {
    pub(super) nccl: &'static Nccl,
    pub(super) comm: Arc<NcclComm>,
    pub(super) group: ProcessGroup,
    pub(super) kernels: ReduceKernels,
    /// Compare every call with all ranks before it is enqueued, instead of by digests.
    pub(super) checked: bool,
    /// Time inside NCCL.
    pub(super) clock: Arc<LibraryClock>,
}

type Done<T = ()> = Result<T, OpError>;

/// `ncclUint8`: data that is only moved is sent as bytes.
const BYTES: c_int = 1;

/// NCCL's number of a dtype that it can reduce.
fn nccl_dtype(dtype: DType) -> ferrotron_tensor::Result<c_int> {
    match dtype {
        DType::I32 => Ok(2),
        DType::I64 => Ok(4),
        DType::F16 => Ok(6),
        DType::F32 => Ok(7),
        DType::F64 => Ok(8),
        DType::BF16 => Ok(9),
        other => shape_error("reduce", format!("{other} cannot be reduced")),
    }
}

fn nccl_op(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
    }
}

/// NCCL's maximum of floats drops NaN.
fn loses_nan(op: ReduceOp, dtype: DType) -> bool {
    op == ReduceOp::Max && !matches!(dtype, DType::I32 | DType::I64)
}

/// Addresses and stream of a call.
struct Call<'a, 'b> {
    launch: &'b Launch<'a>,
    comm: Comm,
    stream: CudaStream,
}

impl Call<'_, '_> {
    fn at(&self, arg: usize, byte: usize) -> ferrotron_tensor::Result<*mut c_void> {
        Ok((self.launch.address(arg)? + byte as u64) as *mut c_void)
    }
}

/// A slice of an argument for or from one rank: (argument, first byte, number of bytes).
type ArgSlice = (usize, usize, usize);

impl NcclGroupBackend {
    /// Records an event before and after `work`, unless the stream is captured into a graph.
    fn enqueue(&self, s: &Stream, work: impl FnOnce() -> Done) -> Done<Completion> {
        if s.is_capturing() {
            return work().map(|()| Completion::Done);
        }
        let start = s.record()?;
        work()?;
        Ok(Completion::Enqueued { start, done: s.record()? })
    }

    /// Enqueues one NCCL operation; `enqueue` returns its code.
    fn call<'a>(
        &self,
        s: &'a Stream,
        op: &'static str,
        args: &'a [Arg<'a>],
        enqueue: impl FnOnce(&Call) -> ferrotron_tensor::Result<c_int>,
    ) -> Done {
        self.comm.call(|comm| {
            let mut code = SUCCESS;
            s.launch(op, args, |l| {
                let stream: CudaStream = l.cuda_stream()?.cast();
                code = self.clock.time(|| enqueue(&Call { launch: l, comm, stream }))?;
                Ok(())
            })?;
            Ok(self.nccl.check(op, code)?)
        })
    }

    /// Sends and receives in one NCCL group: (rank of the group, slice of an argument).
    fn send_recv(
        &self,
        c: &Call,
        sends: &[(usize, ArgSlice)],
        receives: &[(usize, ArgSlice)],
    ) -> ferrotron_tensor::Result<c_int> {
        let n = self.nccl;
        // Resolve addresses first: no early return is allowed between group start and end.
        let resolve =
            |list: &[(usize, ArgSlice)]| -> ferrotron_tensor::Result<Vec<(c_int, *mut c_void, usize)>> {
                let some = list.iter().filter(|(_, part)| part.2 > 0);
                some.map(|(peer, (arg, start, len))| Ok((*peer as c_int, c.at(*arg, *start)?, *len)))
                    .collect()
            };
        let (sends, receives) = (resolve(sends)?, resolve(receives)?);
        // SAFETY: the slices are inside arguments of the launch, declared as read or written; the communicator is
        // live and used by this thread only.
        Ok(self.grouped(|done| unsafe {
            for (peer, at, len) in sends {
                done((n.send)(at, len, BYTES, peer, c.comm, c.stream));
            }
            for (peer, at, len) in receives {
                done((n.receive)(at, len, BYTES, peer, c.comm, c.stream));
            }
        }))
    }

    /// One NCCL group: `calls` passes on the code of every call. Returns the first that is no success.
    fn grouped(&self, calls: impl FnOnce(&mut dyn FnMut(c_int))) -> c_int {
        let mut first = SUCCESS;
        let mut done = |code| first = if first == SUCCESS { code } else { first };
        // SAFETY: every start has its end, on the same thread.
        done(unsafe { (self.nccl.group_start)() });
        calls(&mut done);
        // SAFETY: as above.
        done(unsafe { (self.nccl.group_end)() });
        first
    }

    /// All-reduces and all-gathers as one NCCL group.
    fn transfer_grouped(&self, s: &Stream, collectives: &[Collective]) -> Done {
        let mut args = Vec::new();
        for collective in collectives {
            match collective {
                Collective::AllReduce { t, .. } => args.push(write(t)),
                Collective::AllGather { mine, all, .. } if mine.overlaps(all) => args.push(write(all)),
                Collective::AllGather { mine, all, .. } => args.extend([write(all), read(mine)]),
                _ => {}
            }
        }
        self.call(s, "coalesced", &args, |c| {
            // Resolve addresses first: no early return is allowed between group start and end.
            let (mut reduces, mut gathers, mut arg) = (Vec::new(), Vec::new(), 0);
            for collective in collectives {
                match collective {
                    Collective::AllReduce { t, op } => {
                        reduces.push((c.at(arg, 0)?, t.numel(), nccl_dtype(t.dtype())?, nccl_op(*op)));
                        arg += 1;
                    }
                    Collective::AllGather { mine, all, .. } => {
                        let inside = mine.overlaps(all);
                        let from =
                            if inside { c.at(arg, self.group.me * mine.bytes()) } else { c.at(arg + 1, 0) };
                        gathers.push((from?, c.at(arg, 0)?, mine.bytes()));
                        arg += if inside { 1 } else { 2 };
                    }
                    _ => {}
                }
            }
            // SAFETY: as for single calls: whole contiguous tensors, `all` with n times the bytes of `mine`.
            Ok(self.grouped(|done| unsafe {
                for (at, count, dtype, op) in reduces {
                    done((self.nccl.all_reduce)(at, at, count, dtype, op, c.comm, c.stream));
                }
                for (from, to, bytes) in gathers {
                    done((self.nccl.all_gather)(from, to, bytes, BYTES, c.comm, c.stream));
                }
            }))
        })
    }

    fn gather(&self, s: &Stream, (mine, all): (&Tensor, &Tensor), counts: Option<&[usize]>) -> Done {
        let size = all.dtype().size();
        let (me, n) = (self.group.me, self.group.ranks.len());
        let starts = starts(counts, all.numel() / n, n, size);
        // If `mine` is inside `all`, it is not passed as an argument: a written argument overlaps no other.
        let inside = mine.overlaps(all);
        let args = if inside { vec![write(all)] } else { vec![write(all), read(mine)] };
        let own: ArgSlice = if inside { (0, starts[me], mine.bytes()) } else { (1, 0, mine.bytes()) };
        self.call(s, "all-gather", &args, |c| match counts {
            // SAFETY: `all` has n times the bytes of `mine`; NCCL allows `mine` to be its own slot of `all`.
            None => Ok(unsafe {
                let (from, to) = (c.at(own.0, own.1)?, c.at(0, 0)?);
                (self.nccl.all_gather)(from, to, mine.bytes(), BYTES, c.comm, c.stream)
            }),
            Some(_) => {
                let peers = |r: &usize| *r != me || !inside;
                let sends: Vec<(usize, ArgSlice)> = (0..n).filter(peers).map(|r| (r, own)).collect();
                let part = |r: usize| (r, (0, starts[r], starts[r + 1] - starts[r]));
                let receives: Vec<(usize, ArgSlice)> = (0..n).filter(peers).map(part).collect();
                self.send_recv(c, &sends, &receives)
            }
        })
    }

    fn all_to_all(&self, s: &Stream, (from, to): (&Tensor, &Tensor), splits: Option<SplitSizes>) -> Done {
        let n = self.group.ranks.len();
        let (size, equal) = (from.dtype().size(), from.numel() / n);
        let sent = starts(splits.map(|s| s.sent), equal, n, size);
        let received = starts(splits.map(|s| s.received), equal, n, size);
        let parts = |arg: usize, starts: &[usize]| -> Vec<(usize, ArgSlice)> {
            (0..n).map(|r| (r, (arg, starts[r], starts[r + 1] - starts[r]))).collect()
        };
        self.call(s, "all-to-all", &[read(from), write(to)], |c| {
            self.send_recv(c, &parts(0, &sent), &parts(1, &received))
        })
    }

    /// `out` = maximum of the n parts of `parts`, NaN if any is NaN.
    fn maximum(&self, s: &Stream, parts: &Tensor, out: &Tensor) -> Done {
        let count = out.numel();
        let sources = (0..self.group.ranks.len()).map(|r| parts.narrow(0, r * count, count));
        let sources = sources.collect::<ferrotron_tensor::Result<Vec<Tensor>>>()?;
        reduce(s, &self.kernels, &sources, &out.view(&[count])?, ReduceOp::Max)
    }

    fn transfer(&self, s: &Stream, collective: &Collective) -> Done {
        let (nccl, n, me) = (self.nccl, self.group.ranks.len(), self.group.me);
        let scratch = |t: &Tensor| {
            let len = t.numel() * n;
            Tensor::empty(s, &[len], t.dtype(), Category::Communication)
        };
        match collective {
            Collective::Barrier | Collective::AllGatherBytes(_) => Ok(()),
            Collective::AllReduce { t, .. } | Collective::Broadcast { t, .. } if t.numel() == 0 => Ok(()),
            Collective::ReduceScatter { mine, .. } if mine.numel() == 0 => Ok(()),
            Collective::AllGather { all, .. } if all.numel() == 0 => Ok(()),
            Collective::AllReduce { t, op } if loses_nan(*op, t.dtype()) => {
                let all = scratch(t)?;
                self.gather(s, (t, &all), None)?;
                self.maximum(s, &all, t)
            }
            Collective::AllReduce { t, op } => self.call(s, "all-reduce", &[write(t)], |c| {
                let (at, dtype, op) = (c.at(0, 0)?, nccl_dtype(t.dtype())?, nccl_op(*op));
                // SAFETY: in place on a whole contiguous tensor of that dtype.
                Ok(unsafe { (nccl.all_reduce)(at, at, t.numel(), dtype, op, c.comm, c.stream) })
            }),
            Collective::ReduceScatter { all, mine, op } if loses_nan(*op, mine.dtype()) => {
                let parts = scratch(mine)?;
                self.all_to_all(s, (all, &parts), None)?;
                self.maximum(s, &parts, mine)
            }
            Collective::ReduceScatter { all, mine, op } => {
                let inside = mine.overlaps(all);
                let args = if inside { vec![write(all)] } else { vec![read(all), write(mine)] };
                self.call(s, "reduce-scatter", &args, |c| {
                    let to = if inside { c.at(0, me * mine.bytes())? } else { c.at(1, 0)? };
                    let (from, dtype, op) = (c.at(0, 0)?, nccl_dtype(mine.dtype())?, nccl_op(*op));
                    // SAFETY: `all` has n times the elements of `mine`, which may be its own slot of `all`.
                    Ok(unsafe { (nccl.reduce_scatter)(from, to, mine.numel(), dtype, op, c.comm, c.stream) })
                })
            }
            Collective::AllGather { mine, all, counts } => self.gather(s, (mine, all), *counts),
            Collective::AllToAll { from, to, splits } => self.all_to_all(s, (from, to), *splits),
            Collective::Broadcast { t, root } => {
                let args = if *root == me { [read(t)] } else { [write(t)] };
                self.call(s, "broadcast", &args, |c| {
                    let (at, root) = (c.at(0, 0)?, *root as c_int);
                    // SAFETY: a whole contiguous tensor; the root's is only read.
                    Ok(unsafe { (nccl.broadcast)(at, at, t.bytes(), BYTES, root, c.comm, c.stream) })
                })
            }
        }
    }

    /// Adds a call to this rank's digest.
    fn digest(&self, descriptor: &OpDescriptor) {
        self.group.process.shared.digest.add(self.group.index, self.group.me, descriptor);
    }
}

/// First byte of every rank's part, and the end.
fn starts(counts: Option<&[usize]>, equal: usize, n: usize, size: usize) -> Vec<usize> {
    let mut at = 0;
    let mut out = vec![0];
    for r in 0..n {
        at += counts.map_or(equal, |c| c[r]) * size;
        out.push(at);
    }
    out
}

impl GroupBackend for NcclGroupBackend {
    fn exchange_descriptors(
        &self,
        _: Option<&Stream>,
        descriptor: &OpDescriptor,
        collective: &Collective,
        deadline: Instant,
    ) -> Done<Descriptors> {
        match collective {
            Collective::Barrier => self.group.exchange_through_root(descriptor, deadline),
            _ if self.checked => self.group.exchange_descriptors(descriptor, deadline),
            _ => {
                self.group.process.check_alive()?;
                self.digest(descriptor);
                Ok(Descriptors::Deferred)
            }
        }
    }

    fn run(&self, s: &Stream, collective: &Collective, _: Instant) -> Done<Completion> {
        self.enqueue(s, || self.transfer(s, collective))
    }

    fn coalesces(&self) -> bool {
        true
    }

    fn run_coalesced(&self, s: &Stream, collectives: &[Collective], _: Instant) -> Done<Completion> {
        let one_call = |c: &Collective| match c {
            Collective::AllReduce { t, op } => t.numel() > 0 && !loses_nan(*op, t.dtype()),
            Collective::AllGather { mine, counts, .. } => mine.numel() > 0 && counts.is_none(),
            _ => false,
        };
        self.enqueue(s, || match collectives.iter().all(one_call) {
            true => self.transfer_grouped(s, collectives),
            false => collectives.iter().try_for_each(|c| self.transfer(s, c)),
        })
    }

    /// Sends nothing: NCCL needs sends and receives of a stream in one group. When every call is compared, the
    /// descriptors are sent now.
    fn post_sends(&self, _: &Stream, sends: &[P2pOp], _: Instant) -> Done {
        self.group.process.check_alive()?;
        let (control, topic) = (self.group.process.control(), Topic::p2p(self.group.index));
        for op in sends.iter().filter(|_| self.checked) {
            control.send(self.group.ranks[op.peer], topic, op.descriptor.encode())?;
        }
        Ok(())
    }

    fn complete_receives(
        &self,
        s: &Stream,
        sends: &[P2pOp],
        receives: &[P2pOp],
        deadline: Instant,
    ) -> Done<Completion> {
        let (control, topic) = (self.group.process.control(), Topic::p2p(self.group.index));
        for op in receives.iter().filter(|_| self.checked) {
            let (peer, from) = (op.peer, self.group.ranks[op.peer]);
            let missing = || vec![(peer, from)];
            let text = self.group.process.wait(deadline, || Ok(control.try_receive(from, topic)), missing)?;
            let theirs = self.group.decode(peer, &text)?;
            if op.descriptor.conflicts_with(self.group.me, &theirs, peer) {
                let mine = Box::new(op.descriptor.clone());
                return Err(OpError::Mismatch { peer, mine, theirs: Box::new(theirs) });
            }
        }
        sends.iter().chain(receives).filter(|_| !self.checked).for_each(|op| self.digest(&op.descriptor));
        let args: Vec<Arg> =
            sends.iter().map(|l| read(l.tensor)).chain(receives.iter().map(|l| write(l.tensor))).collect();
        let part = |first: usize, ops: &[P2pOp]| -> Vec<(usize, ArgSlice)> {
            let all = ops.iter().enumerate();
            all.map(|(i, l)| (l.peer, (first + i, 0, l.tensor.bytes()))).collect()
        };
        self.enqueue(s, || {
            self.call(s, "exchange", &args, |c| {
                self.send_recv(c, &part(0, sends), &part(sends.len(), receives))
            })
        })
    }

    fn all_gather_bytes(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>> {
        self.group.gather_bytes_through_root(mine, deadline)
    }
}
