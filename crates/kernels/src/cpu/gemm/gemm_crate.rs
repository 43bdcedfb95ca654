//! f32 GEMM by the `gemm` crate, which is as fast as vendor libraries. It runs single-threaded here on chunks of C that depend
//! on the shape alone, so results do not depend on the number of threads.

use super::{Epilogue, GemmShape};
use ferrotron_tensor::Threads;

/// Rows or columns per chunk. Every chunk packs the other operand again, so chunks are large; their number is even, for even
/// thread counts.
const PIECE: usize = 1024;

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
    let by_rows = s.m >= s.n;
    let length = if by_rows { s.m } else { s.n };
    let pieces = length.div_ceil(PIECE).next_multiple_of(2).min(length);
    let grain = length.div_ceil(pieces);
    let out = Out(c.as_mut_ptr());
    threads.parallel_ranges(length, grain, &|r| {
        let out = &out;
        let (m, n, row, col) = if by_rows { (r.len(), s.n, r.start, 0) } else { (s.m, r.len(), 0, r.start) };
        // SAFETY: the slices hold the shape (checked by the caller), the chunk lies inside it, and no other chunk writes its rows
        // and columns of C.
        unsafe {
            gemm::gemm(
                m,
                n,
                s.k,
                out.0.add(row * s.ldc + col),
                1,
                s.ldc as isize,
                read,
                a.as_ptr().add(row * ar),
                ac as isize,
                ar as isize,
                b.as_ptr().add(col * bc),
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
    });
}
