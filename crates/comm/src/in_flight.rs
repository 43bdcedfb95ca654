//! Communication that overlaps computation, and the buffers it uses until it is done.
//!
//! The memory pool hands a freed block to the next allocation on the stream that the block was allocated on, its allocation
//! stream. A buffer that another stream still reads or writes must therefore outlive that work. [`InFlight`] owns such
//! buffers: taking its value or dropping it first orders the allocation stream after the communication, so an error between
//! launch and wait cannot recycle memory that is still being written.

use ferrotron_tensor::{Error, Event, Result, Stream, Tensor};

/// The result of communication launched on a side stream, with every buffer the communication uses.
///
/// `T` is what [`InFlight::wait`] returns: the output tensors, or `()` where the output is kept elsewhere. All buffers
/// belong to the allocation stream, usually the compute stream.
#[must_use = "dropping it makes the allocation stream wait for the communication"]
pub struct InFlight<T = Tensor> {
    /// `None` where the allocation stream is already ordered after the communication. Declared first, so that it is dropped
    /// before the buffers are.
    order: Option<StreamOrder>,
    value: T,
    /// Buffers that the communication uses besides `value`.
    buffers: Vec<Tensor>,
}

impl<T> InFlight<T> {
    /// A value that needs no wait.
    pub fn ready(value: T) -> InFlight<T> {
        InFlight { order: None, value, buffers: Vec::new() }
    }

    /// Launches `work` on `side`, after all work given to `alloc_stream` so far. `work` communicates into `value`; `buffers` are
    /// the other tensors it uses. Where `alloc_stream` and `side` are the same stream, the value is ready at once.
    ///
    /// If `work` fails half-way, the buffers are released after what it has launched.
    pub fn launch<E: From<Error>>(
        (alloc_stream, side): (&Stream, &Stream),
        value: T,
        buffers: Vec<Tensor>,
        work: impl FnOnce(&Stream, &T) -> Result<(), E>,
    ) -> Result<InFlight<T>, E> {
        if alloc_stream.same_as(side) {
            work(side, &value)?;
            return Ok(InFlight::ready(value));
        }
        InFlight::launch_after(&alloc_stream.record()?, (alloc_stream, side), value, buffers, work)
    }

    /// [`InFlight::launch`] after `start`, an earlier point of `alloc_stream`: work given to `alloc_stream` since then overlaps the
    /// communication and must not touch the buffers. `alloc_stream` and `side` are two streams.
    pub fn launch_after<E: From<Error>>(
        start: &Event,
        (alloc_stream, side): (&Stream, &Stream),
        value: T,
        buffers: Vec<Tensor>,
        work: impl FnOnce(&Stream, &T) -> Result<(), E>,
    ) -> Result<InFlight<T>, E> {
        side.wait(start)?;
        let order = StreamOrder {
            alloc_stream: alloc_stream.clone(),
            side: side.clone(),
            done: None,
            ordered: false,
        };
        let mut launched = InFlight { order: Some(order), value, buffers };
        work(side, &launched.value)?;
        let done = side.record()?;
        if let Some(order) = &mut launched.order {
            order.done = Some(done);
        }
        Ok(launched)
    }

    /// The value, if it needs no wait.
    pub fn if_ready(&self) -> Option<&T> {
        self.order.is_none().then_some(&self.value)
    }

    /// The same communication with a value made from this one, which must not touch the device.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> InFlight<U> {
        let InFlight { order, value, buffers } = self;
        InFlight { order, value: f(value), buffers }
    }

    /// Takes the value: work given to `stream` from now on finds it complete. The host does not block. The allocation stream
    /// is ordered after the communication, too, because the buffers return to its pool.
    pub fn wait(self, stream: &Stream) -> Result<T> {
        let InFlight { order, value, buffers } = self;
        order.map_or(Ok(()), |order| order.wait(stream))?;
        drop(buffers);
        Ok(value)
    }
}

/// Orders the allocation stream after communication on a side stream, when it is dropped at the latest.
struct StreamOrder {
    alloc_stream: Stream,
    side: Stream,
    /// The end of the communication; `None` while it is being launched.
    done: Option<Event>,
    ordered: bool,
}

impl StreamOrder {
    fn wait(mut self, stream: &Stream) -> Result<()> {
        self.order_alloc_stream()?;
        match &self.done {
            Some(done) if !stream.same_as(&self.alloc_stream) => stream.wait(done),
            _ => Ok(()),
        }
    }

    fn order_alloc_stream(&mut self) -> Result<()> {
        if !self.ordered {
            let done = match self.done.take() {
                Some(done) => done,
                None => self.side.record()?,
            };
            self.alloc_stream.wait(self.done.insert(done))?;
            self.ordered = true;
        }
        Ok(())
    }
}

impl Drop for StreamOrder {
    fn drop(&mut self) {
        if self.order_alloc_stream().is_err() {
            // A stream cannot wait while it is captured: then the host does. If that fails too, the device is lost, and
            // the next call on it reports that.
            let _ = self.side.synchronize();
        }
    }
}
