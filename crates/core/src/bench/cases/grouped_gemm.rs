//! Grouped GEMMs of experts, over tokens sorted by expert.

use super::fp8::bytes;
use super::{KernelCase, Sizes, case, empty, pass, random};
use crate::Result;
use crate::bench::KernelWork;
use ferrotron_engine::Rank;
use ferrotron_kernels::{
    Fp8GroupedGemm, Fp8GroupedWgrad, Fp8Tensor, GroupedGemm, GroupedWgrad, ScalingMode, Segments,
};
use ferrotron_tensor::{Category, DType, Tensor};

/// Experts, and experts per token.
const EXPERTS: usize = 128;
const TOP_K: usize = 8;

/// Tokens per expert: balanced; or skewed, with half of them on one expert, none on three in ten, and the rest uneven.
fn tokens_per_expert(rows: usize, skewed: bool) -> Vec<i32> {
    let parts: Vec<usize> = (0..EXPERTS)
        .map(|e| match e {
            _ if !skewed => 1,
            e if e % 10 < 3 => 0,
            5 => 0,
            e => 1 + e * 7 % 13,
        })
        .collect();
    let (total, shared) = (parts.iter().sum::<usize>(), if skewed { rows - rows / 2 } else { rows });
    let mut counts: Vec<usize> = parts.iter().map(|p| shared * p / total.max(1)).collect();
    // The remainder of the division goes to the most loaded expert.
    counts[5] += rows - counts.iter().sum::<usize>();
    counts.into_iter().map(|n| n as i32).collect()
}

/// Offsets and counts on the device.
fn segments(rank: &Rank, rows: usize, skewed: bool) -> Result<[Tensor; 2]> {
    let counts = tokens_per_expert(rows, skewed);
    let mut offsets = vec![0];
    for n in &counts {
        offsets.push(offsets.last().copied().unwrap_or(0) + n);
    }
    let up = |v: &[i32]| rank.compute.upload(v, &[v.len()], Category::Workspace);
    Ok([up(&offsets)?, up(&counts)?])
}

/// The same for a balanced load with every expert's rows at a multiple of 128, and the rows including that padding.
fn aligned_segments(rank: &Rank, rows: usize) -> Result<([Tensor; 2], usize)> {
    let counts = tokens_per_expert(rows, false);
    let mut offsets = vec![0];
    for n in &counts {
        let end = offsets.last().copied().unwrap_or(0) + n;
        offsets.push((end as u32).next_multiple_of(128) as i32);
    }
    let all = offsets.last().copied().unwrap_or(0) as usize;
    let up = |v: &[i32]| rank.compute.upload(v, &[v.len()], Category::Workspace);
    Ok(([up(&offsets)?, up(&counts)?], all))
}

/// Both linear layers of experts three eighths as wide as the model: fprop, dgrad and wgrad (`dW (+)= dyᵀ·x`), with
/// balanced and skewed load.
pub(super) fn cases(z: &Sizes) -> Vec<KernelCase> {
    let (rows, hidden, dtype) = (z.tokens * TOP_K, z.model.hidden, z.dtype);
    let ffn = (hidden * 3 / 8).next_multiple_of(8);
    let mut out = Vec::new();
    for (place, i, o) in [("up", hidden, 2 * ffn), ("down", ffn, hidden)] {
        let flops = KernelWork::Flops(2.0 * rows as f64 * i as f64 * o as f64);
        for skewed in [false, true] {
            let name = |kind: &str| format!("experts.{place}.{kind}{}", if skewed { ".skewed" } else { "" });
            for (kind, [k, n], as_stored) in [("forward", [i, o], false), ("input_grad", [o, i], true)] {
                let shape = format!("{EXPERTS}:{rows}x{k}x{n}");
                let made = case(name(kind), shape, flops, move |rank| {
                    let at = segments(rank, rows, skewed)?;
                    let x = random(rank, &[rows, k], dtype)?;
                    let w = random(rank, &[EXPERTS, o, i], dtype)?;
                    let y = empty(rank, &[rows, n], dtype)?;
                    Ok(Box::new(move |rank| {
                        let segments = Segments { offsets: &at[0], counts: &at[1] };
                        let g = GroupedGemm { x: &x, w: &w, as_stored, segments, bias: None, y: &y };
                        Ok(rank.kernels.grouped_gemm(&rank.compute, &g)?)
                    }))
                });
                out.push(made.with_gemm(pass(kind), EXPERTS, [rows, k, n]));
            }
            for (kind, accumulate) in [("weight_grad", false), ("weight_grad_added", true)] {
                let shape = format!("{EXPERTS}:{o}x{rows}x{i}");
                let made = case(name(kind), shape, flops, move |rank| {
                    let at = segments(rank, rows, skewed)?;
                    let (dy, x) = (random(rank, &[rows, o], dtype)?, random(rank, &[rows, i], dtype)?);
                    let dw = empty(rank, &[EXPERTS, o, i], DType::F32)?;
                    Ok(Box::new(move |rank| {
                        let segments = Segments { offsets: &at[0], counts: &at[1] };
                        let g = GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw, accumulate) };
                        Ok(rank.kernels.grouped_wgrad(&rank.compute, &g)?)
                    }))
                });
                out.push(made.with_gemm(pass(kind), EXPERTS, [o, rows, i]));
            }
        }
        if dtype == DType::BF16 {
            out.extend(fp8_cases(place, rows, [i, o], flops));
        }
    }
    out
}

/// The same in FP8 with balanced load: with per-tensor scaling (fast accumulation in fprop, gradients in E5M2) and
/// with block scaling.
fn fp8_cases(place: &'static str, rows: usize, [i, o]: [usize; 2], flops: KernelWork) -> Vec<KernelCase> {
    let mut out = Vec::new();
    for blocks in [false, true] {
        let (lines, tiles, back) = match blocks {
            true => (ScalingMode::Block1x128, ScalingMode::Block128x128, DType::E4M3),
            false => (ScalingMode::PerTensor, ScalingMode::PerTensor, DType::E5M2),
        };
        let name = |kind: &str| format!("fp8.experts{}.{place}.{kind}", if blocks { "_blocks" } else { "" });
        for (kind, [k, n], format, fast) in
            [("forward", [i, o], DType::E4M3, !blocks), ("input_grad", [o, i], back, false)]
        {
            let shape = format!("{EXPERTS}:{rows}x{k}x{n}");
            let made = case(name(kind), shape, flops, move |rank| {
                let at = segments(rank, rows, false)?;
                let x = bytes(rank, [rows, k], format, lines)?;
                let mut w = bytes(rank, [EXPERTS * n, k], DType::E4M3, tiles)?;
                if !blocks {
                    let scale_inv =
                        rank.compute.upload(&[0.01f32; EXPERTS], &[EXPERTS], Category::Workspace)?;
                    w = Fp8Tensor { scale_inv, ..w };
                }
                let y = empty(rank, &[rows, n], DType::BF16)?;
                Ok(Box::new(move |rank| {
                    let segments = Segments { offsets: &at[0], counts: &at[1] };
                    let g = Fp8GroupedGemm { x: &x, w: &w, segments, y: &y, fast, name: "grouped (fp8)" };
                    Ok(rank.kernels.fp8_grouped_gemm(&rank.compute, &g)?)
                }))
            });
            out.push(made.with_gemm(pass(kind), EXPERTS, [rows, k, n]));
        }
        let shape = format!("{EXPERTS}:{o}x{rows}x{i}");
        let made = case(name("weight_grad"), shape, flops, move |rank| {
            let ([offsets, counts], columns) = aligned_segments(rank, rows)?;
            let dy = bytes(rank, [o, columns], back, lines)?;
            let x = bytes(rank, [i, columns], DType::E4M3, lines)?;
            let dw = empty(rank, &[EXPERTS, o, i], DType::F32)?;
            Ok(Box::new(move |rank| {
                let segments = Segments { offsets: &offsets, counts: &counts };
                let g = Fp8GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw, false), fast: false };
                Ok(rank.kernels.fp8_grouped_wgrad(&rank.compute, &g)?)
            }))
        });
        out.push(made.with_gemm(pass("weight_grad"), EXPERTS, [o, rows, i]));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_per_expert_sum_to_all_rows() {
        for rows in [0, 1, 127, 131_072] {
            for skewed in [false, true] {
                assert_eq!(tokens_per_expert(rows, skewed).iter().sum::<i32>(), rows as i32);
            }
        }
        let skewed = tokens_per_expert(131_072, true);
        assert!(skewed[5] >= 65_536);
        assert!((38..=40).contains(&skewed.iter().filter(|n| **n == 0).count()));
    }
}
