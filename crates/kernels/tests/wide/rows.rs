//! Row kernels: norms, RoPE, embedding, cross-entropy, SwiGLU.

use super::scene::Scene;
use ferrotron_kernels::{
    Act, ActBackward, ActForward, CrossEntropy, EmbeddingBackward, EmbeddingForward, LabelSmoothing, Norm,
    NormBackward, NormForward, ResidualAdd, Rope, RopeStyle,
};
use ferrotron_tensor::{Category, DType, Tensor};

const RMS: Norm = Norm { subtract_mean: false, eps: 1e-6, zero_centred: false };

/// Rows that a block keeps in registers, and rows that are read again for each sum.
pub fn norms(h: &Scene) {
    for width in [h.size(4096, 64), h.size(28_672, 102)] {
        norm_of(h, width);
    }
}

fn norm_of(h: &Scene, width: usize) {
    let (k, s, cpu) = (&h.large.k, &h.large.s, &h.cpu);
    let rows = h.rows(width, 1);
    let [x, residual] = [1, 2].map(|seed| h.random(DType::BF16, [rows, width], seed));
    let gamma = h.random(DType::BF16, [1, width], 3).view(&[width]).unwrap();
    let cpu_gamma = h.fetch(&gamma);
    let [sum, y] = [(); 2].map(|()| h.empty(DType::BF16, &[rows, width]));
    let rstd = h.empty(DType::F32, &[rows]);
    let at = h.samples(&x);
    let [cx, cr] = [&x, &residual].map(|t| h.gather(t, &at));
    let sampled = cx.shape()[0];
    let [csum, cy] = [(); 2].map(|()| h.cpu_empty(DType::BF16, cx.shape()));
    let crstd = h.cpu_empty(DType::F32, &[sampled]);

    let plain = |x, gamma, y, rstd| NormForward { x, gamma, beta: None, y, mean: None, rstd };
    k.norm_forward(s, RMS, &plain(&x, &gamma, &y, &rstd)).unwrap();
    cpu.k.norm_forward(&cpu.s, RMS, &plain(&cx, &cpu_gamma, &cy, &crstd)).unwrap();
    h.near("norm_forward", &y, &at, &cy, 1e-5);
    let most = s.zeros(&[1], DType::F32, Category::Workspace).unwrap();
    let add = ResidualAdd { residual: &residual, sum: &sum };
    k.add_norm_forward_amax(s, RMS, &add, &plain(&x, &gamma, &y, &rstd), &most).unwrap();
    let add = ResidualAdd { residual: &cr, sum: &csum };
    cpu.k.add_norm_forward(&cpu.s, RMS, &add, &plain(&cx, &cpu_gamma, &cy, &crstd)).unwrap();
    h.same("residual sum", &sum, &at, &csum);
    h.near("add_norm_forward", &y, &at, &cy, 1e-5);
    h.near("rstd", &rstd, &at, &crstd, 1e-5);
    let again = s.zeros(&[1], DType::F32, Category::Workspace).unwrap();
    k.amax(s, &y, &again).unwrap();
    assert_eq!(h.number(&most), h.number(&again), "amax of the norm");

    drop((x, y));
    let (dy, dx) = (h.sparse(DType::BF16, [rows, width], 4), h.empty(DType::BF16, &[rows, width]));
    let dgamma = h.empty(DType::F32, &[k.norm_partials(DType::BF16, rows, width), width]);
    let cdy = h.gather(&dy, &at);
    let cdx = h.cpu_empty(DType::BF16, cdy.shape());
    let cdgamma = h.cpu_empty(DType::F32, &[cpu.k.norm_partials(DType::BF16, sampled, width), width]);
    let back = |[x, gamma, rstd, dy, residual, dx, dgamma]: [&Tensor; 7], large: bool| {
        let side = if large { &h.large } else { &h.cpu };
        let (mean, dbeta, residual) = (None, None, Some(residual));
        let n = NormBackward { x, gamma, mean, rstd, dy, residual, dx, dgamma, dbeta };
        side.k.norm_backward(&side.s, RMS, &n).unwrap();
    };
    back([&sum, &gamma, &rstd, &dy, &residual, &dx, &dgamma], true);
    back([&csum, &cpu_gamma, &crstd, &cdy, &cr, &cdx, &cdgamma], false);
    h.near("norm_backward", &dx, &at, &cdx, 1e-4);
    let total = |t: &Tensor| {
        let mut sums = vec![0.0; width];
        h.values(t).chunks(width).for_each(|row| sums.iter_mut().zip(row).for_each(|(s, x)| *s += x));
        sums
    };
    for (i, (o, w)) in total(&h.fetch(&dgamma)).iter().zip(&total(&cdgamma)).enumerate() {
        assert!((o - w).abs() <= 1e-4 * (1.0 + w.abs()), "dgamma [{i}]: {o} instead of {w}");
    }
}

/// Query and key heads inside rows of all heads.
pub fn rope(h: &Scene) {
    let (heads, d, places) = (h.size(48, 6), 128, 4096);
    let tokens = h.rows(heads * d, 1);
    let qkv = h.random(DType::BF16, [tokens, heads * d], 1);
    let at = h.samples(&qkv);
    let wanted = h.gather(&qkv, &at);
    let positions: Vec<i32> = (0..tokens).map(|t| (t % places) as i32).collect();
    let [positions, _] = h.both(&positions, &[tokens]);
    let cpu_positions = h.gather(&positions, &at);
    let table = |f: fn(f64) -> f64| {
        let angle = |i: usize| (i / (d / 2)) as f64 * 1e4f64.powf(-((i % (d / 2)) as f64) / (d / 2) as f64);
        h.both(&(0..places * d / 2).map(|i| f(angle(i)) as f32).collect::<Vec<_>>(), &[places, d / 2])
    };
    let ([cos, cpu_cos], [sin, cpu_sin]) = (table(f64::cos), table(f64::sin));
    let rotated =
        |t: &Tensor| t.view(&[t.shape()[0], heads, d]).unwrap().narrow(1, 0, heads * 5 / 6).unwrap();
    let (x, cpu_x) = (rotated(&qkv), rotated(&wanted));
    let style = RopeStyle::Half;
    for inverse in [false, true] {
        let r = Rope { x: &x, cos: &cos, sin: &sin, positions: &positions, style, inverse };
        h.large.k.rope(&h.large.s, &r).unwrap();
        let r = Rope { x: &cpu_x, cos: &cpu_cos, sin: &cpu_sin, positions: &cpu_positions, style, inverse };
        h.cpu.k.rope(&h.cpu.s, &r).unwrap();
        h.near("rope", &qkv, &at, &wanted, if inverse { 8e-2 } else { 1e-5 });
    }
}

pub fn embedding(h: &Scene) {
    let (vocab, width) = (1000, h.size(4096, 64));
    let tokens = h.rows(width, 1);
    let table = h.random(DType::BF16, [vocab, width], 1);
    let ids: Vec<i32> = (0..tokens).map(|t| (t * 7919 % vocab) as i32).collect();
    let [ids, _] = h.both(&ids, &[tokens]);
    let y = h.empty(DType::BF16, &[tokens, width]);
    let at = h.samples(&y);
    let (cpu_ids, cpu_table) = (h.gather(&ids, &at), h.fetch(&table));
    let wanted = h.cpu_empty(DType::BF16, &[cpu_ids.numel(), width]);
    let look_up = |ids, table, y| EmbeddingForward { ids, table, first: 0, vocab, scale: 1.0, add: false, y };
    h.large.k.embedding_forward(&h.large.s, &look_up(&ids, &table, &y)).unwrap();
    h.cpu.k.embedding_forward(&h.cpu.s, &look_up(&cpu_ids, &cpu_table, &wanted)).unwrap();
    h.same("embedding_forward", &y, &at, &wanted);
    drop(y);

    let dy = h.sparse(DType::BF16, [tokens, width], 2);
    let dtable = h.empty(DType::F32, &[vocab, width]);
    let (cpu_dy, wanted) = (h.gather(&dy, &at), h.cpu_empty(DType::F32, &[vocab, width]));
    let back = |ids, dy, dtable| EmbeddingBackward {
        ids,
        dy,
        first: 0,
        vocab,
        scale: 1.0,
        accumulate: false,
        dtable,
    };
    h.large.k.embedding_backward(&h.large.s, &back(&ids, &dy, &dtable)).unwrap();
    h.cpu.k.embedding_backward(&h.cpu.s, &back(&cpu_ids, &cpu_dy, &wanted)).unwrap();
    h.near("embedding_backward", &dtable, std::slice::from_ref(&(0..vocab)), &wanted, 1e-5);
}

pub fn cross_entropy(h: &Scene) {
    let vocab = h.size(128_256, 120);
    let rows = h.rows(vocab, 1);
    let logits = h.random(DType::BF16, [rows, vocab], 1);
    let labels: Vec<i32> = (0..rows).map(|r| (r * 7919 % vocab) as i32).collect();
    let weights: Vec<f32> = (0..rows).map(|r| 1.0 + (r % 7) as f32).collect();
    let ([labels, _], [weights, _]) = (h.both(&labels, &[rows]), h.both(&weights, &[rows]));
    let (loss, at) = (h.empty(DType::F32, &[rows]), h.samples(&logits));
    let [wanted, cpu_labels, cpu_weights] = [&logits, &labels, &weights].map(|t| h.gather(t, &at));
    let cpu_loss = h.cpu_empty(DType::F32, &[cpu_labels.numel()]);
    let smoothing = LabelSmoothing::None;
    let of = |logits, labels, weights, loss| CrossEntropy {
        logits,
        vocab,
        labels,
        weights,
        smoothing,
        loss,
        gradient: true,
    };
    h.large.k.cross_entropy(&h.large.s, &of(&logits, &labels, &weights, &loss)).unwrap();
    h.cpu.k.cross_entropy(&h.cpu.s, &of(&wanted, &cpu_labels, &cpu_weights, &cpu_loss)).unwrap();
    h.near("cross_entropy", &loss, &at, &cpu_loss, 1e-4);
    h.near("gradient of the logits", &logits, &at, &wanted, 1e-8);
}

/// Inputs of more than 2³² elements, and outputs of more than 2³¹.
pub fn swiglu(h: &Scene) {
    let (k, s, cpu) = (&h.large.k, &h.large.s, &h.cpu);
    let f = h.size(14_336, 48);
    let rows = h.rows(f, 1);
    let x = h.random(DType::BF16, [rows, 2 * f], 1);
    let (y, at) = (h.empty(DType::BF16, &[rows, f]), h.samples(&x));
    let cx = h.gather(&x, &at);
    let sampled = cx.shape()[0];
    let wanted = h.cpu_empty(DType::BF16, &[sampled, f]);
    let forward = |x, y| ActForward { act: Act::Silu, gated: true, x, y };
    let amax = || s.zeros(&[1], DType::F32, Category::Workspace).unwrap();
    let (most, again) = (amax(), amax());
    k.act_forward_amax(s, &forward(&x, &y), &most).unwrap();
    cpu.k.act_forward(&cpu.s, &forward(&cx, &wanted)).unwrap();
    h.near("act_forward", &y, &at, &wanted, 4e-6);
    k.amax(s, &y, &again).unwrap();
    assert_eq!(h.number(&most), h.number(&again), "amax of the activation");
    drop(y);
    let (dy, dx) = (h.random(DType::BF16, [rows, f], 2), h.empty(DType::BF16, &[rows, 2 * f]));
    let (cdy, wanted) = (h.gather(&dy, &at), h.cpu_empty(DType::BF16, &[sampled, 2 * f]));
    let backward = |x, dy, dx| ActBackward { act: Act::Silu, gated: true, x, dy, dx };
    k.act_backward(s, &backward(&x, &dy, &dx)).unwrap();
    cpu.k.act_backward(&cpu.s, &backward(&cx, &cdy, &wanted)).unwrap();
    h.near("act_backward", &dx, &at, &wanted, 8e-6);
}
