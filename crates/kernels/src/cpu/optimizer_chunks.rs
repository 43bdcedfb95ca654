//! Operands of an optimizer step split into chunks, and the two storage forms of master weights.

use super::optimizer::UpdateSlices;
use super::quant::{amax_row, encode_row};
use super::rows::{PIECE, check_len};
use super::{CpuContext, Isa, multiversion};
use crate::moments::BLOCK;
use ferrotron_tensor::fp8::E4m3;
use ferrotron_tensor::{Float, Result, bf16, f16, shape_error};
use std::mem::take;
use std::ops::Range;

/// A parameter: its f32 master and the model weight.
#[derive(Debug)]
pub enum Param<'a> {
    /// f32 weights: the master is the model weight.
    Master(&'a mut [f32]),
    /// Master and bf16 weight, rounded to nearest even.
    Copied(&'a mut [f32], &'a mut [bf16]),
    /// Master and f16 weight, rounded to nearest even.
    Half(&'a mut [f32], &'a mut [f16]),
    /// Split master: bf16 weight and i16 remainder ([`split_master`]).
    Split(&'a mut [bf16], &'a mut [i16]),
}

/// A gradient.
#[derive(Clone, Copy, Debug)]
pub enum Grad<'a> {
    /// f32
    F32(&'a [f32]),
    /// bf16
    Bf16(&'a [bf16]),
}

/// A moment of the gradient.
#[derive(Debug)]
pub enum State<'a> {
    /// No moment.
    None,
    /// f32
    F32(&'a mut [f32]),
    /// bf16, converted to f32 on load and rounded to nearest even on store.
    Bf16(&'a mut [bf16]),
    /// f16 codes and block scales ([`crate::moments`]).
    F16(&'a mut [f16], &'a mut [u8]),
    /// 8-bit codes and block scales.
    Fp8(&'a mut [u8], &'a mut [u8]),
}

impl<'a> Param<'a> {
    fn len(&self) -> usize {
        match self {
            Param::Master(p) | Param::Copied(p, _) | Param::Half(p, _) => p.len(),
            Param::Split(p, _) => p.len(),
        }
    }

    fn other_len(&self) -> usize {
        match self {
            Param::Master(p) => p.len(),
            Param::Copied(_, w) => w.len(),
            Param::Half(_, w) => w.len(),
            Param::Split(_, r) => r.len(),
        }
    }

    fn front(&mut self, n: usize) -> Param<'a> {
        match self {
            Param::Master(p) => Param::Master(front(p, n)),
            Param::Copied(p, w) => Param::Copied(front(p, n), front(w, n)),
            Param::Half(p, w) => Param::Half(front(p, n), front(w, n)),
            Param::Split(p, r) => Param::Split(front(p, n), front(r, n)),
        }
    }
}

impl<'a> Grad<'a> {
    fn len(&self) -> usize {
        match self {
            Grad::F32(g) => g.len(),
            Grad::Bf16(g) => g.len(),
        }
    }

    pub(super) fn part(&self, range: Range<usize>) -> Grad<'a> {
        match self {
            Grad::F32(g) => Grad::F32(&g[range]),
            Grad::Bf16(g) => Grad::Bf16(&g[range]),
        }
    }
}

impl<'a> State<'a> {
    fn len(&self) -> Option<usize> {
        match self {
            State::None => None,
            State::F32(s) => Some(s.len()),
            State::Bf16(s) => Some(s.len()),
            State::F16(s, _) => Some(s.len()),
            State::Fp8(s, _) => Some(s.len()),
        }
    }

    /// Required and actual number of scales.
    fn scales(&self) -> (usize, usize) {
        match self {
            State::F16(s, scales) => (s.len().div_ceil(BLOCK), scales.len()),
            State::Fp8(s, scales) => (s.len().div_ceil(BLOCK), scales.len()),
            _ => (0, 0),
        }
    }

    fn front(&mut self, n: usize) -> State<'a> {
        match self {
            State::None => State::None,
            State::F32(s) => State::F32(front(s, n)),
            State::Bf16(s) => State::Bf16(front(s, n)),
            // Chunks are whole blocks, except the last of a tensor.
            State::F16(s, scales) => State::F16(front(s, n), front(scales, n.div_ceil(BLOCK))),
            State::Fp8(s, scales) => State::Fp8(front(s, n), front(scales, n.div_ceil(BLOCK))),
        }
    }
}

/// Splits off the first `n` elements.
fn front<'a, T>(slice: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (head, tail) = take(slice).split_at_mut(n);
    *slice = tail;
    head
}

/// FP8 outputs of a weight.
#[derive(Debug)]
pub struct Fp8WeightSlices<'a> {
    /// Becomes the larger of itself and the weight's amax.
    pub amax: &'a mut f32,
    /// FP8 data, its scale, and the inverse scale to write.
    pub bytes: Option<(&'a mut [E4m3], f32, &'a mut f32)>,
}

/// FP8 outputs of one chunk.
pub(super) struct Fp8Chunk<'a> {
    /// Index of the chunk's tensor in the list.
    pub tensor: usize,
    /// Bits of the largest magnitude so far.
    pub most: u32,
    bytes: Option<(&'a mut [E4m3], f32)>,
}

impl Fp8Chunk<'_> {
    /// Records elements `range` of the chunk, whose new weights are `w`.
    fn take(&mut self, isa: Isa, range: Range<usize>, w: &[bf16]) {
        self.most = self.most.max(amax_row(isa, w));
        if let Some((data, scale)) = &mut self.bytes {
            encode_row(isa, w, *scale, &mut data[range]);
        }
    }

    /// Records an unchanged parameter (skipped step).
    pub(super) fn requantize(&mut self, isa: Isa, param: &Param<'_>) {
        let (Param::Master(p) | Param::Copied(p, _)) = param else { return };
        let mut scratch = [bf16::ZERO; CACHED];
        for (i, p) in p.chunks(CACHED).enumerate() {
            round_to(isa, p, &mut scratch[..p.len()]);
            self.take(isa, i * CACHED..i * CACHED + p.len(), &scratch[..p.len()]);
        }
    }
}

/// A chunk of one tensor of the list.
pub(super) struct Chunk<'a> {
    pub param: Param<'a>,
    pub fp8: Option<Fp8Chunk<'a>>,
    pub grad: Grad<'a>,
    pub first: State<'a>,
    pub second: State<'a>,
    pub lr: f32,
    pub weight_decay: f32,
}

/// Checks the list and splits every tensor into chunks.
pub(super) fn split_chunks<'a>(
    op: &'static str,
    list: Vec<UpdateSlices<'a>>,
    two_moments: bool,
) -> Result<(Vec<Chunk<'a>>, Vec<Option<&'a mut f32>>)> {
    let (mut chunks, mut amaxes) = (Vec::new(), Vec::new());
    for UpdateSlices { mut param, grad, mut first, mut second, lr, weight_decay, fp8 } in list {
        let len = param.len();
        check_len(op, "weight", param.other_len(), len)?;
        check_len(op, "gradient", grad.len(), len)?;
        for state in [&first, &second] {
            check_len(op, "moment", state.len().unwrap_or(len), len)?;
            let (wanted, there) = state.scales();
            check_len(op, "scales of a moment", there, wanted)?;
        }
        let fits = match (&first, &second) {
            (State::F32(_), State::F32(_))
            | (State::Bf16(_), State::Bf16(_))
            | (State::F16(..), State::F16(..))
            | (State::Fp8(..), State::Fp8(..)) => two_moments,
            (_, State::None) => !two_moments,
            _ => false,
        };
        if !fits {
            return shape_error(op, "Adam needs two moments of one type, SGD one momentum or none");
        }
        let (of, takes) = (amaxes.len(), fp8.is_some());
        let (amax, bytes) = fp8.map_or((None, None), |t| (Some(t.amax), t.bytes));
        amaxes.push(amax);
        let mut bytes = match bytes {
            Some((data, scale, inverse)) => {
                check_len(op, "bytes", data.len(), len)?;
                if len > 0 {
                    *inverse = 1.0 / scale;
                }
                Some((data, scale))
            }
            None => None,
        };
        for start in (0..len).step_by(PIECE) {
            let n = PIECE.min(len - start);
            let bytes = bytes.as_mut().map(|(data, scale)| (front(data, n), *scale));
            chunks.push(Chunk {
                fp8: takes.then_some(Fp8Chunk { tensor: of, most: 0, bytes }),
                param: param.front(n),
                grad: grad.part(start..start + n),
                first: first.front(n),
                second: second.front(n),
                lr,
                weight_decay,
            });
        }
    }
    Ok((chunks, amaxes))
}

/// Merges the amax of all chunks; a maximum does not depend on the order.
pub(super) fn merge_amax(chunks: &[Chunk], mut amaxes: Vec<Option<&mut f32>>) {
    for t in chunks.iter().filter_map(|p| p.fp8.as_ref()) {
        if let Some(amax) = &mut amaxes[t.tensor] {
            **amax = amax.max(f32::from_bits(t.most));
        }
    }
}

/// Elements updated at a time, so that weights are written from cache.
pub(super) const CACHED: usize = 2048;

/// Runs `update(range, master)` over blocks of a chunk, loading split masters before and writing weights after.
pub(super) fn over_master(
    isa: Isa,
    param: &mut Param<'_>,
    fp8: &mut Option<Fp8Chunk>,
    mut update: impl FnMut(Range<usize>, &mut [f32]),
) {
    let len = param.len();
    let mut scratch = [0f32; CACHED];
    let takes = fp8.is_some();
    let mut take = |range: Range<usize>, w: &[bf16]| {
        if let Some(fp8) = fp8.as_mut() {
            fp8.take(isa, range, w);
        }
    };
    let mut rounded = [bf16::ZERO; CACHED];
    for start in (0..len).step_by(CACHED) {
        let range = start..(start + CACHED).min(len);
        match param {
            Param::Master(p) => {
                update(range.clone(), &mut p[range.clone()]);
                if takes {
                    let w = &mut rounded[..range.len()];
                    round_to(isa, &p[range.clone()], w);
                    take(range, w);
                }
            }
            Param::Copied(p, w) => {
                update(range.clone(), &mut p[range.clone()]);
                round_to(isa, &p[range.clone()], &mut w[range.clone()]);
                take(range.clone(), &w[range]);
            }
            Param::Half(p, w) => {
                update(range.clone(), &mut p[range.clone()]);
                round_to(isa, &p[range.clone()], &mut w[range]);
            }
            Param::Split(high, low) => {
                let master = &mut scratch[..range.len()];
                join(isa, &high[range.clone()], &low[range.clone()], master);
                update(range.clone(), master);
                split(isa, master, &mut high[range.clone()], &mut low[range.clone()]);
                take(range.clone(), &high[range]);
            }
        }
    }
}

/// Rounds f32 values to `T`.
pub fn round_rows<T: Float>(cpu: CpuContext, from: &[f32], to: &mut [T]) {
    cpu.threads.parallel_chunks(to, PIECE, &|i, to| {
        let start = i * PIECE;
        round_to(cpu.isa, &from[start..start + to.len()], to);
    });
}

multiversion! {
    fn round_to<T: Float>(p: &[f32], w: &mut [T]) {
        for (w, p) in w.iter_mut().zip(p) {
            *w = T::from_f32(*p);
        }
    }
}

multiversion! {
    /// [`join_master`] of each element.
    pub fn join(high: &[bf16], low: &[i16], master: &mut [f32]) {
        for ((m, h), l) in master.iter_mut().zip(high).zip(low) {
            *m = join_master(*h, *l);
        }
    }
}

multiversion! {
    /// [`split_master`] of each element.
    pub fn split(master: &[f32], high: &mut [bf16], low: &mut [i16]) {
        for ((m, h), l) in master.iter().zip(high).zip(low) {
            (*h, *l) = split_master(*m);
        }
    }
}

/// Splits a master weight exactly into the bf16 model weight and 16 further bits. The bf16 is rounded with ties away from
/// zero, so it may differ by one ulp from a cast to nearest even.
#[inline(always)]
pub fn split_master(master: f32) -> (bf16, i16) {
    let bits = master.to_bits();
    let low = bits as u16 as i16;
    let high = ((bits >> 16) as u16).wrapping_add(u16::from(low < 0));
    (bf16::from_bits(high), low)
}

/// Inverse of [`split_master`].
#[inline(always)]
pub fn join_master(high: bf16, low: i16) -> f32 {
    let high = high.to_bits().wrapping_sub(u16::from(low < 0));
    f32::from_bits(u32::from(high) << 16 | u32::from(low as u16))
}
