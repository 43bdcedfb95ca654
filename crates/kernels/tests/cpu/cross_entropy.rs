use super::support::{Random, close, each_isa, wide};
use ferrotron_kernels::LabelSmoothing;
use ferrotron_kernels::cpu::cross_entropy::{
    Labels, RowStats, cross_entropy, cross_entropy_backward, cross_entropy_with_gradient, row_stats,
};
use ferrotron_kernels::cpu::{CpuContext, Isa, rows::Rows, vocab::Shard};
use ferrotron_tensor::{Float, Threads, bf16};

/// Loss and gradient of one row by definition: the target distribution written out.
fn oracle(x: &[f64], label: usize, smoothing: LabelSmoothing) -> (f64, Vec<f64>) {
    let v = x.len() as f64;
    let target: Vec<f64> = (0..x.len())
        .map(|j| match smoothing {
            LabelSmoothing::None => f64::from(u8::from(j == label)),
            LabelSmoothing::Torch(e) => {
                let e = f64::from(e);
                e / v + if j == label { 1.0 - e } else { 0.0 }
            }
            LabelSmoothing::Megatron(e) if j == label => 1.0 - f64::from(e),
            LabelSmoothing::Megatron(e) => f64::from(e) / (v - 1.0),
        })
        .collect();
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
    let loss = target.iter().zip(x).filter(|(t, _)| **t > 0.0).map(|(t, x)| -t * (x - lse)).sum();
    (loss, x.iter().zip(&target).map(|(x, t)| (x - lse).exp() - t).collect())
}

fn check<T: Float>(rows: usize, vocab: usize, stride: usize, scale: f32, smoothing: LabelSmoothing) {
    let mut random = Random((rows * vocab) as u64);
    let mut logits: Vec<T> = random.vec(rows * stride, scale);
    // Padding columns hold values that must not influence the result.
    let poison = T::from_f32(f32::NAN);
    (0..rows).for_each(|r| logits[r * stride + vocab..(r + 1) * stride].fill(poison));
    let ids: Vec<i32> =
        (0..rows).map(|r| if r % 5 == 3 { -100 } else { random.below(vocab) as i32 }).collect();
    let weights: Vec<f32> = random.vec(rows, 1.0);
    let view = Rows::strided(rows, stride, stride);
    let labels = Labels { ids: &ids, ignore: -100, smoothing, shard: Shard::whole(vocab) };
    let results = each_isa(|cpu| {
        let (mut loss, mut lse, mut again) = (vec![9f32; rows], vec![9f32; rows], vec![9f32; rows]);
        cross_entropy(cpu, &logits, view, labels, &mut loss, &mut lse).unwrap();
        let (mut fused, mut later) = (logits.clone(), logits.clone());
        cross_entropy_with_gradient(cpu, &mut fused, view, labels, &weights, &mut again).unwrap();
        let mut stats = vec![RowStats::EMPTY; rows];
        row_stats(cpu, &logits, view, labels, &mut stats).unwrap();
        cross_entropy_backward(cpu, &mut later, view, labels, &stats, &weights).unwrap();
        assert_eq!(loss, again);
        (loss, fused, later)
    });
    for (loss, fused, later) in results {
        for r in 0..rows {
            let (grad, late) = (&fused[r * stride..(r + 1) * stride], &later[r * stride..(r + 1) * stride]);
            if ids[r] == -100 {
                assert_eq!(loss[r], 0.0);
                assert!(grad.iter().chain(late).all(|g| g.to_f32() == 0.0));
                continue;
            }
            let x = wide(&logits[r * stride..r * stride + vocab]);
            let (wanted, slopes) = oracle(&x, ids[r] as usize, smoothing);
            // The mean of x in a smoothed loss adds its own rounding error.
            close("loss", &[loss[r]], &[wanted], 1e-6, 1e-6 * f64::from(scale.max(1.0)));
            let slopes: Vec<f64> = slopes.iter().map(|s| s * f64::from(weights[r])).collect();
            let size = f64::from(weights[r].abs());
            close("gradient", &grad[..vocab], &slopes, 1e-6, 3e-7 * size);
            close("gradient from statistics", &late[..vocab], &slopes, 1e-6, 3e-7 * size);
            assert!(grad[vocab..].iter().chain(&late[vocab..]).all(|g| g.to_f32() == 0.0), "padding");
        }
    }
}

#[test]
fn loss_and_gradient_match_the_definition() {
    for (rows, vocab, stride) in [(0, 4, 4), (1, 2, 2), (7, 33, 40), (200, 256, 256), (6, 20_001, 20_096)] {
        for smoothing in [LabelSmoothing::None, LabelSmoothing::Torch(0.1), LabelSmoothing::Megatron(0.2)] {
            check::<f32>(rows, vocab, stride, 2.0, smoothing);
            check::<bf16>(rows, vocab, stride, 2.0, smoothing);
            check::<f32>(rows, vocab, stride, 20.0, smoothing);
        }
    }
}

#[test]
fn one_column_and_extreme_logits() {
    let threads = Threads::new(1).unwrap();
    for isa in Isa::all() {
        let cpu = CpuContext::new(&threads, isa);
        let run = |x: &[f32], label: i64| {
            let labels = Labels {
                ids: &[label],
                ignore: -100,
                smoothing: LabelSmoothing::None,
                shard: Shard::whole(x.len()),
            };
            let (mut grad, mut loss) = (x.to_vec(), [9f32]);
            let rows = Rows::dense(1, x.len());
            cross_entropy_with_gradient(cpu, &mut grad, rows, labels, &[1.0], &mut loss).unwrap();
            (loss[0], grad)
        };
        assert_eq!(run(&[3.0], 0), (0.0, vec![0.0]));
        assert_eq!(run(&[1e30, 0.0], 0), (0.0, vec![0.0, 0.0]));
        assert_eq!(run(&[1e30, 0.0], 1), (1e30, vec![1.0, -1.0]));
        let (loss, grad) = run(&[f32::NEG_INFINITY, 0.0, 0.0], 1);
        assert!((loss - 2f32.ln()).abs() < 1e-6 && grad[0] == 0.0);
        assert_eq!(run(&[f32::NEG_INFINITY, 0.0], 0).0, f32::INFINITY);
        assert!(run(&[f32::NAN, 0.0], 1).0.is_nan());
    }
}

#[test]
fn labels_outside_the_vocabulary_are_errors() {
    let threads = Threads::new(2).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let rows = Rows::dense(3, 8);
    for (ids, vocab) in [([0, 5, 1], 5), ([0, -1, 1], 5), ([0, 1, i32::MAX], 8)] {
        let labels =
            Labels { ids: &ids, ignore: -100, smoothing: LabelSmoothing::None, shard: Shard::whole(vocab) };
        let mut logits = vec![1f32; 24];
        let error = cross_entropy_with_gradient(cpu, &mut logits, rows, labels, &[1.0; 3], &mut [0.0; 3])
            .unwrap_err()
            .to_string();
        let bad = ids.iter().find(|i| **i < 0 || **i >= vocab as i32).unwrap();
        assert!(error.contains(&format!("id {bad} ")), "{error}");
        assert_eq!(logits, [1f32; 24], "nothing written");
    }
    let labels =
        Labels { ids: &[0i32; 3], ignore: -100, smoothing: LabelSmoothing::None, shard: Shard::whole(9) };
    assert!(cross_entropy(cpu, &[0f32; 24], rows, labels, &mut [0.0; 3], &mut [0.0; 3]).is_err());
}
