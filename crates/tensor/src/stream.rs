//! Streams, events and the one door to memory: [`Stream::launch`].

use crate::checker::{Access, Clock};
use crate::clock::At;
use crate::cuda::Queue;
use crate::trace::{Kind, Span};
use crate::{Category, DType, Device, Element, Error, Result, Tensor, Threads, shape_error};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// A queue of work on a device. Work on one stream happens in order; order between streams comes from
/// [`Stream::record`] and [`Stream::wait`] only.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    id: u32,
    name: &'static str,
    /// The rank that uses it, for traces.
    rank: usize,
    /// The driver's stream, on a card.
    queue: Option<Arc<Queue>>,
    /// Spans of collectives that are open on it, counted while traced.
    collectives: Arc<AtomicU32>,
}

/// A point in a stream's work that another stream can wait for.
#[derive(Clone)]
pub struct Event {
    clock: Clock,
    at: At,
}

impl Event {
    /// Time from `earlier` to this on the device's own clock. Waits until both are reached.
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        self.at.since(&earlier.at)
    }
}

/// An argument of a launch and what the kernel does with it.
#[derive(Clone, Copy)]
pub struct Arg<'a> {
    tensor: &'a Tensor,
    access: Use,
}

#[derive(Clone, Copy, PartialEq)]
enum Use {
    Read,
    Write,
}

/// The kernel only reads `t`.
pub fn read(t: &Tensor) -> Arg<'_> {
    Arg { tensor: t, access: Use::Read }
}

/// The kernel writes `t` (and may read it).
pub fn write(t: &Tensor) -> Arg<'_> {
    Arg { tensor: t, access: Use::Write }
}

/// What a running kernel sees of its arguments. Alive only inside the launch.
pub struct Launch<'a> {
    op: &'static str,
    args: &'a [Arg<'a>],
    threads: &'a Threads,
    queue: Option<&'a Queue>,
    /// Written arguments already given out as slices: one `&mut` each.
    given: std::cell::Cell<u64>,
}

impl Stream {
    pub(crate) fn new(device: Device, id: u32, name: &'static str, queue: Option<Arc<Queue>>) -> Stream {
        Stream { device, id, name, rank: 0, queue, collectives: Arc::default() }
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The same stream, known in traces as one of `rank`.
    pub fn of_rank(self, rank: usize) -> Stream {
        Stream { rank, ..self }
    }

    /// The rank that uses it; 0 unless [`Stream::of_rank`] said another.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Is it the same queue of work?
    pub fn is(&self, other: &Stream) -> bool {
        self.id == other.id && Arc::ptr_eq(&self.device.inner, &other.device.inner)
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn queue(&self) -> Option<&Queue> {
        self.queue.as_deref()
    }

    pub(crate) fn in_collective(&self) -> bool {
        self.collectives.load(Relaxed) > 0
    }

    pub(crate) fn enter_collective(&self) {
        self.collectives.fetch_add(1, Relaxed);
    }

    pub(crate) fn leave_collective(&self) {
        self.collectives.fetch_sub(1, Relaxed);
    }

    /// Gives a name to the work given to this stream until the span is dropped; spans nest. Without a trace under
    /// way this is nothing, and `detail` is not even written out.
    pub fn span(&self, kind: Kind, name: &'static str, detail: std::fmt::Arguments) -> Result<Span> {
        match self.device.inner.tracer() {
            None => Ok(Span::NONE),
            Some(_) => Span::open(self, kind, name, detail.to_string()),
        }
    }

    /// A point after all work given so far.
    pub fn record(&self) -> Result<Event> {
        let mut clock = Clock::new();
        self.device.inner.check(|c| {
            clock = c.record(self.id);
            Ok(())
        })?;
        Ok(Event { clock, at: At::now(self.queue())? })
    }

    /// Work given from now on happens after `event`. The host does not wait.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.inner.check(|c| {
            c.wait(self.id, &event.clock);
            Ok(())
        })?;
        match (&self.queue, &event.at) {
            (Some(queue), At::Card(moment)) => queue.wait(moment),
            _ => Ok(()),
        }
    }

    /// Blocks the host until all work given so far is done, and says what kernels found wrong.
    pub fn synchronize(&self) -> Result<()> {
        self.queue.as_ref().map_or(Ok(()), |q| q.synchronize())
    }

    /// Runs `kernel` on `args`. Every kernel, copy and collective passes here: the kinds of the arguments say
    /// what is touched, which gives the checker its facts and the kernel its right to the memory. Arguments
    /// that are written must not overlap others.
    pub fn launch<'a>(
        &'a self,
        op: &'static str,
        args: &'a [Arg<'a>],
        kernel: impl FnOnce(&Launch<'a>) -> Result<()>,
    ) -> Result<()> {
        if let Some(arg) = args.iter().position(|a| !Arc::ptr_eq(&a.tensor.buffer.device, &self.device.inner))
        {
            return Err(Error::OtherDevice { op, arg });
        }
        for (i, a) in args.iter().enumerate().filter(|(_, a)| a.access == Use::Write) {
            let clash = args.iter().enumerate().find(|(j, b)| {
                i != *j
                    && std::sync::Arc::ptr_eq(&a.tensor.buffer, &b.tensor.buffer)
                    && !a.tensor.disjoint(b.tensor)
            });
            if let Some((j, _)) = clash {
                return Err(Error::Overlap { op, a: i, b: j });
            }
        }
        self.device.inner.check(|c| {
            let time = c.tick(self.id);
            args.iter().filter(|a| a.tensor.numel() > 0).try_for_each(|a| {
                let access = Access {
                    stream: self.id,
                    stream_name: self.name,
                    label: op,
                    write: a.access == Use::Write,
                    bytes: a.tensor.byte_range(),
                    buffer: a.tensor.buffer.id,
                    time,
                };
                c.access(a.tensor.buffer.block_id(), access)
            })
        })?;
        let _borrow = Borrow::take(op, args)?;
        let queue = self.queue.as_deref();
        if let Some(queue) = queue {
            queue.card().enter()?;
        }
        let launch =
            Launch { op, args, threads: &self.device.inner.threads, queue, given: Default::default() };
        self.device.inner.timed(op, self, || kernel(&launch))
    }

    /// Copies host values into a new tensor.
    pub fn upload<T: Element>(&self, values: &[T], shape: &[usize], category: Category) -> Result<Tensor> {
        let t = Tensor::empty(self, shape, T::DTYPE, category)?;
        self.write_to(&t, values)?;
        Ok(t)
    }

    /// Copies host values into a contiguous tensor.
    pub fn write_to<T: Element>(&self, t: &Tensor, values: &[T]) -> Result<()> {
        if !t.is_contiguous() || t.numel() != values.len() {
            return shape_error("upload", format!("{} values into {:?}", values.len(), t));
        }
        let args = [write(t)];
        self.launch("upload", &args, |l| match l.queue {
            None => {
                l.slice_mut::<T>(0)?.copy_from_slice(values);
                Ok(())
            }
            // SAFETY: the argument is written, contiguous and as long as the values.
            Some(q) => unsafe { q.card().upload(q, bytemuck::cast_slice(values), l.address(0)?) },
        })
    }

    /// Copies the elements of one contiguous tensor to another of the same type and number on this device. The
    /// two must not overlap.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        if from.dtype() != to.dtype() || from.numel() != to.numel() {
            return shape_error("copy", format!("{from:?} into {to:?}"));
        }
        let (from, to) = (from.as_bytes()?, to.as_bytes()?);
        self.launch("copy", &[read(&from), write(&to)], |l| match l.queue {
            None => {
                l.slice_mut::<u8>(1)?.copy_from_slice(l.slice::<u8>(0)?);
                Ok(())
            }
            // SAFETY: both are arguments of that many bytes, the second is written, and they do not overlap.
            Some(queue) => unsafe { queue.card().copy(queue, l.address(0)?, l.address(1)?, to.numel()) },
        })
    }

    /// Copies a tensor to the host, in row-major order whatever its strides, and waits for it.
    pub fn download<T: Element>(&self, t: &Tensor) -> Result<Vec<T>> {
        let args = [read(t)];
        let mut out = Vec::with_capacity(t.numel());
        self.launch("download", &args, |l| {
            let fetched;
            let data = match l.queue {
                None => l.slice::<T>(0)?,
                Some(queue) => {
                    let mut host = vec![T::zeroed(); t.span()];
                    // SAFETY: the argument's elements from its first to its last, which `address` checked.
                    unsafe {
                        queue.card().download(queue, l.address(0)?, bytemuck::cast_slice_mut(&mut host))?
                    };
                    fetched = host;
                    &fetched
                }
            };
            gather(data, t.shape(), t.strides(), &mut out);
            Ok(())
        })?;
        Ok(out)
    }

    /// A new tensor of zeros.
    pub fn zeros(&self, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        let t = Tensor::empty(self, shape, dtype, category)?;
        self.zero(&t)?;
        Ok(t)
    }

    /// Sets all bytes of a contiguous tensor to zero.
    pub fn zero(&self, t: &Tensor) -> Result<()> {
        let bytes = t.as_bytes()?;
        self.launch("zero", &[write(&bytes)], |l| match l.queue {
            None => {
                l.slice_mut::<u8>(0)?.fill(0);
                Ok(())
            }
            // SAFETY: the argument is written, and of that many bytes.
            Some(queue) => unsafe { queue.card().zero(queue, l.address(0)?, bytes.numel()) },
        })
    }
}

fn gather<T: Copy>(data: &[T], shape: &[usize], strides: &[usize], out: &mut Vec<T>) {
    match (shape, strides) {
        ([n], [1]) => out.extend_from_slice(&data[..*n]),
        ([n, rest @ ..], [s, inner @ ..]) => {
            (0..*n).filter(|_| !rest.contains(&0)).for_each(|i| gather(&data[i * s..], rest, inner, out));
        }
        _ => out.push(data[0]),
    }
}

impl<'a> Launch<'a> {
    /// The name of the kernel.
    pub fn op(&self) -> &'static str {
        self.op
    }

    /// The compute pool.
    pub fn threads(&self) -> &'a Threads {
        self.threads
    }

    /// The driver's stream to queue a kernel on; its context is current.
    pub fn cuda_stream(&self) -> Result<cudarc::driver::sys::CUstream> {
        self.on_card().map(Queue::raw)
    }

    /// Address of the first element of argument `i` on the card.
    pub fn address(&self, i: usize) -> Result<u64> {
        self.on_card()?;
        let start = self.start(i)?;
        Ok(start as u64)
    }

    /// Address of the word to which kernels write what they find wrong.
    pub fn fault(&self) -> Result<u64> {
        self.on_card().map(|q| q.card().fault_address())
    }

    fn on_card(&self) -> Result<&'a Queue> {
        let what = || "a CUDA kernel on a stream of the host".to_string();
        self.queue.ok_or_else(|| Error::Unsupported { op: self.op, what: what() })
    }

    /// Elements of argument `i` from its first to its last, gaps of a strided view included.
    pub fn slice<T: Element>(&self, i: usize) -> Result<&'a [T]> {
        let (ptr, len) = self.pointer::<T>(i)?;
        if self.args[i].access == Use::Write {
            return shape_error(self.op, format!("argument {i} is written; take it as slice_mut"));
        }
        // SAFETY: `pointer` checked the type and the bounds; blocks are initialised and aligned; no other
        // thread writes the buffer (borrow count), and no argument of this launch that overlaps is written.
        Ok(unsafe { std::slice::from_raw_parts(ptr, len) })
    }

    /// The same for an argument declared written. Refused where another argument lies in the gaps of this
    /// one (interleaved views): such kernels use [`Launch::pointer_mut`] and touch their own elements only.
    pub fn slice_mut<T: Element>(&self, i: usize) -> Result<&'a mut [T]> {
        let (ptr, len) = self.pointer_mut::<T>(i)?;
        let bit = 1u64.checked_shl(i as u32).unwrap_or(0);
        if self.given.replace(self.given.get() | bit) & bit != 0 || bit == 0 {
            return shape_error(self.op, format!("argument {i} was taken before"));
        }
        let mine = self.args[i].tensor;
        let (a, gaps) = (mine.byte_range(), !mine.is_contiguous());
        let other = self.args.iter().enumerate().find(|(j, b)| {
            let r = b.tensor.byte_range();
            *j != i
                && std::sync::Arc::ptr_eq(&mine.buffer, &b.tensor.buffer)
                && a.start < r.end
                && r.start < a.end
        });
        if let (Some((j, _)), true) = (other, gaps) {
            return Err(Error::Overlap { op: self.op, a: i, b: j });
        }
        // SAFETY: type and bounds checked by `pointer`; the launch holds the buffer exclusively and no other
        // argument reaches into this range, and it is given out once.
        Ok(unsafe { std::slice::from_raw_parts_mut(ptr, len) })
    }

    /// Address and element count (first to last) of an argument declared written.
    pub fn pointer_mut<T: Element>(&self, i: usize) -> Result<(*mut T, usize)> {
        if self.args.get(i).is_none_or(|a| a.access != Use::Write) {
            return shape_error(self.op, format!("argument {i} is not declared written"));
        }
        self.pointer(i)
    }

    fn pointer<T: Element>(&self, i: usize) -> Result<(*mut T, usize)> {
        let Some(Arg { tensor, .. }) = self.args.get(i) else {
            return shape_error(self.op, format!("there is no argument {i}"));
        };
        if tensor.dtype() != T::DTYPE {
            return Err(Error::DType { op: self.op, found: tensor.dtype(), wanted: T::DTYPE });
        }
        if self.queue.is_some() {
            let what = "a CPU kernel on a stream of a card".to_string();
            return Err(Error::Unsupported { op: self.op, what });
        }
        Ok((self.start(i)? as *mut T, tensor.span()))
    }

    /// Address of argument `i`, all of which lies inside its buffer.
    fn start(&self, i: usize) -> Result<usize> {
        let Some(Arg { tensor, .. }) = self.args.get(i) else {
            return shape_error(self.op, format!("there is no argument {i}"));
        };
        let range = tensor.byte_range();
        if range.end > tensor.buffer.bytes {
            return shape_error(self.op, format!("argument {i} {tensor:?} reaches past its buffer"));
        }
        Ok(tensor.buffer.address() + range.start)
    }
}

/// Holds the borrow of every distinct buffer of a launch.
struct Borrow<'a> {
    held: Vec<(&'a Tensor, bool)>,
}

impl<'a> Borrow<'a> {
    fn take(op: &'static str, args: &'a [Arg<'a>]) -> Result<Borrow<'a>> {
        let mut borrow = Borrow { held: Vec::with_capacity(args.len()) };
        for (i, a) in args.iter().enumerate() {
            let same = |b: &Arg| std::sync::Arc::ptr_eq(&a.tensor.buffer, &b.tensor.buffer);
            if args[..i].iter().any(same) {
                continue;
            }
            let writes = args[i..].iter().any(|b| same(b) && b.access == Use::Write);
            if !a.tensor.buffer.try_borrow(writes) {
                return Err(Error::Race(format!(
                    "'{op}' uses argument {i} {:?} while another thread is inside a kernel that writes it",
                    a.tensor
                )));
            }
            borrow.held.push((a.tensor, writes));
        }
        Ok(borrow)
    }
}

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        for (t, writes) in &self.held {
            t.buffer.release(*writes);
        }
    }
}
