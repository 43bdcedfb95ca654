//! The parallel sizes a user asks for.

use std::str::FromStr;

use crate::{Error, Result};

/// Sizes of all kinds of parallelism. Written as `RankLayout { tp: 2, ..RankLayout::default() }`, or parsed from
/// `tp=2,pp=2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// Tensor-parallel size.
    pub tp: usize,
    /// Context-parallel size.
    pub cp: usize,
    /// Number of pipeline stages.
    pub pp: usize,
    /// Virtual pipeline size: model chunks per stage.
    pub vp: usize,
    /// Number of replicas of the smallest world that holds the other sizes, see [`RankLayout::world`]; `None` takes
    /// as many as fit. The data-parallel size of the dense grid is [`Grid::dp`](super::Grid::dp).
    pub dp: Option<usize>,
    /// Expert-parallel size.
    pub ep: usize,
    /// Tensor-parallel size inside an expert; `None` means `tp`.
    pub etp: Option<usize>,
    /// Axes from the fastest to the slowest varying.
    pub order: String,
    /// Number of optimizer instances: replicas of the sharded optimizer state.
    pub instances: usize,
    /// Sizes of the levels of hierarchical context parallelism, innermost first; empty for none.
    pub cp_levels: Vec<usize>,
}

/// The default order of axes.
pub const ORDER: &str = "tp-cp-ep-dp-pp";

impl Default for RankLayout {
    fn default() -> RankLayout {
        RankLayout {
            tp: 1,
            cp: 1,
            pp: 1,
            vp: 1,
            dp: None,
            ep: 1,
            etp: None,
            order: ORDER.into(),
            instances: 1,
            cp_levels: Vec::new(),
        }
    }
}

impl RankLayout {
    /// Tensor-parallel size inside an expert.
    pub fn etp(&self) -> usize {
        self.etp.unwrap_or(self.tp)
    }

    /// Number of ranks of this layout: `lcm(tp·cp·pp, etp·ep·pp) × dp`, with dp 1 if not given.
    pub fn world(&self) -> Result<usize> {
        self.smallest()?.checked_mul(self.dp.unwrap_or(1)).ok_or_else(|| self.too_large())
    }

    /// The smallest number of ranks that holds both grids.
    pub(super) fn smallest(&self) -> Result<usize> {
        let product = |sizes: [usize; 3]| sizes.into_iter().try_fold(1usize, usize::checked_mul);
        let dense = product([self.tp, self.cp, self.pp]);
        let expert = product([self.etp(), self.ep, self.pp]);
        if dense == Some(0) || expert == Some(0) {
            return Err(Error::Invalid(format!("{self}: every size must be at least 1; 1 means not split")));
        }
        let least = match (dense, expert) {
            (Some(a), Some(b)) => (a / gcd(a, b)).checked_mul(b),
            _ => None,
        };
        least.ok_or_else(|| self.too_large())
    }

    fn too_large(&self) -> Error {
        Error::Invalid(format!("{self} needs more ranks than can be counted; make it smaller"))
    }
}

impl crate::config::ParallelSection {
    /// The layout of a recipe.
    pub fn layout(&self) -> RankLayout {
        let (tp, cp, pp, vp, ep, etp) = (self.tp, self.cp, self.pp, self.vp, self.ep, self.etp);
        let layout = RankLayout { tp, cp, pp, vp, ep, etp, ..RankLayout::default() };
        // `parallel.dp` is the data-parallel size of the dense grid.
        let dp = match layout.smallest() {
            Ok(least) => tp.saturating_mul(cp).saturating_mul(pp).saturating_mul(self.dp) / least,
            Err(_) => self.dp,
        };
        let replicas = self.dp.saturating_mul(cp);
        let instances = self.fsdp_group.map_or(1, |n| replicas / n.clamp(1, replicas.max(1)));
        RankLayout { dp: Some(dp), instances, ..layout }
    }
}

impl std::fmt::Display for RankLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let mut parts = vec![];
        let dp = self.dp.unwrap_or(1);
        let sizes =
            [("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("vp", self.vp), ("dp", dp), ("ep", self.ep)];
        for (key, size) in sizes {
            if size != 1 {
                parts.push(format!("{key}={size}"));
            }
        }
        if let Some(etp) = self.etp
            && etp != self.tp
        {
            parts.push(format!("etp={etp}"));
        }
        if parts.is_empty() {
            parts.push("tp=1".into());
        }
        f.write_str(&parts.join(","))?;
        if self.order != ORDER { write!(f, ",order={}", self.order) } else { Ok(()) }
    }
}

impl FromStr for RankLayout {
    type Err = Error;

    /// Parses `tp=2,pp=2`; the keys are tp, cp, pp, vp, dp, ep, etp and order.
    fn from_str(text: &str) -> Result<RankLayout> {
        let mut layout = RankLayout::default();
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let wrong = |why: &str| Error::Invalid(format!("layout {text:?}: {part:?} {why}"));
            let (key, value) =
                part.split_once('=').ok_or_else(|| wrong("is not of the form key=size, such as tp=2"))?;
            let (key, value) = (key.trim(), value.trim());
            if seen.contains(&key) {
                return Err(wrong("comes after another value for the same key; give one"));
            }
            seen.push(key);
            if key == "order" {
                layout.order = value.into();
                continue;
            }
            let size = value.parse::<usize>().ok().filter(|n| *n > 0);
            let size = size.ok_or_else(|| wrong("does not give a size of at least 1"))?;
            match key {
                "tp" => layout.tp = size,
                "cp" => layout.cp = size,
                "pp" => layout.pp = size,
                "vp" => layout.vp = size,
                "dp" => layout.dp = Some(size),
                "ep" => layout.ep = size,
                "etp" => layout.etp = Some(size),
                _ => {
                    return Err(wrong(
                        "has no known key; the keys are tp, cp, pp, vp, dp, ep, etp and order",
                    ));
                }
            }
        }
        Ok(layout)
    }
}

pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
