#![no_main]
//! `.bin/.idx` datasets: open, then read the first sequences.

use libfuzzer_sys::fuzz_target;
use ferrotron_core::data::IndexedDataset;

fuzz_target!(|input: (&[u8], &[u8])| {
    let (idx, bin) = input;
    let Ok(dir) = tempfile::tempdir() else { return };
    let prefix = dir.path().join("data");
    let written = std::fs::write(prefix.with_extension("idx"), idx)
        .and_then(|()| std::fs::write(prefix.with_extension("bin"), bin));
    if written.is_err() {
        return;
    }
    if let Ok(data) = IndexedDataset::open(&prefix) {
        for i in 0..data.len().min(64) {
            let _ = data.length(i);
            let _ = data.sequence(i);
        }
    }
});
