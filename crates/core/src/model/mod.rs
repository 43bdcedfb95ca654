//! Decoder models.

mod chunk;
pub mod config;
mod decoder;
mod feed_forward;
pub mod flops;
pub mod generate;
mod layer;
mod linears;
mod loaded;
pub mod moe_config;
mod mtp;
pub mod mtp_config;
pub mod preset;
pub mod upcycle;
pub mod validate;

pub use chunk::{Chunk, ChunkSaved, ForwardMode};
pub use config::ModelConfig;
pub use decoder::{Decoder, Input, ModelOptions, MtpInput, PipelineLayout, logical_buffers, logical_parts};
pub use linears::LinearInfo;
pub use loaded::{Model, set_expert_biases};
pub use moe_config::MoeConfig;
pub use mtp_config::{MtpConfig, MtpTraining};
