//! The `generation_config.json` of a folder that is written.

use crate::config::HfConfig;
use crate::error::Result;
use crate::json::{parse_object, read_text};
use crate::model_source::{ModelSource, tokenizer_at};
use serde_json::{Map, Value};
use std::path::Path;

/// The file that names the tokens which begin and end a text.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
const EOS: &str = "eos_token_id";

/// `generation_config.json` with the ids that begin and end a text, where neither `config` nor that file in `files` names what
/// ends it: transformers' `generate` stops nowhere then, since it does not ask the tokenizer, and `eval` begins with a newline.
/// Of a folder that is followed (`like`) the tokenizer's own tokens are left as they are.
pub(crate) fn generation_config(
    found: &ModelSource,
    files: Option<&Path>,
    config: &HfConfig,
    like: bool,
) -> Result<Option<String>> {
    let own = files.map(|dir| dir.join(GENERATION_CONFIG)).filter(|path| path.is_file());
    let mut generation = match own {
        Some(path) => parse_object(&read_text(&path)?, &path.display().to_string())?,
        None => Map::new(),
    };
    if [config.get(EOS), generation.get(EOS)].into_iter().flatten().any(|eos| !eos.is_null()) {
        return Ok(None);
    }
    let path = files.map(Path::to_path_buf).filter(|dir| dir.join("tokenizer.json").is_file());
    // A folder named as the tokenizer's may have none.
    let named = || found.tokenizer_path().filter(|p| p.is_file() || p.join("tokenizer.json").is_file());
    let Some(path) = path.or_else(named) else { return Ok(None) };
    let tokenizer = tokenizer_at(&path)?;
    if like && (tokenizer.bos().is_some() || !tokenizer.eos().is_empty()) {
        return Ok(None);
    }
    let inside = |id: &u32| (*id as usize) < found.model().vocab;
    let eod = found.config.as_ref().and_then(|c| c.data.eod);
    let mut ends: Vec<u32> = tokenizer.eos().iter().copied().chain(eod).filter(inside).collect();
    ends.dedup();
    let eos = match ends[..] {
        [] => return Ok(None),
        [one] => Value::from(one),
        _ => Value::from(ends),
    };
    generation.insert(EOS.into(), eos);
    if let Some(bos) = tokenizer.bos().filter(inside) {
        generation.insert("bos_token_id".into(), bos.into());
    }
    Ok(Some(format!("{:#}\n", Value::Object(generation))))
}
