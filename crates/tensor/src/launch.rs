//! [`Stream::launch`], the only way to access tensor memory, and what a kernel sees of its arguments.

use crate::cuda::{CudaEvent, CudaStream};
use crate::race_checker::Access;
use crate::{Element, Error, Result, Stream, Tensor, Threads, shape_error};
use std::sync::Arc;

/// A tensor argument of a launch, and how the kernel accesses it.
#[derive(Clone, Copy)]
pub struct Arg<'a> {
    tensor: &'a Tensor,
    access: AccessKind,
}

#[derive(Clone, Copy, PartialEq)]
enum AccessKind {
    Read,
    Write,
}

/// An argument the kernel only reads.
pub fn read(t: &Tensor) -> Arg<'_> {
    Arg { tensor: t, access: AccessKind::Read }
}

/// An argument the kernel writes, and may read.
pub fn write(t: &Tensor) -> Arg<'_> {
    Arg { tensor: t, access: AccessKind::Write }
}

/// A running kernel's view of its arguments. Exists only inside the launch.
pub struct Launch<'a> {
    op: &'static str,
    args: &'a [Arg<'a>],
    threads: &'a Threads,
    /// The CUDA stream; `None` on the host.
    pub(crate) cuda: Option<&'a CudaStream>,
    /// Bit i is set once argument i was returned as `&mut` slice.
    slices_taken: std::cell::Cell<u64>,
}

impl Stream {
    /// Runs `kernel` on `args`. Every kernel, copy and collective goes through here: the declared accesses tell the
    /// race checker what is touched and give the kernel its right to the memory. A written argument must not overlap
    /// any other.
    ///
    /// `kernel` takes a launch of any lifetime, so that no slice outlives the launch's borrow of its buffer:
    /// ```compile_fail
    /// # use ferrotron_tensor::{Stream, Tensor, write};
    /// fn keeps_a_slice<'a>(s: &Stream, x: &'a Tensor, kept: &mut Option<&'a mut [f32]>) {
    ///     let _ = s.launch("keep", &[write(x)], |l| Ok(*kept = Some(l.slice_mut(0)?)));
    /// }
    /// ```
    pub fn launch<'a>(
        &'a self,
        op: &'static str,
        args: &'a [Arg<'a>],
        kernel: impl FnOnce(&Launch) -> Result<()>,
    ) -> Result<()> {
        self.check_launch(op, args)?;
        let (device, cuda) = (&self.device().inner, self.cuda());
        if device.meta {
            return Ok(());
        }
        let _borrow = Borrow::take(op, args)?;
        if let Some(cuda) = cuda {
            cuda.context().enter()?;
        }
        let launch = Launch { op, args, threads: &device.threads, cuda, slices_taken: Default::default() };
        device.timed(op, self, || kernel(&launch))
    }

    /// Runs a CPU kernel on `args` in this stream's order, also on a stream of a GPU, where all of them must be in host
    /// memory ([`Tensor::host`]): the host does not wait, work that follows on the stream does, and an error is reported by
    /// the next synchronization with the device.
    pub fn launch_on_host<F>(&self, op: &'static str, args: &[Arg], kernel: F) -> Result<()>
    where
        F: FnOnce(&Launch) -> Result<()> + Send + 'static,
    {
        let Some(cuda) = self.cuda() else {
            return self.launch(op, args, kernel);
        };
        if let Some(i) = args.iter().position(|a| a.tensor.numel() > 0 && !a.tensor.is_on_host()) {
            let what = format!("argument {i} {:?} of a CPU kernel is not in host memory", args[i].tensor);
            return Err(Error::Unsupported { op, what });
        }
        self.check_launch(op, args)?;
        let owned: Vec<(Tensor, AccessKind)> = args.iter().map(|a| (a.tensor.clone(), a.access)).collect();
        let (threads, mut kernel) = (self.device().threads().clone(), Some(kernel));
        let work = move || {
            let args: Vec<Arg> =
                owned.iter().map(|(tensor, access)| Arg { tensor, access: *access }).collect();
            let launch =
                Launch { op, args: &args, threads: &threads, cuda: None, slices_taken: Default::default() };
            kernel.take().map_or(Ok(()), |kernel| kernel(&launch))
        };
        self.device().inner.timed(op, self, || cuda.call_host(Box::new(work)))
    }

    /// Calls `read_bytes` with the bytes of a contiguous tensor in host memory, after all work given to this stream so far,
    /// for which it blocks. Until it returns, a launch of another thread that writes the allocation fails.
    pub fn read_host<T>(&self, t: &Tensor, read_bytes: impl FnOnce(&[u8]) -> T) -> Result<T> {
        const OP: &str = "read host memory";
        if !t.is_on_host() || self.device().is_meta() {
            return Err(Error::Unsupported { op: OP, what: format!("{t:?} is not in host memory") });
        }
        let bytes = t.as_bytes()?;
        let args = [read(&bytes)];
        self.check_launch(OP, &args)?;
        let _borrow = Borrow::take(OP, &args)?;
        if let Some(cuda) = self.cuda() {
            cuda.context().enter()?;
            CudaEvent::record(cuda)?.wait()?;
        }
        let threads = self.device().threads();
        let launch = Launch { op: OP, args: &args, threads, cuda: None, slices_taken: Default::default() };
        Ok(read_bytes(launch.slice::<u8>(0)?))
    }

    /// Checks that the arguments of a launch belong to the device, that written ones overlap no other, and that events order
    /// it after earlier accesses.
    fn check_launch(&self, op: &'static str, args: &[Arg]) -> Result<()> {
        let device = &self.device().inner;
        if let Some(arg) = args.iter().position(|a| !Arc::ptr_eq(&a.tensor.buffer.device, device)) {
            return Err(Error::OtherDevice { op, arg });
        }
        for (i, a) in args.iter().enumerate().filter(|(_, a)| a.access == AccessKind::Write) {
            let clash = args.iter().enumerate().find(|(j, b)| i != *j && a.tensor.overlaps(b.tensor));
            if let Some((j, _)) = clash {
                return Err(Error::Overlap { op, a: i, b: j });
            }
        }
        device.check(|c| {
            let time = c.tick(self.id());
            args.iter().filter(|a| a.tensor.numel() > 0).try_for_each(|a| {
                let access = Access {
                    stream: self.id(),
                    stream_name: self.name(),
                    label: op,
                    write: a.access == AccessKind::Write,
                    buffer: a.tensor.buffer.id,
                    time,
                };
                let (base, bytes) = (a.tensor.buffer.address(), a.tensor.byte_range());
                c.access(base + bytes.start..base + bytes.end, access)
            })
        })
    }
}

impl<'a> Launch<'a> {
    /// The kernel's name.
    pub fn op(&self) -> &'static str {
        self.op
    }

    /// The thread pool of the host.
    pub fn threads(&self) -> &'a Threads {
        self.threads
    }

    /// The CUDA stream to launch on; its context is current.
    pub fn cuda_stream(&self) -> Result<cudarc::driver::sys::CUstream> {
        self.require_cuda().map(CudaStream::raw)
    }

    /// Device address of the first element of argument `i`.
    pub fn address(&self, i: usize) -> Result<u64> {
        self.require_cuda()?;
        let start = self.start(i)?;
        Ok(start as u64)
    }

    /// Device address of the word in which kernels report invalid input.
    pub fn fault(&self) -> Result<u64> {
        self.require_cuda().map(|q| q.context().fault_address())
    }

    fn require_cuda(&self) -> Result<&'a CudaStream> {
        let what = || "a CUDA kernel needs a stream of a CUDA device".to_string();
        self.cuda.ok_or_else(|| Error::Unsupported { op: self.op, what: what() })
    }

    /// The elements of argument `i` from the first to the last, including the gaps of a strided view. Fails if a
    /// written argument has elements in those gaps.
    pub fn slice<T: Element>(&self, i: usize) -> Result<&'a [T]> {
        let (ptr, len) = self.pointer::<T>(i)?;
        if self.args[i].access == AccessKind::Write {
            return shape_error(self.op, format!("argument {i} is declared as written; use slice_mut"));
        }
        self.refuse_in_gaps(i, |other| other.access == AccessKind::Write)?;
        // SAFETY: `pointer` checked type and bounds; blocks are initialized and aligned. The slice does not outlive the launch,
        // during which nothing else writes the buffer (borrow count; the order of streams where a GPU's stream calls the
        // host), and no written argument of this launch has elements in this range, gaps included.
        Ok(unsafe { std::slice::from_raw_parts(ptr, len) })
    }

    /// [`Launch::slice`] of an argument declared as written. Fails if another argument has elements in its gaps
    /// (interleaved views); such kernels use [`Launch::pointer_mut`] and access their own elements only.
    pub fn slice_mut<T: Element>(&self, i: usize) -> Result<&'a mut [T]> {
        let (ptr, len) = self.pointer_mut::<T>(i)?;
        let bit = 1u64.checked_shl(i as u32).unwrap_or(0);
        if self.slices_taken.replace(self.slices_taken.get() | bit) & bit != 0 || bit == 0 {
            return shape_error(self.op, format!("argument {i} was already taken as a mutable slice"));
        }
        self.refuse_in_gaps(i, |_| true)?;
        // SAFETY: `pointer` checked type and bounds; the launch holds the buffer exclusively (as above), no other argument
        // reaches into this range, and the slice is returned once.
        Ok(unsafe { std::slice::from_raw_parts_mut(ptr, len) })
    }

    /// Fails if one of the `others` has elements in the gaps of argument `i`. Overlapping elements were refused
    /// before.
    fn refuse_in_gaps(&self, i: usize, others: impl Fn(&Arg) -> bool) -> Result<()> {
        let mine = self.args[i].tensor;
        let a = mine.byte_range();
        let other = (0..self.args.len()).find(|&j| {
            let b = &self.args[j];
            let r = b.tensor.byte_range();
            let same = Arc::ptr_eq(&mine.buffer, &b.tensor.buffer);
            j != i && others(b) && same && a.start < r.end && r.start < a.end
        });
        match other {
            Some(j) if !mine.is_contiguous() => Err(Error::Overlap { op: self.op, a: i, b: j }),
            _ => Ok(()),
        }
    }

    /// Address and element count, first to last, of an argument declared as written.
    pub fn pointer_mut<T: Element>(&self, i: usize) -> Result<(*mut T, usize)> {
        if self.args.get(i).is_none_or(|a| a.access != AccessKind::Write) {
            return shape_error(self.op, format!("argument {i} is not declared as written"));
        }
        self.pointer(i)
    }

    fn pointer<T: Element>(&self, i: usize) -> Result<(*mut T, usize)> {
        let tensor = self.argument(i)?;
        if tensor.dtype() != T::DTYPE {
            return Err(Error::DType { op: self.op, found: tensor.dtype(), wanted: T::DTYPE });
        }
        if self.cuda.is_some() {
            let what = "a CPU kernel needs a stream of the CPU device".to_string();
            return Err(Error::Unsupported { op: self.op, what });
        }
        Ok((self.start(i)? as *mut T, tensor.span()))
    }

    fn argument(&self, i: usize) -> Result<&'a Tensor> {
        match self.args.get(i) {
            Some(arg) => Ok(arg.tensor),
            None => shape_error(self.op, format!("argument {i} does not exist")),
        }
    }

    /// Address of argument `i`, after checking that all of it is inside its buffer.
    fn start(&self, i: usize) -> Result<usize> {
        let tensor = self.argument(i)?;
        let range = tensor.byte_range();
        if range.end > tensor.buffer.bytes {
            return shape_error(self.op, format!("argument {i} {tensor:?} extends past its buffer"));
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
            let same = |b: &Arg| Arc::ptr_eq(&a.tensor.buffer, &b.tensor.buffer);
            if args[..i].iter().any(same) {
                continue;
            }
            let writes = args[i..].iter().any(|b| same(b) && b.access == AccessKind::Write);
            if !a.tensor.buffer.try_borrow(writes) {
                return Err(Error::Race(format!(
                    "'{op}' uses argument {i} {:?} while another thread runs a kernel that writes it",
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
