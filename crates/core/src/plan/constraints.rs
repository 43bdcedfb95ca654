//! What a user fixes of a layout: `tp=4,pp=2,micro_batch=1`.

use super::hardware::GemmDtype;
use crate::pipeline::ScheduleKind;
use crate::{Error, Result};
use ferrotron_engine::Recompute;

/// A size that is fixed or free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice(pub Option<usize>);

impl Choice {
    /// The fixed value, or all that are possible.
    pub(super) fn values(self, all: &[usize]) -> Vec<usize> {
        self.0.map_or_else(|| all.to_vec(), |v| vec![v])
    }
}

/// What is fixed.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraints {
    /// Tensor parallel.
    pub tp: Choice,
    /// Context parallel.
    pub cp: Choice,
    /// Pipeline parallel.
    pub pp: Choice,
    /// Chunks per pipeline stage.
    pub vp: Choice,
    /// Expert parallel.
    pub ep: Choice,
    /// Tensor parallel inside an expert.
    pub etp: Choice,
    /// ZeRO stage.
    pub zero: Choice,
    /// Sequences of a micro-batch.
    pub micro_batch: Choice,
    /// Recomputation.
    pub recompute: Option<Recompute>,
    /// The pipeline schedule.
    pub schedule: Option<ScheduleKind>,
    /// Dtypes of quantized GEMMs to choose from.
    pub dtypes: Vec<GemmDtype>,
}

impl Constraints {
    /// Everything free, with these dtypes.
    pub fn free(dtypes: Vec<GemmDtype>) -> Constraints {
        let free = Choice(None);
        Constraints {
            tp: free,
            cp: free,
            pp: free,
            vp: free,
            ep: free,
            etp: free,
            zero: free,
            micro_batch: free,
            recompute: None,
            schedule: None,
            dtypes,
        }
    }

    /// Fixes what `text` says, `tp=4,pp=2,micro_batch=1,recompute=full`.
    pub fn fix(&mut self, text: &str) -> Result<()> {
        let mut given = Vec::new();
        for item in text.split(',').map(str::trim).filter(|s| !s.is_empty()) {
            let wrong = |what: &str| Error::Invalid(format!("layout {item:?}: {what}"));
            let (key, value) =
                item.split_once('=').ok_or_else(|| wrong("write key=value, as in tp=4,pp=2"))?;
            if given.contains(&key) {
                return Err(wrong(&format!("{key} is given twice")));
            }
            given.push(key);
            if key == "recompute" {
                let names = ["none", "norm+activation", "mlp", "full"];
                let at = names.iter().position(|n| *n == value);
                let at = at.ok_or_else(|| wrong(&format!("recompute is one of {}", names.join(", "))))?;
                self.recompute = Some(super::recompute_sets()[at]);
                continue;
            }
            if key == "schedule" {
                self.schedule = Some(match value {
                    "1f1b" => ScheduleKind::OneForwardOneBackward,
                    "zero-bubble" => ScheduleKind::ZeroBubble,
                    _ => return Err(wrong("schedule is 1f1b or zero-bubble")),
                });
                continue;
            }
            if key == "precision" {
                let named = GemmDtype::ALL.into_iter().find(|d| d.name() == value);
                self.dtypes = vec![named.ok_or_else(|| wrong("precision is bf16, fp8, mxfp8 or nvfp4"))?];
                continue;
            }
            let number = value.parse::<usize>().ok().filter(|n| (1..=1 << 20).contains(n));
            let number = match (key, value) {
                ("zero", "0") => Some(0),
                _ => number,
            };
            let number = number.ok_or_else(|| wrong("the size must be a whole number of at least 1"))?;
            let slot = match key {
                "tp" => &mut self.tp,
                "cp" => &mut self.cp,
                "pp" => &mut self.pp,
                "vp" => &mut self.vp,
                "ep" => &mut self.ep,
                "etp" => &mut self.etp,
                "zero" if number <= 3 => &mut self.zero,
                "zero" => return Err(wrong("ZeRO stages are 0 to 3")),
                "micro_batch" | "mbs" => &mut self.micro_batch,
                "dp" => {
                    return Err(wrong(
                        "dp follows from the number of GPUs and the other sizes; leave it out",
                    ));
                }
                _ => {
                    return Err(wrong(
                        "the keys are tp, cp, pp, vp, ep, etp, zero, micro_batch, recompute, schedule and precision",
                    ));
                }
            };
            *slot = Choice(Some(number));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_fix_what_they_name() {
        let mut c = Constraints::free(vec![GemmDtype::Bf16]);
        c.fix("tp=4, pp=2,micro_batch=1,zero=0,recompute=full").unwrap();
        assert_eq!(
            (c.tp.0, c.pp.0, c.micro_batch.0, c.zero.0, c.cp.0),
            (Some(4), Some(2), Some(1), Some(0), None)
        );
        assert!(c.recompute.is_some_and(|r| r.layer));
        c.fix("etp=2,schedule=zero-bubble,precision=fp8").unwrap();
        assert_eq!(
            (c.etp.0, c.schedule, c.dtypes.clone()),
            (Some(2), Some(ScheduleKind::ZeroBubble), vec![GemmDtype::Fp8])
        );
        for (text, part) in [
            ("tp", "key=value"),
            ("tp=0", "at least 1"),
            ("zero=4", "0 to 3"),
            ("dp=2", "leave it out"),
            ("ap=2", "the keys are"),
            ("recompute=some", "one of none"),
            ("schedule=gpipe", "1f1b or zero-bubble"),
            ("precision=fp7", "bf16, fp8"),
        ] {
            let e = c.fix(text).unwrap_err().to_string();
            assert!(e.contains(part), "{text}: {e}");
        }
    }
}
