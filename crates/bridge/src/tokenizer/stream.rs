//! Streaming decoder: emits complete characters only.

use super::{Tokenizer, TokenizerKind};
use crate::error::Result;

/// Decodes ids one by one. A character whose bytes are spread over several ids is emitted with the last of them;
/// emitted text never changes.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Bytes of an incomplete character (byte-level tokenizer).
    bytes: Vec<u8>,
    /// Ids that are the context of the next ones, then ids not emitted yet.
    ids: Vec<u32>,
    shown: usize,
}

/// A UTF-8 character has at most four bytes, so at most four ids.
const LONGEST: usize = 4;

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> TextStream<'a> {
        TextStream { tokenizer, bytes: Vec::new(), ids: Vec::new(), shown: 0 }
    }

    /// The text that `id` completes; empty within a character.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if matches!(self.tokenizer.kind, TokenizerKind::Bytes) {
            self.bytes.extend(u8::try_from(id).ok());
            return Ok(self.complete_characters());
        }
        self.ids.push(id);
        let (before, text) = self.texts()?;
        if text.ends_with('\u{fffd}') && self.ids.len() - self.shown < LONGEST {
            return Ok(String::new());
        }
        // Special tokens have no text: keep the context.
        if text.len() <= before.len() {
            return Ok(String::new());
        }
        let new = text.get(before.len()..).unwrap_or_default().to_string();
        self.ids.drain(..self.shown);
        self.shown = self.ids.len();
        Ok(new)
    }

    /// The rest: an incomplete character becomes U+FFFD.
    pub fn finish(self) -> Result<String> {
        if matches!(self.tokenizer.kind, TokenizerKind::Bytes) {
            return Ok(String::from_utf8_lossy(&self.bytes).into_owned());
        }
        let (before, text) = self.texts()?;
        Ok(text.get(before.len()..).unwrap_or_default().to_string())
    }

    fn texts(&self) -> Result<(String, String)> {
        Ok((self.tokenizer.decode(&self.ids[..self.shown])?, self.tokenizer.decode(&self.ids)?))
    }

    fn complete_characters(&mut self) -> String {
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.bytes) {
                Ok(whole) => {
                    text.push_str(whole);
                    self.bytes.clear();
                    return text;
                }
                Err(e) => {
                    let good = e.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.bytes[..good]));
                    match e.error_len() {
                        None => {
                            self.bytes.drain(..good);
                            return text;
                        }
                        Some(n) => {
                            text.push('\u{fffd}');
                            self.bytes.drain(..good + n);
                        }
                    }
                }
            }
        }
    }
}
