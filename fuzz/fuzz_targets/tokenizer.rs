#![no_main]
//! tokenizer.json: parse, encode, decode.

use libfuzzer_sys::fuzz_target;
use ferrotron_bridge::Tokenizer;

fuzz_target!(|text: &str| {
    if let Ok(tokenizer) = Tokenizer::from_json(text, "tokenizer.json")
        && let Ok(ids) = tokenizer.encode("a sample of text")
    {
        let _ = tokenizer.decode(&ids);
    }
});
