#![no_main]
//! Checkpoint folders with an arbitrary manifest.

use libfuzzer_sys::fuzz_target;
use ferrotron_core::checkpoint;

fuzz_target!(|bytes: &[u8]| {
    let Ok(dir) = tempfile::tempdir() else { return };
    let step = dir.path().join(checkpoint::folder_name(1));
    if std::fs::create_dir(&step).and_then(|()| std::fs::write(step.join("manifest.json"), bytes)).is_ok() {
        let _ = checkpoint::load(&step);
    }
});
