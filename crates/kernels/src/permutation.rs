//! Rows of tokens sorted by expert, and back.
//!
//! A plan sorts the choices `index` i32 `[T, k]` by expert, by row within an expert. Each expert's rows start at a multiple of
//! an alignment; rows between, and behind the last expert's, are nobody's.
//!
//! Sizes of experts stay on the device: no kernel waits for the host. An index that points outside what it is for counts as -1.

use crate::ALIGN;
use crate::checks::{contiguous, dtypes};
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};

/// Where choices go. All memory is the caller's and written by [`PermutationKernels::sort_by_expert`].
#[derive(Clone, Debug)]
pub struct RowMap {
    /// i32 `[E + 1]`: first row of each expert; the last is the end of all. Expert e has `counts[e]` rows from `offsets[e]`.
    pub offsets: Tensor,
    /// i32 `[E]`: rows of each expert, without those between experts.
    pub counts: Tensor,
    /// i32 `[T, k]`: row of each choice, -1 where there is none.
    pub rows: Tensor,
    /// i32 `[N]`: choice (token·k + slot) of each row, -1 for nobody's. N ≥ all that can come: T·k + E·(align - 1).
    pub source: Tensor,
}

/// Kernels that move rows. Values f32, bf16 (or bytes, E4M3 and E5M2, for the pure moves), contiguous rows.
pub trait PermutationKernels {
    /// Fills `map` for `index` whose experts are `first..first + E` (others count as no choice).
    fn sort_by_expert(
        &self,
        s: &Stream,
        index: &Tensor,
        first: usize,
        align: usize,
        map: &RowMap,
    ) -> Result<()>;

    /// `out[r] = x[source[r] / k]`, zeros where `source[r]` is -1. `x [T, h]`, `source` i32 `[N]`, `out [N, h]`. Its gradient
    /// is [`PermutationKernels::moe_unpermute`] without weights.
    fn gather_rows(&self, s: &Stream, x: &Tensor, source: &Tensor, k: usize, out: &Tensor) -> Result<()>;

    /// [`PermutationKernels::gather_rows`] with a map's `source`. Who looks at the map from its tokens reads each of them once.
    fn moe_permute(&self, s: &Stream, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<()> {
        let k = spread_sizes("moe_permute", x, map, out)?.k;
        self.gather_rows(s, x, &map.source, k, out)
    }

    /// [`PermutationKernels::moe_permute`] the other way round: `out[c, r] = x[source[r] / k, c]`, of bytes (E4M3 or E5M2). `x [T, h]`,
    /// `out [c, N up to a multiple of 16]` for c ≤ h; zeros where `source[r]` is -1, and behind N.
    fn moe_permute_transposed(&self, s: &Stream, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<()>;

    /// `out[r] = weights[source[r]]·x[source[r] / k]`, zeros where `source[r]` is -1: the gradient of `x` in
    /// [`PermutationKernels::moe_unpermute`]. `x [T, h]` of out's type or f32, `weights` f32 `[T, k]`, `source` i32 `[N]`, `out [N, h]`.
    fn moe_unpermute_backward(
        &self,
        s: &Stream,
        x: &Tensor,
        source: &Tensor,
        weights: &Tensor,
        out: &Tensor,
    ) -> Result<()>;

    /// `out[t] = Σ_j x[rows[t, j]]·(weights[t, j])`, sums in f32 in the order of j; -1 adds nothing. `x [N, h]`,
    /// `rows` i32 `[T, k]`, `weights` f32 `[T, k]`, `out [T, h]` of x's type or f32.
    fn moe_unpermute(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        weights: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()>;

    /// `out[t, j] = <x[rows[t, j]], dy[t]>` f32, 0 where the row is -1: the gradient of `weights` in
    /// [`PermutationKernels::moe_unpermute`]. `dy [T, h]` of x's type or f32.
    fn moe_unpermute_dprobs(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        dy: &Tensor,
        out: &Tensor,
    ) -> Result<()>;

    /// `out[i] = x[source[i]]`, 0 where -1; f32 or i32, any shapes.
    fn gather_values(&self, s: &Stream, x: &Tensor, source: &Tensor, out: &Tensor) -> Result<()>;

    /// Rows in chunks of `sizes` i32 `[n]` (on the device), put in the order `order` i32 `[n]`: `source[r]` i32 `[N]` = the row
    /// that comes to r, and `back` its inverse. Rows behind all chunks stay.
    fn chunk_map(
        &self,
        s: &Stream,
        sizes: &Tensor,
        order: &Tensor,
        source: &Tensor,
        back: &Tensor,
    ) -> Result<()>;

    /// Of the first choices that are none (probability 0), as many become `expert`'s as make each expert's count a multiple of
    /// `align`, in the order of rows: as upstream's routing-map padding, on a dense map u8 `[T, E]`. An expert with fewer such
    /// choices gets all of them.
    fn pad_routing_map(&self, s: &Stream, align: usize, map: &Tensor) -> Result<()>;
}

/// Sizes of a map between tokens and rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// T
    pub(crate) tokens: usize,
    /// Choices of a token.
    pub(crate) k: usize,
    /// N
    pub(crate) rows: usize,
    /// Elements of a row.
    pub(crate) width: usize,
}

/// Rows and choices are counted in i32.
fn counted(op: &'static str, n: usize) -> Result<usize> {
    if i32::try_from(n).is_ok() {
        Ok(n)
    } else {
        shape_error(op, format!("{n} rows are more than i32 counts"))
    }
}

/// Choices and experts of a sort; the rows of `map` must hold whatever comes.
pub(crate) fn sort_sizes(op: &'static str, index: &Tensor, align: usize, map: &RowMap) -> Result<[usize; 2]> {
    let RowMap { offsets, counts, rows, source } = map;
    contiguous(op, &[index, offsets, counts, rows, source])?;
    dtypes(op, DType::I32, &[index, offsets, counts, rows, source])?;
    let (choices, experts) = (counted(op, index.numel())?, counts.numel());
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
        return shape_error(op, "rows cannot be aligned to 0; 1 leaves no gaps");
    }
    let most = counted(op, choices.saturating_add(experts.min(choices).saturating_mul(align - 1)))?;
    let needed = most / align * align;
    if counted(op, source.numel())? < needed {
        return shape_error(op, format!("source holds {} rows, but up to {needed} can come", source.numel()));
    }
    Ok([choices, experts])
}

/// Rows `[n, h]`, contiguous.
fn rows_of(op: &'static str, name: &str, t: &Tensor) -> Result<[usize; 2]> {
    match t.shape() {
        [n, h] if t.is_contiguous() => Ok([*n, *h]),
        _ => shape_error(op, format!("{name} {t:?} must be contiguous rows [n, h]")),
    }
}

/// Of `x [T, h]`, `source [N]`, `out [N, h]`, for `k` choices of a token.
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
                "{k} choices each of {:?} do not make {:?} by a source of {:?}",
                x.shape(),
                out.shape(),
                source.shape()
            ),
        );
    }
    counted(op, tokens.saturating_mul(k))?;
    Ok(Sizes { tokens, k, rows, width })
}

/// As [`gather_sizes`], of a map whose rows and source belong together.
pub(crate) fn spread_sizes(op: &'static str, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<Sizes> {
    let [tokens, k] = rows_of(op, "rows", &map.rows)?;
    dtypes(op, DType::I32, &[&map.rows])?;
    dtypes(op, x.dtype(), &[out])?;
    let sizes = gather_sizes(op, x, &map.source, k, out)?;
    if sizes.tokens != tokens {
        return shape_error(op, format!("a map of {tokens} tokens for {:?}", x.shape()));
    }
    Ok(sizes)
}

/// Of `x [T, h]` and rows of a map turned, `out [c, N up to a multiple of 16]`.
pub(crate) fn turn_sizes(op: &'static str, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<Sizes> {
    let ([tokens, width], [t, k]) = (rows_of(op, "x", x)?, rows_of(op, "rows", &map.rows)?);
    let ([c, pitch], rows) = (rows_of(op, "out", out)?, counted(op, map.source.numel())?);
    contiguous(op, &[&map.source])?;
    dtypes(op, DType::I32, &[&map.rows, &map.source])?;
    if !matches!(x.dtype(), DType::E4M3 | DType::E5M2) {
        return Err(Error::DType { op, found: x.dtype(), wanted: DType::E4M3 });
    }
    dtypes(op, x.dtype(), &[out])?;
    if c > width || pitch != rows.next_multiple_of(ALIGN) || tokens != t || k == 0 {
        let what = format!("a map of {t} tokens to {rows} rows turns {:?} into {:?}", x.shape(), out.shape());
        return shape_error(op, what);
    }
    counted(op, tokens.saturating_mul(k))?;
    Ok(Sizes { tokens, k, rows, width })
}

/// Of `x [T, h]`, `source [N]`, `weights [T, k]`, `out [N, h]`.
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

/// Of `x [N, h]`, `rows [T, k]` and per token `y [T, h]`.
pub(crate) fn sum_sizes(op: &'static str, x: &Tensor, rows: &Tensor, y: &Tensor) -> Result<Sizes> {
    let ([n, width], [tokens, k]) = (rows_of(op, "x", x)?, rows_of(op, "rows", rows)?);
    dtypes(op, DType::I32, &[rows])?;
    same_or_f32(op, x, y)?;
    if rows_of(op, "the tokens", y)? != [tokens, width] {
        return shape_error(
            op,
            format!(
                "x {:?}, rows {:?}, tokens {:?} do not belong together",
                x.shape(),
                rows.shape(),
                y.shape()
            ),
        );
    }
    counted(op, tokens.saturating_mul(k))?;
    Ok(Sizes { tokens, k, rows: counted(op, n)?, width })
}

/// One f32 value for each choice?
pub(crate) fn check_choices(op: &'static str, sizes: Sizes, t: &Tensor) -> Result<()> {
    dtypes(op, DType::F32, &[t])?;
    if t.shape() == [sizes.tokens, sizes.k] && t.is_contiguous() {
        return Ok(());
    }
    shape_error(op, format!("{t:?} must be contiguous [{}, {}]", sizes.tokens, sizes.k))
}

/// Is `t` of the type of `like`, or f32?
fn same_or_f32(op: &'static str, like: &Tensor, t: &Tensor) -> Result<()> {
    if t.dtype() == DType::F32 { Ok(()) } else { dtypes(op, like.dtype(), &[t]) }
}

/// Of values: contiguous, an index for each of `out`, f32 or i32.
pub(crate) fn check_values(op: &'static str, x: &Tensor, source: &Tensor, out: &Tensor) -> Result<()> {
    contiguous(op, &[x])?;
    crate::checks::same_contiguous(op, &[source, out])?;
    dtypes(op, DType::I32, &[source])?;
    let wanted = if x.dtype() == DType::I32 { DType::I32 } else { DType::F32 };
    dtypes(op, wanted, &[x, out])?;
    counted(op, x.numel()).map(|_| ())
}

/// Chunks and rows of a chunk map.
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

/// Tokens and experts of a dense map.
pub(crate) fn pad_sizes(op: &'static str, align: usize, map: &Tensor) -> Result<[usize; 2]> {
    dtypes(op, DType::U8, &[map])?;
    if align == 0 {
        return shape_error(op, "counts cannot be multiples of 0; 1 leaves the map as it is");
    }
    let [tokens, experts] = rows_of(op, "the map", map)?;
    counted(op, tokens)?;
    Ok([tokens, experts])
}
