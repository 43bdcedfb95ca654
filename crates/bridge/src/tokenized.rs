//! Text and chat files named as training data: tokenized once into a cache of `.bin/.idx` pairs.

use crate::chat_encoder::ChatEncoder;
use crate::dataset::{DatasetOptions, Eod, build, folder_of, inputs, pair_paths};
use crate::error::{Error, Result};
use crate::model_source::tokenizer_at;
use crate::recipe::tokenizer_path;
use crate::tokenizer::Tokenizer;
use ferrotron_core::config::{Config, Resolved};
use ferrotron_core::data::digest::file_digest;
use ferrotron_core::data::{DatasetInfo, IndexedDataset};
use ferrotron_core::fs::TargetLock;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Changes whenever the same input would give other tokens or masks.
const VERSION: u32 = 5;
/// Another process may be tokenizing the same files.
const PATIENCE: Duration = Duration::from_secs(6 * 3600);

/// A text that the cache does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Untokenized {
    /// As `data.path` has it.
    pub path: String,
    /// Bytes of its files.
    pub bytes: u64,
}

/// Tokenizes the text and chat files among the data of a recipe, unless the cache has them already, and points
/// `resolved.pairs` at the result. `progress` gets the path, and the bytes read and in total.
pub fn tokenize(resolved: &mut Resolved, progress: &dyn Fn(&str, u64, u64)) -> Result<()> {
    for i in texts(resolved)? {
        let path = resolved.config.data.path.0[i].clone();
        let entry = CacheEntry::of(&resolved.config, &path)?;
        entry.make(&resolved.config, &|done, total| progress(&path, done, total))?;
        resolved.pairs[i] = entry.prefix.display().to_string();
    }
    Ok(())
}

/// Points `resolved.pairs` at what the cache has of the text and chat files among the data of a recipe, and returns the
/// others. Nothing is written.
pub fn find(resolved: &mut Resolved) -> Result<Vec<Untokenized>> {
    let mut left = Vec::new();
    for i in texts(resolved)? {
        let path = resolved.config.data.path.0[i].clone();
        let entry = CacheEntry::of(&resolved.config, &path)?;
        match entry.is_complete() {
            true => resolved.pairs[i] = entry.prefix.display().to_string(),
            false => left.push(Untokenized { path, bytes: entry.bytes }),
        }
    }
    Ok(left)
}

/// The indices of the data that are not `.bin/.idx` pairs.
fn texts(resolved: &Resolved) -> Result<Vec<usize>> {
    if resolved.config.data.is_embedded() {
        return Ok(Vec::new());
    }
    let mut out = Vec::new();
    for (i, path) in resolved.config.data.path.0.iter().enumerate() {
        // The prefix of a pair comes before a folder of that name, which may be what the pair was built from.
        let [bin, idx] = pair_paths(Path::new(path));
        if bin.exists() || idx.exists() {
            let of_the_pair = bin == Path::new(path) || idx == Path::new(path);
            if Path::new(path).is_file() && !of_the_pair {
                let what =
                    "is a file, and there is a .bin/.idx pair of that name beside it; rename one of them";
                return Err(Error::config(path, what));
            }
            continue;
        }
        if !Path::new(path).exists() && !path.contains(['*', '?', '[']) {
            let what = "there is no file, folder or .bin/.idx pair of that name; give text or .jsonl files, or the prefix of \
                        a pair made by `ferrotron data build`";
            return Err(Error::absent(Path::new(path), what));
        }
        out.push(i);
    }
    Ok(out)
}

/// The place of a text in the cache.
struct CacheEntry {
    paths: [PathBuf; 1],
    tokenizer: Option<PathBuf>,
    prefix: PathBuf,
    /// Bytes of its files.
    bytes: u64,
}

impl CacheEntry {
    fn of(c: &Config, path: &str) -> Result<CacheEntry> {
        let d = &c.data;
        let paths = [PathBuf::from(path)];
        let tokenizer_path = tokenizer_path(c);
        let tokenizer = tokenizer_path.as_deref().map(tokenizer_at).transpose()?;
        let tokenizer = tokenizer.unwrap_or_else(Tokenizer::bytes);
        let folder = tokenizer_path.as_deref().and_then(folder_of);
        let encoder = ChatEncoder::new(&tokenizer, folder.as_deref(), d.chat_template.as_deref())?;
        let mut key = DefaultHasher::new();
        (VERSION, tokenizer.text_digest(), encoder.digest()).hash(&mut key);
        (d.format.name(), &d.field, d.eod).hash(&mut key);
        let inputs = inputs(&paths, d.format, &d.field)?;
        let mut bytes = 0;
        for input in &inputs {
            let metadata = std::fs::metadata(&input.path).ok();
            bytes += metadata.as_ref().map_or(0, |m| m.len());
            let modified = metadata.and_then(|m| m.modified().ok());
            (&input.path, file_digest(&input.path)?, modified).hash(&mut key);
        }
        let name = Path::new(path).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let name: String =
            name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect();
        let prefix = folder_of_cache(d.cache.as_deref())?.join(format!("{name}-{:016x}", key.finish()));
        Ok(CacheEntry { paths, tokenizer: tokenizer_path, prefix, bytes })
    }

    fn is_complete(&self) -> bool {
        IndexedDataset::open(&self.prefix).is_ok_and(|data| matches!(DatasetInfo::of(&data), Ok(Some(_))))
    }

    /// Tokenizes the text, unless that has been done.
    fn make(&self, c: &Config, progress: &dyn Fn(u64, u64)) -> Result<()> {
        let d = &c.data;
        let parent = self.prefix.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(|e| Error::io(parent, "create", e))?;
        if self.is_complete() {
            return Ok(());
        }
        // The lock of `build` is on the prefix itself.
        let mut gate = self.prefix.as_os_str().to_owned();
        gate.push(".making");
        let _lock = TargetLock::acquire(Path::new(&gate), PATIENCE)?;
        if self.is_complete() {
            return Ok(());
        }
        build(
            &DatasetOptions {
                inputs: &self.paths,
                prefix: &self.prefix,
                tokenizer: self.tokenizer.as_deref(),
                field: &d.field,
                format: d.format,
                chat_template: d.chat_template.as_deref(),
                eod: d.eod.map_or(Eod::None, Eod::Id),
                overwrite: true,
            },
            progress,
        )?;
        Ok(())
    }
}

/// `data.cache`, or the folder of this program in the user's cache.
fn folder_of_cache(given: Option<&str>) -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let found = given.map(PathBuf::from).or_else(|| {
        variable("FERROTRON_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|d| d.join("ferrotron")))
            .or_else(|| variable("HOME").map(|d| d.join(".cache").join("ferrotron")))
            .map(|d| d.join("data"))
    });
    found.ok_or_else(|| Error::Output {
        path: "data.cache".into(),
        what: "there is no home folder to keep tokenized text in; set data.cache to a folder".into(),
    })
}
