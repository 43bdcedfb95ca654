//! Messages with fixed split sizes, on slices. See [`crate::SplitSlotKernels`].

/// The last of the parts that begin at `start(0)`, `start(1)`, … which begins at or before `at`: empty parts before it begin there
/// too.
fn part_of(parts: usize, at: i32, start: impl Fn(usize) -> i32) -> usize {
    let (mut low, mut high) = (0, parts);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if start(middle) <= at { low = middle } else { high = middle }
    }
    low
}

/// Notes the rows that slots had to hold; `count` gives those of a rank.
fn note(slots: &[i32], count: impl Fn(usize) -> i32, peaks: &mut [i32], overflow: &mut [i32]) {
    for (j, (peak, slot)) in peaks.iter_mut().zip(slots.windows(2)).enumerate() {
        *peak = count(j).max(*peak);
        if count(j) > slot[1] - slot[0] {
            overflow.fill(1);
        }
    }
}

/// Row maps of a message from those of rows sorted by destination.
pub fn pack_slots(
    (offsets, source, rows, slots): (&[i32], &[i32], &[i32], &[i32]),
    (message_source, message_rows): (&mut [i32], &mut [i32]),
    (peaks, overflow): (&mut [i32], &mut [i32]),
) {
    let ranks = peaks.len();
    let own = (offsets.len() - 1) / ranks;
    let first = |j: usize| offsets[j * own];
    let count = |j: usize| first(j + 1) - first(j);
    note(slots, count, peaks, overflow);
    for (at, out) in (0..).zip(message_source) {
        let j = part_of(ranks, at, |j| slots[j]);
        let within = at - slots[j];
        let used = at < slots[ranks] && within < count(j);
        *out = if used { source[(first(j) + within) as usize] } else { -1 };
    }
    for (row, out) in rows.iter().zip(message_rows) {
        let j = part_of(ranks, *row, first);
        let within = row - first(j);
        let fits = *row >= 0 && within < slots[j + 1] - slots[j];
        *out = if fits { slots[j] + within } else { -1 };
    }
}

/// The expert of each row of a message, whose slots are sorted by expert.
pub fn unpack_slots(
    (counts, slots): (&[i32], &[i32]),
    experts: &mut [i32],
    (peaks, overflow): (&mut [i32], &mut [i32]),
) {
    let ranks = peaks.len();
    let own = counts.len() / ranks;
    let of = |j: usize| &counts[j * own..(j + 1) * own];
    note(slots, |j| of(j).iter().sum(), peaks, overflow);
    for (at, out) in (0..).zip(experts) {
        let j = part_of(ranks, at, |j| slots[j]);
        let mut within = at - slots[j];
        *out = -1;
        if at < slots[ranks] {
            for (e, count) in (0..).zip(of(j)) {
                if within < *count {
                    *out = e;
                    break;
                }
                within -= count;
            }
        }
    }
}
