//! Recipes: layers, suggestions, derived values, refusals, and damaged files.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod damaged;
mod layers;
mod refused;
mod resolved;

use ferrotron_core::Error;
use ferrotron_core::config::Recipe;

fn add(text: &str) -> Result<Recipe, Error> {
    let mut recipe = Recipe::default();
    recipe.add("r.toml", text).map(|()| recipe)
}

fn fails(text: &str) -> String {
    match add(text).and_then(|r| r.resolve(None)) {
        Ok(_) => panic!("should be refused:\n{text}"),
        Err(e) => one_sentence(&e),
    }
}

fn one_sentence(e: &Error) -> String {
    let text = e.to_string();
    assert!(!text.contains('\n') && !text.is_empty(), "{text:?}");
    assert!(e.hint().is_none_or(|h| !h.contains('\n')));
    text
}

const TINY: &str = "model.preset = \"tiny\"\ntrain.steps = 10\n";
