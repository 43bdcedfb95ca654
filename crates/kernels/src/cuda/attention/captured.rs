//! Packed sequences of a pass that a CUDA graph holds: other sequences in every replay.

use super::tile_table::{TableKey, TileTable};
use crate::attention::plan::packed_spans;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, shape_error};
use std::sync::{Mutex, PoisonError};

const OP: &str = "captured sequences";
/// Rows of the shortest tiles, and how many tables of such tiles there is room for: kernels of a model's usual heads, whose
/// tiles are longer, take several times less.
const SHORTEST_TILE: usize = 16;
const TABLES: usize = 16;

/// Packed sequences (thd) of a captured pass. Where they begin is in memory that kernels read and
/// [`CapturedSequences::fill`] writes before every replay; launches depend on the number of tokens and on the largest number of
/// sequences only. The results are those of a launched pass, to the bit.
pub struct CapturedSequences {
    tokens: usize,
    /// One sequence of all tokens, and others without any, as many as there may be.
    offsets: Vec<i32>,
    /// i32 `[words]`: one table after another.
    memory: Tensor,
    /// The tables that captured kernels read, each with its first word and the number of its tiles at most.
    tables: Mutex<Vec<(TableKey, usize, usize)>>,
}

impl CapturedSequences {
    /// Up to so many sequences with so many tokens in all.
    pub fn new(s: &Stream, tokens: usize, sequences: usize) -> Result<CapturedSequences> {
        let Ok(end) = i32::try_from(tokens) else {
            return shape_error(OP, format!("{tokens} tokens are too many; use a smaller micro-batch"));
        };
        let mut offsets = vec![end; sequences.max(1) + 1];
        offsets[0] = 0;
        let words = TABLES * TableKey::words(tokens / SHORTEST_TILE + sequences.max(1));
        let memory = Tensor::empty(s, &[words], DType::I32, Category::Activations)?;
        Ok(CapturedSequences { tokens, offsets, memory, tables: Mutex::default() })
    }

    /// Offsets that stand for all that may be filled in: as many sequences as there may be.
    pub fn offsets(&self) -> &[i32] {
        &self.offsets
    }

    /// Memory of the table that a kernel reads.
    pub(super) fn table(&self, key: TableKey) -> Result<TileTable> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let view = |start, capacity| TileTable { memory: self.memory.clone(), start, capacity };
        if let Some((_, start, capacity)) = tables.iter().find(|(known, ..)| *known == key) {
            return Ok(view(*start, *capacity));
        }
        let start = tables.last().map_or(0, |(_, start, capacity)| start + TableKey::words(*capacity));
        let capacity = key.capacity(self.tokens, self.offsets.len() - 1);
        if start + TableKey::words(capacity) > self.memory.numel() {
            return shape_error(OP, format!("no room for {} tile tables", tables.len() + 1));
        }
        tables.push((key, start, capacity));
        Ok(view(start, capacity))
    }

    /// The sequences of the next replay: sequence i is tokens `offsets[i]..offsets[i+1]`, and they hold all tokens.
    pub fn fill(&self, s: &Stream, offsets: &[i32]) -> Result<()> {
        let whole = [offsets.first(), offsets.last()] == [self.offsets.first(), self.offsets.last()];
        if !whole || offsets.len() > self.offsets.len() || !offsets.is_sorted() {
            return shape_error(
                OP,
                format!(
                    "{offsets:?} does not cut {} tokens into at most {}",
                    self.tokens,
                    self.offsets.len() - 1
                ),
            );
        }
        let spans = packed_spans(offsets, offsets, 0);
        let tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let end = tables.last().map_or(0, |(_, start, capacity)| start + TableKey::words(*capacity));
        let mut words = vec![0; end];
        for (key, start, _) in tables.iter() {
            let table = key.table(&spans)?;
            words[*start..][..table.len()].copy_from_slice(&table);
        }
        s.upload_into(&self.memory.narrow(0, 0, end)?, &words)
    }
}
