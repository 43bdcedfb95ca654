//! Validation data of a blend: every member keeps its own samples, so that a loss can be given for each.

use super::split::normalize;
use super::{Batches, Member, Row};
use crate::{Error, Result};

/// The validation splits of the members that have one, with their weights.
pub struct ValidationBlend {
    members: Vec<(String, f64, Box<dyn Batches>)>,
}

impl ValidationBlend {
    /// Members by name, weight and samples. Weights are normalized over them.
    pub fn new(members: Vec<(String, f64, Box<dyn Batches>)>) -> Result<Self> {
        let weights = normalize(&members.iter().map(|(_, w, _)| *w).collect::<Vec<_>>())?;
        if members.is_empty() {
            return Err(Error::Invalid("a validation blend without members".into()));
        }
        let members = members.into_iter().zip(weights).map(|((name, _, data), w)| (name, w, data)).collect();
        Ok(Self { members })
    }
}

/// As one source, its samples come from the members in turn.
impl Batches for ValidationBlend {
    fn seq(&self) -> usize {
        self.members[0].2.seq()
    }

    fn samples(&self) -> u64 {
        self.members.iter().map(|m| m.2.samples()).fold(0, u64::saturating_add)
    }

    fn resets(&self) -> bool {
        self.members.iter().any(|m| m.2.resets())
    }

    fn members(&self) -> Vec<Member<'_>> {
        self.members.iter().map(|(name, weight, data)| Member { name, weight: *weight, data }).collect()
    }

    fn length(&self, n: u64) -> Result<Option<usize>> {
        let k = self.members.len() as u64;
        self.members[(n % k) as usize].2.length(n / k)
    }

    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let k = self.members.len() as u64;
        self.members[(n % k) as usize].2.row(n / k, row)
    }
}
