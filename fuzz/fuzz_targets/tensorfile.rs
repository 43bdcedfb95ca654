#![no_main]
//! Safetensors files: open, then read every tensor.

use libfuzzer_sys::fuzz_target;
use ferrotron_core::tensorfile::TensorFile;
use std::io::Write;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut file) = tempfile::NamedTempFile::new() else { return };
    if file.write_all(bytes).is_err() {
        return;
    }
    if let Ok(open) = TensorFile::open(file.path()) {
        for t in open.tensors() {
            let _ = open.read(&t.name);
        }
    }
});
