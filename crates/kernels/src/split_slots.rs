//! All-to-all messages whose split sizes were fixed before the tokens were routed.
//!
//! Rank j's rows lie in slot j of a message, rows `slots[j]..slots[j + 1]`. A slot is mostly larger than the rows in it, and
//! the rest is unused. Rows that do not fit are left out, and the device says so: whoever reads the flag must not use the
//! result. Counts stay on the device, so no kernel waits for the host.

use crate::checks::{contiguous, dtypes};
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// What the device keeps of the rows that messages had to hold.
#[derive(Clone, Copy, Debug)]
pub struct SlotUse<'a> {
    /// i32 `[ranks]`: the largest number of rows for, or from, each rank so far.
    pub peaks: &'a Tensor,
    /// i32 `[1]`: becomes 1 where a slot is too small, and is left alone otherwise.
    pub overflow: &'a Tensor,
}

/// Puts rows that are sorted by destination into the slots of a message.
#[derive(Clone, Copy, Debug)]
pub struct PackSlots<'a> {
    /// i32 `[E + 1]`, i32 `[N]` and i32 `[T, k]`: offsets, source and rows of a [`crate::RowMap`] without alignment, in which each
    /// rank has E / ranks neighbouring experts.
    pub offsets: &'a Tensor,
    /// See `offsets`.
    pub source: &'a Tensor,
    /// See `offsets`.
    pub rows: &'a Tensor,
    /// i32 `[ranks + 1]`: first row of each slot; the last entry is the end of all.
    pub slots: &'a Tensor,
    /// Output i32 `[M]`: the selection of each row of the message, −1 where it is unused.
    pub message_source: &'a Tensor,
    /// Output i32 `[T, k]`: row of each selection in the message, −1 where there is none.
    pub message_rows: &'a Tensor,
}

/// Names the expert of each row of a received message.
#[derive(Clone, Copy, Debug)]
pub struct UnpackSlots<'a> {
    /// i32 `[ranks, E]`: rows that each rank has for this rank's E experts.
    pub counts: &'a Tensor,
    /// i32 `[ranks + 1]`: first row of each slot; the last entry is the end of all.
    pub slots: &'a Tensor,
    /// Output i32 `[M]`: the expert of each row of the message, −1 where it is unused. Rows of a slot are sorted by expert.
    pub experts: &'a Tensor,
}

/// Kernels of messages with fixed split sizes.
pub trait SplitSlotKernels {
    /// Sender: see [`PackSlots`].
    fn pack_slots(&self, s: &Stream, pack: &PackSlots, slot_use: SlotUse) -> Result<()>;

    /// Receiver: see [`UnpackSlots`].
    fn unpack_slots(&self, s: &Stream, unpack: &UnpackSlots, slot_use: SlotUse) -> Result<()>;

    /// `square[0] = +∞` where `overflow[0]` is not 0: the step's gradient norm is then not finite on any rank, and no rank
    /// updates. `overflow` i32 `[1]`, `square` f64 `[1]`.
    fn overflow_to_infinity(&self, s: &Stream, overflow: &Tensor, square: &Tensor) -> Result<()>;
}

/// Sizes of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSizes {
    pub(crate) ranks: usize,
    /// Experts of a rank.
    pub(crate) own: usize,
    /// T·k
    pub(crate) selections: usize,
    /// M
    pub(crate) message: usize,
}

/// Ranks of `slots`, which `slot_use` must have too.
fn ranks_of(op: &'static str, slots: &Tensor, slot_use: SlotUse) -> Result<usize> {
    let all = [slots, slot_use.peaks, slot_use.overflow];
    contiguous(op, &all)?;
    dtypes(op, DType::I32, &all)?;
    let ranks = slot_use.peaks.numel();
    if ranks == 0 || slots.numel() != ranks + 1 || slot_use.overflow.numel() != 1 {
        let what = format!(
            "slots {:?}, peaks {:?} and overflow {:?} must be [ranks + 1], [ranks] and [1]",
            slots.shape(),
            slot_use.peaks.shape(),
            slot_use.overflow.shape()
        );
        return shape_error(op, what);
    }
    Ok(ranks)
}

pub(crate) fn pack_sizes(op: &'static str, p: &PackSlots, slot_use: SlotUse) -> Result<SlotSizes> {
    let ranks = ranks_of(op, p.slots, slot_use)?;
    let all = [p.offsets, p.source, p.rows, p.message_source, p.message_rows];
    contiguous(op, &all)?;
    dtypes(op, DType::I32, &all)?;
    let (experts, selections) = (p.offsets.numel().saturating_sub(1), p.rows.numel());
    if experts == 0
        || !experts.is_multiple_of(ranks)
        || p.message_rows.numel() != selections
        || p.source.numel() < selections
        || i32::try_from(p.message_source.numel().max(selections)).is_err()
    {
        let what = format!(
            "offsets {:?}, source {:?}, rows {:?} do not fit {ranks} ranks, message rows {:?} and source {:?}",
            p.offsets.shape(),
            p.source.shape(),
            p.rows.shape(),
            p.message_rows.shape(),
            p.message_source.shape()
        );
        return shape_error(op, what);
    }
    Ok(SlotSizes { ranks, own: experts / ranks, selections, message: p.message_source.numel() })
}

pub(crate) fn unpack_sizes(op: &'static str, u: &UnpackSlots, slot_use: SlotUse) -> Result<SlotSizes> {
    let ranks = ranks_of(op, u.slots, slot_use)?;
    contiguous(op, &[u.counts, u.experts])?;
    dtypes(op, DType::I32, &[u.counts, u.experts])?;
    let message = u.experts.numel();
    if !u.counts.numel().is_multiple_of(ranks) || i32::try_from(message).is_err() {
        let what = format!(
            "counts {:?} and experts {:?} do not fit {ranks} ranks",
            u.counts.shape(),
            u.experts.shape()
        );
        return shape_error(op, what);
    }
    Ok(SlotSizes { ranks, own: u.counts.numel() / ranks, selections: 0, message })
}

pub(crate) fn check_overflow(op: &'static str, overflow: &Tensor, square: &Tensor) -> Result<()> {
    dtypes(op, DType::I32, &[overflow])?;
    dtypes(op, DType::F64, &[square])?;
    if overflow.numel() == 1 && square.numel() == 1 {
        return Ok(());
    }
    shape_error(op, format!("overflow {:?} and square {:?} must be [1]", overflow.shape(), square.shape()))
}
