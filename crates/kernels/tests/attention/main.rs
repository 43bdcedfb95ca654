//! Attention against an explicit f64 oracle, against golden vectors, and under hostile conditions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod golden;
mod hostile;
mod launch;
mod oracle;
mod sweep;
