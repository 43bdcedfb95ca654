//! Being requested to stop. The first Ctrl-C or SIGTERM raises a flag, and the run saves and ends at the next step;
//! the second ends the program at once.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The flag that asks a run to stop. Cloning shares it.
#[derive(Clone, Debug)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Listens to SIGINT and SIGTERM from now on.
    pub fn listen() -> anyhow::Result<StopFlag> {
        let requested = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the flag must still be down when the first signal looks at it.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&requested))?;
            flag::register(signal, Arc::clone(&requested))?;
        }
        Ok(StopFlag(requested))
    }

    /// Has someone asked?
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
