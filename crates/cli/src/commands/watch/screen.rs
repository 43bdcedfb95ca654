//! A grid of characters with colors, and what a terminal must be sent to show it.

use unicode_width::UnicodeWidthChar;

/// The color of a cell: one of 256, or the terminal's own.
pub type Color = Option<u8>;

/// Colours of runs, distinct on dark and light backgrounds.
pub const RUNS: [u8; 10] = [33, 208, 35, 161, 135, 130, 205, 37, 142, 244];

/// How text is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    pub color: Color,
    pub bold: bool,
    pub dim: bool,
}

impl Style {
    /// Less prominent.
    pub const DIM: Style = Style { color: None, bold: false, dim: true };
    /// More prominent.
    pub const BOLD: Style = Style { color: None, bold: true, dim: false };

    /// In a color.
    pub fn of(color: u8) -> Style {
        Style { color: Some(color), ..Style::default() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    /// None is the right half of a wide character.
    char: Option<char>,
    style: Style,
}

const BLANK: Cell = Cell { char: Some(' '), style: Style { color: None, bold: false, dim: false } };

/// A rectangle of the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Area {
    pub x: usize,
    pub y: usize,
    pub width: usize,
    pub height: usize,
}

impl Area {
    /// Cut into an upper part of `height` rows and the rest.
    pub fn split_top(self, height: usize) -> (Area, Area) {
        let height = height.min(self.height);
        (Area { height, ..self }, Area { y: self.y + height, height: self.height - height, ..self })
    }
}

/// The grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Screen {
    width: usize,
    height: usize,
    cells: Vec<Cell>,
}

impl Screen {
    /// A blank screen.
    pub fn new(width: usize, height: usize) -> Screen {
        Screen { width, height, cells: vec![BLANK; width * height] }
    }

    /// All of it.
    pub fn area(&self) -> Area {
        Area { x: 0, y: 0, width: self.width, height: self.height }
    }

    /// Sets one cell to a character of width 1.
    pub fn set(&mut self, x: usize, y: usize, char: char, style: Style) {
        if x < self.width && y < self.height {
            self.cells[y * self.width + x] = Cell { char: Some(char), style };
        }
    }

    /// Writes one line of text within `width` columns and returns the columns used. Control characters are replaced and
    /// invisible ones left out: texts of events may hold anything.
    pub fn text(&mut self, x: usize, y: usize, width: usize, text: &str, style: Style) -> usize {
        let mut used = 0;
        for c in text.chars() {
            let c = if c.is_control() { '\u{fffd}' } else { c };
            let columns = c.width().unwrap_or(0);
            if columns == 0 {
                continue;
            }
            if used + columns > width {
                if used > 0 && width > 2 {
                    self.set(x + used - 1, y, '…', style);
                }
                break;
            }
            self.set(x + used, y, c, style);
            for half in 1..columns {
                if x + used + half < self.width && y < self.height {
                    self.cells[y * self.width + x + used + half] = Cell { char: None, style };
                }
            }
            used += columns;
        }
        used
    }

    /// Writes text that ends at the right border of `width` columns.
    pub fn text_right(&mut self, x: usize, y: usize, width: usize, text: &str, style: Style) {
        let len: usize = text.chars().map(|c| c.width().unwrap_or(0)).sum();
        self.text(x + width.saturating_sub(len), y, width.min(len), text, style);
    }

    fn row(&self, y: usize) -> &[Cell] {
        &self.cells[y * self.width..][..self.width]
    }

    /// As lines of text without colors.
    pub fn plain(&self) -> String {
        let line =
            |y| self.row(y).iter().filter_map(|c| c.char).collect::<String>().trim_end().to_string() + "\n";
        (0..self.height).map(line).collect()
    }

    /// What a terminal that shows `before` is sent to show this; everything if it is none or has another size.
    pub fn escapes(&self, before: Option<&Screen>) -> String {
        let before = before.filter(|b| (b.width, b.height) == (self.width, self.height));
        // Synchronized output, which terminals that do not know it ignore; colors off, no wrap at the last column.
        let mut out = String::from("\x1b[?2026h\x1b[0m");
        if before.is_none() {
            out += "\x1b[2J";
        }
        for y in 0..self.height {
            if before.is_some_and(|b| b.row(y) == self.row(y)) {
                continue;
            }
            out += &format!("\x1b[{};1H", y + 1);
            let mut style = Style::default();
            for cell in self.row(y) {
                let Some(c) = cell.char else { continue };
                if cell.style != style {
                    style = cell.style;
                    out += "\x1b[0";
                    out += if style.bold { ";1" } else { "" };
                    out += if style.dim { ";2" } else { "" };
                    out += &style.color.map_or(String::new(), |c| format!(";38;5;{c}"));
                    out += "m";
                }
                out.push(c);
            }
            out += "\x1b[0m";
        }
        out + "\x1b[?2026l"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_and_cleaned() {
        let mut s = Screen::new(8, 3);
        assert_eq!(s.text(0, 0, 8, "a\x1b[31m\u{202e}b", Style::default()), 7);
        assert_eq!(s.text(0, 1, 5, "abcdefgh", Style::default()), 5);
        assert_eq!(s.text(1, 2, 7, "日本", Style::default()), 4);
        s.text_right(0, 1, 8, "xy", Style::default());
        assert_eq!(s.plain(), "a\u{fffd}[31mb\nabcd… xy\n 日本\n");
    }

    #[test]
    fn only_rows_that_differ_are_sent() {
        let (mut a, mut b) = (Screen::new(4, 2), Screen::new(4, 2));
        a.text(0, 0, 4, "same", Style::BOLD);
        b.text(0, 0, 4, "same", Style::BOLD);
        b.text(0, 1, 4, "new", Style::of(33));
        let sent = b.escapes(Some(&a));
        assert!(sent.contains("\x1b[2;1H\x1b[0;38;5;33mnew\x1b[0m ") && !sent.contains("same"), "{sent:?}");
        assert!(b.escapes(None).contains("same") && b.escapes(Some(&Screen::new(5, 2))).contains("\x1b[2J"));
    }
}
