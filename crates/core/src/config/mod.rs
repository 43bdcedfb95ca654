//! Recipes: short TOML files that say what to train and how.
//!
//! Each key is declared once, in `keys.rs`. A [`Recipe`] layers built-in defaults, a file and `--set` values;
//! [`Recipe::resolve`] derives what was left unset, says why, and refuses what cannot work.

mod bad_steps;
mod changes;
mod cuda_graph;
mod data;
mod fault;
mod groups;
mod keys;
mod load;
mod lora;
mod loss;
mod loss_scale;
mod mla;
mod model;
mod moe;
mod moe_checks;
mod mtp;
mod offload;
mod parallel;
mod precision;
mod ramp;
mod recipes;
mod renamed;
mod resolve;
mod schedule;
mod suggest;
mod table;
mod types;
mod unused;
mod validate;
mod write;

pub use changes::{ChangeEffect, DATA_CONTENT, DATA_ORDER, change_effect, differences, refused_changes};
pub use keys::*;
pub use load::{Recipe, STORED_CONFIG};
pub use loss_scale::LossScale;
pub use mla::MlaDims;
pub use recipes::{EmbeddedRecipe, RECIPES};
pub use resolve::{Derived, Resolved, RunPlan};
pub use suggest::{Suggestion, distance, nearest, suggest, suggest_section};
pub use table::{KeyInfo, KeyType, SectionInfo};
pub use types::*;
