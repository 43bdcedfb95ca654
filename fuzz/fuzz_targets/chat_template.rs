#![no_main]
//! Chat templates: parse, compile, render. Run it with the seeds: `… chat_template corpus/chat_template seeds/chat_template`.

use ferrotron_bridge::ChatTemplate;
use libfuzzer_sys::fuzz_target;
use serde_json::json;

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::new(source, "<s>", "</s>") else { return };
    let call = json!({"function": {"name": "add", "arguments": {"a": 1, "b": [2.5, null, true]}}});
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " <b>What</b> is 1+1? "},
        {"role": "assistant", "content": "<think>easy</think>\n2", "tool_calls": [call]},
    ]);
    let more = json!({"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]});
    let _ = template.render_json(&messages.to_string(), true, &more.to_string());
});
