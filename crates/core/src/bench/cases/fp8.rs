//! FP8 GEMMs, and the quantization of their operands.

use super::{KernelCase, Sizes, attention_linears, case, empty, pass, random};
use crate::Result;
use crate::bench::KernelWork;
use ferrotron_engine::Rank;
use ferrotron_kernels::{
    Act, ActBackward, ActForward, Fp8Gemm, Fp8Tensor, Quantize, ScaleSource, ScalingMode,
};
use ferrotron_tensor::{Category, DType};

/// An FP8 tensor `[r, c]` of random values.
pub(in crate::bench) fn bytes(
    rank: &Rank,
    shape: [usize; 2],
    format: DType,
    scaling: ScalingMode,
) -> Result<Fp8Tensor> {
    let s = &rank.compute;
    let out = Fp8Tensor::empty(s, shape, format, scaling, Category::Workspace)?;
    let (x, amax) = (random(rank, &shape, DType::BF16)?, empty(rank, &[1], DType::F32)?);
    rank.kernels.amax(s, &x, &amax)?;
    let range = match scaling {
        ScalingMode::PerTensor => ScaleSource::Amax { amax: &amax, pow2: false },
        _ => ScaleSource::Blocks { pow2: true },
    };
    let q = Quantize { x: &x, range, rows: Some(&out), cols: None, sums: None };
    rank.kernels.quantize(s, &q)?;
    Ok(out)
}

/// Where the scale of a cast comes from.
#[derive(Clone, Copy, PartialEq)]
enum CastScale {
    Amax,
    Given,
    Rows,
    Tiles,
}

/// Casts of the widest activation, and the GEMMs of every linear layer: with per-tensor scaling (fast accumulation in
/// fprop, gradients in E5M2) and with block scaling.
pub(super) fn cases(z: &Sizes) -> Vec<KernelCase> {
    if z.dtype != DType::BF16 {
        return Vec::new();
    }
    let (m, t) = (&z.model, z.tokens);
    let up = if m.gated { 2 * m.ffn } else { m.ffn };
    let mut out = casts([t, m.ffn]);
    out.extend(activations_with_amax([t, m.ffn], m.gated));
    let attention = attention_linears(m);
    for (place, i, o) in
        attention.into_iter().chain([("mlp_up", m.hidden, up), ("mlp_down", m.ffn, m.hidden)])
    {
        let flops = KernelWork::Flops(2.0 * t as f64 * i as f64 * o as f64);
        for blocks in [false, true] {
            let (lines, tiles, back) = match blocks {
                true => (ScalingMode::Block1x128, ScalingMode::Block128x128, DType::E4M3),
                false => (ScalingMode::PerTensor, ScalingMode::PerTensor, DType::E5M2),
            };
            // Operands, contracted along their second axis, and the dtype of the result.
            let kinds = [
                ("forward", ([t, i], DType::E4M3, lines), ([o, i], tiles), DType::BF16),
                ("input_grad", ([t, o], back, lines), ([i, o], tiles), DType::BF16),
                ("weight_grad", ([o, t], back, lines), ([i, t], lines), DType::F32),
            ];
            for (kind, (a, format, scaling), (b, other), result) in kinds {
                let name = format!("fp8.gemm{}.{place}.{kind}", if blocks { "_blocks" } else { "" });
                let (shape, mkn) = (format!("{}x{}x{}", a[0], a[1], b[0]), [a[0], a[1], b[0]]);
                let made = case(name, shape, flops, move |rank| {
                    let c = empty(rank, &[a[0], b[0]], result)?;
                    let (a, b) = (bytes(rank, a, format, scaling)?, bytes(rank, b, DType::E4M3, other)?);
                    Ok(Box::new(move |rank| {
                        let fast = kind == "forward" && !blocks;
                        let (bias, accumulate, name) = (None, false, "gemm (fp8)");
                        let g = Fp8Gemm { a: &a, b: &b, bias, accumulate, fast, name, c: &c };
                        Ok(rank.kernels.fp8_gemm(&rank.compute, &g)?)
                    }))
                });
                out.push(made.with_gemm(pass(kind), 1, mkn));
            }
        }
    }
    out
}

fn casts([r, c]: [usize; 2]) -> Vec<KernelCase> {
    let shape = format!("{r}x{c}");
    let n = (r * c) as f64;
    let mut out = vec![case("fp8.amax", shape.clone(), KernelWork::Bytes(2.0 * n), move |rank| {
        let (x, amax) = (random(rank, &[r, c], DType::BF16)?, empty(rank, &[1], DType::F32)?);
        Ok(Box::new(move |rank| Ok(rank.kernels.amax(&rank.compute, &x, &amax)?)))
    })];
    for (name, scale_from, columns, sums) in [
        ("rows", CastScale::Amax, false, false),
        ("rows_cols", CastScale::Amax, true, false),
        ("given", CastScale::Given, true, false),
        ("given_sums", CastScale::Given, true, true),
        ("blocks", CastScale::Rows, true, false),
        ("tiles", CastScale::Tiles, true, false),
    ] {
        let work = KernelWork::Bytes(if columns { 4.0 * n } else { 3.0 * n });
        out.push(case(format!("fp8.quantize.{name}"), shape.clone(), work, move |rank| {
            let s = &rank.compute;
            let scaling = match scale_from {
                CastScale::Amax | CastScale::Given => ScalingMode::PerTensor,
                CastScale::Rows => ScalingMode::Block1x128,
                CastScale::Tiles => ScalingMode::Block128x128,
            };
            let make = |shape| Fp8Tensor::empty(s, shape, DType::E4M3, scaling, Category::Workspace);
            let (rows, cols) = (make([r, c])?, make([c, r])?);
            let x = random(rank, &[r, c], DType::BF16)?;
            let (scale, amax) = (random(rank, &[1], DType::F32)?, empty(rank, &[1], DType::F32)?);
            rank.kernels.amax(s, &x, &amax)?;
            let total = empty(rank, &[c], DType::F32)?;
            Ok(Box::new(move |rank| {
                let range = match scale_from {
                    CastScale::Amax => ScaleSource::Amax { amax: &amax, pow2: false },
                    CastScale::Given => ScaleSource::Given { scale: &scale, amax: &amax },
                    CastScale::Rows | CastScale::Tiles => ScaleSource::Blocks { pow2: true },
                };
                let (cols, sums) = (columns.then_some(&cols), sums.then_some((&total, false)));
                let q = Quantize { x: &x, range, rows: Some(&rows), cols, sums };
                Ok(rank.kernels.quantize(&rank.compute, &q)?)
            }))
        }));
    }
    out
}

/// Activation functions that also compute the amax; `activation.*` are those that do not.
fn activations_with_amax([r, f]: [usize; 2], gated: bool) -> Vec<KernelCase> {
    let up_width = if gated { 2 * f } else { f };
    let act = if gated { Act::Silu } else { Act::GeluTanh };
    let one = |name: &str, numbers: usize, back: bool| {
        let work = KernelWork::Bytes(2.0 * (r * numbers) as f64);
        case(format!("fp8.activation.{name}"), format!("{r}x{up_width}"), work, move |rank| {
            let (x, dx) =
                (random(rank, &[r, up_width], DType::BF16)?, empty(rank, &[r, up_width], DType::BF16)?);
            let (y, amax) = (random(rank, &[r, f], DType::BF16)?, empty(rank, &[1], DType::F32)?);
            Ok(Box::new(move |rank| {
                let (k, s) = (&rank.kernels, &rank.compute);
                match back {
                    false => k.act_forward_amax(s, &ActForward { act, gated, x: &x, y: &y }, &amax)?,
                    true => {
                        k.act_backward_amax(s, &ActBackward { act, gated, x: &x, dy: &y, dx: &dx }, &amax)?
                    }
                }
                Ok(())
            }))
        })
    };
    vec![one("forward", up_width + f, false), one("backward", 2 * up_width + f, true)]
}
