#![no_main]
//! Hugging Face `config.json`: parse and map to a model.

use libfuzzer_sys::fuzz_target;
use ferrotron_bridge::HfConfig;

fuzz_target!(|text: &str| {
    let _ = HfConfig::parse(text, "config.json");
});
