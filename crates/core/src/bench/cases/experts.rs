//! Products of tokens sorted by expert.

use super::{Case, Sizes, case, empty, random};
use crate::Result;
use crate::bench::Work;
use ferrotron_engine::Rank;
use ferrotron_kernels::{Grouped, GroupedGrad, Segments};
use ferrotron_tensor::{Category, DType, Tensor};

/// Experts, and those a token goes to.
const EXPERTS: usize = 128;
const CHOSEN: usize = 8;

/// Rows of each expert: as many for all; or half of them for one, none for three in ten, and the rest in unequal parts.
fn load(rows: usize, skewed: bool) -> Vec<i32> {
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
    // What is left over by rounding goes where the half does.
    counts[5] += rows - counts.iter().sum::<usize>();
    counts.into_iter().map(|n| n as i32).collect()
}

/// Offsets and counts on the device.
fn segments(rank: &Rank, rows: usize, skewed: bool) -> Result<[Tensor; 2]> {
    let counts = load(rows, skewed);
    let mut offsets = vec![0];
    for n in &counts {
        offsets.push(offsets.last().copied().unwrap_or(0) + n);
    }
    let up = |v: &[i32]| rank.compute.upload(v, &[v.len()], Category::Workspace);
    Ok([up(&offsets)?, up(&counts)?])
}

/// Both maps of experts three eighths as wide as the model: `y = x·Wᵀ`, `dx = dy·W`, `dW (+)= dyᵀ·x`, with equal loads and
/// unequal ones.
pub(super) fn cases(z: &Sizes) -> Vec<Case> {
    let (rows, hidden, dtype) = (z.tokens * CHOSEN, z.model.hidden, z.dtype);
    let ffn = (hidden * 3 / 8).next_multiple_of(8);
    let mut out = Vec::new();
    for (place, i, o) in [("up", hidden, 2 * ffn), ("down", ffn, hidden)] {
        let flops = Work::Flops(2.0 * rows as f64 * i as f64 * o as f64);
        for skewed in [false, true] {
            let name = |kind: &str| format!("experts.{place}.{kind}{}", if skewed { ".skewed" } else { "" });
            for (kind, [k, n], as_stored) in [("forward", [i, o], false), ("input_grad", [o, i], true)] {
                let shape = format!("{EXPERTS}:{rows}x{k}x{n}");
                out.push(case(name(kind), shape, flops, move |rank| {
                    let at = segments(rank, rows, skewed)?;
                    let x = random(rank, &[rows, k], dtype)?;
                    let w = random(rank, &[EXPERTS, o, i], dtype)?;
                    let y = empty(rank, &[rows, n], dtype)?;
                    Ok(Box::new(move |rank| {
                        let segments = Segments { offsets: &at[0], counts: &at[1] };
                        let g = Grouped { x: &x, w: &w, as_stored, segments, bias: None, y: &y };
                        Ok(rank.kernels.grouped(&rank.compute, &g)?)
                    }))
                }));
            }
            for (kind, accumulate) in [("weight_grad", false), ("weight_grad_added", true)] {
                let shape = format!("{EXPERTS}:{o}x{rows}x{i}");
                out.push(case(name(kind), shape, flops, move |rank| {
                    let at = segments(rank, rows, skewed)?;
                    let (dy, x) = (random(rank, &[rows, o], dtype)?, random(rank, &[rows, i], dtype)?);
                    let dw = empty(rank, &[EXPERTS, o, i], DType::F32)?;
                    Ok(Box::new(move |rank| {
                        let segments = Segments { offsets: &at[0], counts: &at[1] };
                        let g = GroupedGrad { dy: &dy, x: &x, segments, dw: (&dw, accumulate) };
                        Ok(rank.kernels.grouped_grad(&rank.compute, &g)?)
                    }))
                }));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_all_the_rows() {
        for rows in [0, 1, 127, 131_072] {
            for skewed in [false, true] {
                assert_eq!(load(rows, skewed).iter().sum::<i32>(), rows as i32);
            }
        }
        let skewed = load(131_072, true);
        assert!(skewed[5] >= 65_536);
        assert!((38..=40).contains(&skewed.iter().filter(|n| **n == 0).count()));
    }
}
