//! Microscaled operands on the host: the reference of devices with kernels for them, and the way of those without.

use super::{BlockAxis, EmulatedFormat, MicroscaledTensor};
use crate::cpu::quant::hadamard::{inverse_transform, transform};
use crate::cpu::quant::{
    MX_BLOCK, NV_BLOCK, SmallBlocks, amax, global_scale, mxfp8_quantize, nvfp4_quantize, pack,
};
use crate::cpu::rows::{Rows, RowsView};
use crate::cpu::{CpuContext, Isa};
use ferrotron_tensor::fp8::{E2m1, E4m3, E5m2, E8m0};
use ferrotron_tensor::{DType, Element, Error, Float, Result, Stream, Tensor, bf16, f16};

/// Codes (one per byte) and scales of a matrix, in its own layout.
struct Codes {
    codes: Vec<u8>,
    grid: SmallBlocks,
    scales: Vec<u8>,
    /// NVFP4: amax of the tensor.
    amax: f32,
}

fn codes<T: Float>(cpu: CpuContext, how: EmulatedFormat, x: RowsView<'_, T>) -> Result<Codes> {
    fn mx<F, T>(cpu: CpuContext, grid: SmallBlocks, x: RowsView<'_, T>) -> Result<Codes>
    where
        F: crate::cpu::quant::Format + bytemuck::Pod,
        T: Float,
    {
        let mut codes = vec![<F as bytemuck::Zeroable>::zeroed(); grid.r * grid.c];
        let mut scales = vec![E8m0(0); grid.blocks().iter().product()];
        mxfp8_quantize(cpu, grid, x, &mut codes, &mut scales)?;
        let (codes, scales) = (bytemuck::cast_slice(&codes).to_vec(), bytemuck::cast_slice(&scales).to_vec());
        Ok(Codes { codes, grid, scales, amax: 0.0 })
    }
    let shape = [x.rows.outer, x.rows.width];
    match how {
        EmulatedFormat::Mxfp8 { format, along, square } => {
            let grid = SmallBlocks::new(shape, MX_BLOCK, along, square);
            if format == DType::E5M2 { mx::<E5m2, T>(cpu, grid, x) } else { mx::<E4m3, T>(cpu, grid, x) }
        }
        EmulatedFormat::Nvfp4 { along, square, hadamard, stochastic } => {
            if hadamard {
                let (values, [r, c]) = transform(cpu, along, x);
                let plain = EmulatedFormat::Nvfp4 { along, square, hadamard: false, stochastic };
                return codes(cpu, plain, RowsView::dense(&values, r, c));
            }
            let grid = SmallBlocks::new(shape, NV_BLOCK, along, square);
            let mut codes = vec![E2m1(0); grid.r * grid.c];
            let mut scales = vec![E4m3(0); grid.blocks().iter().product()];
            nvfp4_quantize(cpu, grid, stochastic, x, &mut codes, &mut scales)?;
            let (codes, scales) = (codes.iter().map(|c| c.0).collect(), scales.iter().map(|s| s.0).collect());
            Ok(Codes { codes, grid, scales, amax: amax(cpu, x)? })
        }
    }
}

/// [`super::MicroscalingKernels::microscale`].
pub(crate) fn microscale(s: &Stream, how: EmulatedFormat, x: &Tensor, out: &MicroscaledTensor) -> Result<()> {
    const OP: &str = "microscale";
    let rows = out.check_quantize(OP, how, x)?;
    if s.device().is_meta() {
        return Ok(());
    }
    fn found<T: Float + Element>(s: &Stream, how: EmulatedFormat, x: &Tensor, rows: Rows) -> Result<Codes> {
        let values = s.download::<T>(x)?;
        let dense = RowsView::dense(&values, rows.outer, rows.width);
        let mut all = None;
        s.launch(OP, &[], |l| {
            all = Some(codes(CpuContext { threads: l.threads(), isa: Isa::detect() }, how, dense)?);
            Ok(())
        })?;
        all.ok_or(Error::Unsupported { op: OP, what: "the launch did not run".into() })
    }
    let Codes { codes, grid, scales, amax } = match x.dtype() {
        DType::F32 => found::<f32>(s, how, x, rows)?,
        DType::BF16 => found::<bf16>(s, how, x, rows)?,
        DType::F16 => found::<f16>(s, how, x, rows)?,
        found => return Err(Error::DType { op: OP, found, wanted: DType::F32 }),
    };
    // Lines of the operand are rows or columns of the matrix.
    let (r, d, block) = (out.rows(), out.depth(), if out.is_fp4() { NV_BLOCK } else { MX_BLOCK });
    let place = |line: usize, k: usize| if out.along == BlockAxis::Rows { [line, k] } else { [k, line] };
    let (mut data, mut bytes) = (vec![0u8; r * d], vec![0u8; r * d / block]);
    for line in 0..r {
        for k in 0..d {
            let [i, j] = place(line, k);
            if i < grid.r && j < grid.c {
                data[line * d + k] = codes[i * grid.c + j];
                bytes[(line * d + k) / block] = scales[i / grid.h * grid.blocks()[1] + j / grid.w];
            }
        }
    }
    s.upload_into(&out.scales, &bytes)?;
    match (&out.amax, out.data.dtype()) {
        (Some(to), _) => {
            s.upload_into(to, &[amax])?;
            s.upload_into(&out.data, &pack(bytemuck::cast_slice::<u8, E2m1>(&data), d))
        }
        (None, DType::E5M2) => s.upload_into(&out.data, bytemuck::cast_slice::<u8, E5m2>(&data)),
        (None, _) => s.upload_into(&out.data, bytemuck::cast_slice::<u8, E4m3>(&data)),
    }
}

/// [`super::MicroscalingKernels::dequantize_microscaled`].
pub(crate) fn dequantize(s: &Stream, q: &MicroscaledTensor, out: &Tensor) -> Result<()> {
    const OP: &str = "dequantize_microscaled";
    q.check_dequantize(OP, out)?;
    if s.device().is_meta() {
        return Ok(());
    }
    let scales = s.download::<u8>(&q.scales)?;
    let (codes, scales): (Vec<f32>, Vec<f32>) = match &q.amax {
        Some(amax) => {
            let inverse = 1.0 / global_scale(s.download::<f32>(amax)?[0]);
            let both = |b: u8| [b & 15, b >> 4].map(|code| E2m1(code).decode());
            let codes = s.download::<u8>(&q.data)?.into_iter().flat_map(both).collect();
            (codes, scales.into_iter().map(|b| E4m3(b).decode() * inverse).collect())
        }
        None => {
            let codes = match q.data.dtype() {
                DType::E5M2 => s.download::<E5m2>(&q.data)?.into_iter().map(E5m2::decode).collect(),
                _ => s.download::<E4m3>(&q.data)?.into_iter().map(E4m3::decode).collect(),
            };
            (codes, scales.into_iter().map(|b| E8m0(b).decode()).collect())
        }
    };
    let (r, d, block) = (q.rows(), q.depth(), if q.is_fp4() { NV_BLOCK } else { MX_BLOCK });
    let shape = if q.along == BlockAxis::Rows { [r, d] } else { [d, r] };
    let mut values = vec![0f32; r * d];
    for (at, code) in codes.iter().enumerate() {
        let (line, k) = (at / d, at % d);
        let to = if q.along == BlockAxis::Rows { at } else { k * r + line };
        values[to] = code * scales[at / block];
    }
    if q.hadamard && !values.is_empty() {
        s.launch(OP, &[], |l| {
            let cpu = CpuContext { threads: l.threads(), isa: Isa::detect() };
            inverse_transform(cpu, q.along, shape, &mut values);
            Ok(())
        })?;
    }
    // Without the padding.
    let [rows, cols] = q.matrix_shape();
    let inside = values.chunks(shape[1].max(1)).take(rows).flat_map(|row| &row[..cols]);
    fn upload<'a, T: Float + Element>(
        s: &Stream,
        out: &Tensor,
        values: impl Iterator<Item = &'a f32>,
    ) -> Result<()> {
        s.upload_into(out, &values.map(|x| T::from_f32(*x)).collect::<Vec<_>>())
    }
    match out.dtype() {
        DType::F32 => upload::<f32>(s, out, inside),
        DType::BF16 => upload::<bf16>(s, out, inside),
        DType::F16 => upload::<f16>(s, out, inside),
        found => Err(Error::DType { op: OP, found, wanted: DType::F32 }),
    }
}
