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
        checks(ArgChecks { call }).map(drop).map_err(|e| self.failed(e))
    }
}

impl<'a> ArgChecks<'a> {
    fn refuse(self, ok: bool, what: impl FnOnce() -> String) -> Result<ArgChecks<'a>> {
        if ok { Ok(self) } else { Err(Error::Argument { call: self.call.to_string(), what: what() }) }
    }

    /// Contiguous and on the stream's device.
    pub(crate) fn whole(self, s: &Stream, t: &Tensor) -> Result<ArgChecks<'a>> {
        self.refuse(t.is_contiguous(), || {
            format!("{t:?} with strides {:?} is not contiguous; copy it first", t.strides())
        })?
        .refuse(t.device() == *s.device(), || {
            format!(
                "{t:?} is on {:?}, the stream on another device {:?}; use a stream of its device",
                t.device(),
                s.device()
            )
        })
    }

    /// Of a dtype that can be reduced.
    pub(crate) fn reducible(self, t: &Tensor) -> Result<ArgChecks<'a>> {
        let ok =
            matches!(t.dtype(), DType::F32 | DType::BF16 | DType::F16 | DType::F64 | DType::I32 | DType::I64);
        self.refuse(ok, || format!("{} can't be reduced; convert to f32, bf16, f64, i32 or i64", t.dtype()))
    }

    pub(crate) fn same_type(self, a: &Tensor, b: &Tensor) -> Result<ArgChecks<'a>> {
        self.refuse(a.dtype() == b.dtype(), || format!("{a:?} and {b:?} have different types"))
    }

    /// `all` has n times the elements of `mine`.
    pub(crate) fn times(self, mine: &Tensor, all: &Tensor, n: usize) -> Result<ArgChecks<'a>> {
        self.same_type(mine, all)?.refuse(mine.numel().checked_mul(n) == Some(all.numel()), || {
            format!("{all:?} has not {n} times (size of the group) the elements of {mine:?}")
        })
    }

    /// Both have the same number of elements, a multiple of n.
    pub(crate) fn shared(self, from: &Tensor, to: &Tensor, n: usize) -> Result<ArgChecks<'a>> {
        self.same_type(from, to)?.refuse(from.numel() == to.numel() && from.numel().is_multiple_of(n), || {
            format!(
                "{from:?} and {to:?} are not {n} equal parts (size of the group) each; give counts instead"
            )
        })
    }

    /// One count per rank, adding up to the elements of `t`.
    pub(crate) fn counts(self, n: usize, counts: &[usize], t: &Tensor) -> Result<ArgChecks<'a>> {
        let sum = counts.iter().try_fold(0usize, |sum, c| sum.checked_add(*c));
        self.refuse(counts.len() == n, || format!("{} counts for {n} ranks", counts.len()))?
            .refuse(sum == Some(t.numel()), || format!("counts {counts:?} do not add up to {t:?}"))
    }

    pub(crate) fn elements(self, name: &str, t: &Tensor, n: usize) -> Result<ArgChecks<'a>> {
        self.refuse(t.numel() == n, || format!("{name} is {t:?}, but this rank's count is {n}"))
    }

    pub(crate) fn peer(self, rank: usize, n: usize) -> Result<ArgChecks<'a>> {
        self.refuse(rank < n, || format!("there is no rank {rank} in a group of {n}"))
    }

    /// The two do not overlap.
    pub(crate) fn apart(self, a: &Tensor, b: &Tensor) -> Result<ArgChecks<'a>> {
        self.refuse(!a.overlaps(b), || format!("{a:?} and {b:?} overlap; give separate memory"))
    }

    /// `mine` does not overlap `all`, or is slot `rank` of equal slots in it.
    pub(crate) fn place(self, mine: &Tensor, all: &Tensor, rank: usize) -> Result<ArgChecks<'a>> {
        self.place_at(mine, all, rank * mine.numel())
    }

    /// `mine` does not overlap `all`, or is the part of it that starts at element `start`.
    pub(crate) fn place_at(self, mine: &Tensor, all: &Tensor, start: usize) -> Result<ArgChecks<'a>> {
        if !mine.overlaps(all) {
            return self.same_type(mine, all);
        }
        let own = self.same_type(mine, all).is_ok()
            && all
                .view(&[all.numel()])
                .and_then(|flat| flat.narrow(0, start, mine.numel()))
                .is_ok_and(|place| place.same_memory(mine));
        self.refuse(own, || {
            format!("{mine:?} overlaps {all:?} elsewhere than in this rank's own place; give separate memory")
        })
    }
}
