//! CPU kernels at every instruction-set level, and inputs in the dtype of the case.

use super::golden::Tensors;
use ferrotron_kernels::cpu::quant::{Blocks, Orientation, SmallBlocks, mxfp8_quantize, quantize_blocks};
use ferrotron_kernels::cpu::rows::RowsView;
use ferrotron_kernels::cpu::{CpuContext, CpuKernels, Isa};
use ferrotron_kernels::quant::scale::{ScaleRule, largest};
use ferrotron_kernels::{ALIGN, Fp8Tensor, ScalingMode};
use ferrotron_tensor::fp8::{E4m3, E5m2, E8m0};
use ferrotron_tensor::{Category, DType, Device, Element, Float, Stream, Tensor, Threads, bf16, f16};
use safetensors::Dtype;

/// CPU kernels at one instruction-set level.
pub struct Host {
    pub isa: Isa,
    pub k: CpuKernels,
    pub s: Stream,
}

impl Host {
    pub fn all() -> Vec<Host> {
        let stream = || Device::cpu(Threads::new(2).unwrap()).stream("compute").unwrap();
        Isa::all().into_iter().map(|isa| Host { isa, k: CpuKernels::with(isa), s: stream() }).collect()
    }

    pub fn up<T: Element>(&self, values: &[T], shape: &[usize]) -> Tensor {
        self.s.upload(values, shape, Category::Workspace).unwrap()
    }

    pub fn f32(&self, t: &Tensor) -> Vec<f32> {
        self.s.download(t).unwrap()
    }

    pub fn fp8_tensor(&self, shape: [usize; 2], format: DType, scaling: ScalingMode) -> Fp8Tensor {
        Fp8Tensor::empty(&self.s, shape, format, scaling, Category::Workspace).unwrap()
    }

    /// The codes without their padding, which must be zero.
    pub fn codes(&self, b: &Fp8Tensor) -> Vec<u8> {
        let raw: Vec<u8> = self.s.download(&b.data.as_bytes().unwrap()).unwrap();
        let mut out = Vec::new();
        for row in raw.chunks(b.cols.next_multiple_of(ALIGN).max(1)) {
            out.extend_from_slice(&row[..b.cols]);
            assert!(row[b.cols..].iter().all(|c| *c == 0), "padding");
        }
        out
    }
}

/// An input in the dtype that the case states.
pub enum Input {
    F32(Vec<f32>),
    BF16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Input {
    pub fn read(t: &Tensors, name: &str, declared: Option<&str>) -> (Input, [usize; 2]) {
        let (dtype, shape, data) = t.raw(name);
        let halves = || data.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
        let input = match dtype {
            Dtype::F32 => {
                Input::F32(data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
            }
            Dtype::BF16 => Input::BF16(halves().map(bf16::from_bits).collect()),
            Dtype::F16 => Input::F16(halves().map(f16::from_bits).collect()),
            other => panic!("{name}: {other:?}"),
        };
        let same = match declared {
            None => true,
            Some("f32") => dtype == Dtype::F32,
            Some("bf16") => dtype == Dtype::BF16,
            Some("f16" | "fp16") => dtype == Dtype::F16,
            Some(other) => panic!("{name}: the format has no dtype {other}"),
        };
        assert!(same, "{name}: {dtype:?} declared {declared:?}");
        (input, shape.try_into().unwrap())
    }

    pub fn tensor(&self, h: &Host, shape: [usize; 2]) -> Tensor {
        match self {
            Input::F32(x) => h.up(x, &shape),
            Input::BF16(x) => h.up(x, &shape),
            Input::F16(x) => h.up(x, &shape),
        }
    }

    /// Quantizes by blocks with a lower bound on amax, which the trait does not have.
    pub fn blocks(
        &self,
        h: &Host,
        how: Orientation,
        shape: [usize; 2],
        scaling: BlockScaling,
    ) -> (Vec<u8>, Vec<f32>) {
        match self {
            Input::F32(x) => with_eps(h, x, how, shape, scaling),
            Input::BF16(x) => with_eps(h, x, how, shape, scaling),
            Input::F16(x) => with_eps(h, x, how, shape, scaling),
        }
    }

    pub fn mxfp8(&self, isa: Isa, grid: SmallBlocks, format: DType) -> (Vec<u8>, Vec<E8m0>) {
        match self {
            Input::F32(x) => mxfp8(isa, x, grid, format),
            Input::BF16(x) => mxfp8(isa, x, grid, format),
            Input::F16(x) => mxfp8(isa, x, grid, format),
        }
    }
}

/// Quantization with a scale per block.
#[derive(Clone, Copy)]
pub struct BlockScaling {
    pub format: DType,
    pub mode: ScalingMode,
    /// Scales are powers of two.
    pub pow2: bool,
    /// Lower bound on the amax of a block.
    pub eps: f32,
}

fn with_eps<T: Float>(
    h: &Host,
    x: &[T],
    how: Orientation,
    [r, c]: [usize; 2],
    scaling: BlockScaling,
) -> (Vec<u8>, Vec<f32>) {
    let BlockScaling { format, mode: scaling, pow2, eps } = scaling;
    let rule = ScaleRule { eps, ..ScaleRule::block(largest("test", format).unwrap(), pow2, T::DTYPE) };
    let [m, n] = if how == Orientation::Rows { [r, c] } else { [c, r] };
    let (width, blocks) = (n.next_multiple_of(ALIGN), Blocks { scaling, rule });
    let mut scales = vec![f32::NAN; scaling.scales(m, n).iter().product()];
    let (threads, x) = (Threads::new(2).unwrap(), RowsView::dense(x, r, c));
    let cpu = CpuContext::new(&threads, h.isa);
    let codes: Vec<u8> = match format {
        DType::E4M3 => {
            let mut q = vec![E4m3(0xff); m * width];
            quantize_blocks(cpu, how, x, blocks, &mut q, &mut scales).unwrap();
            q.iter().map(|q| q.0).collect()
        }
        _ => {
            let mut q = vec![E5m2(0xff); m * width];
            quantize_blocks(cpu, how, x, blocks, &mut q, &mut scales).unwrap();
            q.iter().map(|q| q.0).collect()
        }
    };
    let unpadded = codes.chunks(width.max(1)).flat_map(|row| row[..n].to_vec()).collect();
    (unpadded, scales)
}

fn mxfp8<T: Float>(isa: Isa, x: &[T], grid: SmallBlocks, format: DType) -> (Vec<u8>, Vec<E8m0>) {
    let mut scales = vec![E8m0(7); grid.blocks().iter().product()];
    let (threads, n) = (Threads::new(2).unwrap(), x.len());
    let (cpu, x) = (CpuContext::new(&threads, isa), RowsView::dense(x, grid.r, grid.c));
    if format == DType::E4M3 {
        let mut codes = vec![E4m3(0xff); n];
        mxfp8_quantize(cpu, grid, x, &mut codes, &mut scales).unwrap();
        (codes.iter().map(|q| q.0).collect(), scales)
    } else {
        let mut codes = vec![E5m2(0xff); n];
        mxfp8_quantize(cpu, grid, x, &mut codes, &mut scales).unwrap();
        (codes.iter().map(|q| q.0).collect(), scales)
    }
}
