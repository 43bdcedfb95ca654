//! Filters, methods and operators whose result may be much larger than their arguments: the size is known before it is
//! made. All others make at most a small multiple of what they are given, which has been measured.

use super::budget::{Budget, MAX_VALUE, refused, size};
use super::instrument::{BOUNDED, INDEXED, ITERATED, SLICED, TIMES};
use super::pattern::{MAX_WIDTH, Style, fields};
use super::slice::slice;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use serde_json::Value as Json;
use std::borrow::Cow;
use std::sync::Arc;

type Result<T> = std::result::Result<T, Error>;

/// Most bytes of a field of `format` beside its argument: characters that fill it, digits after its point.
const WIDEST: u64 = 5 * MAX_WIDTH as u64;
/// Most groups that `batch` and `slice` make, and the widest indentation.
const MAX_COUNT: u64 = 10_000;
/// Longest separator of `tojson`.
const MAX_SEPARATOR: usize = 16;

/// Adds the filters, methods and functions of chat templates, which draw on `budget`.
pub(super) fn add(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    let b = budget.clone();
    environment.add_filter(BOUNDED, move |value: Value| b.bounded(value));
    let b = budget.clone();
    environment.add_filter(INDEXED, move |value: Value| b.indexed(value));
    let b = budget.clone();
    environment.add_filter(ITERATED, move |value: Value| b.iterated(value));
    let b = budget.clone();
    environment.add_filter(TIMES, move |left: Value, right: Value| times(&b, &left, &right));
    environment.add_filter(SLICED, |value: Value, start: Value, stop: Value, step: Value| {
        slice(&value, &start, &stop, &step)
    });
    let b = budget.clone();
    environment.add_filter(
        "tojson",
        move |value: Value, ascii: Option<Value>, indent: Option<Value>, options: Kwargs| {
            to_json(&b, &value, (ascii, indent), options)
        },
    );
    let checked: [(&str, Value, Check); 11] = [
        ("replace", Value::from_function(filters::replace), replaced),
        ("join", Value::from_function(filters::join), joined),
        ("indent", Value::from_function(filters::indent), counted),
        ("batch", Value::from_function(filters::batch), counted),
        ("slice", Value::from_function(filters::slice), counted),
        ("format", Value::from_function(filters::format), |args| formatted(args, Style::Printf)),
        ("map", Value::from_function(filters::map), for_each),
        ("select", Value::from_function(filters::select), for_each),
        ("reject", Value::from_function(filters::reject), for_each),
        ("selectattr", Value::from_function(filters::selectattr), for_each),
        ("rejectattr", Value::from_function(filters::rejectattr), for_each),
    ];
    for (name, builtin, check) in checked {
        let b = budget.clone();
        environment.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            b.charge(check(&args)?)?;
            builtin.call(state, &args)
        });
    }
    let b = budget.clone();
    environment.set_unknown_method_callback(move |state, value, method, args| {
        let all: Vec<Value> = [value.clone()].into_iter().chain(args.iter().cloned()).collect();
        b.charge(match (method, value.kind()) {
            ("replace", ValueKind::String) => replaced(&all)?,
            // The separator is the receiver.
            ("join", ValueKind::String) => joined(&all.iter().rev().cloned().collect::<Vec<_>>())?,
            ("format", ValueKind::String) => formatted(&all, Style::Braces)?,
            _ => 0,
        })?;
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
    environment.add_function("raise_exception", |message: String| -> Result<String> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    // It prints every variable, measured or not.
    environment.add_function("debug", || -> Result<String> {
        Err(refused("debug() is not available in chat templates".into()))
    });
}

/// The most bytes that a filter makes of its arguments; the first is what it is applied to.
type Check = fn(&[Value]) -> Result<u64>;

/// An argument as the text that filters take it for: a list is printed first.
fn text(args: &[Value], at: usize) -> Cow<'_, str> {
    match args.get(at) {
        Some(value) if !value.is_none() && !value.is_undefined() => {
            value.as_str().map_or_else(|| value.to_string().into(), Cow::Borrowed)
        }
        _ => "".into(),
    }
}

fn replaced(args: &[Value]) -> Result<u64> {
    let (all, from, to) = (text(args, 0), text(args, 1), text(args, 2));
    let matches = if from.is_empty() { all.len() + 1 } else { all.matches(&*from).count() };
    Ok(all.len() as u64 + (matches as u64).saturating_mul(to.len() as u64))
}

/// `join` of the first argument by the second, which may be named and is then printed with its name.
fn joined(args: &[Value]) -> Result<u64> {
    let Some(all) = args.first() else { return Ok(0) };
    let items = all.len().unwrap_or_else(|| all.as_str().map_or(0, str::len)) as u64;
    Ok(size(all)?.saturating_add(items.saturating_mul(text(args, 1).len() as u64)))
}

/// `indent`, `batch` and `slice`, whose arguments are counts.
fn counted(args: &[Value]) -> Result<u64> {
    let Some(all) = args.first() else { return Ok(0) };
    let named = args.last().and_then(|k| k.get_attr("width").ok());
    let counts = args[1..].iter().chain(&named).filter(|v| v.kind() == ValueKind::Number);
    let count = counts.map(|v| v.as_i64().map_or(u64::MAX, i64::unsigned_abs)).max().unwrap_or(0);
    if count > MAX_COUNT {
        return Err(refused(format!("it asks for {count} spaces or groups, more than {MAX_COUNT}")));
    }
    let lines = all.as_str().map_or(1, |s| s.lines().count() as u64 + 1);
    Ok(size(all)?.saturating_add(lines.saturating_mul(count)))
}

/// `format` of the first argument, every field of which may print all others.
fn formatted(args: &[Value], style: Style) -> Result<u64> {
    let Some((first, rest)) = args.split_first() else { return Ok(0) };
    let text = first.as_str().unwrap_or_default();
    let each: u64 = rest.iter().map(size).sum::<Result<u64>>()?;
    let printed = fields(text, style).map_err(refused)?.saturating_mul(each.saturating_add(WIDEST));
    Ok(printed.saturating_add(text.len() as u64))
}

/// Filters that apply another filter or a test to every item, with their own arguments each time.
fn for_each(args: &[Value]) -> Result<u64> {
    let Some((all, rest)) = args.split_first() else { return Ok(0) };
    let items = all.len().unwrap_or(0) as u64;
    let each: u64 = rest.iter().map(size).sum::<Result<u64>>()?;
    // What is compared with is seldom long.
    Ok(size(all)?.saturating_add(items.saturating_mul(each.saturating_sub(1024))))
}

fn times(budget: &Budget, left: &Value, right: &Value) -> Result<Value> {
    // 2.0 is a float, whatever its value.
    let integer = |v: &Value| v.as_i64().filter(|_| v.is_integer() || v.kind() == ValueKind::Bool);
    let (repeated, count) = match (integer(left), integer(right)) {
        (Some(a), Some(b)) => {
            let product = i128::from(a).checked_mul(i128::from(b));
            return product.map(number).ok_or_else(|| refused("a product is too large".into()));
        }
        (None, Some(n)) if left.kind() != ValueKind::Number => (left, n),
        (Some(n), None) if right.kind() != ValueKind::Number => (right, n),
        _ => {
            let float = |v: &Value| f64::try_from(v.clone());
            return Ok(Value::from(float(left)? * float(right)?));
        }
    };
    let count = usize::try_from(count).unwrap_or(0);
    budget.charge(size(repeated)?.saturating_mul(count as u64))?;
    if let Some(text) = repeated.as_str() {
        return Ok(Value::from(text.repeat(count)));
    }
    let items: Vec<Value> = match repeated.kind() {
        ValueKind::Seq | ValueKind::Iterable => repeated.try_iter()?.collect(),
        kind => return Err(refused(format!("a {kind} cannot be multiplied"))),
    };
    Ok(Value::from((0..count).flat_map(|_| items.iter().cloned()).collect::<Vec<_>>()))
}

/// An integer in the smallest type, as operators return it.
fn number(n: i128) -> Value {
    i64::try_from(n).map_or_else(|_| Value::from(n), Value::from)
}

/// How JSON is printed.
struct JsonStyle {
    indent: Option<usize>,
    sorted: bool,
    /// After an item, and after a key.
    separators: [String; 2],
    /// Characters beyond ASCII are escaped.
    ascii: bool,
}

/// The `tojson` filter as Python's `json.dumps` prints: spaces after commas and colons, no HTML escapes.
/// By position come `ensure_ascii` and `indent`, in transformers' order.
fn to_json(
    budget: &Budget,
    value: &Value,
    (ascii, indent): (Option<Value>, Option<Value>),
    options: Kwargs,
) -> Result<Value> {
    let indent: Option<Value> = match indent {
        Some(i) => Some(i),
        None => options.get("indent")?,
    };
    let ascii = match ascii {
        Some(ascii) => Some(ascii),
        None => options.get("ensure_ascii")?,
    };
    let ascii = ascii.is_some_and(|v: Value| v.is_true());
    let sorted = options.get::<Option<Value>>("sort_keys")?.is_some_and(|v| v.is_true());
    let separators = options.get::<Option<Value>>("separators")?;
    options.assert_all_used()?;
    let indent = match indent {
        Some(i) if !i.is_none() => Some(usize::try_from(i)?.min(64)),
        _ => None,
    };
    let separators = match separators {
        Some(given) if !given.is_none() => separators_of(&given)?,
        _ => [if indent.is_some() { "," } else { ", " }, ": "].map(String::from),
    };
    size(value)?; // bounds its depth
    let mut text = String::new();
    print(value, &JsonStyle { indent, sorted, separators, ascii }, 0, &mut text)?;
    budget.charge(text.len() as u64)?;
    Ok(Value::from_safe_string(text))
}

fn separators_of(given: &Value) -> Result<[String; 2]> {
    let texts: Option<Vec<String>> = given
        .try_iter()?
        .map(|v| v.as_str().filter(|s| s.len() <= MAX_SEPARATOR).map(String::from))
        .collect();
    let pair = texts.and_then(|t| <[String; 2]>::try_from(t).ok());
    pair.ok_or_else(|| {
        refused("the separators of tojson must be two short strings, such as (',', ':')".into())
    })
}

fn print(v: &Value, style: &JsonStyle, depth: usize, out: &mut String) -> Result<()> {
    // Indentation may be much longer than the text.
    if out.len() as u64 > MAX_VALUE {
        return Err(refused(format!("it makes a value of more than {MAX_VALUE} bytes")));
    }
    let line = |depth: usize, out: &mut String| {
        if let Some(n) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', n * depth));
        }
    };
    let [after_item, after_key] = &style.separators;
    let wrong = |e: serde_json::Error| refused(format!("cannot be written as JSON: {e}"));
    match v.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = v.try_iter()?.collect();
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { after_item } else { "" });
                line(depth + 1, out);
                print(item, style, depth + 1, out)?;
            }
            if !items.is_empty() {
                line(depth, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = v.try_iter()?.collect();
            if style.sorted {
                keys.sort();
            }
            out.push('{');
            for (i, key) in keys.iter().enumerate() {
                out.push_str(if i > 0 { after_item } else { "" });
                line(depth + 1, out);
                let name = key.as_str().map_or_else(|| key.to_string(), str::to_string);
                quote(&name, style.ascii, out);
                out.push_str(after_key);
                print(&v.get_item(key)?, style, depth + 1, out)?;
            }
            if !keys.is_empty() {
                line(depth, out);
            }
            out.push('}');
        }
        ValueKind::Undefined => return Err(refused("an undefined value cannot be written as JSON".into())),
        ValueKind::String => quote(v.as_str().unwrap_or_default(), style.ascii, out),
        ValueKind::Number if !v.is_integer() => out.push_str(&python_float(f64::try_from(v.clone())?)),
        _ => out.push_str(&serde_json::to_string(v).map_err(wrong)?),
    }
    Ok(())
}

/// A string as JSON.
fn quote(text: &str, ascii: bool, out: &mut String) {
    let quoted = Json::String(text.into()).to_string();
    if !ascii || quoted.is_ascii() {
        return out.push_str(&quoted);
    }
    for c in quoted.chars() {
        match c.is_ascii() {
            true => out.push(c),
            false => c.encode_utf16(&mut [0; 2]).iter().for_each(|u| out.push_str(&format!("\\u{u:04x}"))),
        }
    }
}

/// A float as Python prints it: `1.0`, `1e-05`, `1e+16`.
pub(super) fn python_float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "NaN".into()
        } else if x > 0.0 {
            "Infinity".into()
        } else {
            "-Infinity".into()
        };
    }
    let shortest = format!("{x:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..16 => format!("{x:?}"),
        e => format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs()),
    }
}
