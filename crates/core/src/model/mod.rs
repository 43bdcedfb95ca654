//! Decoder models: architecture, modules, and one description of what they hold, compute and send.

mod chunk;
mod chunk_units;
pub mod config;
mod declare;
mod decoder;
pub mod description;
mod feed_forward;
pub mod generate;
mod layer;
mod layer_split;
mod layout_string;
mod loaded;
pub mod moe_config;
mod mtp;
pub mod mtp_config;
mod pipeline_layout;
mod pre_norm;
pub mod preset;
mod saved_layers;
mod score;
pub mod upcycle;
pub mod validate;

pub use chunk::{Chunk, ChunkSaved, ForwardMode};
pub(crate) use chunk_units::ChunkUnits;
pub use config::{ModelConfig, ModelSizes};
pub use decoder::{Decoder, Input, InputOptions, ModelOptions, MtpInput};
pub use description::{LinearInfo, logical_buffers, logical_parts, logical_specs, module_of};
pub use layer_split::{LayerPlacement, LayerSplit, Stage};
pub use loaded::{Model, set_expert_biases, set_quantiles};
pub use moe_config::MoeConfig;
pub(crate) use moe_config::moe_layer_index;
pub use mtp_config::{MtpConfig, MtpTraining};
pub use pipeline_layout::PipelineLayout;
pub use score::Sequence;
