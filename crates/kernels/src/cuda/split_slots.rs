//! Row maps of all-to-all messages with fixed split sizes.

use super::args::kernel_args;
use super::grid::{blocks, line};
use super::{CudaKernels, Kernel};
use crate::split_slots::{SlotSizes, check_overflow, pack_sizes, unpack_sizes};
use crate::{PackSlots, SlotUse, SplitSlotKernels, UnpackSlots};
use ferrotron_tensor::{Result, Stream, Tensor, read, shape_error, write};

/// As in split_slots.cu.
const THREADS: u32 = 256;

kernel_args! {
    header "args/split_slots.cuh", includes [];

    /// Slots of a message, and the rows for them.
    #[derive(Default)]
    struct SplitSlotArgs {
        /// i32 `[ranks·own + 1]`: first row of each expert in destination order; of a receiver i32 `[ranks, own]`, its counts.
        offsets: u64,
        /// i32 `[N]`: the selection of each row in destination order.
        source: u64,
        /// i32 `[selections]`: the row of each selection in destination order, and in the message; -1 where there is none.
        rows: u64,
        message_rows: u64,
        /// i32 `[ranks + 1]`: first row of each slot.
        slots: u64,
        /// i32 `[message]`: the selection, or of a receiver the expert, of each row of the message, or -1.
        out: u64,
        /// i32 `[ranks]` and i32 `[1]`: the most rows of each rank so far, and whether they did not fit.
        peaks: u64,
        overflow: u64,
        selections: i64,
        message: i64,
        ranks: u32,
        /// Experts of a rank.
        own: u32,
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("split_slots", name)
}

/// The sizes of a launch.
fn sizes(op: &'static str, z: SlotSizes) -> Result<SplitSlotArgs> {
    let narrow = |n: usize| u32::try_from(n).or_else(|_| shape_error(op, format!("{n} exceeds 32 bits")));
    Ok(SplitSlotArgs {
        selections: z.selections as i64,
        message: z.message as i64,
        ranks: narrow(z.ranks)?,
        own: narrow(z.own)?,
        ..SplitSlotArgs::default()
    })
}

impl SplitSlotKernels for CudaKernels {
    fn pack_slots(&self, s: &Stream, p: &PackSlots, slot_use: SlotUse) -> Result<()> {
        const OP: &str = "pack_slots";
        let z = pack_sizes(OP, p, slot_use)?;
        let inputs = [p.offsets, p.source, p.rows, p.slots].map(read);
        let outputs = [p.message_source, p.message_rows, slot_use.peaks, slot_use.overflow].map(write);
        s.launch(OP, &[inputs, outputs].concat(), |l| {
            let a = SplitSlotArgs {
                offsets: l.address(0)?,
                source: l.address(1)?,
                rows: l.address(2)?,
                slots: l.address(3)?,
                out: l.address(4)?,
                message_rows: l.address(5)?,
                peaks: l.address(6)?,
                overflow: l.address(7)?,
                ..sizes(OP, z)?
            };
            let threads = z.selections.max(z.message).max(z.ranks);
            self.launch_kernel(l, kernel(OP), line(blocks(OP, threads, THREADS as usize)?, THREADS), &a)
        })
    }

    fn unpack_slots(&self, s: &Stream, u: &UnpackSlots, slot_use: SlotUse) -> Result<()> {
        const OP: &str = "unpack_slots";
        let z = unpack_sizes(OP, u, slot_use)?;
        let args = [
            read(u.counts),
            read(u.slots),
            write(u.experts),
            write(slot_use.peaks),
            write(slot_use.overflow),
        ];
        s.launch(OP, &args, |l| {
            let a = SplitSlotArgs {
                offsets: l.address(0)?,
                slots: l.address(1)?,
                out: l.address(2)?,
                peaks: l.address(3)?,
                overflow: l.address(4)?,
                ..sizes(OP, z)?
            };
            let threads = z.message.max(z.ranks);
            self.launch_kernel(l, kernel(OP), line(blocks(OP, threads, THREADS as usize)?, THREADS), &a)
        })
    }

    fn overflow_to_infinity(&self, s: &Stream, overflow: &Tensor, square: &Tensor) -> Result<()> {
        const OP: &str = "overflow_to_infinity";
        check_overflow(OP, overflow, square)?;
        s.launch(OP, &[read(overflow), write(square)], |l| {
            let a = SplitSlotArgs { overflow: l.address(0)?, out: l.address(1)?, ..Default::default() };
            self.launch_kernel(l, kernel(OP), line(1, 1), &a)
        })
    }
}
