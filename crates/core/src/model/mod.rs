//! Decoder models.

mod chunk;
pub mod config;
mod decoder;
mod ffn;
pub mod flops;
pub mod generate;
mod layer;
mod loaded;
mod maps;
pub mod moe;
pub mod mtp;
mod predictions;
pub mod preset;
pub mod upcycle;
pub mod validate;

pub use chunk::{Chunk, ChunkSaved, Goal};
pub use config::ModelConfig;
pub use decoder::{Ahead, Decoder, Input, Settings, Stages, logical_buffers, logical_parts};
pub use loaded::{Model, set_expert_biases};
pub use maps::Map;
pub use moe::MoeConfig;
pub use mtp::{MtpConfig, MtpTraining};
