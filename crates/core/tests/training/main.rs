//! Training as a whole: the same bits from the same inputs however it is run, and every architecture learns.

mod architectures;
mod bits;
mod data;
mod passes;
mod support;
