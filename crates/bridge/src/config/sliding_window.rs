//! Sliding-window attention: the window and the layers that use it.

use crate::error::{Error, Result};
use crate::family::SlidingWindows;
use crate::json::{Object, show};
use ferrotron_core::model::config::ModelConfig;
use serde_json::{Map, Value, json};

/// Keys this file reads.
pub(super) const KEYS: &[&str] = &[
    "sliding_window",
    "layer_types",
    USE,
    "max_window_layers",
    "sliding_window_pattern",
    "_sliding_window_pattern",
];

const PATTERNS: [&str; 2] = ["sliding_window_pattern", "_sliding_window_pattern"];
const USE: &str = "use_sliding_window";
const DEFAULT_PATTERN: usize = 6;
const DEFAULT_WINDOW: usize = 4096;

/// Sets `window` and `local_layers`.
pub(super) fn read(windows: &SlidingWindows, o: &Object, c: &mut ModelConfig) -> Result<()> {
    let every_window = |absent: usize| match o.map.get("sliding_window") {
        None => Ok(Some(absent)),
        Some(_) => o.size("sliding_window"),
    };
    let (window, derived): (Option<usize>, Box<dyn Fn(usize) -> bool>) = match windows {
        SlidingWindows::Never => return Ok(()),
        SlidingWindows::FromLayer => {
            if !o.flag(USE)?.unwrap_or(false) {
                return Ok(());
            }
            let first = o.size("max_window_layers")?.unwrap_or(28);
            (every_window(DEFAULT_WINDOW)?, Box::new(move |i| i >= first))
        }
        SlidingWindows::Every { switch, absent } => {
            if *switch && !o.flag(USE)?.unwrap_or(false) {
                return Ok(());
            }
            let window = match o.map.get("sliding_window") {
                None => *absent,
                Some(_) => o.size("sliding_window")?,
            };
            (window, Box::new(|_| true))
        }
        SlidingWindows::WithoutRope => {
            // A list of layers counts without the flag, too: transformers makes their masks by it.
            if !o.flag(USE)?.unwrap_or(false) && o.list("layer_types")?.is_none() {
                return Ok(());
            }
            let without = c.no_rope_layers.clone();
            (o.size("sliding_window")?, Box::new(move |i| without.get(i).copied().unwrap_or(false)))
        }
        SlidingWindows::Alternate { window } => (every_window(*window)?, Box::new(|i| i % 2 == 0)),
        SlidingWindows::AllBut => {
            let mut pattern = DEFAULT_PATTERN;
            for key in PATTERNS {
                if let Some(n) = o.size(key)? {
                    if n == 0 {
                        return Err(o.wrong(key, "must be at least 1"));
                    }
                    pattern = n;
                    break;
                }
            }
            (every_window(DEFAULT_WINDOW)?, Box::new(move |i| (i + 1) % pattern != 0))
        }
    };
    check_layers(o, c.layers)?;
    let local: Vec<bool> = match o.list("layer_types")? {
        Some(types) => listed(types, o, c.layers)?,
        None => (0..c.layers).map(derived).collect(),
    };
    // Without a local layer the window has no effect: leave it out, so that equal models compare equal.
    if window.is_some() && local.contains(&true) {
        c.window = window;
        c.local_layers = local;
    }
    Ok(())
}

/// Checked before a list of that length is allocated.
pub(super) fn check_layers(o: &Object, layers: usize) -> Result<()> {
    if layers > 1 << 16 {
        return Err(o.wrong("num_hidden_layers", format_args!("is {layers}, which no model has")));
    }
    Ok(())
}

fn listed(types: &[Value], o: &Object, layers: usize) -> Result<Vec<bool>> {
    if types.len() != layers {
        return Err(o.wrong("layer_types", format_args!("has {} entries for {layers} layers", types.len())));
    }
    types
        .iter()
        .map(|t| match t.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(Error::unsupported(
                o.origin,
                format!(
                    "`layer_types` has {}, which is not supported (full_attention and sliding_attention are)",
                    show(t)
                ),
            )),
        })
        .collect()
}

/// Writes the window and the list of layers.
pub(super) fn write(windows: &SlidingWindows, c: &ModelConfig, map: &mut Map<String, Value>) {
    if matches!(windows, SlidingWindows::Never) {
        return;
    }
    let uses = c.window.is_some() && c.local_layers.contains(&true);
    if matches!(
        windows,
        SlidingWindows::FromLayer | SlidingWindows::Every { switch: true, .. } | SlidingWindows::WithoutRope
    ) {
        map.insert(USE.into(), json!(uses));
    }
    if matches!(windows, SlidingWindows::FromLayer) {
        let first = (0..c.layers).find(|&i| c.is_local(i)).unwrap_or(c.layers);
        map.insert("max_window_layers".into(), json!(first));
    }
    // These families' classes make the mask of a window even where no layer uses it.
    let unused = match windows {
        SlidingWindows::Alternate { window } => Some(*window),
        SlidingWindows::AllBut => Some(DEFAULT_WINDOW),
        _ => None,
    };
    map.insert("sliding_window".into(), c.window.or(unused).map_or(Value::Null, |w| json!(w)));
    if matches!(windows, SlidingWindows::Every { .. }) {
        return;
    }
    let types: Vec<&str> = (0..c.layers)
        .map(|i| if uses && c.is_local(i) { "sliding_attention" } else { "full_attention" })
        .collect();
    map.insert("layer_types".into(), json!(types));
    for key in PATTERNS {
        map.remove(key);
    }
    // Older versions of transformers read the pattern only.
    if matches!(windows, SlidingWindows::AllBut)
        && (0..c.layers).all(|i| c.is_local(i) == ((i + 1) % DEFAULT_PATTERN != 0))
    {
        map.insert(PATTERNS[0].into(), json!(DEFAULT_PATTERN));
    }
}
