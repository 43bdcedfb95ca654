//! Hugging Face in and out: configurations, weights, tokenizers and chat templates.

pub mod chat;
pub mod config;
mod convert;
pub mod dataset;
mod error;
mod expected;
pub mod export;
pub mod family;
pub mod forward;
mod json;
pub mod logical;
pub mod open;
mod plan;
mod problems;
mod quantised;
mod read;
pub mod recipe;
mod shards;
mod stored;
pub mod tokenizer;
pub mod transfer;
mod view;
pub mod weights;

pub use chat::{ChatTemplate, Message};
pub use config::HfConfig;
pub use error::{Error, Result};
pub use expected::{HfPart, HfTensor};
pub use export::{ExportOptions, Exported, Source, Values, assemble, export};
pub use logical::{LogicalTensor, logical_buffers, logical_tensors};
pub use open::{Found, Text};
pub use plan::Plan;
pub use problems::Problem;
pub use stored::Stored;
pub use tokenizer::{TextStream, Tokenizer, byte_tokenizer_json};
pub use view::View;
pub use weights::Weights;
