//! The attention of DeepSeek-V3 and GPT-OSS: configurations, weights in and out, logits and gradients against a model
//! by its definition, which is itself held against golden vectors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod full_model;
mod golden;
mod oracle;

#[path = "../support/mod.rs"]
mod support;

use ferrotron_bridge::HfConfig;
use ferrotron_bridge::family::{DEEPSEEK_V3, Family, GPT_OSS};
use serde_json::Value;

/// The family of a configuration.
fn family(json: &Value) -> &'static Family {
    match json["model_type"].as_str() {
        Some("deepseek_v3") => &DEEPSEEK_V3,
        Some("gpt_oss") => &GPT_OSS,
        other => panic!("{other:?}"),
    }
}

/// Read as its family.
fn parse(json: &Value) -> HfConfig {
    try_parse(json).unwrap_or_else(|e| panic!("{e}"))
}

fn try_parse(json: &Value) -> Result<HfConfig, ferrotron_bridge::Error> {
    HfConfig::parse_as(family(json), &json.to_string(), "config.json")
}
