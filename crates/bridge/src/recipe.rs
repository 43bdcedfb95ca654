//! Resolves recipes that name Hugging Face folders, checkpoints or tokenizers.

use crate::error::Result;
use crate::model_source::{COMPANIONS, tokenizer_at};
use crate::weights::Weights;
use ferrotron_core::config::{Recipe, Resolved};
use std::path::{Path, PathBuf};

/// Resolves a recipe, with the architecture of `model.hf` and the end-of-document token of its tokenizer. Returns the
/// weights of `model.hf` if it is set.
pub fn resolve(recipe: &mut Recipe) -> Result<(Resolved, Option<Weights>)> {
    fill_eod(recipe)?;
    let weights = recipe.config.model.hf.as_ref().map(|dir| Weights::open(Path::new(dir))).transpose()?;
    let resolved = recipe.resolve(weights.as_ref().map(Weights::model))?;
    Ok((resolved, weights))
}

/// The end-of-document token of the data's tokenizer, where the recipe names a tokenizer and no token.
fn fill_eod(recipe: &mut Recipe) -> Result<()> {
    let c = &recipe.config;
    if c.data.eod.is_some() {
        return Ok(());
    }
    let path = match (&c.data.tokenizer, &c.model.hf) {
        (Some(named), _) => Some(PathBuf::from(named)),
        // A folder without a tokenizer is fine: the recipe then names the one of its data.
        (None, Some(hf)) => [PathBuf::from(hf), Path::new(hf).join(COMPANIONS)]
            .into_iter()
            .find(|dir| dir.join("tokenizer.json").is_file()),
        (None, None) => None,
    };
    let Some(path) = path else { return Ok(()) };
    if let Some(eod) = tokenizer_at(&path)?.eos().first() {
        recipe.put_key("data.eod", i64::from(*eod))?;
    }
    Ok(())
}
