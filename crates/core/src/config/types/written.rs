//! Values with several spellings: lists, large counts, shares.

use crate::config::KeyType;
use crate::data::split::parse_shares;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

/// A list of strings; a single string is a list of one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OneOrMany(pub Vec<String>);

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            One(String),
            Many(Vec<String>),
        }
        Ok(OneOrMany(match Form::deserialize(d)? {
            Form::One(text) => vec![text],
            Form::Many(list) => list,
        }))
    }
}

impl KeyType for OneOrMany {
    fn expects() -> String {
        "text or a list of texts".into()
    }
}

/// Above 2^53 a float no longer holds every whole number.
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

/// A number as written: plain, or text with a unit.
#[derive(Deserialize)]
#[serde(untagged)]
enum NumberForm {
    Whole(u64),
    Real(f64),
    Text(String),
}

/// A large count: `20_000_000_000`, `2e10` or `"20B"` (K, M, B, T are powers of a thousand).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Count(pub u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let (x, unit) = match NumberForm::deserialize(d)? {
            NumberForm::Whole(n) => return Ok(Count(n)),
            NumberForm::Real(x) => (x, 1.0),
            NumberForm::Text(text) => {
                let text = text.trim().replace('_', "");
                let (digits, unit) = match text.char_indices().next_back() {
                    Some((i, 'K' | 'k')) => (&text[..i], 1e3),
                    Some((i, 'M' | 'm')) => (&text[..i], 1e6),
                    Some((i, 'B' | 'b')) => (&text[..i], 1e9),
                    Some((i, 'T' | 't')) => (&text[..i], 1e12),
                    _ => (text.as_str(), 1.0),
                };
                (digits.trim().parse::<f64>().map_err(D::Error::custom)?, unit)
            }
        };
        let value = x * unit;
        if value.fract() != 0.0 || !(0.0..=MAX_WHOLE).contains(&value) {
            return Err(D::Error::custom("not a whole number"));
        }
        Ok(Count(value as u64))
    }
}

impl KeyType for Count {
    fn expects() -> String {
        "a whole number such as 20000000, 2e7 or \"20M\"".into()
    }
}

/// A number of bytes: `800_000_000`, `8e8`, `"800MB"` (K, M, G, T are powers of a thousand) or `"512MiB"` (of 1024).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ByteCount(pub u64);

impl<'de> Deserialize<'de> for ByteCount {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let (x, unit) = match NumberForm::deserialize(d)? {
            NumberForm::Whole(n) => return Ok(ByteCount(n)),
            NumberForm::Real(x) => (x, 1.0),
            NumberForm::Text(text) => {
                let text = text.trim().replace('_', "").to_ascii_uppercase();
                let text = text.strip_suffix('B').unwrap_or(&text);
                let (text, base) = match text.strip_suffix('I') {
                    Some(rest) => (rest, 1024f64),
                    None => (text, 1e3),
                };
                let power = text.chars().next_back().and_then(|c| "KMGT".find(c));
                let digits = if power.is_some() { &text[..text.len() - 1] } else { text };
                let unit = power.map_or(1.0, |p| base.powi(p as i32 + 1));
                (digits.trim().parse::<f64>().map_err(D::Error::custom)?, unit)
            }
        };
        let value = (x * unit).round();
        if !(0.0..=MAX_WHOLE).contains(&value) {
            return Err(D::Error::custom("not a number of bytes"));
        }
        Ok(ByteCount(value as u64))
    }
}

impl KeyType for ByteCount {
    fn expects() -> String {
        "a number of bytes such as 800000000, \"800MB\" or \"512MiB\"".into()
    }
}

/// A length of time in seconds: `5400`, `"90m"` or `"3h50m"` (d, h, m and s).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct TimeSpan(pub u64);

impl<'de> Deserialize<'de> for TimeSpan {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let seconds = match NumberForm::deserialize(d)? {
            NumberForm::Whole(n) => Some(n),
            NumberForm::Real(_) => None,
            NumberForm::Text(text) => seconds_of(text.trim()),
        };
        seconds.filter(|s| *s > 0).map(TimeSpan).ok_or_else(|| D::Error::custom("not a length of time"))
    }
}

/// Seconds of a text such as `3h50m`: units from large to small, each at most once.
fn seconds_of(text: &str) -> Option<u64> {
    let (mut total, mut rest, mut before) = (0u64, text, u64::MAX);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number: u64 = rest[..digits].parse().ok()?;
        let unit = match rest[digits..].chars().next() {
            Some('d') => 86_400,
            Some('h') => 3600,
            Some('m') => 60,
            Some('s') => 1,
            // A plain number of seconds stands alone.
            None if before == u64::MAX => return Some(number),
            _ => return None,
        };
        if unit >= before {
            return None;
        }
        total = total.checked_add(number.checked_mul(unit)?)?;
        (rest, before) = (&rest[digits + 1..], unit);
    }
    (before < u64::MAX).then_some(total)
}

impl KeyType for TimeSpan {
    fn expects() -> String {
        "a length of time such as 5400 (seconds), \"90m\" or \"3h50m\"".into()
    }
}

impl std::fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut left = self.0;
        for (unit, name) in [(86_400, 'd'), (3600, 'h'), (60, 'm'), (1, 's')] {
            if left >= unit {
                write!(f, "{}{name}", left / unit)?;
                left %= unit;
            }
        }
        Ok(())
    }
}

/// Shares of training, validation and test data; any scale. Written as a list or as `"99,1,0"`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DataSplit(pub [f64; 3]);

impl<'de> Deserialize<'de> for DataSplit {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            List(Vec<f64>),
            Text(String),
        }
        let list = match Form::deserialize(d)? {
            Form::List(list) => list,
            Form::Text(text) => parse_shares(&text).map_err(D::Error::custom)?,
        };
        if list.is_empty() || list.len() > 3 || list.iter().any(|x| !x.is_finite()) {
            return Err(D::Error::custom("up to three shares"));
        }
        Ok(DataSplit(std::array::from_fn(|i| list.get(i).copied().unwrap_or(0.0))))
    }
}

impl KeyType for DataSplit {
    fn expects() -> String {
        "shares of training, validation and test data such as [99, 1, 0]".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time() {
        for (text, seconds) in
            [("90", 90), ("3h50m", 13_800), ("1d", 86_400), ("2d1h5s", 176_405), ("0h7s", 7)]
        {
            assert_eq!(seconds_of(text), Some(seconds), "{text}");
        }
        for text in ["", "h", "3h50", "50m3h", "3h3h", "-5s", "1.5h", "3 h", "99999999999999999999s", "3µ"] {
            assert_eq!(seconds_of(text), None, "{text}");
        }
        assert_eq!(TimeSpan(13_800).to_string(), "3h50m");
    }
}
