//! Decoder models.

pub mod config;
