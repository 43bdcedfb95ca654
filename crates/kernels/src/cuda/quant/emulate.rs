//! Emulated MXFP8 and NVFP4.

use super::input;
use crate::cpu::rows::Rows;
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{blocks, line};
use crate::cuda::philox::PhiloxStream;
use crate::cuda::{CudaKernels, Kernel, LaunchConfig};
use crate::quant::microscaling::{self, BlockAxis, EmulatedFormat};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, write};

/// As in microscaling.cuh: rows and columns of a tile, threads, and length of the Hadamard transform.
const SIDE: usize = 32;
const THREADS: u32 = 256;
const HADAMARD_LEN: usize = 16;

kernel_args! {
    header "args/quant_emulate.cuh", includes ["args/philox.cuh"];

    /// Rounds a matrix to MXFP8 or NVFP4 and back, or to codes and scales.
    #[derive(Default)]
    pub(super) struct EmulateArgs {
        /// The matrix; codes where they are dequantized.
        pub(super) x: u64,
        /// The rounded matrix, or codes.
        pub(super) out: u64,
        /// f32 `[1]`: amax of the tensor, after the Hadamard transform where there is one. NVFP4 only.
        pub(super) amax: u64,
        /// Scales of an operand, E8M0 or E4M3.
        pub(super) scales: u64,
        pub(super) r: i64,
        pub(super) c: i64,
        pub(super) stride: i64,
        /// Elements of a row, padding included: element (i, j) uses random byte i·pitch + j.
        pub(super) pitch: i64,
        /// Codes of a line of an operand.
        pub(super) depth: i64,
        pub(super) stream: PhiloxStream,
        /// Tiles along the columns.
        pub(super) across: u32,
        /// log2 of a scaling block's rows and columns.
        pub(super) down: u32,
        pub(super) along: u32,
        /// NVFP4, or else MXFP8.
        pub(super) four: u32,
        pub(super) e5m2: u32,
        /// 16-point Hadamard transform: 0 none, 1 along rows, 2 along columns.
        pub(super) hadamard: u32,
        /// Stochastic rounding.
        pub(super) stochastic: u32,
        /// The operand is the transpose of the matrix.
        pub(super) transposed: u32,
    }
}

/// log2 of the rows and columns of a scaling block of `2^n` elements, or of `2^n × 2^n`.
fn block(n: u32, along: BlockAxis, square: bool) -> [u32; 2] {
    let of = |axis| if square || along == axis { n } else { 0 };
    [of(BlockAxis::Cols), of(BlockAxis::Rows)]
}

impl EmulateArgs {
    /// Arguments for a matrix, without addresses, and the grid.
    pub(super) fn new(
        op: &'static str,
        how: EmulatedFormat,
        view: &Rows,
    ) -> Result<(EmulateArgs, LaunchConfig)> {
        let [r, c] = [view.outer, view.width];
        let mut args = EmulateArgs {
            r: r as i64,
            c: c as i64,
            stride: view.outer_stride as i64,
            across: blocks(op, c, SIDE)?,
            ..EmulateArgs::default()
        };
        // Padding takes part in the Hadamard transform and has random bytes of its own.
        let mut pitch = c;
        match how {
            EmulatedFormat::Mxfp8 { format, along, square } => {
                [args.down, args.along] = block(5, along, square);
                args.e5m2 = (format == DType::E5M2).into();
            }
            EmulatedFormat::Nvfp4 { along, square, hadamard, stochastic } => {
                [args.down, args.along] = block(4, along, square);
                (args.four, args.stochastic) = (1, stochastic.is_some().into());
                args.stream = stochastic.map(PhiloxStream::from).unwrap_or_default();
                if hadamard {
                    args.hadamard = if along == BlockAxis::Rows { 1 } else { 2 };
                    if along == BlockAxis::Rows {
                        pitch = c.next_multiple_of(HADAMARD_LEN);
                    }
                }
            }
        }
        args.pitch = pitch as i64;
        let grid = line(blocks(op, r.div_ceil(SIDE) * args.across as usize, 1)?, THREADS);
        Ok((args, grid))
    }
}

impl CudaKernels {
    pub(super) fn launch_emulate(
        &self,
        s: &Stream,
        how: EmulatedFormat,
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "emulate";
        let view = microscaling::check(OP, how, x, out)?;
        if view.outer * view.width == 0 {
            return Ok(());
        }
        let (mut args, grid) = EmulateArgs::new(OP, how, &view)?;
        let amax = match args.four {
            0 => None,
            _ => Some(s.zeros(&[1], DType::F32, Category::Workspace)?),
        };
        if let Some(amax) = &amax {
            self.launch_format_amax(s, (args, grid), x, amax)?;
        }
        let kernel: Result<Kernel> = input!(OP, x.dtype(), "quant/emulate", "emulate");
        let kernel = kernel?;
        let all = [Some(read(x)), Some(write(out)), amax.as_ref().map(read)];
        s.launch(OP, &all.into_iter().flatten().collect::<Vec<_>>(), |l: &Launch| {
            (args.x, args.out) = (l.address(0)?, l.address(1)?);
            args.amax = if amax.is_some() { l.address(2)? } else { 0 };
            self.launch_kernel(l, kernel, grid, &args)
        })
    }

    /// Raises `amax` f32 `[1]`, which holds 0, to that of a tensor, after the Hadamard transform where there is one.
    pub(super) fn launch_format_amax(
        &self,
        s: &Stream,
        (mut args, grid): (EmulateArgs, LaunchConfig),
        x: &Tensor,
        amax: &Tensor,
    ) -> Result<()> {
        const OP: &str = "amax";
        if args.hadamard == 0 {
            return self.launch_amax(s, x, amax);
        }
        let kernel: Result<Kernel> = input!(OP, x.dtype(), "quant/emulate", "turned_amax");
        let kernel = kernel?;
        s.launch(OP, &[read(x), write(amax)], |l: &Launch| {
            (args.x, args.amax) = (l.address(0)?, l.address(1)?);
            self.launch_kernel(l, kernel, grid, &args)
        })
    }
}
