//! Text inputs: files, folders and globs, plain or compressed.

use crate::fs::open_regular;
use crate::{Error, Result};
use flate2::read::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Files of a folder that are data; others, such as a README, are left alone.
const IN_FOLDERS: &[&str] = &["jsonl", "ndjson", "txt", "text"];
/// Characters that make a path a glob, unless a file of that name exists.
const GLOB: [char; 3] = ['*', '?', '['];
const BUFFER: usize = 1 << 20;

/// How the bytes of a file are compressed, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

fn compression(path: &Path) -> Compression {
    match lower_extension(path).as_str() {
        "gz" => Compression::Gzip,
        "zst" | "zstd" => Compression::Zstd,
        _ => Compression::None,
    }
}

fn lower_extension(path: &Path) -> String {
    path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase()
}

/// The ending of a file's name in lower case, without that of its compression: `jsonl` for `a.JSONL.gz`.
pub fn extension(path: &Path) -> String {
    match compression(path) {
        Compression::None => lower_extension(path),
        _ => lower_extension(Path::new(path.file_stem().unwrap_or_default())),
    }
}

/// True for files whose lines are JSON objects.
pub fn is_json_lines(path: &Path) -> bool {
    matches!(extension(path).as_str(), "jsonl" | "ndjson")
}

/// The files that a path stands for, in the order of their names: the file itself, the data files of a folder and of the
/// folders in it, or what a glob (`data/*.jsonl.gz`, `data/**/*.jsonl`) matches.
pub fn expand(path: &Path) -> Result<Vec<PathBuf>> {
    let text = path.to_string_lossy();
    if path.is_dir() {
        let mut files = Vec::new();
        folder(path, &mut files)?;
        if files.is_empty() {
            let what = format!("holds no data: no file in it ends with {}", endings());
            return Err(Error::damaged(path, what));
        }
        files.sort();
        return Ok(files);
    }
    if path.exists() || !text.contains(GLOB) {
        return Ok(vec![path.to_path_buf()]);
    }
    let wrong = |what: String| Error::damaged(path, what);
    // As a shell has it: `*` finds no hidden file.
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let found = glob::glob_with(&text, options).map_err(|e| wrong(format!("is not a glob ({e})")))?;
    let mut files = Vec::new();
    for entry in found {
        let file = entry.map_err(|e| wrong(format!("cannot be searched ({e})")))?;
        if file.is_file() {
            files.push(file);
        }
    }
    match files.is_empty() {
        true => Err(wrong("no file matches it; quote a glob so that the shell leaves it alone".into())),
        false => Ok(files),
    }
}

fn folder(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
        let entry = entry.map_err(Error::io(dir))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(Error::io(&path))?;
        // Hidden files and folders are no data, and a linked folder could lead back here.
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        if kind.is_dir() {
            folder(&path, files)?;
        } else if IN_FOLDERS.contains(&extension(&path).as_str()) && path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

fn endings() -> String {
    let all: Vec<String> = IN_FOLDERS.iter().map(|e| format!(".{e}")).collect();
    format!("{}, or these with .gz or .zst", all.join(", "))
}

/// An open input: its text, decompressed, and how many bytes of the file have been read for it.
pub struct InputReader {
    text: Box<dyn BufRead + Send>,
    read: Arc<AtomicU64>,
}

impl InputReader {
    /// Opens a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let read = Arc::new(AtomicU64::new(0));
        let file = Counted { file: open_regular(path)?, read: read.clone() };
        let file = BufReader::with_capacity(BUFFER, file);
        let text: Box<dyn BufRead + Send> = match compression(path) {
            Compression::None => Box::new(file),
            Compression::Gzip => Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(file))),
            Compression::Zstd => Box::new(BufReader::with_capacity(BUFFER, ZstdFrames::new(file))),
        };
        Ok(Self { text, read })
    }

    /// Bytes of the file read so far.
    pub fn file_bytes(&self) -> u64 {
        self.read.load(Relaxed)
    }
}

impl Read for InputReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.text.read(out)
    }
}

impl BufRead for InputReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.text.fill_buf()
    }
    fn consume(&mut self, n: usize) {
        self.text.consume(n);
    }
}

/// A file that counts what is read of it.
struct Counted {
    file: File,
    read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(out)?;
        self.read.fetch_add(n as u64, Relaxed);
        Ok(n)
    }
}

/// The frames of a zstd file one after the other, as `zstd -T0`, `pzstd` and `cat` write them.
struct ZstdFrames {
    source: BufReader<Counted>,
    decoder: FrameDecoder,
    inside: bool,
}

impl ZstdFrames {
    fn new(source: BufReader<Counted>) -> Self {
        Self { source, decoder: FrameDecoder::new(), inside: false }
    }

    /// Begins the next frame; false at the end of the file.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let mut frame = (&mut self.source).take(length.into());
                    if io::copy(&mut frame, &mut io::sink())? != u64::from(length) {
                        return Err(damaged_zstd("the file is truncated"));
                    }
                }
                Err(e) => return Err(damaged_zstd(e)),
            }
        }
        Ok(false)
    }
}

fn damaged_zstd(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("not valid zstd: {what}"))
}

impl Read for ZstdFrames {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.inside {
                if !self.next_frame()? {
                    return Ok(0);
                }
                self.inside = true;
            }
            let decoder = &mut self.decoder;
            while decoder.can_collect() == 0 && !decoder.is_finished() {
                let block = BlockDecodingStrategy::UptoBlocks(1);
                decoder.decode_blocks(&mut self.source, block).map_err(damaged_zstd)?;
            }
            let n = decoder.read(out)?;
            if n > 0 {
                return Ok(n);
            }
            let sums = (decoder.get_checksum_from_data(), decoder.get_calculated_checksum());
            if let (Some(stored), Some(calculated)) = sums
                && stored != calculated
            {
                return Err(damaged_zstd("a checksum is wrong"));
            }
            self.inside = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(text: &str) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest)
    }

    fn read(path: &Path) -> io::Result<String> {
        let mut text = String::new();
        let mut reader = InputReader::open(path).unwrap();
        reader.read_to_string(&mut text)?;
        assert_eq!(reader.file_bytes(), std::fs::metadata(path)?.len());
        Ok(text)
    }

    #[test]
    fn compressed_files_read_as_their_text_in_one_or_several_parts() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = ("one line\n".repeat(5000), "another, naïve 🦀\n".repeat(7));
        let skippable = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
        for (name, bytes) in [
            ("x.txt", [a.clone().into_bytes(), b.clone().into_bytes()].concat()),
            ("x.txt.gz", [gzip(&a), gzip(&b)].concat()),
            ("x.txt.zst", [zstd(&a), skippable.to_vec(), zstd(&b)].concat()),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(read(&path).unwrap(), a.clone() + &b, "{name}");
            assert_eq!(extension(&path), "txt");
            if name != "x.txt" {
                std::fs::write(&path, &bytes[..bytes.len() - 5]).unwrap();
                assert!(read(&path).is_err(), "{name} truncated");
                std::fs::write(&path, b"plain text under a compressed name").unwrap();
                assert!(read(&path).is_err(), "{name} not compressed");
            }
        }
    }

    #[test]
    fn folders_and_globs_stand_for_their_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("in/er")).unwrap();
        std::fs::create_dir_all(at("empty")).unwrap();
        for name in ["b.jsonl", "a.jsonl.gz", "in/er/c.txt.zst", "README.md", ".hidden.jsonl"] {
            std::fs::write(at(name), "").unwrap();
        }
        let all = vec![at("a.jsonl.gz"), at("b.jsonl"), at("in/er/c.txt.zst")];
        assert_eq!(expand(dir.path()).unwrap(), all);
        assert_eq!(expand(&at("*.jsonl*")).unwrap(), all[..2]);
        assert_eq!(expand(&at("**/*.zst")).unwrap(), all[2..]);
        assert_eq!(expand(&at("b.jsonl")).unwrap(), all[1..2]);
        assert!(expand(&at("*.parquet")).unwrap_err().to_string().contains("no file matches"));
        assert!(expand(&at("empty")).unwrap_err().to_string().contains("holds no data"));
        std::fs::write(at("odd[1].txt"), "").unwrap();
        assert_eq!(expand(&at("odd[1].txt")).unwrap(), [at("odd[1].txt")], "a file before a glob");
    }
}
