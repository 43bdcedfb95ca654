//! Interruption by SIGINT or SIGTERM. The first signal sets a flag, and the run saves a checkpoint and exits after the
//! current step; the second exits at once.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The flag that a signal sets. Clones share it.
#[derive(Clone, Debug)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Installs the handlers of SIGINT and SIGTERM.
    pub fn listen() -> anyhow::Result<StopFlag> {
        let requested = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // Registered first: this handler exits if the flag is set, so the first signal must see it unset.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&requested))?;
            flag::register(signal, Arc::clone(&requested))?;
        }
        Ok(StopFlag(requested))
    }

    /// True once a signal has arrived.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_only_asks() {
        let stop = StopFlag::listen().unwrap();
        assert!(!stop.requested());
        signal_hook::low_level::raise(SIGTERM).unwrap();
        assert!(stop.requested() && stop.clone().requested());
    }
}
