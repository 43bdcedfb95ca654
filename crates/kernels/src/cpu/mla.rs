//! Keys of multi-head latent attention (MLA): concatenation and its gradient.

use super::rows::Rows;
use ferrotron_tensor::{Float, Result, Threads};

/// `k[t, h] = [own[t, h], shared[t]]`
pub fn mla_concat_keys<T: Float>(
    threads: &Threads,
    (own, own_rows): (&[T], Rows),
    (shared, shared_rows): (&[T], Rows),
    (k, k_rows): (&mut [T], Rows),
) -> Result<()> {
    const OP: &str = "mla_concat_keys";
    own_rows.check(OP, "own", own.len())?;
    shared_rows.check(OP, "shared", shared.len())?;
    k_rows.check(OP, "k", k.len())?;
    let (grain, heads, a) = (k_rows.grain(), k_rows.inner, own_rows.width);
    let mut pieces: Vec<_> = k_rows.cut_mut(k, grain).collect();
    threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        for k in pieces {
            let first = i * grain;
            for r in 0..k_rows.piece(first, grain).count() {
                let (own_part, shared_part) = k_rows.row_mut(k, r).split_at_mut(a);
                own_part.copy_from_slice(own_rows.row(own, first * heads + r));
                shared_part.copy_from_slice(shared_rows.row(shared, first + r / heads));
            }
        }
    });
    Ok(())
}

/// `own[t, h] = k[t, h, ..a]`, `shared[t] = Σ_h k[t, h, a..]`, heads in their order.
pub fn mla_split_keys<T: Float>(
    threads: &Threads,
    (k, k_rows): (&[T], Rows),
    (own, own_rows): (&mut [T], Rows),
    (shared, shared_rows): (&mut [T], Rows),
) -> Result<()> {
    const OP: &str = "mla_split_keys";
    k_rows.check(OP, "k", k.len())?;
    own_rows.check(OP, "own", own.len())?;
    shared_rows.check(OP, "shared", shared.len())?;
    let (grain, heads, a) = (k_rows.grain(), k_rows.inner, own_rows.width);
    let pieces = own_rows.cut_mut(own, grain).zip(shared_rows.cut_mut(shared, grain));
    let mut pieces: Vec<_> = pieces.collect();
    threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        let mut sums = vec![0f32; shared_rows.width];
        for (own, shared) in pieces {
            let first = i * grain;
            for t in 0..shared_rows.piece(first, grain).outer {
                sums.fill(0.0);
                for h in 0..heads {
                    let (own_part, shared_part) = k_rows.row(k, (first + t) * heads + h).split_at(a);
                    own_rows.row_mut(own, t * heads + h).copy_from_slice(own_part);
                    sums.iter_mut().zip(shared_part).for_each(|(sum, x)| *sum += x.to_f32());
                }
                let to = shared_rows.row_mut(shared, t);
                to.iter_mut().zip(&sums).for_each(|(to, sum)| *to = T::from_f32(*sum));
            }
        }
    });
    Ok(())
}
