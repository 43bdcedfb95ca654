//! LayerNorm and RMSNorm: partition of rows over threads.

pub(super) mod backward;
pub(super) mod forward;

use super::row_grid::vec_width;
use crate::cpu::rows::Rows;
use crate::quant::check::{matrix, one};
use crate::{Norm, NormBackward, NormForward, NormKernels, QuantKernels, ResidualAdd};
use ferrotron_tensor::{DType, Launch, Result, Stream, Tensor};

/// As in common.cuh.
const CENTRED: u32 = 1;
const VECTORIZED: u32 = 2;
const VECTORIZED_GAIN: u32 = 4;

/// Static shared memory of the kernels, at most.
const STATIC_SHARED: usize = 2 << 10;

/// The threads of a block in teams that have a row each, every thread with so many 16-byte chunks of it. Depends on
/// the width alone.
#[derive(Clone, Copy, Debug, PartialEq)]
struct RowGroups {
    chunks: usize,
    lanes: usize,
    count: usize,
}

impl RowGroups {
    /// RowGroups in blocks of about `threads`, of up to `most` chunks a thread; none where rows are too wide, or not a
    /// multiple of a chunk.
    fn of(dtype: DType, width: usize, most: usize, threads: usize) -> Option<RowGroups> {
        let vec_width = vec_width(dtype);
        if width == 0 || !width.is_multiple_of(vec_width) {
            return None;
        }
        let all = width / vec_width;
        let lanes = |chunks: usize| match all.div_ceil(chunks) {
            // Rows as short as heads: several share a warp.
            few @ ..=16 if chunks == 1 => few.next_power_of_two(),
            many => many.next_multiple_of(32),
        };
        // As few idle threads as possible; then, as few threads.
        let chunks = (1..=most)
            .rev()
            .filter(|chunks| lanes(*chunks) <= 512)
            .min_by_key(|chunks| lanes(*chunks) * chunks)?;
        let lanes = lanes(chunks);
        Some(RowGroups { chunks, lanes, count: (threads / lanes).max(1) })
    }

    fn threads(self) -> usize {
        self.lanes * self.count
    }

    /// The same with as many teams as have a prefetch ring of so many stages of so many tensors in the shared memory of a
    /// block; none where not even one has.
    fn within(mut self, shared_memory: usize, stages: usize, tensors: usize) -> Option<RowGroups> {
        let room = shared_memory.saturating_sub(STATIC_SHARED);
        while self.ring(stages, tensors) > room && self.count > 1 {
            self.count /= 2;
        }
        (self.ring(stages, tensors) <= room).then_some(self)
    }

    /// Bytes of a prefetch ring of so many stages of so many tensors.
    fn ring(self, stages: usize, tensors: usize) -> usize {
        self.threads() * self.chunks * 16 * stages * tensors
    }
}

/// Threads of a block of the kernels for any width.
fn threads_for_any_width(dtype: DType, width: usize) -> u32 {
    width.div_ceil(vec_width(dtype)).next_multiple_of(32).min(1024) as u32
}

/// Address of an optional argument, or 0.
fn optional(l: &Launch, i: Option<usize>) -> Result<u64> {
    i.map_or(Ok(0), |i| l.address(i))
}

impl super::CudaKernels {
    /// Norm of `n.x`; with `amax` (bf16 only) also raises the amax of the output.
    pub(super) fn norm(&self, s: &Stream, norm: Norm, n: &NormForward, amax: Option<&Tensor>) -> Result<()> {
        const OP: &str = "norm_forward";
        let [x_rows, y_rows] = crate::checks::rows_of(OP, [n.x, n.y])?;
        n.check(OP, norm, x_rows.count(), x_rows.width)?;
        self.launch_forward(s, &forward::Forward { op: OP, norm, n, x_rows, y_rows, fused: None, amax })
    }

    /// Norm of `sum = n.x + residual`.
    pub(super) fn add_norm(
        &self,
        s: &Stream,
        norm: Norm,
        [residual, sum]: [&Tensor; 2],
        n: &NormForward,
        amax: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "add_norm_forward";
        crate::checks::same_contiguous(OP, &[n.x, residual, sum, n.y])?;
        crate::checks::dtypes(OP, n.x.dtype(), &[residual, sum])?;
        let (count, width) = (n.rstd.numel(), n.gamma.numel());
        n.check(OP, norm, count, width)?;
        if count * width != n.x.numel() {
            let found = n.x.numel();
            return ferrotron_tensor::shape_error(
                OP,
                format!("x holds {found} elements, but {count} rows of {width} are needed"),
            );
        }
        let (x_rows, y_rows) = (Rows::dense(count, width), Rows::dense(count, width));
        let fused = Some([residual, sum]);
        self.launch_forward(s, &forward::Forward { op: OP, norm, n, x_rows, y_rows, fused, amax })
    }
}

impl NormKernels for super::CudaKernels {
    fn norm_forward(&self, s: &Stream, norm: Norm, n: &NormForward) -> Result<()> {
        self.norm(s, norm, n, None)
    }

    fn norm_forward_amax(&self, s: &Stream, norm: Norm, n: &NormForward, amax: &Tensor) -> Result<()> {
        matrix("norm_forward", n.y)?;
        one("norm_forward", amax)?;
        // Only the bf16 kernels take the amax as they write.
        if n.y.dtype() != DType::BF16 {
            self.norm_forward(s, norm, n)?;
            return self.amax(s, n.y, amax);
        }
        self.norm(s, norm, n, Some(amax))
    }

    fn add_norm_forward(&self, s: &Stream, norm: Norm, add: &ResidualAdd, n: &NormForward) -> Result<()> {
        self.add_norm(s, norm, [add.residual, add.sum], n, None)
    }

    fn add_norm_forward_amax(
        &self,
        s: &Stream,
        norm: Norm,
        add: &ResidualAdd,
        n: &NormForward,
        amax: &Tensor,
    ) -> Result<()> {
        matrix("add_norm_forward", n.y)?;
        one("add_norm_forward", amax)?;
        if n.y.dtype() != DType::BF16 {
            self.add_norm_forward(s, norm, add, n)?;
            return self.amax(s, n.y, amax);
        }
        self.add_norm(s, norm, [add.residual, add.sum], n, Some(amax))
    }

    fn norm_partials(&self, dtype: DType, rows: usize, width: usize) -> usize {
        backward::groups(dtype, rows, width)
    }

    fn norm_backward(&self, s: &Stream, norm: Norm, n: &NormBackward) -> Result<()> {
        self.launch_backward(s, norm, n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn teams_cover_their_rows() {
        for dtype in [DType::F32, DType::BF16] {
            for width in 1..20_000 {
                let Some(t) = RowGroups::of(dtype, width, 3, 512) else { continue };
                let all = width / vec_width(dtype);
                assert!(t.lanes * t.chunks >= all, "{width}: {t:?}");
                assert!(t.lanes.is_multiple_of(32) || (t.lanes.is_power_of_two() && t.lanes < 32));
                // Full warps, and a named barrier for each team.
                assert!(t.threads().is_multiple_of(32) && t.threads() <= 512, "{width}: {t:?}");
                assert!(t.lanes <= 32 || t.count < 16, "{width}: {t:?}");
            }
        }
        assert_eq!(
            RowGroups::of(DType::BF16, 768, 3, 512),
            Some(RowGroups { chunks: 3, lanes: 32, count: 16 })
        );
        assert_eq!(
            RowGroups::of(DType::BF16, 4096, 3, 512),
            Some(RowGroups { chunks: 2, lanes: 256, count: 2 })
        );
        assert_eq!(
            RowGroups::of(DType::BF16, 128, 3, 512),
            Some(RowGroups { chunks: 1, lanes: 16, count: 32 })
        );
        assert_eq!(RowGroups::of(DType::BF16, 100, 3, 512), None);
        assert_eq!(RowGroups::of(DType::BF16, 12_296, 3, 512), None);
    }

    /// Three tensors in four stages, as backward has at most.
    #[test]
    fn rings_fit_the_shared_memory_of_every_card() {
        for kib in [99, 163, 227] {
            for width in (8..20_000).step_by(8) {
                let Some(t) = RowGroups::of(DType::BF16, width, 3, 512) else { continue };
                let Some(fits) = t.within(kib << 10, 4, 3) else {
                    assert!(RowGroups { count: 1, ..t }.ring(4, 3) > (kib - 2) << 10, "{width}: {t:?}");
                    continue;
                };
                assert!(
                    fits.ring(4, 3) <= (kib - 2) << 10 && fits.threads().is_multiple_of(32),
                    "{width}: {fits:?}"
                );
            }
        }
    }
}
