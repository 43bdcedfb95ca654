//! Decoder models.

pub mod config;
pub mod flops;
pub mod preset;
pub mod validate;
