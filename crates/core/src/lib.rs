//! Models, data, optimizers, checkpoints and the training loop.

pub mod bench;
pub mod checkpoint;
pub mod config;
pub mod cost;
pub mod data;
pub mod dry_run;
pub mod error;
pub mod events;
pub mod fault;
pub mod fs;
pub mod grid;
pub mod model;
pub mod optimizer;
pub mod parity;
pub mod pipeline;
pub mod plan;
pub mod profile;
pub mod ranks;
pub mod schedule;
pub mod tensorfile;
pub mod train;

pub use error::{Error, Result};
