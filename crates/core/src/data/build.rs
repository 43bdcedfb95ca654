//! Tokenizes text or JSON lines into a `.bin/.idx` pair.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use super::input::InputReader;
use super::{DatasetInfo, IndexedWriter, TokenType, TokenizerInfo};
use crate::fs::open_regular;
use crate::{Error, Result};

/// Longest line accepted, so that a file without line ends cannot fill memory.
const LONGEST_LINE: u64 = 1 << 28;
/// A file that is one document is tokenized in pieces of about this size, cut after a line.
const PIECE: usize = 8 << 20;
/// Longer documents continue in another sequence; the format counts a sequence's tokens in 32 bits.
const LONGEST_SEQUENCE: u64 = 1 << 30;
/// Lines are tokenized by several threads in groups of about so many bytes.
const GROUP: usize = 4 << 20;
const MOST_THREADS: usize = 16;

/// Turns text into token ids.
pub trait Encode: Sync {
    /// Token ids of a text.
    fn text(&self, text: &str) -> Result<Vec<u32>>;

    /// Token ids of a conversation, which is the JSON object on a line, in spans with and without a loss; empty for a blank
    /// line.
    fn conversation(&self, _line: &str) -> Result<Vec<Span>, String> {
        Err("conversations need a tokenizer with a chat template".into())
    }
}

impl<F: Fn(&str) -> Result<Vec<u32>> + Sync> Encode for F {
    fn text(&self, text: &str) -> Result<Vec<u32>> {
        self(text)
    }
}

/// Consecutive tokens of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Their ids.
    pub tokens: Vec<u32>,
    /// Whether their prediction has a loss.
    pub loss: bool,
}

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
    /// Each line is a conversation as a JSON object.
    Chat,
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
    /// Number of conversations skipped because no token of them has a loss.
    pub without_loss: u64,
    /// Number of tokens written, including end-of-document tokens.
    pub tokens: u64,
    /// Number of bytes read.
    pub bytes: u64,
}

/// Tokenizes files one after the other into `out_prefix.bin` and `out_prefix.idx`, which appear only when complete, with
/// the identity of `tokenizer` beside them.
/// `eod` is appended to each text; conversations end as their template has it. `progress` gets the bytes read so far and in total, at least once and finally
/// when everything is read. Memory use does not grow with the input.
pub fn build(
    inputs: &[Input],
    encode: &dyn Encode,
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
            return Err(Error::damaged(&input.path, "is a folder, not a file"));
        }
        let about = open_regular(&input.path)?.metadata().map_err(Error::io(&input.path))?;
        total += about.len();
    }
    let chat = inputs.iter().any(|i| i.format == TextFormat::Chat);
    if let Some(text) = inputs.iter().find(|i| chat && i.format != TextFormat::Chat) {
        let what = "holds text, but other inputs hold conversations; build them apart and give `train` both";
        return Err(Error::damaged(&text.path, what));
    }
    let writer = IndexedWriter::create(out_prefix, TokenType::for_vocab(u64::from(vocab)), chat)?;
    let summary = BuildSummary::default();
    let mut builder =
        Builder { writer, summary, encode, eod, vocab, largest: 0, progress, total, told: 0, before: 0 };
    progress(0, total);
    for input in inputs {
        match input.format {
            TextFormat::Whole => builder.whole_file(&input.path)?,
            _ => builder.lines(&input.path, &input.format)?,
        }
        builder.before = builder.summary.bytes;
    }
    let Builder { writer, mut summary, largest, .. } = builder;
    if summary.documents == 0 {
        let path = inputs.first().map_or(out_prefix, |i| &i.path);
        let what = match summary.without_loss {
            0 => "holds no document: every line is empty".to_string(),
            n => format!("has nothing to learn from: none of its {n} conversations has an assistant's turn"),
        };
        return Err(Error::damaged(path, what));
    }
    summary.tokens = writer.tokens();
    writer.finish_with(Some(&DatasetInfo {
        version: DatasetInfo::VERSION,
        tokenizer: tokenizer.clone(),
        eod,
        tokens: summary.tokens,
        largest_id: if chat { largest } else { largest.max(eod.unwrap_or(0)) },
        chat,
    }))?;
    progress(summary.bytes, total.max(summary.bytes));
    Ok(summary)
}

struct Builder<'a> {
    writer: IndexedWriter,
    summary: BuildSummary,
    encode: &'a dyn Encode,
    eod: Option<u32>,
    vocab: u32,
    /// The largest id so far.
    largest: u32,
    progress: &'a dyn Fn(u64, u64),
    total: u64,
    told: u64,
    /// Bytes of the files before this one.
    before: u64,
}

/// A line and its number in the file.
struct Line {
    number: u64,
    text: String,
}

impl Builder<'_> {
    /// Tokenizes a file of one document per line.
    fn lines(&mut self, path: &Path, format: &TextFormat) -> Result<()> {
        let mut reader = InputReader::open(path)?;
        let mut number = 0;
        loop {
            let (mut group, mut bytes) = (Vec::new(), 0);
            while bytes < GROUP
                && let Some(text) = read_line(&mut reader, path, number + 1)?
            {
                number += 1;
                bytes += text.len() + 1;
                group.push(Line { number, text });
            }
            if group.is_empty() {
                return Ok(());
            }
            for (line, spans) in group.iter().zip(self.encode_all(path, &group, format)) {
                let at_line = |what: String| Error::damaged(path, format!("line {}: {what}", line.number));
                self.document(spans?, format, &at_line)?;
            }
            self.read(reader.file_bytes());
        }
    }

    /// The tokens of each line, by several threads.
    fn encode_all(&self, path: &Path, lines: &[Line], format: &TextFormat) -> Vec<Result<Vec<Span>>> {
        let encode = self.encode;
        let one = |line: &Line| {
            let at_line = |what: String| Error::damaged(path, format!("line {}: {what}", line.number));
            if *format == TextFormat::Chat {
                return encode.conversation(&line.text).map_err(at_line);
            }
            let text = document_text(&line.text, format).map_err(at_line)?;
            let tokens = if text.is_empty() { Vec::new() } else { encode.text(&text)? };
            Ok(vec![Span { tokens, loss: true }])
        };
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(MOST_THREADS);
        let each = lines.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let work = |part: &'_ [Line]| part.iter().map(one).collect::<Vec<_>>();
            let start = |part| std::thread::Builder::new().spawn_scoped(scope, move || work(part)).ok();
            let handles: Vec<_> = lines.chunks(each).map(|part| (part, start(part))).collect();
            let done = handles.into_iter().flat_map(|(part, handle)| {
                // The system has refused a thread.
                let Some(handle) = handle else { return work(part) };
                // The encoder is ours or guarded: a panic in it is a bug, told as an error of each line.
                let failed = |_| part.iter().map(|_| Err(Error::Invalid("a tokenizer thread failed".into())));
                handle.join().unwrap_or_else(|e| failed(e).collect())
            });
            done.collect()
        })
    }

    /// Writes a document.
    fn document(
        &mut self,
        spans: Vec<Span>,
        format: &TextFormat,
        at: &dyn Fn(String) -> Error,
    ) -> Result<()> {
        let spans: Vec<Span> = spans.into_iter().filter(|s| !s.tokens.is_empty()).collect();
        if *format != TextFormat::Chat {
            spans.into_iter().try_for_each(|s| self.tokens(s.tokens, at))?;
            return self.end_document();
        }
        // The first token of a document is never predicted.
        let learned = spans.iter().enumerate().any(|(i, s)| s.loss && (i > 0 || s.tokens.len() > 1));
        match (spans.is_empty(), learned) {
            (true, _) => self.summary.skipped += 1,
            (false, false) => self.summary.without_loss += 1,
            (false, true) => {
                for span in spans {
                    self.tokens(span.tokens, at)?;
                    self.writer.end_sequence(i8::from(span.loss))?;
                }
                self.writer.end_document()?;
                self.summary.documents += 1;
            }
        }
        Ok(())
    }

    /// Tokenizes a file that is one document.
    fn whole_file(&mut self, path: &Path) -> Result<()> {
        let mut file = InputReader::open(path)?;
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
            self.read(file.file_bytes());
            if read == 0 {
                return self.end_document();
            }
        }
    }

    /// Tokenizes a piece of the open document.
    fn piece(&mut self, text: &str, at: &dyn Fn(String) -> Error) -> Result<()> {
        let tokens = if text.is_empty() { Vec::new() } else { self.encode.text(text)? };
        self.tokens(tokens, at)
    }

    /// Appends tokens to the open document.
    fn tokens(&mut self, tokens: Vec<u32>, at: &dyn Fn(String) -> Error) -> Result<()> {
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

    /// Notes that `bytes` of the open file have been read.
    fn read(&mut self, bytes: u64) {
        self.summary.bytes = self.before + bytes;
        if self.summary.bytes - self.told >= 1 << 20 {
            self.told = self.summary.bytes;
            (self.progress)(self.told, self.total.max(self.told));
        }
    }
}

/// The next line without its end; `None` after the last one.
pub fn read_line(reader: &mut InputReader, path: &Path, number: u64) -> Result<Option<String>> {
    let mut line = Vec::new();
    let read = reader.take(LONGEST_LINE + 1).read_until(b'\n', &mut line).map_err(Error::io(path))? as u64;
    let at_line = |what: String| Error::damaged(path, format!("line {number}: {what}"));
    if read == 0 {
        return Ok(None);
    }
    if read > LONGEST_LINE {
        return Err(at_line(format!("is longer than {LONGEST_LINE} bytes; put one document on a line")));
    }
    let text = String::from_utf8(line).map_err(|e| at_line(format!("is not UTF-8 ({})", e.utf8_error())))?;
    let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { &text };
    Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()))
}

/// What is wrong with a line that is no JSON object. The error's own "line 1" is the line itself, whatever its number in
/// the file, and is left out.
pub fn no_object(e: &serde_json::Error) -> String {
    let why = e.to_string().replace(" at line 1 column ", " at column ");
    let hint = if e.is_eof() { "; every line of the file holds a whole object" } else { "" };
    format!("is not a JSON object ({why}){hint}")
}

/// The text of the document on a line; empty for a blank line.
pub fn document_text(line: &str, format: &TextFormat) -> Result<String, String> {
    let TextFormat::JsonLines { key } = format else { return Ok(line.to_owned()) };
    if line.trim().is_empty() {
        return Ok(String::new());
    }
    let mut object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(line).map_err(|e| no_object(&e))?;
    match object.remove(key) {
        Some(serde_json::Value::String(text)) => Ok(text),
        Some(_) => Err(format!("\"{key}\" is not a string")),
        None => {
            let keys: Vec<&str> = object.keys().map(String::as_str).take(8).collect();
            Err(format!("has no key \"{key}\"; it has {keys:?}"))
        }
    }
}
