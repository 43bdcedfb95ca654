//! Messages with fixed split sizes: slots are filled, counted and read as by definition, and rows that do not fit are reported.

use super::devices::*;
use super::permutation::{draws, ints, plan};
use ferrotron_kernels::{PackSlots, SlotUse, UnpackSlots};
use ferrotron_tensor::{Category, Tensor};

/// First rows of slots of these sizes.
fn slots_of(sizes: &[i32]) -> Vec<i32> {
    let mut at = 0;
    let mut slots = vec![0];
    slots.extend(sizes.iter().map(|n| {
        at += n;
        at
    }));
    slots
}

/// By definition, of ranks whose slots have `sizes` rows: the part of each rank, filled up with `none` or cut off.
fn message(parts: &[Vec<i32>], sizes: &[i32], behind: usize) -> Vec<i32> {
    let slot = |(part, size): (&Vec<i32>, &i32)| {
        let mut rows = part.clone();
        rows.resize(*size as usize, -1);
        rows
    };
    let mut all: Vec<i32> = parts.iter().zip(sizes).flat_map(slot).collect();
    all.resize(all.len() + behind, -1);
    all
}

/// What slots had to hold, before and after a kernel.
struct Kept {
    peaks: Tensor,
    overflow: Tensor,
    before: Vec<i32>,
}

impl Kept {
    fn new(h: &TestDevice, ranks: usize) -> Kept {
        let before = draws(7, ranks, 0, 40);
        Kept { peaks: h.ids(&before), overflow: h.ids(&[0]), before }
    }

    fn slot_use(&self) -> SlotUse<'_> {
        SlotUse { peaks: &self.peaks, overflow: &self.overflow }
    }

    fn check(&self, h: &TestDevice, parts: &[Vec<i32>], sizes: &[i32], what: &str) {
        let get = |t: &Tensor| h.s.download::<i32>(t).unwrap();
        let lengths = parts.iter().map(|p| p.len() as i32);
        let peaks: Vec<i32> = lengths.clone().zip(&self.before).map(|(n, old)| n.max(*old)).collect();
        assert_eq!(get(&self.peaks), peaks, "{what}");
        let overflow = lengths.zip(sizes).any(|(n, size)| n > *size);
        assert_eq!(get(&self.overflow), [i32::from(overflow)], "{what}");
    }
}

/// Sizes of slots around those of the parts: too small, exact and too large.
fn sizes_around(parts: &[Vec<i32>], kind: usize) -> Vec<i32> {
    let change = draws(11 + kind as u64, parts.len(), -3, 6);
    let size = |(part, change): (&Vec<i32>, &i32)| match kind {
        0 => part.len() as i32,
        1 => (part.len() as i32 + change).max(0),
        2 => part.len() as i32 + 16,
        _ => 0,
    };
    parts.iter().zip(&change).map(size).collect()
}

#[test]
fn messages_are_filled_by_definition() {
    for h in devices() {
        for (ranks, own, tokens, k) in
            [(1, 1, 0, 1), (1, 4, 9, 2), (2, 3, 40, 2), (4, 1, 300, 1), (8, 16, 700, 8), (130, 2, 257, 3)]
        {
            let experts = ranks * own;
            let mut index = draws(3, tokens * k, -1, experts as i32);
            // A rank that gets nothing.
            index.iter_mut().filter(|e| **e >= 0 && **e as usize / own == 1).for_each(|e| *e = 0);
            let map = plan(&index, 0, experts, 1, tokens * k);
            let parts: Vec<Vec<i32>> = (0..ranks)
                .map(|j| {
                    map.source[map.offsets[j * own] as usize..map.offsets[(j + 1) * own] as usize].to_vec()
                })
                .collect();
            for kind in 0..4 {
                let (sizes, behind) = (sizes_around(&parts, kind), [0, 5][kind % 2]);
                let slots = slots_of(&sizes);
                let want = message(&parts, &sizes, behind);
                let mut rows = vec![-1; tokens * k];
                for (row, selection) in want.iter().enumerate().filter(|(_, s)| **s >= 0) {
                    rows[*selection as usize] = row as i32;
                }
                let kept = Kept::new(&h, ranks);
                let junk = |shape: &[usize]| ints(&h, shape, &vec![-9; shape.iter().product()]);
                let (message_source, message_rows) = (junk(&[want.len()]), junk(&[tokens, k]));
                let pack = PackSlots {
                    offsets: &h.ids(&map.offsets),
                    source: &h.ids(&map.source),
                    rows: &ints(&h, &[tokens, k], &map.rows),
                    slots: &h.ids(&slots),
                    message_source: &message_source,
                    message_rows: &message_rows,
                };
                h.k.pack_slots(&h.s, &pack, kept.slot_use()).unwrap();
                let what = format!("{} {ranks} ranks, {own} experts, kind {kind}", h.name);
                assert_eq!(h.s.download::<i32>(&message_source).unwrap(), want, "{what}");
                assert_eq!(h.s.download::<i32>(&message_rows).unwrap(), rows, "{what}");
                kept.check(&h, &parts, &sizes, &what);
            }
        }
    }
}

#[test]
fn received_rows_are_named_by_definition() {
    for h in devices() {
        for (ranks, own, most) in [(1, 1, 1), (1, 7, 5), (2, 3, 9), (8, 16, 70), (130, 2, 3)] {
            let mut counts = draws(5, ranks * own, 0, most);
            // A rank that sends nothing.
            counts.iter_mut().skip(own).take(own).for_each(|n| *n = 0);
            let expert = |(e, n): (usize, &i32)| vec![e as i32; *n as usize];
            let parts: Vec<Vec<i32>> =
                counts.chunks(own).map(|c| c.iter().enumerate().flat_map(expert).collect()).collect();
            for kind in 0..4 {
                let (sizes, behind) = (sizes_around(&parts, kind), [0, 300][kind % 2]);
                let want = message(&parts, &sizes, behind);
                let kept = Kept::new(&h, ranks);
                let experts = h.ids(&vec![-9; want.len()]);
                let unpack = UnpackSlots {
                    counts: &h.ids(&counts),
                    slots: &h.ids(&slots_of(&sizes)),
                    experts: &experts,
                };
                h.k.unpack_slots(&h.s, &unpack, kept.slot_use()).unwrap();
                let what = format!("{} {ranks} ranks, {own} experts, kind {kind}", h.name);
                assert_eq!(h.s.download::<i32>(&experts).unwrap(), want, "{what}");
                kept.check(&h, &parts, &sizes, &what);
            }
        }
    }
}

/// The flag stays until the host clears it: the step after an overflow is not applied either.
#[test]
fn an_overflow_stays_and_makes_the_norm_infinite() {
    for h in devices() {
        let kept = Kept::new(&h, 2);
        let experts = h.ids(&[0; 8]);
        let counts = [[5, 2], [3, 2]].map(|counts| h.ids(&counts));
        let slots = h.ids(&[0, 4, 8]);
        for counts in &counts {
            let unpack = UnpackSlots { counts, slots: &slots, experts: &experts };
            h.k.unpack_slots(&h.s, &unpack, kept.slot_use()).unwrap();
            assert_eq!(h.s.download::<i32>(&kept.overflow).unwrap(), [1], "{}", h.name);
        }
        for (overflow, want) in [(0, 2.5), (1, f64::INFINITY)] {
            let square = h.s.upload(&[2.5f64], &[1], Category::Workspace).unwrap();
            h.k.overflow_to_infinity(&h.s, &h.ids(&[overflow]), &square).unwrap();
            assert_eq!(h.s.download::<f64>(&square).unwrap(), [want], "{}", h.name);
        }
    }
}

#[test]
fn messages_that_do_not_fit_their_maps_are_errors() {
    for h in devices() {
        let i = |n: usize| h.ids(&vec![0; n]);
        let kept = |ranks: usize| (i(ranks), i(1));
        let pack = |slots: usize, experts: usize, rows: usize, ranks: usize| {
            let (peaks, overflow) = kept(ranks);
            let pack = PackSlots {
                offsets: &i(experts + 1),
                source: &i(10),
                rows: &i(10),
                slots: &i(slots),
                message_source: &i(8),
                message_rows: &i(rows),
            };
            h.k.pack_slots(&h.s, &pack, SlotUse { peaks: &peaks, overflow: &overflow })
        };
        pack(3, 4, 10, 2).unwrap();
        for (slots, experts, rows, ranks) in [(4, 4, 10, 2), (3, 5, 10, 2), (3, 4, 9, 2), (1, 4, 10, 0)] {
            let error = pack(slots, experts, rows, ranks).unwrap_err().to_string();
            assert!(error.len() > 15 && !error.contains('\n'), "{error}");
        }
        let (peaks, overflow) = kept(2);
        let unpack = UnpackSlots { counts: &i(5), slots: &i(3), experts: &i(8) };
        assert!(h.k.unpack_slots(&h.s, &unpack, SlotUse { peaks: &peaks, overflow: &overflow }).is_err());
        assert!(h.k.overflow_to_infinity(&h.s, &i(1), &i(1)).is_err());
    }
}
