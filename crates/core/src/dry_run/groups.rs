//! The process groups of a job, as its ranks create them, and checks of them.

use crate::grid::Grid;
use crate::model::description::{Group, ParallelRanks};
use crate::{Error, Result};
use ferrotron_comm::RecordedGroup;
use std::collections::HashMap;

/// All groups of a job by kind: the groups of one name.
#[derive(Clone, Debug)]
pub struct GroupTable {
    /// Members of every group in order. Groups of one rank have no communicator and are absent.
    groups: Vec<Vec<usize>>,
    /// Groups by the number that their ranks gave them.
    by_index: HashMap<u64, usize>,
    /// Kind of every group.
    kind_of: Vec<usize>,
    kinds: Vec<GroupKind>,
}

/// The groups of one name.
#[derive(Clone, Debug)]
pub struct GroupKind {
    /// Their name.
    pub name: &'static str,
    /// How many there are.
    pub count: usize,
    /// Ranks of the largest.
    pub size: usize,
    /// Of every rank of the job, its group's number and its place there.
    member: Vec<Option<(u32, u32)>>,
}

impl GroupTable {
    /// The groups in the order in which a rank of `world` has created them.
    pub fn new(created: &[RecordedGroup], world: usize) -> Result<GroupTable> {
        let (groups, by_index, kind_of, kinds) = Default::default();
        let mut table = GroupTable { groups, by_index, kind_of, kinds };
        for (number, group) in created.iter().enumerate() {
            if table.by_index.insert(group.index, number).is_some() {
                return Err(wrong(format!("two groups have number {}", group.index)));
            }
            let kind = table.kind(group.name).unwrap_or_else(|| {
                let (name, member) = (group.name, vec![None; world]);
                table.kinds.push(GroupKind { name, count: 0, size: 0, member });
                table.kinds.len() - 1
            });
            let entry = &mut table.kinds[kind];
            entry.count += 1;
            entry.size = entry.size.max(group.ranks.len());
            for (place, rank) in group.ranks.iter().enumerate() {
                match entry.member.get_mut(*rank) {
                    Some(slot @ None) => *slot = Some((number as u32, place as u32)),
                    Some(Some((other, _))) => {
                        let others = &created[*other as usize].ranks;
                        return Err(wrong(format!(
                            "rank {rank} is in two {} groups: {others:?} and {:?}",
                            group.name, group.ranks
                        )));
                    }
                    None => return Err(wrong(format!("rank {rank} of {} does not exist", group.name))),
                }
            }
            table.groups.push(group.ranks.clone());
            table.kind_of.push(kind);
        }
        Ok(table)
    }

    /// Fails unless every rank is in one group of each kind and the sizes multiply to the number of ranks.
    pub fn check(&self, grid: &Grid) -> Result<()> {
        let world = grid.world();
        for kind in self.kinds.iter().filter(|k| k.name != Group::Embedding.name()) {
            if let Some(rank) = kind.member.iter().position(Option::is_none) {
                return Err(wrong(format!("rank {rank} is in no {} group", kind.name)));
            }
        }
        let places = ParallelRanks::at(grid, 0)?;
        // A group that another one serves has its members.
        let size = |group: Group| {
            let served = self.kind(places.name(group)).map_or(1, |kind| self.kinds[kind].size);
            (group.name(), served)
        };
        let products = [
            vec![size(Group::Tp), size(Group::Cp), size(Group::Dp), size(Group::Pp)],
            vec![size(Group::EtpEp), size(Group::ExpertDp), size(Group::Pp)],
            vec![size(Group::Tp), size(Group::DpCp), size(Group::Pp)],
        ];
        for product in products {
            if product.iter().map(|(_, n)| n).product::<usize>() != world {
                let sizes: Vec<String> = product.iter().map(|(name, n)| format!("{name} {n}")).collect();
                return Err(wrong(format!("sizes {} do not multiply to {world} ranks", sizes.join(" x "))));
            }
        }
        Ok(())
    }

    /// Fails unless `rank` has created the same groups, in the same order.
    pub fn check_same(&self, rank: usize, created: &[RecordedGroup]) -> Result<()> {
        if created.len() != self.groups.len() {
            let (theirs, ours) = (created.len(), self.groups.len());
            return Err(wrong(format!("rank {rank} creates {theirs} groups and rank 0 creates {ours}")));
        }
        for (i, theirs) in created.iter().enumerate() {
            let name = self.kinds[self.kind_of[i]].name;
            let same = self.by_index.get(&theirs.index) == Some(&i);
            if theirs.ranks != self.groups[i] || theirs.name != name || !same {
                return Err(wrong(format!(
                    "group {i} of rank {rank} is {} {:?}, and {name} {:?} on rank 0",
                    theirs.name, theirs.ranks, self.groups[i]
                )));
            }
        }
        Ok(())
    }

    /// The kinds of groups.
    pub fn kinds(&self) -> &[GroupKind] {
        &self.kinds
    }

    /// Number of groups.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The group that ranks gave a number.
    pub fn by_index(&self, index: u64) -> Result<usize> {
        let found = self.by_index.get(&index).copied();
        found.ok_or_else(|| wrong(format!("a call is on group {index}, which no rank has created")))
    }

    /// Members of a group.
    pub fn members(&self, group: usize) -> &[usize] {
        &self.groups[group]
    }

    /// The kind of a group.
    pub fn kind_of(&self, group: usize) -> usize {
        self.kind_of[group]
    }

    /// A kind by its name.
    pub fn kind(&self, name: &str) -> Option<usize> {
        self.kinds.iter().position(|k| k.name == name)
    }

    /// A rank's group of a kind, and its place there.
    pub fn group_of(&self, kind: usize, rank: usize) -> Option<(usize, usize)> {
        let (group, place) = (*self.kinds.get(kind)?.member.get(rank)?)?;
        Some((group as usize, place as usize))
    }
}

fn wrong(what: String) -> Error {
    Error::Invalid(format!("process groups: {what}; this is a bug, please report it with the recipe"))
}
