//! Who is who: the ranks of a run as two grids over the same numbers, and all groups that talk to each other.
//!
//! The dense grid is tp × cp × dp × pp; the expert grid is etp × ep × edp × pp over the same ranks, so that expert
//! parallelism may span tensor, context and data ranks ("folding"). Both have the same pipelines.
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

/// Where a rank stands along every axis of both grids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// Tensor.
    pub tp: usize,
    /// Context.
    pub cp: usize,
    /// Data, in the dense grid.
    pub dp: usize,
    /// GroupRank among the `dp·cp` ranks that share dense parameters; cp is fast in the usual order.
    pub dp_cp: usize,
    /// Pipeline.
    pub pp: usize,
    /// Tensor, inside an expert.
    pub etp: usize,
    /// Expert.
    pub ep: usize,
    /// Data, among copies of an expert.
    pub edp: usize,
}

/// A legal layout over a world of ranks. Plain numbers: nothing here communicates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    layout: RankLayout,
    world: usize,
    dense: Axes,
    expert: Axes,
}

impl Grid {
    /// The grids of a layout over `world` ranks. An illegal one is refused in a sentence with the nearest legal
    /// sizes.
    pub fn new(layout: RankLayout, world: usize) -> Result<Grid> {
        let (dense, expert) = legal::grids(&layout, world)?;
        Ok(Grid { layout, world, dense, expert })
    }

    /// The grid of a layout over the world that it makes, [`RankLayout::world`].
    pub fn of(layout: RankLayout) -> Result<Grid> {
        let world = layout.world()?;
        Grid::new(layout, world)
    }

    /// The layout.
    pub fn layout(&self) -> &RankLayout {
        &self.layout
    }

    /// All ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Data-parallel ranks of the dense grid: `world / (tp·cp·pp)`.
    pub fn dp(&self) -> usize {
        self.dense.size(Axis::Dp)
    }

    /// Copies of each expert: `world / (etp·ep·pp)`.
    pub fn edp(&self) -> usize {
        self.expert.size(Axis::Dp)
    }

    /// The dense grid.
    pub fn dense(&self) -> &Axes {
        &self.dense
    }

    /// The expert grid, where `tp` means etp and `dp` means edp.
    pub fn expert(&self) -> &Axes {
        &self.expert
    }

    /// Where a rank stands. Ranks beyond the world are refused.
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

    /// All groups of a name of [`RULES`], or of any token such as `cp-pp`; with `ep`, `etp` or `edp` in it the token
    /// is of the expert grid. `mp` is `tp-pp`. The list and each group are in the grid's order.
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

    /// The group of that name in which `rank` is; `None` where it is in none, as most are in no `embd`.
    pub fn group(&self, name: &str, rank: usize) -> Result<Option<Vec<usize>>> {
        self.check_rank(rank)?;
        Ok(self.groups(name)?.into_iter().find(|g| g.contains(&rank)))
    }

    /// The groups of one level of hierarchical context parallelism, innermost first; without levels the whole cp
    /// groups are level 0.
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
