//! Models, data, optimizers, checkpoints and the training loop.

pub mod model;
