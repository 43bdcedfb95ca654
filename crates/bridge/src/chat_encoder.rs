//! Tokens of texts and conversations, the latter with a loss on what the assistant says.

use crate::chat::{ChatInput, ChatTemplate};
use crate::conversation::{Record, parse};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use crate::weights::to_core;
use ferrotron_core::data::{Encode, Span};
use std::path::Path;

/// The value of `data.chat_template` that asks for none.
pub const NO_TEMPLATE: &str = "none";

/// Encodes texts, and conversations by a chat template.
pub struct ChatEncoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
}

impl<'a> ChatEncoder<'a> {
    /// `given` is `data.chat_template`; without it the template is that of the tokenizer's folder, if it has one.
    pub fn new(tokenizer: &'a Tokenizer, folder: Option<&Path>, given: Option<&str>) -> Result<Self> {
        let template = match (given, folder) {
            (Some(NO_TEMPLATE), _) => None,
            (Some(path), _) if !Path::new(path).exists() => {
                let what = "is the chat template that is asked for, and does not exist; name a file that does: a run keeps the text of \
                            its own in its folder, as chat-template.jinja";
                return Err(Error::absent(Path::new(path), what));
            }
            (Some(path), folder) => Some(ChatTemplate::from_file(Path::new(path), folder)?),
            (None, Some(folder)) => ChatTemplate::from_dir(folder)?,
            (None, None) => None,
        };
        Ok(Self { tokenizer, template: template.map(|t| t.with_tokenizer(tokenizer)) })
    }

    /// Identifies the template among others.
    pub fn digest(&self) -> u32 {
        self.template.as_ref().map_or(0, ChatTemplate::digest)
    }

    fn chat(&self, input: &ChatInput) -> Result<Vec<Span>, String> {
        let template = self.template.as_ref().ok_or(
            "is a conversation, but the tokenizer's folder has no chat template; give a Jinja file with --chat-template, in training with data.chat_template",
        )?;
        let chat = template.render_assistant(input).map_err(|e| e.to_string())?;
        let (ids, inside) =
            self.tokenizer.encode_spans(&chat.text, &chat.assistant).map_err(|e| e.to_string())?;
        Ok(spans(&ids, &inside))
    }

    /// Prompt and completion as they are: the prompt as `generate` encodes it, the completion, and the end of text.
    fn completion(&self, prompt: &str, completion: &str) -> Result<Vec<Span>, String> {
        let wrong = |e: Error| e.to_string();
        let prompt = self.tokenizer.encode_framed(prompt).map_err(wrong)?;
        let mut tokens = self.tokenizer.encode(completion).map_err(wrong)?;
        tokens.extend(self.tokenizer.eos().first());
        Ok(vec![Span { tokens: prompt, loss: false }, Span { tokens, loss: true }])
    }
}

impl Encode for ChatEncoder<'_> {
    fn text(&self, text: &str) -> ferrotron_core::Result<Vec<u32>> {
        self.tokenizer.encode(text).map_err(to_core)
    }

    fn conversation(&self, line: &str) -> Result<Vec<Span>, String> {
        if line.trim().is_empty() {
            return Ok(Vec::new());
        }
        match parse(line)? {
            Record::Completion { prompt, completion, .. } if self.template.is_none() => {
                self.completion(&prompt, &completion)
            }
            Record::Chat(chat) | Record::Completion { chat, .. } => self.chat(&chat),
        }
    }
}

/// Consecutive tokens with and without a loss.
fn spans(ids: &[u32], inside: &[bool]) -> Vec<Span> {
    let mut out: Vec<Span> = Vec::new();
    for (&id, &loss) in ids.iter().zip(inside) {
        match out.last_mut() {
            Some(last) if last.loss == loss => last.tokens.push(id),
            _ => out.push(Span { tokens: vec![id], loss }),
        }
    }
    out
}
