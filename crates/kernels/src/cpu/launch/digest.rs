use super::CpuKernels;
use crate::DigestKernels;
use crate::digest::{check_digest, length_term, sum_of_words};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

/// Bytes of a piece that one thread adds up.
const PIECE: usize = 1 << 18;

impl DigestKernels for CpuKernels {
    fn digest(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        check_digest(x, out)?;
        let bytes = x.as_bytes()?;
        s.launch("digest", &[read(&bytes), write(out)], |l| {
            let bytes = l.slice::<u8>(0)?;
            let mut sums = vec![0u64; bytes.len().div_ceil(PIECE)];
            l.threads().parallel_chunks(&mut sums, 1, &|i, sum| {
                let end = bytes.len().min((i + 1) * PIECE);
                sum[0] = sum_of_words(&bytes[i * PIECE..end], (i * PIECE / 8) as u64);
            });
            let total = sums.into_iter().fold(length_term(bytes.len()), u64::wrapping_add);
            l.slice_mut::<i64>(1)?[..1].fill(total as i64);
            Ok(())
        })
    }
}
