//! Digests of tensors.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::{CudaKernels, Kernel};
use crate::DigestKernels;
use crate::digest::{GAMMA, check_digest, length_term};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

/// As in digest.cu.
const THREADS: u32 = 256;
const UNROLL: usize = 4;
/// Blocks at most: each then adds up a share of the words, with one atomic addition at its end.
const MAX_BLOCKS: u32 = 2048;

kernel_args! {
    header "args/digest.cuh", includes [];

    /// The digest of some bytes.
    struct DigestArgs {
        x: u64,
        /// u64 `[1]`
        out: u64,
        bytes: i64,
        /// What the number of bytes adds.
        start: u64,
        gamma: u64,
        vectorized: u32,
        pad: u32,
    }
}

impl DigestKernels for CudaKernels {
    fn digest(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "digest";
        check_digest(x, out)?;
        let kernel = |name| Kernel::new("digest", name);
        s.launch(OP, &[read(x), write(out)], |l| {
            let at = l.address(0)?;
            let args = DigestArgs {
                x: at,
                out: l.address(1)?,
                bytes: x.bytes() as i64,
                start: length_term(x.bytes()),
                gamma: GAMMA,
                vectorized: aligned16(&[at]).into(),
                pad: 0,
            };
            self.launch_kernel(l, kernel("digest_start"), line(1, 1), &args)?;
            if x.bytes() == 0 {
                return Ok(());
            }
            let grid = blocks(OP, x.bytes(), 16 * UNROLL * THREADS as usize)?.min(MAX_BLOCKS);
            self.launch_kernel(l, kernel("digest_words"), line(grid, THREADS), &args)
        })
    }
}
