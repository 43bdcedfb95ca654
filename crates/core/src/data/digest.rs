//! Digests of training data, by which a resumed run notices that its data or the order of its samples has changed.

use super::indexed::beside;
use super::{Batches, Row, corpus};
use crate::config::Resolved;
use crate::{Error, Result, fs};
use serde::{Deserialize, Serialize};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// A `.bin` up to this size is read whole.
const WHOLE_BYTES: u64 = 64 << 20;
/// A larger one is read in this many blocks, evenly spread, the first and the last included.
const BLOCKS: u64 = 1024;
const BLOCK_BYTES: u64 = 64 << 10;
/// Samples by which the order of the data is recognized.
const ORDER_SAMPLES: u64 = 16;

/// What a dataset holds: CRC-32C of the whole `.idx`, and of the `.bin` up to 64 MiB; of a larger `.bin` 1,024 blocks of
/// 64 KiB, evenly spread. A rebuilt file of the same size differs; a few bytes changed in a large one may not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataDigest {
    /// Bytes of tokens.
    pub bytes: u64,
    /// CRC-32C of the index.
    pub index: String,
    /// CRC-32C of the tokens, or of the blocks.
    pub content: String,
}

impl std::fmt::Display for DataDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes (index {}, content {})", self.bytes, self.index, self.content)
    }
}

/// The digest of each dataset of a recipe, in the order of `data.path`.
pub fn digests(r: &Resolved) -> Result<Vec<DataDigest>> {
    if r.config.data.is_embedded() {
        let text = corpus::text().as_bytes();
        let content = hex(crc32c::crc32c(text));
        return Ok(vec![DataDigest { bytes: text.len() as u64, index: "embedded".into(), content }]);
    }
    r.pairs.iter().map(|prefix| digest(Path::new(prefix))).collect()
}

/// Length and CRC-32C of a file up to 64 MiB, or of 1,024 blocks of a larger one.
pub fn file_digest(path: &Path) -> Result<(u64, String)> {
    crc_of_blocks(path, WHOLE_BYTES)
}

fn digest(prefix: &Path) -> Result<DataDigest> {
    let (_, index) = crc_of_blocks(&beside(prefix, ".idx"), u64::MAX)?;
    let (bytes, content) = crc_of_blocks(&beside(prefix, ".bin"), WHOLE_BYTES)?;
    Ok(DataDigest { bytes, index, content })
}

/// Length and CRC-32C of a file, or of blocks of it if it is longer than `whole`.
fn crc_of_blocks(path: &Path, whole: u64) -> Result<(u64, String)> {
    let read = |e| Error::io_doing(path, "read", e);
    let mut file = fs::open_regular(path)?;
    let len = file.metadata().map_err(read)?.len();
    let mut buffer = vec![0; BLOCK_BYTES as usize];
    let mut crc = 0;
    if len <= whole {
        loop {
            match file.read(&mut buffer).map_err(read)? {
                0 => break,
                n => crc = crc32c::crc32c_append(crc, &buffer[..n]),
            }
        }
        return Ok((len, hex(crc)));
    }
    for i in 0..BLOCKS {
        // In u128, since a file of many terabytes times the number of blocks may not fit in 64 bits.
        let at = u128::from(len - BLOCK_BYTES) * u128::from(i) / u128::from(BLOCKS - 1);
        file.seek(SeekFrom::Start(at as u64)).and_then(|_| file.read_exact(&mut buffer)).map_err(read)?;
        crc = crc32c::crc32c_append(crc, &buffer);
    }
    Ok((len, hex(crc)))
}

/// CRC-32C of 16 samples evenly spread over the `samples` first ones, by which a resumed run checks that what it has been
/// trained on is what it would be trained on now. None before the first sample, or where one cannot be read.
pub fn order_digest(data: &dyn Batches, samples: u64) -> Option<String> {
    let last = samples.checked_sub(1)?;
    let mut crc = 0;
    let mut row = Row::default();
    for k in 0..ORDER_SAMPLES {
        row.clear();
        let n = u128::from(last) * u128::from(k) / u128::from(ORDER_SAMPLES - 1);
        data.row(n as u64, &mut row).ok()?;
        row.tokens.iter().for_each(|t| crc = crc32c::crc32c_append(crc, &t.to_le_bytes()));
    }
    Some(hex(crc))
}

fn hex(crc: u32) -> String {
    format!("{crc:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_byte_in_a_block_is_noticed_in_a_file_of_any_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.bin");
        for (len, whole) in [(3u64, WHOLE_BYTES), (300_000, WHOLE_BYTES), (300_000, 200_000)] {
            let mut bytes: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            let before = crc_of_blocks(&path, whole).unwrap();
            assert_eq!(before.0, len);
            for at in [0, bytes.len() / 2, bytes.len() - 1] {
                bytes[at] ^= 1;
                std::fs::write(&path, &bytes).unwrap();
                assert_ne!(crc_of_blocks(&path, whole).unwrap(), before, "byte {at} of {len}");
                bytes[at] ^= 1;
            }
        }
    }

    #[test]
    fn another_seed_is_another_order() {
        let order = |seed, samples| order_digest(&corpus::training(32, seed).unwrap(), samples);
        assert_eq!(order(1, 0), None);
        assert!(order(1, 1).is_some() && order(1, 100) == order(1, 100));
        assert_ne!(order(1, 100), order(2, 100));
    }
}
