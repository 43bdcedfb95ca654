//! MoE permutation: token rows sorted by expert, and the inverse.
//!
//! A [`RowMap`] sorts the selections `index` i32 `[T, k]` by expert, and by token within an expert. Each expert's rows start at a
//! multiple of an alignment; rows between experts and behind the last are padding.
//!
//! Tokens per expert stay on the device, so no kernel waits for the host. An index out of range counts as −1.

use crate::ALIGN;
use crate::checks::{contiguous, dtypes};
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};

/// Destination row of each selection, and its inverse, written by [`PermutationKernels::sort_by_expert`].
#[derive(Clone, Debug)]
pub struct RowMap {
    /// i32 `[E + 1]`: first row of each expert; the last entry is the end of all. Expert e has `counts[e]` rows from `offsets[e]`.
    pub offsets: Tensor,
    /// i32 `[E]`: rows of each expert, without padding.
    pub counts: Tensor,
    /// i32 `[T, k]`: row of each selection, −1 where there is none.
    pub rows: Tensor,
    /// i32 `[N]`: selection (token·k + slot) of each row, −1 for padding. N must hold the largest possible number of rows,
    /// T·k + E·(align − 1).
    pub source: Tensor,
}

/// Permutation kernels. Rows are contiguous, f32 or bf16; kernels that only move data also take E4M3 and E5M2.
pub trait PermutationKernels {
    /// Fills `map` for the experts `first..first + E`; selections of other experts are dropped.
    fn sort_by_expert(
        &self,
        s: &Stream,
        index: &Tensor,
        first: usize,
        align: usize,
        map: &RowMap,
    ) -> Result<()>;

    /// `out[r] = x[source[r] / k]`, zeros where `source[r]` is −1. `x [T, h]`, `source` i32 `[N]`, `out [N, h]`. Its gradient is
    /// [`PermutationKernels::moe_unpermute`] without weights.
    fn gather_rows(&self, s: &Stream, x: &Tensor, source: &Tensor, k: usize, out: &Tensor) -> Result<()>;

    /// Copies each token to the rows of its experts: [`PermutationKernels::gather_rows`] by a map's `source`. A kernel that
    /// iterates over tokens reads each of them once.
    fn moe_permute(&self, s: &Stream, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<()> {
        let k = permute_sizes("moe_permute", x, map, out)?.k;
        self.gather_rows(s, x, &map.source, k, out)
    }

    /// [`PermutationKernels::moe_permute`] of FP8 rows, transposed: `out[c, r] = x[source[r] / k, c]`. `x [T, h]`,
    /// `out [c, N rounded up to a multiple of 16]` with c ≤ h; zeros where `source[r]` is −1 and beyond N.
    fn moe_permute_transposed(&self, s: &Stream, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<()>;

    /// Gradient of `x` in [`PermutationKernels::moe_unpermute`]: `out[r] = weights[source[r]]·x[source[r] / k]`, zeros where
    /// `source[r]` is −1. `x [T, h]` of the type of `out` or f32, `weights` f32 `[T, k]`, `source` i32 `[N]`, `out [N, h]`.
    fn moe_unpermute_backward(
        &self,
        s: &Stream,
        x: &Tensor,
        source: &Tensor,
        weights: &Tensor,
        out: &Tensor,
    ) -> Result<()>;

    /// Combines the rows of each token: `out[t] = Σ_j x[rows[t, j]]·weights[t, j]`, summed in f32 in the order of j; a row of −1
    /// adds nothing, and without `weights` they are 1. `x [N, h]`, `rows` i32 `[T, k]`, `weights` f32 `[T, k]`, `out [T, h]` of the
    /// type of `x` or f32.
    fn moe_unpermute(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        weights: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()>;

    /// Gradient of `weights` in [`PermutationKernels::moe_unpermute`]: `out[t, j] = <x[rows[t, j]], dy[t]>` f32, 0 where the row
    /// is −1. `dy [T, h]` of the type of `x` or f32.
    fn moe_unpermute_dprobs(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        dy: &Tensor,
        out: &Tensor,
    ) -> Result<()>;

    /// `out[i] = x[source[i]]`, 0 where `source[i]` is −1; f32 or i32, any shapes.
    fn gather_values(&self, s: &Stream, x: &Tensor, source: &Tensor, out: &Tensor) -> Result<()>;

    /// Row map that reorders chunks of rows: chunks of `sizes` i32 `[n]` (on the device) are put in the order `order` i32 `[n]`.
    /// `source` i32 `[N]` is the row that moves to r and `back` its inverse; rows behind all chunks stay.
    fn chunk_map(
        &self,
        s: &Stream,
        sizes: &Tensor,
        order: &Tensor,
        source: &Tensor,
        back: &Tensor,
    ) -> Result<()>;

    /// Pads a dense routing map u8 `[T, E]` so that each expert's token count is a multiple of `align`, as Megatron does: the
    /// first tokens not routed to an expert are marked, in the order of rows, or all of them where there are too few.
    fn pad_routing_map(&self, s: &Stream, align: usize, map: &Tensor) -> Result<()>;
}

/// Sizes of a permutation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// T
    pub(crate) tokens: usize,
    /// Top-k of a token.
    pub(crate) k: usize,
    /// N
    pub(crate) rows: usize,
    /// Elements per row.
    pub(crate) width: usize,
}

/// Checks that a count fits i32.
fn counted(op: &'static str, n: usize) -> Result<usize> {
    if i32::try_from(n).is_ok() {
        Ok(n)
    } else {
        shape_error(op, format!("{n} rows exceed the range of i32"))
    }
}

/// Checks a sort and that `map` holds the largest possible number of rows; returns selections and experts.
pub(crate) fn sort_sizes(op: &'static str, index: &Tensor, align: usize, map: &RowMap) -> Result<[usize; 2]> {
    let RowMap { offsets, counts, rows, source } = map;
    contiguous(op, &[index, offsets, counts, rows, source])?;
    dtypes(op, DType::I32, &[index, offsets, counts, rows, source])?;
    let (selections, experts) = (counted(op, index.numel())?, counts.numel());
    if index.rank() != 2 || rows.shape() != index.shape() || offsets.shape() != [experts + 1] {
        return shape_error(
            op,
            format!(
                "index {:?} and rows {:?} must be [T, k], offsets {:?} and counts {:?} [E + 1] and [E]",
                index.shape(),
                rows.shape(),
                offsets.shape(),
                counts.shape()
            ),
        );
    }
    if align == 0 {
        return shape_error(op, "the alignment must be at least 1");
    }
    let most = counted(op, selections.saturating_add(experts.min(selections).saturating_mul(align - 1)))?;
    let needed = most / align * align;
    if counted(op, source.numel())? < needed {
        return shape_error(
            op,
            format!("source holds {} rows, but up to {needed} are possible", source.numel()),
        );
    }
    Ok([selections, experts])
}

/// Checks contiguous rows `[n, h]`; returns n and h.
fn rows_of(op: &'static str, name: &str, t: &Tensor) -> Result<[usize; 2]> {
    match t.shape() {
        [n, h] if t.is_contiguous() => Ok([*n, *h]),
        _ => shape_error(op, format!("{name} {t:?} must be contiguous rows [n, h]")),
    }
}

/// Checks `x [T, h]`, `source [N]` and `out [N, h]` for top-k selections.
pub(crate) fn gather_sizes(
    op: &'static str,
    x: &Tensor,
    source: &Tensor,
    k: usize,
    out: &Tensor,
) -> Result<Sizes> {
    let ([tokens, width], [rows, w]) = (rows_of(op, "x", x)?, rows_of(op, "out", out)?);
    contiguous(op, &[source])?;
    dtypes(op, DType::I32, &[source])?;
    if width != w || source.numel() != counted(op, rows)? || k == 0 {
        return shape_error(
            op,
            format!(
                "top-{k} selections of {:?} do not fit {:?} with a source of {:?}",
                x.shape(),
                out.shape(),
                source.shape()
            ),
        );
    }
    counted(op, tokens.saturating_mul(k))?;
    Ok(Sizes { tokens, k, rows, width })
}

/// [`gather_sizes`] of a map, whose rows must be `[T, k]`.
pub(crate) fn permute_sizes(op: &'static str, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<Sizes> {
    let [tokens, k] = rows_of(op, "rows", &map.rows)?;
    dtypes(op, DType::I32, &[&map.rows])?;
    dtypes(op, x.dtype(), &[out])?;
    let sizes = gather_sizes(op, x, &map.source, k, out)?;
    if sizes.tokens != tokens {
        return shape_error(op, format!("a map of {tokens} tokens for {:?}", x.shape()));
    }
    Ok(sizes)
}

/// Checks a transposed permutation of `x [T, h]` into `out [c, N rounded up to a multiple of 16]`.
pub(crate) fn permute_transposed_sizes(
    op: &'static str,
    x: &Tensor,
    map: &RowMap,
    out: &Tensor,
) -> Result<Sizes> {
    let ([tokens, width], [t, k]) = (rows_of(op, "x", x)?, rows_of(op, "rows", &map.rows)?);
    let ([c, pitch], rows) = (rows_of(op, "out", out)?, counted(op, map.source.numel())?);
    contiguous(op, &[&map.source])?;
    dtypes(op, DType::I32, &[&map.rows, &map.source])?;
    if !matches!(x.dtype(), DType::E4M3 | DType::E5M2) {
        return Err(Error::DType { op, found: x.dtype(), wanted: DType::E4M3 });
    }
    dtypes(op, x.dtype(), &[out])?;
    if c > width || pitch != rows.next_multiple_of(ALIGN) || tokens != t || k == 0 {
        let what = format!(
            "a map of {t} tokens to {rows} rows does not transpose {:?} into {:?}",
            x.shape(),
            out.shape()
        );
        return shape_error(op, what);
    }
    counted(op, tokens.saturating_mul(k))?;
    Ok(Sizes { tokens, k, rows, width })
}

/// Checks `x [T, h]`, `source [N]`, `weights [T, k]` and `out [N, h]`.
pub(crate) fn weighted_sizes(
    op: &'static str,
    x: &Tensor,
    source: &Tensor,
    weights: &Tensor,
    out: &Tensor,
) -> Result<Sizes> {
    let [tokens, k] = rows_of(op, "weights", weights)?;
    dtypes(op, DType::F32, &[weights])?;
    same_or_f32(op, out, x)?;
    let sizes = gather_sizes(op, x, source, k, out)?;
    if sizes.tokens != tokens {
        return shape_error(op, format!("weights of {tokens} tokens for {:?}", x.shape()));
    }
    Ok(sizes)
}

/// Checks `x [N, h]`, `rows [T, k]` and one row per token, `y [T, h]`.
pub(crate) fn unpermute_sizes(op: &'static str, x: &Tensor, rows: &Tensor, y: &Tensor) -> Result<Sizes> {
    let ([n, width], [tokens, k]) = (rows_of(op, "x", x)?, rows_of(op, "rows", rows)?);
    dtypes(op, DType::I32, &[rows])?;
    same_or_f32(op, x, y)?;
    if rows_of(op, "the tokens", y)? != [tokens, width] {
        return shape_error(
            op,
            format!(
                "x {:?}, rows {:?}, tokens {:?} have inconsistent shapes",
                x.shape(),
                rows.shape(),
                y.shape()
            ),
        );
    }
    counted(op, tokens.saturating_mul(k))?;
    Ok(Sizes { tokens, k, rows: counted(op, n)?, width })
}

/// Checks one f32 value per selection.
pub(crate) fn check_selections(op: &'static str, sizes: Sizes, t: &Tensor) -> Result<()> {
    dtypes(op, DType::F32, &[t])?;
    if t.shape() == [sizes.tokens, sizes.k] && t.is_contiguous() {
        return Ok(());
    }
    shape_error(op, format!("{t:?} must be contiguous [{}, {}]", sizes.tokens, sizes.k))
}

/// Checks that `t` has the type of `like`, or f32.
fn same_or_f32(op: &'static str, like: &Tensor, t: &Tensor) -> Result<()> {
    if t.dtype() == DType::F32 { Ok(()) } else { dtypes(op, like.dtype(), &[t]) }
}

/// Checks a gather of f32 or i32 values with one index per element of `out`.
pub(crate) fn check_values(op: &'static str, x: &Tensor, source: &Tensor, out: &Tensor) -> Result<()> {
    contiguous(op, &[x])?;
    crate::checks::same_contiguous(op, &[source, out])?;
    dtypes(op, DType::I32, &[source])?;
    let wanted = if x.dtype() == DType::I32 { DType::I32 } else { DType::F32 };
    dtypes(op, wanted, &[x, out])?;
    counted(op, x.numel()).map(|_| ())
}

/// Checks a chunk map; returns chunks and rows.
pub(crate) fn chunk_sizes(
    op: &'static str,
    [sizes, order]: [&Tensor; 2],
    [source, back]: [&Tensor; 2],
) -> Result<[usize; 2]> {
    crate::checks::same_contiguous(op, &[sizes, order])?;
    crate::checks::same_contiguous(op, &[source, back])?;
    dtypes(op, DType::I32, &[sizes, order, source, back])?;
    Ok([sizes.numel(), counted(op, source.numel())?])
}

/// Checks a dense routing map; returns tokens and experts.
pub(crate) fn pad_sizes(op: &'static str, align: usize, map: &Tensor) -> Result<[usize; 2]> {
    dtypes(op, DType::U8, &[map])?;
    if align == 0 {
        return shape_error(op, "the alignment must be at least 1");
    }
    let [tokens, experts] = rows_of(op, "the map", map)?;
    counted(op, tokens)?;
    Ok([tokens, experts])
}
