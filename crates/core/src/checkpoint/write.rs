//! Writing the files of one checkpoint.

use super::manifest::{self, Manifest, Shard, StoredPart, StoredTensor};
use super::slice::Slice;
use crate::error::{Error, Result};
use crate::fs;
use crate::tensorfile::{TensorDecl, TensorFileWriter};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Approximate size of data files before another is started.
pub(super) const SHARD_BYTES: u64 = 4 << 30;

/// Takes the bytes of a part, in pieces of any length.
pub type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// Gives the bytes of a part, by its index, to a sink.
pub(super) type Source<'a> = dyn Fn(usize, &mut Sink) -> Result<()> + 'a;

/// A part of a logical tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartDecl {
    /// The tensor.
    pub tensor: TensorDecl,
    /// Which of its elements.
    pub slice: Slice,
}

impl PartDecl {
    /// All of a tensor.
    pub fn whole(tensor: TensorDecl) -> PartDecl {
        let slice = Slice::whole(&tensor.shape);
        PartDecl { tensor, slice }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.slice.numel().saturating_mul(self.tensor.dtype.bits()) / 8
    }
}

/// The rank that writes, of so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Writer {
    pub rank: usize,
    pub size: usize,
}

impl Writer {
    /// The only one.
    pub const ALONE: Writer = Writer { rank: 0, size: 1 };
}

/// What one rank has written: its files, and where the parts of tensors are in them.
#[derive(Default)]
pub(super) struct WrittenParts {
    pub files: BTreeMap<String, Shard>,
    pub tensors: BTreeMap<String, StoredTensor>,
}

/// A data file to write: its name and the indices of its parts.
type ShardPlan = Vec<(String, Vec<usize>)>;

/// Assigns parts to files: "model/…" apart from the rest, each group in name order, split by size.
fn plan(parts: &[PartDecl], shard_bytes: u64, writer: Writer) -> Result<ShardPlan> {
    let name = |i: usize| parts[i].tensor.name.as_str();
    let mut sorted: Vec<usize> = (0..parts.len()).collect();
    sorted.sort_by_key(|&i| name(i));
    if let Some(twice) = sorted.windows(2).find(|w| name(w[0]) == name(w[1])) {
        return Err(Error::Invalid(format!("checkpoint: tensor {:?} appears twice", name(twice[0]))));
    }
    let (model, rest): (Vec<_>, Vec<_>) = sorted.into_iter().partition(|&i| name(i).starts_with("model/"));
    let rank = if writer.size > 1 { format!("-rank-{:05}", writer.rank) } else { String::new() };
    let mut plan = ShardPlan::new();
    for (group, indices) in [("model", model), ("optimizer", rest)] {
        let mut shards: Vec<Vec<usize>> = Vec::new();
        let mut room = 0u64;
        for i in indices {
            let bytes = parts[i].bytes();
            match shards.last_mut() {
                Some(shard) if bytes <= room => shard.push(i),
                _ => {
                    room = shard_bytes;
                    shards.push(vec![i]);
                }
            }
            room = room.saturating_sub(bytes);
        }
        let of = shards.len();
        for (i, shard) in shards.into_iter().enumerate() {
            let name = match of {
                1 => format!("{group}{rank}.safetensors"),
                _ => format!("{group}{rank}-{:05}-of-{of:05}.safetensors", i + 1),
            };
            plan.push((name, shard));
        }
    }
    Ok(plan)
}

/// Writes and syncs the data files of one rank.
pub(super) fn write_parts(
    folder: &Path,
    parts: &[PartDecl],
    shard_bytes: u64,
    writer: Writer,
    source: &Source<'_>,
) -> Result<WrittenParts> {
    let mut out = WrittenParts::default();
    for (file, indices) in plan(parts, shard_bytes, writer)? {
        let shard = write_shard(&folder.join(&file), parts, &indices, source)?;
        for (i, crc) in shard.1 {
            let PartDecl { tensor, slice } = &parts[i];
            let slice = Some(slice.clone()).filter(|s| !s.is_whole(&tensor.shape));
            let part = StoredPart { file: file.clone(), crc32c: Some(manifest::hex(crc)), slice };
            let form = Some((tensor.dtype, tensor.shape.clone()));
            out.tensors.insert(tensor.name.clone(), StoredTensor { form, parts: vec![part] });
        }
        out.files.insert(file, shard.0);
    }
    Ok(out)
}

/// Writes one file; returns its entry, and the index and CRC-32C of each part.
fn write_shard(
    path: &Path,
    parts: &[PartDecl],
    indices: &[usize],
    source: &Source<'_>,
) -> Result<(Shard, Vec<(usize, u32)>)> {
    let decl = |i: usize| {
        let PartDecl { tensor, slice } = &parts[i];
        TensorDecl { shape: slice.stored_shape(&tensor.shape), ..tensor.clone() }
    };
    let decls: Vec<TensorDecl> = indices.iter().map(|&i| decl(i)).collect();
    let by_name: HashMap<&str, usize> = indices.iter().map(|&i| (parts[i].tensor.name.as_str(), i)).collect();
    let mut out = TensorFileWriter::create_direct(path, &decls)?;
    let order: Vec<String> = out.tensors().iter().map(|t| t.name.clone()).collect();
    let order: Vec<(&String, usize)> = order.iter().map(|name| (name, by_name[name.as_str()])).collect();
    for (name, i) in &order {
        source(*i, &mut |bytes| out.write(name, bytes))?;
    }
    let (written, sums) = out.finish_with_checksums()?;
    let sums = order.iter().map(|(_, i)| *i).zip(sums).collect();
    Ok((Shard { bytes: written.bytes, crc32c: manifest::hex(written.crc32c) }, sums))
}

/// Writes the manifest of a complete checkpoint, after all data files.
pub(super) fn write_manifest(folder: &Path, step: u64, state: Value, parts: WrittenParts) -> Result<()> {
    let path = folder.join(manifest::FILE);
    let WrittenParts { files, tensors } = parts;
    let text = Manifest { step, state, files, tensors }.render();
    let text = text.map_err(|e| Error::Invalid(format!("{}: the manifest {e}", path.display())))?;
    let mut file = fs::create_new(&path)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.map_err(|e| Error::io_doing(&path, "write", e))
}

/// The file in which a rank lists what it has written, until the manifest lists it.
fn index_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("index-rank-{rank:05}.json"))
}

/// Lists what this rank has written for the rank that writes the manifest.
pub(super) fn write_index(folder: &Path, step: u64, writer: Writer, parts: WrittenParts) -> Result<()> {
    let path = index_file(folder, writer.rank);
    let WrittenParts { files, tensors } = parts;
    let text = Manifest { step, state: Value::Null, files, tensors }.render_index();
    let text = text.map_err(|e| Error::Invalid(format!("{}: the index {e}", path.display())))?;
    let mut file = fs::create_new(&path)?;
    file.write_all(text.as_bytes()).map_err(|e| Error::io_doing(&path, "write", e))
}

/// Joins the indices of all ranks and deletes them.
pub(super) fn join_indices(folder: &Path, step: u64, ranks: usize) -> Result<WrittenParts> {
    let mut all = WrittenParts::default();
    for rank in 0..ranks {
        let path = index_file(folder, rank);
        let bytes = fs::read_limited(&path, manifest::MAX_BYTES)?;
        let index = Manifest::parse_index(&bytes).map_err(|e| Error::damaged(&path, e))?;
        if index.step != step {
            return Err(Error::damaged(&path, format!("is of step {}, not of step {step}", index.step)));
        }
        all.files.extend(index.files);
        for (name, mut stored) in index.tensors {
            let known = all
                .tensors
                .entry(name)
                .or_insert_with_key(|_| StoredTensor { form: stored.form.clone(), parts: Vec::new() });
            if known.form != stored.form {
                return Err(Error::damaged(&path, "has a tensor of another type or shape than other ranks"));
            }
            known.parts.append(&mut stored.parts);
        }
        fs::remove(&path)?;
    }
    // In the order of their elements, whichever rank wrote them.
    all.tensors.values_mut().for_each(|t| t.parts.sort_by(|a, b| a.slice.cmp(&b.slice)));
    Ok(all)
}
