//! The first step against f64: without weight decay a weight changes by lr·0.2·√max(rows, cols) times the orthogonalized
//! gradient, whatever its size.

use super::*;

const QUINTIC: [[f64; 3]; 5] = [
    [4.0848, -6.8946, 2.9270],
    [3.9505, -6.3029, 2.6377],
    [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046],
    [2.8366, -3.0525, 1.2012],
];

/// `a [m, k]·b [k, n]`, in plain loops: this crate's tests are hardly optimized.
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    let mut at = 0;
    while at < m * k {
        let (factor, row, out) = (a[at], &b[at % k * n..][..n], &mut c[at / k * n..][..n]);
        let mut j = 0;
        while j < n {
            out[j] += factor * row[j];
            j += 1;
        }
        at += 1;
    }
    c
}

fn transposed(x: &[f64], [rows, cols]: [usize; 2]) -> Vec<f64> {
    (0..rows * cols).map(|e| x[(e % rows) * cols + e / rows]).collect()
}

/// Newton–Schulz on `x [rows, cols]`, in f64.
fn orthogonalized(x: &[f64], [rows, cols]: [usize; 2]) -> Vec<f64> {
    if rows > cols {
        let other = orthogonalized(&transposed(x, [rows, cols]), [cols, rows]);
        return transposed(&other, [cols, rows]);
    }
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-15);
    let mut x: Vec<f64> = x.iter().map(|x| x / norm).collect();
    for [a, b, c] in QUINTIC {
        let gram = product(&x, &transposed(&x, [rows, cols]), [rows, cols, rows]);
        let square = product(&gram, &gram, [rows; 3]);
        let mixed: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| b * g + c * s).collect();
        let step = product(&mixed, &x, [rows, rows, cols]);
        x = x.iter().zip(step).map(|(x, s)| a * x + s).collect();
    }
    x
}

/// Weights before and after one step, and its gradients.
fn one_step(layout: &str, set: &[&str]) -> [Vec<LogicalValues>; 3] {
    let mut all = run(layout, set, |rank, resolved| {
        let data = source::open(&resolved)?.train;
        let mut t = Trainer::new(rank, &resolved)?;
        let before = t.weights()?;
        t.train_step(&*data)?;
        Ok([before, t.weights()?, t.gradients()?])
    });
    let first = all.swap_remove(0);
    all.iter().for_each(|other| assert!(*other == first, "{layout} {set:?}: ranks differ"));
    first
}

/// Matrices of the last layer; the others are more of the same.
fn is_updated(v: &LogicalValues) -> bool {
    v.shape.len() == 2 && v.name.starts_with("layers.1.")
}

/// Names of the matrices that are orthogonalized as one.
fn stacks(all: &[LogicalValues], split_qkv: bool) -> Vec<Vec<usize>> {
    let mut out: Vec<Vec<usize>> = Vec::new();
    for (i, v) in all.iter().enumerate().filter(|(_, v)| is_updated(v)) {
        let follows = [".attn.k.weight", ".attn.v.weight"].iter().any(|end| v.name.ends_with(end));
        match out.last_mut().filter(|_| follows && !split_qkv) {
            Some(last) => last.push(i),
            None => out.push(vec![i]),
        }
    }
    out
}

/// Largest error of the updates relative to the largest element of the update.
fn error([before, after, gradients]: &[Vec<LogicalValues>; 3], split_qkv: bool) -> f64 {
    let mut worst: f64 = 0.0;
    for stack in stacks(gradients, split_qkv) {
        let of = |all: &[LogicalValues]| -> Vec<f64> {
            stack.iter().flat_map(|i| all[*i].values.iter().map(|x| f64::from(*x))).collect()
        };
        let cols = gradients[stack[0]].shape[1];
        let (g, old, new) = (of(gradients), of(before), of(after));
        let shape = [g.len() / cols, cols];
        let size = 1e-2 * 0.2 * (shape[0].max(cols) as f64).sqrt();
        let want: Vec<f64> = orthogonalized(&g, shape).iter().map(|o| -size * o).collect();
        let most = want.iter().fold(1e-9, |m: f64, x| m.max(x.abs()));
        for ((old, new), want) in old.iter().zip(&new).zip(&want) {
            worst = worst.max((new - old - want).abs() / most);
        }
    }
    worst
}

fn check(layout: &str, set: &[&str], split_qkv: bool) {
    let step = one_step(layout, set);
    let (ours, other) = (error(&step, split_qkv), error(&step, !split_qkv));
    assert!(ours < 2e-3, "{layout} {set:?}: {ours}");
    // The twin can tell the two apart.
    assert!(other > 0.05, "{layout} {set:?}: {other}");
}

fn muon(keys: &str) -> String {
    format!("optimizer.muon={{ products = \"f32\", {keys} }}")
}

/// Q, K and V of all query groups are three matrices, or one without `split_qkv`; on tensor-parallel ranks that share heads
/// of k and v too (tp = 4).
#[test]
fn qkv_is_split_by_query_group_or_whole() {
    for split in [true, false] {
        let key = format!("split_qkv = {split}");
        for layout in ["tp=1", "tp=2", "tp=4", "dp=3", "tp=2,dp=2", "pp=2"] {
            check(layout, &[&muon(&key), "parallel.zero=1"], split);
        }
        for layout in ["tp=2", "tp=4"] {
            check(layout, &[&muon(&format!("{key}, tp_mode = \"distributed\""))], split);
        }
    }
}

/// Experts are orthogonalized one by one, whichever rank holds them.
#[test]
fn experts_are_matrices_of_their_own() {
    let distributed = muon("tp_mode = \"distributed\"");
    for layout in ["dp=1", "ep=2", "ep=4", "ep=2,etp=2", "tp=2,etp=1,ep=2", "dp=2,etp=2", "pp=2,ep=2"] {
        check(layout, &[&MOE[..], &["parallel.zero=1"]].concat(), true);
        if layout.contains("tp") {
            check(layout, &[&MOE[..], &[&distributed]].concat(), true);
        }
    }
}
