//! Writing one checkpoint, whole or not at all.

use super::manifest::{self, Manifest, Shard};
use super::{Snapshot, folder};
use crate::error::{Error, Result};
use crate::tensorfile::{TensorDecl, TensorFileWriter};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Data files grow to about this size before another is begun.
pub(super) const SHARD_BYTES: u64 = 4 << 30;

/// Gives the bytes of a tensor by its name.
pub(super) type Source<'a> = dyn Fn(&str) -> Result<Cow<'a, [u8]>> + 'a;

/// A data file to be: its name and its tensors.
type ShardPlan<'a> = Vec<(String, Vec<&'a TensorDecl>)>;

/// Write the snapshot as a checkpoint of `dir` and return its folder. If anything fails, what was written so
/// far is removed and the checkpoints already there stay as they are.
pub(super) fn write(dir: &Path, snapshot: &Snapshot, shard_bytes: u64) -> Result<PathBuf> {
    let decls: Vec<TensorDecl> = snapshot
        .items
        .iter()
        .map(|i| TensorDecl { name: i.name.clone(), dtype: i.dtype.into(), shape: i.shape.clone() })
        .collect();
    let by_name: HashMap<&str, &[u8]> =
        snapshot.items.iter().map(|i| (i.name.as_str(), i.bytes.as_slice())).collect();
    let source = |name: &str| Ok(Cow::Borrowed(by_name.get(name).copied().unwrap_or_default()));
    let plan = plan(&decls, shard_bytes)?;
    let fill = |temporary: &Path| fill(temporary, snapshot.step, snapshot.state.clone(), &plan, &source);
    write_atomically(dir, &folder::name(snapshot.step), &fill)
}

/// Fills a temporary folder of `dir` and gives it its name, or removes it again.
pub(super) fn write_atomically(
    dir: &Path,
    name: &str,
    fill: &dyn Fn(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let temporary = folder::temporary(dir, name)?;
    fill(&temporary).and_then(|()| folder::commit(dir, &temporary, name)).inspect_err(|_| {
        // The first error says why; a folder that cannot be removed either goes at the next start.
        if temporary.exists() {
            drop(folder::remove(&temporary));
        }
    })
}

/// Which tensor goes where: "model/…" apart from the rest, each group in the order of names, cut by size.
pub(super) fn plan(decls: &[TensorDecl], shard_bytes: u64) -> Result<ShardPlan<'_>> {
    let mut sorted: Vec<&TensorDecl> = decls.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(twice) = sorted.windows(2).find(|w| w[0].name == w[1].name) {
        return Err(Error::Invalid(format!("checkpoint: tensor {:?} is there twice", twice[0].name)));
    }
    let (model, rest): (Vec<_>, Vec<_>) = sorted.into_iter().partition(|i| i.name.starts_with("model/"));
    let mut plan = ShardPlan::new();
    for (group, items) in [("model", model), ("optimizer", rest)] {
        let mut shards: Vec<Vec<&TensorDecl>> = Vec::new();
        let mut room = 0u64;
        for item in items {
            // A size that does not exist is refused by the writer of the file.
            let bytes = item.dtype.tensor_bytes(&item.shape).unwrap_or(u64::MAX);
            match shards.last_mut() {
                Some(shard) if bytes <= room => shard.push(item),
                _ => {
                    room = shard_bytes;
                    shards.push(vec![item]);
                }
            }
            room = room.saturating_sub(bytes);
        }
        let of = shards.len();
        for (i, shard) in shards.into_iter().enumerate() {
            let name = match of {
                1 => format!("{group}.safetensors"),
                _ => format!("{group}-{:05}-of-{of:05}.safetensors", i + 1),
            };
            plan.push((name, shard));
        }
    }
    Ok(plan)
}

/// Writes the data files and, last, the manifest.
pub(super) fn fill(
    temporary: &Path,
    step: u64,
    state: Value,
    plan: &ShardPlan<'_>,
    source: &Source<'_>,
) -> Result<()> {
    let mut files = BTreeMap::new();
    let mut tensors = BTreeMap::new();
    for (file, decls) in plan {
        files.insert(file.clone(), write_shard(&temporary.join(file), decls, source)?);
        tensors.extend(decls.iter().map(|i| (i.name.clone(), file.clone())));
    }
    let path = temporary.join(manifest::FILE);
    let text = Manifest::new(step, state, files, tensors)
        .render()
        .map_err(|e| Error::Invalid(format!("{}: the manifest {e}", path.display())))?;
    let write = || {
        let mut file = File::create(&path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    write().map_err(|e| Error::io_doing(&path, "write", e))
}

fn write_shard(path: &Path, decls: &[&TensorDecl], source: &Source<'_>) -> Result<Shard> {
    let decls: Vec<TensorDecl> = decls.iter().copied().cloned().collect();
    let mut out = TensorFileWriter::create(path, &decls, &BTreeMap::new())?;
    let order: Vec<String> = out.tensors().iter().map(|t| t.name.clone()).collect();
    for name in &order {
        out.write(name, &source(name)?)?;
    }
    let written = out.finish()?;
    Ok(Shard { bytes: written.bytes, crc32c: manifest::hex(written.crc32c) })
}
