//! Verification of one checkpoint by several ranks: each reads its stripe of every file, and together they compute
//! the checksums.
//!
//! The format has one CRC-32C per file, which follows from the CRCs and lengths of its stripes. So no byte is read
//! twice for verification, whatever the number of ranks and whichever rank wrote it.

use crate::error::{Error, Result};
use ferrotron_comm::Communicator;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::Path;

/// A rank's result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RankCheck {
    /// CRC-32C of the manifest's text and of this rank's stripe of each file, in manifest order.
    Checked { manifest: u32, stripes: Vec<u32> },
    /// Its error message.
    Failed(String),
}

/// The bytes of a file of `bytes` that rank `part` of `of` verifies.
pub(super) fn stripe(bytes: u64, part: usize, of: usize) -> Range<u64> {
    let cut = |i: usize| (u128::from(bytes) * i as u128 / of.max(1) as u128) as u64;
    cut(part)..cut(part + 1)
}

/// Exchanges the results of all ranks, in rank order.
pub(super) fn exchange(mine: &RankCheck, group: &Communicator) -> Result<Vec<RankCheck>> {
    let broken = |e: serde_json::Error| Error::Invalid(format!("what ranks say of a checkpoint: {e}"));
    let text = serde_json::to_vec(mine).map_err(broken)?;
    let all = group.all_gather_bytes(&text, "the checkpoint is checked")?;
    all.iter().map(|text| serde_json::from_slice(text).map_err(broken)).collect()
}

/// The CRC-32C of each file, from the file sizes and the results of all ranks for the checkpoint at `path`.
pub(super) fn join(path: &Path, words: &[RankCheck], files: impl Iterator<Item = u64>) -> Result<Vec<u32>> {
    let mut first: Option<u32> = None;
    let mut checked = Vec::with_capacity(words.len());
    for (rank, word) in words.iter().enumerate() {
        match word {
            RankCheck::Failed(what) => {
                return Err(Error::damaged(path, format!("rank {rank} found: {what}")));
            }
            RankCheck::Checked { manifest, .. } if first.is_some_and(|f| f != *manifest) => {
                let what = format!(
                    "is not the same on all ranks: rank {rank} sees another manifest.json than rank 0; \
                     keep the run's folder on a file system that all hosts share"
                );
                return Err(Error::damaged(path, what));
            }
            RankCheck::Checked { manifest, stripes } => {
                first = Some(*manifest);
                checked.push(stripes);
            }
        }
    }
    let file = |(i, bytes): (usize, u64)| {
        checked.iter().enumerate().try_fold(0, |crc, (rank, stripes)| {
            let mine = stripe(bytes, rank, checked.len());
            let length = usize::try_from(mine.end - mine.start).ok();
            // Manifests are equal, so every rank has one stripe per file.
            let (sum, length) = stripes.get(i).zip(length).ok_or_else(|| {
                Error::damaged(path, format!("rank {rank} checked another number of files than there are"))
            })?;
            Ok(crc32c::crc32c_combine(crc, *sum, length))
        })
    };
    files.enumerate().map(file).collect()
}
