//! How long a rank waits for others: the job's limit, or less where the run knows how long things take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Shared by all groups of a rank, or by a process and its monitor.
#[derive(Clone, Debug)]
pub(crate) struct Timeout {
    limit: Duration,
    nanos: Arc<AtomicU64>,
}

impl Timeout {
    pub(crate) fn new(limit: Duration) -> Timeout {
        Timeout { limit, nanos: Arc::new(AtomicU64::new(nanos(limit))) }
    }

    pub(crate) fn get(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }

    /// From the next wait on; never more than the limit.
    pub(crate) fn set(&self, timeout: Duration) {
        self.nanos.store(nanos(timeout.min(self.limit)), Ordering::Relaxed);
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_never_above_the_limit() {
        let timeout = Timeout::new(Duration::from_secs(20));
        let group = timeout.clone();
        timeout.set(Duration::from_secs(3));
        assert_eq!(group.get(), Duration::from_secs(3));
        timeout.set(Duration::MAX);
        assert_eq!(group.get(), Duration::from_secs(20));
        assert!(Timeout::new(Duration::MAX).get() > Duration::from_secs(1 << 32));
    }
}
