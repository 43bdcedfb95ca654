//! Emulated MXFP8 and NVFP4.

use super::input;
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{blocks, line};
use crate::cuda::philox::PhiloxStream;
use crate::cuda::{CudaKernels, Kernel};
use crate::quant::microscaling::{self, BlockAxis, EmulatedFormat};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, write};

/// As in emulate.cu: rows and columns of a tile, threads, and length of the Hadamard transform.
const SIDE: usize = 32;
const THREADS: u32 = 256;
const TURNED: usize = 16;

kernel_args! {
    header "args/quant_emulate.cuh", includes ["args/philox.cuh"];

    /// Rounds a matrix to MXFP8 or NVFP4 and back.
    #[derive(Default)]
    struct EmulateArgs {
        x: u64,
        out: u64,
        /// f32 `[1]`: amax of the tensor, after the Hadamard transform where there is one. NVFP4 only.
        amax: u64,
        r: i64,
        c: i64,
        stride: i64,
        /// Elements of a row, padding included: element (i, j) uses random byte i·pitch + j.
        pitch: i64,
        stream: PhiloxStream,
        /// Tiles along the columns.
        across: u32,
        /// log2 of a scaling block's rows and columns.
        down: u32,
        along: u32,
        /// NVFP4, or else MXFP8.
        four: u32,
        e5m2: u32,
        /// 16-point Hadamard transform: 0 none, 1 along rows, 2 along columns.
        hadamard: u32,
        /// Stochastic rounding.
        stochastic: u32,
        pad: u32,
    }
}

/// log2 of the rows and columns of a scaling block of `2^n` elements, or of `2^n × 2^n`.
fn block(n: u32, along: BlockAxis, square: bool) -> [u32; 2] {
    let of = |axis| if square || along == axis { n } else { 0 };
    [of(BlockAxis::Cols), of(BlockAxis::Rows)]
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
        let [r, c] = [view.outer, view.width];
        if r * c == 0 {
            return Ok(());
        }
        let mut args = EmulateArgs {
            r: r as i64,
            c: c as i64,
            stride: view.outer_stride as i64,
            ..EmulateArgs::default()
        };
        // Padding takes part in the Hadamard transform and has random bytes of its own.
        let (mut pitch, mut amax) = (c, None);
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
                        pitch = c.next_multiple_of(TURNED);
                    }
                }
                amax = Some(s.zeros(&[1], DType::F32, Category::Workspace)?);
            }
        }
        args.pitch = pitch as i64;
        args.across = blocks(OP, c, SIDE)?;
        let grid = line(blocks(OP, r.div_ceil(SIDE) * args.across as usize, 1)?, THREADS);
        if let Some(amax) = amax.as_ref().filter(|_| args.hadamard == 0) {
            self.launch_amax(s, x, amax)?;
        }
        let kernel: Result<Kernel> = input!(OP, x.dtype(), "quant/emulate", "emulate");
        let measure: Result<Kernel> = input!(OP, x.dtype(), "quant/emulate", "turned_amax");
        let (kernel, measure) = (kernel?, measure?);
        let all = [Some(read(x)), Some(write(out)), amax.as_ref().map(write)];
        s.launch(OP, &all.into_iter().flatten().collect::<Vec<_>>(), |l: &Launch| {
            (args.x, args.out) = (l.address(0)?, l.address(1)?);
            args.amax = if amax.is_some() { l.address(2)? } else { 0 };
            if args.hadamard != 0 {
                self.launch_kernel(l, measure, grid, &args)?;
            }
            self.launch_kernel(l, kernel, grid, &args)
        })
    }
}
