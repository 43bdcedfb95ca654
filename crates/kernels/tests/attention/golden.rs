//! Attention against golden vectors (area `attention`, `attention.json`): forward and backward, f32 and bf16.

use crate::launch::{Layout, close, compare, launch, rounded};
use crate::oracle::{Answer, Dense, Inputs, attention};
use ferrotron_kernels::cpu::Isa;
use ferrotron_kernels::cpu::attention::{AttentionShape, MaskAlign, Span};
use ferrotron_tensor::{DType, Float, Threads, bf16};
use serde_json::Value;
use vectors::{Area, Tensors, count, counts, flag, list, number, only_keys, text};

#[path = "../../../../tests/support/golden.rs"]
mod vectors;

/// Keys of a case. `amp` (how large the inputs were drawn) is not on the format's page but in one of its sets.
const KEYS: [&str; 19] = [
    "name",
    "layout",
    "B",
    "Sq",
    "Sk",
    "Hq",
    "Hk",
    "D",
    "Dv",
    "causal",
    "align",
    "window",
    "scale",
    "sink",
    "softcap",
    "rows_without_keys",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "amp",
];

struct Golden {
    name: String,
    shape: AttentionShape,
    spans: Vec<Span>,
    q: Dense,
    k: Dense,
    v: Dense,
    dout: Dense,
    sink: Option<Vec<f64>>,
    want: Answer,
    /// Scores are large: the format allows gradients more.
    amplified: bool,
}

fn read(case: &Value, tensors: &Tensors) -> Golden {
    let name = text(case, "name").to_string();
    only_keys(&name, case, &KEYS);
    let shape_and_values = |what: &str| -> (Vec<usize>, Vec<f64>) {
        let full = format!("{name}/{what}");
        (tensors.shape(&full), tensors.f32(&full).into_iter().map(f64::from).collect())
    };
    let flat = |what: &str| shape_and_values(what).1;
    let packed = match case["layout"].as_str() {
        Some("bshd") => false,
        Some("thd") => true,
        other => panic!("{name}: the format has no layout {other:?}"),
    };
    let dense = |what: &str| {
        let (mut dims, data) = shape_and_values(what);
        if packed {
            dims.insert(0, 1);
        }
        Dense { dims: dims.try_into().unwrap_or_else(|_| panic!("{name}/{what}: wrong rank")), data }
    };
    let (q, k, v, dout) = (dense("q"), dense("k"), dense("v"), dense("dout"));
    let [batches, tq, heads, d_qk] = q.dims;
    let d_v = if case["Dv"].is_null() { d_qk } else { count(case, "Dv") };
    assert_eq!(
        (heads, k.dims[2], d_qk, v.dims[3]),
        (count(case, "Hq"), count(case, "Hk"), count(case, "D"), d_v),
        "{name}"
    );
    if !packed {
        let sizes = ["B", "Sq", "Sk"].map(|key| count(case, key));
        assert_eq!([batches, tq, k.dims[1]], sizes, "{name}");
    }
    // -1 is unbounded, and so is a window that is not given.
    let bound = |i: usize| case["window"][i].as_i64().and_then(|n| usize::try_from(n).ok());
    let shape = AttentionShape {
        heads,
        kv_heads: k.dims[2],
        d_qk,
        d_v: v.dims[3],
        scale: number(case, "scale") as f32,
        softcap: case["softcap"].as_f64().map(|c| c as f32),
        causal: flag(case, "causal"),
        align: match case["align"].as_str() {
            Some("top_left") => MaskAlign::TopLeft,
            Some("bottom_right") => MaskAlign::BottomRight,
            other => panic!("{name}: the format has no align {other:?}"),
        },
        window: (bound(0), bound(1)),
        fp8: false,
        lse_head: 1,
        lse_token: heads,
    };
    let spans: Vec<Span> = if packed {
        let (cq, ck) = (counts(case, "cu_seqlens_q"), counts(case, "cu_seqlens_kv"));
        assert!(cq.len() == ck.len() && cq.len() > 1, "{name}: cu_seqlens");
        let sequence = |(q, k): (&[usize], &[usize])| Span {
            batch: 0,
            q_start: q[0],
            q_len: q[1] - q[0],
            k_start: k[0],
            k_len: k[1] - k[0],
            lse_base: q[0] * heads,
        };
        cq.windows(2).zip(ck.windows(2)).map(sequence).collect()
    } else {
        let entry = |batch| Span {
            batch,
            q_start: 0,
            q_len: tq,
            k_start: 0,
            k_len: k.dims[1],
            lse_base: batch * tq * heads,
        };
        (0..batches).map(entry).collect()
    };
    let sink = flag(case, "sink").then(|| flat("sink"));
    // [B, Hq, Sq] to [B, Sq, Hq]; thd has tokens first already.
    let tokens_first = |x: Vec<f64>| {
        let mut to = Dense::zeros([batches, tq, heads, 1]);
        for (at, x) in x.iter().enumerate() {
            let (b, h, t) = (at / (heads * tq), at / tq % heads, at % tq);
            let at = if packed { at } else { (b * tq + t) * heads + h };
            to.data[at] = *x;
        }
        to
    };
    let mut lse = tokens_first(flat("lse"));
    if let Some(sink) = &sink {
        // The saved log-sum-exp includes the sink; the plain one is the base, and the file's own sum checks it.
        for (at, x) in lse.data.iter_mut().enumerate() {
            let s = sink[at % heads];
            let top = x.max(s);
            *x = top + ((*x - top).exp() + (s - top).exp()).ln();
        }
        if tensors.has(&format!("{name}/lse_with_sink")) {
            let with = tokens_first(flat("lse_with_sink"));
            let seen: Vec<usize> = (0..lse.data.len()).filter(|i| with.data[*i].is_finite()).collect();
            let pick = |x: &Dense| seen.iter().map(|i| x.data[*i]).collect::<Vec<_>>();
            close(&format!("{name} lse_with_sink"), &pick(&lse), &pick(&with), 2e-6, 1e-6);
        }
    }
    let want = Answer {
        out: dense("out"),
        lse,
        dq: dense("dq"),
        dk: dense("dk"),
        dv: dense("dv"),
        dsink: sink.as_ref().map_or_else(|| vec![0.0; heads], |_| flat("dsink")),
        dsink_size: Vec::new(),
    };
    let empty = flat("lse").iter().filter(|l| **l == f64::NEG_INFINITY).count() / heads;
    if !case["rows_without_keys"].is_null() {
        assert_eq!(empty, count(case, "rows_without_keys"), "{name}: rows_without_keys");
    }
    let amplified = case["amp"].as_f64().is_some_and(|amp| amp > 1.0);
    Golden { name, shape, spans, q, k, v, dout, sink, want, amplified }
}

fn verify<T: Float>(threads: &Threads, isa: Isa, g: &Golden) {
    let (q, k, v, dout) = (rounded::<T>(&g.q), rounded::<T>(&g.k), rounded::<T>(&g.v), rounded::<T>(&g.dout));
    let (shape, spans, sink) = (&g.shape, &g.spans[..], g.sink.as_deref());
    let rounded = Inputs { shape, spans, q: &q, k: &k, v: &v, dout: &dout, sink };
    let got = launch::<T>(threads, isa, Layout::Bshd, &rounded);
    let what = format!("{} {isa:?} {}", g.name, T::DTYPE);
    if T::DTYPE == DType::F32 {
        // Scores of several hundred: the format allows 1e-4.
        let large = g.amplified || ["big_logits", "sink_big"].contains(&g.name.as_str());
        let (atol, size) = if large { (2e-6, 50.0) } else { (1e-5, 1.0) };
        return compare::<T>(&what, &got, &g.want, atol, size);
    }
    // Rounding q and k to bf16 alone moves log-sum-exps by more than the tolerance where scores are large, so bf16 results
    // are compared with the definition on rounded inputs, and the definition with the vectors.
    let exact = attention(|x| x, &Inputs { shape, spans, q: &g.q, k: &g.k, v: &g.v, dout: &g.dout, sink });
    compare::<f32>(&format!("{} by definition", g.name), &exact, &g.want, 1e-6, 1.0);
    let want = attention(|x| T::from_f32(x as f32).to_f64(), &rounded);
    compare::<T>(&what, &got, &want, 1e-5, 1.0);
}

#[test]
fn golden_attention() {
    let threads = Threads::new(2).unwrap();
    for area in Area::all("attention") {
        let known = ["attention.json", "attention.safetensors", "rope.json", "rope.safetensors"];
        area.known_files(|file| known.contains(&file));
        if !area.has("attention.json") {
            println!("{}/attention: has no attention.json", area.set);
            continue;
        }
        let (json, tensors) = (area.json("attention.json"), area.tensors("attention.safetensors"));
        only_keys("attention.json", &json, &["producer", "cases"]);
        tensors.only_cases(list(&json, "cases"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            report.case(text(case, "name"), || {
                let golden = read(case, &tensors);
                for isa in Isa::all() {
                    verify::<f32>(&threads, isa, &golden);
                    verify::<bf16>(&threads, isa, &golden);
                }
                tensors.all_read(&format!("{}/", golden.name));
            });
        }
        report.finish();
    }
}
