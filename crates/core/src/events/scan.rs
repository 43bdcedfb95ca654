//! Reads the numbers of a step's line without building the event: a log has a line per step, and views want numbers.
//!
//! Whatever this scanner does not know (escaped keys, another order of `kind`) it leaves to the JSON parser, which is several
//! times slower; both give the same row.

use super::columns::StepColumns;

/// How every step's line begins.
const STEP: &[u8] = br#"{"kind":"step","#;
/// How the names of arrays with tokens per expert begin; the layer's number follows.
pub(super) const LOAD: &str = "moe/load_layer_";
/// The objects of numbers in a step, whose members become columns.
const GROUPS: [&str; 2] = ["losses", "memory_peaks"];
/// Deepest nesting that is skipped.
const MAX_DEPTH: usize = 64;

/// Tokens per expert of a layer in one step.
pub(super) type LayerLoad = (usize, Vec<f64>);

/// Appends the line of a step as a row of `rows` and its expert loads to `loads`. False, with nothing appended, if the line is
/// not a step's or has a form that only the JSON parser knows.
pub(super) fn step_line(line: &[u8], rows: &mut StepColumns, loads: &mut Vec<LayerLoad>) -> bool {
    let Some(rest) = line.strip_prefix(STEP) else { return false };
    let mut scanner = Scanner { text: rest, at: 0 };
    rows.begin_row();
    loads.clear();
    match scanner.members(rows, loads) {
        Some((step, time)) if scanner.text[scanner.at..].trim_ascii().is_empty() => {
            rows.end_row(step, time);
            true
        }
        _ => {
            rows.drop_row();
            false
        }
    }
}

struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// A comma, or the end of the object or array: whether there is more.
    fn more(&mut self, end: u8) -> Option<bool> {
        let byte = self.peek()?;
        self.at += 1;
        match byte {
            b',' => Some(true),
            b if b == end => Some(false),
            _ => None,
        }
    }

    /// A string without escapes.
    fn string(&mut self) -> Option<&'a str> {
        self.take(b'"')?;
        let text = &self.text[self.at..];
        let end = text.iter().position(|b| matches!(b, b'"' | b'\\'))?;
        self.at += end + 1;
        if text[end] == b'\\' { None } else { std::str::from_utf8(&text[..end]).ok() }
    }

    /// The characters of a number.
    fn digits(&mut self) -> Option<&'a str> {
        self.peek()?;
        let text = &self.text[self.at..];
        let number = |b: &u8| matches!(b, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let end = text.iter().position(|b| !number(b))?;
        self.at += end;
        text.first().filter(|b| matches!(b, b'0'..=b'9' | b'-'))?;
        std::str::from_utf8(&text[..end]).ok()
    }

    fn null(&mut self) -> Option<f64> {
        self.text[self.at..].starts_with(b"null").then(|| self.at += 4)?;
        Some(f64::NAN)
    }

    /// A number, NaN for null.
    fn number(&mut self) -> Option<f64> {
        if self.peek()? == b'n' { self.null() } else { self.digits()?.parse().ok() }
    }

    /// The members of the event after its kind: its step and time.
    fn members(&mut self, rows: &mut StepColumns, loads: &mut Vec<LayerLoad>) -> Option<(u64, f64)> {
        let (mut step, mut time) = (None, 0.0);
        loop {
            let name = self.string()?;
            self.take(b':')?;
            match (name, self.peek()?) {
                ("step", _) => step = Some(self.digits()?.parse().ok()?),
                ("time", _) => time = self.number()?,
                (_, b'0'..=b'9' | b'-' | b'n') => {
                    let x = self.number()?;
                    rows.put("", name, x);
                }
                (_, b'{') if GROUPS.contains(&name) => self.group(name, rows)?,
                (_, b'[') if name.starts_with(LOAD) => {
                    let layer = name[LOAD.len()..].parse().ok()?;
                    loads.push((layer, self.numbers()?));
                }
                _ => self.skip()?,
            }
            if !self.more(b'}')? {
                return Some((step?, time));
            }
        }
    }

    /// An object of numbers.
    fn group(&mut self, group: &str, rows: &mut StepColumns) -> Option<()> {
        self.take(b'{')?;
        if self.peek()? == b'}' {
            return self.take(b'}');
        }
        loop {
            let name = self.string()?;
            self.take(b':')?;
            let x = self.number()?;
            rows.put(group, name, x);
            if !self.more(b'}')? {
                return Some(());
            }
        }
    }

    fn numbers(&mut self) -> Option<Vec<f64>> {
        let mut out = Vec::new();
        self.take(b'[')?;
        if self.peek()? == b']' {
            self.at += 1;
            return Some(out);
        }
        loop {
            out.push(self.number()?);
            if !self.more(b']')? {
                return Some(out);
            }
        }
    }

    /// Skips a value that no view plots: strings, booleans, objects and arrays.
    fn skip(&mut self) -> Option<()> {
        let mut depth = 0usize;
        loop {
            match self.peek()? {
                b'"' => {
                    self.string()?;
                }
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    depth = depth.checked_sub(1)?;
                    self.at += 1;
                }
                b',' | b':' if depth > 0 => self.at += 1,
                b'0'..=b'9' | b'-' => {
                    self.digits()?;
                }
                b'a'..=b'z' => {
                    while self.text.get(self.at).is_some_and(u8::is_ascii_lowercase) {
                        self.at += 1;
                    }
                }
                _ => return None,
            }
            if depth == 0 {
                return Some(());
            }
            if depth > MAX_DEPTH {
                return None;
            }
        }
    }
}
