//! Tokenizes text and chat files into a `.bin/.idx` pair.

use crate::chat_encoder::ChatEncoder;
use crate::conversation::is_conversation;
use crate::error::{Error, Result};
use crate::model_source::tokenizer_at;
use crate::tokenizer::Tokenizer;
use ferrotron_core::config::DataFormat;
use ferrotron_core::data::input::{InputReader, expand, extension, is_json_lines};
use ferrotron_core::data::{self, BuildSummary, IndexedDataset, Input, TextFormat, TokenType};
use ferrotron_core::fs::{TargetLock, is_regular_file, parent};
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest first line that is looked at; a longer one is text.
const LONGEST_FIRST_LINE: u64 = 64 << 20;

/// Options of [`build`].
pub struct DatasetOptions<'a> {
    /// Files, folders and globs, also compressed: each line of a `.jsonl` is a document, every other file is one.
    pub inputs: &'a [PathBuf],
    /// Output: `<prefix>.bin`, `<prefix>.idx` and `<prefix>.dataset.json`; missing folders are created. `<prefix>.bin` and
    /// `<prefix>.idx` name the same pair.
    pub prefix: &'a Path,
    /// A folder with `tokenizer.json`, or the file; none: byte-level tokens.
    pub tokenizer: Option<&'a Path>,
    /// The JSONL field that holds the text.
    pub field: &'a str,
    /// What the lines of a `.jsonl` are.
    pub format: DataFormat,
    /// A chat template's file, or "none"; without it that of the tokenizer's folder.
    pub chat_template: Option<&'a str>,
    /// The token that ends a document.
    pub eod: Eod,
    /// Replace existing files.
    pub overwrite: bool,
}

/// The token that ends a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eod {
    /// The tokenizer's end-of-text token; 0 for byte-level tokens.
    Derived,
    /// This id.
    Id(u32),
    /// No token.
    None,
}

/// Summary of a built dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetSummary {
    /// Documents, tokens, bytes.
    pub summary: BuildSummary,
    /// Vocabulary size: one more than the largest possible id.
    pub vocab: u32,
    /// The id that ends documents.
    pub eod: Option<u32>,
    /// Documents are conversations.
    pub chat: bool,
    /// Integer type of a stored token.
    pub token_type: TokenType,
}

/// The paths `<prefix>.bin` and `<prefix>.idx` of a pair, which may be named by its prefix or by one of its files.
pub fn pair_paths(prefix: &Path) -> [PathBuf; 2] {
    [".bin", ".idx"].map(|ending| data::beside(prefix, ending))
}

/// Builds the pair, which appears only once it is complete. `progress` gets the bytes read and the total.
pub fn build(options: &DatasetOptions, progress: &dyn Fn(u64, u64)) -> Result<DatasetSummary> {
    // A pair has one lock, however it is named.
    let prefix = &data::beside(options.prefix, "");
    if options.prefix.file_name().is_none() || options.prefix.to_string_lossy().ends_with('/') {
        let what = "names a folder; add a name, such as corpus/mine".into();
        return Err(Error::Output { path: options.prefix.into(), what });
    }
    if prefix.is_file() {
        let what =
            "is a file, which a pair of that name would hide from `train --data`; choose another --output";
        return Err(Error::Output { path: prefix.clone(), what: what.into() });
    }
    let there = pair_paths(prefix).into_iter().find(|p| p.exists());
    if let (Some(path), false) = (there, options.overwrite) {
        let what = "already exists; choose another --output or pass --overwrite".into();
        return Err(Error::Output { path, what });
    }
    let tokenizer = options.tokenizer.map(tokenizer_at).transpose()?.unwrap_or_else(Tokenizer::bytes);
    let inputs = inputs(options.inputs, options.format, options.field)?;
    let chat = inputs.iter().any(|i| i.format == TextFormat::Chat);
    let eod = match options.eod {
        _ if chat => None, // the template ends a conversation
        Eod::None => None,
        Eod::Id(id) => Some(id),
        Eod::Derived => match (tokenizer.eos().first(), options.tokenizer) {
            (Some(id), _) => Some(*id),
            (None, None) => Some(0),
            (None, Some(path)) => {
                let what = "names no end-of-text token; give its id with --eod or pass --no-eod".into();
                return Err(Error::Tokenizer { origin: path.display().to_string(), what });
            }
        },
    };
    let vocab = tokenizer.info().vocab;
    if let Some(parent) = prefix.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).map_err(|e| Error::io(parent, "create", e))?;
    }
    let lock = TargetLock::acquire(prefix, Duration::ZERO)?;
    remove_leftovers(prefix)?;
    let folder = options.tokenizer.and_then(folder_of);
    let encoder = ChatEncoder::new(&tokenizer, folder.as_deref(), options.chat_template)?;
    let summary = data::build(&inputs, &encoder, eod, &tokenizer.info(), prefix, progress)?;
    drop(lock);
    let token_type = IndexedDataset::open(prefix)?.token_type();
    Ok(DatasetSummary { summary, vocab, eod, chat, token_type })
}

/// Files of a pair while they are written: `PREFIX.PART.PID.N.tmp`.
const PARTS: [&str; 6] = ["bin", "idx", "dataset.json", "lengths", "documents", "modes"];

/// Removes the temporary files of killed processes; the prefix is locked. Those of the prefix `PREFIX.val` begin alike, and
/// another process may be writing them.
fn remove_leftovers(prefix: &Path) -> Result<()> {
    let dir = parent(prefix);
    let name = prefix.file_name().unwrap_or_default().to_string_lossy();
    let entries = std::fs::read_dir(dir).map_err(|e| Error::io(dir, "list", e))?;
    for entry in entries {
        let path = entry.map_err(|e| Error::io(dir, "list", e))?.path();
        let own = path
            .file_name()
            .and_then(|n| n.to_str()?.strip_prefix(&format!("{name}."))?.strip_suffix(".tmp"));
        let is_part = |name: &str| {
            let number = |part: Option<&str>| part.is_some_and(|n| n.parse::<u32>().is_ok());
            let mut ends = name.rsplitn(3, '.');
            number(ends.next()) && number(ends.next()) && ends.next().is_some_and(|p| PARTS.contains(&p))
        };
        if own.is_some_and(is_part) && is_regular_file(&path) {
            std::fs::remove_file(&path).map_err(|e| Error::io(&path, "remove", e))?;
        }
    }
    Ok(())
}

/// The folder of a tokenizer, in which its chat template is.
pub(crate) fn folder_of(tokenizer: &Path) -> Option<PathBuf> {
    match tokenizer.is_dir() {
        true => Some(tokenizer.to_path_buf()),
        false => Some(parent(tokenizer).to_path_buf()),
    }
}

/// The files behind paths, folders and globs, and what they hold.
pub(crate) fn inputs(paths: &[PathBuf], format: DataFormat, field: &str) -> Result<Vec<Input>> {
    let mut out = Vec::new();
    for path in paths {
        for path in expand(path)? {
            if !path.exists() {
                return Err(Error::absent(&path, "there is no such file or folder"));
            }
            if is_of_a_pair(&path) {
                let what = "is a file of a .bin/.idx pair, which is tokenized already; give the pair's prefix as training data";
                return Err(Error::config(&path.display().to_string(), what));
            }
            refuse_records(&path, format)?;
            let format = match (is_json_lines(&path), format) {
                (false, _) => TextFormat::Whole,
                (true, DataFormat::Chat) => TextFormat::Chat,
                (true, DataFormat::Auto) if begins_with_conversation(&path)? => TextFormat::Chat,
                (true, _) => TextFormat::JsonLines { key: field.into() },
            };
            out.push(Input { path, format });
        }
    }
    Ok(out)
}

/// Is it a file of a pair? Small ids in 16 bits are valid UTF-8, so that tokens could be taken for text.
fn is_of_a_pair(path: &Path) -> bool {
    let pair = pair_paths(path);
    pair.iter().any(|p| p == path) && pair.iter().all(|p| p.exists())
}

/// Refuses a file of records whose name is not that of JSON lines: it would be one document, with its braces and quotes.
fn refuse_records(path: &Path, format: DataFormat) -> Result<()> {
    const LINES: &str = "rename it to .jsonl if every line is a JSON object, or write a list as lines with `jq -c '.[]' FILE > FILE.jsonl`";
    let extension = extension(path);
    let what = match format {
        _ if is_json_lines(path) => return Ok(()),
        DataFormat::Chat => {
            format!("data.format is \"chat\", and conversations are lines of a .jsonl or .ndjson file; {LINES}")
        }
        DataFormat::Auto if extension == "json" => {
            format!("would be one document, with its braces and quotes; {LINES}; to train on it as it is, rename it to .txt")
        }
        DataFormat::Auto if matches!(extension.as_str(), "csv" | "tsv") => {
            "would be one document, with its separators and quotes; write its rows as lines of JSON objects into a .jsonl file; to \
             train on it as it is, rename it to .txt"
                .into()
        }
        DataFormat::Auto | DataFormat::Text => return Ok(()),
    };
    Err(Error::damaged(path, what))
}

/// Is the first line of a file that is not blank a conversation?
fn begins_with_conversation(path: &Path) -> Result<bool> {
    let mut reader = InputReader::open(path)?;
    loop {
        let mut line = Vec::new();
        let read = (&mut reader).take(LONGEST_FIRST_LINE).read_until(b'\n', &mut line);
        if read.map_err(|e| Error::io(path, "read", e))? == 0 {
            return Ok(false);
        }
        let line = String::from_utf8_lossy(&line);
        let line = line.trim_start_matches('\u{feff}').trim();
        if !line.is_empty() {
            return Ok(is_conversation(line));
        }
    }
}
