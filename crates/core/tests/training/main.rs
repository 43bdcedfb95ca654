//! Training end to end: deterministic, and every architecture learns.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod architectures;
mod best_eval;
mod bits;
mod chat;
mod data;
mod evaluation;
mod f16;
mod failures;
mod forward_backward;
mod fp8_scales;
mod launched_ahead;
mod lora;
mod loss;
mod mlp_chunk;
mod optimizer_state;
mod param_groups;
mod ranks;
mod support;
mod undeletable;
