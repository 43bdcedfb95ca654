//! Devices: where memory lives and kernels run.

use crate::buffer::Pool;
use crate::checker::Checker;
use crate::memory::Account;
use crate::{Error, MemoryReport, Result, Stream, Threads};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// What kind of processor a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host's cores. Work runs at once, on the calling thread and the compute pool.
    Cpu,
}

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
    ids: AtomicU64,
    streams: AtomicU32,
}

impl DeviceInner {
    pub(crate) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Relaxed)
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
        Device::new(threads, None)
    }

    /// The host's cores, with every access checked for order (design: vector clocks over streams and events).
    pub fn cpu_checked(threads: Threads) -> Device {
        Device::new(threads, Some(Mutex::new(Checker::default())))
    }

    fn new(threads: Threads, checker: Option<Mutex<Checker>>) -> Device {
        let inner = DeviceInner {
            kind: DeviceKind::Cpu,
            threads,
            pool: Pool::default(),
            account: Account::default(),
            checker,
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
