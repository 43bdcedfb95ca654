//! CPU kernels on slices against f64 references, on every instruction-set level and thread count, and against golden vectors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod activation;
mod cross_entropy;
mod elementwise;
mod embedding;
#[allow(dead_code)]
mod golden;
mod golden_loss;
mod golden_optim;
mod golden_rope;
mod math;
mod moments;
mod norm;
mod optimizer;
mod random;
mod rope;
mod support;
