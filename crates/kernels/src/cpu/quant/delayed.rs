//! Delayed scaling: scales from the amax history.

use crate::DelayedScaling;
use crate::cpu::rows::check_len;
use ferrotron_tensor::{Result, shape_error};

/// See [`crate::DelayedUpdate`]. Without `reduced`, row 0 of the history is used.
///
/// A tensor without an amax in this step, such as a weight that was not cast again, keeps its scale and history.
pub fn delayed_update(
    how: DelayedScaling,
    history: &mut [f32],
    reduced: Option<&[f32]>,
    largest: &[f32],
    scale: &mut [f32],
) -> Result<()> {
    const OP: &str = "delayed_update";
    let n = scale.len();
    check_len(OP, "largest", largest.len(), n)?;
    if let Some(reduced) = reduced {
        check_len(OP, "reduced", reduced.len(), n)?;
    }
    if n == 0 {
        return Ok(());
    }
    if history.is_empty() || !history.len().is_multiple_of(n) {
        return shape_error(OP, format!("an amax history of {} values for {n} scales", history.len()));
    }
    let newest = history.len() - n;
    for i in 0..n {
        let last = reduced.map(|r| r[i]).filter(|r| *r != 0.0).unwrap_or(history[i]);
        if last == 0.0 {
            continue;
        }
        // `max` ignores NaN. The oldest entry still counts before it leaves the history.
        let mut most = last;
        for at in (i..newest).step_by(n) {
            history[at] = history[at + n];
            most = most.max(history[at]);
        }
        history[newest + i] = last;
        history[i] = 0.0;
        let amax = if how.most_recent { last } else { most };
        if amax.is_finite() && amax > 0.0 {
            // The margin is an integer, so its power of two is exact.
            let new = largest[i] * 2f32.powi(-how.margin) / amax;
            scale[i] = if new.is_infinite() { f32::MAX } else { new };
        }
    }
    Ok(())
}
