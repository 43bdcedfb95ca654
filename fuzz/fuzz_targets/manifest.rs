#![no_main]
//! Checkpoint folders. The input is the manifest's text after its checksum, which is computed here: behind a wrong one
//! nothing is read. `{DATA}` in the text stands for the name, size and checksum of a data file that is really there.

use ferrotron_core::checkpoint;
use libfuzzer_sys::fuzz_target;

/// A safetensors file of one f32 tensor `model/a` `[2]`.
fn data_file() -> Vec<u8> {
    let header = br#"{"model/a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat()
}

fuzz_target!(|text: &str| {
    let Ok(dir) = tempfile::tempdir() else { return };
    let step = dir.path().join(checkpoint::folder_name(1));
    let data = data_file();
    let entry = format!(
        "\"data-00001.safetensors\": {{\"bytes\": {}, \"crc32c\": \"{:08x}\"}}",
        data.len(),
        crc32c::crc32c(&data)
    );
    let rest = text.replace("{DATA}", &entry);
    let sealed = format!("{{\n  \"checksum\": \"crc32c:{:08x}\",\n{rest}", crc32c::crc32c(rest.as_bytes()));
    let written = std::fs::create_dir(&step)
        .and_then(|()| std::fs::write(step.join("data-00001.safetensors"), &data))
        .and_then(|()| std::fs::write(step.join("manifest.json"), sealed));
    if written.is_err() {
        return;
    }
    if let Ok(loaded) = checkpoint::load(&step) {
        let _ = (loaded.step(), loaded.state().clone(), loaded.read("model/a"), loaded.read("adam.m/b"));
    }
});
