//! Routing in files: recorded as the routers compute it (`moe.record`), or replayed in their place (`moe.replay`), as when a
//! policy is trained on samples of an inference engine.
//!
//! A step has one file per rank, `step-00000012.rank-003.safetensors`. For every MoE layer it holds `layers.3.moe` i32
//! `[rows, k]`, the top-k experts of each row, and `layers.3.moe.tokens` i32 `[rows]`, the index of each row's token in the
//! step. A replay reads all files of a step, so that they serve any layout. A suffix `:1` and so on marks further uses of a
//! shared layer.

use crate::config::Resolved;
use crate::error::{Error, Result};
use crate::tensorfile::{FileDType, TensorDecl, TensorFile, TensorFileWriter};
use ferrotron_engine::moe::{LayerUse, MoeState};
use ferrotron_engine::{Rank, StepState};
use ferrotron_tensor::{Category, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folders of recorded and replayed routing.
#[derive(Clone, Debug, Default)]
pub(super) struct RoutingReplay {
    record: Option<PathBuf>,
    replay: Option<PathBuf>,
}

impl RoutingReplay {
    /// Reads `moe.record` and `moe.replay`: creates the first folder; the second must exist.
    pub(super) fn new(r: &Resolved) -> Result<RoutingReplay> {
        let path = |p: &Option<String>| p.as_ref().map(PathBuf::from);
        let made = RoutingReplay { record: path(&r.config.moe.record), replay: path(&r.config.moe.replay) };
        if let Some(folder) = &made.record {
            std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        }
        if let Some(folder) = made.replay.as_ref().filter(|f| !f.is_dir()) {
            let what =
                "moe.replay is not a folder of recorded routing; record one with moe.record, or leave it out"
                    .into();
            return Err(Error::Missing { path: folder.clone(), what });
        }
        Ok(made)
    }

    /// Before the passes of `step`. `local_tokens` says of each token of the step whether this rank needs its routing.
    pub(super) fn begin(
        &self,
        rank: &Rank,
        state: &StepState,
        step: u64,
        local_tokens: &dyn Fn() -> Vec<bool>,
    ) -> Result<()> {
        let Some(moe) = state.moe() else { return Ok(()) };
        if self.record.is_some() {
            moe.record_routing();
        }
        if let Some(folder) = &self.replay {
            moe.replay_routing(read(rank, moe, folder, step, &local_tokens())?);
        }
        Ok(())
    }

    /// After the passes of `step`. Waits for them if their routing is recorded.
    pub(super) fn end(&self, rank: &Rank, state: &StepState, step: u64) -> Result<()> {
        match (&self.record, state.moe()) {
            (Some(folder), Some(moe)) => write(rank, moe, folder, step),
            _ => Ok(()),
        }
    }
}

fn name(moe: &MoeState, (i, repeat): LayerUse) -> String {
    let name = &moe.specs()[i].name;
    if repeat == 0 { name.clone() } else { format!("{name}:{repeat}") }
}

/// The tensor with the token indices of a layer.
fn tokens_of(name: &str) -> String {
    format!("{name}.tokens")
}

fn write(rank: &Rank, moe: &MoeState, folder: &Path, step: u64) -> Result<()> {
    // By layer: token indices, their experts, and k.
    let mut all: BTreeMap<String, (Vec<i32>, Vec<i32>, usize)> = BTreeMap::new();
    for c in moe.take_routing() {
        let (rows, index) = (rank.compute.download::<i32>(&c.rows)?, rank.compute.download::<i32>(&c.index)?);
        let k = c.index.shape()[1];
        let (tokens, indices, width) = all.entry(name(moe, c.of)).or_default();
        *width = k;
        // Padding rows have no experts.
        for (row, chosen) in rows.iter().zip(index.chunks(k)).filter(|(_, chosen)| chosen[0] >= 0) {
            tokens.push(*row);
            indices.extend_from_slice(chosen);
        }
    }
    let decl = |name: String, shape| TensorDecl { name, dtype: FileDType::I32, shape };
    let decls: Vec<TensorDecl> = all
        .iter()
        .flat_map(|(name, (tokens, _, k))| {
            [decl(name.clone(), vec![tokens.len(), *k]), decl(tokens_of(name), vec![tokens.len()])]
        })
        .collect();
    let path = folder.join(format!("step-{step:08}.rank-{:03}.safetensors", rank.world.rank()));
    let unfinished = path.with_extension("part");
    let mut file = TensorFileWriter::create_in_order(&unfinished, &decls, &BTreeMap::new())?;
    let bytes = |v: &[i32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    for (name, (tokens, indices, _)) in &all {
        file.write(name, &bytes(indices))?;
        file.write(&tokens_of(name), &bytes(tokens))?;
    }
    file.finish()?;
    std::fs::rename(&unfinished, &path).map_err(Error::io(&path))
}

/// The files of a step, sorted.
fn files(folder: &Path, step: u64) -> Result<Vec<PathBuf>> {
    let prefix = format!("step-{step:08}.");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let path = entry.map_err(Error::io(folder))?.path();
        let file = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if file.starts_with(&prefix) && file.ends_with(".safetensors") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The routing of each MoE layer of this stage: i32 `[tokens, k]`.
fn read(
    rank: &Rank,
    moe: &MoeState,
    folder: &Path,
    step: u64,
    local: &[bool],
) -> Result<Vec<(LayerUse, Tensor)>> {
    let found = files(folder, step)?;
    if found.is_empty() {
        let what = format!(
            "holds no routing of step {step}, which moe.replay asks for; leave it out to route by the router"
        );
        return Err(Error::Missing { path: folder.into(), what });
    }
    let files = found.iter().map(|p| TensorFile::open(p)).collect::<Result<Vec<_>>>()?;
    let mut tables = Vec::new();
    for (i, spec) in moe.specs().iter().enumerate() {
        let mut repeat = 0;
        loop {
            let name = name(moe, (i, repeat));
            let mine: Vec<&TensorFile> = files.iter().filter(|f| f.get(&name).is_some()).collect();
            if mine.is_empty() {
                break;
            }
            let (values, k) = table(&mine, &name, local, spec.experts)?;
            let table = rank.compute.upload(&values, &[local.len(), k], Category::Activations)?;
            tables.push(((i, repeat), table));
            repeat += 1;
        }
        if repeat == 0 {
            let what = format!("the routing of step {step} lacks {}", spec.name);
            return Err(Error::Missing { path: folder.into(), what });
        }
    }
    Ok(tables)
}

/// The experts of all tokens in one MoE layer, merged from the files of all ranks, and k.
fn table(files: &[&TensorFile], name: &str, local: &[bool], experts: usize) -> Result<(Vec<i32>, usize)> {
    let tokens = local.len();
    let mut out: Vec<i32> = Vec::new();
    let mut width = 0;
    for file in files {
        let damaged =
            |what: String| Error::Damaged { path: file.path().into(), what: format!("{name}: {what}") };
        let ints = |name: &str| -> Result<Vec<i32>> {
            let bytes = file.read(name)?;
            Ok(bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect())
        };
        let shape = file.get(name).map(|t| (t.dtype, t.shape.clone()));
        let Some((FileDType::I32, [_, k])) = shape.as_ref().map(|(d, s)| (*d, s.as_slice())) else {
            return Err(damaged("routing must be i32 [rows, k]".into()));
        };
        // Before memory is allocated for it: a tensor without rows can have any width.
        if *k == 0 || *k > experts {
            return Err(damaged(format!("top-k is {k} of {experts} experts")));
        }
        if width != 0 && *k != width {
            return Err(damaged(format!("top-k is {k} here and {width} in another file")));
        }
        width = *k;
        out.resize(tokens * width, -1);
        let (rows, indices) = (ints(&tokens_of(name))?, ints(name)?);
        if rows.len() * width != indices.len() {
            return Err(damaged(format!("{} tokens have {} expert indices", rows.len(), indices.len())));
        }
        for (row, chosen) in rows.iter().zip(indices.chunks(width)) {
            let to = usize::try_from(*row).ok().and_then(|r| out.get_mut(r * width..(r + 1) * width));
            let Some(to) = to else {
                return Err(damaged(format!("token {row} is not one of the {tokens} of the step")));
            };
            if to[0] >= 0 {
                return Err(damaged(format!("token {row} appears twice; the folder has files of two runs")));
            }
            if let Some(e) = chosen.iter().find(|e| !(0..experts as i32).contains(*e)) {
                return Err(damaged(format!("token {row} is routed to expert {e} of {experts}")));
            }
            to.copy_from_slice(chosen);
        }
    }
    let path = || files.first().map(|f| f.path().to_path_buf()).unwrap_or_default();
    match out.chunks(width.max(1)).zip(local).position(|(chosen, local)| *local && chosen[0] < 0) {
        Some(token) => {
            let what =
                format!("{name}: token {token} of {tokens} has no routing; are files of the step missing?");
            Err(Error::Damaged { path: path(), what })
        }
        None => Ok((out, width)),
    }
}
