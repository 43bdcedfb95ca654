//! Argument checks of attention.

use super::view::HeadsLayout;
use super::{AttentionShape, Heads, HeadsMut, Span};
use ferrotron_tensor::{Result, shape_error};

const OP: &str = "attention";

/// Checks the shape.
pub(crate) fn shape(shape: &AttentionShape) -> Result<()> {
    let AttentionShape { heads, kv_heads, d_qk, d_v, .. } = *shape;
    if heads == 0 || kv_heads == 0 || heads % kv_heads != 0 {
        return shape_error(OP, format!("{heads} query heads cannot share {kv_heads} key heads evenly"));
    }
    if d_qk == 0 || d_v == 0 {
        return shape_error(OP, format!("head sizes {d_qk} (q, k) and {d_v} (v) must be at least 1"));
    }
    if shape.softcap.is_some_and(|c| !(c.is_finite() && c > 0.0)) {
        return shape_error(
            OP,
            format!("softcap {:?} must be positive; leave it out for none", shape.softcap),
        );
    }
    Ok(())
}

/// Checks one value per head.
pub(crate) fn per_head(shape: &AttentionShape, what: &str, len: Option<usize>) -> Result<()> {
    match len {
        Some(len) if len != shape.heads => {
            shape_error(OP, format!("{what} has {len} values, but there are {} heads", shape.heads))
        }
        _ => Ok(()),
    }
}

/// Whether a tensor is indexed by queries or keys.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// q, out and their gradients.
    Query,
    /// k, v and their gradients.
    Key,
}

impl Side {
    fn tokens(self, span: &Span) -> (usize, usize) {
        match self {
            Side::Query => (span.q_start, span.q_len),
            Side::Key => (span.k_start, span.k_len),
        }
    }
}

/// Checks that every element of `name` that the spans address exists.
fn fits(
    name: &str,
    side: Side,
    spans: &[Span],
    layout: HeadsLayout,
    heads: usize,
    channels: usize,
) -> Result<()> {
    let HeadsLayout { len, batch, token, head } = layout;
    for span in spans {
        let (start, tokens) = side.tokens(span);
        if tokens == 0 {
            continue;
        }
        let last_token = start.saturating_add(tokens - 1);
        let end = (span.batch.saturating_mul(batch))
            .saturating_add(last_token.saturating_mul(token))
            .saturating_add((heads - 1).saturating_mul(head))
            .saturating_add(channels);
        if end > len {
            let b = span.batch;
            return shape_error(
                OP,
                format!("{name} has {len} elements, but batch entry {b}, token {last_token} ends at {end}"),
            );
        }
        if tokens > i32::MAX as usize {
            return shape_error(OP, format!("a sequence of {tokens} tokens is too long; split it"));
        }
    }
    Ok(())
}

/// Checks a tensor that is read.
pub(super) fn reads<T>(
    name: &str,
    side: Side,
    spans: &[Span],
    x: &Heads<'_, T>,
    heads: usize,
    channels: usize,
) -> Result<()> {
    fits(name, side, spans, x.layout(), heads, channels)
}

/// Checks a tensor that is written: its spans must not overlap, either.
pub(super) fn writes<T>(
    name: &str,
    side: Side,
    spans: &[Span],
    x: &HeadsMut<'_, T>,
    heads: usize,
    channels: usize,
) -> Result<()> {
    fits(name, side, spans, x.layout(), heads, channels)?;
    let mut ranges: Vec<_> = spans.iter().map(|s| (s.batch, side.tokens(s))).filter(|r| r.1.1 > 0).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((batch, (start, len)), (next_batch, (next, _))) = (pair[0], pair[1]);
        if batch == next_batch && start + len > next {
            return shape_error(
                OP,
                format!("two sequences of batch entry {batch} both write {name} at token {next}"),
            );
        }
    }
    Ok(())
}

/// Checks the log-sum-exp buffer.
pub(super) fn lse(shape: &AttentionShape, spans: &[Span], len: usize) -> Result<()> {
    for span in spans.iter().filter(|s| s.q_len > 0) {
        let last = span
            .lse_base
            .saturating_add((shape.heads - 1).saturating_mul(shape.lse_head))
            .saturating_add((span.q_len - 1).saturating_mul(shape.lse_token));
        if last >= len {
            return shape_error(
                OP,
                format!("the log-sum-exp buffer has {len} elements, but {last} is needed"),
            );
        }
    }
    Ok(())
}
