//! Rank grids: the ranks of a run arranged in two grids over the same numbers, and their process groups.
//!
//! The dense grid is tp × cp × dp × pp; the expert grid is etp × ep × edp × pp over the same ranks, so that expert
//! parallelism may span tensor, context and data ranks (MoE parallel folding). Both have the same pipelines.
//!
//! ```
//! use ferrotron_core::grid::{Grid, RankLayout};
//! let grid = Grid::new(RankLayout { tp: 2, cp: 2, pp: 2, ..RankLayout::default() }, 16)?;
//! assert_eq!(grid.dp(), 2);
//! assert_eq!(grid.groups("dp-cp")?[1], [1, 3, 5, 7]);
//! assert_eq!(grid.group("embd", 9)?, Some(vec![1, 9]));
//! # Ok::<(), ferrotron_core::Error>(())
//! ```

mod axes;
mod groups;
mod layout;
mod legal;

pub use axes::{Axes, Axis};
pub use layout::{ORDER, RankLayout};
pub use legal::ModelSizes;

use crate::{Error, Result};
use groups::{DerivedGroup, GridKind, hierarchical};

/// Coordinates of a rank along every axis of both grids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// Tensor-parallel rank.
    pub tp: usize,
    /// Context-parallel rank.
    pub cp: usize,
    /// Data-parallel rank in the dense grid.
    pub dp: usize,
    /// Rank among the `dp·cp` replicas of the dense parameters; cp varies fastest in the default order.
    pub dp_cp: usize,
    /// Pipeline stage.
    pub pp: usize,
    /// Expert-tensor-parallel rank.
    pub etp: usize,
    /// Expert-parallel rank.
    pub ep: usize,
    /// Data-parallel rank among the replicas of an expert.
    pub edp: usize,
}

/// A valid layout over a number of ranks. Plain numbers: nothing here communicates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    layout: RankLayout,
    world: usize,
    dense: Axes,
    expert: Axes,
}

impl Grid {
    /// The grids of a layout over `world` ranks. The error for an invalid layout names the nearest valid sizes.
    pub fn new(layout: RankLayout, world: usize) -> Result<Grid> {
        let (dense, expert) = legal::grids(&layout, world)?;
        Ok(Grid { layout, world, dense, expert })
    }

    /// The grid of a layout over [`RankLayout::world`] ranks.
    pub fn of(layout: RankLayout) -> Result<Grid> {
        let world = layout.world()?;
        Grid::new(layout, world)
    }

    /// The layout.
    pub fn layout(&self) -> &RankLayout {
        &self.layout
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Data-parallel size of the dense grid: `world / (tp·cp·pp)`.
    pub fn dp(&self) -> usize {
        self.dense.size(Axis::Dp)
    }

    /// Data-parallel size of the experts: `world / (etp·ep·pp)`.
    pub fn edp(&self) -> usize {
        self.expert.size(Axis::Dp)
    }

    /// The dense grid.
    pub fn dense(&self) -> &Axes {
        &self.dense
    }

    /// The expert grid, in which `tp` means etp and `dp` means edp.
    pub fn expert(&self) -> &Axes {
        &self.expert
    }

    /// The coordinates of a rank. Fails for ranks outside the world.
    pub fn coordinates(&self, rank: usize) -> Result<Coordinates> {
        self.check_rank(rank)?;
        let (d, e) = (&self.dense, &self.expert);
        Ok(Coordinates {
            tp: d.index(rank, Axis::Tp),
            cp: d.index(rank, Axis::Cp),
            dp: d.index(rank, Axis::Dp),
            dp_cp: d.position(rank, &[Axis::Dp, Axis::Cp]),
            pp: d.index(rank, Axis::Pp),
            etp: e.index(rank, Axis::Tp),
            ep: e.index(rank, Axis::Ep),
            edp: e.index(rank, Axis::Dp),
        })
    }

    /// All groups of a name: axes joined by `-`, such as `dp-cp`, in which these axes vary, or a derived group
    /// (`embd`, `pos-embd`, `intra-dp-cp`, `intra-edp`, `inter-edp`, `instance`). Names with `ep`, `etp` or `edp` are
    /// of the expert grid; `mp` is `tp-pp`. Groups and their ranks are in grid order.
    pub fn groups(&self, name: &str) -> Result<Vec<Vec<usize>>> {
        let name = if name == "mp" { "tp-pp".into() } else { name.replace('_', "-") };
        if let Some(derived) = DerivedGroup::find(&name) {
            let grid = match derived.grid {
                GridKind::Dense => &self.dense,
                GridKind::Expert => &self.expert,
            };
            return Ok(derived.select(grid.groups(derived.axes), self.layout.instances));
        }
        let parts: Vec<&str> = name.split('-').collect();
        if parts.iter().any(|p| ["ep", "etp", "edp"].contains(p)) {
            let plain: Vec<&str> =
                parts.iter().map(|p| if *p == "ep" { p } else { p.trim_start_matches('e') }).collect();
            return self.expert.groups_of(&plain.join("-"));
        }
        self.dense.groups_of(&name)
    }

    /// The group of that name that contains `rank`; `None` if there is none, as for `embd` on the inner stages.
    pub fn group(&self, name: &str, rank: usize) -> Result<Option<Vec<usize>>> {
        self.check_rank(rank)?;
        Ok(self.groups(name)?.into_iter().find(|g| g.contains(&rank)))
    }

    /// The groups of one level of hierarchical context parallelism, innermost first. Without levels, level 0 is the
    /// cp groups.
    pub fn cp_level(&self, level: usize) -> Vec<Vec<usize>> {
        let whole = [self.layout.cp];
        let sizes = if self.layout.cp_levels.is_empty() { &whole[..] } else { &self.layout.cp_levels };
        self.dense.groups(&[Axis::Cp]).iter().flat_map(|g| hierarchical(g, sizes, level)).collect()
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        if rank < self.world {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "rank {rank} is not in a world of {}; the last is {}",
            self.world,
            self.world - 1
        )))
    }
}
