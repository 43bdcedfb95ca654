//! Packed operands hold every element at its position and zeros elsewhere; block GEMMs of packed operands.

use super::{Left, Right, STEP, cols, rows};
use crate::cpu::Isa;
use crate::cpu::amx::{Tiles, mm_32x32};
use crate::cpu::gemm::PackedOperands;
use crate::cpu::gemm::transpose::Words;
use ferrotron_tensor::bf16;

#[repr(C, align(64))]
#[derive(Clone)]
struct Step([bf16; STEP]);

fn values(count: usize) -> Vec<bf16> {
    // Small integers: products and sums are exact, and every position differs from its neighbours.
    (0..count).map(|i| bf16::from_f32(((i * 7919 + i / 31) % 201) as f32 - 100.0)).collect()
}

fn garbage(steps: usize) -> Vec<Step> {
    vec![Step([bf16::NAN; STEP]); steps]
}

fn panel(p: &[Step], row: usize, col: usize) -> f32 {
    let (step, half) = (row / 32, col / 16);
    p[step].0[half * 512 + (row % 32 / 2) * 32 + (col % 16) * 2 + row % 2].to_f32()
}

#[test]
fn packers_place_every_element_and_pad_with_zeros() {
    if Isa::detect() < Isa::Avx512 {
        return eprintln!("SKIPPED: packers_place_every_element_and_pad_with_zeros: no AVX-512");
    }
    for k in [0, 1, 2, 15, 16, 31, 32, 33, 64, 95] {
        for n in [1, 2, 15, 16, 17, 31, 32] {
            let (wide, tall) = (n + 3, k + 5);
            let (by_row, by_col) = (values(k * wide), values(n * tall));
            let steps = k.div_ceil(32);
            let (mut p, mut q) = (garbage(steps), garbage(steps));
            let (mut l, mut t) = (garbage(steps), garbage(steps));
            // SAFETY: buffers sized as the packers ask; AVX-512 checked above.
            unsafe {
                rows(by_row.as_ptr(), wide, k, n, p.as_mut_ptr().cast());
                cols(by_col.as_ptr(), tall, k, n, q.as_mut_ptr().cast());
                // In portions, as the driver does.
                let mut pairs = [Words([0; 256]), Words([0; 256])];
                for (trans, from, lda, out) in [(false, &by_col, tall, &mut l), (true, &by_row, wide, &mut t)]
                {
                    let (a, out) = (from.as_ptr(), out.as_mut_ptr().cast());
                    let mut left = Left { a, lda, trans, m: n, k, out, ldo: steps * 32, at: 0, unit: 0 };
                    for _ in 0..left.units().div_ceil(7) {
                        left.advance(&mut pairs, 7);
                    }
                }
            }
            let flat = |v: &[Step], r: usize, c: usize| {
                let at = r * steps * 32 + c;
                v[at / STEP].0[at % STEP].to_f32()
            };
            for row in 0..steps * 32 {
                for col in 0..32 {
                    let inside = row < k && col < n;
                    let from_rows = if inside { by_row[row * wide + col].to_f32() } else { 0.0 };
                    let from_cols = if inside { by_col[col * tall + row].to_f32() } else { 0.0 };
                    assert_eq!(panel(&p, row, col), from_rows, "rows k={k} n={n} at {row},{col}");
                    assert_eq!(panel(&q, row, col), from_cols, "cols k={k} n={n} at {row},{col}");
                    assert_eq!(flat(&l, col, row), from_cols, "left k={k} m={n} at {row},{col}");
                    assert_eq!(flat(&t, col, row), from_rows, "left_transposed k={k} m={n} at {row},{col}");
                }
            }
        }
    }
}

#[test]
fn right_hand_sides_of_many_columns_become_panels() {
    if Isa::detect() < Isa::Avx512 {
        return eprintln!("SKIPPED: right_hand_sides_of_many_columns_become_panels: no AVX-512");
    }
    for (k, n) in [(1, 33), (32, 64), (33, 65), (70, 100), (64, 32)] {
        for trans in [false, true] {
            let ldb = 3 + if trans { k } else { n };
            let b = values(if trans { n } else { k } * ldb);
            let (steps, panels) = (k.div_ceil(32), n.div_ceil(32));
            // The step between panels must not be written.
            let mut out = garbage(panels * (steps + 1));
            let (from, to, stride) = (b.as_ptr(), out.as_mut_ptr().cast(), (steps + 1) * STEP);
            let mut right = Right { b: from, ldb, trans, k, n, out: to, stride, at: 0, col: 0 };
            for _ in 0..right.units().div_ceil(5) {
                // SAFETY: buffers sized as the packer asks; AVX-512 checked above.
                unsafe { right.advance(5) };
            }
            for row in 0..steps * 32 {
                for col in 0..panels * 32 {
                    let from = if trans { col * ldb + row } else { row * ldb + col };
                    let want = if row < k && col < n { b[from].to_f32() } else { 0.0 };
                    let got = panel(&out[col / 32 * (steps + 1)..], row, col % 32);
                    assert_eq!(got, want, "k={k} n={n} trans={trans} at {row},{col}");
                }
            }
            assert!((1..=panels).all(|p| out[p * (steps + 1) - 1].0.iter().all(|x| x.is_nan())));
        }
    }
}

#[test]
fn block_gemm_is_exact_on_integers() {
    if Isa::detect() < Isa::Amx {
        return eprintln!("SKIPPED: block_gemm_is_exact_on_integers: no AMX");
    }
    for kb in [0usize, 1, 2, 5] {
        for accumulate in [false, true] {
            let k = 32 * kb;
            let (lda, ldc) = (k + 3, 37);
            let (a, b) = (values(32 * lda), values(k * 32));
            let mut p = garbage(kb);
            let mut c: Vec<f32> = (0..32 * ldc).map(|i| i as f32).collect();
            let before = c.clone();
            // SAFETY: buffers sized as asked; AMX checked above.
            unsafe {
                rows(b.as_ptr(), 32, k, 32, p.as_mut_ptr().cast());
                let tiles = Tiles::load();
                let operands = PackedOperands { a: a.as_ptr(), lda, b: p.as_ptr().cast(), k };
                mm_32x32(&tiles, operands, c.as_mut_ptr(), ldc, accumulate);
            }
            for i in 0..32 {
                for j in 0..ldc {
                    let sum: f32 =
                        (0..k).map(|l| a[i * lda + l].to_f32() * b[l * 32 + (j % 32)].to_f32()).sum();
                    let old = before[i * ldc + j];
                    let want = match (j < 32, accumulate) {
                        (false, _) => old,
                        (true, true) => old + sum,
                        (true, false) => sum,
                    };
                    assert_eq!(c[i * ldc + j], want, "kb={kb} at {i},{j}");
                }
            }
        }
    }
}
