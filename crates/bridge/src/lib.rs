//! Hugging Face in and out: configurations, weights, tokenizers and chat templates.

pub mod chat;
pub mod config;
mod convert;
mod error;
mod expected;
pub mod export;
pub mod family;
pub mod forward;
mod json;
pub mod logical;
mod plan;
mod problems;
mod shards;
pub mod tokenizer;

pub use chat::{ChatTemplate, Message};
pub use config::HfConfig;
pub use error::{Error, Result};
pub use expected::HfTensor;
pub use export::{ExportOptions, Exported, Source, Values, assemble, export};
pub use logical::{LogicalTensor, logical_tensors};
pub use plan::Plan;
pub use problems::Problem;
pub use tokenizer::{TextStream, Tokenizer, byte_tokenizer_json};
