//! The weight files of a folder: one `model.safetensors`, or several under an index.

use crate::error::{Error, Result};
use crate::json::{Object, parse_object, read_text};
use crate::problems::Problem;
use ferrotron_core::tensorfile::{TensorFile, TensorInfo};
use std::collections::BTreeMap;
use std::path::Path;

/// The weight file of a model that fits one.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The index that maps tensors to files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Weights as old versions of transformers saved them: one file, or the index of several.
const PICKLES: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// One open weight file.
#[derive(Debug)]
pub(crate) struct Shard {
    /// File name.
    pub name: String,
    pub file: TensorFile,
}

/// The weight files of a folder, headers read and checked.
#[derive(Debug)]
pub(crate) struct Shards {
    pub files: Vec<Shard>,
    /// The text of the index file.
    pub index: Option<String>,
}

impl Shards {
    /// Opens every weight file. Contradictions between index and files are added to `problems`.
    pub fn open(dir: &Path, problems: &mut Vec<Problem>) -> Result<Shards> {
        let single = dir.join(SINGLE);
        let index = dir.join(INDEX);
        // As in transformers, the single file takes precedence.
        if single.exists() {
            let file = TensorFile::open(&single)?;
            return Ok(Shards { files: vec![Shard { name: SINGLE.into(), file }], index: None });
        }
        if !index.exists() && PICKLES.iter().any(|name| dir.join(name).is_file()) {
            let what =
                "has its weights in pytorch_model.bin, a pickle; save it again with safe_serialization=True";
            return Err(Error::unsupported(&dir.display().to_string(), what));
        }
        if !index.exists() {
            let what = format!("has neither {SINGLE} nor {INDEX}; only safetensors weights can be read");
            return Err(Error::config(&dir.display().to_string(), what));
        }
        let text = read_text(&index)?;
        let places = places(&text, &index.display().to_string())?;
        let open = |name: String| Ok(Shard { file: TensorFile::open(&dir.join(&name))?, name });
        let files = file_names(&places, &index)?.into_iter().map(open).collect::<Result<_>>()?;
        let shards = Shards { files, index: Some(text) };
        shards.compare(&places, problems);
        Ok(shards)
    }

    fn compare(&self, places: &BTreeMap<String, String>, problems: &mut Vec<Problem>) {
        for (tensor, place) in places {
            if !self.files.iter().any(|s| s.name == *place && s.file.get(tensor).is_some()) {
                let how = format!("the index says it is in {place}, which does not have it");
                problems.push(Problem::Wrong(tensor.clone(), how));
            }
        }
        for (shard, t) in self.tensors() {
            if places.get(&t.name).is_none_or(|place| *place != shard.name) {
                let how = format!("is in {}, but the index does not say so", shard.name);
                problems.push(Problem::Wrong(t.name.clone(), how));
            }
        }
    }

    /// Every tensor with its file, in file order.
    pub fn tensors(&self) -> impl Iterator<Item = (&Shard, &TensorInfo)> {
        self.files.iter().flat_map(|s| s.file.tensors().iter().map(move |t| (s, t)))
    }
}

/// The weight files that a folder's index names.
pub(crate) fn shard_names(dir: &Path) -> Result<Vec<String>> {
    let index = dir.join(INDEX);
    file_names(&places(&read_text(&index)?, &index.display().to_string())?, &index)
}

/// The files of an index, sorted. A name with a path in it could reach outside the folder.
fn file_names(places: &BTreeMap<String, String>, index: &Path) -> Result<Vec<String>> {
    let mut names: Vec<String> = places.values().cloned().collect();
    names.sort_unstable();
    names.dedup();
    let plain =
        |n: &str| n.ends_with(".safetensors") && !n.contains(['/', '\\', ':', '\0']) && !n.starts_with('.');
    match names.iter().find(|n| !plain(n)) {
        Some(name) => {
            let what = format!("{name:?} is not the name of a weight file");
            Err(Error::config(&index.display().to_string(), what))
        }
        None => Ok(names),
    }
}

fn places(text: &str, origin: &str) -> Result<BTreeMap<String, String>> {
    let map = parse_object(text, origin)?;
    let o = Object { map: &map, origin, under: "" };
    let places = o.object("weight_map")?.ok_or_else(|| o.missing("weight_map"))?;
    let inner = Object { map: places, origin, under: "weight_map." };
    places
        .iter()
        .map(|(tensor, place)| match place.as_str() {
            Some(place) => Ok((tensor.clone(), place.to_string())),
            None => Err(inner.mistyped(tensor, place, "a file name")),
        })
        .collect()
}
