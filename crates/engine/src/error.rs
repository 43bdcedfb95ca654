//! Errors that more than one module reports.

use ferrotron_tensor::{Result, shape_error};

/// A saved activation that backward needs was dropped and not restored.
pub fn missing_activation<T>(layer: &'static str, tensor: &str) -> Result<T> {
    let hint = "recomputation did not restore it; this is a bug, please report it with the recipe";
    shape_error(layer, format!("backward needs the saved {tensor}: {hint}"))
}
