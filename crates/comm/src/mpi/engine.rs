//! The calls of one rank on one group of processes.

use super::library::Mpi;
use super::mail::{Comm, MpiPost};
use super::reduce;
use super::transfer::{Lane, PIECE};
use crate::circle::Circle;
use crate::engine::{Engine, Job, Letter, Met, Trouble};
use crate::notice::Notice;
use crate::post::{Post, Topic};
use crate::threads::sums::Reducible;
use ferrotron_tensor::{Arg, DType, Launch, Stream, Tensor, bf16, f16, read, shape_error, write};
use std::sync::Arc;
use std::time::Instant;

pub(super) struct MpiEngine {
    pub(super) mpi: &'static Mpi,
    pub(super) post: Arc<MpiPost>,
    /// Where tensors travel.
    pub(super) comm: Comm,
    pub(super) circle: Circle,
    /// Messages between two ranks have the next one.
    pub(super) tag: i32,
}

type Done<T = ()> = Result<T, Trouble>;

impl MpiEngine {
    fn lane<'a>(&'a self, owners: &'a [&'a Tensor]) -> Lane<'a> {
        Lane { mpi: self.mpi, comm: self.comm, circle: &self.circle, tag: self.tag, owners }
    }

    fn reduce<T: Reducible>(&self, s: &Stream, job: &Job, deadline: Instant) -> Done {
        match job {
            Job::AllReduce { t, op } => launch(s, "all-reduce", &[write(t)], |l| {
                reduce::all_reduce::<T>(&self.lane(&[t]), l.slice_mut(0)?, *op, deadline)
            }),
            Job::ReduceScatter { all, mine, op } if all.overlaps(mine) => {
                launch(s, "reduce-scatter", &[write(all)], |l| {
                    reduce::reduce_scatter::<T>(&self.lane(&[all]), l.slice_mut(0)?, *op, deadline)
                })
            }
            Job::ReduceScatter { all, mine, op } => {
                launch(s, "reduce-scatter", &[read(all), write(mine)], |l| {
                    let owners = [*all, *mine];
                    let (from, to) = (l.slice(0)?, l.slice_mut(1)?);
                    reduce::reduce_scatter_into::<T>(&self.lane(&owners), from, to, *op, deadline)
                })
            }
            _ => Ok(()),
        }
    }

    /// In place: this rank's part is there already.
    fn gather(&self, s: &Stream, all: &Tensor, counts: &[usize], deadline: Instant) -> Done {
        let bytes = all.as_bytes()?;
        launch(s, "all-gather", &[write(&bytes)], |l| {
            let mut parts = split(l.slice_mut::<u8>(0)?, &scaled(counts, all));
            let mine = std::mem::take(&mut parts[self.circle.me]);
            let sends: Vec<(usize, &[u8])> = self.circle.others().map(|r| (r, &*mine)).collect();
            let mut receives: Vec<_> = parts.into_iter().enumerate().collect();
            self.lane(&[all]).transfer(&sends, &mut receives, deadline)
        })
    }

    fn all_to_all(
        &self,
        s: &Stream,
        (from, to): (&Tensor, &Tensor),
        (sent, received): (&[usize], &[usize]),
        deadline: Instant,
    ) -> Done {
        let (f, t) = (from.as_bytes()?, to.as_bytes()?);
        let me = self.circle.me;
        launch(s, "all-to-all", &[read(&f), write(&t)], |l| {
            let mut parts = split(l.slice_mut::<u8>(1)?, &scaled(received, to));
            let mut rest = l.slice::<u8>(0)?;
            let mut sends = Vec::with_capacity(sent.len());
            for (r, len) in scaled(sent, from).into_iter().enumerate() {
                let (part, after) = rest.split_at(len);
                rest = after;
                sends.push((r, part));
            }
            let own = std::mem::take(&mut parts[me]);
            own.copy_from_slice(sends.remove(me).1);
            let mut receives: Vec<_> = parts.into_iter().enumerate().collect();
            self.lane(&[from, to]).transfer(&sends, &mut receives, deadline)
        })
    }

    fn broadcast(&self, s: &Stream, t: &Tensor, root: usize, deadline: Instant) -> Done {
        let bytes = t.as_bytes()?;
        match root == self.circle.me {
            true => launch(s, "broadcast", &[read(&bytes)], |l| {
                let data = l.slice::<u8>(0)?;
                let sends: Vec<(usize, &[u8])> = self.circle.others().map(|r| (r, data)).collect();
                self.lane(&[t]).transfer(&sends, &mut [], deadline)
            }),
            false => launch(s, "broadcast", &[write(&bytes)], |l| {
                self.lane(&[t]).transfer(&[], &mut [(root, l.slice_mut::<u8>(0)?)], deadline)
            }),
        }
    }
}

impl Engine for MpiEngine {
    fn meet(&self, _: Option<&Stream>, notice: &Notice, _: &Job, deadline: Instant) -> Done<Met> {
        self.circle.meet(notice, deadline)
    }

    fn run(&self, s: &Stream, job: &Job, deadline: Instant) -> Done {
        let n = self.circle.ranks.len();
        match job {
            Job::Barrier | Job::Bytes(_) => Ok(()),
            Job::AllReduce { t, .. } | Job::ReduceScatter { mine: t, .. } => match t.dtype() {
                _ if t.numel() == 0 => Ok(()),
                DType::F32 => self.reduce::<f32>(s, job, deadline),
                DType::BF16 => self.reduce::<bf16>(s, job, deadline),
                DType::F16 => self.reduce::<f16>(s, job, deadline),
                DType::F64 => self.reduce::<f64>(s, job, deadline),
                DType::I32 => self.reduce::<i32>(s, job, deadline),
                DType::I64 => self.reduce::<i64>(s, job, deadline),
                other => Ok(shape_error("reduce", format!("{other} can't be reduced"))?),
            },
            Job::AllGather { mine, all, counts } => {
                let equal = vec![all.numel() / n; n];
                let counts = counts.unwrap_or(&equal);
                if mine.numel() > 0 && !mine.overlaps(all) {
                    let start = counts[..self.circle.me].iter().sum();
                    s.copy(mine, &all.view(&[all.numel()])?.narrow(0, start, mine.numel())?)?;
                }
                self.gather(s, all, counts, deadline)
            }
            Job::AllToAll { from, to, counts } => {
                let equal = vec![from.numel() / n; n];
                self.all_to_all(s, (from, to), counts.unwrap_or((&equal, &equal)), deadline)
            }
            Job::Broadcast { t, root } => self.broadcast(s, t, *root, deadline),
        }
    }

    fn post(&self, s: &Stream, sends: &[Letter], _deadline: Instant) -> Done {
        self.circle.process.alive()?;
        let topic = Topic::letters(self.circle.index);
        for letter in sends {
            let to = self.circle.ranks[letter.peer];
            let bytes = s.download::<u8>(&letter.tensor.as_bytes()?)?;
            self.post.send(to, topic, letter.notice.encode())?;
            self.post.ship(self.comm, to, self.tag + 1, bytes, PIECE)?;
        }
        Ok(())
    }

    fn collect(&self, s: &Stream, _sends: &[Letter], receives: &[Letter], deadline: Instant) -> Done {
        let (me, topic) = (self.circle.me, Topic::letters(self.circle.index));
        for letter in receives {
            let (peer, from) = (letter.peer, self.circle.ranks[letter.peer]);
            let text = self.circle.process.wait(
                deadline,
                || Ok(self.post.take(from, topic)),
                || vec![(peer, from)],
            )?;
            let theirs = self.circle.decode(peer, &text)?;
            if letter.notice.conflict(me, &theirs, peer) {
                let mine = Box::new(letter.notice.clone());
                return Err(Trouble::Differs { peer, mine, theirs: Box::new(theirs) });
            }
            let bytes = letter.tensor.as_bytes()?;
            launch(s, "receive", &[write(&bytes)], |l| {
                let owners = [letter.tensor];
                let lane = Lane { tag: self.tag + 1, ..self.lane(&owners) };
                lane.transfer(&[], &mut [(peer, l.slice_mut::<u8>(0)?)], deadline)
            })?;
        }
        Ok(())
    }

    fn bytes(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>> {
        self.circle.bytes(mine, deadline)
    }
}

/// [`Stream::launch`] of something that may end with more than an error of tensors.
fn launch<'a>(
    s: &'a Stream,
    op: &'static str,
    args: &'a [Arg<'a>],
    kernel: impl FnOnce(&Launch<'a>) -> Done,
) -> Done {
    let mut trouble = None;
    s.launch(op, args, |l| match kernel(l) {
        Err(Trouble::Tensor(error)) => Err(error),
        Err(other) => {
            trouble = Some(other);
            Ok(())
        }
        Ok(()) => Ok(()),
    })?;
    trouble.map_or(Ok(()), Err)
}

/// Counts of elements as counts of bytes.
fn scaled(counts: &[usize], t: &Tensor) -> Vec<usize> {
    counts.iter().map(|c| c * t.dtype().size()).collect()
}

/// Parts of these lengths, from the start.
fn split<'a>(mut bytes: &'a mut [u8], lengths: &[usize]) -> Vec<&'a mut [u8]> {
    let mut parts = Vec::with_capacity(lengths.len());
    for len in lengths {
        let (part, rest) = bytes.split_at_mut(*len);
        parts.push(part);
        bytes = rest;
    }
    parts
}
