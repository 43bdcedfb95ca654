#![no_main]
//! Hugging Face config.json.

use libfuzzer_sys::fuzz_target;
use ferrotron_bridge::HfConfig;

fuzz_target!(|text: &str| {
    let _ = HfConfig::parse(text, "config.json");
});
