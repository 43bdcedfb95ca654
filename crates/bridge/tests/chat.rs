//! Chat templates: the features that published templates use, and limits on what a template may do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

#[path = "../../../tests/support/soak.rs"]
mod soak;

use ferrotron_bridge::{ChatTemplate, Message};
use serde_json::json;

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
        {%- if strftime_now is defined -%}, clock{%- endif -%}{%- if not tools -%}, no tools{%- endif -%}";
    let turns = [("system", "s"), ("user", " hi "), ("assistant", "<t>hm</t>\n\nyes")];
    assert_eq!(render(source, &turns, false), "yes|HI|2, clock, no tools");
}

/// GPT-OSS and SmolLM3 ask for the date unconditionally.
#[test]
fn the_date_is_that_of_the_template_and_not_of_the_rendering() {
    let source = "Current date: {{ strftime_now('%Y-%m-%d') }}, {{ strftime_now('%d %B %Y') }}{{ messages[0].content }}";
    // As data: the same on every day, on every rank and after a restart.
    assert_eq!(render(source, &[("user", "!")], false), "Current date: 2024-07-26, 26 July 2024!");
    let seconds = "{{ strftime_now('%Y %j %H:%M:%S') }}";
    let now = ChatTemplate::new(seconds, "", "").unwrap().at_present();
    let first = now.render(&[], false).unwrap();
    assert!(first[..4].parse::<u32>().unwrap() > 2024, "{first}");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(now.render(&[], false).unwrap(), first);
    let e = ChatTemplate::new("\n{{ strftime_now('%Q') }}", "", "").unwrap().render(&[], false);
    let e = e.unwrap_err().to_string();
    assert!(e.contains("%Q") && e.contains("line 2"), "{e}");
}

#[test]
fn slices_are_pythons() {
    let slices = [
        ("'abcde'[1:4:2]", "bd"),
        ("'abcde'[3:1:-1]", "dc"),
        ("'abcde'[1:3:-1]", ""),
        ("'abcde'[::-2]", "eca"),
        ("''[::-1]", ""),
        ("[][::-1] | length", "0"),
        ("nowhere[1:][::-1] | length", "0"),
        ("([1, 2, 3] | map('string'))[5:0:-1] | join(',')", "3,2"),
        ("messages[:0][::-1] | length", "0"),
    ];
    for (source, want) in slices {
        assert_eq!(render(&format!("{{{{ {source} }}}}"), &[("user", "hi")], false), want, "{source}");
    }
}

/// transformers gives templates a value for these, always.
#[test]
fn tools_and_documents_that_are_not_given_are_none() {
    for (source, want) in [
        ("{% if tools is not none %}TOOLS{% endif %}x", "x"),
        ("{% if documents is not none %}DOCUMENTS{% endif %}x", "x"),
        ("{{ tools is defined }} {{ tools == none }} {{ tools }}", "True True None"),
        ("{{ tools | tojson }}", "null"),
        ("{{ thinking is defined }}", "False"),
    ] {
        assert_eq!(render(source, &[], false), want, "{source}");
    }
    let t = ChatTemplate::new("{{ tools }}", "", "").unwrap();
    assert_eq!(t.render_json("[]", false, r#"{"tools": [1]}"#).unwrap(), "[1]");
}

#[test]
fn numbers_are_printed_as_python_does() {
    for (source, want) in [
        ("1e-7 | tojson", "1e-07"),
        (
            "[1e-5, 1e16, 0.0001, 1e15, 2.0, 12345678.5] | tojson",
            "[1e-05, 1e+16, 0.0001, 1000000000000000.0, 2.0, 12345678.5]",
        ),
        ("1e16", "1e+16"),
        ("1e-7", "1e-07"),
        ("-1.5e-10", "-1.5e-10"),
        ("2.0 * 3", "6.0"),
        ("2 * 3", "6"),
        ("2 * 'ab'", "abab"),
        ("true * 3", "3"),
        ("'é' | tojson(ensure_ascii=True)", "\"\\u00e9\""),
        ("'🦀' | tojson(true)", "\"\\ud83e\\udd80\""),
        ("'é' | tojson", "\"é\""),
        ("[1] | tojson(false, 2)", "[\n  1\n]"),
    ] {
        assert_eq!(render(&format!("{{{{ {source} }}}}"), &[], false), want, "{source}");
    }
}

#[test]
fn json_is_printed_as_python_does() {
    let t = ChatTemplate::new("{{ tools | tojson }}\n{{ tools[0] | tojson(indent=2) }}", "", "").unwrap();
    let more = r#"{"tools": [{"name": "f<é>", "args": [1, 2.5, null, true], "none": {}}]}"#;
    let want = "[{\"name\": \"f<é>\", \"args\": [1, 2.5, null, true], \"none\": {}}]\n\
        {\n  \"name\": \"f<é>\",\n  \"args\": [\n    1,\n    2.5,\n    null,\n    true\n  ],\n  \"none\": {}\n}";
    assert_eq!(t.render_json("[]", false, more).unwrap(), want);
    for (messages, more) in [("{}", "{}"), ("[", "{}"), ("[]", "[]"), ("[]", "")] {
        let e = t.render_json(messages, false, more).unwrap_err().to_string();
        assert!(e.contains("not valid JSON"), "{e}");
    }
    for (options, want) in [
        ("separators=(',', ':')", r#"[{"a":[1,2],"b":{}}]"#),
        ("separators=[';', '=']", r#"[{"a"=[1;2];"b"={}}]"#),
        ("separators=none", r#"[{"a": [1, 2], "b": {}}]"#),
        ("separators=(', ', ':'), indent=0", "[\n{\n\"a\":[\n1, \n2\n], \n\"b\":{}\n}\n]"),
    ] {
        let source = format!("{{{{ [{{'a': [1, 2], 'b': {{}}}}] | tojson({options}) }}}}");
        assert_eq!(render(&source, &[], false), want, "{options}");
    }
    for wrong in ["separators=','", "separators=(',', ':', '')", "separators=3", "seperators=(',', ':')"] {
        let t = ChatTemplate::new(&format!("{{{{ [1] | tojson({wrong}) }}}}"), "", "").unwrap();
        assert!(t.render(&[], false).is_err(), "{wrong}");
    }
}

/// Messages have their role before their content, and JSON the order of its source.
#[test]
fn keys_keep_their_order() {
    let source = "{{ messages | tojson }}";
    assert_eq!(render(source, &[("user", "q")], false), r#"[{"role": "user", "content": "q"}]"#);
    let given = r#"[{"role": "user", "content": [{"type": "text", "a": 1}]}]"#;
    assert_eq!(ChatTemplate::new(source, "", "").unwrap().render_json(given, false, "{}").unwrap(), given);
}

/// Only widths and precisions are bounded, and only those of replacement fields.
#[test]
fn patterns_hold_ordinary_text() {
    let long = "x".repeat(10_000);
    for (source, want) in [
        ("'%s 2024' | format('July')", "July 2024"),
        ("'{{\"a\": {}}}'.format(1)", "{\"a\": 1}"),
        ("'{{{{{}}}}} {{ {{ 12345'.format(1)", "{{1}} { { 12345"),
        ("'100%% of %s, 5 * 10000' | format('x')", "100% of x, 5 * 10000"),
        ("'%5.1f|%-4d|%04d' | format(1.25, 7, 8)", "  1.2|7   |0008"),
        ("'{a:*^7} {b[k]:>4}'.format(a='x', b={'k': 2})", "***x***    2"),
    ] {
        assert_eq!(render(&format!("{{{{ {source} }}}}"), &[], false), want, "{source}");
    }
    assert_eq!(render(&format!("{{{{ '{long}%s' | format(1) }}}}"), &[], false), format!("{long}1"));
    assert_eq!(render(&format!("{{{{ '{}'.format() }}}}", "{{".repeat(200)), &[], false), "{".repeat(200));
    let fields = (vec!["{}"; 100].join(" "), vec!["1"; 100]);
    let source = format!("{{{{ '{}'.format({}) }}}}", fields.0, fields.1.join(", "));
    assert_eq!(render(&source, &[], false), fields.1.join(" "));
    for wide in [
        "'%1000d' | format(1)",
        "'%%%1000d' | format(1)",
        "'%-+ #01000d' | format(1)",
        "'%(a)1000s' | format({'a': 1})",
        "'%.1000f' | format(1.0)",
        "'{:1000}'.format(1)",
        "'{{{:1000}'.format(1)",
        "'{:é<1000}'.format(1)",
        "'{:}<1000}'.format(1)",
        "'{:{<1000}'.format(1)",
        "'{0[:]:1000}'.format({':': 1})",
        "'{a.b:.1000f}'.format(a={'b': 1.0})",
        "'{:,.1000f}'.format(1.0)",
    ] {
        let t = ChatTemplate::new(&format!("{{{{ {wide} }}}}"), "", "").unwrap();
        let e = t.render(&[], false).expect_err(wide).to_string();
        assert!(e.contains("999"), "{wide}: {e}");
    }
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
    for other in
        ["{% include '/etc/passwd' %}", "{% extends 'x' %}", "{% block b %}{{ self.b() }}{% endblock %}"]
    {
        assert!(ChatTemplate::new(other, "", "").unwrap_err().to_string().contains("stands alone"));
    }
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

/// Renders a hostile template: text or an error, soon.
fn attempt(source: &str) -> Result<String, String> {
    let begin = std::time::Instant::now();
    let messages = talk(&[("user", "hello"), ("assistant", "hi")]);
    let done = ChatTemplate::new(source, "<s>", "</s>").and_then(|t| t.render(&messages, true));
    let took = begin.elapsed();
    assert!(took.as_secs() < 20, "{took:?}: {}", &source[..source.len().min(200)]);
    let done = done.map_err(|e| e.to_string());
    assert!(!done.as_ref().is_err_and(|e| e.contains("panicked")), "{source}: {done:?}");
    done
}

/// Peak resident memory of this process, in MiB.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or("0");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap_or(0) / 1024
}

/// A loop that runs `body` many times; it sees `ns.x`, which starts as `start`.
fn repeated(start: &str, body: &str, end: &str) -> String {
    format!("{{% set ns = namespace(x={start}) %}}{{% for i in range(1000) %}}{body}{{% endfor %}}{end}")
}

#[test]
fn hostile_templates_are_refused() {
    let many = |unit: &str, n: usize| unit.repeat(n);
    let grow =
        |start: &str, value: &str| repeated(start, &format!("{{% set ns.x = {value} %}}"), "{{ ns.x }}");
    let dag = |end: &str| repeated("[1]", "{% if i < 60 %}{% set ns.x = [ns.x, ns.x] %}{% endif %}", end);
    let nested = |n: usize| "{% if true %}".repeat(n) + "x" + &"{% endif %}".repeat(n);
    let templates = [
        // Depth of the source.
        format!("{{{{ {}1 }}}}", many("-", 20_000)),
        format!("{{{{ {}1 }}}}", many("not ", 20_000)),
        format!("{{{{ {}1{} }}}}", many("(", 20_000), many(")", 20_000)),
        format!("{{{{ 1{} }}}}", many("+1", 200_000)),
        format!("{{{{ x{} }}}}", many(".x", 200_000)),
        format!("{{{{ x{} }}}}", many("|trim", 100_000)),
        format!("{{{{ x{} }}}}", many("[0]", 100_000)),
        format!("{{{{ 1{} }}}}", many(" if 0 else 1", 30_000)),
        format!("{{% if 0 %}}{}{{% endif %}}", many("{% elif 0 %}", 30_000)),
        format!("{{{{ 2{} }}}}", many("**1", 50_000)),
        format!("{{{{ 1{} }}}}", many("~1", 50_000)),
        nested(3000),
        many("x", 1 << 20),
        // Depth of values.
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".into(),
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a ~ '' }}".into(),
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns == ns.a }}{{ {ns: 1} }}{{ ns|tojson }}".into(),
        grow("[]", "[ns.x]"),
        grow("{}", "{'a': ns.x}"),
        grow("none", "(ns.x,)"),
        grow("none", "namespace(y=ns.x)"),
        repeated("none", "{% set n = namespace() %}{% set n.y = ns.x %}{% set ns.x = n %}", "{{ ns }}"),
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}".into(),
        // Growth of values.
        grow("'ab'", "ns.x ~ ns.x"),
        grow("'ab'", "ns.x + ns.x"),
        grow("[1, 2]", "ns.x + ns.x"),
        grow("(1, 2)", "ns.x + ns.x"),
        grow("[1, 2]", "ns.x * 2"),
        grow("'ab'", "2 * ns.x"),
        grow("'ab'", "ns.x.replace('a', ns.x)"),
        grow("'ab'", "ns.x|replace('', ns.x)"),
        grow("'ab'", "ns.x.join([ns.x, ns.x])"),
        grow("'ab'", "ns.x|list|join(ns.x)"),
        grow("'ab'", "[ns.x, ns.x]|join"),
        grow("'ab'", "'{0}{0}'.format(ns.x)"),
        grow("'ab'", "'%s%s'|format(ns.x, ns.x)"),
        grow("'ab'", "ns.x|tojson|tojson"),
        grow("'<>'", "ns.x|escape|string|replace('', '')|escape ~ '<'"),
        grow("'a b'", "ns.x.split() | join(ns.x)"),
        "{{ 'x' * 1000000000 }}".into(),
        format!("{{{{ '' {} }}}}", many("~ 'x' * 100000000 ", 100)),
        "{{ [0] * 100000000 }}".into(),
        "{{ (0, 1) * 50000000 }}".into(),
        "{{ 'x'|indent(4000000000) }}".into(),
        format!("{{{{ '{}'|indent(width=9999, blank=true) }}}}", many("\\n", 10_000)),
        "{{ '%1000000000d'|format(1) }}".into(),
        "{{ '%*d'|format(1000000000, 1) }}".into(),
        "{{ '{:1000000000}'.format(1) }}".into(),
        "{{ '{:{}}'.format(1, 1000000000) }}".into(),
        "{{ '%.1000000000f'|format(1.0) }}".into(),
        "{{ [1]|batch(1000000000, 0) }}".into(),
        "{{ range(99000)|list|tojson(separators=('b' * 100000, ':')) }}".into(),
        "{{ strftime_now('%B' * 100000) }}".into(),
        "{{ [1]|slice(1000000000) }}".into(),
        "{{ ('a' * 100000)|list|map('replace', 'a', 'b' * 100000)|list }}".into(),
        "{{ ('a' * 200000)|list|select('in', 'b' * 4000000)|list }}".into(),
        "{{ ('a' * 10000)|list|map('indent', 9000, true)|list }}".into(),
        // Arguments that are no text are printed.
        "{{ ('a' * 100000)|replace('a', ['b' * 40000]) }}".into(),
        "{{ ['a' * 100000]|replace('a', 'b' * 40000) }}".into(),
        "{{ range(99000)|join(['b' * 40000]) }}".into(),
        "{{ range(99000)|join(d='b' * 40000) }}".into(),
        // A small value that is endless when it is read.
        dag("{{ ns.x }}"),
        dag("{{ ns.x ~ '' }}"),
        dag("{{ ns.x == ns.x }}"),
        dag("{{ ns.x|tojson }}"),
        dag("{{ {ns.x: 1} }}"),
        dag("{{ ns.x in [ns.x] }}"),
        dag("{{ ns.x|string|length }}"),
        dag("{{ ns.x|sort }}"),
        dag("{{ ns.x|unique }}"),
        dag("{{ debug() }}"),
        // Output.
        format!("{{% for i in range(100000) %}}{}{{% endfor %}}", many("x", 100_000)),
        format!(
            "{{% set a %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}",
            many("x", 100_000)
        ),
        "{% set a = 'x' * 1000000 %}{% for i in range(100000) %}{{ a }}{% endfor %}".into(),
        "{% macro m(a) %}{% for i in range(100000) %}{{ a }}{% endfor %}{% endmacro %}{{ m('x' * 1000000) }}"
            .into(),
        "{% filter upper %}{% for i in range(100000) %}{{ 'x' * 1000000 }}{% endfor %}{% endfilter %}".into(),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".into(),
    ];
    for (i, source) in templates.iter().enumerate() {
        let e = attempt(source).expect_err(&format!("{i}: {}", &source[..source.len().min(200)]));
        assert!(e.starts_with("chat template: ") && !e.contains('\n'), "{i}: {e}");
    }
    assert!(peak_memory() < 1500, "{} MiB", peak_memory());
}

#[test]
fn long_chains_of_lazy_sequences_do_not_recurse() {
    // Each step refers to the one before; whether it ends as text or at a limit, it ends.
    let mut texts = 0;
    let steps = ["ns.x|reverse", "ns.x[0:]", "ns.x[::-1]", "ns.x + [i]", "ns.x|list", "ns.x|map('trim')"];
    for step in steps {
        let body = format!("{{% set ns.x = {step} %}}");
        let source = repeated("['a']", &body, "{{ ns.x|length }}").replace("range(1000)", "range(50000)");
        match attempt(&source) {
            Ok(_) => texts += 1,
            // Any other error would end the chain early.
            Err(e) => assert!(e.contains("it makes more than"), "{step}: {e}"),
        }
    }
    assert!((1..steps.len()).contains(&texts), "{texts} of {} end as text", steps.len());
}

#[test]
fn what_long_conversations_need_is_allowed() {
    let long = "word ".repeat(40_000);
    let turns: Vec<_> = (0..300)
        .map(|i| json!({"role": (["user", "assistant"][i % 2]), "content": "text ".repeat(200)}))
        .collect();
    let source = "{% set ns = namespace(text='', seen=[]) %}{% for m in messages %}{% if loop.index0 == messages|length - 1 %}last{% endif %}\
        {% if messages[loop.index0 - 1].role == m.role and not loop.first %}{{ raise_exception('roles') }}{% endif %}\
        {% set ns.seen = ns.seen + [m.role] %}{{ '<|' + m['role'] + '|>\n' + m.content | trim + '<|end|>\n' }}{% endfor %}{{ ns.seen|length }}";
    let template = ChatTemplate::new(source, "", "").unwrap();
    let text = template.render_json(&json!(turns).to_string(), false, "{}").unwrap();
    assert!(text.ends_with("<|end|>\n300") && text.matches("last").count() == 1);
    let one = render(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
        &[("user", &long)],
        false,
    );
    assert_eq!(one, format!("<s>{long}"));
    // Operators and filters that are measured give what they gave.
    for (source, want) in [
        (
            "{{ 3 * 4 }} {{ 1.5 * 2 }} {{ 'ab' * 3 }} {{ 2 * 'ab' }} {{ [1, 2] * 2 }} {{ 'a' * 0 }}|{{ 'a' * -1 }}",
            "12 3.0 ababab abab [1, 2, 1, 2] |",
        ),
        (
            "{{ 7 % 4 }} {{ '%s-%02d' | format('a', 7) }} {{ '%s' | format('x') }} {{ '{}-{}'.format(1, 'b') }}",
            "3 a-07 x 1-b",
        ),
        (
            "{{ 'a-b' | replace('-', '+') }} {{ 'a-b'.replace('-', '') }} {{ ', '.join(['a', 'b']) }} {{ [1, 2] | join('|') }}",
            "a+b ab a, b 1|2",
        ),
        (
            "{{ ['a', 'b'] | map('upper') | join }} {{ [1, 2, 3] | select('odd') | list }} {{ 'a\nb' | indent(2) }}",
            "AB [1, 3] a\n  b",
        ),
        (
            "{{ 'abc'[1] }} {{ 'abc'[:2] }} {{ [1, 2, 3][-1] }} {{ {'a': 1}['a'] }} {{ none is none }} {{ x is defined }}",
            "b ab 3 1 True False",
        ),
        (
            "{% macro m(a, b='z') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m('y') }}{% call m('q') %}!{% endcall %}",
            "yzqz!",
        ),
        (
            "{% set x %}a{% endset %}{{ x }}{% with y = 2 %}{{ y }}{% endwith %}{% filter upper %}b{% endfilter %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
            "a2Ba1",
        ),
        (
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ 'b' in 'abc' }}{{ 1 < 2 < 3 }}",
            "02TrueTrue",
        ),
    ] {
        assert_eq!(render(source, &[], false), want, "{source}");
    }
}

/// Random templates of values that grow: each ends soon, in bounded memory.
#[test]
fn random_templates_end_soon() {
    let mut state = 20_241_116u64;
    let mut below = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    const LEAVES: &[&str] = &[
        "ns.x",
        "ns.y",
        "ns",
        "x",
        "i",
        "'ab'",
        "[1, 'a']",
        "{'k': ns.y}",
        "messages",
        "0",
        "99",
        "none",
        "(1, ns.x)",
    ];
    const UNARY: &[&str] = &[
        "A|list",
        "A|join(B)",
        "A|tojson",
        "A|string",
        "A|replace('a', B)",
        "A|reverse",
        "A|sort",
        "A|unique",
        "A|indent(B)",
        "A|map('upper')",
        "A|select('in', B)",
        "A|batch(B, C)",
        "A|slice(B)",
        "A|length",
        "A|first",
        "A|escape",
        "A|pprint",
        "A|items",
        "A|groupby('k')",
        "A|dictsort",
        "A|zip(B)",
        "A|chain(B)",
        "A|format(B)",
        "A|default(B)",
        "A.join(B)",
        "A.replace('a', B)",
        "A.split('a')",
        "A.format(B, C)",
        "A.items()",
        "A[B]",
        "A[B:C]",
        "A ~ B",
        "A + B",
        "A * B",
        "A % B",
        "A == B",
        "A in B",
        "A < B",
        "A and B",
        "A or B",
        "not A",
        "-A",
        "[A, B, A]",
        "{A: B}",
        "(A, A)",
        "namespace(y=A)",
        "dict(k=A)",
        "range(99)",
        "m(A)",
        "A if B else C",
        "A is mapping",
        "A is in B",
        "loop.cycle(A, B)",
        "A|sum",
        "A|max",
        "A|attr('k')",
        "A|lines",
        "A|title",
    ];
    let expression = |below: &mut dyn FnMut(usize) -> usize| {
        let mut text = UNARY[below(UNARY.len())].to_string();
        for _ in 0..below(3) {
            let inner = format!("({})", UNARY[below(UNARY.len())]);
            text = text.replacen('A', &inner, 1);
        }
        // Placeholders are capitals that no name has.
        text.chars()
            .map(|c| {
                if matches!(c, 'A' | 'B' | 'C') {
                    LEAVES[below(LEAVES.len())].to_string()
                } else {
                    c.to_string()
                }
            })
            .collect::<String>()
    };
    let rounds = soak::rounds(400);
    let mut rendered = 0;
    for _ in 0..rounds {
        let mut body = String::new();
        for _ in 0..1 + below(3) {
            let e = expression(&mut below);
            body += &match below(6) {
                0 | 1 => format!("{{% set ns.x = {e} %}}"),
                2 => format!("{{% set ns.y = {e} %}}"),
                3 => format!("{{{{ {e} }}}}"),
                4 => format!("{{% set x = {e} %}}{{% set ns.x = x %}}"),
                _ => format!("{{% set x %}}{{{{ {e} }}}}{{% endset %}}{{% set ns.y = x %}}"),
            };
        }
        let source = format!(
            "{{% macro m(a) %}}{{{{ a }}}}{{% endmacro %}}{{% set ns = namespace(x='ab', y=['a', 'b']) %}}{{% set x = 'x' %}}{{% for i in range(60) %}}{body}{{% endfor %}}{{{{ ns.x }}}}"
        );
        rendered += usize::from(attempt(&source).is_ok_and(|t| !t.is_empty()));
    }
    assert!(rendered > rounds / 50, "only {rendered} of {rounds} templates work at all");
    assert!(peak_memory() < 1500, "{} MiB", peak_memory());
}
