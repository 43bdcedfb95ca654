//! GEMM operands in MXFP8 and NVFP4: codes and scales, dequantization, and scales in the layout of cuBLASLt.

use super::emulate::EmulateArgs;
use super::input;
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{blocks, line};
use crate::cuda::{CudaKernels, Kernel};
use crate::quant::microscaling::{BlockAxis, DEPTH, EmulatedFormat, MicroscaledTensor};
use crate::{Fp8Tensor, ScalingMode};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, shape_error, write};

/// Rows and columns of a tile of scales.
const TILE: [usize; 2] = [128, 4];

kernel_args! {
    header "args/quant_swizzle.cuh", includes [];

    /// Scales in the layout of cuBLASLt.
    #[derive(Default)]
    struct SwizzleArgs {
        /// u8, or f32 powers of two.
        scales: u64,
        /// u8, in tiles of 128 × 4.
        out: u64,
        /// f32 `[2]`, or 0: alpha and beta of the GEMM, from the amax of both operands.
        factors: u64,
        amax: [u64; 2],
        rows: i64,
        cols: i64,
        /// From a source scale to the next one along the rows and columns.
        row_step: i64,
        col_step: i64,
        /// log2 of the rows and columns that share a source scale.
        row_share: u32,
        col_share: u32,
        /// Tiles along the columns.
        across: u32,
        /// Source scales are f32.
        f32: u32,
        /// beta is 1, or else 0.
        accumulate: u32,
        pad: u32,
    }
}

/// Scales of an operand as they are stored.
#[derive(Clone, Copy)]
pub(super) struct StoredScales<'a> {
    scales: &'a Tensor,
    /// Without addresses and tiles.
    args: SwizzleArgs,
}

/// What a GEMM needs of the scales of its operands.
pub(super) struct GemmScales {
    /// u8: those of a and b, swizzled.
    pub(super) scales: [Tensor; 2],
    /// NVFP4: f32 `[2]`, alpha and beta.
    pub(super) factors: Option<Tensor>,
}

impl<'a> From<&'a MicroscaledTensor> for StoredScales<'a> {
    fn from(q: &'a MicroscaledTensor) -> StoredScales<'a> {
        let cols = q.scales.shape()[1] as i64;
        let (rows, row_step, col_step) = (q.rows() as i64, cols, 1);
        let args = SwizzleArgs { rows, cols, row_step, col_step, ..SwizzleArgs::default() };
        StoredScales { scales: &q.scales, args }
    }
}

impl<'a> StoredScales<'a> {
    /// Block scales that are powers of two, as E8M0 scales of 32 values each: four to a block of 128.
    pub(super) fn of_blocks(q: &'a Fp8Tensor) -> Result<StoredScales<'a>> {
        let width = q.scale_inv.shape().last().copied().unwrap_or(0) as i64;
        let (row_share, row_step, col_step) = match q.scaling {
            ScalingMode::Block1x128 => (0, 1, width),
            ScalingMode::Block128x128 => (7, width, 1),
            ScalingMode::PerTensor => {
                return shape_error("swizzle scales", "a per-tensor scale has no layout");
            }
        };
        let (rows, cols) = (q.rows() as i64, q.data.shape()[1].div_ceil(DEPTH) as i64);
        let (f32, col_share) = (1, 2);
        let args =
            SwizzleArgs { rows, cols, row_step, col_step, row_share, col_share, f32, ..Default::default() };
        Ok(StoredScales { scales: &q.scale_inv, args })
    }

    /// Tiles down and across.
    fn tiles(&self) -> [usize; 2] {
        [(self.args.rows as usize).div_ceil(TILE[0]), (self.args.cols as usize).div_ceil(TILE[1])]
    }
}

impl CudaKernels {
    pub(super) fn launch_microscale(
        &self,
        s: &Stream,
        how: EmulatedFormat,
        x: &Tensor,
        out: &MicroscaledTensor,
    ) -> Result<()> {
        const OP: &str = "microscale";
        let view = out.check_quantize(OP, how, x)?;
        let (args, grid) = EmulateArgs::new(OP, how, &view)?;
        if let Some(amax) = &out.amax {
            s.zero(amax)?;
            if view.outer * view.width > 0 {
                self.launch_format_amax(s, (args, grid), x, amax)?;
            }
        }
        let kernel: Result<Kernel> = input!(OP, x.dtype(), "quant/microscale", "microscale");
        let (kernel, args) = (kernel?, args.of(out));
        let all =
            [Some(read(x)), Some(write(&out.data)), Some(write(&out.scales)), out.amax.as_ref().map(read)];
        s.launch(OP, &all.into_iter().flatten().collect::<Vec<_>>(), |l: &Launch| {
            let (x, codes, scales) = (l.address(0)?, l.address(1)?, l.address(2)?);
            let amax = if out.is_fp4() { l.address(3)? } else { 0 };
            self.launch_kernel(l, kernel, grid, &EmulateArgs { x, out: codes, scales, amax, ..args })
        })
    }

    pub(super) fn launch_dequantize_microscaled(
        &self,
        s: &Stream,
        q: &MicroscaledTensor,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "dequantize_microscaled";
        q.check_dequantize(OP, out)?;
        let (along, hadamard) = (q.along, q.hadamard);
        let how = match q.amax {
            Some(_) => EmulatedFormat::Nvfp4 { along, square: false, hadamard, stochastic: None },
            None => EmulatedFormat::Mxfp8 { format: q.data.dtype(), along, square: false },
        };
        let (args, grid) = EmulateArgs::new(OP, how, &crate::quant::check::matrix(OP, out)?)?;
        let kernel: Result<Kernel> = input!(OP, out.dtype(), "quant/microscale", "dequantize");
        let (kernel, args) = (kernel?, args.of(q));
        let all = [Some(read(&q.data)), Some(write(out)), Some(read(&q.scales)), q.amax.as_ref().map(read)];
        s.launch(OP, &all.into_iter().flatten().collect::<Vec<_>>(), |l: &Launch| {
            let (x, out, scales) = (l.address(0)?, l.address(1)?, l.address(2)?);
            let amax = if q.is_fp4() { l.address(3)? } else { 0 };
            self.launch_kernel(l, kernel, grid, &EmulateArgs { x, out, scales, amax, ..args })
        })
    }

    /// Swizzles the scales of both operands of a GEMM, and computes alpha and beta where the operands have an amax.
    pub(super) fn launch_swizzle(
        &self,
        s: &Stream,
        operands: [StoredScales; 2],
        amax: Option<[&Tensor; 2]>,
        accumulate: bool,
    ) -> Result<GemmScales> {
        const OP: &str = "swizzle scales";
        let make = |of: &StoredScales| {
            let bytes = of.tiles().iter().product::<usize>() * TILE[0] * TILE[1];
            Tensor::empty(s, &[bytes], DType::U8, Category::Workspace)
        };
        let scales = [make(&operands[0])?, make(&operands[1])?];
        let factors = amax.map(|_| Tensor::empty(s, &[2], DType::F32, Category::Workspace)).transpose()?;
        let mut all =
            vec![read(operands[0].scales), write(&scales[0]), read(operands[1].scales), write(&scales[1])];
        all.extend(factors.as_ref().map(write));
        all.extend(amax.iter().flatten().map(|t| read(t)));
        s.launch(OP, &all, |l: &Launch| {
            for (i, of) in operands.iter().enumerate() {
                let [down, across] = of.tiles();
                let mut args = SwizzleArgs {
                    scales: l.address(2 * i)?,
                    out: l.address(2 * i + 1)?,
                    across: blocks(OP, across, 1)?.max(1),
                    accumulate: accumulate.into(),
                    ..of.args
                };
                if i == 1 && factors.is_some() {
                    (args.factors, args.amax) = (l.address(4)?, [l.address(5)?, l.address(6)?]);
                }
                let grid = line(blocks(OP, down * across, 1)?, TILE[0] as u32);
                self.launch_kernel(l, Kernel::new("quant/microscale", "swizzle_scales"), grid, &args)?;
            }
            Ok(())
        })?;
        Ok(GemmScales { scales, factors })
    }
}

impl EmulateArgs {
    /// With the layout of an operand.
    fn of(self, q: &MicroscaledTensor) -> EmulateArgs {
        EmulateArgs { depth: q.depth() as i64, transposed: (q.along == BlockAxis::Cols).into(), ..self }
    }
}
