//! Hugging Face in and out: configurations, weights, tokenizers and chat templates.

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

pub use config::HfConfig;
pub use error::{Error, Result};
pub use export::{ExportOptions, Exported, Source, Values, export};
pub use logical::{LogicalTensor, logical_tensors};
pub use plan::Plan;
pub use problems::Problem;
