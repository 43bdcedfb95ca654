//! Expected split sizes of the dropless all-to-all: known before the tokens are routed, so that the host waits for no counts.
//!
//! NCCL takes the sizes of messages from the host. A step's messages therefore have room for what each pair of ranks exchanged
//! in the steps before, and headroom. Both ranks of a pair know the counts of what they exchanged, and compute the size from
//! them by the same formula, so that they agree without a message. Where more tokens are routed to a rank than its slot
//! holds, the device sets a flag; the optimizer then applies no update on any rank, and the step is run again with sizes that
//! the host reads.

use super::state::MoeLayerId;
use crate::Rank;
use ferrotron_kernels::SlotUse;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Steps after which the largest count is forgotten, roughly: it decays by this share.
const MEMORY: usize = 32;

/// Headroom of a message beyond the rows that the recent steps needed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitHeadroom {
    /// Share of those rows, `moe.split_headroom`.
    pub share: f64,
    /// Rows on top: small counts vary by more than a share.
    pub rows: usize,
    /// Sizes are multiples of this.
    pub multiple: usize,
    /// Steps in a row that sizes must have held before they are used; every overflow doubles it.
    pub calm: u32,
}

impl SplitHeadroom {
    /// The headroom of a recipe that asks for this share.
    pub fn new(share: f64) -> SplitHeadroom {
        SplitHeadroom { share, rows: 16, multiple: 16, calm: 2 }
    }

    /// Rows of a slot for `count` rows with a part of the headroom: all of it, or less.
    fn size(&self, count: usize, part: f64) -> usize {
        let room = count as f64 * self.share * part + self.rows as f64 * part;
        (count + room.ceil() as usize).next_multiple_of(self.multiple.max(1))
    }

    /// Whether a slot has lost three quarters of its headroom, or is more than twice as large as it needs to be.
    fn is_unfit(&self, count: usize, slot: usize) -> bool {
        self.size(count, 0.25) > slot || 2 * self.size(count, 1.0) < slot
    }
}

/// Sizes and counts of a rank's n MoE layers in a group of r ranks.
pub struct SplitSizes {
    headroom: SplitHeadroom,
    ranks: usize,
    /// i32 `[n, 2, r + 1]`: first row of each rank's slot in messages that are sent, and received.
    slots: Tensor,
    /// i32 `[n·2·r + 1]`: the most rows for, and from, each rank in a micro-batch of the step; then whether some did not fit.
    needed: Tensor,
    host: Mutex<HostSizes>,
}

/// What the host knows.
#[derive(Default)]
struct HostSizes {
    /// `[n, 2, r]`: rows of the slots; none: the host reads the counts.
    sizes: Option<Vec<usize>>,
    /// `[n, 2, r]`: largest counts of the recent steps.
    recent: Vec<usize>,
    /// `[n, 2, r]`: largest counts of the step so far, where the host reads them.
    counted: Vec<usize>,
    /// The step reads the counts although sizes are known.
    exact: bool,
}

/// What the messages of a step had to hold: largest counts, `[n, 2, r]`.
pub enum StepCounts {
    /// Counts that the host read.
    Host(Vec<usize>),
    /// i32 `[n·2·r + 1]`: counts on the device, and whether some did not fit.
    Device(Tensor),
}

impl StepCounts {
    /// The counts, and whether some did not fit. `s` has waited for the step.
    pub fn read(&self, s: &Stream) -> Result<(Vec<usize>, bool)> {
        match self {
            StepCounts::Host(counts) => Ok((counts.clone(), false)),
            StepCounts::Device(t) => {
                let mut all: Vec<usize> =
                    s.download::<i32>(t)?.into_iter().map(|n| usize::try_from(n).unwrap_or(0)).collect();
                let overflow = all.pop().is_some_and(|flag| flag != 0);
                Ok((all, overflow))
            }
        }
    }
}

/// Messages of one layer whose sizes are known.
pub(super) struct LayerSplits {
    /// Rows for each rank, and from each.
    pub(super) sent: Vec<usize>,
    pub(super) received: Vec<usize>,
    /// i32 `[r + 1]` each: first rows of their slots.
    pub(super) slots: [Tensor; 2],
    /// i32 `[r]` each: see [`SlotUse`].
    peaks: [Tensor; 2],
    overflow: Tensor,
}

impl LayerSplits {
    /// Of the messages that are sent (0) or received (1).
    pub(super) fn slot_use(&self, side: usize) -> SlotUse<'_> {
        SlotUse { peaks: &self.peaks[side], overflow: &self.overflow }
    }
}

impl SplitSizes {
    /// Memory for `layers` MoE layers; the host reads the counts until [`SplitSizes::set_sizes`].
    pub(super) fn new(rank: &Rank, layers: usize, headroom: SplitHeadroom) -> Result<SplitSizes> {
        let (s, ranks) = (&rank.compute, rank.etp_ep_group.size());
        let counts = layers * 2 * ranks;
        let zeros = |shape: &[usize]| s.zeros(shape, DType::I32, Category::Communication);
        let none = vec![0; counts];
        Ok(SplitSizes {
            headroom,
            ranks,
            slots: zeros(&[layers, 2, ranks + 1])?,
            needed: zeros(&[counts + 1])?,
            host: Mutex::new(HostSizes { recent: none.clone(), counted: none, ..HostSizes::default() }),
        })
    }

    fn host(&self) -> MutexGuard<'_, HostSizes> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counts(&self) -> usize {
        self.needed.numel() - 1
    }

    /// i32 `[1]`: 1 from the first message that did not hold its rows until [`SplitSizes::clear_overflow`]. A step that was
    /// launched after that one is not to be applied either.
    pub fn overflow(&self) -> Result<Tensor> {
        self.needed.narrow(0, self.counts(), 1)
    }

    /// The overflow was handled.
    pub fn clear_overflow(&self, s: &Stream) -> Result<()> {
        s.zero(&self.overflow()?)
    }

    /// From now on, whether the host reads the counts although sizes are known.
    pub fn set_exact(&self, exact: bool) {
        self.host().exact = exact;
    }

    /// Forgets sizes, counts and an overflow, as at the start of a run. All ranks do so at the same step.
    pub fn reset(&self, s: &Stream) -> Result<()> {
        let none = vec![0; self.counts()];
        *self.host() = HostSizes { recent: none.clone(), counted: none, ..HostSizes::default() };
        self.clear_overflow(s)
    }

    /// Resets the counts for a new step.
    pub(super) fn begin_step(&self, s: &Stream) -> Result<()> {
        self.host().counted.fill(0);
        s.zero(&self.needed.narrow(0, 0, self.counts())?)
    }

    /// The counts of the step whose passes were launched last.
    pub fn step_counts(&self, s: &Stream) -> Result<StepCounts> {
        let host = self.host();
        if host.sizes.is_none() || host.exact {
            return Ok(StepCounts::Host(host.counted.clone()));
        }
        let copy = Tensor::empty(s, self.needed.shape(), DType::I32, Category::Communication)?;
        s.copy(&self.needed, &copy)?;
        Ok(StepCounts::Device(copy))
    }

    /// Whether sizes should follow the counts of an ended step.
    pub fn are_unfit(&self, counts: &[usize]) -> bool {
        let host = self.host();
        let Some(sizes) = &host.sizes else { return true };
        let recent = host.recent.iter().zip(counts).map(|(recent, count)| remembered(*recent, *count));
        recent.zip(sizes).any(|(count, slot)| self.headroom.is_unfit(count, *slot))
    }

    /// Whether sizes would have held the counts of a step.
    pub fn hold(&self, counts: &[usize]) -> bool {
        let host = self.host();
        host.sizes.as_ref().is_some_and(|sizes| counts.iter().zip(sizes).all(|(count, slot)| count <= slot))
    }

    /// Remembers the counts of an ended step.
    pub fn remember(&self, counts: &[usize]) {
        let mut host = self.host();
        host.recent.iter_mut().zip(counts).for_each(|(recent, count)| *recent = remembered(*recent, *count));
    }

    /// Sizes follow the remembered counts, in the next step that is launched. All ranks do so after the same step.
    pub fn set_sizes(&self, s: &Stream) -> Result<()> {
        let mut host = self.host();
        let sizes: Vec<usize> = host.recent.iter().map(|n| self.headroom.size(*n, 1.0)).collect();
        let starts = |slots: &[usize]| {
            let mut at = 0;
            let mut next = |n: &usize| {
                at += n;
                at as i32
            };
            std::iter::once(0).chain(slots.iter().map(&mut next)).collect::<Vec<i32>>()
        };
        let slots: Vec<i32> = sizes.chunks(self.ranks).flat_map(starts).collect();
        s.upload_into(&self.slots, &slots)?;
        host.sizes = Some(sizes);
        Ok(())
    }

    /// The messages of a layer; none where the host reads the counts.
    pub(super) fn layer(&self, id: MoeLayerId) -> Result<Option<LayerSplits>> {
        let host = self.host();
        let Some(sizes) = host.sizes.as_ref().filter(|_| !host.exact) else { return Ok(None) };
        let (r, first) = (self.ranks, id.0 * 2 * self.ranks);
        let slots = |side| self.slots.narrow(0, id.0, 1)?.narrow(1, side, 1)?.view(&[r + 1]);
        let peaks = |side: usize| self.needed.narrow(0, first + side * r, r);
        Ok(Some(LayerSplits {
            sent: sizes[first..first + r].to_vec(),
            received: sizes[first + r..first + 2 * r].to_vec(),
            slots: [slots(0)?, slots(1)?],
            peaks: [peaks(0)?, peaks(1)?],
            overflow: self.overflow()?,
        }))
    }

    /// The host has read the counts of a micro-batch in a layer.
    pub(super) fn count(&self, id: MoeLayerId, sent: &[usize], received: &[usize]) {
        let mut host = self.host();
        let layer = host.counted.iter_mut().skip(id.0 * 2 * self.ranks);
        layer.zip(sent.iter().chain(received)).for_each(|(most, n)| *most = (*most).max(*n));
    }
}

/// The largest count of recent steps, after one more step.
fn remembered(recent: usize, count: usize) -> usize {
    count.max(recent - recent / MEMORY)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_stay_while_counts_vary_within_the_headroom() {
        let headroom = SplitHeadroom::new(0.25);
        for count in [0, 1, 50, 1000, 54_321] {
            let slot = headroom.size(count, 1.0);
            assert!(slot >= count + count / 4 + 16 && slot <= count + count / 4 + 33, "{count}: {slot}");
            assert!(!headroom.is_unfit(count, slot));
            assert!(!headroom.is_unfit(count + count / 10, slot), "{count}");
            assert!(headroom.is_unfit(slot + 1, slot), "{count} overflows");
            assert!(headroom.is_unfit(count, 3 * slot), "{count}");
        }
        // What has not been seen for long is forgotten.
        let mut recent = 1000;
        (0..500).for_each(|_| recent = remembered(recent, 100));
        assert_eq!(recent, 100);
        assert_eq!(remembered(100, 150), 150);
    }

    #[test]
    fn sizes_begin_with_what_the_host_counted() {
        let rank = Rank::cpu(1, 1).unwrap();
        let s = &rank.compute;
        let splits = SplitSizes::new(&rank, 2, SplitHeadroom::new(0.25)).unwrap();
        let id = MoeLayerId(1);
        assert!(splits.layer(id).unwrap().is_none() && splits.are_unfit(&[0; 4]) && !splits.hold(&[0; 4]));
        splits.begin_step(s).unwrap();
        splits.count(id, &[70], &[10]);
        splits.count(id, &[60], &[40]);
        let (counts, overflow) = splits.step_counts(s).unwrap().read(s).unwrap();
        assert_eq!((counts.as_slice(), overflow), (&[0, 0, 70, 40][..], false));
        splits.remember(&counts);
        splits.set_sizes(s).unwrap();
        assert!(!splits.are_unfit(&counts) && splits.hold(&[0, 0, 112, 80]) && !splits.hold(&[0, 0, 113, 0]));
        let layer = splits.layer(id).unwrap().unwrap();
        assert_eq!((&layer.sent[..], &layer.received[..]), (&[112][..], &[80][..]));
        assert_eq!(s.download::<i32>(&layer.slots[1]).unwrap(), [0, 80]);
        // The counts of a step with known sizes are on the device.
        s.upload_into(&layer.slot_use(0).peaks.clone(), &[90i32]).unwrap();
        s.upload_into(&splits.overflow().unwrap(), &[1i32]).unwrap();
        let counts = splits.step_counts(s).unwrap().read(s).unwrap();
        assert_eq!(counts, (vec![0, 0, 90, 0], true));
        assert!(!splits.are_unfit(&[0, 0, 75, 40]) && splits.are_unfit(&[0, 0, 110, 40]));
        splits.begin_step(s).unwrap();
        assert_eq!(splits.step_counts(s).unwrap().read(s).unwrap(), (vec![0; 4], true), "it is kept");
        splits.clear_overflow(s).unwrap();
        splits.set_exact(true);
        assert!(splits.layer(id).unwrap().is_none());
        splits.set_exact(false);
        s.upload_into(&splits.overflow().unwrap(), &[1i32]).unwrap();
        splits.reset(s).unwrap();
        assert!(splits.layer(id).unwrap().is_none());
        assert_eq!(s.download::<i32>(&splits.overflow().unwrap()).unwrap(), [0]);
    }
}
