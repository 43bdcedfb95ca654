//! Argument checks of the router and load-balancing kernels, shared by all devices.

use super::{ExpertSelection, GroupLimit, MAX_EXPERTS, MAX_TOPK, RouterParams};
use crate::checks::dtypes;
use crate::{AuxLoss, AuxLossWeights};
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// T tokens, E experts, top-k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) tokens: usize,
    pub(crate) experts: usize,
    pub(crate) k: usize,
}

/// Checks that a tensor is contiguous and has this type and shape.
pub(crate) fn exactly(op: &'static str, name: &str, t: &Tensor, dtype: DType, shape: &[usize]) -> Result<()> {
    dtypes(op, dtype, &[t])?;
    if t.shape() != shape || !t.is_contiguous() {
        return shape_error(op, format!("{name} {t:?} must be {shape:?}, contiguous"));
    }
    Ok(())
}

/// Checks that it is f32 or bf16.
fn float(op: &'static str, t: &Tensor) -> Result<()> {
    match t.dtype() {
        DType::F32 | DType::BF16 => Ok(()),
        found => Err(Error::DType { op, found, wanted: DType::F32 }),
    }
}

fn experts(op: &'static str, experts: usize) -> Result<()> {
    if experts == 0 || experts > MAX_EXPERTS {
        return shape_error(op, format!("{experts} experts; the number must be in 1..={MAX_EXPERTS}"));
    }
    Ok(())
}

fn selections(op: &'static str, sizes: Sizes) -> Result<Sizes> {
    let (k, most) = (sizes.k, sizes.experts.min(MAX_TOPK));
    if k == 0 || k > most {
        return shape_error(op, format!("top-{k} of {} experts; k must be in 1..={most}", sizes.experts));
    }
    Ok(sizes)
}

/// Checks logits; returns tokens and experts.
pub(crate) fn logits(op: &'static str, t: &Tensor) -> Result<[usize; 2]> {
    float(op, t)?;
    let &[tokens, e] = t.shape() else {
        return shape_error(op, format!("{:?} are not [tokens, experts]", t.shape()));
    };
    if !t.is_contiguous() {
        return shape_error(op, format!("{t:?} must be contiguous"));
    }
    experts(op, e)?;
    Ok([tokens, e])
}

/// Checks a selection index i32 `[T, k]`; returns T and k.
pub(crate) fn index(op: &'static str, t: &Tensor) -> Result<[usize; 2]> {
    dtypes(op, DType::I32, &[t])?;
    match *t.shape() {
        [tokens, k] if t.is_contiguous() => Ok([tokens, k]),
        _ => shape_error(op, format!("{t:?} must be contiguous [tokens, top-k]")),
    }
}

/// Checks logits and their selection index.
fn chosen(op: &'static str, of: &Tensor, selection: &Tensor) -> Result<Sizes> {
    let ([tokens, experts], [rows, k]) = (logits(op, of)?, index(op, selection)?);
    if rows != tokens {
        return shape_error(op, format!("logits of {tokens} tokens, but selections of {rows}"));
    }
    selections(op, Sizes { tokens, experts, k })
}

pub(crate) fn top_k(
    op: &'static str,
    scores: &Tensor,
    minus: Option<&Tensor>,
    index: &Tensor,
) -> Result<Sizes> {
    let sizes = chosen(op, scores, index)?;
    dtypes(op, DType::F32, &[scores])?;
    minus.map_or(Ok(()), |m| exactly(op, "minus", m, DType::F32, &[sizes.experts]))?;
    Ok(sizes)
}

/// Checks that the groups divide the experts and hold the top-k.
fn groups(op: &'static str, groups: Option<GroupLimit>, sizes: Sizes) -> Result<()> {
    let Some(GroupLimit { count, keep, best }) = groups else { return Ok(()) };
    let (e, k) = (sizes.experts, sizes.k);
    let divides = count > 0 && (1..=count).contains(&keep) && e.is_multiple_of(count);
    if !divides || !(1..=e / count).contains(&best) || k > keep * (e / count) {
        return shape_error(
            op,
            format!(
                "top-{k} of {e} experts from {keep} of {count} groups, ranked by their best {best}: the groups must divide \
                 the experts, a group must hold {best} of them, and the groups kept at least {k}"
            ),
        );
    }
    Ok(())
}

pub(crate) fn route(
    op: &'static str,
    how: RouterParams,
    selection: ExpertSelection,
    logits: &Tensor,
    index: &Tensor,
    probs: &Tensor,
) -> Result<Sizes> {
    let sizes = chosen(op, logits, index)?;
    exactly(op, "probabilities", probs, DType::F32, index.shape())?;
    if let ExpertSelection::TopK { bias } = selection {
        groups(op, how.groups, sizes)?;
        bias.map_or(Ok(()), |b| exactly(op, "the bias", b, DType::F32, &[sizes.experts]))?;
    }
    Ok(sizes)
}

pub(crate) fn route_backward(
    op: &'static str,
    logits: &Tensor,
    index: &Tensor,
    dprobs: &Tensor,
    dlogits: &Tensor,
) -> Result<Sizes> {
    let sizes = chosen(op, logits, index)?;
    exactly(op, "gradients of probabilities", dprobs, DType::F32, index.shape())?;
    exactly(op, "gradients of logits", dlogits, logits.dtype(), logits.shape())?;
    Ok(sizes)
}

/// Checks an auxiliary loss and its statistics `of [S, E]`; returns its sizes and the number of segments.
pub(crate) fn balance(op: &'static str, b: &AuxLoss, of: &Tensor) -> Result<(Sizes, usize)> {
    let [tokens, experts] = logits(op, b.logits)?;
    exactly(op, "segments", b.segments, DType::I32, &[tokens])?;
    let segments = of.shape().first().copied().unwrap_or(0);
    exactly(op, "statistics", of, DType::F32, &[segments, experts])?;
    Ok((selections(op, Sizes { tokens, experts, k: b.k })?, segments))
}

/// Checks statistics f32 and i64 `[S, E]`; returns S and E.
pub(crate) fn statistics(op: &'static str, sums: &Tensor, counts: &Tensor) -> Result<[usize; 2]> {
    let &[segments, e] = sums.shape() else {
        return shape_error(op, format!("{:?} are not [segments, experts]", sums.shape()));
    };
    experts(op, e)?;
    exactly(op, "sums", sums, DType::F32, &[segments, e])?;
    exactly(op, "counts", counts, DType::I64, &[segments, e])?;
    Ok([segments, e])
}

pub(crate) fn aux_loss_weights(op: &'static str, a: &AuxLossWeights) -> Result<[usize; 2]> {
    let &AuxLossWeights { k, sums, counts, steps, weights, loss, .. } = a;
    let [segments, experts] = statistics(op, sums, counts)?;
    selections(op, Sizes { tokens: 0, experts, k })?;
    exactly(op, "weights", weights, DType::F32, sums.shape())?;
    exactly(op, "the loss", loss, DType::F32, &[1])?;
    steps.map_or(Ok(()), |t| exactly(op, "steps", t, DType::F32, &[1]))?;
    Ok([segments, experts])
}

/// Checks a z-loss: logits, segments, its two sums, and the gradient where there is one.
pub(crate) fn z_loss(
    op: &'static str,
    of: &Tensor,
    segments: &Tensor,
    sums: &Tensor,
    dlogits: Option<&Tensor>,
) -> Result<[usize; 2]> {
    let [tokens, experts] = logits(op, of)?;
    exactly(op, "segments", segments, DType::I32, &[tokens])?;
    exactly(op, "sums", sums, DType::F64, &[2])?;
    dlogits.map_or(Ok(()), |d| exactly(op, "gradients of logits", d, of.dtype(), of.shape()))?;
    Ok([tokens, experts])
}

pub(crate) fn count_tokens(
    op: &'static str,
    selection: &Tensor,
    segments: &Tensor,
    counts: &Tensor,
) -> Result<Sizes> {
    let [tokens, k] = index(op, selection)?;
    let e = counts.shape().first().copied().unwrap_or(0);
    experts(op, e)?;
    exactly(op, "segments", segments, DType::I32, &[tokens])?;
    exactly(op, "counts", counts, DType::I64, &[e])?;
    Ok(Sizes { tokens, experts: e, k })
}

pub(crate) fn drop_over_capacity(
    op: &'static str,
    e: usize,
    selection: &Tensor,
    probs: &Tensor,
    dropped: &Tensor,
) -> Result<Sizes> {
    let [tokens, k] = index(op, selection)?;
    experts(op, e)?;
    exactly(op, "probabilities", probs, DType::F32, selection.shape())?;
    exactly(op, "dropped", dropped, DType::I64, &[1])?;
    Ok(Sizes { tokens, experts: e, k })
}

/// Checks counts i64 and bias f32 `[E]`; returns E.
pub(crate) fn update_expert_bias(op: &'static str, counts: &Tensor, bias: &Tensor) -> Result<usize> {
    let e = bias.shape().first().copied().unwrap_or(0);
    experts(op, e)?;
    exactly(op, "the bias", bias, DType::F32, &[e])?;
    exactly(op, "counts", counts, DType::I64, &[e])?;
    Ok(e)
}

pub(crate) fn sinkhorn(op: &'static str, of: &Tensor, out: &Tensor) -> Result<[usize; 2]> {
    let [tokens, experts] = logits(op, of)?;
    exactly(op, "the result", out, DType::F32, &[tokens, experts])?;
    Ok([tokens, experts])
}

/// Checks quantile balancing; returns the sizes and the rank of the quantile in a column, counted from the largest.
pub(crate) fn quantiles(
    op: &'static str,
    k: usize,
    of: &Tensor,
    beta: &Tensor,
    estimate: &Tensor,
) -> Result<(Sizes, usize)> {
    let [tokens, experts] = logits(op, of)?;
    exactly(op, "beta", beta, DType::F32, &[experts])?;
    exactly(op, "the estimate", estimate, DType::F32, &[experts])?;
    let sizes = selections(op, Sizes { tokens, experts, k })?;
    if k == experts || !(tokens * k).is_multiple_of(experts) {
        return shape_error(
            op,
            format!("top-{k} selections of {tokens} tokens cannot be shared equally by {experts} experts"),
        );
    }
    Ok((sizes, tokens * k / experts))
}

/// Checks a router GEMM; returns tokens, experts and hidden size.
pub(crate) fn gate(op: &'static str, x: &Tensor, w: &Tensor, logits: &Tensor) -> Result<[usize; 3]> {
    float(op, x)?;
    let (&[tokens, h], &[e, _]) = (x.shape(), w.shape()) else {
        return shape_error(op, format!("{:?} and {:?} are not matrices", x.shape(), w.shape()));
    };
    experts(op, e)?;
    exactly(op, "tokens", x, x.dtype(), &[tokens, h])?;
    exactly(op, "the weight", w, x.dtype(), &[e, h])?;
    exactly(op, "logits", logits, DType::F32, &[tokens, e])?;
    Ok([tokens, e, h])
}

/// [`gate`] and its gradients.
pub(crate) fn gate_backward(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    dlogits: &Tensor,
    dx: &Tensor,
    dw: &Tensor,
) -> Result<[usize; 3]> {
    let sizes = gate(op, x, w, dlogits)?;
    exactly(op, "gradients of tokens", dx, x.dtype(), x.shape())?;
    exactly(op, "the weight's gradient", dw, DType::F32, w.shape())?;
    Ok(sizes)
}

/// Checks random logits; returns tokens and experts.
pub(crate) fn normal(op: &'static str, rows: &Tensor, out: &Tensor) -> Result<[usize; 2]> {
    let [tokens, e] = logits(op, out)?;
    dtypes(op, DType::F32, &[out])?;
    exactly(op, "row numbers", rows, DType::I32, &[tokens])?;
    Ok([tokens, e])
}

/// Checks that each tensor is contiguous and holds so many elements of a type.
pub(crate) fn elements(op: &'static str, wanted: &[(&Tensor, DType, usize)]) -> Result<()> {
    for (t, dtype, n) in wanted {
        if t.dtype() != *dtype {
            return Err(Error::DType { op, found: t.dtype(), wanted: *dtype });
        }
        if t.numel() != *n || !t.is_contiguous() {
            return shape_error(op, format!("{t:?} must be contiguous and hold {n} elements"));
        }
    }
    Ok(())
}

/// Rows and columns of a contiguous matrix.
pub(crate) fn matrix(op: &'static str, t: &Tensor) -> Result<[usize; 2]> {
    match t.shape() {
        [rows, columns] if t.is_contiguous() => Ok([*rows, *columns]),
        other => shape_error(op, format!("{other:?} must be a contiguous matrix")),
    }
}
