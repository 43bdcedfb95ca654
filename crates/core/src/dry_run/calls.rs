//! Communication calls of ranks, in a form that ranks of equal programs share: groups by kind, peers by their distance.

use super::groups::GroupTable;
use crate::{Error, Result};
use ferrotron_comm::{Detail, OpDescriptor, OpKind, RecordedCall};
use ferrotron_tensor::DType;
use std::collections::HashMap;
use std::hash::Hash;

/// What the ranks of a call must agree on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallShape {
    /// Kind of operation.
    pub kind: OpKind,
    /// What it is for.
    pub label: String,
    /// Shape of its argument.
    pub shape: Vec<u64>,
    /// Dtype of its argument.
    pub dtype: Option<DType>,
    /// Reduction, root, or sizes of parts.
    pub detail: Detail,
}

/// One end of a message.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MessageEnd {
    /// Kind of its group.
    pub group: usize,
    /// Whether this rank sends it.
    pub sends: bool,
    /// Places from this rank to the other one in the group, around its end.
    pub offset: usize,
    /// Number of its [`CallShape`].
    pub shape: usize,
}

/// A call of a rank, at which it waits until it is complete.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// A collective.
    Collective {
        /// Kind of its group.
        group: usize,
        /// Number of its [`CallShape`].
        shape: usize,
    },
    /// Messages sent and received together.
    Messages(Vec<MessageEnd>),
}

/// The calls of a rank in program order, as numbers of a [`CallTable`].
pub type Program = Vec<u32>;

/// All distinct calls of a job.
#[derive(Clone, Debug, Default)]
pub struct CallTable {
    shapes: Interner<CallShape>,
    calls: Interner<Call>,
}

#[derive(Clone, Debug)]
struct Interner<T> {
    all: Vec<T>,
    numbers: HashMap<T, u32>,
}

impl<T> Default for Interner<T> {
    fn default() -> Interner<T> {
        Interner { all: Vec::new(), numbers: HashMap::new() }
    }
}

impl<T: Clone + Eq + Hash> Interner<T> {
    fn number(&mut self, value: T) -> u32 {
        if let Some(number) = self.numbers.get(&value) {
            return *number;
        }
        let number = self.all.len() as u32;
        self.all.push(value.clone());
        self.numbers.insert(value, number);
        number
    }
}

impl CallTable {
    /// The number of a call.
    pub fn add(&mut self, call: Call) -> u32 {
        self.calls.number(call)
    }

    /// The number of what ranks of a call agree on.
    pub fn add_shape(&mut self, shape: CallShape) -> usize {
        self.shapes.number(shape) as usize
    }

    /// A call by its number.
    pub fn call(&self, number: u32) -> &Call {
        &self.calls.all[number as usize]
    }

    /// All calls, by number.
    pub fn calls(&self) -> &[Call] {
        &self.calls.all
    }

    /// What ranks of a call agree on, by its number.
    pub fn shape(&self, number: usize) -> &CallShape {
        &self.shapes.all[number]
    }

    /// The program of a rank from the log of its calls.
    pub fn program(&mut self, groups: &GroupTable, log: &[RecordedCall]) -> Result<Program> {
        let mut program = Program::with_capacity(log.len());
        let mut batch: Vec<MessageEnd> = Vec::new();
        for (i, entry) in log.iter().enumerate() {
            match entry {
                RecordedCall::Collective { group, call } => {
                    let group = groups.kind_of(groups.by_index(*group)?);
                    let shape = self.add_shape(CallShape::of(call));
                    program.push(self.add(Call::Collective { group, shape }));
                }
                RecordedCall::Sends { group, calls } => {
                    for call in calls {
                        batch.push(self.end(groups, *group, call, true)?);
                    }
                }
                RecordedCall::Receives { group, calls } => {
                    for call in calls {
                        batch.push(self.end(groups, *group, call, false)?);
                    }
                    // A batch ends with the receives of its last group.
                    if !matches!(log.get(i + 1), Some(RecordedCall::Receives { .. })) {
                        program.push(self.add(Call::Messages(std::mem::take(&mut batch))));
                    }
                }
            }
        }
        Ok(program)
    }

    fn end(
        &mut self,
        groups: &GroupTable,
        group: u64,
        call: &OpDescriptor,
        sends: bool,
    ) -> Result<MessageEnd> {
        let group = groups.by_index(group)?;
        let Detail::Route(from, to) = call.detail else {
            return Err(Error::Invalid(format!("{call} is a message without sender and receiver")));
        };
        let size = groups.members(group).len();
        let (me, peer) = if sends { (from, to) } else { (to, from) };
        let offset = (peer as usize + size - me as usize) % size;
        let shape = self.add_shape(CallShape { detail: Detail::None, ..CallShape::of(call) });
        Ok(MessageEnd { group: groups.kind_of(group), sends, offset, shape })
    }

    /// A call as `rank` makes it, for errors.
    pub fn describe(&self, groups: &GroupTable, rank: usize, number: u32) -> String {
        let name = |kind: usize| groups.kinds()[kind].name;
        match self.call(number) {
            Call::Collective { group, shape } => format!("{} on {}", self.shape(*shape), name(*group)),
            Call::Messages(ends) => {
                let end = |e: &MessageEnd| {
                    let verb = if e.sends { "send to" } else { "receive from" };
                    let peer = self.peer(groups, rank, e).map_or("nobody".into(), |r| format!("rank {r}"));
                    format!("{verb} {peer}: {} on {}", self.shape(e.shape), name(e.group))
                };
                ends.iter().map(end).collect::<Vec<_>>().join(" + ")
            }
        }
    }

    /// The rank at the other end of a message of `rank`.
    pub fn peer(&self, groups: &GroupTable, rank: usize, end: &MessageEnd) -> Option<usize> {
        let (group, place) = groups.group_of(end.group, rank)?;
        let members = groups.members(group);
        members.get((place + end.offset) % members.len()).copied()
    }
}

impl CallShape {
    fn of(call: &OpDescriptor) -> CallShape {
        let OpDescriptor { kind, label, shape, dtype, detail, .. } = call;
        CallShape {
            kind: *kind,
            label: label.to_string(),
            shape: shape.clone(),
            dtype: *dtype,
            detail: detail.clone(),
        }
    }
}

impl std::fmt::Display for CallShape {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} '{}'", self.kind.name(), self.label)?;
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype}")?;
        }
        if !self.shape.is_empty() {
            write!(f, " {:?}", self.shape)?;
        }
        Ok(())
    }
}
