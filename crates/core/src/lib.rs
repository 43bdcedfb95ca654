//! Models, data, optimizers, checkpoints and the training loop.

pub mod data;
pub mod error;
pub mod model;
pub mod schedule;

pub use error::{Error, Result};
