//! Text as it is generated: whole characters only.

use super::{Tokenizer, TokenizerKind};
use crate::error::Result;

/// Turns ids into text one by one. A character whose bytes are spread over several ids comes out with its last
/// one; nothing is ever taken back.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Bytes of a character that is not complete (byte tokenizer).
    bytes: Vec<u8>,
    /// Ids whose text gives the context for the next ones, then ids not shown yet.
    ids: Vec<u32>,
    shown: usize,
}

/// A character is at most four bytes, so at most four ids; what is not one by then never will be.
const LONGEST: usize = 4;

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> TextStream<'a> {
        TextStream { tokenizer, bytes: Vec::new(), ids: Vec::new(), shown: 0 }
    }

    /// The text that `id` completes; empty while a character is in the making.
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
        // Special tokens and the like have no text: keep the context until something has.
        if text.len() <= before.len() {
            return Ok(String::new());
        }
        let new = text.get(before.len()..).unwrap_or_default().to_string();
        self.ids.drain(..self.shown);
        self.shown = self.ids.len();
        Ok(new)
    }

    /// What is left at the end: an incomplete character as U+FFFD.
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
