//! Slices `value[start:stop:step]` as Python takes them. The template library's own slice reads past the end of an empty
//! list, and stops in the wrong place, when the step is negative.

use super::budget::refused;
use minijinja::Error;
use minijinja::value::{Tuple, Value, ValueKind};

type Result<T> = std::result::Result<T, Error>;

/// The items of `value` at the indices of Python's `slice(start, stop, step)`; an undefined value has none.
pub(super) fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value> {
    let bound = |v: &Value| if v.is_none() { Ok(None) } else { i64::try_from(v.clone()).map(Some) };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(refused("a slice has a step of 0".into()));
    }
    let at = |len: usize| indices(len, start, stop, step);
    if let Some(text) = value.as_str() {
        let chars: Vec<char> = text.chars().collect();
        return Ok(Value::from(at(chars.len()).filter_map(|i| chars.get(i)).collect::<String>()));
    }
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let taken: Vec<Value> = at(items.len()).filter_map(|i| items.get(i).cloned()).collect();
            Ok(if value.is_tuple() { Value::from(Tuple::from(taken)) } else { Value::from(taken) })
        }
        kind => Err(refused(format!("a {kind} cannot be sliced"))),
    }
}

/// Indices below `len`, in order. A negative bound counts from the end; bounds beyond either end are moved to it.
fn indices(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let (len, step) = (len as i128, i128::from(step));
    // With a negative step the range ends before index 0, which is -1 here.
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |bound: i64| {
        let bound = i128::from(bound);
        (if bound < 0 { bound + len } else { bound }).clamp(low, high)
    };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    let (first, last) = (start.map_or(first, clamp), stop.map_or(last, clamp));
    let inside = move |i: &i128| if step > 0 { *i < last } else { *i > last };
    std::iter::successors(Some(first), move |i| Some(i + step)).take_while(inside).map(|i| i as usize)
}

#[cfg(test)]
mod tests {
    use super::indices;

    #[test]
    fn indices_are_pythons() {
        let taken = |len, start, stop, step| indices(len, start, stop, step).collect::<Vec<_>>();
        assert_eq!(taken(5, None, None, -1), [4, 3, 2, 1, 0]);
        assert_eq!(taken(5, Some(3), Some(1), -1), [3, 2]);
        assert!(taken(5, Some(1), Some(3), -1).is_empty());
        assert_eq!(taken(5, Some(-2), None, 1), [3, 4]);
        assert_eq!(taken(5, Some(-100), Some(100), 2), [0, 2, 4]);
        assert_eq!(taken(5, Some(100), Some(-100), -2), [4, 2, 0]);
        assert_eq!(taken(5, None, None, i64::MIN), [4]);
        assert_eq!(taken(5, Some(i64::MIN), Some(i64::MAX), i64::MAX), [0]);
        for step in [-3, -2, -1, 1, 2, 3] {
            for (start, stop) in [(None, None), (Some(0), Some(0)), (Some(-1), None), (None, Some(-1))] {
                assert!(taken(0, start, stop, step).is_empty(), "{start:?} {stop:?} {step}");
            }
        }
    }
}
