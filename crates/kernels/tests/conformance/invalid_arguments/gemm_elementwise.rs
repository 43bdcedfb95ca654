//! GEMMs and elementwise operations.

use super::{column, z};
use crate::devices::*;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::*;
use ferrotron_tensor::DType::{BF16, F32, I32, I64};
use ferrotron_tensor::Tensor;

#[test]
fn gemms() {
    for h in devices() {
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
        go("an f32 bias of bf16 operands", &z(&h, BF16, &[3, 4]), &z(&h, BF16, &[4, 5]), Some(&f(&[5])), &c);
        go("a 16-bit result of wide factors", &a, &b, None, &z(&h, BF16, &[3, 5]));
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
fn elementwise_operations() {
    for h in devices() {
        let (k, s) = (&h.k, &h.s);
        let f = |n: usize| z(&h, F32, &[n]);
        let key = RngKey { seed: 0, step: 0, layer: 0, site: 0 };
        refused(&h, "add lengths", k.add(s, &f(3), &f(4), &f(3)));
        refused(&h, "add result", k.add(s, &f(3), &f(3), &f(4)));
        refused(&h, "add types", k.add(s, &f(3), &z(&h, BF16, &[3]), &f(3)));
        refused(&h, "add integers", k.add(s, &z(&h, I32, &[3]), &z(&h, I32, &[3]), &z(&h, I32, &[3])));
        refused(&h, "add strided", k.add(s, &column(&h, F32, 3), &f(3), &f(3)));
        let x = f(3);
        refused(&h, "add in place", k.add(s, &x, &f(3), &x));
        refused(&h, "add_assign lengths", k.add_assign(s, &f(3), &f(2)));
        refused(&h, "add_assign itself", k.add_assign(s, &x, &x));
        refused(&h, "max_assign lengths", k.max_assign(s, &f(3), &f(2)));
        refused(&h, "max_assign types", k.max_assign(s, &f(3), &z(&h, BF16, &[3])));
        refused(&h, "add_assign integers", k.add_assign(s, &f(3), &z(&h, I32, &[3])));
        refused(&h, "scale strided", k.scale(s, &column(&h, F32, 3), 2.0));
        refused(&h, "scale integers", k.scale(s, &z(&h, I64, &[3]), 2.0));
        refused(&h, "copy lengths", k.copy(s, &f(3), &f(4)));
        refused(&h, "copy shapes", k.copy(s, &z(&h, F32, &[2, 3]), &z(&h, F32, &[3, 2])));
        refused(&h, "copy integers to floats", k.copy(s, &z(&h, I32, &[3]), &f(3)));
        refused(&h, "copy and convert strided", k.copy(s, &column(&h, F32, 3), &z(&h, BF16, &[3])));
        let transposed = z(&h, F32, &[3, 2]).transpose(0, 1).unwrap();
        refused(&h, "copy columns apart", k.copy(s, &transposed, &z(&h, F32, &[2, 3])));
        let deep = z(&h, F32, &[2, 2, 3, 2]).transpose(2, 3).unwrap();
        refused(&h, "copy deep columns apart", k.copy(s, &deep, &z(&h, F32, &[2, 2, 2, 3])));
        refused(&h, "copy itself", k.copy(s, &x, &x));
        refused(&h, "iota of floats", k.iota(s, &f(3)));
        refused(&h, "iota strided", k.iota(s, &column(&h, I32, 3)));
        let runs = NormalFill { stream: RandomStream::named(0, ""), first: 0, stride: 0, std: 1.0 };
        refused(&h, "normal values in a vector", k.normal(s, runs, &f(3)));
        refused(&h, "normal values in bf16", k.normal(s, runs, &z(&h, BF16, &[2, 3])));
        refused(&h, "normal values apart", k.normal(s, runs, &z(&h, F32, &[2, 3]).narrow(1, 0, 2).unwrap()));
        let m = z(&h, F32, &[3, 4]);
        refused(&h, "column_sum short", k.column_sum(s, &m, false, &f(3)));
        refused(&h, "column_sum of a vector", k.column_sum(s, &f(3), false, &f(3)));
        refused(&h, "column_sum of a number", k.column_sum(s, &z(&h, F32, &[]), false, &z(&h, F32, &[])));
        refused(&h, "column_sum into bf16", k.column_sum(s, &m, false, &z(&h, BF16, &[4])));
        refused(&h, "column_sum into a column", k.column_sum(s, &m, false, &column(&h, F32, 4)));
        refused(&h, "dot lengths", k.dot(s, &f(3), &f(4), &f(1)));
        refused(&h, "dot into nothing", k.dot(s, &f(3), &f(3), &f(0)));
        refused(&h, "dot of bf16", k.dot(s, &z(&h, BF16, &[3]), &z(&h, BF16, &[3]), &f(1)));
        refused(&h, "softcap strided", k.softcap_forward(s, 1.0, &column(&h, F32, 3)));
        refused(&h, "softcap integers", k.softcap_forward(s, 1.0, &z(&h, I32, &[3])));
        refused(&h, "softcap lengths", k.softcap_backward(s, 1.0, &f(3), &f(4)));
        refused(&h, "softcap types", k.softcap_backward(s, 1.0, &f(3), &z(&h, BF16, &[3])));
        let (row, ids) = (|n| z(&h, F32, &[1, n]), |n| z(&h, I32, &[n]));
        refused(
            &h,
            "dropout lengths",
            k.dropout(s, &Dropout { p: 0.5, key: key.into(), rows: &ids(1), x: &row(3), y: &row(4) }),
        );
        refused(
            &h,
            "dropout types",
            k.dropout(
                s,
                &Dropout { p: 0.5, key: key.into(), rows: &ids(1), x: &row(3), y: &z(&h, BF16, &[1, 3]) },
            ),
        );
        refused(
            &h,
            "dropout of more rows",
            k.dropout(s, &Dropout { p: 0.5, key: key.into(), rows: &ids(2), x: &row(3), y: &row(3) }),
        );
        refused(
            &h,
            "dropout of rows unnumbered",
            k.dropout(s, &Dropout { p: 0.5, key: key.into(), rows: &f(1), x: &row(3), y: &row(3) }),
        );
        refused(
            &h,
            "dropout of a vector",
            k.dropout(s, &Dropout { p: 0.5, key: key.into(), rows: &ids(3), x: &f(3), y: &f(3) }),
        );
        for p in [-0.1, 1.0, 1.5, f32::NAN] {
            refused(
                &h,
                &format!("dropout of {p}"),
                k.dropout(s, &Dropout { p, key: key.into(), rows: &ids(1), x: &row(3), y: &row(3) }),
            );
        }
        let pair = |r, w| z(&h, F32, &[r, w]);
        refused(
            &h,
            "gated width",
            k.act_forward(s, &ActForward { act: Act::Silu, gated: true, x: &pair(2, 5), y: &pair(2, 2) }),
        );
        refused(
            &h,
            "gated rows",
            k.act_forward(s, &ActForward { act: Act::Silu, gated: true, x: &pair(2, 4), y: &pair(3, 2) }),
        );
        refused(
            &h,
            "gated vector",
            k.act_forward(s, &ActForward { act: Act::Silu, gated: true, x: &f(4), y: &f(2) }),
        );
        refused(
            &h,
            "act length",
            k.act_forward(s, &ActForward { act: Act::Silu, gated: false, x: &f(4), y: &f(2) }),
        );
        refused(
            &h,
            "act type",
            k.act_forward(s, &ActForward { act: Act::Silu, gated: false, x: &f(4), y: &z(&h, BF16, &[4]) }),
        );
        refused(
            &h,
            "act half floats",
            k.act_forward(
                s,
                &ActForward { act: Act::Silu, gated: false, x: &z(&h, I32, &[4]), y: &z(&h, I32, &[4]) },
            ),
        );
        refused(
            &h,
            "act_backward dx",
            k.act_backward(
                s,
                &ActBackward {
                    act: Act::Silu,
                    gated: true,
                    x: &pair(2, 4),
                    dy: &pair(2, 2),
                    dx: &pair(2, 2),
                },
            ),
        );
        refused(
            &h,
            "act_backward dy",
            k.act_backward(s, &ActBackward { act: Act::Silu, gated: false, x: &f(4), dy: &f(3), dx: &f(4) }),
        );
        let clamped = Act::ClampedSilu { limit: 1.0, alpha: 1.0, offset: 1.0 };
        refused(
            &h,
            "clamped without a gate",
            k.act_forward(s, &ActForward { act: clamped, gated: false, x: &f(4), y: &f(4) }),
        );
    }
}
