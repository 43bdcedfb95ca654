//! On a Hopper GPU: results do not depend on the number of multiprocessors, by which persistent kernels are sized.

use crate::cuda::test_support::{gpu, host, poisoned};
use crate::{AttentionBackward, AttentionForward, AttentionKernels, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{Category, DType, bf16};

#[test]
fn the_same_bits_on_gpus_with_fewer_multiprocessors() {
    let Some((mut k, s)) = gpu() else { return };
    let all = k.multiprocessors;
    // With 132 heads of 64 a block has all keys of one; the others share tiles.
    // The queries of MLA leave two thirds of the keys unseen: tiles without work lie between others.
    for (batch, [tq, tk], heads, [d, d_v]) in [
        (2, [700; 2], 6, [64; 2]),
        (33, [300; 2], 4, [64; 2]),
        (2, [900; 2], 8, [128; 2]),
        (1, [700; 2], 4, [256; 2]),
        (2, [300, 900], 4, [192, 128]),
    ] {
        let [q_shape, k_shape, v_shape, out_shape] =
            [[tq, d], [tk, d], [tk, d_v], [tq, d_v]].map(|[tokens, d]| [batch, tokens, heads, d]);
        let draw = |seed: usize, shape: &[usize]| {
            let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
            let x: Vec<bf16> = (0..shape.iter().product()).map(|i| bf16::from_f32(value(i))).collect();
            s.upload(&x, shape, Category::Workspace).unwrap()
        };
        let (q, key, v, dout) =
            (draw(1, &q_shape), draw(2, &k_shape), draw(3, &v_shape), draw(4, &out_shape));
        let scores = AttentionParams {
            scale: 0.2,
            softcap: None,
            causal: true,
            align: MaskAlign::TopLeft,
            left: None,
            right: None,
            fp8: false,
        };
        let mut run = |multiprocessors: u32| {
            k.multiprocessors = multiprocessors;
            let [out, dq, dk, dv] =
                [out_shape, q_shape, k_shape, v_shape].map(|shape| poisoned(&s, DType::BF16, &shape));
            let lse = poisoned(&s, DType::F32, &[batch, heads, tq]);
            let forward = || AttentionForward { q: &q, k: &key, v: &v, sink: None, out: &out, lse: &lse };
            k.attention_forward(&s, &scores, Sequences::Batch, &forward()).unwrap();
            let b =
                AttentionBackward { forward: forward(), dout: &dout, dq: &dq, dk: &dk, dv: &dv, dsink: None };
            k.attention_backward(&s, &scores, Sequences::Batch, &b).unwrap();
            [&out, &lse, &dq, &dk, &dv].map(|t| host(&s, t))
        };
        let want = run(all);
        assert!(want.iter().flatten().all(|x| x.is_finite()), "{q_shape:?} {v_shape:?}");
        // An H100 PCIe, an H20, and few.
        for multiprocessors in [114, 78, 5] {
            assert!(run(multiprocessors) == want, "{q_shape:?} {v_shape:?} with {multiprocessors}");
        }
    }
}
