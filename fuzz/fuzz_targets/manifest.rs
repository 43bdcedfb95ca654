#![no_main]
//! Checkpoint folders. The input is the manifest's text after its checksum, which is computed here: behind a wrong one
//! nothing is read. `{DATA}` and `{MORE}` in the text stand for the name, size and checksum of data files that are really
//! there: `model/a` f32 `[2]` and the first column of `model/c` f32 `[2, 2]` in one, the second column in the other.

use ferrotron_core::checkpoint;
use libfuzzer_sys::fuzz_target;

const HEADERS: [(&str, &str, &str, usize); 2] = [
    (
        "{DATA}",
        "data-00001",
        r#"{"model/a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"model/c":{"dtype":"F32","shape":[2,1],"data_offsets":[8,16]}}"#,
        16,
    ),
    ("{MORE}", "data-00002", r#"{"model/c":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}"#, 8),
];

fuzz_target!(|text: &str| {
    let Ok(dir) = tempfile::tempdir() else { return };
    let step = dir.path().join(checkpoint::folder_name(1));
    if std::fs::create_dir(&step).is_err() {
        return;
    }
    let mut rest = text.to_string();
    for (mark, name, header, bytes) in HEADERS {
        let data = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; bytes]].concat();
        let sum = crc32c::crc32c(&data);
        let entry = format!("\"{name}.safetensors\": {{\"bytes\": {}, \"crc32c\": \"{sum:08x}\"}}", data.len());
        rest = rest.replace(mark, &entry);
        if std::fs::write(step.join(name).with_extension("safetensors"), &data).is_err() {
            return;
        }
    }
    let sealed = format!("{{\n  \"checksum\": \"crc32c:{:08x}\",\n{rest}", crc32c::crc32c(rest.as_bytes()));
    if std::fs::write(step.join("manifest.json"), sealed).is_err() {
        return;
    }
    if let Ok(loaded) = checkpoint::load(&step) {
        let _ = (loaded.step(), loaded.state().clone());
        for name in ["model/a", "adam.m/b", "model/c"] {
            let (all, some) = (loaded.read(name), loaded.read_runs(name, &[3..5, 4..8, 0..1]));
            if let (Ok(all), Ok(some)) = (all, some) {
                assert_eq!(some, [&all[3..5], &all[4..8], &all[0..1]].concat());
            }
        }
    }
});
