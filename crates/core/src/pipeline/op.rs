//! Operations, messages and steps of a schedule.

/// An operation on a micro-batch at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OpKind {
    /// Forward.
    Forward,
    /// Full backward: input gradient, then weight gradient.
    Backward,
    /// Input gradient only; a [`OpKind::WeightGrad`] follows later.
    BackwardInput,
    /// Weight gradient.
    WeightGrad,
}

/// One computation of a rank. Written `F3.1`: forward of micro-batch 3 on the rank's chunk 1; `B` backward, `I` input
/// gradient, `W` weight gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PipelineOp {
    /// The operation.
    pub kind: OpKind,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
    /// The chunk of layers of this rank, from 0.
    pub chunk: usize,
}

impl OpKind {
    /// One letter.
    pub fn letter(self) -> char {
        match self {
            OpKind::Forward => 'F',
            OpKind::Backward => 'B',
            OpKind::BackwardInput => 'I',
            OpKind::WeightGrad => 'W',
        }
    }
}

impl std::fmt::Display for PipelineOp {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}{}.{}", self.kind.letter(), self.micro_batch, self.chunk)
    }
}

/// Payload of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Payload {
    /// A stage's output, on its way to the next stage.
    Activation,
    /// The gradient of a stage's input, on its way to the stage before.
    Gradient,
}

/// A message between two ranks. Its fields are its tag: no two messages of a step are equal. Activations and gradients
/// between the same two ranks are ordered separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// Its payload.
    pub payload: Payload,
    /// The micro-batch.
    pub micro_batch: usize,
    /// The stage that made it; it goes to the next one (activation) or to the one before (gradient).
    pub stage: usize,
    /// Pipeline rank of the sender.
    pub from: usize,
    /// Pipeline rank of the receiver.
    pub to: usize,
}

impl std::fmt::Display for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let what = match self.payload {
            Payload::Activation => "activation",
            Payload::Gradient => "gradient",
        };
        let Message { micro_batch, stage, from, to, .. } = self;
        write!(f, "{what} of micro-batch {micro_batch} by stage {stage} (rank {from} to {to})")
    }
}

/// One end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// This rank sends.
    Send(Message),
    /// This rank receives.
    Receive(Message),
}

impl Transfer {
    /// The message.
    pub fn message(&self) -> Message {
        match self {
            Transfer::Send(m) | Transfer::Receive(m) => *m,
        }
    }
}

impl std::fmt::Display for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Transfer::Send(m) => write!(f, "send the {m}"),
            Transfer::Receive(m) => write!(f, "receive the {m}"),
        }
    }
}

/// One entry of a rank's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleStep {
    /// Compute.
    Run(PipelineOp),
    /// A forward and a backward of different micro-batches, interleaved: each computes while the other's expert exchange is
    /// in flight.
    Pair(PipelineOp, PipelineOp),
    /// One grouped send/receive. Whether the rank blocks here or only at first use depends on the backend:
    /// [`Matching`](super::Matching).
    Exchange(Vec<Transfer>),
}

impl std::fmt::Display for ScheduleStep {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            ScheduleStep::Run(op) => op.fmt(f),
            ScheduleStep::Pair(forward, backward) => write!(f, "{forward} beside {backward}"),
            ScheduleStep::Exchange(all) => {
                for (k, transfer) in all.iter().enumerate() {
                    write!(f, "{}{transfer}", if k == 0 { "" } else { " + " })?;
                }
                Ok(())
            }
        }
    }
}

impl ScheduleStep {
    /// The operations of a compute step, in order where two are interleaved.
    pub fn ops(&self) -> impl Iterator<Item = PipelineOp> {
        let (one, more) = match self {
            ScheduleStep::Run(op) => (Some(*op), None),
            ScheduleStep::Pair(forward, backward) => (Some(*forward), Some(*backward)),
            ScheduleStep::Exchange(_) => (None, None),
        };
        one.into_iter().chain(more)
    }
}

/// Dimensions of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleShape {
    /// Pipeline ranks P.
    pub pp: usize,
    /// Chunks per rank v.
    pub vp: usize,
    /// Micro-batches M.
    pub micro_batches: usize,
    /// No backward.
    pub forward_only: bool,
}

impl ScheduleShape {
    /// All stages.
    pub fn stages(&self) -> usize {
        self.pp * self.vp
    }

    /// The stage of a rank's chunk.
    pub fn stage(&self, rank: usize, chunk: usize) -> usize {
        chunk * self.pp + rank
    }

    /// The rank that holds a stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        stage % self.pp
    }

    /// The message with `stage`'s output for a micro-batch; `None` at the last (or, backward, first) stage and where the
    /// same rank holds the next stage.
    pub fn message(&self, payload: Payload, micro_batch: usize, stage: usize) -> Option<Message> {
        let next = match payload {
            Payload::Activation => stage + 1,
            Payload::Gradient => stage.checked_sub(1)?,
        };
        let (from, to) = (self.rank_of(stage), self.rank_of(next));
        (next < self.stages() && from != to).then_some(Message { payload, micro_batch, stage, from, to })
    }

    /// The message that must have arrived before `rank` may run `op`.
    pub fn input_message(&self, rank: usize, op: PipelineOp) -> Option<Message> {
        let stage = self.stage(rank, op.chunk);
        match op.kind {
            OpKind::Forward => self.message(Payload::Activation, op.micro_batch, stage.checked_sub(1)?),
            OpKind::Backward | OpKind::BackwardInput if stage + 1 < self.stages() => {
                self.message(Payload::Gradient, op.micro_batch, stage + 1)
            }
            _ => None,
        }
    }

    /// The message that `op` on `rank` makes possible.
    pub fn output_message(&self, rank: usize, op: PipelineOp) -> Option<Message> {
        let stage = self.stage(rank, op.chunk);
        match op.kind {
            OpKind::Forward => self.message(Payload::Activation, op.micro_batch, stage),
            OpKind::Backward | OpKind::BackwardInput => {
                self.message(Payload::Gradient, op.micro_batch, stage)
            }
            OpKind::WeightGrad => None,
        }
    }
}

/// Every rank's list of steps, in execution order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Dimensions of a schedule.
    pub shape: ScheduleShape,
    /// Per pipeline rank its steps.
    pub ranks: Vec<Vec<ScheduleStep>>,
}

impl Schedule {
    /// A rank's computations without its messages.
    pub fn ops(&self, rank: usize) -> impl Iterator<Item = PipelineOp> {
        self.ranks.get(rank).into_iter().flatten().flat_map(ScheduleStep::ops)
    }
}
