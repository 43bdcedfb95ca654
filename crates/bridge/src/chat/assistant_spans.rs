//! What in a rendered conversation the assistant has written.
//!
//! Templates with `{% generation %}` blocks say it. For others, turn i of the assistant is what rendering the messages up to
//! and with it adds to rendering those before it with the generation prompt: the text that the model is to produce at that
//! point, including the end of the turn. Whitespace after the end of the turn is not part of it.

use super::{ChatTemplate, Compiled, compile, generation, with_stack};
use crate::error::Result;
use minijinja::context;
use minijinja::value::{Value, ValueKind};
use std::ops::Range;

/// Contents of two made-up turns with no common beginning or end.
const PROBES: [&str; 2] = ["alpha one", "zulu two."];

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// The bytes of the assistant's turns, ascending.
    pub assistant: Vec<Range<usize>>,
}

/// The messages of a conversation, and other variables of the template.
#[derive(Clone, Debug)]
pub struct ChatInput {
    /// Objects with a role and, usually, content.
    pub messages: Vec<Value>,
    /// The first so many messages are a prompt: the assistant's turns in it are not counted.
    pub prompt: usize,
    /// `tools` and others, by name.
    pub variables: Vec<(String, Value)>,
}

impl ChatTemplate {
    /// Renders a conversation and finds the assistant's turns in it.
    pub fn render_assistant(&self, input: &ChatInput) -> Result<RenderedChat> {
        with_stack(|| {
            let source = self.source(&input.variables)?;
            let plain = compile(&source.text)?;
            let marked = source.marked.as_deref().map(compile).transpose()?;
            let view = Conversation { template: self, plain, input };
            match marked {
                Some(marked) => view.by_blocks(&marked),
                None => view.by_prefixes(),
            }
        })
    }
}

struct Conversation<'a> {
    template: &'a ChatTemplate,
    plain: Compiled<'a>,
    input: &'a ChatInput,
}

impl Conversation<'_> {
    fn variables(&self, messages: &[Value], add_generation_prompt: bool) -> Value {
        self.template.variables(messages.to_vec().into(), &self.input.variables, add_generation_prompt)
    }

    fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<String, String> {
        self.plain.render(self.variables(messages, add_generation_prompt), self.template.now)
    }

    /// What `{% generation %}` blocks print.
    fn by_blocks(&self, marked: &Compiled) -> Result<RenderedChat, String> {
        let ChatInput { messages, prompt, variables } = self.input;
        if messages.iter().chain(variables.iter().map(|(_, v)| v)).any(holds_mark) {
            return Err(
                "the conversation holds U+FDD0 or U+FDD1, which are not characters; remove them".into()
            );
        }
        let rendered = marked.render(self.variables(messages, false), self.template.now)?;
        let (text, mut assistant) = generation::take_marks(&rendered);
        if *prompt > 0 {
            let start = self.start_of(*prompt, &text)?;
            assistant.retain(|s| s.end > start);
            assistant.iter_mut().for_each(|s| s.start = s.start.max(start));
        }
        // An empty turn gives no loss to the token that it lies in.
        assistant.retain(|s| !s.is_empty());
        Ok(RenderedChat { text, assistant })
    }

    /// What the assistant's turns add to the messages before them.
    fn by_prefixes(&self) -> Result<RenderedChat, String> {
        let messages = &self.input.messages;
        let text = self.render(messages, false)?;
        let mut assistant: Vec<Range<usize>> = Vec::new();
        for (i, message) in messages.iter().enumerate().skip(self.input.prompt) {
            if message.get_attr("role").ok().and_then(|r| r.as_str().map(|r| r == "assistant")) != Some(true)
            {
                continue;
            }
            let start = self.start_of(i, &text)?;
            let end = self.end_of(i, &text)?;
            let after = assistant.last().map_or(0, |s| s.end);
            let turn = start.max(after)..trimmed(&text, start, end, message);
            if !turn.is_empty() {
                assistant.push(turn);
            }
        }
        Ok(RenderedChat { text, assistant })
    }

    /// Where the answer to the first `i` messages begins in the whole text.
    fn start_of(&self, i: usize, text: &str) -> Result<usize, String> {
        let messages = &self.input.messages[..i];
        let before = if i == 0 { String::new() } else { self.render(messages, false)? };
        if !text.starts_with(&before) {
            return Err(depends_on_later(i));
        }
        // A generation prompt may open more than the turn, such as a block of reasoning that the turn does not have.
        let prompt = match self.render(messages, true) {
            Ok(prompt) => prompt,
            Err(_) if i == 0 => String::new(),
            Err(e) => return Err(e),
        };
        Ok(common_prefix(&prompt, text).max(before.len()))
    }

    /// Where message `i` ends in the whole text.
    fn end_of(&self, i: usize, text: &str) -> Result<usize, String> {
        let messages = &self.input.messages;
        let until = self.render(&messages[..=i], false)?;
        if text.starts_with(&until) {
            return Ok(until.len());
        }
        // The last turn of a conversation may be rendered differently from earlier ones. What follows the turn's content is
        // what two renderings with other contents have in common at their ends.
        let with_content = |content: &str, messages: &[Value]| {
            let mut changed = messages.to_vec();
            changed[i] = context! { role => "assistant", content => content };
            self.render(&changed, false)
        };
        let after = |messages: &[Value]| -> Result<String, String> {
            let [a, b] = [with_content(PROBES[0], messages)?, with_content(PROBES[1], messages)?];
            Ok(a[a.len() - common_suffix(&a, &b)..].to_string())
        };
        let (rest, end_of_turn) = (after(messages)?, after(&messages[..=i])?);
        match text.ends_with(&rest) && rest.starts_with(&end_of_turn) {
            true => Ok(text.len() - rest.len() + end_of_turn.len()),
            false => Err(depends_on_later(i + 1)),
        }
    }
}

fn depends_on_later(n: usize) -> String {
    format!(
        "the first {n} messages of a conversation look different when others follow, so that the assistant's turns cannot be \
         found by rendering its beginnings; put {{% generation %}} and {{% endgeneration %}} around what the assistant \
         writes in a copy of the template, and name it by data.chat_template"
    )
}

/// The end of a turn without the whitespace after its end-of-turn token. A turn that nothing but whitespace ends keeps it.
fn trimmed(text: &str, start: usize, end: usize, message: &Value) -> usize {
    let Some(turn) = text.get(start..end) else { return end };
    let content = message.get_attr("content").ok();
    let content = content.as_ref().and_then(Value::as_str).map(str::trim).filter(|c| !c.is_empty());
    let ending = content.and_then(|c| turn.rfind(c).map(|at| &turn[at + c.len()..])).unwrap_or(turn);
    match ending.trim().is_empty() {
        true => end,
        false => start + turn.trim_end().len(),
    }
}

/// Bytes of whole characters at the beginning of both.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(x, y)| x == y).map(|(x, _)| x.len_utf8()).sum()
}

/// Bytes of whole characters at the end of both.
fn common_suffix(a: &str, b: &str) -> usize {
    a.chars().rev().zip(b.chars().rev()).take_while(|(x, y)| x == y).map(|(x, _)| x.len_utf8()).sum()
}

fn holds_mark(value: &Value) -> bool {
    match value.kind() {
        ValueKind::String => value.as_str().is_some_and(generation::holds_mark),
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter().is_ok_and(|mut items| items.any(|item| holds_mark(&item)))
        }
        ValueKind::Map => value.try_iter().is_ok_and(|mut keys| {
            keys.any(|key| holds_mark(&key) || value.get_item(&key).is_ok_and(|item| holds_mark(&item)))
        }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_turn_has_no_span() {
        let source = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %};\
                      {% else %}{{ m.content }}{% endif %}{% endfor %}";
        let message = |(role, content): (&str, &str)| context! { role => role, content => content };
        let turns = [("user", "q"), ("assistant", ""), ("user", "r"), ("assistant", "ab")];
        let input = ChatInput { messages: turns.map(message).to_vec(), prompt: 0, variables: Vec::new() };
        let chat = ChatTemplate::new(source, "", "").unwrap().render_assistant(&input).unwrap();
        let spans: Vec<&str> = chat.assistant.into_iter().map(|s| &chat.text[s]).collect();
        assert_eq!((chat.text.as_str(), &spans[..]), ("q;rab;", &["ab"][..]));
    }
}
