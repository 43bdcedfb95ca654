//! The frozen base model of adapters: checkpoints hold adapters alone, and where their base is.

use crate::checkpoint::Loaded;
use crate::config::Resolved;
use crate::data::digest::file_digest;
use crate::{Error, Result};
use ferrotron_engine::Rank;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What a checkpoint of adapters says of them and of their base model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedAdapters {
    /// Factor of `B·A` in `W + scale·B·A`.
    pub scale: f32,
    /// The base model; none where it is the declared initial values of the run's seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseModel>,
}

/// A base model on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// `model.hf` of the run.
    pub path: String,
    /// Digests of its `.safetensors` files, in the order of their names.
    pub digest: String,
}

impl BaseModel {
    /// The folder as it is now. Rank 0 reads all of its weights, the others take its word. Collective.
    fn at(path: &str, rank: &Rank) -> Result<BaseModel> {
        let world = rank.world.all();
        let read = if world.rank() == 0 { digest(Path::new(path)) } else { Ok(String::new()) };
        // Whether it could be read, and the digest or the error.
        let mine = match &read {
            Ok(digest) => format!("+{digest}"),
            Err(e) => format!("-{e}"),
        };
        let said = world.all_gather_bytes(mine.as_bytes(), "digest of the base model")?;
        let first = said.first().map(|s| String::from_utf8_lossy(s)).unwrap_or_default();
        read?;
        match first.strip_prefix('+') {
            Some(digest) => Ok(BaseModel { path: path.into(), digest: digest.into() }),
            None => Err(Error::Invalid(format!("rank 0: {}", first.trim_start_matches('-')))),
        }
    }

    /// Refuses a folder whose weights are not those that the adapters of `checkpoint` were trained for.
    pub fn check(&self, checkpoint: &Path) -> Result<()> {
        let now = digest(Path::new(&self.path))?;
        if now == self.digest {
            return Ok(());
        }
        let what = format!(
            "its adapters were trained for the model that was in {}, which holds other weights now; bring those back",
            self.path
        );
        Err(Error::damaged(checkpoint, what))
    }
}

/// Digests of the weight files of a folder; empty where it has none.
fn digest(dir: &Path) -> Result<String> {
    let listed = std::fs::read_dir(dir).map_err(|e| Error::io_doing(dir, "list the base model in", e))?;
    let mut files: Vec<PathBuf> = listed.filter_map(|f| Some(f.ok()?.path())).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    let digests = files.iter().map(|f| file_digest(f).map(|(bytes, crc)| format!("{bytes}:{crc}")));
    Ok(digests.collect::<Result<Vec<_>>>()?.join(" "))
}

impl SavedAdapters {
    /// The adapters of a recipe; none where it has none. Collective.
    pub(super) fn of(rank: &Rank, r: &Resolved) -> Result<Option<SavedAdapters>> {
        if !r.config.has_lora() {
            return Ok(None);
        }
        let base = r.config.model.hf.as_deref().map(|path| BaseModel::at(path, rank)).transpose()?;
        Ok(Some(SavedAdapters { scale: r.lora().scale, base }))
    }
}

/// What a checkpoint says of its adapters, and the seed of its run; none where it holds a whole model.
pub fn adapters_of(loaded: &Loaded) -> Result<Option<(SavedAdapters, u64)>> {
    #[derive(Deserialize)]
    struct State {
        #[serde(default)]
        adapters: Option<SavedAdapters>,
        #[serde(default)]
        seed: u64,
    }
    let state: State = serde_json::from_value(loaded.state().clone()).map_err(|e| {
        Error::damaged(loaded.path(), format!("its state is not what this version writes: {e}"))
    })?;
    Ok(state.adapters.map(|adapters| (adapters, state.seed)))
}
