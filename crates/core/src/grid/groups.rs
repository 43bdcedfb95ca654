//! Every group there is, as a table.

use super::axes::Axis::{self, Cp, Dp, Ep, Pp, Tp};

/// Which of the two grids a group is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GridKind {
    /// tp, cp, dp, pp.
    Dense,
    /// etp, ep, edp, pp.
    Expert,
}

/// What is made of the lists in which a rule's axes vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupMembers {
    /// Taken as they are.
    Whole,
    /// The first and the last rank of each: the two holders of a tied embedding.
    Ends,
    /// The first rank of each.
    First,
    /// The ranks of one optimizer instance: a contiguous slice.
    WithinInstance,
    /// The ranks that hold the same place in every optimizer instance.
    AcrossInstances,
    /// As many consecutive lists as an instance has expert copies, joined: all ranks of an instance.
    JoinedInstance,
}

/// A named group.
#[derive(Clone, Copy, Debug)]
pub struct GroupRule {
    /// What it is called.
    pub name: &'static str,
    /// The grid.
    pub grid: GridKind,
    /// The axes that vary inside.
    pub axes: &'static [Axis],
    /// What is made of the lists.
    pub members: GroupMembers,
}

const fn rule(name: &'static str, grid: GridKind, axes: &'static [Axis], members: GroupMembers) -> GroupRule {
    GroupRule { name, grid, axes, members }
}

/// All named groups, in the sequence in which communicators are made: that is collective, so every rank walks the
/// same table.
pub const RULES: &[GroupRule] = &[
    rule("dp-cp", GridKind::Dense, &[Dp, Cp], GroupMembers::Whole),
    rule("dp", GridKind::Dense, &[Dp], GroupMembers::Whole),
    rule("intra-dp-cp", GridKind::Dense, &[Dp, Cp], GroupMembers::WithinInstance),
    rule("cp", GridKind::Dense, &[Cp], GroupMembers::Whole),
    rule("tp-pp", GridKind::Dense, &[Tp, Pp], GroupMembers::Whole),
    rule("tp", GridKind::Dense, &[Tp], GroupMembers::Whole),
    rule("pp", GridKind::Dense, &[Pp], GroupMembers::Whole),
    rule("embd", GridKind::Dense, &[Pp], GroupMembers::Ends),
    rule("pos-embd", GridKind::Dense, &[Pp], GroupMembers::First),
    rule("tp-dp-cp", GridKind::Dense, &[Tp, Dp, Cp], GroupMembers::Whole),
    rule("tp-dp", GridKind::Dense, &[Tp, Dp], GroupMembers::Whole),
    rule("tp-cp", GridKind::Dense, &[Tp, Cp], GroupMembers::Whole),
    rule("ep", GridKind::Expert, &[Ep], GroupMembers::Whole),
    rule("etp", GridKind::Expert, &[Tp], GroupMembers::Whole),
    rule("etp-ep", GridKind::Expert, &[Tp, Ep], GroupMembers::Whole),
    rule("etp-ep-pp", GridKind::Expert, &[Tp, Ep, Pp], GroupMembers::Whole),
    rule("edp", GridKind::Expert, &[Dp], GroupMembers::Whole),
    rule("intra-edp", GridKind::Expert, &[Dp], GroupMembers::WithinInstance),
    rule("inter-edp", GridKind::Expert, &[Dp], GroupMembers::AcrossInstances),
    rule("instance", GridKind::Expert, &[Tp, Ep, Pp], GroupMembers::JoinedInstance),
];

impl GroupMembers {
    /// The groups of this part out of `lists`, for `instances` optimizer instances.
    pub(super) fn of(self, lists: Vec<Vec<usize>>, instances: usize) -> Vec<Vec<usize>> {
        let cut = |list: &Vec<usize>, level| {
            let within = (list.len() / instances).max(1);
            hierarchical(list, &[within, instances], level)
        };
        match self {
            GroupMembers::Whole => lists,
            GroupMembers::Ends => lists
                .into_iter()
                .map(|l| match l[..] {
                    [first, .., last] => vec![first, last],
                    _ => l,
                })
                .collect(),
            GroupMembers::First => lists.into_iter().map(|l| l.into_iter().take(1).collect()).collect(),
            GroupMembers::WithinInstance => lists.iter().flat_map(|l| cut(l, 0)).collect(),
            GroupMembers::AcrossInstances => lists.iter().flat_map(|l| cut(l, 1)).collect(),
            GroupMembers::JoinedInstance => lists
                .chunks((lists.len() / instances).max(1))
                .map(|part| {
                    let mut ranks = part.concat();
                    ranks.sort_unstable();
                    ranks
                })
                .collect(),
        }
    }
}

/// One level of a hierarchy over a list of ranks; `sizes` innermost first, their product the list's length. Level
/// `l` takes every `Π sizes[..l]`-th rank: 8 ranks by `[4, 2]` give `[0-3] [4-7]` at level 0 and
/// `[0,4] [1,5] [2,6] [3,7]` at level 1.
pub fn hierarchical(list: &[usize], sizes: &[usize], level: usize) -> Vec<Vec<usize>> {
    let stride: usize = sizes.iter().take(level).product();
    let size = sizes.get(level).copied().unwrap_or(1);
    list.chunks(stride * size)
        .flat_map(|block| (0..stride).map(move |k| block.iter().skip(k).step_by(stride).copied().collect()))
        .collect()
}
