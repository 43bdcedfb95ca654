//! Line charts of braille dots, 2 × 4 to a character.

use super::screen::{Area, Screen, Style};

/// A curve: points by rising x.
pub struct Curve {
    pub color: u8,
    pub points: Vec<(f64, f64)>,
}

/// A chart.
pub struct Chart {
    pub title: String,
    /// The newest value, beside the title.
    pub now: String,
    pub curves: Vec<Curve>,
    pub log: bool,
    /// How a value on the y axis is written.
    pub format: fn(f64) -> String,
}

/// Columns of the labels of the y axis.
const LABELS: usize = 8;

impl Chart {
    /// Draws into an area: title, plot, and a line with the x axis' ends.
    pub fn draw(&self, screen: &mut Screen, area: Area) {
        if area.height < 4 || area.width < LABELS + 6 {
            return;
        }
        let used = screen.text(area.x, area.y, area.width, &self.title, Style::BOLD);
        let left = area.width.saturating_sub(used + 2);
        screen.text(area.x + used + 2, area.y, left, &self.now, Style::DIM);
        let plot = Area {
            x: area.x + LABELS,
            y: area.y + 1,
            width: area.width - LABELS - 1,
            height: area.height - 2,
        };
        let Some(range) = Range::of(&self.curves, self.log) else {
            screen.text(plot.x, plot.y + plot.height / 2, plot.width, "no values", Style::DIM);
            return;
        };
        let values = [range.y_max, 0.5 * (range.y_min + range.y_max), range.y_min];
        for (i, y) in
            [plot.y, plot.y + (plot.height - 1) / 2, plot.y + plot.height - 1].into_iter().enumerate()
        {
            if i != 1 || plot.height >= 5 {
                let value = if self.log { values[i].exp() } else { values[i] };
                screen.text_right(area.x, y, LABELS - 1, &(self.format)(value), Style::DIM);
            }
        }
        for y in plot.y..plot.y + plot.height {
            screen.set(plot.x - 1, y, '▏', Style::DIM);
        }
        let below = plot.y + plot.height;
        screen.text(plot.x, below, plot.width, &format!("{:.0}", range.x_min), Style::DIM);
        screen.text_right(plot.x, below, plot.width, &format!("{:.0}", range.x_max), Style::DIM);
        let mut dots = Dots::new(plot.width, plot.height);
        for curve in &self.curves {
            dots.draw(curve, &range, self.log);
        }
        dots.put(screen, plot);
    }
}

/// The range of a chart's axes; of y in logarithms if the chart has a log axis.
struct Range {
    x_min: f64,
    x_max: f64,
    y_min: f64,
    y_max: f64,
}

impl Range {
    fn of(curves: &[Curve], log: bool) -> Option<Range> {
        let mut r = Range { x_min: f64::MAX, x_max: f64::MIN, y_min: f64::MAX, y_max: f64::MIN };
        for (x, y) in curves.iter().flat_map(|c| &c.points) {
            if let Some(y) = scaled(*y, log) {
                (r.x_min, r.x_max) = (r.x_min.min(*x), r.x_max.max(*x));
                (r.y_min, r.y_max) = (r.y_min.min(y), r.y_max.max(y));
            }
        }
        if r.x_min > r.x_max {
            return None;
        }
        if r.y_max - r.y_min <= 1e-12 * r.y_max.abs() {
            let pad = if r.y_max == 0.0 { 1.0 } else { 0.05 * r.y_max.abs() };
            (r.y_min, r.y_max) = (r.y_min - pad, r.y_max + pad);
        }
        Some(r)
    }
}

fn scaled(y: f64, log: bool) -> Option<f64> {
    match log {
        true if y > 0.0 => Some(y.ln()).filter(|y| y.is_finite()),
        true => None,
        false => Some(y).filter(|y| y.is_finite()),
    }
}

/// Braille cells: a bit per dot, and the color of the last curve through the cell.
struct Dots {
    width: usize,
    height: usize,
    cells: Vec<(u8, u8)>,
}

impl Dots {
    fn new(width: usize, height: usize) -> Dots {
        Dots { width, height, cells: vec![(0, 0); width * height] }
    }

    fn dot(&mut self, x: usize, y: usize, color: u8) {
        // Bits of a braille character by column and row.
        const BITS: [[u8; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];
        if x < 2 * self.width && y < 4 * self.height {
            let cell = &mut self.cells[y / 4 * self.width + x / 2];
            *cell = (cell.0 | BITS[x % 2][y % 4], color);
        }
    }

    /// The curve, points joined; every column of dots spans the values that fall into it.
    fn draw(&mut self, curve: &Curve, range: &Range, log: bool) {
        let (w, h) = ((2 * self.width - 1) as f64, (4 * self.height - 1) as f64);
        let span = (range.x_max - range.x_min).max(f64::MIN_POSITIVE);
        let mut before: Option<(i64, i64)> = None;
        for (x, y) in &curve.points {
            // A value that is not finite interrupts the line.
            let Some(y) = scaled(*y, log) else {
                before = None;
                continue;
            };
            let at = (
                ((x - range.x_min) / span * w).round() as i64,
                ((range.y_max - y) / (range.y_max - range.y_min) * h).round() as i64,
            );
            let from = before.unwrap_or(at);
            let (dx, dy) = (at.0 - from.0, at.1 - from.1);
            let n = dx.abs().max(dy.abs()).max(1);
            for i in 0..=n {
                let (x, y) = (from.0 + dx * i / n, from.1 + dy * i / n);
                if let (Ok(x), Ok(y)) = (usize::try_from(x), usize::try_from(y)) {
                    self.dot(x, y, curve.color);
                }
            }
            before = Some(at);
        }
    }

    fn put(&self, screen: &mut Screen, area: Area) {
        for (i, (bits, color)) in self.cells.iter().enumerate().filter(|(_, (bits, _))| *bits != 0) {
            let c = char::from_u32(0x2800 + u32::from(*bits)).unwrap_or(' ');
            screen.set(area.x + i % self.width, area.y + i / self.width, c, Style::of(*color));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(points: &[(f64, f64)], log: bool) -> String {
        let curves = vec![Curve { color: 33, points: points.to_vec() }];
        let chart =
            Chart { title: "loss".into(), now: "1".into(), curves, log, format: |y| format!("{y:.2}") };
        let mut screen = Screen::new(20, 6);
        let area = screen.area();
        chart.draw(&mut screen, area);
        screen.plain()
    }

    #[test]
    fn a_falling_line_goes_from_corner_to_corner() {
        let text = drawn(&[(1.0, 4.0), (22.0, 1.0)], false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "loss  1");
        assert!(lines[1].starts_with("   4.00▏⠉"), "{text}");
        assert!(lines[4].starts_with("   1.00▏") && lines[4].ends_with('⢄'), "{text}");
        assert_eq!(lines[5].split_whitespace().collect::<Vec<_>>(), ["1", "22"]);
    }

    #[test]
    fn gaps_and_flat_curves() {
        assert!(drawn(&[(1.0, f64::NAN)], false).contains("no values"));
        assert!(drawn(&[(1.0, 0.0), (2.0, -1.0)], true).contains("no values"));
        let text = drawn(&[(0.0, 2.0), (5.0, f64::NAN), (10.0, 2.0)], false);
        assert_eq!(text.chars().filter(|c| ('\u{2801}'..='\u{28ff}').contains(c)).count(), 2, "{text}");
        assert!(text.contains("2.10") && text.contains("1.90"), "{text}");
    }
}
