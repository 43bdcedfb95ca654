#![no_main]
//! `.bin/.idx` datasets. The input describes a valid pair and edits of its index: random bytes would rarely get past the
//! magic and the lengths, which must account for every byte of both files.

use ferrotron_core::data::{GptConfig, GptDataset, IndexedDataset, IndexedWriter, Packed, Split, TokenType};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::Arc;

/// Token type, multimodality, lengths of sequences (a length of 0 modulo 7 also ends the document), edits of the index and
/// of the tokens (position, value), and bytes taken off the end of each file.
type Input = (u8, bool, Vec<u8>, Vec<(u16, u8)>, Vec<(u16, u8)>, [u8; 2]);

fuzz_target!(|input: Input| {
    let Ok(dir) = tempfile::tempdir() else { return };
    let prefix = dir.path().join("data");
    if write(&prefix, &input).is_none() {
        return;
    }
    let Ok(data) = IndexedDataset::open(&prefix) else { return };
    for i in 0..data.len().min(64) {
        let _ = (data.length(i), data.mode(i), data.sequence(i), data.values(i));
    }
    for d in 0..data.documents().min(64) {
        let _ = data.document(d);
    }
    let _ = data.id_range(1 << 20);
    let data = Arc::new(data);
    if let Ok(samples) = GptDataset::new(data.clone(), 0..data.len(), Some(8), Split::Train, GptConfig::new(4, 1, 64)) {
        let _ = (0..8).map(|n| samples.item(n)).collect::<Vec<_>>();
    }
    if let Ok(data) = IndexedDataset::open(&prefix) {
        let _ = Packed::new(Box::new(data), 4, 64, Some(1));
    }
});

/// Writes a valid pair, then edits it.
fn write(prefix: &Path, (kind, multimodal, lengths, idx_edits, bin_edits, cut): &Input) -> Option<()> {
    let kind = TokenType::ALL[usize::from(*kind) % TokenType::ALL.len()];
    let mut writer = IndexedWriter::create(prefix, kind, *multimodal).ok()?;
    for (i, length) in lengths.iter().take(64).enumerate() {
        writer.push((0..i64::from(length % 32)).map(|t| (t * 5 + i as i64) % 60), (i % 2) as i8).ok()?;
        if length % 7 == 0 {
            writer.end_document().ok()?;
        }
    }
    writer.end_document().ok()?;
    writer.finish().ok()?;
    for (ending, edits, cut) in [("idx", idx_edits, cut[0]), ("bin", bin_edits, cut[1])] {
        let path = prefix.with_extension(ending);
        let mut bytes = std::fs::read(&path).ok()?;
        for (at, value) in edits {
            let n = bytes.len();
            if let Some(byte) = bytes.get_mut(usize::from(*at) % n.max(1)) {
                *byte = *value;
            }
        }
        bytes.truncate(bytes.len().saturating_sub(usize::from(cut % 9)));
        std::fs::write(&path, bytes).ok()?;
    }
    Some(())
}
