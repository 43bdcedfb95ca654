//! Text or JSON lines into a `.bin/.idx` pair, one document per line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::{IndexedWriter, TokenType};
use crate::{Error, Result};

/// Longest line accepted, so that a file without line ends cannot fill the memory.
const LONGEST_LINE: u64 = 1 << 28;

/// What a line of the input is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// A document.
    Text,
    /// A JSON object with the document under this key.
    JsonLines {
        /// Usually `text`.
        key: String,
    },
}

/// What was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BuildSummary {
    /// Documents written.
    pub documents: u64,
    /// Lines left out because they, or their tokens, were empty.
    pub skipped: u64,
    /// Tokens written, end-of-document tokens included.
    pub tokens: u64,
}

/// Tokenizes `input` line by line into `out_prefix.bin` and `out_prefix.idx`, which appear only when
/// complete. `eod` is appended to each document. `progress` is told the bytes read and the bytes in all,
/// at least once, and last when everything is read. Memory does not grow with the input.
pub fn build(
    input: &Path,
    format: &Format,
    tokenize: &dyn Fn(&str) -> Result<Vec<u32>>,
    eod: Option<u32>,
    vocab: u32,
    out_prefix: &Path,
    progress: &dyn Fn(u64, u64),
) -> Result<BuildSummary> {
    let file = File::open(input).map_err(Error::io(input))?;
    let total = file.metadata().map_err(Error::io(input))?.len();
    let mut reader = BufReader::with_capacity(1 << 20, file);
    if eod.is_some_and(|e| e >= vocab) {
        return Err(Error::Invalid(format!(
            "the end-of-document token is outside the vocabulary of {vocab}"
        )));
    }
    let mut writer = IndexedWriter::create(out_prefix, TokenType::for_vocab(u64::from(vocab)), false)?;
    let mut summary = BuildSummary::default();
    let (mut line, mut number, mut done, mut told) = (Vec::new(), 0u64, 0u64, 0u64);
    progress(0, total);
    loop {
        line.clear();
        number += 1;
        let read = (&mut reader).take(LONGEST_LINE + 1).read_until(b'\n', &mut line);
        let read = read.map_err(Error::io(input))? as u64;
        if read == 0 {
            break;
        }
        done += read;
        let at_line = |what: String| Error::damaged(input, format!("line {number}: {what}"));
        if read > LONGEST_LINE {
            return Err(at_line(format!("is longer than {LONGEST_LINE} bytes; put one document on a line")));
        }
        let text = std::str::from_utf8(&line).map_err(|e| at_line(format!("is not UTF-8 ({e})")))?;
        let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { text };
        let text = text.trim_end_matches(['\n', '\r']);
        let document = document(text, format).map_err(at_line)?;
        let tokens = if document.is_empty() { Vec::new() } else { tokenize(&document)? };
        if let Some(bad) = tokens.iter().find(|&&t| t >= vocab) {
            return Err(at_line(format!("the tokenizer gave {bad}, outside the vocabulary of {vocab}")));
        }
        if tokens.is_empty() {
            summary.skipped += 1;
        } else {
            writer.push(tokens.into_iter().chain(eod).map(i64::from), 0)?;
            writer.end_document()?;
            summary.documents += 1;
        }
        if done - told >= 1 << 20 {
            told = done;
            progress(done, total.max(done));
        }
    }
    if summary.documents == 0 {
        return Err(Error::damaged(input, "holds no document: every line is empty"));
    }
    summary.tokens = writer.tokens();
    writer.finish()?;
    progress(done, total.max(done));
    Ok(summary)
}

/// The document on a line.
fn document(line: &str, format: &Format) -> Result<String, String> {
    let Format::JsonLines { key } = format else { return Ok(line.to_owned()) };
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
