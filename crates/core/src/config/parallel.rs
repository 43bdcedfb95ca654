//! Checks of the `[parallel]` section: sizes, ZeRO, and ranks that hold experts.

use super::{FsdpOuter, Recipe, Resolved};
use crate::error::Result;

/// Of one kind of parallelism; the product of three of them fits in 64 bits.
const MAX_RANKS: usize = 1 << 20;

impl Recipe {
    pub(super) fn check_parallel(&self) -> Result<()> {
        let p = &self.config.parallel;
        let sizes = [
            ("tp", p.tp),
            ("cp", p.cp),
            ("pp", p.pp),
            ("vp", p.vp),
            ("dp", p.dp),
            ("ep", p.ep),
            ("etp", p.etp.unwrap_or(1)),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return self.refuse(&format!("parallel.{key}"), "must be at least 1; 1 means not split");
        }
        if let Some((key, n)) = sizes.iter().find(|(_, n)| *n > MAX_RANKS) {
            let what = format!("{n} is too large; it must be at most {MAX_RANKS}");
            return self.refuse(&format!("parallel.{key}"), what);
        }
        if p.zero > 3 {
            return self.refuse("parallel.zero", "must be 0, 1, 2 or 3");
        }
        if let Some(size) = p.fsdp_group {
            let replicas = p.dp.saturating_mul(p.cp);
            if p.zero != 3 {
                return self.refuse("parallel.fsdp_group", "is for sharded weights; set parallel.zero to 3");
            }
            if size == 0 || !replicas.is_multiple_of(size) {
                let what =
                    format!("must divide the {replicas} data-parallel ranks (parallel.dp x parallel.cp)");
                return self.refuse("parallel.fsdp_group", &what);
            }
        }
        if p.fsdp_outer == FsdpOuter::Optimizer && p.fsdp_group.is_none() {
            let what = "is for groups of ranks that hold the same shards; set parallel.fsdp_group";
            return self.refuse("parallel.fsdp_outer", what);
        }
        if p.comm_unit.is_some_and(|bytes| bytes.0 == 0) {
            return self.refuse("parallel.comm_unit", "must be at least 1 byte; leave it out to derive it");
        }
        if p.vp > 1 && p.pp == 1 {
            return self.refuse("parallel.vp", "needs a pipeline; set it to 1, or parallel.pp to 2 or more");
        }
        Ok(())
    }

    /// Every rank holds a part of an expert: etp·ep·pp divides the number of ranks.
    pub(super) fn check_expert_ranks(&self, r: &Resolved) -> Result<()> {
        let (p, batch) = (&r.config.parallel, r.config.train.global_batch);
        let layout = p.layout();
        let experts = layout.etp().saturating_mul(p.ep).saturating_mul(p.pp);
        let ranks = p.tp.saturating_mul(p.cp).saturating_mul(p.pp).saturating_mul(p.dp);
        if r.model.moe.is_none() && !ranks.is_multiple_of(experts) {
            let what = format!(
                "{} splits experts, which this model has none of, and does not divide the {ranks} ranks of tp x cp x pp x dp; leave it out",
                layout.etp()
            );
            return self.refuse("parallel.etp", what);
        }
        if r.derived.iter().any(|d| d.key == "parallel.dp") && !batch.is_multiple_of(p.dp) {
            let key = if self.is_set("parallel.etp") { "parallel.etp" } else { "parallel.ep" };
            let what = format!(
                "etp x ep = {} ranks hold the experts, which makes parallel.dp {}; it does not divide train.global_batch = {batch}; change one",
                layout.etp().saturating_mul(p.ep),
                p.dp
            );
            return self.refuse(key, what);
        }
        Ok(())
    }
}
