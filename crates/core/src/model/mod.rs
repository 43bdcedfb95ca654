//! Decoder models.

pub mod config;
mod decoder;
pub mod flops;
pub mod generate;
mod layer;
mod loaded;
pub mod preset;
pub mod validate;

pub use config::ModelConfig;
pub use decoder::{Decoder, DecoderSaved, Input};
pub use loaded::Model;
