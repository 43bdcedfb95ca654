//! Validation of this rank's arguments, before other ranks are involved.

use crate::op_descriptor::OpDescriptor;
use crate::{Communicator, Error, Result};
use ferrotron_tensor::{DType, Stream, Tensor};

/// Checks that can be chained; each error names the call.
#[derive(Clone, Copy)]
pub(crate) struct ArgChecks<'a> {
    call: &'a OpDescriptor,
}

impl Communicator {
    /// Runs the checks; a failure is reported to the other ranks.
    pub(crate) fn check<'a>(
        &self,
        call: &'a OpDescriptor,
        checks: impl FnOnce(ArgChecks<'a>) -> Result<ArgChecks<'a>>,
    ) -> Result<()> {
        checks(ArgChecks { call }).map(drop).map_err(|e| self.reported(e))
    }
}

impl<'a> ArgChecks<'a> {
    fn require(self, ok: bool, what: impl FnOnce() -> String) -> Result<ArgChecks<'a>> {
        if ok { Ok(self) } else { Err(Error::Argument { call: self.call.to_string(), what: what() }) }
    }

    /// Contiguous and on the stream's device.
    pub(crate) fn contiguous_on(self, s: &Stream, t: &Tensor) -> Result<ArgChecks<'a>> {
        self.require(t.is_contiguous(), || {
            format!("{t:?} with strides {:?} is not contiguous; copy it first", t.strides())
        })?
        .require(t.device() == *s.device(), || {
            format!(
                "{t:?} is on {:?}, but the stream is on another device, {:?}; use a stream of its device",
                t.device(),
                s.device()
            )
        })
    }

    /// Of a dtype that can be reduced.
    pub(crate) fn reducible(self, t: &Tensor) -> Result<ArgChecks<'a>> {
        let ok =
            matches!(t.dtype(), DType::F32 | DType::BF16 | DType::F16 | DType::F64 | DType::I32 | DType::I64);
        self.require(ok, || {
            format!("{} cannot be reduced; convert to f32, bf16, f16, f64, i32 or i64", t.dtype())
        })
    }

    pub(crate) fn same_type(self, a: &Tensor, b: &Tensor) -> Result<ArgChecks<'a>> {
        self.require(a.dtype() == b.dtype(), || format!("{a:?} and {b:?} have different dtypes"))
    }

    /// `all` has n times the elements of `mine`.
    pub(crate) fn is_multiple(self, mine: &Tensor, all: &Tensor, n: usize) -> Result<ArgChecks<'a>> {
        self.same_type(mine, all)?.require(mine.numel().checked_mul(n) == Some(all.numel()), || {
            format!("{all:?} must have {n} times the elements of {mine:?}, once per rank of the group")
        })
    }

    /// Both have the same number of elements, a multiple of n.
    pub(crate) fn equal_parts(self, from: &Tensor, to: &Tensor, n: usize) -> Result<ArgChecks<'a>> {
        self.same_type(from, to)?.require(from.numel() == to.numel() && from.numel().is_multiple_of(n), || {
            format!(
                "{from:?} and {to:?} must each consist of {n} equal parts, one per rank of the group; pass counts instead"
            )
        })
    }

    /// One count per rank, adding up to the elements of `t`.
    pub(crate) fn counts(self, n: usize, counts: &[usize], t: &Tensor) -> Result<ArgChecks<'a>> {
        let sum = counts.iter().try_fold(0usize, |sum, c| sum.checked_add(*c));
        self.require(counts.len() == n, || format!("{} counts for {n} ranks", counts.len()))?
            .require(sum == Some(t.numel()), || format!("counts {counts:?} do not add up to {t:?}"))
    }

    pub(crate) fn has_elements(self, name: &str, t: &Tensor, n: usize) -> Result<ArgChecks<'a>> {
        self.require(t.numel() == n, || format!("{name} is {t:?}, but this rank's count is {n}"))
    }

    pub(crate) fn is_member(self, rank: usize, n: usize) -> Result<ArgChecks<'a>> {
        self.require(rank < n, || format!("rank {rank} does not exist in a group of {n}"))
    }

    /// The two do not overlap.
    pub(crate) fn disjoint(self, a: &Tensor, b: &Tensor) -> Result<ArgChecks<'a>> {
        self.require(!a.overlaps(b), || format!("{a:?} and {b:?} overlap; pass separate memory"))
    }

    /// `mine` does not overlap `all`, or is slot `rank` of equal slots in it.
    pub(crate) fn in_slot(self, mine: &Tensor, all: &Tensor, rank: usize) -> Result<ArgChecks<'a>> {
        self.in_slot_at(mine, all, rank * mine.numel())
    }

    /// `mine` does not overlap `all`, or is the part of it that starts at element `start`.
    pub(crate) fn in_slot_at(self, mine: &Tensor, all: &Tensor, start: usize) -> Result<ArgChecks<'a>> {
        if !mine.overlaps(all) {
            return self.same_type(mine, all);
        }
        let own = self.same_type(mine, all).is_ok()
            && all
                .view(&[all.numel()])
                .and_then(|flat| flat.narrow(0, start, mine.numel()))
                .is_ok_and(|place| place.same_memory(mine));
        self.require(own, || {
            format!("{mine:?} overlaps {all:?} outside this rank's own slot; pass separate memory")
        })
    }
}
