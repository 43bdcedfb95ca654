//! Fault injection: `fault.inject` entries `KIND:key=value,…`, for tests and drills. See docs/faults.md.
//!
//! An entry acts on one rank at one step. What has acted is kept in the run folder, so that a step that is run again, or a
//! process that was restarted, does not meet the same fault again.

use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Folder of the entries that have acted, in the run folder.
const ACTED: &str = ".injected";

/// What is done to the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The process is killed (SIGKILL).
    Kill,
    /// The process is stopped (SIGSTOP).
    Stop,
    /// The compute stream waits forever, as behind a kernel that does not end.
    Hang,
    /// A bit of a tensor is inverted.
    Flip(FlipTarget),
    /// The loss weights of a micro-batch become NaN.
    Nan,
    /// The rank computes slower.
    Slow,
    /// The gradients of a step are multiplied by a factor, as where a scale is applied twice or not at all.
    Scale,
    /// The process keeps memory that it never frees.
    Leak,
    /// The rank does not make its next collective.
    Lose,
    /// The next save fails as on a full disk.
    Disk,
    /// A byte of the next checkpoint is damaged after it was written.
    Corrupt,
}

/// Whose bit is inverted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlipTarget {
    /// A weight, before the step.
    Weight,
    /// A gradient: of the step, after its reduction; or with `micro_batch` the sum so far, after that micro-batch.
    Gradient,
    /// An activation that the forward pass of a micro-batch saved for backward.
    Activation,
    /// Optimizer state: master weights and moments, before the step.
    Optimizer,
}

/// An entry of `fault.inject`.
#[derive(Clone, Debug, PartialEq)]
pub struct Injection {
    /// As it is written.
    pub text: String,
    /// What it does.
    pub kind: FaultKind,
    /// The rank.
    pub rank: usize,
    /// The process instead, as the launcher numbers them: hardware that is broken for good. It acts at every step, also at those
    /// that are run again, whatever rank the process has.
    pub process: Option<usize>,
    /// The first step at which it acts, from 1; of a save the first at or after it.
    pub step: u64,
    /// The micro-batch of the step on this rank, from 0.
    pub micro_batch: Option<usize>,
    /// How often it acts, at successive steps.
    pub times: u64,
    /// Bit of the element, from the lowest.
    pub bit: Option<usize>,
    /// Part of the tensor's name; all tensors otherwise.
    pub tensor: String,
    /// Index in the elements of all tensors that match, modulo their number.
    pub element: usize,
    /// By how much the rank is slower.
    pub percent: f64,
    /// What gradients are multiplied by.
    pub factor: f32,
    /// What a step leaks.
    pub bytes: usize,
}

/// Most bytes that a step leaks: a larger number is a mistake, and would end the process instead of leaking.
const MAX_LEAK: u64 = 1 << 30;

const KINDS: &str = "kill, stop, hang, flip, nan, slow, scale, leak, lose, disk, corrupt";

impl Injection {
    /// Parses `KIND:key=value,…`. The error says what is wrong and what is possible.
    pub fn parse(entry: &str) -> Result<Injection, String> {
        let (kind, keys) = entry.split_once(':').unwrap_or((entry, ""));
        let mut target = None;
        let mut out = Injection {
            text: entry.into(),
            kind: FaultKind::Nan,
            rank: 0,
            process: None,
            step: 0,
            micro_batch: None,
            times: if matches!(kind, "slow" | "scale" | "leak") { u64::MAX } else { 1 },
            bit: None,
            tensor: String::new(),
            element: 0,
            percent: 20.0,
            factor: 2.0,
            bytes: 1 << 20,
        };
        for pair in keys.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is not key=value"))?;
            let wrong = |e: &dyn std::fmt::Display| format!("{key}={value}: {e}");
            let whole = || value.parse::<u64>().map_err(|e| wrong(&e));
            match key {
                "process" => out.process = Some(whole()? as usize),
                "rank" => out.rank = whole()? as usize,
                "step" => out.step = whole()?,
                "micro_batch" => out.micro_batch = Some(whole()? as usize),
                "times" => out.times = whole()?,
                "bit" if kind == "flip" => out.bit = Some(whole()? as usize),
                "element" if kind == "flip" => out.element = whole()? as usize,
                "tensor" if kind == "flip" => out.tensor = value.into(),
                "target" if kind == "flip" => target = Some(FlipTarget::parse(value)?),
                "percent" if kind == "slow" => {
                    out.percent = value.parse().map_err(|e| wrong(&e))?;
                    if !(0.0..=1e6).contains(&out.percent) {
                        return Err(wrong(&"must be at least 0"));
                    }
                }
                "factor" if kind == "scale" => out.factor = value.parse().map_err(|e| wrong(&e))?,
                "bytes" if kind == "leak" => match whole()? {
                    bytes if bytes <= MAX_LEAK => out.bytes = bytes as usize,
                    _ => return Err(wrong(&"at most 1073741824 (1 GiB) a step")),
                },
                _ => {
                    let own = match kind {
                        "flip" => ", target, tensor, element, bit",
                        "slow" => ", percent",
                        "scale" => ", factor",
                        "leak" => ", bytes",
                        _ => "",
                    };
                    return Err(format!(
                        "{kind} has no key {key:?}; rank, process, step, micro_batch, times{own}"
                    ));
                }
            }
        }
        out.kind =
            match kind {
                "kill" => FaultKind::Kill,
                "stop" => FaultKind::Stop,
                "hang" => FaultKind::Hang,
                "nan" => FaultKind::Nan,
                "slow" => FaultKind::Slow,
                "scale" => FaultKind::Scale,
                "leak" => FaultKind::Leak,
                "lose" => FaultKind::Lose,
                "disk" => FaultKind::Disk,
                "corrupt" => FaultKind::Corrupt,
                "flip" => FaultKind::Flip(target.ok_or_else(|| {
                    "flip needs target=weight, gradient, activation or optimizer".to_string()
                })?),
                _ => return Err(format!("{kind:?} is no fault; one of {KINDS}")),
            };
        if out.step == 0 {
            return Err(format!("{kind} needs step=N, from 1"));
        }
        Ok(out)
    }
}

impl FlipTarget {
    fn parse(value: &str) -> Result<FlipTarget, String> {
        Ok(match value {
            "weight" => FlipTarget::Weight,
            "gradient" => FlipTarget::Gradient,
            "activation" => FlipTarget::Activation,
            "optimizer" => FlipTarget::Optimizer,
            _ => return Err(format!("target={value}: one of weight, gradient, activation, optimizer")),
        })
    }
}

/// The entries that act on one rank.
#[derive(Default)]
pub struct Injector {
    /// With the index of the entry, and how often it has acted.
    entries: Vec<(usize, Injection, AtomicU64)>,
    folder: Option<PathBuf>,
}

impl Injector {
    /// The entries of `list` for `rank`, which is that of process `process` of a launcher.
    pub fn new(list: &[String], rank: usize, process: Option<usize>) -> Result<Injector> {
        let mut entries = Vec::new();
        for (index, entry) in list.iter().enumerate() {
            let parsed = Injection::parse(entry)
                .map_err(|e| Error::Invalid(format!("fault.inject: {entry:?}: {e}")))?;
            if parsed.process.map_or(parsed.rank == rank, |of| process == Some(of)) {
                entries.push((index, parsed, AtomicU64::new(0)));
            }
        }
        Ok(Injector { entries, folder: None })
    }

    /// True if nothing acts on this rank.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keeps in `run`, the run folder, what has acted, and reads what has acted before; `fresh` forgets that.
    pub fn remember_in(&mut self, run: &Path, fresh: bool) {
        let folder = run.join(ACTED);
        for (index, entry, acted) in &mut self.entries {
            let file = folder.join(format!("{index}.{}", entry.rank));
            if fresh {
                drop(std::fs::remove_file(&file));
            }
            let count = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
            *acted.get_mut() = count.unwrap_or(0);
        }
        self.folder = Some(folder);
    }

    /// Takes the entry that acts now, if there is one: of a kind that `wanted` accepts, at `step`. It has acted from here on.
    pub fn take(&self, step: u64, wanted: impl Fn(&Injection) -> bool) -> Result<Option<&Injection>> {
        let acts = |(_, entry, acted): &&(usize, Injection, AtomicU64)| {
            let left = entry.process.is_some() || acted.load(Ordering::Relaxed) < entry.times;
            step >= entry.step && left && wanted(entry)
        };
        let Some((index, entry, acted)) = self.entries.iter().find(acts) else { return Ok(None) };
        let count = acted.fetch_add(1, Ordering::Relaxed) + 1;
        // What acts in every step writes nothing while the rank computes.
        let lasts = matches!(entry.kind, FaultKind::Slow | FaultKind::Scale | FaultKind::Leak);
        let is_kept = !lasts && entry.process.is_none();
        if let Some(folder) = self.folder.as_ref().filter(|_| is_kept) {
            let file = folder.join(format!("{index}.{}", entry.rank));
            std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
            crate::fs::write_atomic(&file, count.to_string().as_bytes())?;
        }
        if !lasts {
            tracing::warn!(step, fault = entry.text, "injecting a fault");
        }
        Ok(Some(entry))
    }
}
