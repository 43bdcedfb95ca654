//! Models, data, optimizers, checkpoints and the training loop.

pub mod config;
pub mod error;
pub mod events;
pub mod model;

pub use error::{Error, Result};
