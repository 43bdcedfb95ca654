//! Chat templates: the features that published templates use, and limits on what a template may do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_bridge::{ChatTemplate, Message};
use serde_json::{Map, json};

fn talk(turns: &[(&str, &str)]) -> Vec<Message> {
    turns.iter().map(|(r, c)| Message { role: r.to_string(), content: c.to_string() }).collect()
}

fn render(source: &str, turns: &[(&str, &str)], go_on: bool) -> String {
    ChatTemplate::new(source, "<s>", "</s>")
        .and_then(|t| t.render(&talk(turns), go_on))
        .unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn headers_and_trimming() {
    let source = "{% for m in messages %}{% set text = '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' %}\
        {% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}";
    let turns = [("system", " Be brief. "), ("user", "Hi <b>&\"")];
    let want = "<s><|head|>system<|/head|>\n\nBe brief.<|eot|><|head|>user<|/head|>\n\nHi <b>&\"<|eot|>";
    assert_eq!(render(source, &turns, false), want);
    assert_eq!(render(source, &turns, true), format!("{want}<|head|>assistant<|/head|>\n\n"));
}

#[test]
fn blocks_on_their_own_lines_leave_no_trace() {
    let source = "{%- for m in messages %}\n    {%- if m.role == 'user' %}\nU: {{ m.content }}\n    {%- else %}\nA: {{ m.content }}{{ eos_token }}\n    {%- endif %}\n{%- endfor %}\n{% if add_generation_prompt %}\nA:\n{% endif %}\n";
    assert_eq!(render(source, &[("user", "1+1?"), ("assistant", "2")], true), "U: 1+1?A: 2</s>A:\n");
}

#[test]
fn python_idioms() {
    let source = "{%- set ns = namespace(seen=0) -%}{%- if messages[0].role == 'system' -%}{%- set rest = messages[1:] -%}\
        {%- else -%}{%- set rest = messages -%}{%- endif -%}{%- for m in rest[::-1] -%}{%- set ns.seen = ns.seen + 1 -%}\
        {%- if m.content is string and m.content.startswith('<t>') -%}{{ m.content.split('</t>')[-1].lstrip('\\n') }}\
        {%- else -%}{{ m.content.strip().upper() }}{%- endif -%}|{%- endfor -%}{{ ns.seen }}\
        {%- if strftime_now is defined -%}clock{%- endif -%}{%- if not tools is defined -%}, no tools{%- endif -%}";
    let turns = [("system", "s"), ("user", " hi "), ("assistant", "<t>hm</t>\n\nyes")];
    assert_eq!(render(source, &turns, false), "yes|HI|2, no tools");
}

#[test]
fn json_is_printed_as_python_does() {
    let t = ChatTemplate::new("{{ tools | tojson }}\n{{ tools[0] | tojson(indent=2) }}", "", "").unwrap();
    let mut more = Map::new();
    more.insert("tools".into(), json!([{"name": "f<é>", "args": [1, 2.5, null, true], "none": {}}]));
    let want = "[{\"args\": [1, 2.5, null, true], \"name\": \"f<é>\", \"none\": {}}]\n\
        {\n  \"args\": [\n    1,\n    2.5,\n    null,\n    true\n  ],\n  \"name\": \"f<é>\",\n  \"none\": {}\n}";
    assert_eq!(t.render_json(&json!([]), false, &more).unwrap(), want);
}

#[test]
fn generation_marks_are_transparent() {
    let source = "{% for m in messages %}{% if m.role == 'assistant' %}{%- generation %}{{ m.content }}{%- endgeneration -%} {% else %}[{{ m.content }}]{% endif %}{% endfor %}";
    assert_eq!(render(source, &[("user", "q"), ("assistant", "a")], false), "[q]a");
}

#[test]
fn errors_say_what_and_where() {
    let raise = "{% if messages[0].role == 'system' %}\n{{ raise_exception('System role not supported') }}{% endif %}";
    let t = ChatTemplate::new(raise, "", "").unwrap();
    let e = t.render(&talk(&[("system", "x")]), false).unwrap_err().to_string();
    assert!(e.contains("System role not supported") && e.contains("line 2"), "{e}");
    let e = ChatTemplate::new("{% for m in %}", "", "").unwrap_err().to_string();
    assert!(e.starts_with("chat template: ") && e.contains("line 1"), "{e}");
    let e = ChatTemplate::new("{% if %", "", "").unwrap_err().to_string();
    assert!(e.starts_with("chat template: "), "{e}");
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{{ b }}{% endfor %}{% endfor %}";
    let e = ChatTemplate::new(endless, "", "").unwrap().render(&[], false).unwrap_err().to_string();
    assert!(e.contains("runs for too long"), "{e}");
    let deep = format!("{}x{}", "{% if true %}".repeat(3000), "{% endif %}".repeat(3000));
    assert!(ChatTemplate::new(&deep, "", "").is_err());
    let e = ChatTemplate::new("{% include '/etc/passwd' %}", "", "").unwrap().render(&[], false);
    assert!(e.is_err());
}

#[test]
fn found_in_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
    assert!(ChatTemplate::from_dir(dir.path()).unwrap().is_none());
    let show = || ChatTemplate::from_dir(dir.path()).unwrap().unwrap().render(&[], false).unwrap();
    write("chat_template.json", json!({"chat_template": "older"}).to_string());
    assert_eq!(show(), "older");
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ eos_token }}"});
    write("tokenizer_config.json", config.to_string());
    assert_eq!(show(), "<s></s>");
    let several = json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]});
    write("tokenizer_config.json", several.to_string());
    assert_eq!(show(), "d");
    write("chat_template.jinja", "alone".into());
    assert_eq!(show(), "alone");
    write("tokenizer_config.json", "{".into());
    assert!(ChatTemplate::from_dir(dir.path()).is_err());
}
