//! Formatting of counts, times and rates.

/// 950, 12.3K, 3.5M, 1.24B.
pub fn count(n: u64) -> String {
    let x = n as f64;
    for (unit, name) in [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")] {
        // 999,950 would round to 1000.0K: use the next unit.
        if x >= unit * 0.99995 {
            let y = x / unit;
            let digits = if y < 9.995 { 2 } else { 1 };
            return format!("{y:.digits$}{name}");
        }
    }
    n.to_string()
}

/// 12,345
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// 0.8 s, 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h.
pub fn seconds(s: f64) -> String {
    if !s.is_finite() || s < 0.0 {
        return "?".into();
    }
    if s < 9.95 {
        return format!("{s:.1} s");
    }
    let s = s.round().min(1e15) as u64;
    let (m, h, d) = (s / 60, s / 3600, s / 86400);
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{m} min {} s", s % 60),
        3600..86400 => format!("{h} h {} min", m % 60),
        _ => format!("{d} d {} h", h % 24),
    }
}

/// A loss with four digits, or "not a number".
pub fn loss(x: f64) -> String {
    if x.is_finite() { format!("{x:.4}") } else { "not a number".into() }
}

/// TFLOP/s with three significant digits or so.
pub fn tflops(x: f64) -> String {
    match x {
        x if x >= 100.0 => format!("{x:.0} TFLOP/s"),
        x if x >= 1.0 => format!("{x:.1} TFLOP/s"),
        x => format!("{x:.3} TFLOP/s"),
    }
}

/// Generated text without control characters, safe to print on a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts() {
        let shown =
            [0, 999, 1000, 12_345, 999_949, 999_950, 3_475_712, 1_235_814_400, 20_000_000_000_000].map(count);
        assert_eq!(shown, ["0", "999", "1.00K", "12.3K", "999.9K", "1.00M", "3.48M", "1.24B", "20.0T"]);
        assert_eq!([0, 12, 123, 1234, 1234567].map(thousands), ["0", "12", "123", "1,234", "1,234,567"]);
    }

    #[test]
    fn times() {
        let shown = [0.04, 9.94, 9.96, 59.6, 185.0, 7800.0, 273_600.0].map(seconds);
        assert_eq!(shown, ["0.0 s", "9.9 s", "10 s", "1 min 0 s", "3 min 5 s", "2 h 10 min", "3 d 4 h"]);
        assert_eq!([f64::NAN, f64::INFINITY, -1.0].map(seconds), ["?", "?", "?"]);
        assert_eq!(seconds(f64::MAX).chars().last(), Some('h'));
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\tb\n\x1b[31m\r\u{9b}é"), "a\tb\n\u{fffd}[31m\u{fffd}\u{fffd}é");
    }

    #[test]
    fn rates_and_losses() {
        assert_eq!([0.0123, 1.25, 515.4].map(tflops), ["0.012 TFLOP/s", "1.2 TFLOP/s", "515 TFLOP/s"]);
        assert_eq!([1.5, f64::NAN].map(loss), ["1.5000", "not a number"]);
    }
}
