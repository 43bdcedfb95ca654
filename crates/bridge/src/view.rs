//! Where a parameter lies inside a Hugging Face tensor: concatenated, transposed, interleaved and stacked experts are
//! all an offset and two strides.

/// Element `(r, c)` of a parameter is element `offset + r·row + c·col` of the tensor that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The first element.
    pub offset: usize,
    /// Stride between rows.
    pub row: usize,
    /// Stride between columns.
    pub col: usize,
}

impl View {
    /// A contiguous matrix of `cols` columns.
    pub fn contiguous(cols: usize) -> View {
        View { offset: 0, row: cols, col: 1 }
    }

    /// The index of an element.
    pub fn at(&self, row: usize, col: usize) -> usize {
        self.offset + row * self.row + col * self.col
    }

    /// The same elements, counted from element `first` of the tensor.
    pub(crate) fn from(self, first: usize) -> View {
        View { offset: self.offset - first, ..self }
    }

    /// True if rows of `cols` columns are contiguous.
    pub(crate) fn is_contiguous(&self, cols: usize) -> bool {
        self.row == cols && self.col == 1
    }
}

/// How parameters are fused into one block of a tensor: one expert's, or the whole tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FusedLayout {
    /// The block is stored `[in, out]`.
    pub transposed: bool,
    /// Rows of the parts alternate (GPT-OSS's gate and up).
    pub interleaved: bool,
}

impl FusedLayout {
    /// Views of parts of `rows[p]` rows and `cols` columns each, in block `block` of the tensor.
    pub fn views(self, rows: &[usize], cols: usize, block: usize) -> Vec<View> {
        let total: usize = rows.iter().sum();
        let base = block * total * cols;
        let (row, col) = if self.transposed { (1, total) } else { (cols, 1) };
        let mut first = 0;
        let mut out = Vec::with_capacity(rows.len());
        for (p, n) in rows.iter().enumerate() {
            let (at, step) = if self.interleaved { (p, rows.len()) } else { (first, 1) };
            out.push(View { offset: base + at * row, row: row * step, col });
            first += n;
        }
        out
    }
}

/// Copies `rows × cols` elements of `size` bytes (2 or 4) from one view to another.
pub(crate) fn copy(from: (&[u8], View), to: (&mut [u8], View), rows: usize, cols: usize, size: usize) {
    match size {
        2 => copy_as::<2>(from, to, rows, cols),
        _ => copy_as::<4>(from, to, rows, cols),
    }
}

fn copy_as<const N: usize>(from: (&[u8], View), to: (&mut [u8], View), rows: usize, cols: usize) {
    // Square tiles keep both sides in cache.
    const TILE: usize = 32;
    let ((from, a), (to, b)) = ((from.0.as_chunks::<N>().0, from.1), (to.0.as_chunks_mut::<N>().0, to.1));
    for r0 in (0..rows).step_by(TILE) {
        for c0 in (0..cols).step_by(TILE) {
            for r in r0..rows.min(r0 + TILE) {
                for c in c0..cols.min(c0 + TILE) {
                    to[b.at(r, c)] = from[a.at(r, c)];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kind of block against its definition.
    #[test]
    fn views_are_where_the_definition_says() {
        let (rows, cols, blocks) = ([3usize, 3], 5usize, 2);
        let total: usize = rows.iter().sum();
        for transposed in [false, true] {
            for interleaved in [false, true] {
                let mut seen = vec![0; blocks * total * cols];
                for block in 0..blocks {
                    let views = FusedLayout { transposed, interleaved }.views(&rows, cols, block);
                    for (p, view) in views.iter().enumerate() {
                        for r in 0..rows[p] {
                            let row = if interleaved { 2 * r + p } else { 3 * p + r };
                            for c in 0..cols {
                                let inside = if transposed { c * total + row } else { row * cols + c };
                                assert_eq!(view.at(r, c), block * total * cols + inside);
                                seen[view.at(r, c)] += 1;
                            }
                        }
                    }
                }
                assert!(seen.iter().all(|n| *n == 1), "every element has one owner");
            }
        }
        // Unequal parts one after the other.
        let views = FusedLayout { transposed: true, interleaved: false }.views(&[4, 1, 2], 3, 0);
        assert_eq!(views[2], View { offset: 5, row: 1, col: 7 });
    }

    #[test]
    fn copying_lands_where_it_should() {
        for (rows, cols) in [(1, 1), (3, 5), (40, 33), (64, 100), (0, 4)] {
            let from: Vec<u8> = (0..rows * cols).flat_map(|i| (i as u32).to_le_bytes()).collect();
            let view = View { offset: 4, row: 2, col: 2 * rows + 7 };
            let mut to = vec![0xff; (4 + cols * view.col) * 4];
            copy((&from, View::contiguous(cols)), (&mut to, view), rows, cols, 4);
            let at = |i: usize| u32::from_le_bytes(to[4 * i..4 * i + 4].try_into().unwrap());
            let filled = (0..to.len() / 4).filter(|i| at(*i) != u32::MAX).count();
            assert_eq!(filled, rows * cols);
            for r in 0..rows {
                for c in 0..cols {
                    assert_eq!(at(view.at(r, c)) as usize, r * cols + c);
                }
            }
            let mut back = vec![0; from.len()];
            copy((&to, view), (&mut back, View::contiguous(cols)), rows, cols, 4);
            assert_eq!(back, from);
        }
    }
}
