//! Limits on the values that a template makes.
//!
//! Fuel bounds the number of instructions, but one instruction may double a string, and a list that holds another list
//! twice, repeated forty times, is small in memory and endless when it is printed. So every value that a template
//! makes, prints or hands to an operator, a filter or a function is measured first: its own size, what it holds, and
//! how deep; and all of them together draw on one budget. Time and memory are then bounded by the budget.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Largest value, in bytes of text plus [`NODE`] for every number, string, list and map in it.
pub(super) const MAX_VALUE: u64 = 8 << 20;
/// All values of one rendering together.
const TOTAL: u64 = 256 << 20;
/// Cost of a value apart from its text.
const NODE: u64 = 32;
/// Deepest nesting of lists and maps: comparing, printing and dropping recurse.
const MAX_DEPTH: usize = 64;

/// What is left for one rendering.
#[derive(Debug)]
pub(super) struct Budget {
    left: AtomicU64,
}

impl Budget {
    pub fn new() -> Budget {
        Budget { left: AtomicU64::new(TOTAL) }
    }

    /// Draws `bytes`, or fails if a single value is too large or everything together is.
    pub fn charge(&self, bytes: u64) -> Result<(), Error> {
        if bytes > MAX_VALUE {
            return Err(refused(format!("it makes a value of more than {MAX_VALUE} bytes")));
        }
        let left = self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes));
        left.map(drop).map_err(|_| refused(format!("it makes more than {TOTAL} bytes of values")))
    }

    /// Measures a value and draws its size. Lazy sequences become lists: one that refers to another that refers to
    /// another would recurse when it is read.
    pub fn bounded(&self, value: Value) -> Result<Value, Error> {
        let value = match value.kind() {
            ValueKind::Iterable => {
                let mut items = Vec::new();
                for item in value.try_iter()? {
                    if items.len() as u64 >= MAX_VALUE / NODE {
                        return Err(refused(format!("it makes a list of more than {} items", items.len())));
                    }
                    items.push(item);
                }
                Value::from(items)
            }
            _ => value,
        };
        self.charge(size(&value)?)?;
        Ok(value)
    }

    /// Draws the length of a string; lists and maps are free, because finding an item in them takes no time.
    pub fn indexed(&self, value: Value) -> Result<Value, Error> {
        self.charge(value.as_str().map_or(0, |s| s.len() as u64))?;
        Ok(value)
    }

    /// Draws the length of a string, list or map that a loop begins to read.
    pub fn iterated(&self, value: Value) -> Result<Value, Error> {
        let items = (value.len().unwrap_or(0) as u64).saturating_mul(NODE);
        self.charge(value.as_str().map_or(items, |s| s.len() as u64))?;
        Ok(value)
    }
}

/// Text and nodes of a value with all it holds.
pub(super) fn size(value: &Value) -> Result<u64, Error> {
    let mut left = MAX_VALUE;
    measure(value, 0, &mut left)?;
    Ok(MAX_VALUE - left)
}

fn measure(value: &Value, depth: usize, left: &mut u64) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(refused(format!("it nests values more than {MAX_DEPTH} deep")));
    }
    let text = value.as_str().map_or(0, str::len).max(value.as_bytes().map_or(0, <[u8]>::len));
    *left = left
        .checked_sub(NODE + text as u64)
        .ok_or_else(|| refused(format!("it makes a value of more than {MAX_VALUE} bytes")))?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                measure(&item, depth + 1, left)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                measure(&key, depth + 1, left)?;
                if let Ok(item) = value.get_item(&key) {
                    measure(&item, depth + 1, left)?;
                }
            }
        }
        _ => {}
    }
    Ok(())
}

pub(super) fn refused(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}
