//! Models, data, optimizers, checkpoints and the training loop.

pub mod checkpoint;
pub mod error;
pub mod model;
pub mod tensorfile;
