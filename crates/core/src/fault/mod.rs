//! Faults: injecting them, and finding whose bits differ between two runs of the same steps.

pub mod culprit;
pub mod inject;
