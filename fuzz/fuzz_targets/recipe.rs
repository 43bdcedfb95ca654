#![no_main]
//! TOML recipes: parse, layer, resolve.

use libfuzzer_sys::fuzz_target;
use ferrotron_core::config::Recipe;

fuzz_target!(|text: &str| {
    if let Ok(mut recipe) = Recipe::named("tiny")
        && recipe.add("fuzz.toml", text).is_ok()
    {
        let _ = recipe.resolve(None);
    }
});
