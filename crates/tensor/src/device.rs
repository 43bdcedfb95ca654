//! Devices: where memory lives and kernels run.

use crate::cuda::{CudaContext, CudaStream, GpuInfo, Priority};
use crate::host_fault::HostFaults;
use crate::host_memory::HostPool;
use crate::memory::MemoryAccount;
use crate::pool::MemoryPool;
use crate::race_checker::RaceChecker;
use crate::timestamp::Timestamp;
use crate::trace::{Trace, TracedLaunch, Tracer};
use crate::{Error, MemoryReport, Result, Stream, Threads};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The kind of processor a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host's CPU, or a meta device. Work runs immediately, on the calling thread and the thread pool.
    Cpu,
    /// A CUDA GPU. Work is enqueued and runs in stream order.
    Cuda {
        /// Device ordinal.
        ordinal: usize,
    },
}

/// What a device records about every launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instrumentation {
    /// Check that conflicting memory accesses are ordered (vector clocks over streams and events).
    pub race_check: bool,
    /// Sum up the time of each kernel: [`Device::take_profile`].
    pub kernel_times: bool,
    /// Record when each launch ran and on which stream, while a trace is active: [`Device::start_trace`].
    pub trace: bool,
}

/// Number of calls and total time by kernel.
pub type Profile = BTreeMap<&'static str, (u64, Duration)>;

/// A handle to a device; clones share it.
#[derive(Clone)]
pub struct Device {
    pub(crate) inner: Arc<DeviceInner>,
}

pub(crate) struct DeviceInner {
    /// The CUDA context; `None` for the host.
    pub(crate) context: Option<Arc<CudaContext>>,
    /// Tensors have shapes and no memory, and launches run nothing.
    pub(crate) meta: bool,
    pub(crate) threads: Threads,
    pub(crate) pool: MemoryPool,
    pub(crate) host_pool: HostPool,
    pub(crate) host_faults: HostFaults,
    pub(crate) account: MemoryAccount,
    checker: Option<Mutex<RaceChecker>>,
    /// What is recorded about launches, if anything.
    recorders: Option<Box<Recorders>>,
    ids: AtomicU64,
    streams: AtomicU32,
}

struct Recorders {
    profile: Option<Mutex<Timings>>,
    tracer: Option<Tracer>,
}

/// Completed kernel times, and the start and end events of kernels that may still be running.
#[derive(Default)]
struct Timings {
    done: Profile,
    queued: Vec<(&'static str, Timestamp, Timestamp)>,
}

impl Timings {
    fn add(&mut self, op: &'static str, time: Duration) {
        let entry = self.done.entry(op).or_default();
        *entry = (entry.0 + 1, entry.1 + time);
    }
}

impl DeviceInner {
    pub(crate) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Relaxed)
    }

    pub(crate) fn memory(&self) -> MemoryReport {
        let (reserved, host) = (self.pool.reserved(), self.host_pool.report());
        MemoryReport {
            reserved_now: reserved.now,
            reserved_peak: reserved.peak,
            host,
            ..self.account.report()
        }
    }

    /// Runs a kernel and records its time if the device is instrumented for it.
    pub(crate) fn timed(
        &self,
        op: &'static str,
        stream: &Stream,
        f: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(recorders) = &self.recorders else { return f() };
        let tracer = recorders.tracer.as_ref().filter(|t| t.is_on());
        if recorders.profile.is_none() && tracer.is_none() {
            return f();
        }
        let (start, begun) = (Timestamp::now(stream.cuda())?, Instant::now());
        f()?;
        let (end, launched) = (Timestamp::now(stream.cuda())?, Instant::now());
        if let Some(profile) = &recorders.profile {
            let mut timings = profile.lock().unwrap_or_else(PoisonError::into_inner);
            match stream.cuda() {
                None => timings.add(op, end.since(&start)?),
                Some(_) => timings.queued.push((op, start.clone(), end.clone())),
            }
        }
        if let Some(tracer) = tracer {
            let memory = self.account.report().now;
            let host = stream.cuda().map(|_| [begun, launched]);
            tracer.launch(stream, TracedLaunch { op, start, end, memory, host });
        }
        Ok(())
    }

    /// The tracer, while a trace is active.
    pub(crate) fn tracer(&self) -> Option<&Tracer> {
        self.recorders.as_ref()?.tracer.as_ref().filter(|t| t.is_on())
    }

    /// Runs `f` on the race checker, if the device has one.
    pub(crate) fn check(&self, f: impl FnOnce(&mut RaceChecker) -> Result<(), String>) -> Result<()> {
        match &self.checker {
            None => Ok(()),
            Some(c) => f(&mut c.lock().unwrap_or_else(PoisonError::into_inner)).map_err(Error::Race),
        }
    }
}

impl Device {
    /// The host's CPU.
    pub fn cpu(threads: Threads) -> Device {
        Device::cpu_instrumented(threads, Instrumentation::default())
    }

    /// The host's CPU with instrumentation.
    pub fn cpu_instrumented(threads: Threads, instrumentation: Instrumentation) -> Device {
        let pool = MemoryPool::new(None);
        Device::new((None, false), pool, threads, instrumentation)
    }

    /// A device without memory or computation: tensors have shapes and dtypes, every allocation is in the memory account,
    /// every launch is checked and then runs nothing, and what is read back is zero. A program that runs on it does all
    /// that its host does, at any size of model.
    pub fn meta(threads: Threads) -> Device {
        Device::new((None, true), MemoryPool::meta(), threads, Instrumentation::default())
    }

    /// True for [`Device::meta`].
    pub fn is_meta(&self) -> bool {
        self.inner.meta
    }

    /// GPU `ordinal`; `threads` run the work that is left to the host.
    pub fn cuda(ordinal: usize, threads: Threads, instrumentation: Instrumentation) -> Result<Device> {
        let context = Arc::new(CudaContext::open(ordinal)?);
        let pool = MemoryPool::new(Some(&context));
        Ok(Device::new((Some(context), false), pool, threads, instrumentation))
    }

    fn new(
        (context, meta): (Option<Arc<CudaContext>>, bool),
        pool: MemoryPool,
        threads: Threads,
        instrumentation: Instrumentation,
    ) -> Device {
        let checker = instrumentation.race_check.then(Mutex::default);
        let recorders = (instrumentation.kernel_times || instrumentation.trace).then(|| {
            let profile = instrumentation.kernel_times.then(Mutex::default);
            Box::new(Recorders { profile, tracer: instrumentation.trace.then(Tracer::default) })
        });
        let inner = DeviceInner {
            pool,
            context,
            meta,
            threads,
            host_pool: HostPool::default(),
            host_faults: HostFaults::default(),
            account: MemoryAccount::default(),
            checker,
            recorders,
            ids: AtomicU64::new(1),
            streams: AtomicU32::new(0),
        };
        Device { inner: Arc::new(inner) }
    }

    /// The kind of processor.
    pub fn kind(&self) -> DeviceKind {
        match &self.inner.context {
            None => DeviceKind::Cpu,
            Some(context) => DeviceKind::Cuda { ordinal: context.info.ordinal },
        }
    }

    /// Properties of the GPU; `None` for the CPU.
    pub fn gpu(&self) -> Option<&GpuInfo> {
        self.inner.context.as_ref().map(|c| &c.info)
    }

    /// Free and total bytes of GPU memory, as reported by the driver; `None` for the CPU.
    pub fn gpu_memory(&self) -> Result<Option<(usize, usize)>> {
        self.inner.context.as_ref().map(|c| c.memory()).transpose()
    }

    /// The thread pool that CPU kernels run on.
    pub fn threads(&self) -> &Threads {
        &self.inner.threads
    }

    /// Creates a stream. `name` appears in traces and race reports.
    pub fn stream(&self, name: &'static str) -> Result<Stream> {
        self.new_stream(name, Priority::Normal)
    }

    /// Creates a stream whose kernels start before those of other streams that wait for the same multiprocessors: for
    /// communication, which other ranks wait for.
    pub fn urgent_stream(&self, name: &'static str) -> Result<Stream> {
        self.new_stream(name, Priority::High)
    }

    fn new_stream(&self, name: &'static str, priority: Priority) -> Result<Stream> {
        let context = self.inner.context.as_ref();
        let cuda = context.map(|c| CudaStream::new(c, priority)).transpose()?.map(Arc::new);
        Ok(Stream::new(self.clone(), self.inner.streams.fetch_add(1, Relaxed), name, cuda))
    }

    /// Live and peak bytes by category, and bytes reserved from the system for them.
    pub fn memory(&self) -> MemoryReport {
        self.inner.memory()
    }

    /// Peaks of the memory account count from now on: after steps that were only to warm up.
    pub fn restart_memory_peaks(&self) {
        self.inner.account.restart_peaks();
    }

    /// Refuses to reserve more than `bytes` from the system for tensors from now on; an allocation beyond that is out of
    /// memory.
    pub fn limit_memory(&self, bytes: usize) {
        self.inner.pool.limit(bytes);
    }

    /// Limits the host memory of tensors ([`crate::Tensor::host`]); `None`: as much as the system gives.
    pub fn set_host_budget(&self, bytes: Option<usize>) {
        self.inner.host_pool.set_budget(bytes);
    }

    /// Number of calls and time by kernel since the last call; empty without [`Instrumentation::kernel_times`]. Waits
    /// for running kernels.
    pub fn take_profile(&self) -> Result<Profile> {
        let profile = self.inner.recorders.as_ref().and_then(|w| w.profile.as_ref());
        let Some(profile) = profile else { return Ok(Profile::new()) };
        let mut timings = std::mem::take(&mut *profile.lock().unwrap_or_else(PoisonError::into_inner));
        for (op, start, end) in std::mem::take(&mut timings.queued) {
            timings.add(op, end.since(&start)?);
        }
        Ok(timings.done)
    }

    /// True if launches are checked, timed or traced.
    pub fn is_instrumented(&self) -> bool {
        self.inner.checker.is_some() || self.inner.recorders.is_some()
    }

    /// True if the device was created with [`Instrumentation::race_check`].
    pub fn is_race_checked(&self) -> bool {
        self.inner.checker.is_some()
    }

    /// True if the device was created with [`Instrumentation::trace`].
    pub fn is_traced(&self) -> bool {
        self.tracer().is_some()
    }

    /// Starts recording every launch on every stream, on the device's clock, or resumes a paused trace. Does nothing
    /// unless the device was created with [`Instrumentation::trace`].
    pub fn start_trace(&self) -> Result<()> {
        self.tracer().map_or(Ok(()), |t| t.start(self.inner.context.as_ref()))
    }

    /// Stops recording until the trace is started again.
    pub fn pause_trace(&self) {
        self.tracer().inspect(|t| t.pause());
    }

    /// Ends the trace and returns it, empty if none was started. Waits for running kernels.
    pub fn take_trace(&self) -> Result<Trace> {
        self.tracer().map_or_else(|| Ok(Trace::default()), Tracer::take)
    }

    fn tracer(&self) -> Option<&Tracer> {
        self.inner.recorders.as_ref()?.tracer.as_ref()
    }

    /// Releases cached free memory to the system. Waits for the streams it was used on.
    pub fn trim(&self) -> Result<()> {
        self.inner.pool.release(&self.inner, usize::MAX)?;
        self.inner.host_pool.trim(&self.inner)
    }
}

/// Equal if both are handles to the same device.
impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind() {
            DeviceKind::Cpu if self.is_meta() => f.write_str("meta"),
            DeviceKind::Cpu => f.write_str("cpu"),
            DeviceKind::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}
