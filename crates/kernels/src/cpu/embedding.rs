//! Embedding look-up and its gradient, on a whole table or a vocabulary shard.

use super::rows::{PIECE, check_len};
use super::vocab::{Id, Shard, check_ids};
use super::{CpuContext, multiversion};
use ferrotron_tensor::{Float, Result};

/// Token ids `[tokens]`, and the vocabulary shard that the rows of the table hold.
#[derive(Clone, Copy, Debug)]
pub struct TokenIds<'a, I> {
    /// Ids in the whole vocabulary.
    pub ids: &'a [I],
    /// Ids of the table's rows.
    pub shard: Shard,
}

/// `y[t] = scale·table[ids[t]] (+ y[t] if add)`: ids `[tokens]`, table `[shard.len, width]`, y `[tokens, width]`.
/// Ids of other shards give zero rows; ids outside `shard.total` are an error.
pub fn embedding<T: Float, I: Id>(
    cpu: CpuContext,
    tokens: TokenIds<'_, I>,
    table: &[T],
    scale: f32,
    add: bool,
    y: &mut [T],
) -> Result<()> {
    let TokenIds { ids, shard } = tokens;
    let width = tokens.width("embedding", cpu, y.len(), table.len())?;
    check_len("embedding", "table", table.len(), shard.len * width)?;
    let rows = (PIECE / width.max(1)).max(1);
    cpu.threads.parallel_chunks(y, rows * width, &|i, y| {
        let ids = &ids[i * rows..][..y.len() / width];
        gather(cpu.isa, TokenIds { ids, shard }, table, scale, add, y);
    });
    Ok(())
}

impl<I: Id> TokenIds<'_, I> {
    /// Checks the ids; returns the row width, from `rows` elements of token rows or, without tokens, from `table` elements.
    fn width(&self, op: &'static str, cpu: CpuContext, rows: usize, table: usize) -> Result<usize> {
        let TokenIds { ids, shard } = *self;
        shard.check(op)?;
        let width = rows.checked_div(ids.len()).or(table.checked_div(shard.len)).unwrap_or(0);
        check_len(op, "rows", rows, ids.len() * width)?;
        check_ids(cpu.threads, op, ids, shard.total, None)?;
        Ok(width)
    }
}

multiversion! {
    fn gather<T: Float, I: Id>(
        tokens: TokenIds<'_, I>, table: &[T], scale: f32, add: bool, y: &mut [T],
    ) {
        let TokenIds { ids, shard } = tokens;
        let width = y.len() / ids.len();
        for (id, y) in ids.iter().zip(y.chunks_exact_mut(width)) {
            match shard.local((*id).into()).map(|at| &table[at * width..][..width]) {
                Some(row) if add => {
                    for (y, x) in y.iter_mut().zip(row) {
                        *y = T::from_f32(x.to_f32() * scale + y.to_f32());
                    }
                }
                Some(row) => {
                    for (y, x) in y.iter_mut().zip(row) {
                        *y = T::from_f32(x.to_f32() * scale);
                    }
                }
                None if add => {}
                None => y.fill(T::from_f32(0.0)),
            }
        }
    }
}

/// `dtable[v] (+)= scale·Σ_{t: ids[t] = v} dy[t]` in f32, in order of t: dtable is f32 `[shard.len, width]`.
pub fn embedding_backward<T: Float, I: Id>(
    cpu: CpuContext,
    tokens: TokenIds<'_, I>,
    dy: &[T],
    scale: f32,
    accumulate: bool,
    dtable: &mut [f32],
) -> Result<()> {
    let width = tokens.width("embedding_backward", cpu, dy.len(), dtable.len())?;
    check_len("embedding_backward", "dtable", dtable.len(), tokens.shard.len * width)?;
    if width == 0 {
        return Ok(());
    }
    let (starts, sorted) = sort_by_id(tokens);
    // Small chunks, since some ids are far more frequent than others.
    let rows = (PIECE / 4 / width).max(1);
    cpu.threads.parallel_chunks(dtable, rows * width, &|i, dtable| {
        if !accumulate {
            dtable.fill(0.0);
        }
        let tokens = TokensById { starts: &starts[i * rows..], tokens: &sorted };
        scatter(cpu.isa, tokens, dy, width, scale, dtable);
    });
    Ok(())
}

/// Tokens stably sorted by id; those of table row `v` are `tokens[starts[v]..starts[v + 1]]`.
#[derive(Clone, Copy)]
struct TokensById<'a> {
    starts: &'a [usize],
    tokens: &'a [usize],
}

/// `starts` and `tokens` of [`TokensById`].
fn sort_by_id<I: Id>(TokenIds { ids, shard }: TokenIds<'_, I>) -> (Vec<usize>, Vec<usize>) {
    let mut starts = vec![0usize; shard.len + 1];
    let local = || ids.iter().enumerate().filter_map(|(t, id)| Some((t, shard.local((*id).into())?)));
    local().for_each(|(_, v)| starts[v + 1] += 1);
    for v in 0..shard.len {
        starts[v + 1] += starts[v];
    }
    let mut next = starts.clone();
    let mut tokens = vec![0usize; starts[shard.len]];
    for (t, v) in local() {
        tokens[next[v]] = t;
        next[v] += 1;
    }
    (starts, tokens)
}

multiversion! {
    fn scatter<T: Float>(
        by_id: TokensById<'_>, dy: &[T], width: usize, scale: f32, dtable: &mut [f32],
    ) {
        for (v, row) in dtable.chunks_exact_mut(width).enumerate() {
            for t in &by_id.tokens[by_id.starts[v]..by_id.starts[v + 1]] {
                for (sum, dy) in row.iter_mut().zip(&dy[t * width..][..width]) {
                    *sum += scale * dy.to_f32();
                }
            }
        }
    }
}
