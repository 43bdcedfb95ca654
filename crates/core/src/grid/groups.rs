//! Every group there is, as a table.

use super::axes::Axis::{self, Cp, Dp, Ep, Pp, Tp};

/// Which of the two grids a group is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// tp, cp, dp, pp.
    Dense,
    /// etp, ep, edp, pp.
    Expert,
}

/// What is made of the lists in which a rule's axes vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
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
pub struct Rule {
    /// What it is called.
    pub name: &'static str,
    /// The grid.
    pub of: Of,
    /// The axes that vary inside.
    pub axes: &'static [Axis],
    /// What is made of the lists.
    pub part: Part,
}

const fn rule(name: &'static str, of: Of, axes: &'static [Axis], part: Part) -> Rule {
    Rule { name, of, axes, part }
}

/// All named groups, in the sequence in which communicators are made: that is collective, so every rank walks the
/// same table.
pub const RULES: &[Rule] = &[
    rule("dp-cp", Of::Dense, &[Dp, Cp], Part::Whole),
    rule("dp", Of::Dense, &[Dp], Part::Whole),
    rule("intra-dp-cp", Of::Dense, &[Dp, Cp], Part::WithinInstance),
    rule("cp", Of::Dense, &[Cp], Part::Whole),
    rule("tp-pp", Of::Dense, &[Tp, Pp], Part::Whole),
    rule("tp", Of::Dense, &[Tp], Part::Whole),
    rule("pp", Of::Dense, &[Pp], Part::Whole),
    rule("embd", Of::Dense, &[Pp], Part::Ends),
    rule("pos-embd", Of::Dense, &[Pp], Part::First),
    rule("tp-dp-cp", Of::Dense, &[Tp, Dp, Cp], Part::Whole),
    rule("tp-dp", Of::Dense, &[Tp, Dp], Part::Whole),
    rule("tp-cp", Of::Dense, &[Tp, Cp], Part::Whole),
    rule("ep", Of::Expert, &[Ep], Part::Whole),
    rule("etp", Of::Expert, &[Tp], Part::Whole),
    rule("etp-ep", Of::Expert, &[Tp, Ep], Part::Whole),
    rule("etp-ep-pp", Of::Expert, &[Tp, Ep, Pp], Part::Whole),
    rule("edp", Of::Expert, &[Dp], Part::Whole),
    rule("intra-edp", Of::Expert, &[Dp], Part::WithinInstance),
    rule("inter-edp", Of::Expert, &[Dp], Part::AcrossInstances),
    rule("instance", Of::Expert, &[Tp, Ep, Pp], Part::JoinedInstance),
];

impl Part {
    /// The groups of this part out of `lists`, for `instances` optimizer instances.
    pub(super) fn of(self, lists: Vec<Vec<usize>>, instances: usize) -> Vec<Vec<usize>> {
        let cut = |list: &Vec<usize>, level| {
            let within = (list.len() / instances).max(1);
            hierarchical(list, &[within, instances], level)
        };
        match self {
            Part::Whole => lists,
            Part::Ends => lists
                .into_iter()
                .map(|l| match l[..] {
                    [first, .., last] => vec![first, last],
                    _ => l,
                })
                .collect(),
            Part::First => lists.into_iter().map(|l| l.into_iter().take(1).collect()).collect(),
            Part::WithinInstance => lists.iter().flat_map(|l| cut(l, 0)).collect(),
            Part::AcrossInstances => lists.iter().flat_map(|l| cut(l, 1)).collect(),
            Part::JoinedInstance => lists
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
