//! Tokenizes text or JSON lines into a `.bin/.idx` pair.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::{DatasetInfo, IndexedWriter, TokenType, TokenizerInfo};
use crate::fs::open_regular;
use crate::{Error, Result};

/// Longest line accepted, so that a file without line ends cannot fill memory.
const LONGEST_LINE: u64 = 1 << 28;
/// A file that is one document is tokenized in pieces of about this size, cut after a line.
const PIECE: usize = 8 << 20;
/// Longer documents continue in another sequence; the format counts a sequence's tokens in 32 bits.
const LONGEST_SEQUENCE: u64 = 1 << 30;

/// How a file is split into documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// The whole file is one document. Above 8 MiB it is tokenized in pieces that end with a line.
    Whole,
    /// Each line is a document.
    Text,
    /// Each line is a JSON object with the document under this key.
    JsonLines {
        /// The key, usually `text`.
        key: String,
    },
}

/// An input file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its path.
    pub path: PathBuf,
    /// How it is split into documents.
    pub format: TextFormat,
}

/// Statistics of a build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BuildSummary {
    /// Number of documents written.
    pub documents: u64,
    /// Number of lines and files skipped because they, or their tokens, were empty.
    pub skipped: u64,
    /// Number of tokens written, including end-of-document tokens.
    pub tokens: u64,
    /// Number of bytes read.
    pub bytes: u64,
}

/// Tokenizes files one after the other into `out_prefix.bin` and `out_prefix.idx`, which appear only when complete, with
/// the identity of `tokenizer` beside them.
/// `eod` is appended to each document. `progress` gets the bytes read so far and in total, at least once and finally
/// when everything is read. Memory use does not grow with the input.
pub fn build(
    inputs: &[Input],
    tokenize: &dyn Fn(&str) -> Result<Vec<u32>>,
    eod: Option<u32>,
    tokenizer: &TokenizerInfo,
    out_prefix: &Path,
    progress: &dyn Fn(u64, u64),
) -> Result<BuildSummary> {
    let vocab = tokenizer.vocab;
    if eod.is_some_and(|e| e >= vocab) {
        return Err(Error::Invalid(format!(
            "the end-of-document token is outside the vocabulary of {vocab}"
        )));
    }
    let mut total = 0;
    // Check all inputs first, before time is spent on any.
    for input in inputs {
        if input.path.is_dir() {
            return Err(Error::damaged(&input.path, "is a folder; name the files in it"));
        }
        let about = open_regular(&input.path)?.metadata().map_err(Error::io(&input.path))?;
        total += about.len();
    }
    let writer = IndexedWriter::create(out_prefix, TokenType::for_vocab(u64::from(vocab)), false)?;
    let summary = BuildSummary::default();
    let mut builder = Builder { writer, summary, tokenize, eod, vocab, largest: 0, progress, total, told: 0 };
    progress(0, total);
    for input in inputs {
        match input.format {
            TextFormat::Whole => builder.whole_file(&input.path)?,
            _ => builder.lines(&input.path, &input.format)?,
        }
    }
    let Builder { writer, mut summary, largest, .. } = builder;
    if summary.documents == 0 {
        let path = inputs.first().map_or(out_prefix, |i| &i.path);
        return Err(Error::damaged(path, "holds no document: every line is empty"));
    }
    summary.tokens = writer.tokens();
    writer.finish_with(Some(&DatasetInfo {
        version: DatasetInfo::VERSION,
        tokenizer: tokenizer.clone(),
        eod,
        tokens: summary.tokens,
        largest_id: largest.max(eod.unwrap_or(0)),
    }))?;
    progress(summary.bytes, total.max(summary.bytes));
    Ok(summary)
}

struct Builder<'a> {
    writer: IndexedWriter,
    summary: BuildSummary,
    tokenize: &'a dyn Fn(&str) -> Result<Vec<u32>>,
    eod: Option<u32>,
    vocab: u32,
    /// The largest id so far.
    largest: u32,
    progress: &'a dyn Fn(u64, u64),
    total: u64,
    told: u64,
}

impl Builder<'_> {
    /// Tokenizes a file of one document per line.
    fn lines(&mut self, path: &Path, format: &TextFormat) -> Result<()> {
        let mut reader = BufReader::with_capacity(1 << 20, open_regular(path)?);
        let (mut line, mut number) = (Vec::new(), 0u64);
        loop {
            line.clear();
            number += 1;
            let read = (&mut reader).take(LONGEST_LINE + 1).read_until(b'\n', &mut line);
            let read = read.map_err(Error::io(path))? as u64;
            if read == 0 {
                return Ok(());
            }
            let at_line = |what: String| Error::damaged(path, format!("line {number}: {what}"));
            if read > LONGEST_LINE {
                let what = format!("is longer than {LONGEST_LINE} bytes; put one document on a line");
                return Err(at_line(what));
            }
            let text = std::str::from_utf8(&line).map_err(|e| at_line(format!("is not UTF-8 ({e})")))?;
            let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { text };
            let text = document(text.trim_end_matches(['\n', '\r']), format).map_err(at_line)?;
            self.piece(&text, &at_line)?;
            self.end_document()?;
            self.read(read);
        }
    }

    /// Tokenizes a file that is one document.
    fn whole_file(&mut self, path: &Path) -> Result<()> {
        let mut file = open_regular(path)?;
        let (mut held, mut at) = (Vec::with_capacity(PIECE), 0u64);
        loop {
            let read = (&mut file).take((PIECE - held.len().min(PIECE / 2)) as u64).read_to_end(&mut held);
            let read = read.map_err(Error::io(path))?;
            let here = |what: String| Error::damaged(path, format!("from byte {at} on: {what}"));
            // Cut after the last line end, or at least not inside a character.
            let end = match held.iter().rposition(|b| *b == b'\n') {
                _ if read == 0 => held.len(),
                Some(newline) => newline + 1,
                None => match std::str::from_utf8(&held) {
                    Err(e) if e.error_len().is_none() => e.valid_up_to(),
                    _ => held.len(),
                },
            };
            let text =
                std::str::from_utf8(&held[..end]).map_err(|e| here(format!("is not UTF-8 text ({e})")))?;
            let text = if at == 0 { text.trim_start_matches('\u{feff}') } else { text };
            self.piece(text, &here)?;
            held.drain(..end);
            at += end as u64;
            self.read(read as u64);
            if read == 0 {
                return self.end_document();
            }
        }
    }

    /// Tokenizes a piece of the open document.
    fn piece(&mut self, text: &str, at: &dyn Fn(String) -> Error) -> Result<()> {
        let tokens = if text.is_empty() { Vec::new() } else { (self.tokenize)(text)? };
        if let Some(bad) = tokens.iter().find(|t| **t >= self.vocab) {
            return Err(at(format!("the tokenizer gave {bad}, outside the vocabulary of {}", self.vocab)));
        }
        self.largest = tokens.iter().copied().fold(self.largest, u32::max);
        if self.writer.open_tokens() + tokens.len() as u64 > LONGEST_SEQUENCE {
            self.writer.end_sequence(0)?;
        }
        self.writer.push_part(tokens.into_iter().map(i64::from))
    }

    fn end_document(&mut self) -> Result<()> {
        if self.writer.open_tokens() == 0 {
            self.summary.skipped += 1;
            return Ok(());
        }
        self.writer.push(self.eod.map(i64::from), 0)?;
        self.writer.end_document()?;
        self.summary.documents += 1;
        Ok(())
    }

    fn read(&mut self, bytes: u64) {
        self.summary.bytes += bytes;
        if self.summary.bytes - self.told >= 1 << 20 {
            self.told = self.summary.bytes;
            (self.progress)(self.told, self.total.max(self.told));
        }
    }
}

/// The document on a line.
fn document(line: &str, format: &TextFormat) -> Result<String, String> {
    let TextFormat::JsonLines { key } = format else { return Ok(line.to_owned()) };
    if line.trim().is_empty() {
        return Ok(String::new());
    }
    let mut object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(line).map_err(|e| format!("is not a JSON object ({e})"))?;
    match object.remove(key) {
        Some(serde_json::Value::String(text)) => Ok(text),
        Some(_) => Err(format!("\"{key}\" is not a string")),
        None => {
            let keys: Vec<&str> = object.keys().map(String::as_str).take(8).collect();
            Err(format!("has no key \"{key}\"; it has {keys:?}"))
        }
    }
}
