//! Parallel layouts (`tp=2,pp=2`) and the two sides of `parity` (`bf16,threads=1`), as given on the command line.

use crate::args::Device;
use ferrotron_core::config::{Precision, QuantRecipe, nearest};
use ferrotron_core::grid;
use std::str::FromStr;

/// A parallel layout; sizes that are not set are 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Tensor-parallel size.
    pub tp: Option<usize>,
    /// Context-parallel size.
    pub cp: Option<usize>,
    /// Pipeline stages.
    pub pp: Option<usize>,
    /// Virtual pipeline stages (model chunks) per rank.
    pub vp: Option<usize>,
    /// Data-parallel size.
    pub dp: Option<usize>,
    /// Expert-parallel size.
    pub ep: Option<usize>,
    /// Tensor-parallel size of experts; `tp` unless given.
    pub etp: Option<usize>,
}

const LAYOUT_KEYS: [&str; 7] = ["tp", "cp", "pp", "vp", "dp", "ep", "etp"];

impl Layout {
    fn put(&mut self, key: &str, value: &str) -> Result<(), String> {
        let place = match key {
            "tp" => &mut self.tp,
            "cp" => &mut self.cp,
            "pp" => &mut self.pp,
            "vp" => &mut self.vp,
            "dp" => &mut self.dp,
            "ep" => &mut self.ep,
            "etp" => &mut self.etp,
            _ => return Err(format!("unknown layout key {key:?}; the keys are {}", LAYOUT_KEYS.join(", "))),
        };
        match value.parse::<usize>() {
            Ok(n) if n > 0 && place.is_none() => *place = Some(n),
            Ok(n) if n > 0 => return Err(format!("{key} is given twice")),
            _ => return Err(format!("{key} needs a whole number of at least 1, not {value:?}")),
        }
        Ok(())
    }

    /// Every key with its size.
    pub fn sizes(&self) -> [(&'static str, Option<usize>); 7] {
        let Layout { tp, cp, pp, vp, dp, ep, etp } = *self;
        [("tp", tp), ("cp", cp), ("pp", pp), ("vp", vp), ("dp", dp), ("ep", ep), ("etp", etp)]
    }

    /// The layout of the rank grid.
    pub fn grid(&self) -> grid::RankLayout {
        let one = |n: Option<usize>| n.unwrap_or(1);
        grid::RankLayout {
            tp: one(self.tp),
            cp: one(self.cp),
            pp: one(self.pp),
            vp: one(self.vp),
            dp: self.dp,
            ep: one(self.ep),
            etp: self.etp,
            ..grid::RankLayout::default()
        }
    }
}

impl FromStr for Layout {
    type Err = String;
    fn from_str(text: &str) -> Result<Layout, String> {
        let mut layout = Layout::default();
        for item in text.split(',').map(str::trim).filter(|s| !s.is_empty()) {
            let (key, value) =
                item.split_once('=').ok_or_else(|| format!("{item:?} is not key=size, such as tp=2"))?;
            layout.put(key.trim(), value.trim())?;
        }
        Ok(layout)
    }
}

/// One side of `parity`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParitySide {
    /// Compute precision; the recipe's unless given.
    pub dtype: Option<Precision>,
    /// Device; the command's unless given.
    pub device: Option<Device>,
    /// CPU threads; the command's unless given.
    pub threads: Option<usize>,
    /// FP8 recipe; the recipe's unless given.
    pub fp8: Option<QuantRecipe>,
    /// Micro-batch size; the recipe's unless given.
    pub micro_batch: Option<usize>,
    /// The layout.
    pub layout: Layout,
    /// The text of the command line.
    pub text: String,
}

impl FromStr for ParitySide {
    type Err = String;
    fn from_str(text: &str) -> Result<ParitySide, String> {
        let mut side = ParitySide { text: text.into(), ..ParitySide::default() };
        for item in text.split(',').map(str::trim).filter(|s| !s.is_empty()) {
            let (key, value) = match item.split_once('=') {
                Some((key, value)) => (key.trim(), value.trim()),
                None if item.parse::<Precision>().is_ok() => ("dtype", item),
                None if item.parse::<Device>().is_ok() => ("device", item),
                None => {
                    return Err(format!(
                        "{item:?} is neither a precision (f32, bf16, f16), a device (cpu, cuda, cuda:N) nor key=value"
                    ));
                }
            };
            let number =
                || value.parse::<usize>().map_err(|_| format!("{key} needs a whole number, not {value:?}"));
            match key {
                "dtype" => side.dtype = Some(value.parse()?),
                "device" => side.device = Some(value.parse()?),
                "fp8" => side.fp8 = Some(format!("fp8-{value}").parse().or_else(|_| value.parse())?),
                "threads" => side.threads = Some(number()?),
                "micro_batch" => side.micro_batch = Some(number()?),
                _ if LAYOUT_KEYS.contains(&key) => side.layout.put(key, value)?,
                _ => {
                    let keys =
                        ["dtype", "device", "fp8", "threads", "micro_batch"].into_iter().chain(LAYOUT_KEYS);
                    let near = nearest(key, keys).map(|n| format!("; did you mean {n}?")).unwrap_or_default();
                    return Err(format!("unknown key {key:?} in {text:?}{near}"));
                }
            }
        }
        Ok(side)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts() {
        let l: Layout = "tp=2, pp=4,etp=1".parse().unwrap();
        assert_eq!((l.tp, l.pp, l.etp, l.dp), (Some(2), Some(4), Some(1), None));
        assert_eq!(l.grid().world().unwrap(), 8);
        assert_eq!("".parse::<Layout>().unwrap().grid().world().unwrap(), 1);
        assert_eq!("tp=1".parse::<Layout>().unwrap().grid().world().unwrap(), 1);
        for bad in ["tp", "tp=0", "tp=-1", "tp=x", "tp=2,tp=2", "xp=2", "tp=99999999999999999999"] {
            assert!(bad.parse::<Layout>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sides() {
        let s: ParitySide = "bf16,threads=1,tp=2".parse().unwrap();
        assert_eq!((s.dtype, s.threads, s.layout.tp), (Some(Precision::Bf16), Some(1), Some(2)));
        assert_eq!("cpu".parse::<ParitySide>().unwrap().device, Some(Device::Cpu));
        assert_eq!("dtype=f32,micro_batch=2".parse::<ParitySide>().unwrap().micro_batch, Some(2));
        assert_eq!("bf16,fp8=block".parse::<ParitySide>().unwrap().fp8, Some(QuantRecipe::Fp8Block));
        assert!("fp8=yes".parse::<ParitySide>().is_err());
        assert!("fp16".parse::<ParitySide>().unwrap_err().contains("f32, bf16"));
        assert!("thread=1".parse::<ParitySide>().unwrap_err().contains("did you mean threads?"));
        assert!("dtype=fp16".parse::<ParitySide>().is_err());
    }
}
