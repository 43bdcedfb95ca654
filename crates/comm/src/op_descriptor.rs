//! Op descriptors: what ranks compare about a call before any data moves.

use ferrotron_tensor::{DType, Tensor};
use std::borrow::Cow;
use std::fmt;

/// Kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum OpKind {
    /// Wait for all ranks.
    Barrier,
    /// Sum or maximum of a tensor, on every rank.
    AllReduce,
    /// Concatenation of all ranks' tensors, on every rank.
    AllGather,
    /// One part of the reduction on each rank.
    ReduceScatter,
    /// A part from every rank to every rank.
    AllToAll,
    /// One rank's tensor on every rank.
    Broadcast,
    /// A message from one rank to another.
    SendRecv,
    /// Concatenation of host bytes, on every rank.
    AllGatherBytes,
    /// A CUDA graph with collectives in it.
    Graph,
}

impl OpKind {
    /// All kinds, in order of their numbers.
    pub const ALL: [OpKind; 9] = [
        OpKind::Barrier,
        OpKind::AllReduce,
        OpKind::AllGather,
        OpKind::ReduceScatter,
        OpKind::AllToAll,
        OpKind::Broadcast,
        OpKind::SendRecv,
        OpKind::AllGatherBytes,
        OpKind::Graph,
    ];

    /// The name in messages, traces and reports.
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
            OpKind::Graph => "CUDA graph",
        }
    }
}

/// What distinguishes calls beyond kind, label and shape. Plain numbers, so that it can be encoded.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Detail {
    /// Nothing.
    None,
    /// 0: sum, 1: maximum.
    Reduce(u64),
    /// The root, a rank of the group.
    Root(u64),
    /// Elements per rank, the same list on every rank.
    Counts(Vec<u64>),
    /// Elements to and from every rank: what one rank sends must be what the other receives.
    Pairs {
        /// To each rank of the group.
        sent: Vec<u64>,
        /// From each rank of the group.
        received: Vec<u64>,
    },
    /// Sender and receiver, ranks of the group.
    Route(u64, u64),
}

/// A call, as compared between ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpDescriptor {
    /// Name of the group.
    pub group: Cow<'static, str>,
    /// Its number among the collectives of the group, or among the messages from one rank to another.
    pub sequence: u64,
    /// What it is for.
    pub label: Cow<'static, str>,
    /// Kind of operation.
    pub kind: OpKind,
    /// Shape of the argument that must be equal on all ranks; empty where sizes may differ.
    pub shape: Vec<u64>,
    /// Dtype of the argument.
    pub dtype: Option<DType>,
    /// What else the ranks compare.
    pub detail: Detail,
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

    /// Adds the dtype of a tensor and, if it must be the same on all ranks, its shape.
    pub(crate) fn for_tensor(mut self, t: &Tensor, same_shape: bool) -> OpDescriptor {
        self.dtype = Some(t.dtype());
        if same_shape {
            self.shape = t.shape().iter().map(|n| *n as u64).collect();
        }
        self
    }

    pub(crate) fn with_detail(mut self, detail: Detail) -> OpDescriptor {
        self.detail = detail;
        self
    }

    /// True if the descriptors of ranks that agree differ from each other.
    pub fn is_pairwise(&self) -> bool {
        matches!(self.detail, Detail::Pairs { .. })
    }

    /// Everything except the detail.
    fn without_detail(&self) -> (&str, u64, &str, OpKind, &[u64], Option<DType>) {
        let OpDescriptor { group, sequence, label, kind, shape, dtype, detail: _ } = self;
        (group, *sequence, label, *kind, shape, *dtype)
    }

    /// True if the call of rank `me` (this one) and that of rank `other` do not match.
    pub fn conflicts_with(&self, me: usize, theirs: &OpDescriptor, other: usize) -> bool {
        match (&self.detail, &theirs.detail) {
            (Detail::Pairs { sent: s1, received: r1 }, Detail::Pairs { sent: s2, received: r2 }) => {
                let short = [s1, r1, s2, r2].iter().any(|l| l.len() <= me.max(other));
                short
                    || s1[other] != r2[me]
                    || r1[other] != s2[me]
                    || self.without_detail() != theirs.without_detail()
            }
            _ => self != theirs,
        }
    }
}

impl fmt::Display for OpDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpDescriptor { group, sequence, label, kind, shape, dtype, detail } = self;
        write!(f, "{} '{label}' (group {group}, seq {sequence}", kind.name())?;
        if let Some(dtype) = dtype {
            write!(f, ", {dtype}")?;
        }
        if !shape.is_empty() {
            write!(f, " {shape:?}")?;
        }
        match detail {
            Detail::None => {}
            Detail::Reduce(op) => f.write_str(if *op == 0 { ", sum" } else { ", max" })?,
            Detail::Root(root) => write!(f, ", from {root}")?,
            Detail::Counts(counts) => write!(f, ", counts {counts:?}")?,
            Detail::Pairs { sent, received } => write!(f, ", sends {sent:?}, receives {received:?}")?,
            Detail::Route(from, to) => write!(f, ", {from} to {to}")?,
        }
        f.write_str(")")
    }
}
