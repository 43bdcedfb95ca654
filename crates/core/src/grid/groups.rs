//! Groups that are parts or unions of axis groups: the embedding group and Megatron's optimizer instances.
//!
//! Every other group is named by its axes (`dp-cp`) and needs no entry here, see [`super::Grid::groups`].

use super::axes::Axis::{self, Cp, Dp, Ep, Pp, Tp};

/// Which of the two grids a group is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GridKind {
    /// tp × cp × dp × pp.
    Dense,
    /// etp × ep × edp × pp.
    Expert,
}

/// How the members are selected from the groups along a rule's axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Members {
    /// The first and the last rank of each: the pipeline stages that hold a tied embedding.
    FirstAndLast,
    /// The first rank of each.
    First,
    /// The ranks of one optimizer instance: a contiguous slice.
    WithinInstance,
    /// The ranks at the same position of every optimizer instance.
    AcrossInstances,
    /// All ranks of one optimizer instance: consecutive groups joined.
    WholeInstance,
}

/// A group derived from the groups along some axes.
#[derive(Clone, Copy, Debug)]
pub(super) struct DerivedGroup {
    name: &'static str,
    pub(super) grid: GridKind,
    pub(super) axes: &'static [Axis],
    members: Members,
}

/// All derived groups, under Megatron's names.
const DERIVED: [DerivedGroup; 7] = {
    use GridKind::{Dense, Expert};
    use Members::*;
    const fn group(
        name: &'static str,
        grid: GridKind,
        axes: &'static [Axis],
        members: Members,
    ) -> DerivedGroup {
        DerivedGroup { name, grid, axes, members }
    }
    [
        group("embd", Dense, &[Pp], FirstAndLast),
        group("pos-embd", Dense, &[Pp], First),
        group("intra-dp-cp", Dense, &[Dp, Cp], WithinInstance),
        group("inter-dp-cp", Dense, &[Dp, Cp], AcrossInstances),
        group("intra-edp", Expert, &[Dp], WithinInstance),
        group("inter-edp", Expert, &[Dp], AcrossInstances),
        group("instance", Expert, &[Tp, Ep, Pp], WholeInstance),
    ]
};

impl DerivedGroup {
    pub(super) fn find(name: &str) -> Option<DerivedGroup> {
        DERIVED.into_iter().find(|group| group.name == name)
    }

    /// The derived groups, from the groups along the axes and the number of optimizer instances.
    pub(super) fn select(&self, groups: Vec<Vec<usize>>, instances: usize) -> Vec<Vec<usize>> {
        let level_of = |ranks: &Vec<usize>, level| {
            let within = (ranks.len() / instances).max(1);
            hierarchical(ranks, &[within, instances], level)
        };
        match self.members {
            Members::FirstAndLast => groups
                .into_iter()
                .map(|ranks| match ranks[..] {
                    [first, .., last] => vec![first, last],
                    _ => ranks,
                })
                .collect(),
            Members::First => groups.into_iter().map(|ranks| ranks.into_iter().take(1).collect()).collect(),
            Members::WithinInstance => groups.iter().flat_map(|ranks| level_of(ranks, 0)).collect(),
            Members::AcrossInstances => groups.iter().flat_map(|ranks| level_of(ranks, 1)).collect(),
            Members::WholeInstance => groups
                .chunks((groups.len() / instances).max(1))
                .map(|part| {
                    let mut ranks = part.concat();
                    ranks.sort_unstable();
                    ranks
                })
                .collect(),
        }
    }
}

/// One level of a hierarchy over a list of ranks. `sizes` are innermost first and multiply to the list's length. Level
/// `l` takes every `Π sizes[..l]`-th rank: 8 ranks by `[4, 2]` give `[0-3] [4-7]` at level 0 and
/// `[0,4] [1,5] [2,6] [3,7]` at level 1.
pub(super) fn hierarchical(ranks: &[usize], sizes: &[usize], level: usize) -> Vec<Vec<usize>> {
    let stride: usize = sizes.iter().take(level).product();
    let size = sizes.get(level).copied().unwrap_or(1);
    ranks
        .chunks(stride * size)
        .flat_map(|block| (0..stride).map(move |k| block.iter().skip(k).step_by(stride).copied().collect()))
        .collect()
}
