//! Strided row views and their partition into chunks of parallel work.

use ferrotron_tensor::{Result, shape_error};

/// Elements per chunk of work. Constant, so that results depend on the problem and not on the number of threads.
pub(crate) const PIECE: usize = 16 * 1024;

/// `outer × inner` rows of `width` contiguous elements, for example a `[tokens, heads, head_dim]` view of a fused QKV buffer. Row `(o, i)` starts at `o * outer_stride + i * inner_stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Groups of rows (tokens).
    pub outer: usize,
    /// Stride between groups; at least the span of a group.
    pub outer_stride: usize,
    /// Rows per group (heads); 1 for a matrix.
    pub inner: usize,
    /// Stride between rows of a group; at least `width`.
    pub inner_stride: usize,
    /// Elements per row.
    pub width: usize,
}

impl Rows {
    /// `rows` contiguous rows.
    pub const fn dense(rows: usize, width: usize) -> Rows {
        Rows::strided(rows, width, width)
    }

    /// `rows` rows with stride `stride`.
    pub const fn strided(rows: usize, width: usize, stride: usize) -> Rows {
        Rows { outer: rows, outer_stride: stride, inner: 1, inner_stride: width, width }
    }

    /// `[tokens, heads, dim]` with the given strides.
    pub const fn heads(
        tokens: usize,
        token_stride: usize,
        heads: usize,
        head_stride: usize,
        dim: usize,
    ) -> Rows {
        Rows {
            outer: tokens,
            outer_stride: token_stride,
            inner: heads,
            inner_stride: head_stride,
            width: dim,
        }
    }

    /// Number of rows.
    pub const fn count(&self) -> usize {
        self.outer * self.inner
    }

    /// Number of elements.
    pub const fn elements(&self) -> usize {
        self.count() * self.width
    }

    /// Elements from the first of a group to its last.
    const fn group_span(&self) -> usize {
        if self.inner == 0 { 0 } else { (self.inner - 1) * self.inner_stride + self.width }
    }

    /// Elements from the first of the view to its last.
    pub const fn span(&self) -> usize {
        if self.elements() == 0 { 0 } else { (self.outer - 1) * self.outer_stride + self.group_span() }
    }

    /// Rows must not overlap and must lie inside `len` elements.
    pub(crate) fn check(&self, op: &'static str, name: &str, len: usize) -> Result<()> {
        let overlap = (self.inner > 1 && self.inner_stride < self.width)
            || (self.outer > 1 && self.outer_stride < self.group_span());
        if overlap && self.elements() > 0 {
            return shape_error(op, format!("rows of {name} overlap: {self:?}"));
        }
        if self.span() > len {
            return shape_error(op, format!("{name} holds {len} elements, its rows need {}", self.span()));
        }
        Ok(())
    }

    /// [`Rows::check`], and that it has as many rows of the same width as `like`.
    pub(crate) fn check_like(&self, op: &'static str, name: &str, len: usize, like: &Rows) -> Result<()> {
        if (self.outer, self.inner, self.width) != (like.outer, like.inner, like.width) {
            return shape_error(op, format!("{name} is {self:?}, but {like:?} is needed"));
        }
        self.check(op, name, len)
    }

    /// Groups per chunk of about [`PIECE`] elements.
    pub(crate) fn grain(&self) -> usize {
        (PIECE / (self.inner * self.width).max(1)).max(1)
    }

    /// The view of a chunk of at most `grain` groups from group `first`.
    pub(crate) fn piece(&self, first: usize, grain: usize) -> Rows {
        Rows { outer: grain.min(self.outer - first), ..*self }
    }

    fn piece_len(&self, grain: usize) -> usize {
        grain * self.outer_stride.max(self.group_span()).max(1)
    }

    /// The data of each chunk.
    pub(crate) fn cut<'a, T>(&self, data: &'a [T], grain: usize) -> std::slice::Chunks<'a, T> {
        data[..self.span()].chunks(self.piece_len(grain))
    }

    /// The mutable data of each chunk.
    pub(crate) fn cut_mut<'a, T>(&self, data: &'a mut [T], grain: usize) -> std::slice::ChunksMut<'a, T> {
        data[..self.span()].chunks_mut(self.piece_len(grain))
    }

    /// Row `i` of the chunk `data`.
    #[inline(always)]
    pub(crate) fn row<'a, T>(&self, data: &'a [T], i: usize) -> &'a [T] {
        let at = self.start(i);
        &data[at..at + self.width]
    }

    /// Mutable row `i` of the chunk `data`.
    #[inline(always)]
    pub(crate) fn row_mut<'a, T>(&self, data: &'a mut [T], i: usize) -> &'a mut [T] {
        let at = self.start(i);
        &mut data[at..at + self.width]
    }

    #[inline(always)]
    fn start(&self, i: usize) -> usize {
        if self.inner == 1 {
            i * self.outer_stride
        } else {
            (i / self.inner) * self.outer_stride + (i % self.inner) * self.inner_stride
        }
    }
}

/// A slice and the rows in it.
#[derive(Clone, Copy, Debug)]
pub struct RowsView<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// Where each row is.
    pub rows: Rows,
}

impl<'a, T> RowsView<'a, T> {
    /// `rows` contiguous rows.
    pub fn dense(data: &'a [T], rows: usize, width: usize) -> RowsView<'a, T> {
        RowsView { data, rows: Rows::dense(rows, width) }
    }

    /// [`Rows::check`] against the slice.
    pub(crate) fn check(&self, op: &'static str, name: &str) -> Result<()> {
        self.rows.check(op, name, self.data.len())
    }

    /// Row `i`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'a [T] {
        self.rows.row(self.data, i)
    }
}

/// A mutable slice and the rows in it.
#[derive(Debug)]
pub struct RowsViewMut<'a, T> {
    /// The elements.
    pub data: &'a mut [T],
    /// Where each row is.
    pub rows: Rows,
}

impl<T> RowsViewMut<'_, T> {
    /// [`Rows::check`] against the slice.
    pub(crate) fn check(&self, op: &'static str, name: &str) -> Result<()> {
        self.rows.check(op, name, self.data.len())
    }
}

/// Checks the length of a slice.
pub(crate) fn check_len(op: &'static str, name: &str, found: usize, wanted: usize) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    shape_error(op, format!("{name} holds {found} elements, but {wanted} are needed"))
}
