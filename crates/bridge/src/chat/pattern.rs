//! Replacement fields of format strings: what they print may be much wider than their arguments.

/// Widest field, and most digits after the point.
pub(super) const MAX_WIDTH: usize = 999;

/// How a format string marks its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// `%s`, of the filter `format`.
    Printf,
    /// `{}`, of the method `format`.
    Braces,
}

/// The number of replacement fields in a format string, or why one of them is refused. A field that is malformed is an error of
/// the template library, which reads no further then.
pub(super) fn fields(text: &str, style: Style) -> Result<u64, String> {
    let mark = match style {
        Style::Printf => '%',
        Style::Braces => '{',
    };
    let (mut rest, mut count) = (text, 0);
    while let Some(at) = rest.find(mark) {
        rest = &rest[at + 1..];
        // Twice the mark stands for itself.
        if let Some(after) = rest.strip_prefix(mark) {
            rest = after;
            continue;
        }
        count += 1;
        let spec = match style {
            Style::Printf => printf_spec(rest),
            Style::Braces => braces_spec(rest),
        };
        rest = check_width(spec)?;
    }
    Ok(count)
}

/// What follows the key and the flags of a `%` field.
fn printf_spec(field: &str) -> &str {
    let key = field.strip_prefix('(').and_then(|key| key.split_once(')'));
    key.map_or(field, |(_, after)| after).trim_start_matches(['#', '0', '-', ' ', '+'])
}

/// What follows the name, fill, alignment and sign of a `{}` field.
fn braces_spec(field: &str) -> &str {
    let mut rest = field;
    let spec = loop {
        let Some(at) = rest.find(['[', ':', '}']) else { return "" };
        rest = &rest[at..];
        if let Some(spec) = rest.strip_prefix(':') {
            break spec;
        }
        if rest.starts_with('}') {
            return rest;
        }
        // A key may hold any character.
        let Some((_, after)) = rest.split_once(']') else { return "" };
        rest = after;
    };
    let aligned = |c: Option<char>| c.is_some_and(|c| ['<', '>', '^'].contains(&c));
    let mut chars = spec.chars();
    let (first, second) = (chars.next(), chars.next());
    let spec = match (first, aligned(second)) {
        (Some(_), true) => chars.as_str(),
        (Some(c), false) if aligned(Some(c)) => &spec[1..],
        _ => spec,
    };
    let spec = spec.strip_prefix(['+', ' ', '-']).unwrap_or(spec);
    let spec = spec.strip_prefix('#').unwrap_or(spec);
    spec.strip_prefix('0').unwrap_or(spec)
}

/// Reads `[width] [grouping] ['.' precision]`, and returns what follows.
fn check_width(spec: &str) -> Result<&str, String> {
    let rest = number(spec)?;
    let rest = rest.strip_prefix([',', '_']).unwrap_or(rest);
    rest.strip_prefix('.').map_or(Ok(rest), number)
}

fn number(text: &str) -> Result<&str, String> {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let digits = text[..text.len() - rest.len()].trim_start_matches('0');
    match digits.is_empty() || digits.parse::<usize>().is_ok_and(|n| n <= MAX_WIDTH) {
        true => Ok(rest),
        false => Err(format!("it formats with a width or precision of {digits}, more than {MAX_WIDTH}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_without_what_is_written_twice() {
        for (text, style, want) in [
            ("%s %% %d%", Style::Printf, 3),
            ("{} {{ }} {{{}}} {a[}]:>3}", Style::Braces, 3),
            ("5 {{99999}} 10000", Style::Braces, 0),
            ("no {field", Style::Braces, 1),
        ] {
            assert_eq!(fields(text, style), Ok(want), "{text}");
        }
    }
}
