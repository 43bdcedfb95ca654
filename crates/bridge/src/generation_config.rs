//! The `generation_config.json` of a folder that is written.

use crate::beside_weights::BesideWeights;
use crate::config::HfConfig;
use crate::error::Result;
use crate::json::{parse_object, read_text};
use crate::model_source::ModelSource;
use serde_json::{Map, Value};
use std::path::Path;

/// The file that names the tokens which begin and end a text.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
const EOS: &str = "eos_token_id";

/// `generation_config.json` with the ids that begin and end a text here, where neither `config` nor that file of the folders names what
/// ends it: transformers' `generate` stops nowhere then, since it does not ask the tokenizer, and `eval` begins with a newline.
/// Of a folder that is followed the tokenizer's own tokens are left as they are. Where the tokenizer is another than that folder's, what
/// its files name is not what ends a text.
pub(crate) fn generation_config(
    found: &ModelSource,
    files: &BesideWeights,
    config: &HfConfig,
) -> Result<Option<String>> {
    let folders = || [files.tokenizer.as_deref(), files.followed].into_iter().flatten();
    let own = folders().map(|dir| dir.join(GENERATION_CONFIG)).find(|path| path.is_file());
    let mut generation = match own {
        Some(path) => parse_object(&read_text(&path)?, &path.display().to_string())?,
        None => Map::new(),
    };
    let replaced = files.followed.is_some() && files.tokenizer.is_some();
    let named = [config.get(EOS), generation.get(EOS)].into_iter().flatten().any(|eos| !eos.is_null());
    if named && !replaced {
        return Ok(None);
    }
    let has_one = |path: &Path| path.is_file() || path.join("tokenizer.json").is_file();
    // A folder named as the tokenizer's may have none.
    let path = match files.like {
        true => files.followed.filter(|dir| has_one(dir)).map(Path::to_path_buf),
        false => None,
    };
    let Some(path) = path.or_else(|| found.tokenizer_path()).filter(|path| has_one(path)) else {
        return Ok(None);
    };
    let text = found.text(Some(&path))?;
    let tokenizer = &text.tokenizer;
    if files.followed.is_some() && !replaced && (tokenizer.bos().is_some() || !tokenizer.eos().is_empty()) {
        return Ok(None);
    }
    let eos = match text.stop[..] {
        [] => return Ok(None),
        [one] => Value::from(one),
        _ => Value::from(text.stop),
    };
    generation.insert(EOS.into(), eos);
    let inside = |id: &u32| (*id as usize) < found.model().vocab;
    if let Some(bos) = tokenizer.bos().filter(inside) {
        generation.insert("bos_token_id".into(), bos.into());
    }
    Ok(Some(format!("{:#}\n", Value::Object(generation))))
}
