//! Which layers are on which pipeline stage.

use std::ops::Range;

use crate::{Error, Result};

/// What one stage holds. Layers are numbered over the whole model, from 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stage {
    /// The token embedding.
    pub embedding: bool,
    /// Decoder layers; may be empty.
    pub layers: Range<usize>,
    /// Multi-token-prediction layers.
    pub mtp: Range<usize>,
    /// The final norm, LM head and loss.
    pub loss: bool,
}

/// The stages of a model over `pp` ranks with `vp` chunks each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPlacement {
    pub(super) pp: usize,
    pub(super) stages: Vec<Stage>,
}

/// A division of the layers by numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerSplit {
    /// Decoder layers of the model.
    pub layers: usize,
    /// Multi-token-prediction layers; they go to the last stage.
    pub mtp: usize,
    /// Pipeline ranks.
    pub pp: usize,
    /// Chunks per rank.
    pub vp: usize,
    /// Layers of the first rank, over all its chunks.
    pub first: Option<usize>,
    /// Layers of the last rank, over all its chunks.
    pub last: Option<usize>,
    /// The embedding counts as a layer.
    pub count_embedding: bool,
    /// The loss counts as a layer.
    pub count_loss: bool,
}

impl LayerSplit {
    /// All layers as evenly as possible.
    pub fn even(layers: usize, pp: usize, vp: usize) -> LayerSplit {
        LayerSplit { layers, pp, vp, ..LayerSplit::default() }
    }

    /// The stages. A remainder goes to the stages in the middle, away from embedding and loss.
    pub fn place(&self) -> Result<LayerPlacement> {
        let LayerSplit { pp, vp, layers, .. } = *self;
        let stages = pp.checked_mul(vp).filter(|n| (1..=1 << 20).contains(n)).ok_or_else(|| {
            Error::Invalid(format!(
                "{pp} pipeline ranks with {vp} chunks each: both must be at least 1, and few"
            ))
        })?;
        let named = self.first.is_some() || self.last.is_some();
        let counts = if !named {
            balanced(layers, stages, self.count_embedding, self.count_loss)
        } else if self.count_embedding || self.count_loss {
            return Err(Error::Invalid(
                "the split gives the layers of the first or last stage and also counts embedding or loss as layers; \
                 choose one way"
                    .into(),
            ));
        } else {
            self.uneven()?
        };
        let mut placed = 0;
        let mut stage = |(k, count): (usize, usize)| {
            let layers = placed..placed + count;
            placed = layers.end;
            let last = k + 1 == stages;
            Stage { embedding: k == 0, layers, mtp: 0..if last { self.mtp } else { 0 }, loss: last }
        };
        let stages = counts.into_iter().enumerate().map(&mut stage).collect();
        Ok(LayerPlacement { pp, stages })
    }

    fn uneven(&self) -> Result<Vec<usize>> {
        let LayerSplit { pp, vp, layers, first, last, .. } = *self;
        if pp == 1 {
            return Err(Error::Invalid(
                "a split that gives the layers of the first or last stage needs pp=2 or more".into(),
            ));
        }
        let ends = first.unwrap_or(0).saturating_add(last.unwrap_or(0));
        let middle = pp - usize::from(first.is_some()) - usize::from(last.is_some());
        let rest = layers.checked_sub(ends).filter(|rest| middle > 0 || *rest == 0).ok_or_else(|| {
            Error::Invalid(format!(
                "{ends} layers on the first and last stage do not make the {layers} layers of the model over {pp} \
                 ranks; let them add up to {}{layers}",
                if middle > 0 { "at most " } else { "" }
            ))
        })?;
        let first = first.map(|n| balanced(n, vp, false, false));
        let last = last.map(|n| balanced(n, vp, false, false));
        let rest = balanced(rest, middle * vp, false, false);
        let mut counts = Vec::with_capacity(pp * vp);
        for chunk in 0..vp {
            counts.extend(first.iter().map(|n| n[chunk]));
            counts.extend(&rest[chunk * middle..(chunk + 1) * middle]);
            counts.extend(last.iter().map(|n| n[chunk]));
        }
        Ok(counts)
    }
}

/// `layers` over `slots`, where the first and the last slot may already count one layer.
fn balanced(layers: usize, slots: usize, first: bool, last: bool) -> Vec<usize> {
    if slots == 0 {
        return Vec::new();
    }
    let (first, last) = (usize::from(first), usize::from(last));
    let mut counts = vec![0; slots];
    let all = layers + first + last;
    let (share, more) = (all / slots, all % slots);
    if share == 0 {
        // Fewer layers than slots: slots that count embedding or loss get none.
        let free = slots - first - last;
        let start = first + (free - layers) / 2;
        counts[start..start + layers].fill(1);
        return counts;
    }
    counts.fill(share);
    let start = (slots - more) / 2;
    counts[start..start + more].iter_mut().for_each(|n| *n += 1);
    counts[0] -= first;
    counts[slots - 1] -= last;
    counts
}

impl LayerPlacement {
    /// Pipeline ranks.
    pub fn pp(&self) -> usize {
        self.pp
    }

    /// Chunks per rank.
    pub fn vp(&self) -> usize {
        self.stages.len() / self.pp
    }

    /// All stages, in the order of forward.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// What chunk `chunk` of pipeline rank `rank` holds: stage `chunk·P + rank`.
    pub fn at(&self, rank: usize, chunk: usize) -> Option<&Stage> {
        if rank < self.pp { self.stages.get(chunk * self.pp + rank) } else { None }
    }

    /// Decoder layers of the model.
    pub fn layers(&self) -> usize {
        self.stages.last().map_or(0, |s| s.layers.end)
    }

    /// Pipeline rank and chunk of a layer.
    pub fn stage_of_layer(&self, layer: usize) -> Option<(usize, usize)> {
        let stage = self.stages.iter().position(|s| s.layers.contains(&layer))?;
        Some((stage % self.pp, stage / self.pp))
    }
}
