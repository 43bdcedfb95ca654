//! Compared with the official crate: the same bytes written, the same verdict on every file read.

use super::*;
use crate::error::Error;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

#[path = "../../../../tests/support/rng.rs"]
mod rng;

pub(crate) use rng::SeededRng;

type Sample = Vec<(TensorDecl, Vec<u8>)>;

fn sample() -> Sample {
    let shapes: [&[usize]; 5] = [&[], &[3], &[2, 4], &[0, 5], &[1, 2, 8]];
    let mut rng = SeededRng(7);
    let mut all = Vec::new();
    for (i, &dtype) in FileDType::ALL.iter().enumerate() {
        for k in 0..2 {
            // Sub-byte types only in shapes that end on a byte boundary.
            let shape = if dtype.bits() < 8 { shapes[4] } else { shapes[(i * 2 + k) % 5] }.to_vec();
            let bytes = rng.bytes(dtype.tensor_bytes(&shape).unwrap() as usize);
            let name = format!("layer.{}.\"{dtype}\"/\u{3b1}\n", (i * 5 + k * 3) % 11);
            all.push((TensorDecl { name: format!("{name}{k}"), dtype, shape }, bytes));
        }
    }
    all
}

fn official_dtype(d: FileDType) -> Dtype {
    serde_json::from_value(serde_json::Value::String(d.name().into())).unwrap()
}

fn official(sample: &Sample, metadata: Option<HashMap<String, String>>) -> Vec<u8> {
    let views: Vec<_> = sample
        .iter()
        .map(|(t, b)| (t.name.clone(), TensorView::new(official_dtype(t.dtype), t.shape.clone(), b).unwrap()))
        .collect();
    safetensors::serialize(views, metadata).unwrap()
}

fn write(path: &Path, sample: &Sample, metadata: &BTreeMap<String, String>) -> Written {
    let decls: Vec<_> = sample.iter().map(|(t, _)| t.clone()).collect();
    let mut w = TensorFileWriter::create(path, &decls, metadata).unwrap();
    let order: Vec<String> = w.tensors().iter().map(|t| t.name.clone()).collect();
    for name in order {
        let bytes = &sample.iter().find(|(t, _)| t.name == name).unwrap().1;
        for piece in bytes.chunks(5) {
            w.write(&name, piece).unwrap();
        }
    }
    w.finish().unwrap()
}

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    (dir, path)
}

#[test]
fn written_bytes_equal_the_official_writer() {
    let (_dir, path) = scratch();
    let all = sample();
    for n in [0, 1, 2, 7, all.len()] {
        let some: Sample = all[..n].to_vec();
        let written = write(&path, &some, &BTreeMap::new());
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes, official(&some, None));
        assert_eq!(written, Written { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(&bytes) });
    }
    let one = [("format".to_string(), "pt".to_string())];
    write(&path, &all, &BTreeMap::from(one.clone()));
    assert_eq!(std::fs::read(&path).unwrap(), official(&all, Some(HashMap::from(one))));
}

#[test]
fn files_round_trip() {
    let (_dir, path) = scratch();
    let all = sample();
    let metadata = BTreeMap::from([("b".into(), "2".into()), ("a\"".into(), "\u{1}".into())]);
    write(&path, &all, &metadata);
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.metadata(), &metadata);
    assert_eq!(file.tensors().len(), all.len());
    assert!(file.tensors().windows(2).all(|w| w[0].end == w[1].begin));
    for (t, bytes) in &all {
        let info = file.get(&t.name).unwrap();
        assert_eq!((info.dtype, &info.shape), (t.dtype, &t.shape));
        assert_eq!(&file.read(&t.name).unwrap(), bytes);
        for start in 0..=bytes.len() {
            let mut part = vec![0; (bytes.len() - start) / 2];
            file.read_range(&t.name, start as u64, &mut part).unwrap();
            assert_eq!(part, bytes[start..start + part.len()]);
        }
        let mut one = [0];
        assert!(file.read_range(&t.name, bytes.len() as u64, &mut one).is_err());
        assert!(file.read_range(&t.name, u64::MAX, &mut one).is_err());
    }
    assert!(matches!(file.read("nothing"), Err(Error::Missing { .. })));
}

#[test]
fn the_given_order_is_kept() {
    let (_dir, path) = scratch();
    let decl = |name: &str, dtype| TensorDecl { name: name.into(), dtype, shape: vec![1] };
    let decls = [decl("z", FileDType::U8), decl("a", FileDType::F64)];
    let mut w = TensorFileWriter::create_in_order(&path, &decls, &BTreeMap::new()).unwrap();
    assert_eq!(w.next_tensor().unwrap().name, "z");
    w.write("z", &[1]).unwrap();
    w.write("a", &[2; 8]).unwrap();
    w.finish().unwrap();
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["z", "a"]);
    assert_eq!(file.read("a").unwrap(), [2; 8]);
}

#[test]
fn the_writer_refuses_misuse() {
    let (_dir, path) = scratch();
    let decl = |name: &str, shape: &[usize]| TensorDecl {
        name: name.into(),
        dtype: FileDType::F32,
        shape: shape.to_vec(),
    };
    let make = |d: &[TensorDecl]| TensorFileWriter::create(&path, d, &BTreeMap::new());
    assert!(make(&[decl("a", &[1]), decl("a", &[2])]).is_err());
    assert!(make(&[decl("__metadata__", &[1])]).is_err());
    assert!(make(&[decl("a", &[usize::MAX, 2])]).is_err());
    assert!(make(&[decl("a", &[usize::MAX])]).is_err());
    let two = [decl("a", &[1]), decl("b", &[1])];
    assert!(make(&two).unwrap().write("b", &[0]).is_err());
    assert!(make(&two).unwrap().write("a", &[0; 5]).is_err());
    let mut w = make(&two).unwrap();
    w.write("a", &[0; 4]).unwrap();
    assert!(w.write("a", &[0]).is_err());
    let e = w.finish().unwrap_err().to_string();
    assert!(e.contains("\"b\"") && e.contains("0 of its 4"), "{e}");
}

fn file_of(header: &str, data: usize) -> Vec<u8> {
    let mut f = (header.len() as u64).to_le_bytes().to_vec();
    f.extend(header.bytes());
    f.resize(f.len() + data, 0);
    f
}

#[test]
fn each_kind_of_damage_has_its_own_error() {
    let (_dir, path) = scratch();
    let t = |name: &str, dtype: &str, shape: &str, o: &str| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{o}}}"#)
    };
    let a = t("a", "F32", "[2]", "[0,8]");
    let max = u64::MAX;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "only 0 bytes"),
        (vec![0; 7], "only 7 bytes"),
        (vec![0; 8], "does not begin"),
        (max.to_le_bytes().to_vec(), "claims a header"),
        (99_999_999u64.to_le_bytes().to_vec(), "cut short"),
        (file_of("[]", 0), "does not begin"),
        (file_of("{", 0), "header is damaged"),
        (file_of("{}", 3), "3 bytes after"),
        (file_of("{} x", 0), "header is damaged"),
        (file_of(&format!("{{{a}}}"), 7), "\"a\" claims bytes 0..8 of 7"),
        (file_of(&format!("{{{a}}}"), 9), "1 bytes after"),
        (file_of(&format!("{{{a},{a}}}"), 8), "\"a\" appears twice"),
        (file_of(&format!("{{{a},{}}}", t("b", "U8", "[4]", "[6,10]")), 10), "\"b\" overlaps"),
        (file_of(&format!("{{{a},{}}}", t("b", "U8", "[4]", "[9,13]")), 13), "\"b\" leaves a hole"),
        (file_of(&format!("{{{}}}", t("b", "U8", "[4]", "[1,5]")), 5), "\"b\" leaves a hole"),
        (file_of(&format!("{{{}}}", t("b", "U8", "[4]", "[4,0]")), 5), "\"b\" claims bytes 4..0"),
        (file_of(&format!("{{{}}}", t("b", "U9", "[4]", "[0,4]")), 4), "unknown dtype \"U9\""),
        (file_of(&format!("{{{}}}", t("b", "U8", "[5]", "[0,4]")), 4), "takes 5"),
        (file_of(&format!("{{{}}}", t("b", "F4", "[3]", "[0,1]")), 1), "whole byte"),
        (file_of(&format!("{{{}}}", t("b", "U8", "[-1]", "[0,1]")), 1), "\"b\""),
        (file_of(&format!("{{{}}}", t("b", "U8", &format!("[{max},{max}]"), "[0,1]")), 1), "can be counted"),
        (file_of(&format!("{{{}}}", t("b", "F64", &format!("[{max}]"), "[0,1]")), 1), "can be counted"),
        (
            file_of(&format!("{{{}}}", t("b", "U8", "[1]", &format!("[{},{max}]", max - 1))), 1),
            "\"b\" claims",
        ),
        (
            file_of(&format!("{{{}}}", t("b", "U8", &format!("[1{}]", ",1".repeat(64)), "[0,1]")), 1),
            "65 axes",
        ),
        (file_of(r#"{"b":{"dtype":"U8","shape":[1]}}"#, 1), "data_offsets"),
        (file_of(r#"{"__metadata__":{"k":"v","k":"w"}}"#, 0), "\"k\" twice"),
        (file_of(r#"{"__metadata__":{"k":1}}"#, 0), "header is damaged"),
        (file_of(&format!(r#"{{"b":{}"#, "[".repeat(5000)), 0), "header is damaged"),
    ];
    for (bytes, want) in cases {
        std::fs::write(&path, &bytes).unwrap();
        let e = TensorFile::open(&path).unwrap_err();
        assert!(matches!(e, Error::Damaged { .. }), "{e}");
        let e = e.to_string();
        assert!(e.contains(want) && e.contains("x.safetensors") && !e.contains('\n'), "{want}: {e}");
    }
    let dir = path.parent().unwrap();
    assert!(TensorFile::open(dir).is_err());
    assert!(matches!(TensorFile::open(&dir.join("none")), Err(Error::Io { .. })));
}

/// One random corruption: flip, truncate, extend, overwrite, cut out, or repeat bytes.
pub(crate) fn corrupt(rng: &mut SeededRng, good: &[u8]) -> Vec<u8> {
    let mut bad = good.to_vec();
    let at = rng.below(good.len());
    match rng.below(6) {
        0 | 1 => bad[at] ^= 1 << rng.below(8),
        2 => bad.truncate(at),
        3 => bad.extend({
            let n = 1 + rng.below(9);
            rng.bytes(n)
        }),
        4 => {
            let n = 1 + rng.below(8.min(good.len() - at));
            let noise = rng.bytes(n);
            bad[at..at + n].copy_from_slice(&noise);
        }
        _ => {
            let n = 1 + rng.below(16.min(good.len() - at));
            bad.drain(at..at + n);
        }
    }
    bad
}

#[test]
fn corrupt_files_never_panic_and_get_the_verdict_of_the_official_reader() {
    let (_dir, path) = scratch();
    let all: Sample = sample().into_iter().step_by(5).collect();
    write(&path, &all, &BTreeMap::from([("format".into(), "pt".into())]));
    let good = std::fs::read(&path).unwrap();
    let mut rng = SeededRng(11);
    let mut refused = 0;
    for _ in 0..6000 {
        let bad = corrupt(&mut rng, &good);
        std::fs::write(&path, &bad).unwrap();
        let ours = TensorFile::open(&path);
        let theirs = SafeTensors::deserialize(&bad);
        refused += usize::from(ours.is_err());
        match (&ours, &theirs) {
            (Ok(ours), Ok(theirs)) => {
                for t in ours.tensors() {
                    assert_eq!(ours.read(&t.name).unwrap(), theirs.tensor(&t.name).unwrap().data());
                }
                assert_eq!(ours.tensors().len(), theirs.len());
            }
            (Ok(_), Err(e)) => panic!("accepted what the official reader refuses: {e}"),
            // Stricter only where the official reader is lax: a duplicate name, a header that does not start with
            // '{'.
            (Err(e), Ok(_)) => {
                let e = e.to_string();
                assert!(e.contains("twice") || e.contains("does not begin"), "{e}");
            }
            (Err(e), Err(_)) => assert!(!e.to_string().contains('\n')),
        }
    }
    assert!(refused > 3000, "only {refused} corruptions affected the header or size");
}
