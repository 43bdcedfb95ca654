//! Faults of a run: injecting them, finding whose bits differ between two runs of the same steps, ranks that are slower than
//! others, and the time that ends.

pub mod culprit;
pub mod health;
pub mod inject;
pub mod sections;
pub mod stragglers;
pub mod time_limit;
pub(crate) mod timeouts;
