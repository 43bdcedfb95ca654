//! The documents of a dataset: texts, and conversations of which the assistant's turns are scored.

use crate::chat_encoder::{ChatEncoder, NO_TEMPLATE};
use crate::dataset::inputs;
use crate::error::{Error, Result};
use crate::model_source::{RunTemplate, TextIo};
use ferrotron_core::config::DataFormat;
use ferrotron_core::data::build::{document_text, read_line};
use ferrotron_core::data::input::InputReader;
use ferrotron_core::data::{Encode, TextFormat};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest file that is read as one document.
const LONGEST_TEXT: u64 = 1 << 30;

/// A document as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// Token ids.
    pub tokens: Vec<i32>,
    /// Which of them are scored; all where absent.
    pub scored: Option<Vec<bool>>,
    /// Bytes of its text, where all of it is scored.
    pub bytes: Option<u64>,
}

/// Reads at most `limit` documents behind a path, folder or glob: a line of a `.jsonl` is a text under `field` or a
/// conversation, every other file is one text. Empty ones are left out. `template` is a chat template's file; without it that
/// of the model's run or folder counts.
pub fn documents(
    path: &Path,
    text: &TextIo,
    field: &str,
    template: Option<&str>,
    limit: Option<usize>,
) -> Result<Vec<Document>> {
    let inputs = inputs(&[PathBuf::from(path)], DataFormat::Auto, field)?;
    let any_chat = inputs.iter().any(|i| i.format == TextFormat::Chat);
    // Text is scored without a template, also where that of the run is gone.
    let of_run = text.run_template.as_ref().filter(|_| template.is_none() && any_chat);
    let of_run = of_run.map(RunTemplate::file).transpose()?;
    let of_run = of_run.map(|file| file.map_or(NO_TEMPLATE.into(), Path::to_string_lossy));
    let template = template.or(of_run.as_deref());
    let encoder = ChatEncoder::new(&text.tokenizer, text.chat_dir.as_deref(), template)?;
    let (mut out, limit) = (Vec::new(), limit.unwrap_or(usize::MAX));
    for input in inputs {
        let mut reader = InputReader::open(&input.path)?;
        if input.format == TextFormat::Whole {
            let mut whole = String::new();
            let read = (&mut reader).take(LONGEST_TEXT + 1).read_to_string(&mut whole);
            read.map_err(|e| Error::io(&input.path, "read", e))?;
            if whole.len() as u64 > LONGEST_TEXT {
                let what =
                    format!("is longer than {LONGEST_TEXT} bytes; split it, or write it as JSON lines");
                return Err(Error::damaged(&input.path, what));
            }
            out.extend(plain(&encoder, whole.trim_start_matches('\u{feff}'))?);
            continue;
        }
        let mut number = 0;
        while out.len() < limit
            && let Some(line) = read_line(&mut reader, &input.path, number + 1)?
        {
            number += 1;
            let at_line = |what: String| Error::damaged(&input.path, format!("line {number}: {what}"));
            if input.format == TextFormat::Chat {
                out.extend(conversation(&encoder, &line).map_err(at_line)?);
            } else {
                out.extend(plain(&encoder, &document_text(&line, &input.format).map_err(at_line)?)?);
            }
        }
    }
    out.truncate(limit);
    if out.is_empty() {
        return Err(Error::damaged(path, "holds nothing to score"));
    }
    Ok(out)
}

fn plain(encoder: &ChatEncoder, text: &str) -> Result<Option<Document>> {
    let tokens: Vec<i32> = encoder.text(text)?.into_iter().map(|id| id as i32).collect();
    let bytes = Some(text.len() as u64);
    Ok((!tokens.is_empty()).then_some(Document { tokens, scored: None, bytes }))
}

fn conversation(encoder: &ChatEncoder, line: &str) -> Result<Option<Document>, String> {
    let (mut tokens, mut scored) = (Vec::new(), Vec::new());
    for span in encoder.conversation(line)? {
        scored.resize(scored.len() + span.tokens.len(), span.loss);
        tokens.extend(span.tokens.into_iter().map(|id| id as i32));
    }
    let any = scored.contains(&true);
    Ok(any.then_some(Document { tokens, scored: Some(scored), bytes: None }))
}
