//! Mismatches between weights and configuration, collected before anything is read.

use std::fmt;

/// A tensor that does not match the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Required by the configuration and in no file.
    Missing(String),
    /// In a file, but not a tensor of the model.
    Unexpected(String),
    /// Present but unusable: the name, and the reason (shape, dtype, index entry…).
    Wrong(String, String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Missing(name) => write!(f, "missing: {name}"),
            Problem::Unexpected(name) => write!(f, "unexpected: {name}"),
            Problem::Wrong(name, how) => write!(f, "wrong: {name}: {how}"),
        }
    }
}

/// Problems listed in the message; the error value holds all of them.
const SHOWN: usize = 2000;

pub(crate) fn sentence(problems: &[Problem]) -> String {
    let count = |f: fn(&Problem) -> bool| problems.iter().filter(|p| f(p)).count();
    let missing = count(|p| matches!(p, Problem::Missing(_)));
    let unexpected = count(|p| matches!(p, Problem::Unexpected(_)));
    let wrong = problems.len() - missing - unexpected;
    let mut text = format!(
        "the weights do not fit config.json ({missing} missing, {unexpected} unexpected, {wrong} wrong)"
    );
    for p in problems.iter().take(SHOWN) {
        text.push_str("\n  ");
        text.push_str(&p.to_string());
    }
    if problems.len() > SHOWN {
        text.push_str(&format!("\n  and {} more", problems.len() - SHOWN));
    }
    text
}
