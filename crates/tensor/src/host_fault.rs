//! Faults of host memory that tests inject on any device.

use crate::{Device, Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

/// What a system may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostFault {
    /// Pinned memory is refused from now on.
    PinnedRefused,
    /// Pinned memory is refused from now on where the tensors of a device, with free blocks, would have more than so many bytes.
    PinnedLimit(usize),
    /// After so many more copies between the device and host memory, one fails.
    CopyFails {
        /// Copies that succeed.
        after: u32,
    },
}

/// The faults of a device.
#[derive(Default)]
pub(crate) struct HostFaults {
    pinned_refused: AtomicBool,
    /// Most bytes of pinned memory; 0: no limit.
    pinned_limit: AtomicUsize,
    /// Copies until one fails, that one included; 0: none will.
    copies: AtomicU32,
}

impl HostFaults {
    /// An error if pinned memory is to be refused to a device that would then have `bytes`.
    pub(crate) fn check_pinned(&self, bytes: usize) -> Result<()> {
        let limit = self.pinned_limit.load(Relaxed);
        match self.pinned_refused.load(Relaxed) || (limit > 0 && bytes > limit) {
            true => Err(Error::Cuda { op: "pinned memory", what: "refused by a test".into() }),
            false => Ok(()),
        }
    }

    /// An error if this copy is to fail.
    pub(crate) fn check_copy(&self, op: &'static str) -> Result<()> {
        let before = self.copies.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        match before {
            Ok(1) => Err(Error::Cuda { op, what: "failed by a test".into() }),
            _ => Ok(()),
        }
    }
}

impl Device {
    /// Makes host memory fail as a system may, for tests.
    pub fn inject(&self, fault: HostFault) {
        let faults = &self.inner.host_faults;
        match fault {
            HostFault::PinnedRefused => faults.pinned_refused.store(true, Relaxed),
            HostFault::PinnedLimit(bytes) => faults.pinned_limit.store(bytes, Relaxed),
            HostFault::CopyFails { after } => faults.copies.store(after.saturating_add(1), Relaxed),
        }
    }
}
