//! Initial values of parameters.

use super::{Init, Part};
use crate::Rank;
use ferrotron_kernels::NormalFill;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_tensor::{Result, Tensor};
use std::ops::Range;

/// Initial values of elements `range` of a logical tensor, computed on the host: the reference.
pub fn initial_values(seed: u64, part: &Part, range: Range<usize>) -> Vec<f32> {
    let stream = RandomStream::named(seed, &part.name);
    match part.init {
        Init::Constant(c) => vec![c; range.len()],
        Init::Normal(std) => range.map(|i| (f64::from(std) * stream.normal(i as u64)) as f32).collect(),
    }
}

/// Draws the initial values of elements `runs`, concatenated, into `out` f32 `[elements]` on its device.
pub fn draw_initial(rank: &Rank, part: &Part, runs: &[Range<usize>], out: &Tensor) -> Result<()> {
    let s = &rank.compute;
    let std = match part.init {
        Init::Constant(c) => return s.upload_into(out, &vec![c; out.numel()]),
        Init::Normal(std) => f64::from(std),
    };
    let stream = RandomStream::named(rank.seed, &part.name);
    let (mut at, mut rest) = (0, runs);
    while let Some((run, stride, rows)) = alike(rest) {
        let values = NormalFill { stream, first: run.start as u64, stride: stride as u64, std };
        let n = rows * run.len();
        rank.kernels.normal(s, values, &out.narrow(0, at, n)?.view(&[rows, run.len()])?)?;
        (at, rest) = (at + n, &rest[rows..]);
    }
    Ok(())
}

/// The first run, its stride to the next, and how many runs from it on have the same length and stride. Runs are in
/// order.
fn alike(runs: &[Range<usize>]) -> Option<(&Range<usize>, usize, usize)> {
    let run = runs.first()?;
    let stride = runs.get(1).map_or(0, |next| next.start - run.start);
    let follows =
        |pair: &&[Range<usize>]| pair[1].len() == run.len() && pair[1].start - pair[0].start == stride;
    Some((run, stride, 1 + runs.windows(2).take_while(follows).count()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupRank, Split};
    use ferrotron_tensor::{Category, DType};

    /// A rank draws the same values as the whole tensor has, whether its shard is cut by columns or in the middle of
    /// rows.
    #[test]
    fn a_rank_draws_its_values_of_the_whole() {
        let rank = Rank::cpu(2, 5).unwrap();
        for (split, most) in [
            (Split::Replicated, 1),
            (Split::Rows { unit: 1 }, 1),
            // A partial row at either end, and all rows between them in one launch.
            (Split::Columns { unit: 2 }, 3),
        ] {
            for init in [Init::Normal(0.02), Init::Constant(1.5)] {
                let part = Part { name: "w".into(), shape: vec![9, 10], init, split };
                let whole = initial_values(5, &part, 0..90);
                let cut = part.cut(GroupRank { rank: 1, size: 2 });
                let held = cut.take(&part.shape, &whole);
                for share in [0..held.len(), 0..0, 3..4, 3..held.len() - 2, 5..12] {
                    let runs = cut.runs_within(&part.shape, share.clone());
                    let all = Tensor::empty(&rank.compute, &[share.len()], DType::F32, Category::Workspace);
                    let out = all.unwrap();
                    draw_initial(&rank, &part, &runs, &out).unwrap();
                    let found = rank.compute.download::<f32>(&out).unwrap();
                    assert_eq!(found, held[share.clone()], "{split:?} {init:?} {share:?}");
                    let (mut rest, mut launches) = (&runs[..], 0);
                    while let Some((_, _, rows)) = alike(rest) {
                        (rest, launches) = (&rest[rows..], launches + 1);
                    }
                    assert!(launches <= most, "{split:?} {share:?} in {launches} launches");
                }
            }
        }
    }
}
