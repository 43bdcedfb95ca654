//! The router against golden vectors of Megatron Core (area `router`), on every device present: top-k routing, Sinkhorn
//! balancing, token dropping, auxiliary losses, the straight-through estimator, gating and quantile balancing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "conformance/devices.rs"]
#[allow(dead_code)]
mod devices;
#[path = "../../../tests/support/golden.rs"]
mod golden;

use devices::{TestDevice, devices};
use ferrotron_kernels::{
    AuxLoss, AuxLossWeights, CapacityDrop, ExpertSelection, GateBackward, Gemm, GroupLimit, Route,
    RouteBackward, RouterParams, ScoreFunction, ZLossBackward, capacity,
};
use ferrotron_tensor::{Category, DType, Tensor, bf16};
use golden::{Area, Tensors, count, flag, list, number, number_or, numbers, only_keys, text};
use serde_json::Value;

/// The JSON files of the format, with or without `_main`, and what a file of the kind may have beside its cases.
const FILES: [(&str, &[&str]); 6] = [
    ("topk", &[]),
    ("sinkhorn", &[]),
    ("drop", &["capacity_table"]),
    ("aux", &[]),
    ("ste", &["bias_updates"]),
    ("extras", &[]),
];

/// Keys of a case of each kind of file.
fn keys(file: &str) -> &'static [&'static str] {
    match file {
        "topk" | "ste" => &[
            "name",
            "tokens",
            "experts",
            "topk",
            "score_function",
            "pre_softmax",
            "num_groups",
            "group_topk",
            "scaling_factor",
            "expert_bias",
            "dtype",
        ],
        "sinkhorn" => &["name", "tokens", "experts", "topk", "iterations", "dtype"],
        "drop" => &[
            "name",
            "tokens",
            "experts",
            "topk",
            "capacity_factor",
            "capacity",
            "drop_policy",
            "pad_to_capacity",
            "drops",
            "ambiguous",
            "dtype",
        ],
        "aux" => &[
            "name",
            "kind",
            "score_function",
            "pre_softmax",
            "tokens",
            "seq",
            "batch",
            "experts",
            "topk",
            "coeff",
            "padding_mask",
            "dtype",
        ],
        "extras" => &["name", "kind", "router_dtype", "bias", "tokens", "experts", "topk", "dtype"],
        other => panic!("the format has no file {other}"),
    }
}

/// One case on one device.
struct Case<'a> {
    h: &'a TestDevice,
    t: &'a Tensors,
    json: &'a Value,
    name: String,
}

impl Case<'_> {
    fn at(&self, tensor: &str) -> String {
        format!("{}/{tensor}", self.name)
    }

    /// Values of any type.
    fn values(&self, tensor: &str) -> Vec<f64> {
        self.t.values(&self.at(tensor))
    }

    fn upload(&self, dtype: DType, tensor: &str) -> Tensor {
        self.h.tensor(dtype, &self.t.shape(&self.at(tensor)), &self.values(tensor))
    }

    fn map(&self, tensor: &str) -> Vec<bool> {
        self.values(tensor).into_iter().map(|x| x != 0.0).collect()
    }

    fn what(&self, tensor: &str) -> String {
        format!("{} {} {tensor}", self.h.name, self.name)
    }

    fn near(&self, tensor: &str, ours: &[f64], wanted: &[f64], atol: f64, rtol: f64) {
        assert_eq!(ours.len(), wanted.len(), "{}", self.what(tensor));
        for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
            let limit = atol + rtol * w.abs();
            assert!(o == w || (o - w).abs() <= limit, "{} [{i}]: {o:e} instead of {w:e}", self.what(tensor));
        }
    }

    /// Checks the sizes that the case states against a tensor `[T, E]`.
    fn sizes(&self, tensor: &str) {
        let shape = self.t.shape(&self.at(tensor));
        for (key, size) in [("tokens", shape[0]), ("experts", shape[1])] {
            assert!(self.json[key].is_null() || count(self.json, key) == size, "{}: {key}", self.name);
        }
    }

    /// The type of the logits, and tolerances: probabilities (absolute, relative), then gradients.
    fn precision(&self) -> (DType, [f64; 4]) {
        match self.json["dtype"].as_str() {
            None | Some("f32") => (DType::F32, [1e-6, 1e-5, 1e-6, 1e-5]),
            Some("bf16") => (DType::BF16, [1e-2, 8e-3, 2e-2, 2e-2]),
            Some(other) => panic!("{}: the format has no dtype {other}", self.name),
        }
    }

    /// The routing that the case states; absent options are off.
    fn routing(&self) -> RouterParams {
        let (k, keep) = (count(self.json, "topk"), || count(self.json, "group_topk"));
        let groups = (!self.json["num_groups"].is_null()).then(|| GroupLimit {
            count: count(self.json, "num_groups"),
            keep: keep(),
            best: k / keep(),
        });
        RouterParams {
            score: score(self.json),
            normalize: k > 1,
            groups,
            scale: number_or(self.json, "scaling_factor", 1.0) as f32,
        }
    }

    fn i64s(&self, n: usize) -> Tensor {
        self.h.s.zeros(&[n], DType::I64, Category::Workspace).unwrap()
    }
}

fn score(case: &Value) -> ScoreFunction {
    match text(case, "score_function") {
        "softmax" if flag(case, "pre_softmax") => ScoreFunction::Softmax,
        "softmax" => ScoreFunction::SoftmaxAfterTopK,
        "sigmoid" => ScoreFunction::Sigmoid,
        "sqrtsoftplus" => ScoreFunction::SqrtSoftplus,
        other => panic!("the format has no score_function {other}"),
    }
}

/// Top-k `index` and `values [T, k]` as a routing map and dense values `[T, E]`.
fn dense(index: &[f64], values: &[f64], k: usize, experts: usize) -> (Vec<bool>, Vec<f64>) {
    let tokens = index.len() / k;
    let (mut map, mut out) = (vec![false; tokens * experts], vec![0.0; tokens * experts]);
    for (i, e) in index.iter().enumerate().filter(|(_, e)| **e >= 0.0) {
        let at = i / k * experts + *e as usize;
        assert!(!map[at], "an expert is chosen twice");
        (map[at], out[at]) = (true, values[i]);
    }
    (map, out)
}

/// `[T, k]` values at the top-k indices of `[T, E]`; 0 where the index is -1.
fn gathered(index: &[f64], from: &[f64], k: usize, experts: usize) -> Vec<f64> {
    let at = |(i, e): (usize, &f64)| if *e < 0.0 { 0.0 } else { from[i / k * experts + *e as usize] };
    index.iter().enumerate().map(at).collect()
}

/// Top-k indices `[T, k]` of a routing map, experts ascending, -1 behind.
fn index_of(map: &[bool], k: usize, experts: usize) -> Vec<f64> {
    let of_row = |row: &[bool]| -> Vec<f64> {
        let mut found: Vec<f64> = (0..experts).filter(|e| row[*e]).map(|e| e as f64).collect();
        assert!(found.len() <= k);
        found.resize(k, -1.0);
        found
    };
    map.chunks(experts).flat_map(of_row).collect()
}

/// Compares routing map and probabilities with the case, then the gradient of the logits.
fn probabilities(
    c: &Case,
    how: RouterParams,
    logits: &Tensor,
    index: &Tensor,
    probs: &Tensor,
    room: [f64; 4],
) {
    let (experts, k) = (logits.shape()[1], index.shape()[1]);
    let chosen = c.h.host(index);
    let (map, p) = dense(&chosen, &c.h.host(probs), k, experts);
    assert!(map == c.map("map"), "{}", c.what("map"));
    c.near("probs", &p, &c.values("probs"), room[0], room[1]);
    let dprobs = gathered(&chosen, &c.values("dprobs"), k, experts);
    let dprobs = c.h.tensor(DType::F32, index.shape(), &dprobs);
    let dlogits = c.h.poisoned(logits.dtype(), logits.shape());
    c.h.k
        .route_backward(
            &c.h.s,
            &RouteBackward { params: how, logits, index, dprobs: &dprobs, dlogits: &dlogits },
        )
        .unwrap();
    c.near("dlogits", &c.h.host(&dlogits), &c.values("dlogits"), room[2], room[3]);
}

/// Top-k routing of logits: routing map, probabilities, gradient of the logits.
fn top_k(c: &Case, logits: &str) {
    let k = count(c.json, "topk");
    let (dtype, tolerance) = c.precision();
    let how = c.routing();
    c.sizes(logits);
    let logits = c.upload(dtype, logits);
    let bias = flag(c.json, "expert_bias").then(|| c.upload(DType::F32, "expert_bias"));
    let shape = [logits.shape()[0], k];
    let (index, probs) = (c.h.poisoned(DType::I32, &shape), c.h.poisoned(DType::F32, &shape));
    let selection = ExpertSelection::TopK { bias: bias.as_ref() };
    c.h.k
        .route(&c.h.s, &Route { params: how, selection, logits: &logits, index: &index, probs: &probs })
        .unwrap();
    let scale = f64::from(how.scale);
    probabilities(c, how, &logits, &index, &probs, tolerance.map(|t| t * scale));
}

fn sinkhorn(c: &Case) {
    let k = count(c.json, "topk");
    c.sizes("logits");
    let logits = c.upload(DType::F32, "logits");
    let balanced = c.h.poisoned(DType::F32, logits.shape());
    c.h.k.sinkhorn(&c.h.s, &logits, &balanced).unwrap();
    c.near("normalised", &c.h.host(&balanced), &c.values("normalised"), 1e-6, 1e-5);
    let shape = [logits.shape()[0], k];
    let (index, probs) = (c.h.poisoned(DType::I32, &shape), c.h.poisoned(DType::F32, &shape));
    c.h.k.top_k(&c.h.s, &balanced, None, &index).unwrap();
    let score = if k == 1 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
    let how = RouterParams { score, normalize: k > 1, groups: None, scale: 1.0 };
    c.h.k
        .route(
            &c.h.s,
            &Route {
                params: how,
                selection: ExpertSelection::Given,
                logits: &logits,
                index: &index,
                probs: &probs,
            },
        )
        .unwrap();
    probabilities(c, how, &logits, &index, &probs, [1e-6, 1e-5, 1e-6, 1e-5]);
}

fn drop(c: &Case) {
    let (tokens, k, experts) = (count(c.json, "tokens"), count(c.json, "topk"), count(c.json, "experts"));
    let keep = capacity(tokens, k, experts, number(c.json, "capacity_factor"));
    assert_eq!(keep, count(c.json, "capacity").min(tokens), "{}", c.what("capacity"));
    let by_probability = match text(c.json, "drop_policy") {
        "probs" => true,
        "position" => false,
        other => panic!("the format has no drop_policy {other}"),
    };
    let before = c.map("map_in");
    let chosen = index_of(&before, k, experts);
    let index = c.h.tensor(DType::I32, &[tokens, k], &chosen);
    let probs = gathered(&chosen, &c.values("probs_in"), k, experts);
    let probs = c.h.tensor(DType::F32, &[tokens, k], &probs);
    let dropped = c.i64s(1);
    c.h.k
        .drop_over_capacity(
            &c.h.s,
            &CapacityDrop {
                capacity: keep,
                experts,
                by_probability,
                index: &index,
                probs: &probs,
                dropped: &dropped,
            },
        )
        .unwrap();
    let (map, p) = dense(&c.h.host(&index), &c.h.host(&probs), k, experts);
    // Padding to the capacity routes tokens with probability 0, which top-k indices do not have.
    let stable = c.map("stable_map");
    let wanted: Vec<bool> = stable.iter().zip(&before).map(|(s, b)| *s && *b).collect();
    assert!(map == wanted, "{}", c.what("map"));
    let ambiguous = c.map("ambiguous_columns");
    let (peer, peer_p) = (c.map("peer_map"), c.values("peer_probs"));
    let (dprobs, peer_d) = (c.values("dprobs"), c.values("peer_dprobs_in"));
    for i in (0..map.len()).filter(|i| !ambiguous[i % experts]) {
        assert_eq!(peer[i], stable[i], "{}", c.what("the peer's map"));
        assert_eq!(p[i], peer_p[i], "{}", c.what("probs"));
        // Dropped tokens have no gradient.
        let d = if map[i] { dprobs[i] } else { 0.0 };
        assert!(!before[i] || d == peer_d[i], "{}", c.what("dprobs"));
    }
    let gone = before.iter().filter(|b| **b).count() - map.iter().filter(|b| **b).count();
    assert_eq!(c.h.s.download::<i64>(&dropped).unwrap(), [gone as i64], "{}", c.what("dropped"));
    assert!(gone == 0 || flag(c.json, "drops"), "{}", c.what("drops"));
    let columns = ambiguous.iter().filter(|a| **a).count();
    assert!(
        c.json["ambiguous"].is_null() || columns == count(c.json, "ambiguous"),
        "{}",
        c.what("ambiguous")
    );
    if flag(c.json, "pad_to_capacity") {
        for e in 0..experts {
            let places = (0..tokens).filter(|t| stable[t * experts + e]).count();
            assert_eq!(places, keep, "{}", c.what("places of an expert that is padded to its capacity"));
        }
    }
}

fn auxiliary(c: &Case) {
    let (seq, batch) = (count(c.json, "seq"), count(c.json, "batch"));
    let (experts, k, coeff) = (count(c.json, "experts"), count(c.json, "topk"), number(c.json, "coeff"));
    let segments = match text(c.json, "kind") {
        "seq_aux" => batch,
        "aux" | "z" => 1,
        other => panic!("the format has no kind {other}"),
    };
    let masked = flag(c.json, "padding_mask");
    let padding = if masked { c.map("padding_mask") } else { vec![false; seq * batch] };
    let of_rows: Vec<i32> =
        padding.iter().enumerate().map(|(t, p)| if *p { -1 } else { (t % segments) as i32 }).collect();
    let (of_rows, logits) = (c.h.ids(&of_rows), c.upload(DType::F32, "logits"));
    let (k_, s) = (&c.h.k, &c.h.s);
    let dlogits = s.zeros(logits.shape(), DType::F32, Category::Workspace).unwrap();
    let loss = if text(c.json, "kind") == "z" {
        let sums = s.zeros(&[2], DType::F64, Category::Workspace).unwrap();
        k_.z_loss(s, &logits, &of_rows, &sums).unwrap();
        k_.z_loss_backward(
            s,
            &ZLossBackward {
                coefficient: coeff as f32,
                sums: &sums,
                logits: &logits,
                segments: &of_rows,
                dlogits: &dlogits,
            },
        )
        .unwrap();
        let sums = s.download::<f64>(&sums).unwrap();
        coeff * sums[0] / sums[1].max(1.0)
    } else {
        let shape = [segments, experts];
        let (sums, weights) = (c.h.poisoned(DType::F32, &shape), c.h.poisoned(DType::F32, &shape));
        let counts = s.upload(&vec![-7i64; segments * experts], &shape, Category::Workspace).unwrap();
        let b = AuxLoss { logits: &logits, score: score(c.json), k, segments: &of_rows };
        k_.aux_loss_stats(s, &b, &sums, &counts).unwrap();
        let wanted = c.t.i64(&c.at("tokens_per_expert"));
        let map = c.map("map");
        let mut chosen = vec![0; segments * experts];
        for i in (0..map.len()).filter(|i| map[*i] && !padding[i / experts]) {
            chosen[i / experts % segments * experts + i % experts] += 1;
        }
        assert_eq!(chosen, wanted, "{}", c.what("tokens_per_expert of the map"));
        assert_eq!(s.download::<i64>(&counts).unwrap(), wanted, "{}", c.what("counts"));
        let mut columns = vec![0.0; segments * experts];
        for (i, y) in c.values("scores").iter().enumerate().filter(|(i, _)| !padding[i / experts]) {
            columns[i / experts % segments * experts + i % experts] += y;
        }
        c.near("sums", &c.h.host(&sums), &columns, 1e-6, 1e-5);
        let loss = c.h.tensor(DType::F32, &[1], &[0.0]);
        let factor = (coeff / segments as f64) as f32;
        k_.aux_loss_weights(
            s,
            &AuxLossWeights {
                coefficient: factor,
                k,
                sums: &sums,
                counts: &counts,
                steps: None,
                by_tokens: false,
                weights: &weights,
                loss: &loss,
            },
        )
        .unwrap();
        k_.aux_loss_backward(s, &b, &weights, &dlogits).unwrap();
        c.h.host(&loss)[0]
    };
    c.near("loss", &[loss], &c.values("loss"), 1e-6, 1e-5);
    c.near("dlogits", &c.h.host(&dlogits), &c.values("dlogits"), 1e-6, 1e-5);
}

/// Random logits in the forward pass, the router's gradient as if they were its own.
fn straight_through(c: &Case) {
    let (x, w) = (c.upload(DType::F32, "x"), c.upload(DType::F32, "w"));
    top_k(c, "random_logits");
    let d = c.upload(DType::F32, "dlogits");
    let (dx, dw) = (c.h.poisoned(DType::F32, x.shape()), c.h.poisoned(DType::F32, w.shape()));
    c.h.k
        .gate_f64_backward(
            &c.h.s,
            &GateBackward { x: &x, w: &w, dlogits: &d, dx: &dx, dw: &dw, accumulate: false },
        )
        .unwrap();
    c.near("dx", &c.h.host(&dx), &c.values("dx"), 1e-6, 1e-5);
    c.near("dw", &c.h.host(&dw), &c.values("dw"), 1e-6, 1e-5);
}

/// Within one unit in the last place of bf16.
fn near_bf16(c: &Case, of: &str, ours: &Tensor) {
    let ours: Vec<bf16> = c.h.host(ours).iter().map(|x| bf16::from_f64(*x)).collect();
    let wanted = c.t.bf16_bits(&c.at(of));
    assert_eq!(ours.len(), wanted.len());
    for (o, w) in ours.iter().zip(wanted) {
        let w = bf16::from_bits(w);
        assert!(bf16_ulps(*o, w) <= 1, "{}: {o} instead of {w}", c.what(of));
    }
}

/// Distance of two bf16 values in units in the last place.
fn bf16_ulps(a: bf16, b: bf16) -> u32 {
    let order = |x: bf16| {
        let bits = i32::from(x.to_bits());
        if bits & 0x8000 != 0 { -(bits & 0x7fff) } else { bits }
    };
    order(a).abs_diff(order(b))
}

fn gate(c: &Case) {
    let (k, s) = (&c.h.k, &c.h.s);
    let (x, w, d) = (c.upload(DType::BF16, "x"), c.upload(DType::BF16, "w"), c.upload(DType::F32, "dlogits"));
    let logits = c.h.poisoned(DType::F32, d.shape());
    let (dx, dw) = (c.h.poisoned(DType::BF16, x.shape()), c.h.poisoned(DType::F32, w.shape()));
    c.sizes("dlogits");
    let bias = flag(c.json, "bias").then(|| c.upload(DType::BF16, "b"));
    match text(c.json, "router_dtype") {
        "f64" => {
            k.gate_f64(s, &x, &w, &logits).unwrap();
            if let Some(bias) = &bias {
                k.add_router_bias(s, bias, &logits).unwrap();
            }
            k.gate_f64_backward(
                s,
                &GateBackward { x: &x, w: &w, dlogits: &d, dx: &dx, dw: &dw, accumulate: false },
            )
            .unwrap();
        }
        "f32" => {
            // The exact gradients of f32 logits, which the vectors hold. The layer comes near them with bf16 GEMMs instead: it
            // splits dlogits into two bf16 values (`split_bf16x2`).
            let gemm = |a: &Tensor, trans_a, b: &Tensor, trans_b, bias: Option<&Tensor>, c: &Tensor| {
                k.gemm(s, &Gemm { a, trans_a, b, trans_b, bias, accumulate: false, c }).unwrap();
            };
            gemm(&x, false, &w, true, bias.as_ref(), &logits);
            let to_f32 = |t: &Tensor| {
                let out = c.h.poisoned(DType::F32, t.shape());
                k.copy(s, t, &out).unwrap();
                out
            };
            let sum = c.h.poisoned(DType::F32, x.shape());
            gemm(&d, false, &to_f32(&w), false, None, &sum);
            k.copy(s, &sum, &dx).unwrap();
            gemm(&d, true, &to_f32(&x), false, None, &dw);
        }
        other => panic!("the format has no router_dtype {other}"),
    }
    c.near("logits", &c.h.host(&logits), &c.values("logits"), 1e-5, 1e-5);
    near_bf16(c, "dx", &dx);
    near_bf16(c, "dw", &dw);
    if bias.is_some() {
        let db = c.h.poisoned(DType::F32, &[w.shape()[0]]);
        k.column_sum(s, &d, false, &db).unwrap();
        near_bf16(c, "db", &db);
    }
}

fn quantile(c: &Case) {
    let k = count(c.json, "topk");
    let (scores, beta) = (c.upload(DType::F32, "scores"), c.upload(DType::F32, "beta"));
    let (tokens, experts) = (scores.shape()[0], scores.shape()[1]);
    let index = c.h.poisoned(DType::I32, &[tokens, k]);
    c.h.k.top_k(&c.h.s, &scores, Some(&beta), &index).unwrap();
    let (map, _) = dense(&c.h.host(&index), &vec![0.0; tokens * k], k, experts);
    assert!(map == c.map("map"), "{}", c.what("map"));
    let estimate = c.h.tensor(DType::F32, &[experts], &vec![0.0; experts]);
    c.h.k.quantiles(&c.h.s, k, &scores, &beta, &estimate).unwrap();
    c.near("beta_local", &c.h.host(&estimate), &c.values("beta_local"), 1e-6, 1e-5);
}

fn bias_update(h: &TestDevice, u: &Value) {
    only_keys("bias_updates", u, &["counts", "bias", "rate", "updated"]);
    let counts: Vec<i64> = numbers(u, "counts").iter().map(|x| *x as i64).collect();
    let n = counts.len();
    let counts = h.s.upload(&counts, &[n], Category::Workspace).unwrap();
    let bias = h.tensor(DType::F32, &[n], &numbers(u, "bias"));
    h.k.update_expert_bias(&h.s, number(u, "rate") as f32, &counts, &bias).unwrap();
    let updated = numbers(u, "updated");
    assert_eq!(updated.len(), n);
    let near = |(o, w): (&f64, &f64)| (o - w).abs() <= 1e-7;
    assert!(h.host(&bias).iter().zip(&updated).all(near), "{}: {u}", h.name);
    assert_eq!(h.s.download::<i64>(&counts).unwrap(), vec![0; n]);
}

fn expert_capacity(row: &Value) {
    only_keys(
        "capacity_table",
        row,
        &["num_tokens", "num_experts", "capacity_factor", "min_capacity", "capacity"],
    );
    // `num_tokens` is tokens times k. The minimum is the caller's; ours never exceeds the number of tokens.
    let routed = count(row, "num_tokens");
    let ours = capacity(routed, 1, count(row, "num_experts"), number(row, "capacity_factor"));
    let least = number_or(row, "min_capacity", 0.0) as usize;
    assert_eq!(ours.max(least.min(routed)), count(row, "capacity").min(routed), "{row}");
}

#[test]
fn golden_router() {
    let all_devices = devices();
    for area in Area::all("router") {
        let stem = |file: &str| {
            let stem = file.strip_suffix(".json").or(file.strip_suffix(".safetensors"))?;
            FILES.iter().find(|(kind, _)| stem == *kind || stem == format!("{kind}_main"))
        };
        area.known_files(|file| stem(file).is_some());
        let mut report = area.report();
        for file in area.files().iter().filter(|file| file.ends_with(".json")) {
            let Some((kind, beside)) = stem(file) else { continue };
            let (json, t) = (area.json(file), area.tensors(&file.replace(".json", ".safetensors")));
            only_keys(file, &json, &[&["producer", "cases"], *beside].concat());
            t.only_cases(list(&json, "cases"));
            for case in list(&json, "cases") {
                let name = text(case, "name");
                report.case(&format!("{file} {name}"), || {
                    only_keys(name, case, keys(kind));
                    for h in &all_devices {
                        let c = Case { h, t: &t, json: case, name: name.into() };
                        match *kind {
                            "topk" => top_k(&c, "logits"),
                            "sinkhorn" => sinkhorn(&c),
                            "drop" => drop(&c),
                            "aux" => auxiliary(&c),
                            "ste" => straight_through(&c),
                            _ => match text(case, "kind") {
                                "gate" => gate(&c),
                                "quantile_balancing" => quantile(&c),
                                other => panic!("the format has no kind {other}"),
                            },
                        }
                    }
                    t.all_read(&format!("{name}/"));
                });
            }
            for (i, update) in list(&json, "bias_updates").iter().enumerate() {
                report.case(&format!("{file} bias_updates {i}"), || {
                    all_devices.iter().for_each(|h| bias_update(h, update));
                });
            }
            for (i, row) in list(&json, "capacity_table").iter().enumerate() {
                report.case(&format!("{file} capacity_table {i}"), || expert_capacity(row));
            }
        }
        report.finish();
    }
}
