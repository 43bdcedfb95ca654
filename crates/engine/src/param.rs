//! Parameters declare themselves once: names, shapes, initial values and how they may be split. Everything
//! else (storage, gradients, optimizer state, checkpoints, conversion) follows from the declaration.

mod declare;
mod initial;
mod params;

use crate::quant::LinearQuant;
use crate::{Shard, Split};
pub use declare::{Declarations, ExpertParallelRank};
pub use initial::{draw_initial, initial_values};
pub use params::Params;
use std::ops::Range;

/// Index of a parameter in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// Where initial values come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation, drawn by (seed, name, element index).
    Normal(f32),
    /// All equal.
    Constant(f32),
}

/// One logical tensor: what checkpoints and conversions know.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Unique name, such as `layers.3.attn.q.weight`.
    pub name: String,
    /// Global shape, without padding.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
    /// How it may be split.
    pub split: Split,
}

/// One parameter in memory: what this rank holds of its parts, joined along axis 0.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Logical tensors, in order.
    pub parts: Vec<Part>,
    /// What is held of each.
    pub shards: Vec<Shard>,
    /// Shape of what is held.
    pub shape: Vec<usize>,
    /// Modules that use it: its gradient is ready after that many contributions.
    pub uses: u32,
    /// Elements that the rank has which has most: parameters share buckets alike on all ranks.
    pub widest: usize,
    /// A second copy of a parameter that another stage of the pipeline has: counted and saved there.
    pub mirror: bool,
    /// The first and the last stage of the pipeline have it, and its gradient is the sum of both.
    pub tied_across_stages: bool,
    /// Which products with it have narrow factors.
    pub quant: Option<LinearQuant>,
    /// It belongs to experts: its copies, and the ranks that share it, are those of the expert grid.
    pub experts: bool,
    /// Matrices that lie one after another along its first axis, each with scales of its own: as many as experts here.
    pub matrices: usize,
}

impl ParamSpec {
    /// Elements of the whole.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Matrices decay, vectors (biases, gains) do not.
    pub fn decays(&self) -> bool {
        self.shape.len() > 1
    }

    /// The parts, what is held of each, and where that is inside the parameter.
    pub fn held(&self) -> impl Iterator<Item = (&Part, &Shard, Range<usize>)> {
        self.parts.iter().zip(&self.shards).scan(0, |start, (p, cut)| {
            let range = *start..*start + cut.shape(&p.shape).iter().product::<usize>();
            *start = range.end;
            Some((p, cut, range))
        })
    }

    /// Which elements of its logical tensors (row-major) elements `inside` of the parameter are, in order.
    pub fn runs(&self, inside: &Range<usize>) -> Vec<(&Part, Vec<Range<usize>>)> {
        self.held()
            .map(|(part, cut, r)| {
                let (start, end) = (r.start.max(inside.start), r.end.min(inside.end));
                let share = start.saturating_sub(r.start)..end.saturating_sub(r.start);
                (part, cut.runs_within(&part.shape, share))
            })
            .filter(|(_, runs)| !runs.is_empty())
            .collect()
    }

    /// Shape `[n, k]` of each of its matrices.
    pub fn matrix(&self) -> [usize; 2] {
        let rows = self.shape.first().copied().unwrap_or(1);
        let each = rows / self.matrices.max(1);
        [each, self.shape.iter().skip(1).product()]
    }

    /// Is it kept as bytes, and not as numbers?
    pub fn fp8_resident(&self) -> bool {
        self.quant.is_some_and(|e| e.fp8_resident)
    }

    /// Has every rank all of it?
    pub fn replicated(&self) -> bool {
        self.parts.iter().all(|p| p.split == Split::Replicated)
    }
}
