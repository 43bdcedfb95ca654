//! A matrix product as anyone would write it: the unit that times of kernels are compared in from one day to another.
//!
//! It keeps the core's arithmetic, loads and stores as busy as kernels do, so that what slows them slows it alike: a lower clock
//! rate, a neighbour on the core's other hyperthread. A loop that waits for its own sums hardly feels that neighbour: beside it,
//! the same GEMM measured 1.6 times as slow from one second to the next.

use std::hint::black_box;

/// Rows and columns of every matrix: three of them fit in the L2 of any CPU.
const SIZE: usize = 96;
/// Products of a call: about a millisecond.
const PRODUCTS: usize = 12;

/// Multiplies small matrices for about a millisecond.
pub fn reference_loop() {
    let [a, b] = [0.5f32, 0.25].map(|x| black_box(vec![x; SIZE * SIZE]));
    let mut c = vec![0f32; SIZE * SIZE];
    for _ in 0..PRODUCTS {
        product(&a, &b, &mut c);
        black_box(&c);
    }
}

/// c = a b.
fn product(a: &[f32], b: &[f32], c: &mut [f32]) {
    for (a, c) in a.chunks_exact(SIZE).zip(c.chunks_exact_mut(SIZE)) {
        c.fill(0.0);
        for (x, b) in a.iter().zip(b.chunks_exact(SIZE)) {
            c.iter_mut().zip(b).for_each(|(sum, y)| *sum += x * y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_multiplies() {
        let a: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 7) as f32 - 3.0).collect();
        let b: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 5) as f32 - 2.0).collect();
        let mut c = vec![f32::NAN; SIZE * SIZE];
        product(&a, &b, &mut c);
        for (i, j) in [(0, 0), (3, 95), (95, 7)] {
            let wanted: f32 = (0..SIZE).map(|k| a[i * SIZE + k] * b[k * SIZE + j]).sum();
            assert_eq!(c[i * SIZE + j], wanted, "{i} {j}");
        }
    }
}
