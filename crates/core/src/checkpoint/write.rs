//! Writing one checkpoint, whole or not at all.

use super::manifest::{self, Manifest, Shard};
use super::{Item, Snapshot, folder};
use crate::error::{Error, Result};
use crate::tensorfile::{TensorDecl, TensorFileWriter};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Data files grow to about this size before another is begun.
pub(super) const SHARD_BYTES: u64 = 4 << 30;

/// A data file to be: its name and its tensors.
type Plan<'a> = Vec<(String, Vec<&'a Item>)>;

/// Write the snapshot as a checkpoint of `dir` and return its folder. If anything fails, what was written so
/// far is removed and the checkpoints already there stay as they are.
pub(super) fn write(dir: &Path, snapshot: &Snapshot, shard_bytes: u64) -> Result<PathBuf> {
    let plan = plan(snapshot, shard_bytes)?;
    let temporary = folder::temporary(dir, snapshot.step)?;
    fill(&temporary, snapshot, &plan)
        .and_then(|()| folder::commit(dir, &temporary, snapshot.step))
        .inspect_err(|_| {
            // The first error says why; a folder that cannot be removed either goes at the next start.
            if temporary.exists() {
                drop(folder::remove(&temporary));
            }
        })
}

/// Which tensor goes where: "model/…" apart from the rest, each group in the order of names, cut by size.
fn plan(snapshot: &Snapshot, shard_bytes: u64) -> Result<Plan<'_>> {
    let mut sorted: Vec<&Item> = snapshot.items.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(twice) = sorted.windows(2).find(|w| w[0].name == w[1].name) {
        return Err(Error::Invalid(format!("checkpoint: tensor {:?} is there twice", twice[0].name)));
    }
    let (model, rest): (Vec<_>, Vec<_>) = sorted.into_iter().partition(|i| i.name.starts_with("model/"));
    let mut plan = Plan::new();
    for (group, items) in [("model", model), ("optimizer", rest)] {
        let mut shards: Vec<Vec<&Item>> = Vec::new();
        let mut room = 0u64;
        for item in items {
            let bytes = item.bytes.len() as u64;
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

fn fill(temporary: &Path, snapshot: &Snapshot, plan: &Plan<'_>) -> Result<()> {
    let mut files = BTreeMap::new();
    let mut tensors = BTreeMap::new();
    for (file, items) in plan {
        files.insert(file.clone(), write_shard(&temporary.join(file), items)?);
        tensors.extend(items.iter().map(|i| (i.name.clone(), file.clone())));
    }
    let path = temporary.join(manifest::FILE);
    let text = Manifest::new(snapshot.step, snapshot.state.clone(), files, tensors)
        .render()
        .map_err(|e| Error::Invalid(format!("{}: the manifest {e}", path.display())))?;
    let write = || {
        let mut file = File::create(&path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    write().map_err(|e| Error::io_doing(&path, "write", e))
}

fn write_shard(path: &Path, items: &[&Item]) -> Result<Shard> {
    let decls: Vec<TensorDecl> = items
        .iter()
        .map(|i| TensorDecl { name: i.name.clone(), dtype: i.dtype.into(), shape: i.shape.clone() })
        .collect();
    let by_name: HashMap<&str, &Item> = items.iter().map(|i| (i.name.as_str(), *i)).collect();
    let mut out = TensorFileWriter::create(path, &decls, &BTreeMap::new())?;
    let order: Vec<String> = out.tensors().iter().map(|t| t.name.clone()).collect();
    for name in &order {
        if let Some(item) = by_name.get(name.as_str()) {
            out.write(name, &item.bytes)?;
        }
    }
    let written = out.finish()?;
    Ok(Shard { bytes: written.bytes, crc32c: manifest::hex(written.crc32c) })
}
