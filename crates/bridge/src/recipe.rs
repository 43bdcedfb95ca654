//! Resolves recipes that name Hugging Face folders, checkpoints or tokenizers.

use crate::chat_encoder::NO_TEMPLATE;
use crate::error::{Error, Result};
use crate::model_source::RunTemplate;
use crate::peft::{Adapters, alpha};
use crate::tokenized;
pub use crate::tokenized::Untokenized;
use crate::tokenizer_of_model::{MAX_RUNS, template_of_start, tokenizer_at, tokenizer_of_start};
use crate::weights::{AdaptedWeights, Weights};
use ferrotron_core::config::{Config, Packing, Recipe, Resolved};
use ferrotron_core::data::{source, vocabulary};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_engine::lora::LoraTargets;
use std::path::{Path, PathBuf};

/// Resolves a recipe, with the architecture of `model.hf` and the end-of-document token of its tokenizer. Returns the
/// weights of `model.hf` if it is set. Text and chat files among the data are tokenized.
pub fn resolve(recipe: &mut Recipe) -> Result<(Resolved, Option<Weights>)> {
    resolve_with(recipe, &|_, _, _| {})
}

/// [`resolve`], telling `progress` which path is being tokenized, the bytes of it that have been read, and all of them.
pub fn resolve_with(
    recipe: &mut Recipe,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<(Resolved, Option<Weights>)> {
    let (mut resolved, weights) = resolve_lengths(recipe, progress)?;
    tokenized::tokenize(&mut resolved, progress)?;
    Ok((resolved, weights))
}

/// [`resolve_with`] for a look at a run: text that has not been tokenized is left alone and returned, unless the length of the
/// run follows from its number of samples.
pub fn resolve_dry(
    recipe: &mut Recipe,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<(Resolved, Vec<Untokenized>)> {
    let (mut resolved, _) = resolve_lengths(recipe, progress)?;
    let left = tokenized::find(&mut resolved)?;
    Ok((resolved, left))
}

fn resolve_lengths(
    recipe: &mut Recipe,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<(Resolved, Option<Weights>)> {
    fill_eod(recipe)?;
    fill_template(recipe)?;
    let mut weights = recipe.config.model.hf.as_ref().map(|dir| Weights::open(Path::new(dir))).transpose()?;
    if let Some(folder) = recipe.config.lora.adapter.clone() {
        weights = Some(with_adapters(recipe, weights, PathBuf::from(folder))?);
    }
    let model = weights.as_ref().map(Weights::model);
    fill_epochs(recipe, model, progress)?;
    Ok((recipe.resolve(model)?, weights))
}

/// The base model with the adapters of `lora.adapter`, which give the recipe rank, alpha, targets and kind. Others of the user's are
/// refused: they would train other adapters.
fn with_adapters(recipe: &mut Recipe, base: Option<Weights>, folder: PathBuf) -> Result<Weights> {
    let wrong = |what: String| Err(Error::config(&folder.display().to_string(), what));
    let Some(base) = base else {
        let what = "needs the base model of the adapters; name its folder with model.hf";
        return Err(Error::key("lora.adapter", what));
    };
    let config = base.hf_config()?;
    let adapters = Adapters::from_peft(&folder, &config)?;
    let Some((_, first)) = adapters.iter().next() else { return wrong("holds no adapter".into()) };
    if let Some((module, other)) =
        adapters.iter().find(|(_, a)| a.rank != first.rank || (a.scale - first.scale).abs() > 1e-9)
    {
        return wrong(format!(
            "has adapters of rank {} and scale {}, and of rank {} and scale {} ({module}); one of each can be trained further",
            first.rank, first.scale, other.rank, other.scale
        ));
    }
    let dora = first.magnitude.is_some();
    if let Some((module, _)) = adapters.iter().find(|(_, a)| a.magnitude.is_some() != dora) {
        return wrong(format!("has DoRA's adapters and others ({module}); one kind can be trained further"));
    }
    if recipe.is_users("lora.dora") && recipe.config.lora.dora != dora {
        let held = if dora { "DoRA's adapters" } else { "adapters without DoRA" };
        return wrong(format!("has {held}; leave out lora.dora, which it gives"));
    }
    let lora = &recipe.config.lora;
    let given = alpha(first.rank, first.scale);
    if recipe.is_users("lora.rank") && lora.rank != first.rank {
        return wrong(format!("has adapters of rank {}; leave out lora.rank, which it gives", first.rank));
    }
    if recipe.is_users("lora.alpha") && lora.alpha.is_some_and(|a| (a / given - 1.0).abs() > 1e-9) {
        return wrong(format!("has adapters with an alpha of {given}; leave out lora.alpha, which it gives"));
    }
    let targets = match recipe.is_users("lora.targets") {
        true => lora.targets.0.clone(),
        false => adapters.targets(&config)?,
    };
    let chosen = LoraTargets { include: targets.clone(), exclude: lora.exclude.0.clone() };
    if let Some(module) = adapters.first_apart(&config, &chosen)? {
        let held = if adapters.get(&module).is_some() { "an adapter" } else { "no adapter" };
        return wrong(format!(
            "has {held} for {module}; leave out lora.targets, which it gives, and lora.exclude"
        ));
    }
    recipe.put_key("lora.rank", first.rank as i64)?;
    recipe.put_key("lora.alpha", given)?;
    recipe.put_key("lora.targets", targets)?;
    recipe.put_key("lora.dora", dora)?;
    let apart = adapters.with_own_a().filter(|_| recipe.config.lora.fused);
    if !recipe.is_set("lora.fused") && adapters.share_a() {
        recipe.put_key("lora.fused", true)?;
    } else if apart.is_some() && !recipe.is_users("lora.fused") {
        recipe.put_key("lora.fused", false)?;
    } else if let Some((a, b)) = apart {
        return wrong(format!(
            "has an A each for {a} and {b}, which lora.fused would join; leave out lora.fused"
        ));
    }
    Ok(Weights::Adapted(Box::new(AdaptedWeights { base, adapters, folder, apart: true })))
}

/// Turns `train.epochs` into `train.tokens`, which needs the data. Where samples differ in length, epochs and tokens become
/// `train.steps`.
fn fill_epochs(
    recipe: &mut Recipe,
    model: Option<&ModelConfig>,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<()> {
    let train = &recipe.config.train;
    let (epochs, tokens) = (train.epochs, train.tokens.map(|t| t.0));
    let varies = recipe.config.data.packing == Packing::PaddingFree;
    if epochs.is_none() && (tokens.is_none() || train.steps.is_some() || !varies) {
        return Ok(());
    }
    recipe.check_values()?;
    // Sequence length and split are known once the recipe is resolved with any length of the run.
    let mut trial = recipe.clone();
    trial.put_key("train.steps", 1i64 << 30)?;
    let mut trial = trial.resolve(model)?;
    tokenized::tokenize(&mut trial, progress)?;
    let (each, varying) = source::epoch(&trial)?;
    let epochs = match (epochs, tokens) {
        (Some(epochs), _) => epochs,
        (None, tokens) => tokens.unwrap_or(0) as f64 / each.max(1) as f64,
    };
    match varying {
        Some(samples) => {
            let steps = recipe.steps_for_samples((samples.count as f64 * epochs).ceil() as u64);
            Ok(recipe.put_key("train.steps", i64::try_from(steps.max(1)).unwrap_or(i64::MAX))?)
        }
        None => {
            let tokens = each as f64 * epochs;
            Ok(recipe.put_key("train.tokens", (tokens.round() as i64).max(1))?)
        }
    }
}

/// Checks the data of a recipe against its model and tokenizer, before any rank starts: every id is inside the
/// vocabulary, and the data was made with the run's tokenizer. Returns notes for the user.
pub fn check_data(resolved: &Resolved) -> Result<Vec<String>> {
    let tokenizer = tokenizer_path(&resolved.config).map(|path| tokenizer_at(&path)).transpose()?;
    Ok(vocabulary::check(resolved, tokenizer.map(|t| t.info()).as_ref())?)
}

/// The end-of-document token of the data's tokenizer, where the recipe names a tokenizer and no token.
fn fill_eod(recipe: &mut Recipe) -> Result<()> {
    let c = &recipe.config;
    if c.data.eod.is_some() {
        return Ok(());
    }
    let Some(path) = tokenizer_path(c) else { return Ok(()) };
    if let Some(eod) = tokenizer_at(&path)?.eos().first() {
        recipe.put_key("data.eod", i64::from(*eod))?;
    }
    Ok(())
}

/// The chat template of the run that this one starts from, where the recipe names neither a template nor a tokenizer.
fn fill_template(recipe: &mut Recipe) -> Result<()> {
    let c = &recipe.config;
    let Some(start) = &c.model.hf else { return Ok(()) };
    if c.data.chat_template.is_some() || c.data.tokenizer.is_some() || c.data.is_embedded() {
        return Ok(());
    }
    match template_of_start(Path::new(start), MAX_RUNS)? {
        None => Ok(()),
        Some(RunTemplate::None) => Ok(recipe.put_key("data.chat_template", NO_TEMPLATE)?),
        Some(RunTemplate::File(path)) => {
            Ok(recipe.put_key("data.chat_template", path.display().to_string())?)
        }
    }
}

/// The tokenizer that a recipe names: its own, or that of `model.hf`.
pub fn tokenizer_path(c: &Config) -> Option<PathBuf> {
    match (&c.data.tokenizer, &c.model.hf) {
        (Some(named), _) => Some(PathBuf::from(named)),
        // A folder without a tokenizer is fine: the recipe then names the one of its data.
        (None, Some(hf)) => tokenizer_of_start(Path::new(hf), MAX_RUNS),
        (None, None) => None,
    }
}
