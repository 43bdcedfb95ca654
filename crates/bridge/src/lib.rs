//! Hugging Face checkpoints in and out: `config.json`, weights, tokenizers and chat templates.

mod cast;
pub mod chat;
pub mod config;
pub mod conversion;
pub mod dataset;
mod error;
mod expected;
pub mod export;
pub mod family;
pub mod forward;
mod hf_checkpoint;
mod json;
pub mod logical;
pub mod model_source;
mod native_checkpoint;
mod problems;
mod quantized;
mod read_tensor;
pub mod recipe;
mod shards;
pub mod tokenizer;
mod view;
pub mod weights;

pub use chat::{ChatTemplate, Message};
pub use config::HfConfig;
pub use error::{Error, Result};
pub use expected::{HfPart, HfTensor};
pub use export::{ExportOptions, ExportSummary, TensorData, TensorSource, assemble, export};
pub use hf_checkpoint::HfCheckpoint;
pub use logical::{LogicalTensor, logical_buffers, logical_tensors};
pub use model_source::{ModelSource, TextIo};
pub use native_checkpoint::NativeCheckpoint;
pub use problems::Problem;
pub use tokenizer::{TextStream, Tokenizer, byte_tokenizer_json};
pub use view::View;
pub use weights::Weights;
