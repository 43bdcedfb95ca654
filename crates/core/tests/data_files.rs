//! Writing and building of datasets, and damaged files: an error that names the file, never a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use ferrotron_core::Error;
use ferrotron_core::data::blend::SURPLUS;
use ferrotron_core::data::mt19937::Mt19937;
use ferrotron_core::data::*;

fn entries(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn one_input(path: &Path, format: &TextFormat) -> [Input; 1] {
    [Input { path: path.into(), format: format.clone() }]
}

fn write(prefix: &Path, kind: TokenType, multimodal: bool) {
    let mut writer = IndexedWriter::create(prefix, kind, multimodal).unwrap();
    for d in 0..7i64 {
        for s in 0..=d % 3 {
            writer.push((0..d * 2 + s).map(|t| (t * 7 + d) % 100), (s % 2) as i8).unwrap();
        }
        writer.end_document().unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn every_token_type_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    for kind in TokenType::ALL {
        let prefix = folder.path().join(kind.name());
        let largest: i64 = match kind {
            TokenType::U8 => 255,
            TokenType::I8 => 127,
            TokenType::I16 => i16::MAX.into(),
            TokenType::U16 => u16::MAX.into(),
            TokenType::I32 => i32::MAX.into(),
            TokenType::I64 => i64::MAX,
            TokenType::F32 => 1 << 24,
            TokenType::F64 => 1 << 53,
        };
        let mut writer = IndexedWriter::create(&prefix, kind, false).unwrap();
        writer.push([0, 1, largest], 0).unwrap();
        if let Some(above) = largest.checked_add(1).filter(|_| !kind.is_float()) {
            let error = writer.push([above], 0).unwrap_err().to_string();
            assert!(error.contains(&above.to_string()) && error.contains(kind.name()), "{error}");
        }
        writer.end_document().unwrap();
        writer.finish().unwrap();
        // The prefix may have a suffix.
        let data = IndexedDataset::open(prefix.with_extension("bin")).unwrap();
        assert_eq!(data.token_type(), kind);
        assert_eq!(data.values(0).unwrap(), [0.0, 1.0, largest as f64]);
        if kind.is_float() {
            assert!(data.sequence(0).is_err());
        } else {
            assert_eq!(data.sequence(0).unwrap(), [0, 1, largest]);
        }
        assert!(data.sequence(1).is_err());
        assert!(data.document(1).is_err());
        assert!(data.read(0, 2..4, &mut Vec::new()).is_err());
    }
    assert_eq!(TokenType::for_vocab(65499), TokenType::U16);
    assert_eq!(TokenType::for_vocab(65500), TokenType::I32);
}

#[test]
fn empty_datasets_and_documents_are_valid() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("empty");
    IndexedWriter::create(&prefix, TokenType::U16, false).unwrap().finish().unwrap();
    let data = IndexedDataset::open(&prefix).unwrap();
    assert!(data.is_empty() && data.documents() == 0 && data.tokens() == 0);
    let mut writer = IndexedWriter::create(&prefix, TokenType::U16, true).unwrap();
    writer.end_document().unwrap();
    writer.push([], 3).unwrap();
    writer.end_document().unwrap();
    writer.finish().unwrap();
    let data = IndexedDataset::open(&prefix).unwrap();
    assert_eq!((data.documents(), data.len(), data.mode(0).unwrap()), (2, 1, Some(3)));
}

#[test]
fn an_unfinished_writer_leaves_existing_files_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("d");
    write(&prefix, TokenType::U16, false);
    let before = (fs::read(folder.path().join("d.bin")).unwrap(), entries(folder.path()));
    assert_eq!(before.1, ["d.bin", "d.idx"]);
    let mut writer = IndexedWriter::create(&prefix, TokenType::I32, true).unwrap();
    // Two writers of one destination do not interfere.
    let other = IndexedWriter::create(&prefix, TokenType::I32, true).unwrap();
    writer.push([1, 2, 3], 0).unwrap();
    drop(writer);
    drop(other);
    assert_eq!((fs::read(folder.path().join("d.bin")).unwrap(), entries(folder.path())), before);
    write(&prefix, TokenType::I32, false);
    assert_eq!(entries(folder.path()), before.1);
    assert_eq!(IndexedDataset::open(&prefix).unwrap().token_type(), TokenType::I32);
}

#[test]
fn only_datasets_of_the_same_type_are_appended() {
    let folder = tempfile::tempdir().unwrap();
    for (name, kind, multimodal) in
        [("a", TokenType::U16, false), ("b", TokenType::I32, false), ("c", TokenType::U16, true)]
    {
        write(&folder.path().join(name), kind, multimodal);
    }
    let open = |name: &str| IndexedDataset::open(folder.path().join(name)).unwrap();
    let mut writer = IndexedWriter::create(folder.path().join("out"), TokenType::U16, false).unwrap();
    assert!(writer.append(&open("b")).is_err());
    assert!(writer.append(&open("c")).is_err());
    writer.append(&open("a")).unwrap();
    writer.append(&open("a")).unwrap();
    writer.finish().unwrap();
    let (one, two) = (open("a"), open("out"));
    assert_eq!(two.documents(), 2 * one.documents());
    let n = one.len();
    assert!((0..2 * n).all(|s| two.sequence(s).unwrap() == one.sequence(s % n).unwrap()));
}

/// Reads everything; true if the file was accepted.
fn accepts(prefix: &Path) -> bool {
    let data = match IndexedDataset::open(prefix) {
        Ok(data) => data,
        Err(Error::Damaged { path: file, what }) => {
            assert!(file.starts_with(prefix.parent().unwrap()) && !what.is_empty());
            return false;
        }
        Err(other) => panic!("{other}"),
    };
    for d in 0..data.documents() {
        for s in data.document(d).unwrap() {
            assert_eq!(data.values(s).unwrap().len(), data.length(s).unwrap());
            data.mode(s).unwrap();
        }
    }
    true
}

#[test]
fn damaged_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("d");
    let mut random = Mt19937::new(20);
    for (round, kind) in [TokenType::U16, TokenType::I32, TokenType::U8].into_iter().enumerate() {
        write(&prefix, kind, round == 1);
        assert!(accepts(&prefix));
        let (bin, idx) = (prefix.with_extension("bin"), prefix.with_extension("idx"));
        let (good_bin, good_idx) = (fs::read(&bin).unwrap(), fs::read(&idx).unwrap());
        let data = IndexedDataset::open(&prefix).unwrap();
        // Header, lengths and pointers are checked strictly; document bounds may move and still ascend, modes are
        // free.
        let strict = 34 + 12 * data.len();
        // A file without its modes, or with bytes where modes would be, is a valid file.
        let plain = strict + 8 * (data.documents() + 1);
        let lengths = [plain, plain + data.len()];
        drop(data);
        for _ in 0..1500 {
            let mut bad = good_idx.clone();
            let mut draw = |n: usize| random.next_u32() as usize % n;
            let hit_strict = match draw(4) {
                0 => {
                    bad.truncate(draw(bad.len()));
                    !lengths.contains(&bad.len())
                }
                1 => {
                    let extra = 1 + draw(40);
                    bad.extend((0..extra).map(|_| draw(256) as u8));
                    !lengths.contains(&bad.len())
                }
                2 => {
                    let at = draw(bad.len());
                    bad[at] ^= 1 << draw(8);
                    at < strict
                }
                _ => {
                    let at = draw(bad.len() - 8);
                    let wild = [0u64, u64::MAX, i64::MAX as u64, 1 << 63, 1 << 40][draw(5)];
                    let changed = bad[at..at + 8] != wild.to_le_bytes();
                    bad[at..at + 8].copy_from_slice(&wild.to_le_bytes());
                    changed && at + 8 <= strict
                }
            };
            fs::write(&idx, &bad).unwrap();
            let accepted = accepts(&prefix);
            assert!(!(accepted && hit_strict), "a damaged {} was accepted", idx.display());
        }
        fs::write(&idx, &good_idx).unwrap();
        for cut in [0, 1, good_bin.len() - 1] {
            fs::write(&bin, &good_bin[..cut]).unwrap();
            assert!(!accepts(&prefix));
        }
        fs::write(&bin, [&good_bin[..], &[0]].concat()).unwrap();
        assert!(!accepts(&prefix));
        fs::write(&bin, &good_bin).unwrap();
        assert!(accepts(&prefix));
    }
    fs::remove_file(prefix.with_extension("bin")).unwrap();
    assert!(matches!(IndexedDataset::open(&prefix), Err(Error::Io { .. })));
    fs::create_dir(prefix.with_extension("bin")).unwrap();
    assert!(IndexedDataset::open(&prefix).is_err());
}

#[test]
fn ids_outside_the_vocabulary_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("d");
    let mut writer = IndexedWriter::create(&prefix, TokenType::I32, false).unwrap();
    writer.push([1, 2, 3, 70, 5, 6, -4, 8, 9], 0).unwrap();
    writer.end_document().unwrap();
    writer.finish().unwrap();
    let shares = [1.0, 0.0, 0.0];
    let [train, ..] = GptDataset::splits(&prefix, &shares, [None; 3], &GptConfig::new(2, 1, 70)).unwrap();
    let errors = (0..4).filter_map(|n| train.as_ref().unwrap().batch(n, 1).err());
    let errors: Vec<String> = errors.map(|e| e.to_string()).collect();
    assert!(errors.iter().any(|e| e.contains("token 70")), "{errors:?}");
    assert!(errors.iter().any(|e| e.contains("token -4")), "{errors:?}");
    let documents = Box::new(vec![vec![1, 2, 300]]);
    assert!(Packed::new(documents, 4, 70, None).unwrap().batch(0, 1).is_err());
    assert!(Stream::sequential(vec![1, 2, 300], 2).unwrap().with_vocab(70).is_err());
    assert!(Stream::sequential(vec![1, 2], 2).is_err());
}

#[test]
fn a_single_dataset_is_repeated_as_needed() {
    let folder = tempfile::tempdir().unwrap();
    let prefixes = [folder.path().join("d")];
    write(&prefixes[0], TokenType::U16, false);
    let shares = [1.0, 0.0, 0.0];
    let (config, samples) = (GptConfig::new(4, 1, 100), [Some(100), None, None]);
    let [blend, ..] = Blend::gpt(&prefixes, None, &shares, samples, SURPLUS, &config).unwrap();
    let [plain, ..] = GptDataset::splits(&prefixes[0], &shares, samples, &config).unwrap();
    let (blend, plain) = (blend.unwrap(), plain.unwrap());
    assert!(blend.samples() >= 100);
    assert_eq!(blend.batch(0, 100).unwrap(), plain.batch(0, 100).unwrap());
    // Without weights, several datasets provide one epoch each, whatever the count.
    let twice = [prefixes[0].clone(), prefixes[0].clone()];
    let [both, ..] = Blend::gpt(&twice, None, &shares, samples, SURPLUS, &config).unwrap();
    let [one, ..] = GptDataset::splits(&prefixes[0], &shares, [None; 3], &config).unwrap();
    assert_eq!(both.unwrap().samples(), 2 * one.unwrap().samples());
    assert!(Blend::gpt(&twice, Some(&[1.0, 1.0]), &shares, [None; 3], SURPLUS, &config).is_err());
    assert!(Blend::gpt(&twice, Some(&[1.0]), &shares, samples, SURPLUS, &config).is_err());
    // With weights, members are asked for more than their share of 50.
    let asked = |surplus| {
        let [blend, ..] = Blend::gpt(&twice, Some(&[1.0, 1.0]), &shares, samples, surplus, &config).unwrap();
        blend.unwrap().members().iter().map(|m| m.samples()).min().unwrap()
    };
    assert!(asked(0.0) >= 50 && asked(3.0) >= 200 && asked(0.0) < asked(3.0));
}

fn vocab(vocab: u32) -> TokenizerInfo {
    TokenizerInfo { vocab, digest: None }
}

fn bytes(text: &str) -> ferrotron_core::Result<Vec<u32>> {
    Ok(text.bytes().map(u32::from).collect())
}

#[test]
fn text_and_json_lines_become_documents() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in"), folder.path().join("out"));
    let key = || TextFormat::JsonLines { key: "text".into() };
    let json = "\u{feff}{\"text\": \"one\", \"id\": 1}\n\n{\"text\": \"\"}\r\n{\"x\": [], \"text\": \"tw\\u00f6\\n\"}";
    for (content, format, expected, skipped) in [
        ("one\n\ntw\u{f6}\r\nthree", TextFormat::Text, vec!["one", "tw\u{f6}", "three"], 1),
        (json, key(), vec!["one", "tw\u{f6}\n"], 2),
    ] {
        fs::write(&input, content).unwrap();
        let reported = Cell::new((0, 0));
        let summary = build(&one_input(&input, &format), &bytes, Some(256), &vocab(257), &out, &|d, t| {
            reported.set((d, t))
        })
        .unwrap();
        assert_eq!(reported.get(), (content.len() as u64, content.len() as u64));
        assert_eq!((summary.documents, summary.skipped), (expected.len() as u64, skipped));
        let data = IndexedDataset::open(&out).unwrap();
        assert_eq!(data.token_type(), TokenType::U16);
        assert_eq!((data.documents(), data.tokens()), (expected.len(), summary.tokens));
        for (d, text) in expected.iter().enumerate() {
            let tokens: Vec<i64> = text.bytes().map(i64::from).chain([256]).collect();
            assert_eq!(data.sequence(d).unwrap(), tokens);
        }
    }
    let kept = fs::read(out.with_extension("bin")).unwrap();
    for (content, format, says) in [
        (&b"ok\n\xff\n"[..], TextFormat::Text, "line 2"),
        (b"", TextFormat::Text, "no document"),
        (b"\n\n", TextFormat::Text, "no document"),
        (b"{\"text\": 1}", key(), "not a string"),
        (b"{\"text\": \"a\"}\n{\"txet\": \"a\"}", key(), "txet"),
        (b"{\"text\": \"a\"", key(), "line 1"),
        (b"[1]", key(), "line 1"),
    ] {
        fs::write(&input, content).unwrap();
        let error = build(&one_input(&input, &format), &bytes, None, &vocab(256), &out, &|_, _| {})
            .unwrap_err()
            .to_string();
        assert!(error.contains(says), "{error}");
    }
    fs::write(&input, "a").unwrap();
    assert!(
        build(&one_input(&input, &TextFormat::Text), &bytes, None, &vocab(50), &out, &|_, _| {}).is_err()
    );
    assert!(
        build(&one_input(&input, &TextFormat::Text), &bytes, Some(256), &vocab(256), &out, &|_, _| {})
            .is_err()
    );
    let refuse = |_: &str| Err(Error::Invalid("no".into()));
    assert!(
        build(&one_input(&input, &TextFormat::Text), &refuse, None, &vocab(256), &out, &|_, _| {}).is_err()
    );
    let nowhere = folder.path().join("missing/out");
    assert!(
        build(&one_input(&input, &TextFormat::Text), &bytes, None, &vocab(256), &nowhere, &|_, _| {})
            .is_err()
    );
    assert!(
        build(&one_input(&nowhere, &TextFormat::Text), &bytes, None, &vocab(256), &out, &|_, _| {}).is_err()
    );
    // Failures leave existing files unchanged and no temporary files.
    assert_eq!(fs::read(out.with_extension("bin")).unwrap(), kept);
    assert_eq!(entries(folder.path()), ["in", "out.bin", "out.dataset.json", "out.idx"]);
}

/// A file that is one document is tokenized in pieces, cut after lines, or between characters if there are none.
#[test]
fn whole_files_become_documents() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let lines: String = (0..1_200_000u32).map(|i| format!("{i} ö\n")).collect();
    let no_lines = "é".repeat(9 << 20);
    assert!(lines.len() > 10 << 20 && no_lines.len() > 17 << 20);
    let contents = ["\u{feff}first\n", &lines, "", &no_lines, "\n"];
    let input = |(i, content): (usize, &&str)| {
        let path = folder.path().join(format!("in{i}"));
        fs::write(&path, content).unwrap();
        Input { path, format: TextFormat::Whole }
    };
    let inputs: Vec<Input> = contents.iter().enumerate().map(input).collect();
    let pieces = AtomicUsize::new(0);
    let tokenize = |text: &str| {
        pieces.fetch_add(1, Relaxed);
        assert!(text.len() <= 9 << 20);
        bytes(text)
    };
    let summary = build(&inputs, &tokenize, Some(0), &vocab(256), &out, &|_, _| {}).unwrap();
    // One, two, none, three and one.
    assert_eq!(pieces.load(Relaxed), 7);
    assert_eq!((summary.documents, summary.skipped), (4, 1));
    assert_eq!(summary.bytes, contents.iter().map(|c| c.len() as u64).sum::<u64>());
    let data = IndexedDataset::open(&out).unwrap();
    assert_eq!((data.documents(), data.len()), (4, 4));
    let want = ["first\n", &lines, &no_lines, "\n"];
    for (i, text) in want.iter().enumerate() {
        let got = data.sequence(i).unwrap();
        assert!(got.iter().copied().eq(text.bytes().map(i64::from).chain([0])), "document {i}");
    }
    fs::write(&inputs[2].path, b"abc\xff").unwrap();
    let error = build(&inputs, &tokenize, None, &vocab(256), &out, &|_, _| {}).unwrap_err().to_string();
    assert!(error.contains("in2") && error.contains("UTF-8"), "{error}");
}

#[test]
fn a_file_truncated_while_it_is_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("d");
    write(&prefix, TokenType::U16, false);
    let data = IndexedDataset::open(&prefix).unwrap();
    let last = (0..data.len()).rev().find(|s| data.length(*s).unwrap() > 0).unwrap();
    data.sequence(last).unwrap();
    let bin = prefix.with_extension("bin");
    let file = fs::OpenOptions::new().write(true).open(&bin).unwrap();
    file.set_len(fs::metadata(&bin).unwrap().len() - 2).unwrap();
    let error = data.sequence(last).unwrap_err().to_string();
    assert!(error.contains("truncated while in use") && error.contains("d.bin"), "{error}");
    file.set_len(0).unwrap();
    assert!(data.sequence(last).is_err());
    // The index is in memory: what becomes of its file does not matter any more.
    fs::OpenOptions::new().write(true).open(prefix.with_extension("idx")).unwrap().set_len(0).unwrap();
    assert!((0..data.len()).all(|s| data.length(s).is_ok()));
}

#[test]
fn special_files_are_refused_without_being_read() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("d");
    write(&prefix, TokenType::U16, false);
    for ending in ["bin", "idx"] {
        let path = prefix.with_extension(ending);
        let content = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let error = IndexedDataset::open(&prefix).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        fs::remove_file(&path).unwrap();
        fs::write(&path, content).unwrap();
    }
}

#[test]
fn the_range_of_ids_is_that_of_all_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("d");
    let mut writer = IndexedWriter::create(&prefix, TokenType::I32, false).unwrap();
    let many = 3 << 20;
    writer.push((0..many).map(|i| if i == many - 7 { 70_000 } else { 5 + i % 11 }), 0).unwrap();
    writer.push([-3], 0).unwrap();
    writer.end_document().unwrap();
    writer.finish().unwrap();
    let data = IndexedDataset::open(&prefix).unwrap();
    assert_eq!(data.id_range(u64::MAX).unwrap(), (-3, 70_000, many as u64 + 1));
    // Three chunks of 4 MiB and four bytes; a limit of two of them takes every second one.
    assert_eq!(data.id_range(8 << 20).unwrap().2, 2 << 20);
}
