#![no_main]
//! `events.jsonl`: parse every line.

use libfuzzer_sys::fuzz_target;
use ferrotron_core::events;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let _ = events::parse(Path::new("events.jsonl"), bytes);
});
