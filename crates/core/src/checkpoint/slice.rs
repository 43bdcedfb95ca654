//! Which elements of a logical tensor a part holds, and where a byte of the tensor is in the part.

use crate::tensorfile::FileDType;
use ferrotron_engine::Shard;
use std::ops::Range;

/// The elements of a logical tensor that one rank writes: of the box with `range` of `axis` and all of the other axes,
/// the elements `elements` in row-major order. Tensor parallelism makes boxes, ZeRO cuts them at any element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slice {
    /// The axis along which the box is cut.
    pub axis: usize,
    /// The box's range of that axis.
    pub range: Range64,
    /// Elements of the box, in row-major order.
    pub elements: Range64,
}

/// Start and end of a range; unlike [`Range`] it can be ordered and hashed.
pub type Range64 = (u64, u64);

/// A range of axis 0 of a tensor without axes is its one element.
fn axis_len(shape: &[usize], axis: usize) -> u64 {
    shape.get(axis).map_or(1, |&n| n as u64)
}

fn product(dims: &[usize]) -> u64 {
    dims.iter().map(|&n| n as u64).product()
}

impl Slice {
    /// All elements.
    pub fn whole(shape: &[usize]) -> Slice {
        Slice { axis: 0, range: (0, axis_len(shape, 0)), elements: (0, product(shape)) }
    }

    /// Elements `elements` of a tensor-parallel shard.
    pub fn of_shard(shape: &[usize], shard: &Shard, elements: Range<usize>) -> Slice {
        let elements = (elements.start as u64, elements.end as u64);
        let range = (shard.range.start as u64, shard.range.end as u64);
        // One spelling of a box that is the whole tensor, so that equal slices compare equal.
        match range == (0, axis_len(shape, shard.axis)) {
            true => Slice { elements, ..Slice::whole(shape) },
            false => Slice { axis: shard.axis, range, elements },
        }
    }

    /// Whether it is the whole tensor.
    pub fn is_whole(&self, shape: &[usize]) -> bool {
        *self == Slice::whole(shape)
    }

    /// Number of elements.
    pub fn numel(&self) -> u64 {
        self.elements.1.saturating_sub(self.elements.0)
    }

    /// Elements of the box. The tensor's own number of elements must be countable.
    fn box_numel(&self, shape: &[usize]) -> u64 {
        let len = axis_len(shape, self.axis);
        let others = product(shape).checked_div(len).unwrap_or(0);
        others * (self.range.1 - self.range.0)
    }

    /// The shape under which the part is stored: that of its box, or flat if it is only some of the box's elements.
    pub(super) fn stored_shape(&self, shape: &[usize]) -> Vec<usize> {
        if self.elements != (0, self.box_numel(shape)) {
            return vec![self.numel() as usize];
        }
        let mut out = shape.to_vec();
        out.iter_mut().skip(self.axis).take(1).for_each(|n| *n = (self.range.1 - self.range.0) as usize);
        out
    }

    /// Fails unless it lies inside a tensor of this shape, which has countable elements.
    pub(super) fn check(&self, shape: &[usize]) -> Result<(), String> {
        let inside = |r: Range64, end: u64| r.0 <= r.1 && r.1 <= end;
        let axis = self.axis < shape.len().max(1) && inside(self.range, axis_len(shape, self.axis));
        if !axis || !inside(self.elements, self.box_numel(shape)) {
            return Err(format!("is not inside the shape {shape:?}: {self:?}"));
        }
        Ok(())
    }

    /// Where the tensor's bytes are in the part.
    pub(super) fn layout(&self, dtype: FileDType, shape: &[usize], bytes: u64) -> PartLayout {
        if self.is_whole(shape) {
            return PartLayout { stride: bytes.max(1), start: 0, width: bytes, held: 0..bytes };
        }
        let size = dtype.bits() / 8;
        let inner = product(&shape[(self.axis + 1).min(shape.len())..]) * size;
        PartLayout {
            stride: (axis_len(shape, self.axis) * inner).max(1),
            start: self.range.0 * inner,
            width: (self.range.1 - self.range.0) * inner,
            held: self.elements.0 * size..self.elements.1 * size,
        }
    }
}

/// Fails unless the slices are exactly the elements of a tensor of this shape: no hole, no overlap. Boxes are cut along
/// one axis, and the slices of a box along its elements.
pub(super) fn check_tiling(shape: &[usize], slices: &[&Slice]) -> Result<(), String> {
    slices.iter().try_for_each(|s| s.check(shape))?;
    if let [only] = slices
        && only.is_whole(shape)
    {
        return Ok(());
    }
    if slices.iter().any(|s| s.numel() == 0 || s.axis != slices[0].axis) {
        return Err("are empty, or cut along several axes".into());
    }
    let mut sorted = slices.to_vec();
    sorted.sort();
    let torn = |what: &str, at: u64| Err(format!("have a hole or overlap at {what} {at}"));
    let mut rows = 0; // covered by complete boxes
    let mut rest = &sorted[..];
    while let Some(first) = rest.first() {
        let same = rest.iter().take_while(|s| s.range == first.range).count();
        let mut elements = 0;
        for s in &rest[..same] {
            if s.elements.0 != elements {
                return torn("element", elements);
            }
            elements = s.elements.1;
        }
        if first.range.0 != rows {
            return torn("index", rows);
        }
        if elements != first.box_numel(shape) {
            return torn("element", elements);
        }
        rows = first.range.1;
        rest = &rest[same..];
    }
    match slices.first().map_or(0, |s| axis_len(shape, s.axis)) {
        end if rows == end && !slices.is_empty() => Ok(()),
        _ => torn("index", rows),
    }
}

/// The bytes of a part in its tensor: of every `stride` bytes, `width` from `start` on are the box's; of the box's bytes
/// the part has `held`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PartLayout {
    stride: u64,
    start: u64,
    width: u64,
    held: Range<u64>,
}

/// Bytes that a part shares with a range of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shared {
    /// Offset in the part.
    pub part: u64,
    /// Offset in the range.
    pub range: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl PartLayout {
    /// The bytes of the part in `range` of the tensor, in order: they are adjacent in the part.
    pub fn shared(&self, range: Range<u64>) -> impl Iterator<Item = Shared> + '_ {
        let none = self.width == 0 || self.held.is_empty() || range.is_empty();
        // Rows of the box that both the part and the range touch.
        let (first, end) = match none {
            true => (0, 0),
            false => (
                (self.held.start / self.width).max(range.start / self.stride),
                self.held.end.div_ceil(self.width).min(range.end.div_ceil(self.stride)),
            ),
        };
        (first..end).filter_map(move |row| {
            let in_tensor = row * self.stride + self.start; // the row's first byte
            let in_box = row * self.width;
            let from = in_box.max(self.held.start).max(in_box + range.start.saturating_sub(in_tensor));
            let to =
                (in_box + self.width).min(self.held.end).min(in_box + range.end.saturating_sub(in_tensor));
            (from < to).then(|| Shared {
                part: from - self.held.start,
                range: in_tensor + (from - in_box) - range.start,
                bytes: to - from,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensorfile::tests::SeededRng;

    fn slice(axis: usize, range: Range64, elements: Range64) -> Slice {
        Slice { axis, range, elements }
    }

    /// Cuts a tensor at random and reads random ranges of it from the parts.
    #[test]
    fn any_range_is_found_in_the_parts() {
        let mut rng = SeededRng(5);
        for round in 0..400 {
            let shape: Vec<usize> = (0..1 + rng.below(3)).map(|_| 1 + rng.below(6)).collect();
            let numel: usize = shape.iter().product();
            let whole: Vec<u8> = rng.bytes(numel * 4);
            let (axis, mut at) = (rng.below(shape.len()), 0);
            let mut slices = Vec::new();
            while at < shape[axis] {
                let end = at + 1 + rng.below(shape[axis] - at);
                let all = numel / shape[axis] * (end - at);
                let mut from = 0;
                while from < all {
                    let to = from + 1 + rng.below(all - from);
                    slices.push(Slice::of_shard(&shape, &Shard { axis, range: at..end }, from..to));
                    from = to;
                }
                at = end;
            }
            check_tiling(&shape, &slices.iter().collect::<Vec<_>>()).unwrap();
            // The bytes of each part, by definition.
            let parts: Vec<Vec<u8>> = slices
                .iter()
                .map(|s| {
                    let shard = Shard { axis: s.axis, range: s.range.0 as usize..s.range.1 as usize };
                    let runs = shard.runs_within(&shape, s.elements.0 as usize..s.elements.1 as usize);
                    runs.into_iter().flat_map(|r| whole[r.start * 4..r.end * 4].to_vec()).collect()
                })
                .collect();
            for (s, part) in slices.iter().zip(&parts) {
                let stored = s.stored_shape(&shape);
                assert_eq!(stored.iter().product::<usize>() * 4, part.len(), "{round}: {s:?}");
            }
            for _ in 0..20 {
                let (a, b) = (rng.below(whole.len() + 1), rng.below(whole.len() + 1));
                let range = a.min(b)..a.max(b);
                let mut found = vec![None; range.len()];
                for (s, part) in slices.iter().zip(&parts) {
                    let layout = s.layout(FileDType::F32, &shape, whole.len() as u64);
                    let mut next = None;
                    for x in layout.shared(range.start as u64..range.end as u64) {
                        assert!(next.is_none_or(|n| n == x.part), "{round}: not adjacent in the part");
                        next = Some(x.part + x.bytes);
                        for i in 0..x.bytes as usize {
                            let to = &mut found[x.range as usize + i];
                            assert!(to.is_none(), "{round}: found twice");
                            *to = Some(part[x.part as usize + i]);
                        }
                    }
                }
                let found: Vec<u8> = found.into_iter().map(|b| b.expect("not found")).collect();
                assert_eq!(found, whole[range], "{round}: {shape:?} {slices:?}");
            }
        }
    }

    #[test]
    fn holes_overlaps_and_bounds_are_refused() {
        let whole = |shape: &[usize]| Slice::whole(shape);
        let check =
            |shape: &[usize], slices: &[Slice]| check_tiling(shape, &slices.iter().collect::<Vec<_>>());
        for shape in [&[][..], &[0], &[0, 9], &[9, 0], &[3, 4]] {
            check(shape, &[whole(shape)]).unwrap();
            check(shape, &[]).unwrap_err();
            check(shape, &[whole(shape), whole(shape)]).unwrap_err();
        }
        let half = |a, b| slice(1, (a, b), (0, 3 * (b - a)));
        check(&[3, 4], &[half(2, 4), half(0, 2)]).unwrap();
        check(&[3, 4], &[slice(1, (0, 4), (7, 12)), slice(1, (0, 4), (0, 7))]).unwrap();
        for bad in [
            vec![half(0, 2)],
            vec![half(0, 2), half(1, 4)],
            vec![half(0, 2), half(3, 4)],
            vec![half(0, 2), half(2, 4), half(2, 4)],
            vec![half(0, 2), slice(1, (2, 4), (0, 5))],
            vec![half(0, 2), slice(1, (2, 4), (1, 6))],
            vec![half(0, 2), slice(1, (2, 4), (0, 7))],
            vec![half(0, 2), slice(0, (0, 3), (0, 6))],
            vec![half(0, 2), half(2, 5)],
            vec![slice(2, (0, 1), (0, 12))],
            vec![slice(1, (3, 1), (0, 0))],
            vec![slice(1, (0, 4), (0, 12)), slice(1, (0, 0), (0, 0))],
            vec![slice(0, (0, u64::MAX), (0, 12))],
        ] {
            check(&[3, 4], &bad).unwrap_err();
        }
    }
}
