//! The description of a call that ranks compare before data moves.

use ferrotron_tensor::{DType, Tensor};
use std::borrow::Cow;
use std::fmt;

/// Kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum OpKind {
    /// Wait for all.
    Barrier,
    /// Sum or maximum on every rank.
    AllReduce,
    /// Everything on every rank.
    AllGather,
    /// A part of the sum on every rank.
    ReduceScatter,
    /// A part from every rank to every rank.
    AllToAll,
    /// One rank's on every rank.
    Broadcast,
    /// From one rank to another.
    SendRecv,
    /// Host bytes on every rank.
    AllGatherBytes,
}

impl OpKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [OpKind; 8] = [
        OpKind::Barrier,
        OpKind::AllReduce,
        OpKind::AllGather,
        OpKind::ReduceScatter,
        OpKind::AllToAll,
        OpKind::Broadcast,
        OpKind::SendRecv,
        OpKind::AllGatherBytes,
    ];

    /// As in messages.
    pub const fn name(self) -> &'static str {
        match self {
            OpKind::Barrier => "barrier",
            OpKind::AllReduce => "all-reduce",
            OpKind::AllGather => "all-gather",
            OpKind::ReduceScatter => "reduce-scatter",
            OpKind::AllToAll => "all-to-all",
            OpKind::Broadcast => "broadcast",
            OpKind::SendRecv => "message",
            OpKind::AllGatherBytes => "all-gather of bytes",
        }
    }
}

/// What tells calls of one kind apart, beyond label and shape. Numbers, so that it travels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Detail {
    /// Nothing.
    None,
    /// 0: sum, 1: maximum.
    Reduce(u64),
    /// The root, a rank of the group.
    Root(u64),
    /// Elements by rank, the same list everywhere.
    Counts(Vec<u64>),
    /// Elements to and from every rank: what one sends another must be what that one receives.
    Pairs { sent: Vec<u64>, received: Vec<u64> },
    /// Sender and receiver, ranks of the group.
    Route(u64, u64),
}

/// A call as ranks compare it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OpDescriptor {
    pub(crate) group: Cow<'static, str>,
    pub(crate) sequence: u64,
    pub(crate) label: Cow<'static, str>,
    pub(crate) kind: OpKind,
    /// Of the argument that must be equal on all ranks; empty where lengths may differ.
    pub(crate) shape: Vec<u64>,
    pub(crate) dtype: Option<DType>,
    pub(crate) detail: Detail,
}

impl OpDescriptor {
    pub(crate) fn new(group: &'static str, kind: OpKind, label: &'static str) -> OpDescriptor {
        OpDescriptor {
            group: Cow::Borrowed(group),
            sequence: 0,
            label: Cow::Borrowed(label),
            kind,
            shape: Vec::new(),
            dtype: None,
            detail: Detail::None,
        }
    }

    /// With the type and, if it is the same on all ranks, the shape of a tensor.
    pub(crate) fn of(mut self, t: &Tensor, same_shape: bool) -> OpDescriptor {
        self.dtype = Some(t.dtype());
        if same_shape {
            self.shape = t.shape().iter().map(|n| *n as u64).collect();
        }
        self
    }

    pub(crate) fn with(mut self, detail: Detail) -> OpDescriptor {
        self.detail = detail;
        self
    }

    /// Do ranks that agree bring notices that differ?
    pub(crate) fn pairwise(&self) -> bool {
        matches!(self.detail, Detail::Pairs { .. })
    }

    /// Everything but the detail.
    fn common(&self) -> (&str, u64, &str, OpKind, &[u64], Option<DType>) {
        let OpDescriptor { group, sequence, label, kind, shape, dtype, detail: _ } = self;
        (group, *sequence, label, *kind, shape, *dtype)
    }

    /// Do the calls of rank `me` (this) and of rank `other` not fit together?
    pub(crate) fn conflict(&self, me: usize, theirs: &OpDescriptor, other: usize) -> bool {
        match (&self.detail, &theirs.detail) {
            (Detail::Pairs { sent: s1, received: r1 }, Detail::Pairs { sent: s2, received: r2 }) => {
                let short = [s1, r1, s2, r2].iter().any(|l| l.len() <= me.max(other));
                short || s1[other] != r2[me] || r1[other] != s2[me] || self.common() != theirs.common()
            }
            _ => self != theirs,
        }
    }
}

impl fmt::Display for OpDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpDescriptor { group, sequence, label, kind, shape, dtype, detail } = self;
        write!(f, "{} '{label}' (group {group}, number {sequence}", kind.name())?;
        if let Some(dtype) = dtype {
            write!(f, ", {dtype}")?;
        }
        if !shape.is_empty() {
            write!(f, " {shape:?}")?;
        }
        match detail {
            Detail::None => {}
            Detail::Reduce(op) => f.write_str(if *op == 0 { ", sum" } else { ", maximum" })?,
            Detail::Root(root) => write!(f, ", from {root}")?,
            Detail::Counts(counts) => write!(f, ", counts {counts:?}")?,
            Detail::Pairs { sent, received } => write!(f, ", sends {sent:?}, receives {received:?}")?,
            Detail::Route(from, to) => write!(f, ", {from} to {to}")?,
        }
        f.write_str(")")
    }
}
