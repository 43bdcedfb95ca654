//! Devices: where memory lives and kernels run.

use crate::buffer::Pool;
use crate::checker::Checker;
use crate::memory::Account;
use crate::{Error, MemoryReport, Result, Stream, Threads};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What kind of processor a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host's cores. Work runs at once, on the calling thread and the compute pool.
    Cpu,
}

/// What a device notes about every launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// Check the order of memory accesses (vector clocks over streams and events).
    pub order: bool,
    /// Add up the time of each kernel.
    pub time: bool,
}

/// Calls and time by kernel.
pub type Profile = BTreeMap<&'static str, (u64, Duration)>;

/// A handle to a device; cloning shares it.
#[derive(Clone)]
pub struct Device {
    pub(crate) inner: Arc<DeviceInner>,
}

pub(crate) struct DeviceInner {
    pub(crate) kind: DeviceKind,
    pub(crate) threads: Threads,
    pub(crate) pool: Pool,
    pub(crate) account: Account,
    checker: Option<Mutex<Checker>>,
    profile: Option<Mutex<Profile>>,
    ids: AtomicU64,
    streams: AtomicU32,
}

impl DeviceInner {
    pub(crate) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Relaxed)
    }

    /// Run a kernel, noting its time if that is watched.
    pub(crate) fn timed<T>(&self, op: &'static str, f: impl FnOnce() -> T) -> T {
        let Some(profile) = &self.profile else { return f() };
        let start = std::time::Instant::now();
        let out = f();
        let mut profile = profile.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = profile.entry(op).or_default();
        *entry = (entry.0 + 1, entry.1 + start.elapsed());
        out
    }

    /// Run `f` on the checker, if there is one.
    pub(crate) fn check(&self, f: impl FnOnce(&mut Checker) -> Result<(), String>) -> Result<()> {
        match &self.checker {
            None => Ok(()),
            Some(c) => f(&mut c.lock().unwrap_or_else(PoisonError::into_inner)).map_err(Error::Race),
        }
    }
}

impl Device {
    /// The host's cores.
    pub fn cpu(threads: Threads) -> Device {
        Device::cpu_watched(threads, Watch::default())
    }

    /// The host's cores under observation.
    pub fn cpu_watched(threads: Threads, watch: Watch) -> Device {
        let checker = watch.order.then(Mutex::default);
        let profile = watch.time.then(Mutex::default);
        let inner = DeviceInner {
            kind: DeviceKind::Cpu,
            threads,
            pool: Pool::default(),
            account: Account::default(),
            checker,
            profile,
            ids: AtomicU64::new(1),
            streams: AtomicU32::new(0),
        };
        Device { inner: Arc::new(inner) }
    }

    /// What kind of processor it is.
    pub fn kind(&self) -> DeviceKind {
        self.inner.kind
    }

    /// The compute pool of a CPU device.
    pub fn threads(&self) -> &Threads {
        &self.inner.threads
    }

    /// A new queue of work.
    pub fn stream(&self, name: &'static str) -> Stream {
        Stream::new(self.clone(), self.inner.streams.fetch_add(1, Relaxed), name)
    }

    /// Live and peak bytes by category.
    pub fn memory(&self) -> MemoryReport {
        self.inner.account.report()
    }

    /// Calls and time by kernel since the last call, if time is watched.
    pub fn take_profile(&self) -> Profile {
        match &self.inner.profile {
            Some(p) => std::mem::take(&mut *p.lock().unwrap_or_else(PoisonError::into_inner)),
            None => Profile::new(),
        }
    }

    /// Hands cached free memory back to the system.
    pub fn trim(&self) {
        self.inner.pool.trim();
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.inner.kind)
    }
}
