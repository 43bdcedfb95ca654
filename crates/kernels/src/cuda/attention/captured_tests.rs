//! On a GPU: captured attention, replayed with other sequences, has the bits of launched attention.

use super::CapturedSequences;
use crate::cuda::test_support::{gpu, host, poisoned};
use crate::{AttentionBackward, AttentionForward, AttentionKernels, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{Category, DType, Device, Result, Stream, Tensor, Threads, bf16, f16};

const TOKENS: usize = 2400;
const HEADS: [usize; 2] = [16, 8];

/// One long sequence, of which a query sees many keys on average; many short ones; lengths about those of tiles; empty ones; and
/// as many sequences as there may be.
fn layouts() -> Vec<Vec<i32>> {
    let end = TOKENS as i32;
    vec![
        vec![0, end],
        vec![0, 1, 130, 258, 259, 700, 1500, end],
        vec![0, 64, 128, 256, 448, 512, 1536, end],
        vec![0, 0, 900, 900, end, end],
        (0..=16).map(|i| i * end / 16).collect(),
        vec![0, 2300, end],
    ]
}

struct Case {
    dtype: DType,
    d: [usize; 2],
    softcap: Option<f32>,
    left: Option<usize>,
    fp8: bool,
}

impl Case {
    fn scores(&self) -> AttentionParams {
        AttentionParams {
            scale: 0.2,
            softcap: self.softcap,
            causal: true,
            align: MaskAlign::TopLeft,
            left: self.left,
            right: None,
            fp8: self.fp8,
        }
    }

    fn draw(&self, s: &Stream, seed: usize, shape: [usize; 3]) -> Tensor {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
        let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
        let (shape, category) = (&shape, Category::Workspace);
        match self.dtype {
            DType::BF16 => {
                s.upload(&values.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>(), shape, category)
            }
            DType::F16 => {
                s.upload(&values.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>(), shape, category)
            }
            _ => s.upload(&values, shape, category),
        }
        .unwrap()
    }
}

fn values(s: &Stream, t: &Tensor) -> Vec<f32> {
    match t.dtype() {
        DType::F16 => s.download::<f16>(t).unwrap().iter().map(|x| x.to_f32()).collect(),
        _ => host(s, t),
    }
}

#[test]
fn replays_have_the_bits_of_launches() {
    let Some((k, s)) = gpu() else { return };
    let of = |dtype, d: [usize; 2]| Case { dtype, d, softcap: None, left: None, fp8: false };
    let cases = [
        of(DType::BF16, [64; 2]),
        of(DType::BF16, [96; 2]),
        of(DType::BF16, [128; 2]),
        of(DType::BF16, [192, 128]),
        of(DType::BF16, [256; 2]),
        Case { softcap: Some(3.0), ..of(DType::BF16, [128; 2]) },
        Case { left: Some(300), ..of(DType::BF16, [128; 2]) },
        Case { fp8: true, ..of(DType::BF16, [64; 2]) },
        // Channels that the kernels of tensor cores on Hopper do not take.
        of(DType::BF16, [60; 2]),
        of(DType::F16, [64; 2]),
        of(DType::F32, [64; 2]),
    ];
    for case in cases {
        let ([n, g], [d, dv]) = (HEADS, case.d);
        let what = format!("{} {:?} {:?} {:?}", case.dtype, case.d, case.softcap, case.left);
        let scores = case.scores();
        let shapes = [[TOKENS, n, d], [TOKENS, g, d], [TOKENS, g, dv], [TOKENS, n, dv]];
        let [q, key, v, dout] = [0, 1, 2, 3].map(|i| case.draw(&s, i + 1, shapes[i]));
        let made = [0, 1, 2, 3].map(|i| case.draw(&s, 9, shapes[i]));
        let ([dq, dk, dv, out], lse) = (&made, &poisoned(&s, DType::F32, &[TOKENS, n]));
        let run = |sequences: Sequences| -> Result<()> {
            let forward = || AttentionForward { q: &q, k: &key, v: &v, sink: None, out, lse };
            k.attention_forward(&s, &scores, sequences, &forward())?;
            let b = AttentionBackward { forward: forward(), dout: &dout, dq, dk, dv, dsink: None };
            k.attention_backward(&s, &scores, sequences, &b)
        };
        // Results of the last run do not pass for those of this one.
        let take = || {
            let found = [out, lse, dq, dk, dv].map(|t| values(&s, t));
            [out, lse, dq, dk, dv].iter().for_each(|t| s.zero(t).unwrap());
            found
        };
        // As in training, sources are compiled before a capture; kernels for other sequences are not used yet.
        run(Sequences::Packed { q: &layouts()[0], k: &layouts()[0] }).unwrap();
        let captured = CapturedSequences::new(&s, TOKENS, 16).unwrap();
        let graph = s.capture(|| run(Sequences::Captured(&captured))).unwrap();
        for round in 0..2 {
            for offsets in layouts() {
                captured.fill(&s, &offsets).unwrap();
                graph.replay().unwrap();
                let found = take();
                run(Sequences::Packed { q: &offsets, k: &offsets }).unwrap();
                let wanted = take();
                assert!(wanted.iter().flatten().all(|x| x.is_finite()), "{what} {offsets:?}");
                for (name, (x, y)) in ["out", "lse", "dq", "dk", "dv"].iter().zip(found.iter().zip(&wanted)) {
                    assert!(x == y, "{what} {offsets:?} {name}, round {round}");
                }
            }
        }
    }
}

#[test]
fn sequences_that_do_not_fit_are_refused() {
    let device = Device::cpu(Threads::new(1).unwrap());
    let s = device.stream("compute").unwrap();
    let captured = CapturedSequences::new(&s, 10, 3).unwrap();
    assert_eq!(captured.offsets(), [0, 10, 10, 10]);
    for good in [&[0, 10][..], &[0, 4, 4, 10], &[0, 10, 10]] {
        captured.fill(&s, good).unwrap();
    }
    for bad in [&[][..], &[0], &[0, 9], &[1, 10], &[0, 11], &[0, 6, 4, 10], &[0, 1, 2, 3, 10]] {
        let error = captured.fill(&s, bad).unwrap_err().to_string();
        assert!(error.contains("10 tokens into at most 3"), "{error}");
    }
}
