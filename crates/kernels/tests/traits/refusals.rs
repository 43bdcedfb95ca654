//! Arguments that do not fit are errors that name the kernel, on every home, and never a panic.

use super::homes::*;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::*;
use ferrotron_tensor::{Category, DType, Tensor};

/// Zeros of a shape and type.
fn z(h: &Home, dtype: DType, shape: &[usize]) -> Tensor {
    h.tensor(dtype, shape, &vec![0.0; shape.iter().product()])
}

/// A column of a matrix: one axis, not contiguous.
fn column(h: &Home, dtype: DType, n: usize) -> Tensor {
    z(h, dtype, &[n, 2]).select(1, 0).unwrap()
}

use DType::{BF16, F32, I32, I64};

#[test]
fn products() {
    for h in homes() {
        let f = |shape: &[usize]| z(&h, F32, shape);
        let go = |what: &str, a: &Tensor, b: &Tensor, bias: Option<&Tensor>, c: &Tensor| {
            let g = Gemm { a, trans_a: false, b, trans_b: false, bias, accumulate: false, c };
            refused(&h, what, h.k.gemm(&h.s, &g));
        };
        let (a, b, c) = (f(&[3, 4]), f(&[4, 5]), f(&[3, 5]));
        go("inner sizes", &a, &f(&[3, 5]), None, &c);
        go("rows of the result", &a, &b, None, &f(&[4, 5]));
        go("columns of the result", &a, &b, None, &f(&[3, 4]));
        go("a vector", &f(&[4]), &b, None, &c);
        go("three axes", &f(&[1, 3, 4]), &b, None, &c);
        go("a short bias", &a, &b, Some(&f(&[4])), &c);
        go("a matrix as bias", &a, &b, Some(&f(&[1, 5])), &c);
        go("a strided bias", &a, &b, Some(&column(&h, F32, 5)), &c);
        go("columns apart", &f(&[4, 3]).transpose(0, 1).unwrap(), &b, None, &c);
        go("a result with columns apart", &a, &b, None, &f(&[5, 3]).transpose(0, 1).unwrap());
        go("mixed types", &a, &z(&h, BF16, &[4, 5]), None, &c);
        go("a wide bias of narrow factors", &z(&h, BF16, &[3, 4]), &z(&h, BF16, &[4, 5]), Some(&f(&[5])), &c);
        go("a narrow result of wide factors", &a, &b, None, &z(&h, BF16, &[3, 5]));
        go("integers", &z(&h, I32, &[3, 4]), &z(&h, I32, &[4, 5]), None, &z(&h, I32, &[3, 5]));
        go("integers into floats", &z(&h, I32, &[3, 4]), &z(&h, I32, &[4, 5]), None, &c);
        let square = f(&[4, 4]);
        go("the result over a factor", &square, &f(&[4, 4]), None, &square);
        let all = f(&[6, 4]);
        let (top, low) = (all.narrow(0, 0, 4).unwrap(), all.narrow(0, 2, 4).unwrap());
        go("the result over a part of a factor", &top, &f(&[4, 4]), None, &low);
    }
}

#[test]
fn maps() {
    for h in homes() {
        let (k, s) = (&h.k, &h.s);
        let f = |n: usize| z(&h, F32, &[n]);
        let key = DropoutKey { seed: 0, step: 0, layer: 0, site: 0 };
        refused(&h, "add lengths", k.add(s, &f(3), &f(4), &f(3)));
        refused(&h, "add result", k.add(s, &f(3), &f(3), &f(4)));
        refused(&h, "add types", k.add(s, &f(3), &z(&h, BF16, &[3]), &f(3)));
        refused(&h, "add integers", k.add(s, &z(&h, I32, &[3]), &z(&h, I32, &[3]), &z(&h, I32, &[3])));
        refused(&h, "add strided", k.add(s, &column(&h, F32, 3), &f(3), &f(3)));
        let x = f(3);
        refused(&h, "add in place", k.add(s, &x, &f(3), &x));
        refused(&h, "add_assign lengths", k.add_assign(s, &f(3), &f(2)));
        refused(&h, "add_assign itself", k.add_assign(s, &x, &x));
        refused(&h, "add_assign integers", k.add_assign(s, &f(3), &z(&h, I32, &[3])));
        refused(&h, "scale strided", k.scale(s, &column(&h, F32, 3), 2.0));
        refused(&h, "scale integers", k.scale(s, &z(&h, I64, &[3]), 2.0));
        refused(&h, "copy lengths", k.copy(s, &f(3), &f(4)));
        refused(&h, "copy shapes", k.copy(s, &z(&h, F32, &[2, 3]), &z(&h, F32, &[3, 2])));
        refused(&h, "copy integers to floats", k.copy(s, &z(&h, I32, &[3]), &f(3)));
        refused(&h, "copy and convert strided", k.copy(s, &column(&h, F32, 3), &z(&h, BF16, &[3])));
        let turned = z(&h, F32, &[3, 2]).transpose(0, 1).unwrap();
        refused(&h, "copy columns apart", k.copy(s, &turned, &z(&h, F32, &[2, 3])));
        let deep = z(&h, F32, &[2, 2, 3, 2]).transpose(2, 3).unwrap();
        refused(&h, "copy deep columns apart", k.copy(s, &deep, &z(&h, F32, &[2, 2, 2, 3])));
        refused(&h, "copy itself", k.copy(s, &x, &x));
        let runs = NormalRuns { stream: RandomStream::named(0, ""), first: 0, stride: 0, std: 1.0 };
        refused(&h, "normal values in a vector", k.normal(s, runs, &f(3)));
        refused(&h, "normal values in narrow", k.normal(s, runs, &z(&h, BF16, &[2, 3])));
        refused(&h, "normal values apart", k.normal(s, runs, &z(&h, F32, &[2, 3]).narrow(1, 0, 2).unwrap()));
        let m = z(&h, F32, &[3, 4]);
        refused(&h, "column_sum short", k.column_sum(s, &m, false, &f(3)));
        refused(&h, "column_sum of a vector", k.column_sum(s, &f(3), false, &f(3)));
        refused(&h, "column_sum of a number", k.column_sum(s, &z(&h, F32, &[]), false, &z(&h, F32, &[])));
        refused(&h, "column_sum into narrow", k.column_sum(s, &m, false, &z(&h, BF16, &[4])));
        refused(&h, "column_sum into a column", k.column_sum(s, &m, false, &column(&h, F32, 4)));
        refused(&h, "dot lengths", k.dot(s, &f(3), &f(4), &f(1)));
        refused(&h, "dot into nothing", k.dot(s, &f(3), &f(3), &f(0)));
        refused(&h, "dot of narrow", k.dot(s, &z(&h, BF16, &[3]), &z(&h, BF16, &[3]), &f(1)));
        refused(&h, "softcap strided", k.softcap_forward(s, 1.0, &column(&h, F32, 3)));
        refused(&h, "softcap integers", k.softcap_forward(s, 1.0, &z(&h, I32, &[3])));
        refused(&h, "softcap lengths", k.softcap_backward(s, 1.0, &f(3), &f(4)));
        refused(&h, "softcap types", k.softcap_backward(s, 1.0, &f(3), &z(&h, BF16, &[3])));
        let (row, ids) = (|n| z(&h, F32, &[1, n]), |n| z(&h, I32, &[n]));
        refused(&h, "dropout lengths", k.dropout(s, 0.5, key, &ids(1), &row(3), &row(4)));
        refused(&h, "dropout types", k.dropout(s, 0.5, key, &ids(1), &row(3), &z(&h, BF16, &[1, 3])));
        refused(&h, "dropout of more rows", k.dropout(s, 0.5, key, &ids(2), &row(3), &row(3)));
        refused(&h, "dropout of rows unnumbered", k.dropout(s, 0.5, key, &f(1), &row(3), &row(3)));
        refused(&h, "dropout of a vector", k.dropout(s, 0.5, key, &ids(3), &f(3), &f(3)));
        for p in [-0.1, 1.0, 1.5, f32::NAN] {
            refused(&h, &format!("dropout of {p}"), k.dropout(s, p, key, &ids(1), &row(3), &row(3)));
        }
        let pair = |r, w| z(&h, F32, &[r, w]);
        refused(&h, "gated width", k.act_forward(s, Act::Silu, true, &pair(2, 5), &pair(2, 2)));
        refused(&h, "gated rows", k.act_forward(s, Act::Silu, true, &pair(2, 4), &pair(3, 2)));
        refused(&h, "gated vector", k.act_forward(s, Act::Silu, true, &f(4), &f(2)));
        refused(&h, "act length", k.act_forward(s, Act::Silu, false, &f(4), &f(2)));
        refused(&h, "act type", k.act_forward(s, Act::Silu, false, &f(4), &z(&h, BF16, &[4])));
        refused(
            &h,
            "act half floats",
            k.act_forward(s, Act::Silu, false, &z(&h, I32, &[4]), &z(&h, I32, &[4])),
        );
        refused(
            &h,
            "act_backward dx",
            k.act_backward(s, Act::Silu, true, &pair(2, 4), &pair(2, 2), &pair(2, 2)),
        );
        refused(&h, "act_backward dy", k.act_backward(s, Act::Silu, false, &f(4), &f(3), &f(4)));
        let clamped = Act::ClampedSilu { limit: 1.0, alpha: 1.0, offset: 1.0 };
        refused(&h, "clamped without a gate", k.act_forward(s, clamped, false, &f(4), &f(4)));
    }
}

#[test]
fn norms() {
    for h in homes() {
        let f = |shape: &[usize]| z(&h, F32, shape);
        let layer = Norm { subtract_mean: true, eps: 1e-5, zero_centred: false };
        let rms = Norm { subtract_mean: false, ..layer };
        let (x, y, g, r) = (f(&[3, 4]), f(&[3, 4]), f(&[4]), f(&[3]));
        let (b, m) = (f(&[4]), f(&[3]));
        let base = || NormForward { x: &x, gamma: &g, beta: None, y: &y, mean: None, rstd: &r };
        let go = |what: &str, norm, n: NormForward| refused(&h, what, h.k.norm_forward(&h.s, norm, &n));
        go("LayerNorm without mean and bias", layer, base());
        go("LayerNorm without bias", layer, NormForward { mean: Some(&m), ..base() });
        go("RMSNorm with bias", rms, NormForward { beta: Some(&b), ..base() });
        go("another shape", rms, NormForward { y: &f(&[4, 3]), ..base() });
        go("a short gain", rms, NormForward { gamma: &f(&[3]), ..base() });
        go("a long gain", rms, NormForward { gamma: &f(&[5]), ..base() });
        go("few statistics", rms, NormForward { rstd: &f(&[2]), ..base() });
        go("narrow statistics", rms, NormForward { rstd: &z(&h, BF16, &[3]), ..base() });
        go("a gain of another type", rms, NormForward { gamma: &z(&h, BF16, &[4]), ..base() });
        go("a result of another type", rms, NormForward { y: &z(&h, BF16, &[3, 4]), ..base() });
        go("in place", rms, NormForward { y: &x, ..base() });
        go("columns apart", rms, NormForward { x: &f(&[4, 3]).transpose(0, 1).unwrap(), ..base() });
        let deep = h.framed(F32, &[2, 2, 2, 3], &[0.0; 24]);
        let n =
            NormForward { x: &deep.view, gamma: &f(&[3]), y: &f(&[2, 2, 2, 3]), rstd: &f(&[8]), ..base() };
        go("more strides than rows have", rms, n);
        let (sum, short) = (f(&[3, 4]), f(&[2, 4]));
        refused(&h, "a short residual", h.k.add_norm_forward(&h.s, rms, &short, &sum, &base()));
        refused(&h, "a short sum", h.k.add_norm_forward(&h.s, rms, &sum, &short, &base()));
        refused(
            &h,
            "a residual of another type",
            h.k.add_norm_forward(&h.s, rms, &z(&h, BF16, &[3, 4]), &sum, &base()),
        );

        let (dy, dx, dg) = (f(&[3, 4]), f(&[3, 4]), f(&[h.k.norm_parts(F32, 3, 4), 4]));
        let base = || NormBackward {
            x: &x,
            gamma: &g,
            mean: None,
            rstd: &r,
            dy: &dy,
            residual: None,
            dx: &dx,
            dgamma: &dg,
            dbeta: None,
        };
        let go = |what: &str, norm, n: NormBackward| refused(&h, what, h.k.norm_backward(&h.s, norm, &n));
        go("LayerNorm without mean and bias gradient", layer, base());
        go("RMSNorm with a bias gradient", rms, NormBackward { dbeta: Some(&b), ..base() });
        go("dy of another shape", rms, NormBackward { dy: &f(&[3, 3]), ..base() });
        go("dx of another shape", rms, NormBackward { dx: &f(&[2, 4]), ..base() });
        go("a residual of another shape", rms, NormBackward { residual: Some(&f(&[2, 4])), ..base() });
        let wide = f(&[3, 8]).narrow(1, 0, 4).unwrap();
        go("a residual of other strides", rms, NormBackward { residual: Some(&wide), ..base() });
        go("a short gain gradient", rms, NormBackward { dgamma: &f(&[3]), ..base() });
        go("a narrow gain gradient", rms, NormBackward { dgamma: &z(&h, BF16, &[4]), ..base() });
        go("few statistics", rms, NormBackward { rstd: &f(&[2]), ..base() });
        go("over its input", rms, NormBackward { dx: &x, ..base() });
    }
}

#[test]
fn rotations() {
    for h in homes() {
        let f = |shape: &[usize]| z(&h, F32, shape);
        let (x, cos, sin, positions) = (f(&[3, 2, 8]), f(&[5, 4]), f(&[5, 4]), h.ids(&[0, 1, 4]));
        let base = || Rope {
            x: &x,
            cos: &cos,
            sin: &sin,
            positions: &positions,
            style: RopeStyle::Half,
            inverse: false,
        };
        let go = |what: &str, r: Rope| refused(&h, what, h.k.rope(&h.s, &r));
        go("two axes", Rope { x: &f(&[6, 8]), ..base() });
        go("tables of different sizes", Rope { sin: &f(&[4, 4]), ..base() });
        go("a vector as table", Rope { cos: &f(&[20]), sin: &f(&[20]), ..base() });
        go("more rotated than there is", Rope { x: &f(&[3, 2, 6]), ..base() });
        go("few positions", Rope { positions: &h.ids(&[0, 1]), ..base() });
        go("a position past the table", Rope { positions: &h.ids(&[0, 5, 1]), ..base() });
        go("a negative position", Rope { positions: &h.ids(&[0, -1, 1]), ..base() });
        go("positions of another type", Rope { positions: &z(&h, I64, &[3]), ..base() });
        go("narrow tables", Rope { cos: &z(&h, BF16, &[5, 4]), ..base() });
        go("channels apart", Rope { x: &f(&[3, 8, 2]).transpose(1, 2).unwrap(), ..base() });
        go("integers", Rope { x: &z(&h, I32, &[3, 2, 8]), ..base() });
    }
}

#[test]
fn tables_and_losses() {
    for h in homes() {
        let (k, s) = (&h.k, &h.s);
        let f = |shape: &[usize]| z(&h, F32, shape);
        let (table, y) = (f(&[5, 4]), f(&[2, 4]));
        for ids in [[0, 5], [-1, 0], [IGNORE, 0], [i32::MAX, 0], [i32::MIN, 0]] {
            refused(&h, "an id outside", k.embedding_forward(s, &h.ids(&ids), &table, 0, 5, 1.0, false, &y));
            refused(&h, "an id outside", k.embedding_backward(s, &h.ids(&ids), &y, 0, 5, 1.0, false, &table));
        }
        // The table reaches from 3 to 8, ids to 6 only.
        for ids in [[0, 6], [7, 0], [-1, 3]] {
            let ids = h.ids(&ids);
            refused(&h, "an id in no shard", k.embedding_forward(s, &ids, &table, 3, 6, 1.0, false, &y));
            refused(&h, "an id in no shard", k.embedding_backward(s, &ids, &y, 3, 6, 1.0, false, &table));
        }
        let ids = h.ids(&[0, 1]);
        refused(&h, "width", k.embedding_forward(s, &ids, &table, 0, 5, 1.0, false, &f(&[2, 3])));
        refused(&h, "rows", k.embedding_forward(s, &ids, &table, 0, 5, 1.0, false, &f(&[3, 4])));
        refused(&h, "ids as floats", k.embedding_forward(s, &f(&[2]), &table, 0, 5, 1.0, false, &y));
        refused(&h, "types", k.embedding_forward(s, &ids, &table, 0, 5, 1.0, false, &z(&h, BF16, &[2, 4])));
        refused(
            &h,
            "strided",
            k.embedding_forward(s, &ids, &table, 0, 5, 1.0, false, &f(&[2, 8]).narrow(1, 0, 4).unwrap()),
        );
        refused(
            &h,
            "a narrow gradient",
            k.embedding_backward(s, &ids, &y, 0, 5, 1.0, false, &z(&h, BF16, &[5, 4])),
        );

        let (logits, labels, weights, loss) = (f(&[3, 6]), h.ids(&[0, 1, 5]), f(&[3]), f(&[3]));
        for gradient in [false, true] {
            let base = || CrossEntropy {
                logits: &logits,
                vocab: 6,
                labels: &labels,
                weights: &weights,
                smoothing: Smoothing::None,
                loss: &loss,
                gradient,
            };
            let go = |what: &str, c: CrossEntropy| refused(&h, what, k.cross_entropy(s, &c));
            go("more vocabulary than columns", CrossEntropy { vocab: 7, ..base() });
            go("no vocabulary", CrossEntropy { vocab: 0, ..base() });
            go("few labels", CrossEntropy { labels: &h.ids(&[0, 1]), ..base() });
            go("a label outside", CrossEntropy { labels: &h.ids(&[0, 1, 6]), ..base() });
            go("a negative label", CrossEntropy { labels: &h.ids(&[0, 1, -1]), ..base() });
            go("a label in the padding", CrossEntropy { vocab: 5, ..base() });
            go("labels as floats", CrossEntropy { labels: &f(&[3]), ..base() });
            go("few losses", CrossEntropy { loss: &f(&[2]), ..base() });
            go("few weights", CrossEntropy { weights: &f(&[2]), ..base() });
            go("a vector of logits", CrossEntropy { logits: &f(&[18]), ..base() });
            go("integers", CrossEntropy { logits: &z(&h, I32, &[3, 6]), ..base() });
            go("columns apart", CrossEntropy { logits: &f(&[6, 3]).transpose(0, 1).unwrap(), ..base() });
            go("a narrow loss", CrossEntropy { loss: &z(&h, BF16, &[3]), ..base() });
        }
    }
}

#[test]
fn shards_of_losses() {
    for h in homes() {
        let (k, s) = (&h.k, &h.s);
        let f = |shape: &[usize]| z(&h, F32, shape);
        // Columns 4 to 10 of 8.
        let (logits, labels, weights, loss) = (f(&[3, 6]), h.ids(&[0, 7, IGNORE]), f(&[3]), f(&[3]));
        let (stats, all) = (f(&[3, 4]), f(&[2, 3, 4]));
        let base = || ShardLogits { logits: &logits, first: 4, vocab: 8, labels: &labels };
        let both = |what: &str, x: ShardLogits| {
            refused(&h, what, k.cross_entropy_stats(s, &x, &stats));
            for gradient in [false, true] {
                let done = k.cross_entropy_shard(s, &x, &all, &weights, Smoothing::None, &loss, gradient);
                refused(&h, what, done);
            }
        };
        both("few labels", ShardLogits { labels: &h.ids(&[0, 1]), ..base() });
        both("a label outside", ShardLogits { labels: &h.ids(&[0, 1, 12]), ..base() });
        both("a label in the padding", ShardLogits { labels: &h.ids(&[0, 1, 8]), ..base() });
        both("a negative label", ShardLogits { labels: &h.ids(&[0, 1, -1]), ..base() });
        both("no vocabulary", ShardLogits { vocab: 0, ..base() });
        both("labels as floats", ShardLogits { labels: &f(&[3]), ..base() });
        both("strided labels", ShardLogits { labels: &column(&h, I32, 3), ..base() });
        both("a vector of logits", ShardLogits { logits: &f(&[18]), ..base() });
        both("integers", ShardLogits { logits: &z(&h, I32, &[3, 6]), ..base() });
        both("columns apart", ShardLogits { logits: &f(&[6, 3]).transpose(0, 1).unwrap(), ..base() });

        let stat = |what: &str, t: &Tensor| refused(&h, what, k.cross_entropy_stats(s, &base(), t));
        stat("few statistics", &f(&[2, 4]));
        stat("short statistics", &f(&[3, 3]));
        stat("narrow statistics", &z(&h, BF16, &[3, 4]));
        stat("strided statistics", &f(&[3, 5]).narrow(1, 0, 4).unwrap());
        for gradient in [false, true] {
            let go = |what: &str, all: &Tensor, weights: &Tensor, loss: &Tensor| {
                let none = Smoothing::None;
                refused(&h, what, k.cross_entropy_shard(s, &base(), all, weights, none, loss, gradient));
            };
            go("statistics of no rank", &f(&[0, 3, 4]), &weights, &loss);
            go("statistics of one rank alone", &stats, &weights, &loss);
            go("statistics of other rows", &f(&[2, 2, 4]), &weights, &loss);
            go("short statistics", &f(&[2, 3, 3]), &weights, &loss);
            go("narrow statistics", &z(&h, BF16, &[2, 3, 4]), &weights, &loss);
            go("strided statistics", &f(&[3, 2, 4]).transpose(0, 1).unwrap(), &weights, &loss);
            go("few weights", &all, &f(&[2]), &loss);
            go("narrow weights", &all, &z(&h, BF16, &[3]), &loss);
            go("few losses", &all, &weights, &f(&[2]));
            go("a narrow loss", &all, &weights, &z(&h, BF16, &[3]));
        }
    }
}

#[test]
fn optimizers() {
    for h in homes() {
        let f = |n: usize| z(&h, F32, &[n]);
        let scalars_t = f(scalars::COUNT);
        let adam = Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled: true };
        let sgd = Sgd { momentum: 0.9, dampening: 0.0, nesterov: false };
        let (p, g, m, v) = (f(4), f(4), f(4), f(4));
        let base = || Update {
            master: &p,
            weight: None,
            grad: &g,
            first: (&m).into(),
            second: Some((&v).into()),
            lr_mult: 1.0,
            wd_mult: 1.0,
            narrow: None,
        };
        let go = |what: &str, u: Update| {
            let one = [u];
            refused(&h, what, h.k.adam(&h.s, adam, &scalars_t, &one));
            let [mut u] = one;
            u.second = None;
            if !what.contains("second") {
                refused(&h, what, h.k.sgd(&h.s, sgd, &scalars_t, &[u]));
            }
        };
        go("a short gradient", Update { grad: &f(3), ..base() });
        go("a short copy", Update { weight: Some(&z(&h, BF16, &[3])), ..base() });
        go("a wide copy", Update { weight: Some(&f(4)), ..base() });
        go("a short moment", Update { first: (&f(3)).into(), ..base() });
        go("a short second moment", Update { second: Some((&f(3)).into()), ..base() });
        go("no second moment", Update { second: None, ..base() });
        go("a second moment of another type", Update { second: Some((&z(&h, BF16, &[4])).into()), ..base() });
        go("a narrow master", Update { master: &z(&h, BF16, &[4]), ..base() });
        go("a narrow gradient", Update { grad: &z(&h, BF16, &[4]), ..base() });
        go("integer moments", Update { first: (&z(&h, I32, &[4])).into(), ..base() });
        let (codes, scale) = (z(&h, DType::U8, &[4]), z(&h, DType::U8, &[1]));
        let coded = |scales| Moment { values: &codes, scales };
        let (two, wide) = (z(&h, DType::U8, &[2]), f(1));
        go("codes without scales", Update { first: coded(None), second: Some(coded(None)), ..base() });
        for (what, scales) in [("too many scales", &two), ("wide scales", &wide)] {
            go(what, Update { first: coded(Some(scales)), second: Some(coded(Some(scales))), ..base() });
        }
        let (amax, e4m3, e5m2) = (f(1), z(&h, DType::E4M3, &[4]), z(&h, DType::E5M2, &[4]));
        let few = z(&h, DType::E4M3, &[3]);
        let taken = |amax, data, scale, scale_inv| {
            Some(NewWeight { amax, bytes: Some(NewBytes { data, scale, scale_inv }) })
        };
        for (what, narrow) in [
            ("many magnitudes", taken(&p, &e4m3, &wide, &wide)),
            ("bytes of another format", taken(&amax, &e5m2, &wide, &wide)),
            ("too few bytes", taken(&amax, &few, &wide, &wide)),
            ("many scales", taken(&amax, &e4m3, &p, &wide)),
            ("many inverse scales", taken(&amax, &e4m3, &wide, &p)),
        ] {
            go(what, Update { narrow, ..base() });
        }
        let measured =
            Update { second: None, narrow: Some(NewWeight { amax: &amax, bytes: None }), ..base() };
        refused(&h, "a measuring SGD", h.k.sgd(&h.s, sgd, &scalars_t, &[measured]));
        let (low, high) = (z(&h, DType::I16, &[4]), z(&h, BF16, &[4]));
        let halves =
            Update { master: &low, weight: Some(&high), narrow: taken(&amax, &e4m3, &wide, &amax), ..base() };
        refused(&h, "bytes of halves", h.k.adam(&h.s, adam, &scalars_t, &[halves]));
        go("scales of f32", Update { first: Moment { values: &m, scales: Some(&scale) }, ..base() });
        go("half a master", Update { master: &z(&h, DType::I16, &[4]), ..base() });
        refused(&h, "codes without scales", h.k.pack_moment(&h.s, Order::First, &g, coded(None)));
        refused(&h, "narrow values", h.k.unpack_moment(&h.s, Order::First, coded(Some(&scale)), &codes));
        refused(&h, "short values", h.k.unpack_moment(&h.s, Order::First, coded(Some(&scale)), &f(3)));
        let (high, low) = (z(&h, BF16, &[4]), z(&h, DType::I16, &[4]));
        refused(&h, "a short half", h.k.split_master(&h.s, &p, &high, &z(&h, DType::I16, &[3])));
        refused(&h, "halves changed", h.k.join_master(&h.s, &low, &high, &p));
        refused(&h, "a narrow counter", h.k.count_step(&h.s, [0.9, 0.9], &f(counter::COUNT), &scalars_t));
        go("a strided master", Update { master: &column(&h, F32, 4), ..base() });
        go("a moment over the master", Update { first: (&p).into(), ..base() });
        for wrong in [0, 1, scalars::COUNT - 1, scalars::COUNT + 1] {
            refused(&h, "a scalar buffer of another size", h.k.adam(&h.s, adam, &f(wrong), &[base()]));
            refused(&h, "a scalar buffer of another size", h.k.sgd(&h.s, sgd, &f(wrong), &[base()]));
            refused(&h, "a scalar buffer of another size", h.k.clip_factor(&h.s, &[&g], None, &f(wrong)));
        }
        refused(&h, "narrow scalars", h.k.adam(&h.s, adam, &z(&h, BF16, &[scalars::COUNT]), &[base()]));
        refused(&h, "narrow scalars", h.k.clip_factor(&h.s, &[&g], None, &z(&h, BF16, &[scalars::COUNT])));
        refused(&h, "strided scalars", h.k.clip_factor(&h.s, &[&g], None, &column(&h, F32, scalars::COUNT)));
        refused(&h, "strided scalars", h.k.adam(&h.s, adam, &column(&h, F32, scalars::COUNT), &[base()]));
        refused(&h, "a narrow gradient", h.k.clip_factor(&h.s, &[&z(&h, BF16, &[4])], None, &scalars_t));
        refused(&h, "a strided gradient", h.k.clip_factor(&h.s, &[&column(&h, F32, 4)], None, &scalars_t));
        let two = h.s.zeros(&[2], DType::F64, Category::Workspace).unwrap();
        let square = two.narrow(0, 0, 1).unwrap();
        refused(&h, "two sums of squares", h.k.square_sum(&h.s, &[&g], &two));
        refused(&h, "a narrow sum of squares", h.k.square_sum(&h.s, &[&g], &f(1)));
        refused(&h, "a narrow gradient", h.k.square_sum(&h.s, &[&z(&h, BF16, &[4])], &square));
        refused(&h, "a narrow sum of squares", h.k.clip_from(&h.s, &f(1), None, &scalars_t));
        refused(&h, "a scalar buffer of another size", h.k.clip_from(&h.s, &square, None, &f(3)));
        // A list is refused as a whole before anything of it is done.
        let bad = f(3);
        let list: Vec<Update> =
            (0..2).map(|i| if i == 0 { base() } else { Update { grad: &bad, ..base() } }).collect();
        refused(&h, "one bad among good", h.k.adam(&h.s, adam, &scalars_t, &list));
    }
}

#[test]
fn attention() {
    for h in homes() {
        let f = |shape: &[usize]| z(&h, F32, shape);
        let scores = Scores {
            scale: 1.0,
            softcap: None,
            causal: true,
            align: Align::TopLeft,
            left: None,
            right: None,
            fp8: false,
        };
        let (q, k, v) = (f(&[2, 5, 4, 8]), f(&[2, 6, 2, 8]), f(&[2, 6, 2, 8]));
        let (out, lse) = (f(&[2, 5, 4, 8]), f(&[2, 4, 5]));
        let base = || AttentionForward { q: &q, k: &k, v: &v, sink: None, out: &out, lse: &lse };
        let go = |what: &str, seq: Sequences, a: AttentionForward| {
            refused(&h, what, h.k.attention_forward(&h.s, &scores, seq, &a));
            let new = |t: &Tensor| z(&h, t.dtype(), t.shape());
            let (dq, dk, dv, dout) = (new(a.q), new(a.k), new(a.v), new(a.out));
            let b = AttentionBackward { forward: a, dout: &dout, dq: &dq, dk: &dk, dv: &dv, dsink: None };
            refused(&h, what, h.k.attention_backward(&h.s, &scores, seq, &b));
        };
        let batch = Sequences::Batch;
        go(
            "heads that do not divide",
            batch,
            AttentionForward { k: &f(&[2, 6, 3, 8]), v: &f(&[2, 6, 3, 8]), ..base() },
        );
        go("no key heads", batch, AttentionForward { k: &f(&[2, 6, 0, 8]), v: &f(&[2, 6, 0, 8]), ..base() });
        go("key channels", batch, AttentionForward { k: &f(&[2, 6, 2, 4]), ..base() });
        go("value tokens", batch, AttentionForward { v: &f(&[2, 5, 2, 8]), ..base() });
        go("key batch", batch, AttentionForward { k: &f(&[1, 6, 2, 8]), v: &f(&[1, 6, 2, 8]), ..base() });
        go("out shape", batch, AttentionForward { out: &f(&[2, 5, 4, 4]), ..base() });
        go("lse shape", batch, AttentionForward { lse: &f(&[2, 5, 4]), ..base() });
        go("lse axes", batch, AttentionForward { lse: &f(&[40]), ..base() });
        go("lse type", batch, AttentionForward { lse: &z(&h, BF16, &[2, 4, 5]), ..base() });
        go("key type", batch, AttentionForward { k: &z(&h, BF16, &[2, 6, 2, 8]), ..base() });
        go("out type", batch, AttentionForward { out: &z(&h, BF16, &[2, 5, 4, 8]), ..base() });
        go("sink length", batch, AttentionForward { sink: Some(&f(&[3])), ..base() });
        go("sink type", batch, AttentionForward { sink: Some(&z(&h, BF16, &[4])), ..base() });
        go("two axes", batch, AttentionForward { q: &f(&[10, 32]), ..base() });
        go(
            "channels apart",
            batch,
            AttentionForward { q: &f(&[2, 5, 8, 4]).transpose(2, 3).unwrap(), ..base() },
        );
        let packed = Sequences::Packed { q: &[0, 5], k: &[0, 6] };
        go("packed with a batch axis", packed, base());
        let (q, k, v) = (f(&[5, 4, 8]), f(&[6, 2, 8]), f(&[6, 2, 8]));
        let (out, lse) = (f(&[5, 4, 8]), f(&[5, 4]));
        let base = || AttentionForward { q: &q, k: &k, v: &v, sink: None, out: &out, lse: &lse };
        go("a batch without its axis", batch, base());
        for (what, q, k) in [
            ("past the queries", &[0, 6][..], &[0, 6][..]),
            ("past the keys", &[0, 5], &[0, 7]),
            ("descending", &[0, 3, 2, 5], &[0, 1, 2, 6]),
            ("negative", &[-1, 5], &[0, 6]),
            ("numbers of sequences", &[0, 2, 5], &[0, 6]),
            ("no offsets", &[], &[]),
        ] {
            go(what, Sequences::Packed { q, k }, base());
        }
        // Gradients of other shapes and places.
        let dout = f(&[5, 4, 8]);
        let (dq, dk, dv) = (f(&[5, 4, 8]), f(&[6, 2, 8]), f(&[6, 2, 8]));
        let all =
            || AttentionBackward { forward: base(), dout: &dout, dq: &dq, dk: &dk, dv: &dv, dsink: None };
        let go = |what: &str, b: AttentionBackward| {
            refused(
                &h,
                what,
                h.k.attention_backward(&h.s, &scores, Sequences::Packed { q: &[0, 5], k: &[0, 6] }, &b),
            );
        };
        go("dq shape", AttentionBackward { dq: &dk, ..all() });
        go("dk and dv in one place", AttentionBackward { dv: &dk, ..all() });
        go("dq over q", AttentionBackward { dq: &q, ..all() });
        go("dout shape", AttentionBackward { dout: &dk, ..all() });
        go("dv type", AttentionBackward { dv: &z(&h, BF16, &[6, 2, 8]), ..all() });
        go("dsink without a sink", AttentionBackward { dsink: Some(&f(&[4])), ..all() });
    }
}
