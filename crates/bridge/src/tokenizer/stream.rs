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
    /// Ids that are the context of the next ones, then ids whose text is not all emitted.
    ids: Vec<u32>,
    /// Number of the former.
    context: usize,
    /// Characters of the text of `ids` that have been emitted.
    emitted: usize,
    /// Ids since the text has ended in an incomplete character.
    waiting: usize,
}

/// What stands for bytes that are no character, or none yet.
const REPLACEMENT: char = '\u{fffd}';
/// Most ids that a character is waited for. It has at most four bytes, so at most four ids, but replacement characters before it
/// that are part of the text look like a part of it.
const LONGEST: usize = 16;

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> TextStream<'a> {
        TextStream { tokenizer, bytes: Vec::new(), ids: Vec::new(), context: 0, emitted: 0, waiting: 0 }
    }

    /// The text that `id` completes; empty within a character.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if matches!(self.tokenizer.kind, TokenizerKind::Bytes) {
            self.bytes.extend(u8::try_from(id).ok());
            return Ok(self.complete_characters());
        }
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let is_open = text.ends_with(REPLACEMENT);
        self.waiting = if is_open { self.waiting + 1 } else { 0 };
        // An id may end one character and begin another: what is before the last one is complete.
        let waits = is_open && self.waiting < LONGEST;
        let settled = if waits { text.trim_end_matches(REPLACEMENT) } else { &text };
        let new: String = settled.chars().skip(self.emitted).collect();
        // Special tokens have no text: keep the context.
        if new.is_empty() {
            return Ok(new);
        }
        if settled.len() == text.len() {
            self.ids.drain(..self.context);
            self.context = self.ids.len();
            self.emitted = self.tokenizer.decode(&self.ids)?.chars().count();
            self.waiting = 0;
        } else {
            self.emitted = settled.chars().count();
            self.waiting = 1;
        }
        Ok(new)
    }

    /// The rest: an incomplete character becomes U+FFFD.
    pub fn finish(self) -> Result<String> {
        if matches!(self.tokenizer.kind, TokenizerKind::Bytes) {
            return Ok(String::from_utf8_lossy(&self.bytes).into_owned());
        }
        Ok(self.tokenizer.decode(&self.ids)?.chars().skip(self.emitted).collect())
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
