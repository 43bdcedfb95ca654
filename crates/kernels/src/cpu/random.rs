//! Random initial values and dropout from counter-based random streams.

use super::rows::{PIECE, check_len};
use super::{CpuContext, multiversion};
use crate::NormalFill;
use crate::normal::pair;
use crate::philox::{RandomStream, philox4x32};
use ferrotron_tensor::{Float, Result, shape_error};

/// `out[r, c] = std·z`, with z the normal value `first + r·stride + c` of the stream; out `[rows, width]`.
pub fn fill_normal(cpu: CpuContext, runs: NormalFill, width: usize, out: &mut [f32]) {
    cpu.threads.parallel_chunks(out, PIECE, &|piece, out| {
        let (mut at, mut done) = (piece * PIECE, 0);
        while done < out.len() {
            let (row, column) = (at / width, at % width);
            let n = (width - column).min(out.len() - done);
            let first = runs.start(row).wrapping_add(column as u64);
            draw_normal(cpu.isa, runs.stream, first, runs.std, &mut out[done..done + n]);
            (at, done) = (at + n, done + n);
        }
    });
}

/// `out[r, c]` = normal value `rows[r]·width + c` of the stream; out `[rows, width]`.
pub fn fill_normal_rows(
    cpu: CpuContext,
    stream: RandomStream,
    rows: &[i32],
    width: usize,
    out: &mut [f32],
) -> Result<()> {
    check_len("fill_normal_logits", "logits", out.len(), rows.len() * width)?;
    let piece = (PIECE / width.max(1)).max(1);
    cpu.threads.parallel_chunks(out, piece * width, &|i, out| {
        for (row, out) in rows[i * piece..].iter().zip(out.chunks_mut(width.max(1))) {
            draw_normal(cpu.isa, stream, u64::from(*row as u32) * width as u64, 1.0, out);
        }
    });
    Ok(())
}

multiversion! {
    fn draw_normal(stream: RandomStream, first: u64, std: f64, out: &mut [f32]) {
        let (mut words, mut drawn) = ([0u32; 4 * SIDE], [0f32; 4 * SIDE]);
        let mut done = 0;
        while done < out.len() {
            let index = first.wrapping_add(done as u64);
            let (block, skip) = (index / 4, (index % 4) as usize);
            draw(stream, block, &mut words);
            for i in 0..2 * SIDE {
                let [a, b] = pair(words[2 * i], words[2 * i + 1]);
                (drawn[2 * i], drawn[2 * i + 1]) = ((std * a) as f32, (std * b) as f32);
            }
            let n = (4 * SIDE - skip).min(out.len() - done);
            out[done..done + n].copy_from_slice(&drawn[skip..skip + n]);
            done += n;
        }
    }
}

/// Which elements dropout drops.
#[derive(Clone, Copy, Debug)]
pub struct DropoutMask<'a> {
    /// Probability of being dropped.
    pub p: f32,
    /// Random stream; element c of row i uses its word `rows[i]·width + c`.
    pub stream: RandomStream,
    /// Global number of each row.
    pub rows: &'a [i32],
    /// Elements per row.
    pub width: usize,
}

/// Dropout: `y = x/(1−p)` for kept elements, 0 for dropped ones; x, y `[rows, width]`. The backward pass applies the same
/// function to gradients.
pub fn dropout<T: Float>(cpu: CpuContext, mask: DropoutMask<'_>, x: &[T], y: &mut [T]) -> Result<()> {
    let DropoutMask { p, stream, rows, width } = mask;
    check_len("dropout", "y", y.len(), x.len())?;
    check_len("dropout", "x", x.len(), rows.len() * width)?;
    if !(0.0..=1.0).contains(&p) {
        return shape_error("dropout", format!("the probability {p} is outside 0..=1"));
    }
    let draw = DropoutDraw {
        stream,
        threshold: (f64::from(p) * 4_294_967_296.0) as u64,
        scale: if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 },
    };
    let piece = (PIECE / width.max(1)).max(1);
    cpu.threads.parallel_chunks(y, piece * width, &|i, y| {
        for (row, y) in y.chunks_mut(width).enumerate() {
            let row = i * piece + row;
            let first = u64::from(rows[row] as u32) * width as u64;
            drop_row(cpu.isa, draw, first, &x[row * width..][..width], y);
        }
    });
    Ok(())
}

/// An element is dropped where its word of the stream is below `threshold`, p·2³², and otherwise multiplied by `scale`.
#[derive(Clone, Copy)]
struct DropoutDraw {
    stream: RandomStream,
    threshold: u64,
    scale: f32,
}

/// Philox blocks of four words computed in parallel.
const SIDE: usize = 16;

multiversion! {
    fn drop_row<T: Float>(drop: DropoutDraw, first: u64, x: &[T], y: &mut [T]) {
        let DropoutDraw { stream, threshold, scale } = drop;
        let mut words = [0u32; 4 * SIDE];
        let mut done = 0;
        while done < x.len() {
            let index = first + done as u64;
            let (block, skip) = (index / 4, (index % 4) as usize);
            draw(stream, block, &mut words);
            let n = (4 * SIDE - skip).min(x.len() - done);
            for ((y, x), word) in y[done..done + n].iter_mut().zip(&x[done..done + n]).zip(&words[skip..]) {
                let kept = x.to_f32() * scale;
                *y = T::from_f32(if u64::from(*word) < threshold { 0.0 } else { kept });
            }
            done += n;
        }
    }
}

/// The words of `SIDE` blocks from `block` on.
#[inline(always)]
fn draw(stream: RandomStream, block: u64, words: &mut [u32; 4 * SIDE]) {
    for i in 0..SIDE {
        let at = block.wrapping_add(i as u64);
        let counter = [at as u32, (at >> 32) as u32, stream.lane[0], stream.lane[1]];
        words[4 * i..4 * i + 4].copy_from_slice(&philox4x32(counter, stream.key));
    }
}
