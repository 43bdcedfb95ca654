//! Curves as text.

/// Dots of a braille character by column and row; each adds its bit to the block's first character.
const DOTS: [[u32; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];
const BLANK: u32 = 0x2800;

/// A curve: its points by rising x.
pub type Curve = Vec<(f64, f64)>;

/// Draws a curve into `rows` lines of `columns` characters over the range of `x` and `y`. Of the points in one column of dots
/// all are drawn, and neighbours are joined.
pub fn draw(curve: &Curve, x: [f64; 2], y: [f64; 2], columns: usize, rows: usize) -> Vec<String> {
    let (width, height) = (columns * 2, rows * 4);
    let mut cells = vec![0u32; columns * rows];
    let scale = |v: f64, [low, high]: [f64; 2], n: usize| {
        let part = if high > low { (v - low) / (high - low) } else { 0.5 };
        (part.clamp(0.0, 1.0) * (n.saturating_sub(1)) as f64).round() as usize
    };
    let mut dot = |column: usize, row: usize| {
        cells[row / 4 * columns + column / 2] |= DOTS[column % 2][row % 4];
    };
    let mut before: Option<(usize, usize)> = None;
    for (at, value) in curve.iter().filter(|(_, value)| value.is_finite()) {
        let (column, row) = (scale(*at, x, width), height - 1 - scale(*value, y, height));
        let (from_column, from_row) = before.unwrap_or((column, row));
        let steps = column.abs_diff(from_column).max(row.abs_diff(from_row)).max(1);
        for i in 0..=steps {
            let between = |a: usize, b: usize| {
                (a as f64 + (b as f64 - a as f64) * i as f64 / steps as f64).round() as usize
            };
            dot(between(from_column, column), between(from_row, row));
        }
        before = Some((column, row));
    }
    let line = |row: &[u32]| row.iter().filter_map(|bits| char::from_u32(BLANK + bits)).collect();
    cells.chunks(columns.max(1)).map(line).collect()
}

/// The range of the finite values of all curves; none if there are none.
pub fn range(curves: &[&Curve], of: fn(&(f64, f64)) -> f64) -> Option<[f64; 2]> {
    let all = curves.iter().flat_map(|c| c.iter()).map(of).filter(|v| v.is_finite());
    all.fold(None, |range: Option<[f64; 2]>, v| {
        Some(range.map_or([v, v], |[low, high]| [low.min(v), high.max(v)]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_line_goes_from_the_upper_left_to_the_lower_right() {
        let curve: Curve = (0..4).map(|i| (f64::from(i), 3.0 - f64::from(i))).collect();
        assert_eq!(draw(&curve, [0.0, 3.0], [0.0, 3.0], 2, 1), ["⠑⢄"]);
        assert_eq!(draw(&vec![], [0.0, 1.0], [0.0, 1.0], 2, 1), ["⠀⠀"]);
        // What is not finite is left out, and a range of one value does not divide by zero.
        let odd: Curve = vec![(0.0, f64::NAN), (1.0, 5.0)];
        assert_eq!(range(&[&odd], |p| p.1), Some([5.0, 5.0]));
        assert_eq!(draw(&odd, [0.0, 1.0], [5.0, 5.0], 1, 1).len(), 1);
    }
}
