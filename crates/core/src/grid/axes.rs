//! One grid: ranks numbered by an order of axes, and the groups along some of the axes.

use crate::{Error, Result};

/// An axis of parallelism. In the expert grid `Tp` and `Dp` are etp and edp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Tensor parallelism.
    Tp,
    /// Pipeline parallelism.
    Pp,
    /// Data parallelism.
    Dp,
    /// Expert parallelism.
    Ep,
    /// Context parallelism.
    Cp,
}

impl Axis {
    /// All axes, in the order in which missing ones are appended to an order string.
    pub const ALL: [Axis; 5] = [Axis::Tp, Axis::Pp, Axis::Dp, Axis::Ep, Axis::Cp];

    /// The name in order strings and group names.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Tp => "tp",
            Axis::Pp => "pp",
            Axis::Dp => "dp",
            Axis::Ep => "ep",
            Axis::Cp => "cp",
        }
    }

    /// Parses axes joined by `-` or `_`, each at most once; `what` names the string in errors.
    pub(super) fn list(text: &str, what: &str) -> Result<Vec<Axis>> {
        let mut axes = Vec::new();
        for part in text.split(['-', '_']) {
            let axis = Axis::ALL.into_iter().find(|a| a.name() == part).ok_or_else(|| {
                Error::Invalid(format!(
                    "{what} {text:?}: {part:?} is not an axis; the axes are tp, cp, ep, dp and pp"
                ))
            })?;
            if axes.contains(&axis) {
                return Err(Error::Invalid(format!("{what} {text:?} names {part} twice; name it once")));
            }
            axes.push(axis);
        }
        Ok(axes)
    }
}

/// A grid of ranks. The leftmost axis of the order has stride 1: `rank = Σ index[a] · stride[a]`, where `stride[a]`
/// is the product of the sizes to its left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axes {
    order: Vec<(Axis, usize)>,
}

impl Axes {
    /// A grid over `order` with a size per axis. A missing axis is appended if its size is 1, else returned as the
    /// error.
    pub(super) fn new(order: &[Axis], size: impl Fn(Axis) -> usize) -> Result<Axes, Axis> {
        let mut all: Vec<_> = order.iter().map(|&a| (a, size(a))).collect();
        for axis in Axis::ALL {
            if !order.contains(&axis) {
                if size(axis) != 1 {
                    return Err(axis);
                }
                all.push((axis, 1));
            }
        }
        Ok(Axes { order: all })
    }

    /// The completed order, such as `tp-cp-ep-dp-pp`.
    pub fn order(&self) -> String {
        let names: Vec<_> = self.order.iter().map(|(a, _)| a.name()).collect();
        names.join("-")
    }

    /// Number of ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.order.iter().find(|(a, _)| *a == axis).map_or(1, |(_, n)| *n)
    }

    /// Distance between neighbouring ranks along an axis.
    pub fn stride(&self, axis: Axis) -> usize {
        self.order.iter().take_while(|(a, _)| *a != axis).map(|(_, n)| n).product()
    }

    /// Index of a rank along an axis.
    pub fn index(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.size(axis)
    }

    /// Position of a rank in its group along `axes`, as listed by [`Axes::groups`]. Axes count in grid order,
    /// whatever their order here.
    pub fn position(&self, rank: usize, axes: &[Axis]) -> usize {
        let (mut place, mut step) = (0, 1);
        for &(axis, size) in self.order.iter().filter(|(a, _)| axes.contains(a)) {
            place += step * self.index(rank, axis);
            step *= size;
        }
        place
    }

    /// All groups in which `axes` vary and the others are fixed. Groups, and ranks in a group, are in grid order,
    /// leftmost axis fastest.
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let (inner, outer): (Vec<Axis>, Vec<Axis>) =
            self.order.iter().map(|(a, _)| *a).partition(|a| axes.contains(a));
        let inside = self.offsets(&inner);
        self.offsets(&outer).into_iter().map(|base| inside.iter().map(|i| base + i).collect()).collect()
    }

    /// [`Axes::groups`] of a name such as `dp-cp`.
    pub fn groups_of(&self, token: &str) -> Result<Vec<Vec<usize>>> {
        Ok(self.groups(&Axis::list(token, "the group")?))
    }

    /// Offsets from rank 0 of all ranks that differ from it in `axes` only, first axis fastest.
    fn offsets(&self, axes: &[Axis]) -> Vec<usize> {
        axes.iter().fold(vec![0], |near, &axis| {
            let (size, stride) = (self.size(axis), self.stride(axis));
            (0..size).flat_map(|i| near.iter().map(move |base| base + i * stride)).collect()
        })
    }
}
