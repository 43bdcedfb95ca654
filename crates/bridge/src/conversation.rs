//! Conversations as JSON lines: `messages`, ShareGPT `conversations`, or `prompt` and `completion`.

use crate::chat::ChatInput;
use ferrotron_core::data::build::no_object;
use minijinja::context;
use minijinja::value::{Value, ValueKind};

/// What ShareGPT calls the roles.
const SHAREGPT_ROLES: &[(&str, &str)] = &[
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("chatgpt", "assistant"),
    ("bot", "assistant"),
    ("model", "assistant"),
    ("function_call", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("function", "tool"),
    ("observation", "tool"),
];

/// A line of a chat file.
#[derive(Clone, Debug)]
pub enum Record {
    /// Messages for a chat template.
    Chat(ChatInput),
    /// A prompt and its completion, which a chat template renders as a user's and an assistant's turn.
    Completion {
        /// The text before.
        prompt: String,
        /// The text to learn.
        completion: String,
        /// The two as messages.
        chat: ChatInput,
    },
}

/// True if a JSON object looks like a conversation.
pub fn is_conversation(line: &str) -> bool {
    let Ok(record) = serde_json::from_str::<Value>(line) else { return false };
    let has = |key: &str| field(&record, key).is_some();
    has("messages") || has("conversations") || (has("prompt") && has("completion"))
}

/// Reads a line. The keys `tools` and `chat_template_kwargs` beside a conversation go to the template.
pub fn parse(line: &str) -> Result<Record, String> {
    let record: Value = serde_json::from_str(line).map_err(|e| no_object(&e))?;
    if record.kind() != ValueKind::Map {
        return Err("is not a JSON object".into());
    }
    let variables = variables(&record)?;
    let system = field(&record, "system").filter(|s| s.as_str().is_some_and(|s| !s.is_empty()));
    let system = system.map(|s| context! { role => "system", content => s });
    let chat = |messages: Vec<Value>, prompt: usize| {
        let begins = messages.first().and_then(|m| field(m, "role"));
        let own = begins.is_some_and(|r| r.as_str() == Some("system"));
        let system = system.clone().filter(|_| !own);
        let prompt = if prompt > 0 { prompt + usize::from(system.is_some()) } else { 0 };
        let messages = system.into_iter().chain(messages).collect();
        ChatInput { messages, prompt, variables: variables.clone() }
    };
    if let Some(list) = field(&record, "messages") {
        return Ok(Record::Chat(chat(messages(&list, "messages")?, 0)));
    }
    if let Some(list) = field(&record, "conversations") {
        return Ok(Record::Chat(chat(messages(&list, "conversations")?, 0)));
    }
    if let (Some(prompt), Some(completion)) = (field(&record, "prompt"), field(&record, "completion")) {
        if let (Some(p), Some(c)) = (prompt.as_str(), completion.as_str()) {
            let turns = vec![
                context! { role => "user", content => p },
                context! { role => "assistant", content => c },
            ];
            let (prompt, completion) = (p.to_string(), c.to_string());
            return Ok(Record::Completion { prompt, completion, chat: chat(turns, 1) });
        }
        if prompt.as_str().is_some() || completion.as_str().is_some() {
            return Err(
                "\"prompt\" and \"completion\" are to be two strings, or two lists of messages".into()
            );
        }
        let (before, after) = (messages(&prompt, "prompt")?, messages(&completion, "completion")?);
        let count = before.len();
        return Ok(Record::Chat(chat(before.into_iter().chain(after).collect(), count)));
    }
    let keys: Vec<String> = record.try_iter().into_iter().flatten().take(8).map(|k| k.to_string()).collect();
    Err(format!(
        "holds no conversation: it needs \"messages\", \"conversations\", or \"prompt\" and \"completion\", and has {keys:?}; \
         for plain text set data.format=\"text\" and data.field"
    ))
}

/// A value that is there and not null.
fn field(record: &Value, key: &str) -> Option<Value> {
    record.get_attr(key).ok().filter(|v| !v.is_undefined() && !v.is_none())
}

/// Variables of the template beside the messages.
fn variables(record: &Value) -> Result<Vec<(String, Value)>, String> {
    let mut out = Vec::new();
    if let Some(more) = field(record, "chat_template_kwargs") {
        if more.kind() != ValueKind::Map {
            return Err("\"chat_template_kwargs\" is not an object".into());
        }
        for key in more.try_iter().map_err(|e| e.to_string())? {
            let value = more.get_item(&key).map_err(|e| e.to_string())?;
            out.push((key.as_str().unwrap_or_default().to_string(), value));
        }
    }
    if let Some(tools) = field(record, "tools") {
        // Tables keep lists of different objects as JSON in a string.
        let tools = match tools.as_str() {
            Some("") => return Ok(out),
            Some(text) => serde_json::from_str(text)
                .map_err(|e| format!("\"tools\" is a string that is not JSON ({e})"))?,
            None => tools,
        };
        if tools.kind() != ValueKind::Seq {
            return Err("\"tools\" is not a list".into());
        }
        if tools.len() != Some(0) {
            out.push(("tools".into(), tools));
        }
    }
    Ok(out)
}

/// The messages of a list, with ShareGPT's names turned into roles.
fn messages(list: &Value, name: &str) -> Result<Vec<Value>, String> {
    if list.kind() != ValueKind::Seq {
        return Err(format!("\"{name}\" is not a list of messages"));
    }
    let items = list.try_iter().map_err(|e| e.to_string())?;
    let messages: Vec<Value> = items
        .enumerate()
        .map(|(i, m)| message(&m).map_err(|e| format!("\"{name}\"[{i}] {e}")))
        .collect::<Result<_, _>>()?;
    match messages.is_empty() {
        true => Err(format!("\"{name}\" is empty")),
        false => Ok(messages),
    }
}

/// Names of the reasoning of a turn, the one that templates read first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message as transformers gives it to templates: without keys that are null (tables fill the columns that other messages have with
/// them), and with its reasoning under the names that templates read, of which the first counts.
fn of_template(m: &Value) -> Result<Value, String> {
    let reasoning = REASONING.iter().find_map(|key| field(m, key));
    let named = |name: &str| reasoning.clone().map(|text| (name.to_string(), text));
    let keys = m.try_iter().map_err(|e| e.to_string())?.map(|key| key.to_string());
    let own = keys.filter_map(|key| field(m, &key).map(|value| (key, value)));
    Ok(Value::from_pairs(named("thinking").into_iter().chain(own).chain(named("reasoning_content"))))
}

fn message(m: &Value) -> Result<Value, String> {
    if let Some(role) = field(m, "role") {
        return match role.as_str() {
            Some(_) => of_template(m),
            None => Err("has a role that is not a string".into()),
        };
    }
    let (Some(from), Some(value)) = (field(m, "from"), field(m, "value")) else {
        return Err("has no \"role\" (or, in ShareGPT's spelling, no \"from\" and \"value\")".into());
    };
    let known = from.as_str().and_then(|from| SHAREGPT_ROLES.iter().find(|(name, _)| *name == from));
    match known {
        Some((_, role)) => Ok(context! { role => *role, content => value }),
        None => {
            let all: Vec<&str> = SHAREGPT_ROLES.iter().map(|(name, _)| *name).collect();
            Err(format!("is from {from}, which is none of {}", all.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(line: &str) -> ChatInput {
        match parse(line).unwrap() {
            Record::Chat(chat) | Record::Completion { chat, .. } => chat,
        }
    }

    fn shown(input: &ChatInput) -> String {
        input
            .messages
            .iter()
            .map(|m| format!("{}={} ", field(m, "role").unwrap(), field(m, "content").unwrap()))
            .collect()
    }

    #[test]
    fn all_spellings_are_messages() {
        for (line, want, prompt) in [
            (
                r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
                "user=a assistant=b ",
                0,
            ),
            (
                r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
                "user=a assistant=b ",
                0,
            ),
            (
                r#"{"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "f"},
                    {"from": "observation", "value": "o"}, {"role": "assistant", "content": "b"}]}"#,
                "system=s user=a assistant=f tool=o assistant=b ",
                0,
            ),
            (r#"{"system": "s", "messages": [{"role": "system", "content": "t"}]}"#, "system=t ", 0),
            (r#"{"prompt": "a", "completion": "b"}"#, "user=a assistant=b ", 1),
            (r#"{"prompt": "a", "completion": "b", "system": "s"}"#, "system=s user=a assistant=b ", 2),
            (
                r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
                "user=a assistant=b ",
                1,
            ),
        ] {
            assert!(is_conversation(line), "{line}");
            let input = chat(line);
            assert_eq!((shown(&input).as_str(), input.prompt), (want, prompt), "{line}");
        }
        assert!(!is_conversation(r#"{"text": "a", "prompt": "b"}"#));
        assert!(!is_conversation("[1]"));
    }

    /// As transformers names it, whatever the file does.
    #[test]
    fn reasoning_has_the_names_that_templates_read() {
        for (given, content, thinking) in [
            (r#""reasoning": "R""#, "R", "R"),
            (r#""thinking": "T", "reasoning": "R""#, "T", "T"),
            (r#""reasoning_content": "C", "thinking": "T""#, "C", "T"),
            (r#""reasoning_content": null, "reasoning": "R""#, "R", "R"),
        ] {
            let line = format!(
                r#"{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "b", {given}}}]}}"#
            );
            let turn = chat(&line).messages[1].clone();
            let named = |key: &str| field(&turn, key).map(|v| v.to_string()).unwrap_or_default();
            assert_eq!(
                [named("reasoning_content"), named("thinking"), named("content")],
                [content, thinking, "b"],
                "{given}"
            );
        }
    }

    /// As in transformers, a template sees what a message has, and not the empty columns of a table.
    #[test]
    fn keys_that_are_null_are_left_out() {
        let line = r#"{"messages": [{"role": "user", "content": "a", "tool_calls": null},
            {"role": "assistant", "content": null, "thinking": null, "reasoning": "R", "extra": {"kept": null}}]}"#;
        let turns = chat(line).messages;
        assert_eq!(turns[0].to_string(), "{'role': 'user', 'content': 'a'}");
        let has = |key: &str| turns[1].get_attr(key).is_ok_and(|v| !v.is_undefined());
        assert_eq!(["content", "tool_calls", "thinking"].map(has), [false, false, true]);
        let shown = |key: &str| turns[1].get_attr(key).unwrap().to_string();
        assert_eq!(["thinking", "reasoning_content", "extra"].map(shown), ["R", "R", "{'kept': None}"]);
    }

    #[test]
    fn tools_keep_the_order_of_their_keys() {
        let line = r#"{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "f", "about": {"z": 1, "a": 2}}],
            "chat_template_kwargs": {"enable_thinking": false}}"#;
        let variables = chat(line).variables;
        assert_eq!(variables[0].0, "enable_thinking");
        assert_eq!(variables[1].1.to_string(), "[{'type': 'f', 'about': {'z': 1, 'a': 2}}]");
        let text =
            line.replace("[{\"type\": \"f\", \"about\": {\"z\": 1, \"a\": 2}}]", r#""[{\"type\": \"f\"}]""#);
        assert_eq!(chat(&text).variables[1].1.to_string(), "[{'type': 'f'}]");
    }

    #[test]
    fn a_wrong_line_says_what_is_wrong() {
        for (line, part) in [
            ("{", "is not a JSON object"),
            ("[]", "is not a JSON object"),
            (r#"{"text": "a"}"#, "data.format"),
            (r#"{"messages": []}"#, "is empty"),
            (r#"{"messages": "a"}"#, "not a list"),
            (r#"{"messages": [{"content": "a"}]}"#, "\"messages\"[0] has no \"role\""),
            (r#"{"messages": [{"role": 1}]}"#, "not a string"),
            (r#"{"conversations": [{"from": "alien", "value": "a"}]}"#, "is from alien"),
            (r#"{"prompt": "a", "completion": []}"#, "two strings"),
            (r#"{"messages": [{"role": "user", "content": "a"}], "tools": "{"}"#, "not JSON"),
            (r#"{"messages": [{"role": "user", "content": "a"}], "tools": {}}"#, "not a list"),
        ] {
            let e = parse(line).unwrap_err();
            assert!(e.contains(part), "{line}: {e}");
        }
    }
}
