use super::support::{Random, close, each_isa, everywhere, wide};
use ferrotron_kernels::cpu::elementwise::{
    accumulate, add, add_bias, cast, cast_rows, copy_rows, fill, scale, softcap, softcap_backward, transpose,
};
use ferrotron_kernels::cpu::reduce::{column_sum, dot};
use ferrotron_kernels::cpu::rows::Rows;
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{Float, Threads, bf16, f16};

const SIZES: [usize; 4] = [0, 1, 37, 50_001];

fn casts<S: Float, D: Float>() {
    for n in SIZES {
        let mut x: Vec<S> = Random(n as u64).vec(n, 3.0);
        for (x, s) in x.iter_mut().zip([0.0, -0.0, f32::INFINITY, f32::NAN, 1e-40, 1e6]) {
            *x = S::from_f32(s);
        }
        let run = |cpu: CpuContext| {
            let mut y = vec![D::from_f32(1.0); n];
            cast(cpu, &x, &mut y).unwrap();
            y
        };
        everywhere(|cpu| bytemuck::cast_slice::<D, u8>(&run(cpu)).to_vec());
        let y = run(CpuContext::new(&Threads::new(1).unwrap(), Isa::detect()));
        for (x, y) in x.iter().zip(&y) {
            let wanted = D::from_f32(x.to_f32()).to_f64();
            assert!(y.to_f64() == wanted || (wanted.is_nan() && y.to_f64().is_nan()), "{x:?} -> {y:?}");
        }
    }
}

#[test]
fn casts_between_all_float_types() {
    macro_rules! from {
        ($($s:ty),*) => { $(
            casts::<$s, f64>(); casts::<$s, f32>(); casts::<$s, bf16>(); casts::<$s, f16>();
            casts::<$s, E4m3>(); casts::<$s, E5m2>();
        )* };
    }
    from!(f64, f32, bf16, f16, E4m3, E5m2);
    let (x, mut y) = ([std::f64::consts::PI], [0f64]);
    cast(CpuContext::new(&Threads::new(1).unwrap(), Isa::detect()), &x, &mut y).unwrap();
    assert_eq!(x, y);
}

fn sums<T: Float>() {
    for n in SIZES {
        let mut random = Random(n as u64);
        let (a, b): (Vec<T>, Vec<T>) = (random.vec(n, 2.0), random.vec(n, 2.0));
        let (y, main, scaled) = everywhere(|cpu| {
            let (mut y, mut main, mut scaled) = (vec![T::from_f32(9.0); n], vec![1.5f32; n], a.clone());
            add(cpu, &a, &b, &mut y).unwrap();
            accumulate(cpu, &a, &mut main).unwrap();
            scale(cpu, &mut scaled, 0.3);
            (y, main, scaled)
        });
        let sum: Vec<f64> = wide(&a).iter().zip(wide(&b)).map(|(a, b)| a + b).collect();
        close("add", &y, &sum, 0.0, 0.0);
        let main_sum: Vec<f64> = wide(&a).iter().map(|a| a + 1.5).collect();
        close("accumulate", &main, &main_sum, 0.0, 0.0);
        let factor: Vec<f64> = wide(&a).iter().map(|a| a * f64::from(0.3f32)).collect();
        close("scale", &scaled, &factor, 1e-7, 0.0);
    }
}

#[test]
fn sums_and_scaling() {
    sums::<f32>();
    sums::<bf16>();
    for (rows, width) in [(0, 3), (7, 1), (300, 129)] {
        let mut random = Random(1);
        let (x, bias): (Vec<bf16>, Vec<bf16>) = (random.vec(rows * width, 1.0), random.vec(width, 1.0));
        let y = everywhere(|cpu| {
            let mut y = x.clone();
            add_bias(cpu, &bias, &mut y).unwrap();
            y
        });
        let wanted: Vec<f64> =
            x.iter().enumerate().map(|(i, x)| x.to_f64() + bias[i % width].to_f64()).collect();
        close("bias", &y, &wanted, 0.0, 0.0);
        let filled = everywhere(|cpu| {
            let mut y = x.clone();
            fill(cpu.threads, &mut y, bf16::ONE);
            y
        });
        assert!(filled.iter().all(|y| *y == bf16::ONE));
    }
}

fn caps<T: Float>(n: usize) {
    let cap = 30.0;
    let mut x: Vec<T> = Random(6).vec(n, 40.0);
    for (x, s) in x.iter_mut().zip([0.0, 1e-30, 1e-3, 5000.0, -5000.0]) {
        *x = T::from_f32(s);
    }
    let dy: Vec<T> = Random(7).vec(n, 1.0);
    let c = f64::from(cap);
    for (y, dx) in each_isa(|cpu| {
        let (mut y, mut dx) = (x.clone(), dy.clone());
        softcap(cpu, cap, &mut y);
        softcap_backward(cpu, cap, &y, &mut dx).unwrap();
        (y, dx)
    }) {
        close("softcap", &y, &wide(&x).iter().map(|x| c * (x / c).tanh()).collect::<Vec<_>>(), 4e-7, 0.0);
        // From the rounded y, as the definition of the backward pass says.
        let wanted: Vec<f64> =
            wide(&y).iter().zip(wide(&dy)).map(|(y, d)| d * (1.0 - (y / c).powi(2))).collect();
        close("softcap'", &dx, &wanted, 1e-6, 3e-7);
    }
}

#[test]
fn softcap_matches_f64() {
    for n in SIZES {
        caps::<f32>(n);
        caps::<bf16>(n);
    }
}

#[test]
fn rows_are_copied_and_cast_between_layouts() {
    let (tokens, heads, d) = (53, 3, 7);
    let x: Vec<f32> = Random(2).vec(tokens * 40, 1.0);
    let from = Rows::heads(tokens, 40, heads, 9, d);
    let to = Rows::heads(tokens, heads * d, heads, d, d);
    let (copied, rounded) = everywhere(|cpu| {
        let (mut y, mut z) = (vec![0f32; to.span()], vec![bf16::ZERO; to.span()]);
        copy_rows(cpu.threads, &x, from, &mut y, to).unwrap();
        cast_rows(cpu, &x, from, &mut z, to).unwrap();
        (y, z)
    });
    for (i, (y, z)) in copied.iter().zip(&rounded).enumerate() {
        let (t, h, c) = (i / (heads * d), i / d % heads, i % d);
        assert_eq!(*y, x[t * 40 + h * 9 + c]);
        assert_eq!(*z, bf16::from_f32(*y));
    }
    let threads = Threads::new(1).unwrap();
    assert!(copy_rows(&threads, &x, from, &mut [0f32; 5], to).is_err());
    copy_rows(&threads, &[0i32; 0], Rows::dense(0, 5), &mut [], Rows::dense(0, 5)).unwrap();
}

#[test]
fn transposes() {
    for (r, c) in [(0, 5), (5, 0), (1, 1), (3, 70), (70, 3), (129, 257)] {
        let x: Vec<i32> = (0..(r * c) as i32).collect();
        let y = everywhere(|cpu| {
            let mut y = vec![-1i32; r * c];
            transpose(cpu.threads, &x, r, c, &mut y).unwrap();
            y
        });
        assert!((0..r * c).all(|i| y[i % c * r + i / c] == x[i]), "{r} x {c}");
    }
}

#[test]
fn column_sums_and_dots() {
    for (rows, n, stride) in
        [(0, 3, 3), (1, 1, 1), (7, 33, 40), (5000, 17, 17), (300, 1000, 1000), (3, 40_000, 40_000)]
    {
        let mut random = Random(rows as u64);
        let x: Vec<bf16> = random.vec(rows * stride, 1.0);
        let before: Vec<f32> = random.vec(n, 1.0);
        for add in [false, true] {
            let sums = everywhere(|cpu| {
                let mut out = before.clone();
                column_sum(cpu, &x, Rows::strided(rows, n, stride), &mut out, add).unwrap();
                out
            });
            let wanted: Vec<f64> = (0..n)
                .map(|j| {
                    (0..rows).map(|i| x[i * stride + j].to_f64()).sum::<f64>()
                        + if add { f64::from(before[j]) } else { 0.0 }
                })
                .collect();
            close("column sum", &sums, &wanted, 1e-6, 1e-6 * (rows as f64).sqrt());
        }
    }
    for n in SIZES {
        let (a, b): (Vec<f32>, Vec<f32>) = (Random(1).vec(n, 1.0), Random(2).vec(n, 1.0));
        let ours = everywhere(|cpu| dot(cpu, &a, &b).unwrap());
        let wanted: f64 = wide(&a).iter().zip(wide(&b)).map(|(a, b)| a * b).sum();
        close("dot", &[ours], &[wanted], 1e-6, 1e-6 * (n as f64).sqrt());
    }
}
