//! f32 GEMM by the `gemm` crate. It runs single-threaded here on chunks of C.
//!
//! Chunks depend on the number of threads, results do not: the crate sums along k in blocks whose length is that of its whole k up
//! to [`K_SLICE`], so it is given slices of k that are no longer, and chunks large enough for its ordinary kernels.

use super::{Epilogue, GemmShape};
use ferrotron_tensor::Threads;

/// Longest k of one call: the shortest block length of the `gemm` crate.
const K_SLICE: usize = 512;
/// Elements of C in the smallest chunk. The crate has other kernels, which sum in another order, for up to 256.
const SMALLEST: usize = 64 * 64;

/// Number of chunks along the rows and columns of C, nearly square. Every chunk packs its rows of A and columns of B for itself, so
/// fewer and larger ones cost less: one for each of two or four threads. More threads wait for the last one longer: two for each,
/// if they are large enough.
fn chunks(m: usize, n: usize, threads: usize) -> [usize; 2] {
    let wanted = if matches!(threads, 1 | 2 | 4) { threads } else { 2 * threads };
    let (mut down, mut across) = (1, 1);
    while down * across < wanted {
        let (rows, cols) = (m / down, n / across);
        if rows * cols < 2 * SMALLEST {
            break;
        }
        if rows > cols { down *= 2 } else { across *= 2 }
    }
    [down, across]
}

/// C, shared by threads that write different rows or columns of it.
struct Out(*mut f32);
// SAFETY: chunks do not overlap.
unsafe impl Sync for Out {}

/// See [`super::gemm_f32`], which has checked the lengths. `m`, `n`, `k` are not zero.
pub(super) fn run(
    threads: &Threads,
    s: GemmShape,
    a: &[f32],
    b: &[f32],
    epilogue: Epilogue<'_, f32>,
    c: &mut [f32],
) {
    let Epilogue { bias, accumulate } = epilogue;
    if let Some(bias) = bias {
        for row in c.chunks_mut(s.ldc).take(s.m) {
            match accumulate {
                true => row[..s.n].iter_mut().zip(bias).for_each(|(c, b)| *c += b),
                false => row[..s.n].copy_from_slice(&bias[..s.n]),
            }
        }
    }
    let read = accumulate || bias.is_some();
    // (row stride, column stride) of op(A) and op(B).
    let steps = |trans: bool, ld: usize| if trans { (1, ld) } else { (ld, 1) };
    let ((ar, ac), (br, bc)) = (steps(s.trans_a, s.lda), steps(s.trans_b, s.ldb));
    let [down, across] = chunks(s.m, s.n, threads.count());
    let slice = s.k.div_ceil(s.k.div_ceil(K_SLICE));
    let out = Out(c.as_mut_ptr());
    threads.parallel_for(down * across, &|chunk| {
        let out = &out;
        // Chunks differ by a row or column at most: none is so small that the crate takes other kernels for it.
        let part = |i: usize, of: usize, len: usize| (i * len / of, (i + 1) * len / of - i * len / of);
        let ((row, m), (col, n)) = (part(chunk / across, down, s.m), part(chunk % across, across, s.n));
        for at in (0..s.k).step_by(slice) {
            // SAFETY: the slices hold the shape (checked by the caller), the chunk and the slice of k lie inside it, and no other
            // chunk writes its rows and columns of C.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    slice.min(s.k - at),
                    out.0.add(row * s.ldc + col),
                    1,
                    s.ldc as isize,
                    read || at > 0,
                    a.as_ptr().add(row * ar + at * ac),
                    ac as isize,
                    ar as isize,
                    b.as_ptr().add(at * br + col * bc),
                    bc as isize,
                    br as isize,
                    1.0,
                    1.0,
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                );
            }
        }
    });
}
