//! Writing one checkpoint atomically.

use super::manifest::{self, Manifest, Shard};
use super::{Snapshot, folder};
use crate::error::{Error, Result};
use crate::fs;
use crate::tensorfile::{TensorDecl, TensorFileWriter};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Approximate size of data files before another is started.
pub(super) const SHARD_BYTES: u64 = 4 << 30;

/// Returns the bytes of a tensor by name.
pub(super) type Source<'a> = dyn Fn(&str) -> Result<Cow<'a, [u8]>> + 'a;

/// The data files to write: name and tensors of each.
type ShardPlan<'a> = Vec<(String, Vec<&'a TensorDecl>)>;

/// Writes the snapshot as a checkpoint of `dir` and returns its folder. If anything fails, what was written so far is
/// removed and existing checkpoints stay unchanged.
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

/// Fills a temporary folder of `dir` and renames it, or removes it again.
pub(super) fn write_atomically(
    dir: &Path,
    name: &str,
    fill: &dyn Fn(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let temporary = folder::temporary(dir, name)?;
    fill(&temporary).and_then(|()| folder::commit(dir, &temporary, name)).inspect_err(|_| {
        // Return the first error; a folder that cannot be removed either is cleaned up at the next start.
        if temporary.exists() {
            drop(fs::remove(&temporary));
        }
    })
}

/// Assigns tensors to files: "model/…" apart from the rest, each group in name order, split by size.
pub(super) fn plan(decls: &[TensorDecl], shard_bytes: u64) -> Result<ShardPlan<'_>> {
    let mut sorted: Vec<&TensorDecl> = decls.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(twice) = sorted.windows(2).find(|w| w[0].name == w[1].name) {
        return Err(Error::Invalid(format!("checkpoint: tensor {:?} appears twice", twice[0].name)));
    }
    let (model, rest): (Vec<_>, Vec<_>) = sorted.into_iter().partition(|i| i.name.starts_with("model/"));
    let mut plan = ShardPlan::new();
    for (group, items) in [("model", model), ("optimizer", rest)] {
        let mut shards: Vec<Vec<&TensorDecl>> = Vec::new();
        let mut room = 0u64;
        for item in items {
            // The file writer refuses tensors whose size overflows.
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
    let mut file = fs::create_new(&path)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.map_err(|e| Error::io_doing(&path, "write", e))
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
