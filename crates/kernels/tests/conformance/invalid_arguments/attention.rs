//! Attention, forward and backward, in batches and packed.

use super::z;
use crate::devices::*;
use ferrotron_kernels::*;
use ferrotron_tensor::DType::{BF16, F32};
use ferrotron_tensor::Tensor;

#[test]
fn attention() {
    for h in devices() {
        let f = |shape: &[usize]| z(&h, F32, shape);
        let scores = AttentionParams {
            scale: 1.0,
            softcap: None,
            causal: true,
            align: MaskAlign::TopLeft,
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
        // Gradients of other shapes and devices.
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
