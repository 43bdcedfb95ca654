//! Attention on the CPU against an f64 reference, against golden vectors, and on extreme inputs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod golden;
mod hostile;
mod launch;
mod oracle;
mod sweep;

#[path = "../../../../tests/support/rng.rs"]
mod rng;
