//! `--data [WEIGHT:]PATH`.

use crate::output::UsageError;
use anyhow::Result;
use std::path::Path;

/// Paths and, where they are given, their weights in the blend.
pub fn weighted(data: &[String]) -> Result<(Vec<String>, Option<Vec<f64>>)> {
    let split: Vec<(Option<f64>, &str)> = data.iter().map(|d| one(d)).collect();
    let paths = split.iter().map(|(_, path)| path.to_string()).collect();
    let weights: Vec<f64> = split.iter().filter_map(|(weight, _)| *weight).collect();
    if weights.is_empty() {
        return Ok((paths, None));
    }
    match split.iter().find(|(weight, _)| weight.is_none()) {
        Some((_, path)) => {
            let what = format!("--data {path} has no weight, but others have");
            Err(UsageError::new(what).hint(format!("write --data 1:{path}")).into())
        }
        None => Ok((paths, Some(weights))),
    }
}

/// A number and a colon before a path are its weight, unless a file has that name.
fn one(data: &str) -> (Option<f64>, &str) {
    let weight = |w: &str| w.parse::<f64>().ok().filter(|w| w.is_finite() && *w >= 0.0);
    match data.split_once(':') {
        Some((w, path)) if !Path::new(data).exists() => weight(w).map_or((None, data), |w| (Some(w), path)),
        _ => (None, data),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(data: &[&str]) -> Result<(Vec<String>, Option<Vec<f64>>)> {
        weighted(&data.iter().map(|d| d.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn a_number_before_a_colon_is_a_weight() {
        let paths = |p: &[&str]| p.iter().map(|p| p.to_string()).collect::<Vec<_>>();
        assert_eq!(parsed(&["a", "b"]).unwrap(), (paths(&["a", "b"]), None));
        assert_eq!(parsed(&["0.8:a", "2e-1:b:c"]).unwrap(), (paths(&["a", "b:c"]), Some(vec![0.8, 0.2])));
        assert_eq!(parsed(&["c:\\a", "nan:b", "-1:c"]).unwrap().1, None);
        assert!(parsed(&["0.8:a", "b"]).unwrap_err().to_string().contains("b has no weight"));
    }
}
