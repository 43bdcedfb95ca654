//! Training as a whole: the same bits from the same inputs however it is run, and every architecture learns.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod architectures;
mod bits;
mod data;
mod half;
mod moments;
mod passes;
mod scales;
mod support;
mod together;
