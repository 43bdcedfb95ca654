//! Eight-bit products, and what makes bytes of their factors.

use super::{Case, Sizes, case, empty, random};
use crate::Result;
use crate::bench::Work;
use ferrotron_engine::Rank;
use ferrotron_kernels::{Act, Bytes, Gemm8, Quantise, Range, Scaling};
use ferrotron_tensor::{Category, DType};

/// Bytes of random numbers `[r, c]`.
pub(in crate::bench) fn bytes(
    rank: &Rank,
    shape: [usize; 2],
    format: DType,
    scaling: Scaling,
) -> Result<Bytes> {
    let s = &rank.compute;
    let out = Bytes::empty(s, shape, format, scaling, Category::Workspace)?;
    let (x, amax) = (random(rank, &shape, DType::BF16)?, empty(rank, &[1], DType::F32)?);
    rank.kernels.amax(s, &x, &amax)?;
    let range = match scaling {
        Scaling::Tensor => Range::Amax { amax: &amax, pow2: false },
        _ => Range::Blocks { pow2: true },
    };
    let q = Quantise { x: &x, range, rows: Some(&out), cols: None, sums: None };
    rank.kernels.quantise(s, &q)?;
    Ok(out)
}

/// Which scale a cast uses.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Amax,
    Given,
    Rows,
    Tiles,
}

/// The casts of the widest activation, and the products of every linear map of a layer: with one scale for a tensor
/// (the output with fast sums, gradients of the output in E5M2) and with blocks.
pub(super) fn cases(z: &Sizes) -> Vec<Case> {
    if z.dtype != DType::BF16 {
        return Vec::new();
    }
    let (m, t) = (&z.model, z.tokens);
    let up = if m.gated { 2 * m.ffn } else { m.ffn };
    let mut out = casts([t, m.ffn]);
    out.extend(measured([t, m.ffn], m.gated));
    let attention = m.attention_maps().into_iter().map(|map| (map.place, map.input, map.output));
    for (place, i, o) in attention.chain([("mlp_up", m.hidden, up), ("mlp_down", m.ffn, m.hidden)]) {
        let flops = Work::Flops(2.0 * t as f64 * i as f64 * o as f64);
        for blocks in [false, true] {
            let (lines, tiles, back) = match blocks {
                true => (Scaling::Rows, Scaling::Tiles, DType::E4M3),
                false => (Scaling::Tensor, Scaling::Tensor, DType::E5M2),
            };
            // Factors, contracted along their second axis, and the type of the result.
            let kinds = [
                ("forward", ([t, i], DType::E4M3, lines), ([o, i], tiles), DType::BF16),
                ("input_grad", ([t, o], back, lines), ([i, o], tiles), DType::BF16),
                ("weight_grad", ([o, t], back, lines), ([i, t], lines), DType::F32),
            ];
            for (kind, (a, format, scaling), (b, other), result) in kinds {
                let name = format!("fp8.gemm{}.{place}.{kind}", if blocks { "_blocks" } else { "" });
                let shape = format!("{}x{}x{}", a[0], a[1], b[0]);
                out.push(case(name, shape, flops, move |rank| {
                    let c = empty(rank, &[a[0], b[0]], result)?;
                    let (a, b) = (bytes(rank, a, format, scaling)?, bytes(rank, b, DType::E4M3, other)?);
                    Ok(Box::new(move |rank| {
                        let fast = kind == "forward" && !blocks;
                        let (bias, accumulate, name) = (None, false, "gemm (fp8)");
                        let g = Gemm8 { a: &a, b: &b, bias, accumulate, fast, name, c: &c };
                        Ok(rank.kernels.gemm8(&rank.compute, &g)?)
                    }))
                }));
            }
        }
    }
    out
}

fn casts([r, c]: [usize; 2]) -> Vec<Case> {
    let shape = format!("{r}x{c}");
    let n = (r * c) as f64;
    let mut out = vec![case("fp8.amax", shape.clone(), Work::Bytes(2.0 * n), move |rank| {
        let (x, amax) = (random(rank, &[r, c], DType::BF16)?, empty(rank, &[1], DType::F32)?);
        Ok(Box::new(move |rank| Ok(rank.kernels.amax(&rank.compute, &x, &amax)?)))
    })];
    for (name, way, columns, sums) in [
        ("rows", Way::Amax, false, false),
        ("rows_cols", Way::Amax, true, false),
        ("given", Way::Given, true, false),
        ("given_sums", Way::Given, true, true),
        ("blocks", Way::Rows, true, false),
        ("tiles", Way::Tiles, true, false),
    ] {
        let work = Work::Bytes(if columns { 4.0 * n } else { 3.0 * n });
        out.push(case(format!("fp8.quantise.{name}"), shape.clone(), work, move |rank| {
            let s = &rank.compute;
            let scaling = match way {
                Way::Amax | Way::Given => Scaling::Tensor,
                Way::Rows => Scaling::Rows,
                Way::Tiles => Scaling::Tiles,
            };
            let make = |shape| Bytes::empty(s, shape, DType::E4M3, scaling, Category::Workspace);
            let (rows, cols) = (make([r, c])?, make([c, r])?);
            let x = random(rank, &[r, c], DType::BF16)?;
            let (scale, amax) = (random(rank, &[1], DType::F32)?, empty(rank, &[1], DType::F32)?);
            rank.kernels.amax(s, &x, &amax)?;
            let total = empty(rank, &[c], DType::F32)?;
            Ok(Box::new(move |rank| {
                let range = match way {
                    Way::Amax => Range::Amax { amax: &amax, pow2: false },
                    Way::Given => Range::Given { scale: &scale, amax: &amax },
                    Way::Rows | Way::Tiles => Range::Blocks { pow2: true },
                };
                let (cols, sums) = (columns.then_some(&cols), sums.then_some((&total, false)));
                let q = Quantise { x: &x, range, rows: Some(&rows), cols, sums };
                Ok(rank.kernels.quantise(&rank.compute, &q)?)
            }))
        }));
    }
    out
}

/// Activations that are measured on the way; `activation.*` is without.
fn measured([r, f]: [usize; 2], gated: bool) -> Vec<Case> {
    let wide = if gated { 2 * f } else { f };
    let act = if gated { Act::Silu } else { Act::GeluTanh };
    let one = |name: &str, numbers: usize, back: bool| {
        let work = Work::Bytes(2.0 * (r * numbers) as f64);
        case(format!("fp8.activation.{name}"), format!("{r}x{wide}"), work, move |rank| {
            let (x, dx) = (random(rank, &[r, wide], DType::BF16)?, empty(rank, &[r, wide], DType::BF16)?);
            let (y, amax) = (random(rank, &[r, f], DType::BF16)?, empty(rank, &[1], DType::F32)?);
            Ok(Box::new(move |rank| {
                let (k, s) = (&rank.kernels, &rank.compute);
                match back {
                    false => k.act_forward_amax(s, act, gated, &x, &y, &amax)?,
                    true => k.act_backward_amax(s, act, gated, &x, &y, &dx, &amax)?,
                }
                Ok(())
            }))
        })
    };
    vec![one("forward", wide + f, false), one("backward", 2 * wide + f, true)]
}
