//! The commands, one file each. A command takes its arguments and returns its exit code; `main` reports errors.

pub mod bench;
mod bench_calibrate;
mod bench_comm;
mod bench_kernels;
mod bench_ranks;
pub mod chat;
pub mod convert;
pub mod data;
mod data_args;
pub mod doctor;
pub mod drill;
mod dry_run;
pub mod eval;
pub mod explain;
pub mod forward;
pub mod generate;
pub mod kernels;
pub mod launch;
mod next_commands;
pub mod parity;
pub mod plan;
mod plan_output;
pub mod recipes;
pub mod replay;
mod sampling_args;
pub mod train;
mod train_summary;
