//! Random initial values and dropout, drawn from counter-based streams.

use super::rows::{PIECE, check_len};
use super::{Isa, multiversion};
use crate::philox::{RandomStream, normals, philox4x32};
use ferrotron_tensor::{Float, Result, Threads, shape_error};

/// `out[i] = mean + std·z`, with z the normal value `first + i` of the stream.
pub fn fill_normal<T: Float>(
    threads: &Threads,
    stream: RandomStream,
    first: u64,
    mean: f64,
    std: f64,
    out: &mut [T],
) {
    threads.chunks(out, PIECE, &|piece, out| {
        let first = first + (piece * PIECE) as u64;
        let mut words = (u64::MAX, [0.0; 4]);
        for (index, out) in (first..).zip(out) {
            if words.0 != index / 4 {
                words = (index / 4, normals(stream.block(index / 4)));
            }
            *out = T::from_f32((mean + std * words.1[(index % 4) as usize]) as f32);
        }
    });
}

/// `y = x/(1−p)` where an element is kept, 0 where it is dropped with probability p; x, y `[rows, width]`. Row i is
/// number `rows[i]` of all rows wherever they are, and element c of row r is word `r·width + c` of the stream. The
/// backward pass is the same map on gradients.
pub fn dropout<T: Float>(
    threads: &Threads,
    isa: Isa,
    p: f32,
    stream: RandomStream,
    rows: &[i32],
    width: usize,
    x: &[T],
    y: &mut [T],
) -> Result<()> {
    check_len("dropout", "y", y.len(), x.len())?;
    check_len("dropout", "x", x.len(), rows.len() * width)?;
    if !(0.0..=1.0).contains(&p) {
        return shape_error("dropout", format!("the probability {p} is outside 0..=1"));
    }
    // Dropped words are those below p·2³².
    let threshold = (f64::from(p) * 4_294_967_296.0) as u64;
    let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
    let piece = (PIECE / width.max(1)).max(1);
    threads.chunks(y, piece * width, &|i, y| {
        for (row, y) in y.chunks_mut(width).enumerate() {
            let row = i * piece + row;
            let first = u64::from(rows[row] as u32) * width as u64;
            drop_row(isa, threshold, scale, stream, first, &x[row * width..][..width], y);
        }
    });
    Ok(())
}

/// Blocks of four words drawn side by side.
const SIDE: usize = 16;

multiversion! {
    fn drop_row<T: Float>(
        threshold: u64, scale: f32, stream: RandomStream, first: u64, x: &[T], y: &mut [T],
    ) {
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
