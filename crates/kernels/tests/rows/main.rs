//! Row-wise CPU kernels against f64 oracles, on every instruction-set level and thread count, and against
//! golden vectors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod activation;
mod elementwise;
mod math;
mod norm;
mod support;
