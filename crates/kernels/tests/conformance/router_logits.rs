//! Logits of the router: the gate in f64, and random logits for forced load balancing.

use super::devices::*;
use super::router_oracle::shifted;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{GateBackward, RngKey, StepKey};
use ferrotron_tensor::DType;

#[test]
fn the_gate_in_f64_is_rounded_once() {
    for_moe_dtypes(|h, dtype| {
        for (n, experts, width) in
            [(0, 4, 8), (1, 1, 1), (5, 7, 130), (129, 8, 33), (70, 64, 257), (33, 130, 64)]
        {
            let what = format!("{} {dtype} {n}x{experts}x{width}", h.name);
            let (x, w) = (numbers(dtype, 1, n * width), numbers(dtype, 2, experts * width));
            let (d, old) = (numbers(DType::F32, 3, n * experts), numbers(DType::F32, 4, experts * width));
            let (xt, wt) = (shifted(h, 1, dtype, &[n, width], &x), h.tensor(dtype, &[experts, width], &w));
            let logits = h.poisoned(DType::F32, &[n, experts]);
            h.k.gate_f64(&h.s, &xt, &wt, &logits).unwrap();
            let row = |v: &[f64], i: usize| v[i * width..(i + 1) * width].to_vec();
            let wanted: Vec<f64> =
                (0..n * experts).map(|i| dot(&row(&x, i / experts), &row(&w, i % experts))).collect();
            close(&what, DType::F32, &h.host(&logits), &wanted, 1e-13);
            let dt = h.tensor(DType::F32, &[n, experts], &d);
            let mut dx = vec![0.0; n * width];
            let mut dw = vec![0.0; experts * width];
            for (t, e, c) in
                (0..n).flat_map(|t| (0..experts).flat_map(move |e| (0..width).map(move |c| (t, e, c))))
            {
                dx[t * width + c] += d[t * experts + e] * w[e * width + c];
                dw[e * width + c] += d[t * experts + e] * x[t * width + c];
            }
            for accumulate in [false, true] {
                let before = if accumulate { old.clone() } else { vec![f64::NAN; old.len()] };
                let dwt = shifted(h, 1, DType::F32, &[experts, width], &before);
                let dxt = h.poisoned(dtype, &[n, width]);
                h.k.gate_f64_backward(
                    &h.s,
                    &GateBackward { x: &xt, w: &wt, dlogits: &dt, dx: &dxt, dw: &dwt, accumulate },
                )
                .unwrap();
                // Through f32, where x is bf16.
                let slack = if dtype == DType::F32 { 1e-13 } else { 1e-7 };
                close(&format!("{what} dx"), dtype, &h.host(&dxt), &dx, slack);
                let add = |(d, o): (&f64, &f64)| if accumulate { d + o } else { *d };
                let wanted: Vec<f64> = dw.iter().zip(&old).map(add).collect();
                close(&format!("{what} dw"), DType::F32, &h.host(&dwt), &wanted, 1e-12);
            }
        }
    });
}

#[test]
fn random_logits_depend_only_on_their_row() {
    let key = RngKey { seed: 7, step: 11, layer: 3, site: 1 };
    let stream = RandomStream::routing(key);
    assert_ne!(stream, RandomStream::dropout(key));
    for h in devices() {
        for (experts, n) in [(1, 9), (7, 15), (8, 129), (130, 33), (256, 0), (1024, 3)] {
            let rows: Vec<i32> = (0..n).map(|r| if r == 1 { i32::MAX } else { (r * 37) % 1000 }).collect();
            let frame =
                h.tensor(DType::F32, &[n as usize * experts + 1], &vec![f64::NAN; n as usize * experts + 1]);
            let out = frame.narrow(0, 1, n as usize * experts).unwrap().view(&[n as usize, experts]).unwrap();
            h.k.fill_normal_logits(&h.s, key.into(), &h.ids(&rows), &out).unwrap();
            let value =
                |i: usize| stream.normal(rows[i / experts] as u64 * experts as u64 + (i % experts) as u64);
            let wanted: Vec<f64> = (0..out.numel()).map(|i| f64::from(value(i) as f32)).collect();
            assert!(h.host(&out) == wanted, "{} {n}x{experts}", h.name);
            // The same where the device knows the step.
            let (ten, later) = (h.ids(&[10]), RngKey { step: 1, ..key });
            let again = h.tensor(DType::F32, out.shape(), &vec![f64::NAN; out.numel()]);
            let later = StepKey { key: later, step: Some(&ten) };
            h.k.fill_normal_logits(&h.s, later, &h.ids(&rows), &again).unwrap();
            assert!(h.host(&again) == wanted, "{} {n}x{experts}", h.name);
        }
    }
}
