//! Golden vectors of the router: every file and case of `router` in the folder FERROTRON_GOLDEN names, on every home.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "conformance/devices.rs"]
#[allow(dead_code)]
mod devices;
#[path = "cpu/golden.rs"]
#[allow(dead_code)]
mod golden;

use devices::{TestDevice, devices};
use ferrotron_kernels::{AuxLoss, ExpertChoice, Gemm, GroupLimit, RouterParams, ScoreFunction, capacity};
use ferrotron_tensor::{Category, DType, Tensor, bf16};
use golden::{Golden, bf16_ulps, count, number, text};
use safetensors::Dtype;
use serde_json::Value;

/// Tensors of one case on one home.
struct Case<'a> {
    h: &'a TestDevice,
    g: &'a Golden,
    json: &'a Value,
    name: String,
}

impl Case<'_> {
    fn at(&self, tensor: &str) -> String {
        format!("{}/{tensor}", self.name)
    }

    /// Values of any type.
    fn values(&self, tensor: &str) -> Vec<f64> {
        let at = self.at(tensor);
        match self.g.dtype(&at) {
            Dtype::F32 => self.g.f32(&at).into_iter().map(f64::from).collect(),
            Dtype::BF16 => self.g.bf16(&at).into_iter().map(|x| x.to_f64()).collect(),
            Dtype::F64 => self.g.f64(&at),
            Dtype::I64 => self.g.i64(&at).into_iter().map(|x| x as f64).collect(),
            Dtype::U8 => self.g.u8(&at).into_iter().map(f64::from).collect(),
            other => panic!("{at}: {other:?}"),
        }
    }

    fn upload(&self, dtype: DType, tensor: &str) -> Tensor {
        self.h.tensor(dtype, &self.g.shape(&self.at(tensor)), &self.values(tensor))
    }

    fn map(&self, tensor: &str) -> Vec<bool> {
        self.values(tensor).into_iter().map(|x| x != 0.0).collect()
    }

    fn what(&self, of: &str) -> String {
        format!("{} {} {of}", self.h.name, self.name)
    }

    fn near(&self, of: &str, ours: &[f64], wanted: &[f64], atol: f64, rtol: f64) {
        assert_eq!(ours.len(), wanted.len(), "{}", self.what(of));
        for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
            let room = atol + rtol * w.abs();
            assert!((o - w).abs() <= room, "{} [{i}]: {o:e} instead of {w:e}", self.what(of));
        }
    }

    fn i64s(&self, n: usize) -> Tensor {
        self.h.s.zeros(&[n], DType::I64, Category::Workspace).unwrap()
    }
}

fn score(case: &Value) -> ScoreFunction {
    let before = case.get("pre_softmax").is_some_and(|p| p.as_bool().expect("pre_softmax"));
    match text(case, "score_function") {
        "softmax" if before => ScoreFunction::Softmax,
        "softmax" => ScoreFunction::SoftmaxAfterTopK,
        "sigmoid" => ScoreFunction::Sigmoid,
        "sqrtsoftplus" => ScoreFunction::SqrtSoftplus,
        other => panic!("unknown score function {other}"),
    }
}

/// What `index [T, k]` says of each expert, `[T, E]`.
fn dense(index: &[f64], values: &[f64], k: usize, experts: usize) -> (Vec<bool>, Vec<f64>) {
    let tokens = index.len() / k;
    let (mut map, mut out) = (vec![false; tokens * experts], vec![0.0; tokens * experts]);
    for (i, e) in index.iter().enumerate().filter(|(_, e)| **e >= 0.0) {
        let at = i / k * experts + *e as usize;
        assert!(!map[at], "an expert twice");
        (map[at], out[at]) = (true, values[i]);
    }
    (map, out)
}

/// `[T, k]` of `[T, E]`; 0 where there is no choice.
fn gathered(index: &[f64], from: &[f64], k: usize, experts: usize) -> Vec<f64> {
    let at = |(i, e): (usize, &f64)| if *e < 0.0 { 0.0 } else { from[i / k * experts + *e as usize] };
    index.iter().enumerate().map(at).collect()
}

/// `index [T, k]` of a map, experts in order.
fn index_of(map: &[bool], k: usize, experts: usize) -> Vec<f64> {
    let of_row = |row: &[bool]| -> Vec<f64> {
        let mut found: Vec<f64> = (0..experts).filter(|e| row[*e]).map(|e| e as f64).collect();
        assert!(found.len() <= k);
        found.resize(k, -1.0);
        found
    };
    map.chunks(experts).flat_map(of_row).collect()
}

/// Probabilities of a choice, dense, against the case; then the gradient of logits.
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
    c.h.k.route_backward(&c.h.s, how, logits, index, &dprobs, &dlogits).unwrap();
    c.near("dlogits", &c.h.host(&dlogits), &c.values("dlogits"), room[2], room[3]);
}

fn top_k(c: &Case) {
    let k = count(c.json, "topk");
    let (dtype, room) = match text(c.json, "dtype") {
        "f32" => (DType::F32, [1e-6, 1e-5, 1e-6, 1e-5]),
        "bf16" => (DType::BF16, [1e-2, 8e-3, 2e-2, 2e-2]),
        other => panic!("unknown dtype {other}"),
    };
    let groups = c.json["num_groups"]
        .is_number()
        .then(|| GroupLimit { count: count(c.json, "num_groups"), keep: count(c.json, "group_topk") });
    let scale = c.json["scaling_factor"].as_f64().unwrap_or(1.0);
    let how = RouterParams { score: score(c.json), groups, scale: scale as f32 };
    let logits = c.upload(dtype, "logits");
    let bias = c.json["expert_bias"].as_bool().unwrap().then(|| c.upload(DType::F32, "expert_bias"));
    let shape = [logits.shape()[0], k];
    let (index, probs) = (c.h.poisoned(DType::I32, &shape), c.h.poisoned(DType::F32, &shape));
    let choice = ExpertChoice::TopK { bias: bias.as_ref() };
    c.h.k.route(&c.h.s, how, choice, &logits, &index, &probs).unwrap();
    probabilities(c, how, &logits, &index, &probs, room.map(|r| r * scale));
}

fn sinkhorn(c: &Case) {
    let k = count(c.json, "topk");
    let logits = c.upload(DType::F32, "logits");
    let balanced = c.h.poisoned(DType::F32, logits.shape());
    c.h.k.sinkhorn(&c.h.s, &logits, &balanced).unwrap();
    c.near("normalised", &c.h.host(&balanced), &c.values("normalised"), 1e-6, 1e-5);
    let shape = [logits.shape()[0], k];
    let (index, probs) = (c.h.poisoned(DType::I32, &shape), c.h.poisoned(DType::F32, &shape));
    c.h.k.top_k(&c.h.s, &balanced, None, &index).unwrap();
    let score = if k == 1 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
    let how = RouterParams { score, groups: None, scale: 1.0 };
    c.h.k.route(&c.h.s, how, ExpertChoice::Given, &logits, &index, &probs).unwrap();
    probabilities(c, how, &logits, &index, &probs, [1e-6, 1e-5, 1e-6, 1e-5]);
}

fn drop(c: &Case) {
    let (tokens, k, experts) = (count(c.json, "tokens"), count(c.json, "topk"), count(c.json, "experts"));
    let keep = capacity(tokens, k, experts, number(c.json, "capacity_factor"));
    assert_eq!(keep, count(c.json, "capacity").min(tokens), "{}", c.what("capacity"));
    let by_probability = match text(c.json, "drop_policy") {
        "probs" => true,
        "position" => false,
        other => panic!("unknown policy {other}"),
    };
    let before = c.map("map_in");
    let chosen = index_of(&before, k, experts);
    let index = c.h.tensor(DType::I32, &[tokens, k], &chosen);
    let probs = gathered(&chosen, &c.values("probs_in"), k, experts);
    let probs = c.h.tensor(DType::F32, &[tokens, k], &probs);
    let dropped = c.i64s(1);
    c.h.k.drop_over_capacity(&c.h.s, keep, experts, by_probability, &index, &probs, &dropped).unwrap();
    let (map, p) = dense(&c.h.host(&index), &c.h.host(&probs), k, experts);
    // Padding to the capacity adds choices of probability 0, which have no place in an index.
    let stable = c.map("stable_map");
    let wanted: Vec<bool> = stable.iter().zip(&before).map(|(s, b)| *s && *b).collect();
    assert!(map == wanted, "{}", c.what("map"));
    let ambiguous = c.map("ambiguous_columns");
    let (peer, peer_p) = (c.map("peer_map"), c.values("peer_probs"));
    let (dprobs, peer_d) = (c.values("dprobs"), c.values("peer_dprobs_in"));
    for i in (0..map.len()).filter(|i| !ambiguous[i % experts]) {
        assert_eq!(peer[i], stable[i], "{}", c.what("the peer's map"));
        assert_eq!(p[i], peer_p[i], "{}", c.what("probs"));
        // What was dropped has no gradient.
        let d = if map[i] { dprobs[i] } else { 0.0 };
        assert!(!before[i] || d == peer_d[i], "{}", c.what("dprobs"));
    }
    let gone = before.iter().filter(|b| **b).count() - map.iter().filter(|b| **b).count();
    assert_eq!(c.h.s.download::<i64>(&dropped).unwrap(), [gone as i64], "{}", c.what("dropped"));
    assert!(gone == 0 || c.json["drops"].as_bool().unwrap(), "{}", c.what("drops"));
}

fn auxiliary(c: &Case) {
    let (seq, batch) = (count(c.json, "seq"), count(c.json, "batch"));
    let (experts, k, coeff) = (count(c.json, "experts"), count(c.json, "topk"), number(c.json, "coeff"));
    let segments = match text(c.json, "kind") {
        "seq_aux" => batch,
        "aux" | "z" => 1,
        other => panic!("unknown kind {other}"),
    };
    let masked = c.json["padding_mask"].as_bool().unwrap();
    let padding = if masked { c.map("padding_mask") } else { vec![false; seq * batch] };
    let of_rows: Vec<i32> =
        padding.iter().enumerate().map(|(t, p)| if *p { -1 } else { (t % segments) as i32 }).collect();
    let (of_rows, logits) = (c.h.ids(&of_rows), c.upload(DType::F32, "logits"));
    let (k_, s) = (&c.h.k, &c.h.s);
    let dlogits = s.zeros(logits.shape(), DType::F32, Category::Workspace).unwrap();
    let loss = if text(c.json, "kind") == "z" {
        let sums = s.zeros(&[2], DType::F64, Category::Workspace).unwrap();
        k_.z_loss(s, &logits, &of_rows, &sums).unwrap();
        k_.z_loss_backward(s, coeff as f32, &sums, &logits, &of_rows, &dlogits).unwrap();
        let sums = s.download::<f64>(&sums).unwrap();
        coeff * sums[0] / sums[1].max(1.0)
    } else {
        let shape = [segments, experts];
        let (sums, weights) = (c.h.poisoned(DType::F32, &shape), c.h.poisoned(DType::F32, &shape));
        let counts = s.upload(&vec![-7i64; segments * experts], &shape, Category::Workspace).unwrap();
        let b = AuxLoss { logits: &logits, score: score(c.json), k, segments: &of_rows };
        k_.aux_loss_stats(s, &b, &sums, &counts).unwrap();
        let wanted = c.g.i64(&c.at("tokens_per_expert"));
        assert_eq!(s.download::<i64>(&counts).unwrap(), wanted, "{}", c.what("counts"));
        let mut columns = vec![0.0; segments * experts];
        for (i, y) in c.values("scores").iter().enumerate().filter(|(i, _)| !padding[i / experts]) {
            columns[i / experts % segments * experts + i % experts] += y;
        }
        c.near("sums", &c.h.host(&sums), &columns, 1e-6, 1e-5);
        let loss = c.h.tensor(DType::F32, &[1], &[0.0]);
        let factor = (coeff / segments as f64) as f32;
        k_.aux_loss_weights(s, factor, k, &sums, &counts, None, &weights, &loss).unwrap();
        k_.aux_loss_backward(s, &b, &weights, &dlogits).unwrap();
        c.h.host(&loss)[0]
    };
    c.near("loss", &[loss], &c.values("loss"), 1e-6, 1e-5);
    c.near("dlogits", &c.h.host(&dlogits), &c.values("dlogits"), 1e-6, 1e-5);
}

fn random(c: &Case) {
    let (x, w) = (c.upload(DType::F32, "x"), c.upload(DType::F32, "w"));
    let logits = c.upload(DType::F32, "random_logits");
    let shape = [logits.shape()[0], count(c.json, "topk")];
    let (index, probs) = (c.h.poisoned(DType::I32, &shape), c.h.poisoned(DType::F32, &shape));
    let how = RouterParams { score: score(c.json), groups: None, scale: 1.0 };
    c.h.k.route(&c.h.s, how, ExpertChoice::TopK { bias: None }, &logits, &index, &probs).unwrap();
    probabilities(c, how, &logits, &index, &probs, [1e-6, 1e-5, 1e-6, 1e-5]);
    let d = c.upload(DType::F32, "dlogits");
    let (dx, dw) = (c.h.poisoned(DType::F32, x.shape()), c.h.poisoned(DType::F32, w.shape()));
    c.h.k.gate_f64_backward(&c.h.s, &x, &w, &d, &dx, &dw, false).unwrap();
    c.near("dx", &c.h.host(&dx), &c.values("dx"), 1e-6, 1e-5);
    c.near("dw", &c.h.host(&dw), &c.values("dw"), 1e-6, 1e-5);
}

/// Within one unit in the last place of bf16.
fn near_bf16(c: &Case, of: &str, ours: &Tensor) {
    let ours: Vec<bf16> = c.h.host(ours).iter().map(|x| bf16::from_f64(*x)).collect();
    let wanted = c.g.bf16(&c.at(of));
    assert_eq!(ours.len(), wanted.len());
    for (o, w) in ours.iter().zip(wanted) {
        assert!(bf16_ulps(*o, w) <= 1, "{}: {o} instead of {w}", c.what(of));
    }
}

fn gate(c: &Case) {
    let (k, s) = (&c.h.k, &c.h.s);
    let (x, w, d) = (c.upload(DType::BF16, "x"), c.upload(DType::BF16, "w"), c.upload(DType::F32, "dlogits"));
    let logits = c.h.poisoned(DType::F32, d.shape());
    let (dx, dw) = (c.h.poisoned(DType::BF16, x.shape()), c.h.poisoned(DType::F32, w.shape()));
    let bias = c.json["bias"].as_bool().unwrap().then(|| c.upload(DType::BF16, "b"));
    match text(c.json, "router_dtype") {
        "f64" => {
            assert!(bias.is_none(), "{}", c.what("a bias in f64"));
            k.gate_f64(s, &x, &w, &logits).unwrap();
            k.gate_f64_backward(s, &x, &w, &d, &dx, &dw, false).unwrap();
        }
        "f32" => {
            // As a layer does it: the factors of the gradients are widened first, what comes out is rounded once.
            let gemm = |a: &Tensor, trans_a, b: &Tensor, trans_b, bias: Option<&Tensor>, c: &Tensor| {
                k.gemm(s, &Gemm { a, trans_a, b, trans_b, bias, accumulate: false, c }).unwrap();
            };
            gemm(&x, false, &w, true, bias.as_ref(), &logits);
            let wide = |t: &Tensor| {
                let out = c.h.poisoned(DType::F32, t.shape());
                k.copy(s, t, &out).unwrap();
                out
            };
            let sum = c.h.poisoned(DType::F32, x.shape());
            gemm(&d, false, &wide(&w), false, None, &sum);
            k.copy(s, &sum, &dx).unwrap();
            gemm(&d, true, &wide(&x), false, None, &dw);
        }
        other => panic!("unknown router dtype {other}"),
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

fn bias_updates(h: &TestDevice, g: &Golden) {
    let updates = g.json["bias_updates"].as_array().expect("bias_updates");
    assert!(!updates.is_empty());
    for u in updates {
        let list = |key: &str| -> Vec<f64> {
            u[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let counts: Vec<i64> = list("counts").iter().map(|x| *x as i64).collect();
        let n = counts.len();
        let counts = h.s.upload(&counts, &[n], Category::Workspace).unwrap();
        let bias = h.tensor(DType::F32, &[n], &list("bias"));
        h.k.update_expert_bias(&h.s, number(u, "rate") as f32, &counts, &bias).unwrap();
        let room = |(o, w): (&f64, &f64)| (o - w).abs() <= 1e-7;
        assert!(h.host(&bias).iter().zip(&list("updated")).all(room), "{}: {u}", h.name);
        assert_eq!(h.s.download::<i64>(&counts).unwrap(), vec![0; n]);
    }
}

fn capacities(g: &Golden) {
    let table = g.json["capacity_table"].as_array().expect("capacity_table");
    assert!(!table.is_empty());
    for row in table {
        // `num_tokens` has the choices in it. A floor is the caller's; ours never goes beyond the tokens.
        let choices = count(row, "num_tokens");
        let ours = capacity(choices, 1, count(row, "num_experts"), number(row, "capacity_factor"));
        let least = row["min_capacity"].as_u64().unwrap_or(0) as usize;
        assert_eq!(ours.max(least.min(choices)), count(row, "capacity").min(choices), "{row}");
    }
}

#[test]
fn golden_router() {
    let folder = golden::folder("router");
    let files = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let names = files.map(|f| f.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "json"));
    let mut names: Vec<String> =
        names.map(|p| p.file_stem().unwrap().to_str().unwrap().to_string()).collect();
    names.sort();
    let homes = devices();
    let mut seen = 0;
    for name in &names {
        let g = Golden::open("router", name);
        for (h, json) in homes.iter().flat_map(|h| g.cases().iter().map(move |json| (h, json))) {
            let c = Case { h, g: &g, json, name: text(json, "name").to_string() };
            match name.split('_').next().unwrap() {
                "topk" => top_k(&c),
                "sinkhorn" => sinkhorn(&c),
                "drop" => drop(&c),
                "aux" => auxiliary(&c),
                "ste" => random(&c),
                "extras" => match text(json, "kind") {
                    "gate" => gate(&c),
                    "quantile_balancing" => quantile(&c),
                    other => panic!("unknown kind {other}"),
                },
                other => panic!("unknown file {other}"),
            }
            seen += 1;
        }
        if g.json.get("bias_updates").is_some() {
            homes.iter().for_each(|h| bias_updates(h, &g));
        }
        if g.json.get("capacity_table").is_some() {
            capacities(&g);
        }
    }
    assert!(seen >= 8 * homes.len(), "{seen} cases in {names:?}");
}
