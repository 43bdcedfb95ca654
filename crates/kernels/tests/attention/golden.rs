//! Golden vectors: every case of `attention.json` in the folder FERROTRON_GOLDEN names.

use crate::launch::{Inputs, Layout, close, compare, launch, rounded};
use crate::oracle::{Answer, Dense};
use ferrotron_kernels::cpu::Isa;
use ferrotron_kernels::cpu::attention::{AttentionShape, MaskAlign, Span};
use ferrotron_tensor::{Float, Threads, bf16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::PathBuf;

fn folder() -> PathBuf {
    std::env::var_os("FERROTRON_GOLDEN")
        .map_or_else(
            || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")),
            PathBuf::from,
        )
        .join("attention")
}

const KNOWN: [&str; 18] = [
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
    "name",
    "layout",
    "scale",
    "sink",
    "softcap",
    "rows_without_keys",
    "cu_seqlens_q",
    "cu_seqlens_kv",
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
}

fn number(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap_or_else(|| panic!("{}: {key} is missing", case["name"])) as usize
}

fn read(case: &Value, tensors: &SafeTensors<'_>) -> Golden {
    let name = case["name"].as_str().expect("every case has a name").to_string();
    for key in case.as_object().expect("a case is an object").keys() {
        assert!(KNOWN.contains(&key.as_str()), "{name}: unknown key {key}");
    }
    let flat = |what: &str| -> Option<(Vec<usize>, Vec<f64>)> {
        let t = tensors.tensor(&format!("{name}/{what}")).ok()?;
        assert_eq!(t.dtype(), Dtype::F32, "{name}/{what}");
        let data = t.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())));
        Some((t.shape().to_vec(), data.collect()))
    };
    let packed = match case["layout"].as_str() {
        Some("bshd") => false,
        Some("thd") => true,
        other => panic!("{name}: unknown layout {other:?}"),
    };
    let dense = |what: &str| {
        let (mut dims, data) = flat(what).unwrap_or_else(|| panic!("{name}/{what} is missing"));
        if packed {
            dims.insert(0, 1);
        }
        Dense { dims: dims.try_into().unwrap_or_else(|_| panic!("{name}/{what}: wrong rank")), data }
    };
    let (q, k, v, dout) = (dense("q"), dense("k"), dense("v"), dense("dout"));
    let [batches, tq, heads, d_qk] = q.dims;
    assert_eq!(
        (heads, k.dims[2], d_qk),
        (number(case, "Hq"), number(case, "Hk"), number(case, "D")),
        "{name}"
    );
    let bound = |i: usize| usize::try_from(case["window"][i].as_i64().expect("window")).ok();
    let shape = AttentionShape {
        heads,
        kv_heads: k.dims[2],
        d_qk,
        d_v: v.dims[3],
        scale: case["scale"].as_f64().expect("scale") as f32,
        softcap: case.get("softcap").and_then(Value::as_f64).map(|c| c as f32),
        causal: case["causal"].as_bool().expect("causal"),
        align: match case["align"].as_str() {
            Some("top_left") => MaskAlign::TopLeft,
            Some("bottom_right") => MaskAlign::BottomRight,
            other => panic!("{name}: unknown align {other:?}"),
        },
        window: (bound(0), bound(1)),
        fp8: false,
        lse_head: 1,
        lse_token: heads,
    };
    let spans: Vec<Span> = if packed {
        let cu = |key: &str| -> Vec<usize> {
            case[key].as_array().expect(key).iter().map(|x| x.as_u64().expect(key) as usize).collect()
        };
        let (cq, ck) = (cu("cu_seqlens_q"), cu("cu_seqlens_kv"));
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
    let sink =
        case.get("sink").and_then(Value::as_bool).unwrap_or(false).then(|| flat("sink").expect("sink").1);
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
    let mut lse = tokens_first(flat("lse").expect("lse").1);
    if let Some(sink) = &sink {
        // The saved log-sum-exp includes the sink; the plain one is the base, and the file's own sum checks it.
        for (at, x) in lse.data.iter_mut().enumerate() {
            let s = sink[at % heads];
            let top = x.max(s);
            *x = top + ((*x - top).exp() + (s - top).exp()).ln();
        }
        if let Some((_, with)) = flat("lse_with_sink") {
            let with = tokens_first(with);
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
        dsink: sink.as_ref().map_or_else(|| vec![0.0; heads], |_| flat("dsink").expect("dsink").1),
        dsink_size: Vec::new(),
    };
    Golden { name, shape, spans, q, k, v, dout, sink, want }
}

fn verify<T: Float>(threads: &Threads, isa: Isa, g: &Golden) {
    let (q, k, v, dout) = (rounded::<T>(&g.q), rounded::<T>(&g.k), rounded::<T>(&g.v), rounded::<T>(&g.dout));
    let inputs = Inputs {
        shape: &g.shape,
        spans: &g.spans,
        q: &q,
        k: &k,
        v: &v,
        dout: &dout,
        sink: g.sink.as_deref(),
    };
    let got = launch::<T>(threads, isa, Layout::Bshd, &inputs);
    let atol = if ["big_logits", "sink_big"].contains(&g.name.as_str()) { 1e-4 } else { 1e-5 };
    compare::<T>(&format!("{} {isa:?} {}", g.name, T::DTYPE), &got, &g.want, atol, 1.0);
}

#[test]
fn golden_attention() {
    let folder = folder();
    let text = std::fs::read_to_string(folder.join("attention.json")).expect("attention.json");
    let bytes = std::fs::read(folder.join("attention.safetensors")).expect("attention.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let json: Value = serde_json::from_str(&text).expect("json");
    let cases = json["cases"].as_array().expect("cases");
    assert!(!cases.is_empty(), "no cases in {}", folder.display());
    let threads = Threads::new(2).unwrap();
    for case in cases {
        let golden = read(case, &tensors);
        for isa in Isa::all() {
            verify::<f32>(&threads, isa, &golden);
            verify::<bf16>(&threads, isa, &golden);
        }
    }
}
