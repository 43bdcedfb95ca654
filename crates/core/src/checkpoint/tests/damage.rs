//! Any byte of a checkpoint changed, lost or added gives a one-line error, no panic, and no tensor.

use super::*;
use crate::checkpoint::load::with_older;
use crate::tensorfile::tests::corrupt;
use std::fs;

/// Loading must fail with one line that names the file.
fn refused(path: &Path, file: &str, how: &str) -> String {
    let e = match load(path) {
        Ok(_) => panic!("{file} {how}: loaded"),
        Err(e) => e.to_string(),
    };
    assert!(e.contains(file) && !e.contains('\n'), "{file} {how}: {e}");
    e
}

#[test]
fn every_flipped_byte_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &snapshot(7, 3));
    let mut rng = SeededRng(1);
    for (name, good) in files(&path) {
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << rng.below(8);
            fs::write(path.join(&name), &bad).unwrap();
            refused(&path, &name, &format!("flipped at {at}"));
        }
        fs::write(path.join(&name), &good).unwrap();
    }
    assert_holds(&path, &snapshot(7, 3));
}

#[test]
fn thousands_of_corruptions_are_detected() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &snapshot(7, 3));
    let mut rng = SeededRng(2);
    for (name, good) in files(&path) {
        for round in 0..2000 {
            let bad = corrupt(&mut rng, &good);
            if bad != good {
                fs::write(path.join(&name), &bad).unwrap();
                refused(&path, &name, &format!("injury {round}"));
            }
        }
        for length in 0..good.len() {
            fs::write(path.join(&name), &good[..length]).unwrap();
            refused(&path, &name, &format!("cut to {length}"));
        }
        fs::write(path.join(&name), &good).unwrap();
    }
    assert_holds(&path, &snapshot(7, 3));
}

#[test]
fn errors_say_what_happened() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &snapshot(7, 3));
    let model = path.join("model.safetensors");
    let good = fs::read(&model).unwrap();
    let try_with = |bytes: &[u8], want: &str| {
        fs::write(&model, bytes).unwrap();
        let e = refused(&path, "model.safetensors", want);
        assert!(e.contains(want), "{want}: {e}");
    };
    try_with(&good[..good.len() - 1], "cut short: ");
    try_with(&[&good[..], &[0]].concat(), "too long: ");
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    try_with(&bad, "is damaged in tensor \"model/embedding\": its checksum is");
    let mut bad = good.clone();
    bad[9] = b'!'; // a tensor's quote
    try_with(&bad, "header is damaged");
    let at = good.windows(9).position(|w| w == b"embedding").unwrap();
    let mut bad = good.clone();
    bad[at] = b'E';
    try_with(&bad, "is damaged in its header: its checksum is");
    fs::remove_file(&model).unwrap();
    let e = refused(&path, "model.safetensors", "gone");
    assert!(
        e.contains(
            "is missing, though the manifest lists it; it holds tensor \"model/embedding\" and 3 more"
        ),
        "{e}"
    );
    fs::create_dir(&model).unwrap();
    refused(&path, "model.safetensors", "a folder");
    fs::remove_dir(&model).unwrap();
    fs::write(&model, &good).unwrap();

    let renamed = dir.path().join("step-00000008");
    fs::rename(&path, &renamed).unwrap();
    assert!(refused(&renamed, "step-00000008", "renamed").contains("named for step 8 but holds step 7"));
    fs::rename(&renamed, &path).unwrap();
    fs::remove_file(path.join("manifest.json")).unwrap();
    assert!(refused(&path, "step-00000007", "no manifest").contains("has no manifest.json"));
    assert!(refused(&dir.path().join("nowhere"), "nowhere", "absent").contains("not a checkpoint folder"));
}

/// A manifest that is consistent (its checksum is right) but wrong.
#[test]
fn forged_manifests_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &snapshot(7, 3));
    let manifest = path.join("manifest.json");
    let good = fs::read_to_string(&manifest).unwrap();
    let body = good.split_once(",\n").unwrap().1;
    let forge = |body: &str| {
        format!("{{\n  \"checksum\": \"crc32c:{:08x}\",\n{body}", crc32c::crc32c(body.as_bytes()))
    };
    assert_eq!(forge(body), good);
    let other = fs::read_to_string(save(dir.path(), &snapshot(6, 4)).join("manifest.json")).unwrap();
    for (bad, want) in [
        (
            body.replace("\"version\": 2", "\"version\": 3"),
            "format version 3, but this program reads versions up to 2",
        ),
        (body.replace("ferrotron checkpoint", "something"), "not the manifest of a checkpoint"),
        (body.replace("\"step\": 7", "\"step\": -7"), "not a valid manifest"),
        (body.replace("\"step\": 7", "\"step\": 7, \"more\": 1"), "not a valid manifest"),
        (body.replace("model.safetensors", "../model.safetensors"), "not the name of a checkpoint file"),
        (body.replace("model.safetensors", "/etc/passwd"), "not the name of a checkpoint file"),
        (body.replacen("model.safetensors\"", "other.safetensors\"", 1), "which it does not list"),
        (
            body.replace("\"model/scale\"", "\"model/scales\""),
            "\"model/scale\", which the manifest does not list",
        ),
        (body.replace("\"mask\":", "\"mask2\":"), "tensor \"mask\", which the manifest does not list"),
        (body.replace("\"version\": 2", "\"version\": 1"), "not a valid manifest"),
        (body.replacen("\"dtype\": \"BOOL\"", "\"dtype\": \"U8\"", 1), "where the manifest lists U8 [5]"),
        (
            body.replacen("\"dtype\": \"BOOL\"", "\"dtype\": \"U9\"", 1),
            "tensor \"mask\" what is no dtype: \"U9\"",
        ),
        (body.replacen("[7, 3]", "[7, 4]", 1), "where the manifest lists F32 [7, 4]"),
        (body.replacen("[7, 3]", "[7, 18446744073709551615]", 1), "more elements than can be counted"),
        (body.replacen("\"crc32c\": \"", "\"axis\": 0, \"crc32c\": \"", 4), "not a valid manifest"),
        (body.trim_end().trim_end_matches('}').to_string(), "not valid JSON"),
        (format!("{body}x"), "not valid JSON"),
        (format!("  \"a\": {}", "[".repeat(100_000)), "not valid JSON"),
    ] {
        assert_ne!(bad, body, "{want}");
        fs::write(&manifest, forge(&bad)).unwrap();
        let e = load(&path).unwrap_err().to_string();
        assert!(e.contains(want) && !e.contains('\n'), "{want}: {e}");
    }
    fs::write(&manifest, other).unwrap();
    load(&path).unwrap_err();
}

#[test]
fn an_older_checkpoint_is_suggested_but_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (1..=4).map(|s| save(dir.path(), &snapshot(s, s))).collect();
    // The newest has damaged data and the one before lacks a file, so the one before that is suggested.
    let model = paths[3].join("model.safetensors");
    let mut bad = fs::read(&model).unwrap();
    *bad.last_mut().unwrap() ^= 0x80;
    fs::write(&model, bad).unwrap();
    fs::remove_file(paths[2].join("optimizer.safetensors")).unwrap();
    let newest = latest(dir.path()).unwrap().unwrap();
    assert_eq!(newest, paths[3]);
    let e = refused(&newest, "model.safetensors", "flipped");
    assert!(e.contains("the older checkpoint step-00000002 is still there: to go on from it, move "), "{e}");
    fs::rename(&paths[3], dir.path().join("damaged")).unwrap();
    fs::rename(&paths[2], dir.path().join("damaged too")).unwrap();
    assert_holds(&latest(dir.path()).unwrap().unwrap(), &snapshot(2, 2));
    // A limit of open files, of this rank or of another, is no fault of the checkpoint.
    for errno in [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE] {
        let full = Error::io_doing(&paths[1], "open", errno.into());
        let heard = Error::damaged(&paths[1], format!("rank 1 found: {full}"));
        for e in [full, heard] {
            let e = with_older(&paths[1], e).to_string();
            assert!(e.ends_with("raise the limit of open files (ulimit -n)"), "{e}");
        }
    }
    // The oldest has no fallback.
    fs::remove_file(paths[0].join("model.safetensors")).unwrap();
    assert!(!refused(&paths[0], "model.safetensors", "gone").contains("older"));
}
