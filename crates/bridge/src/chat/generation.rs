//! `{% generation %}` blocks, which say what in a template the assistant has written.

use std::ops::Range;

/// Marks in the rendered text: noncharacters of Unicode, which no text holds.
const BEGIN: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

/// The template without the tags, which print nothing: each becomes an `{% if true %}` block, so that its whitespace
/// control keeps working.
pub(super) fn removed(source: &str) -> String {
    rewritten(source, false).0
}

/// The template with marks printed at both ends of each block; none if it has no block.
pub(super) fn marked(source: &str) -> Option<String> {
    let (text, blocks) = rewritten(source, true);
    (blocks > 0).then_some(text)
}

/// True if a text holds a mark, and so cannot be told from one that a template prints.
pub(super) fn holds_mark(text: &str) -> bool {
    text.contains([BEGIN, END])
}

/// Takes the marks out of a rendered text. Returns the bytes that were inside blocks; of nested blocks, the outermost.
pub(super) fn take_marks(rendered: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(rendered.len());
    let (mut spans, mut depth, mut start) = (Vec::new(), 0usize, 0);
    for c in rendered.chars() {
        match c {
            BEGIN => {
                if depth == 0 {
                    start = text.len();
                }
                depth += 1;
            }
            END => {
                depth = depth.saturating_sub(1);
                if depth == 0 && start < text.len() {
                    spans.push(start..text.len());
                }
            }
            c => text.push(c),
        }
    }
    (text, spans)
}

/// Rewrites the tags; returns the number of blocks.
fn rewritten(source: &str, marks: bool) -> (String, usize) {
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut blocks) = (source, 0);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inside = tag.trim_start_matches("{%").trim_end_matches("%}");
        let name = inside.trim_matches(['-', '+']).trim();
        // `-` and `+` at either end control the whitespace there.
        let control =
            |c: Option<char>| c.filter(|c| ['-', '+'].contains(c)).map(String::from).unwrap_or_default();
        let (left, right) = (control(inside.chars().next()), control(inside.chars().next_back()));
        // The mark stands between two tags: the first ends what is before the block, the second begins what is inside.
        let with_mark =
            |tag: &str, mark: char| format!("{{%{left} {tag} %}}{{{{ '{mark}' }}}}{{% {tag} {right}%}}");
        match (name, marks) {
            ("generation", true) => out.push_str(&with_mark("if true", BEGIN)),
            ("endgeneration", true) => out.push_str(&with_mark("endif", END)),
            ("generation", false) => out.push_str(&tag.replacen("generation", "if true", 1)),
            ("endgeneration", false) => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        blocks += usize::from(name == "generation");
        rest = after;
    }
    out.push_str(rest);
    (out, blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_out_as_spans() {
        let (text, spans) =
            take_marks("a\u{fdd0}bé\u{fdd1}c\u{fdd0}\u{fdd1}\u{fdd0}d\u{fdd0}e\u{fdd1}f\u{fdd1}");
        assert_eq!((text.as_str(), spans), ("abécdef", vec![1..4, 5..8]));
        assert_eq!(take_marks("plain"), ("plain".into(), vec![]));
        assert!(holds_mark("a\u{fdd1}") && !holds_mark("a"));
    }

    #[test]
    fn a_template_without_blocks_is_as_it_was() {
        let source = "{%- for m in messages -%}\n{{ m }}{% endfor %} {% generation";
        assert_eq!(removed(source), source);
        assert_eq!(marked(source), None);
    }
}
