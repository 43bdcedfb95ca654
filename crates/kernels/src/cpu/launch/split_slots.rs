use super::CpuKernels;
use crate::cpu::split_slots::{pack_slots, unpack_slots};
use crate::split_slots::{check_overflow, pack_sizes, unpack_sizes};
use crate::{PackSlots, SlotUse, SplitSlotKernels, UnpackSlots};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl SplitSlotKernels for CpuKernels {
    fn pack_slots(&self, s: &Stream, p: &PackSlots, slot_use: SlotUse) -> Result<()> {
        const OP: &str = "pack_slots";
        pack_sizes(OP, p, slot_use)?;
        let inputs = [p.offsets, p.source, p.rows, p.slots].map(read);
        let outputs = [p.message_source, p.message_rows, slot_use.peaks, slot_use.overflow].map(write);
        s.launch(OP, &[inputs, outputs].concat(), |l| {
            pack_slots(
                (l.slice(0)?, l.slice(1)?, l.slice(2)?, l.slice(3)?),
                (l.slice_mut(4)?, l.slice_mut(5)?),
                (l.slice_mut(6)?, l.slice_mut(7)?),
            );
            Ok(())
        })
    }

    fn unpack_slots(&self, s: &Stream, u: &UnpackSlots, slot_use: SlotUse) -> Result<()> {
        const OP: &str = "unpack_slots";
        unpack_sizes(OP, u, slot_use)?;
        let args = [
            read(u.counts),
            read(u.slots),
            write(u.experts),
            write(slot_use.peaks),
            write(slot_use.overflow),
        ];
        s.launch(OP, &args, |l| {
            let kept = (l.slice_mut(3)?, l.slice_mut(4)?);
            unpack_slots((l.slice(0)?, l.slice(1)?), l.slice_mut(2)?, kept);
            Ok(())
        })
    }

    fn overflow_to_infinity(&self, s: &Stream, overflow: &Tensor, square: &Tensor) -> Result<()> {
        const OP: &str = "overflow_to_infinity";
        check_overflow(OP, overflow, square)?;
        s.launch(OP, &[read(overflow), write(square)], |l| {
            if l.slice::<i32>(0)?[0] != 0 {
                l.slice_mut::<f64>(1)?[0] = f64::INFINITY;
            }
            Ok(())
        })
    }
}
