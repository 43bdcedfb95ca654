//! Decoder models.

mod chunk;
pub mod config;
mod decoder;
pub mod flops;
pub mod generate;
mod layer;
mod loaded;
mod maps;
pub mod preset;
pub mod validate;

pub use chunk::{Chunk, ChunkSaved, Goal};
pub use config::ModelConfig;
pub use decoder::{Decoder, Input, Stages, logical_parts};
pub use loaded::Model;
pub use maps::Map;
