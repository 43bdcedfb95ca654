//! Embedding look-up and its gradient, on a whole table or a vocabulary shard.

use super::rows::{PIECE, check_len};
use super::vocab::{Id, Shard, check_ids};
use super::{Isa, multiversion};
use ferrotron_tensor::{Float, Result, Threads};

/// `y[t] = scale·table[ids[t]] (+ y[t] if add)`: ids `[tokens]`, table `[shard.len, width]`, y `[tokens, width]`.
/// Ids of other shards give zero rows; ids outside `shard.total` are an error.
pub fn embedding<T: Float, I: Id>(
    threads: &Threads,
    isa: Isa,
    ids: &[I],
    table: &[T],
    shard: Shard,
    scale: f32,
    add: bool,
    y: &mut [T],
) -> Result<()> {
    let width = width("embedding", threads, ids, y.len(), table.len(), shard)?;
    check_len("embedding", "table", table.len(), shard.len * width)?;
    let rows = (PIECE / width.max(1)).max(1);
    threads.parallel_chunks(y, rows * width, &|i, y| {
        gather(isa, &ids[i * rows..][..y.len() / width], table, shard, scale, add, y);
    });
    Ok(())
}

/// Row width, from the tokens' rows or, without tokens, from the table.
fn width<I: Id>(
    op: &'static str,
    threads: &Threads,
    ids: &[I],
    rows: usize,
    table: usize,
    shard: Shard,
) -> Result<usize> {
    shard.check(op)?;
    let width = rows.checked_div(ids.len()).or(table.checked_div(shard.len)).unwrap_or(0);
    check_len(op, "rows", rows, ids.len() * width)?;
    check_ids(threads, op, ids, shard.total, None)?;
    Ok(width)
}

multiversion! {
    fn gather<T: Float, I: Id>(
        ids: &[I], table: &[T], shard: Shard, scale: f32, add: bool, y: &mut [T],
    ) {
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
    threads: &Threads,
    isa: Isa,
    ids: &[I],
    dy: &[T],
    shard: Shard,
    scale: f32,
    accumulate: bool,
    dtable: &mut [f32],
) -> Result<()> {
    let width = width("embedding_backward", threads, ids, dy.len(), dtable.len(), shard)?;
    check_len("embedding_backward", "dtable", dtable.len(), shard.len * width)?;
    if width == 0 {
        return Ok(());
    }
    let (starts, tokens) = by_id(ids, shard);
    // Small chunks, since some ids are far more frequent than others.
    let rows = (PIECE / 4 / width).max(1);
    threads.parallel_chunks(dtable, rows * width, &|i, dtable| {
        scatter(isa, &starts[i * rows..], &tokens, dy, width, scale, accumulate, dtable);
    });
    Ok(())
}

/// Tokens stably sorted by id; those of row `v` are `tokens[starts[v]..starts[v + 1]]`.
fn by_id<I: Id>(ids: &[I], shard: Shard) -> (Vec<usize>, Vec<usize>) {
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
        starts: &[usize], tokens: &[usize], dy: &[T], width: usize, scale: f32, accumulate: bool,
        dtable: &mut [f32],
    ) {
        for (v, row) in dtable.chunks_exact_mut(width).enumerate() {
            if !accumulate {
                row.fill(0.0);
            }
            for t in &tokens[starts[v]..starts[v + 1]] {
                for (sum, dy) in row.iter_mut().zip(&dy[t * width..][..width]) {
                    *sum += scale * dy.to_f32();
                }
            }
        }
    }
}
