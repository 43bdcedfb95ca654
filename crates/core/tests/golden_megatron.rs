//! Whole models of Megatron Core: logits, loss, the losses of routers, every gradient, on one rank and under layouts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_core::grid::RankLayout as Ranks;
use ferrotron_core::model::{Model, ModelConfig, ModelOptions, MoeConfig, PipelineLayout};
use ferrotron_core::model::{config::*, generate::to_host, moe_config::ScoreKind};
use ferrotron_core::pipeline::{MicroBatch, PipelinePlan, ScheduleKind, StepMode, execute};
use ferrotron_core::ranks::on_threads;
use ferrotron_core::tensorfile::TensorFile;
use ferrotron_core::train::{LogicalValues, gather_all_stages, read_scalar, upload_targets};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::moe::{AuxLossKind, MoeTraining};
use ferrotron_engine::{GradBuffer, ParamId, Rank};
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{DType, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tensors by name.
type Named = BTreeMap<String, Vec<f32>>;

fn folder() -> PathBuf {
    let root = std::env::var_os("FERROTRON_GOLDEN").map(PathBuf::from);
    let root = root.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden"));
    root.join("megatron-model")
}

/// A model of the folder.
struct Case {
    name: String,
    model: ModelConfig,
    mixing: MoeTraining,
    weights: Named,
    expected: TensorFile,
}

fn floats(file: &TensorFile, name: &str) -> Vec<f32> {
    file.read(name).unwrap().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn ints(file: &TensorFile, name: &str) -> Vec<i32> {
    file.read(name).unwrap().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as i32).collect()
}

/// The architecture and the losses of a `config.json`. A key that is not known here is a failure.
fn configuration(json: &Value, dir: &Path) -> (ModelConfig, MoeTraining) {
    let mut c = ModelConfig::preset("tiny").unwrap();
    let mut mixes = false;
    let mut mixing = MoeTraining::default();
    c.norm = NormConfig {
        kind: NormKind::RmsNorm,
        eps: json["layernorm_epsilon"].as_f64().unwrap() as f32,
        zero_centred: false,
    };
    let mut mixture = MoeConfig {
        experts: 0,
        topk: 0,
        ffn: 0,
        layers: Vec::new(),
        score: ScoreKind::Softmax,
        pre_softmax: false,
        groups: None,
        scale: 1.0,
        expert_bias: false,
        router_bias: false,
        bias: false,
        clamp: None,
        latent: None,
        shared_ffn: None,
        shared_gate: false,
    };
    let sections = [&json["transformer_config"], &json["model"]];
    for (key, v) in sections.iter().flat_map(|s| s.as_object().unwrap()) {
        let size = || v.as_u64().unwrap() as usize;
        let real = || v.as_f64().unwrap() as f32;
        let m = &mut mixture;
        match (key.as_str(), v.as_str(), v.as_bool()) {
            ("num_layers", ..) => c.layers = size(),
            ("hidden_size", ..) => c.hidden = size(),
            ("ffn_hidden_size", ..) => c.ffn = size(),
            ("num_attention_heads", ..) => c.heads = size(),
            ("num_query_groups", ..) => c.kv_heads = size(),
            ("kv_channels", ..) => c.head_dim = size(),
            ("vocab_size", ..) => c.vocab = size(),
            ("num_moe_experts", ..) => (m.experts, mixes) = (size(), true),
            ("moe_router_topk", ..) => m.topk = size(),
            ("moe_ffn_hidden_size", ..) => m.ffn = size(),
            ("moe_shared_expert_intermediate_size", ..) => m.shared_ffn = Some(size()),
            ("moe_layer_freq", ..) => {
                m.layers = v.as_array().unwrap().iter().map(|x| x.as_u64() == Some(1)).collect();
            }
            ("moe_aux_loss_coeff", ..) => mixing.balance = vec![(AuxLossKind::Batch, real())],
            ("moe_z_loss_coeff", ..) => mixing.z_loss = real(),
            ("share_embeddings_and_output_weights", _, Some(tied)) => c.tied = tied,
            ("gated_linear_unit", _, Some(gated)) => c.gated = gated,
            ("add_bias_linear", _, Some(bias)) => {
                (c.qkv_bias, c.proj_bias, c.mlp_bias) = (bias, bias, bias);
            }
            ("normalization", Some("RMSNorm"), _) | ("activation_func", Some("silu"), _) => {}
            ("position_embedding_type", Some("rope"), _) => {}
            ("moe_router_load_balancing_type", Some("aux_loss"), _) => {}
            // How tokens travel changes nothing of what is computed.
            ("moe_token_dispatcher_type", Some(_), _) => {}
            _ => panic!("{}: {key} = {v} is not known here", dir.display()),
        }
    }
    c.activation = Activation::Silu;
    c.attn_scale = (1.0 / (c.head_dim as f64).sqrt()) as f32;
    c.positions = Positions::Rope(RopeConfig {
        theta: 1e4,
        rotary_dim: c.head_dim,
        interleaved: false,
        scaling: RopeScaling::None,
    });
    (c.window, c.rope_local, c.max_positions, c.moe) = (None, None, 1024, mixes.then_some(mixture));
    c.local_layers.clear();
    c.validate().unwrap();
    (c, mixing)
}

/// Which of our tensors one of theirs is, in slices: `qkv` rows are those of a group's queries, its key and its value;
/// `fc1` is `[gate; up]`.
fn ours(c: &ModelConfig, theirs: &str, values: &[f32]) -> Named {
    let named = |name: &str, v: Vec<f32>| (name.to_string(), v);
    let one = |name: &str| BTreeMap::from([named(name, values.to_vec())]);
    match theirs {
        "embedding.word_embeddings.weight" => return one("embed.tokens"),
        "decoder.final_layernorm.weight" => return one("final_norm.weight"),
        "output_layer.weight" => return one("head.weight"),
        _ => {}
    }
    let rest = theirs.strip_prefix("decoder.layers.").unwrap_or_else(|| panic!("{theirs} is not known here"));
    let (layer, rest) = rest.split_once('.').unwrap();
    let own = |name: &str| one(&format!("layers.{layer}.{name}"));
    let halves = |name: &str| {
        let (gate, up) = values.split_at(values.len() / 2);
        let part = |kind: &str, v: &[f32]| named(&format!("layers.{layer}.{name}.{kind}.weight"), v.to_vec());
        BTreeMap::from([part("gate", gate), part("up", up)])
    };
    if let Some(expert) = rest.strip_prefix("mlp.experts.local_experts.") {
        let (e, matrix) = expert.split_once('.').unwrap();
        let name = format!("moe.experts.{e}");
        return match matrix {
            "linear_fc1.weight" => halves(&name),
            "linear_fc2.weight" => own(&format!("{name}.down.weight")),
            _ => panic!("{theirs} is not known here"),
        };
    }
    match rest {
        "input_layernorm.weight" => own("attn_norm.weight"),
        "pre_mlp_layernorm.weight" => own("mlp_norm.weight"),
        "self_attention.linear_proj.weight" => own("attn.out.weight"),
        "mlp.linear_fc1.weight" => halves("mlp"),
        "mlp.linear_fc2.weight" => own("mlp.down.weight"),
        "mlp.router.weight" => own("moe.router.weight"),
        "mlp.shared_experts.linear_fc1.weight" => halves("moe.shared"),
        "mlp.shared_experts.linear_fc2.weight" => own("moe.shared.down.weight"),
        "self_attention.linear_qkv.weight" => {
            let (head, queries) = (c.head_dim * c.hidden, c.heads / c.kv_heads);
            let mut out = [Vec::new(), Vec::new(), Vec::new()];
            for group in values.chunks((queries + 2) * head) {
                let (q, kv) = group.split_at(queries * head);
                out[0].extend_from_slice(q);
                out[1].extend_from_slice(&kv[..head]);
                out[2].extend_from_slice(&kv[head..]);
            }
            let names = ["q", "k", "v"].map(|n| format!("layers.{layer}.attn.{n}.weight"));
            names.into_iter().zip(out).collect()
        }
        _ => panic!("{theirs} is not known here"),
    }
}

/// Every model of the folder. Those that predict further tokens have a test of their own.
fn cases() -> Vec<Case> {
    let mut out = Vec::new();
    let mut dirs: Vec<PathBuf> =
        std::fs::read_dir(folder()).expect("no golden folder").map(|e| e.unwrap().path()).collect();
    dirs.retain(|d| d.is_dir());
    dirs.sort();
    for dir in dirs {
        let json: Value =
            serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
        if !json["transformer_config"]["mtp_num_layers"].is_null() {
            let elsewhere = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_mtp.rs");
            let said =
                if elsewhere.is_file() { "in golden_mtp" } else { "not covered: no prediction layers" };
            println!("{}: {said}", dir.display());
            continue;
        }
        let (model, mixing) = configuration(&json, &dir);
        let file = TensorFile::open(&dir.join("state_dict.safetensors")).unwrap();
        let weights =
            file.tensors().iter().flat_map(|t| ours(&model, &t.name, &floats(&file, &t.name))).collect();
        let expected = TensorFile::open(&dir.join("expected.safetensors")).unwrap();
        out.push(Case {
            name: dir.file_name().unwrap().display().to_string(),
            model,
            mixing,
            weights,
            expected,
        });
    }
    assert!(!out.is_empty(), "no case in {}", folder().display());
    out
}

/// What a run gives: all rows' logits, the loss, router losses per mixture, gradients.
struct Got {
    logits: Vec<f32>,
    loss: f64,
    aux: Vec<f32>,
    z: Vec<f64>,
    gradients: Named,
}

fn run(case: &Case, dtype: DType, layout: &Ranks) -> Got {
    let work = |rank: Rank| {
        let e = &case.expected;
        let [batch, seq] = e.get("input_ids").unwrap().shape[..] else { panic!() };
        let source = |name: &str| {
            let values = case.weights.get(name).unwrap_or_else(|| panic!("{name} is not in the folder"));
            let mut bytes = Vec::new();
            for x in values {
                match dtype {
                    DType::BF16 => bytes.extend(
                        <ferrotron_tensor::bf16 as ferrotron_tensor::Float>::from_f32(*x).to_le_bytes(),
                    ),
                    _ => bytes.extend(x.to_le_bytes()),
                }
            }
            Ok(bytes)
        };
        let settings =
            ModelOptions { moe_training: Arc::new(case.mixing.clone()), ..ModelOptions::default() };
        let stages = PipelineLayout { vp: layout.vp, layout: None };
        let model = Model::load_with(rank, &case.model, seq, dtype, (&stages, &settings), &source)?;
        let (ids, mask) = (ints(e, "input_ids"), floats(e, "loss_mask"));
        let labels: Vec<i32> =
            ints(e, "labels").iter().zip(&mask).map(|(l, m)| if *m == 0.0 { IGNORE } else { *l }).collect();
        assert!(mask.iter().all(|m| *m == 0.0 || *m == 1.0), "a mask of fractions");
        let weight = 1.0 / mask.iter().sum::<f32>();
        let rows = Layout::Rows { count: batch, len: seq };
        let pass = |aim: StepMode, train: bool| {
            let place = model.decoder.placement();
            let mode = if train { ScheduleKind::OneForwardOneBackward } else { ScheduleKind::ForwardOnly };
            let schedule =
                PipelinePlan { kind: mode, ..PipelinePlan::new(place.pp(), place.vp(), 1) }.schedule()?;
            let mut load = |_| {
                let input = model.decoder.input(&model.rank, &ids, None, rows.clone())?;
                let targets =
                    train.then(|| upload_targets(&model.rank, &input.tokens, &labels, weight)).transpose()?;
                Ok(MicroBatch { input, targets, dropout: None, position: None })
            };
            execute(model.pass(), &model.decoder, &schedule, &mut load, aim)
        };
        let logits = pass(StepMode::Logits, false)?;
        let logits = logits.first().map_or(Ok(Vec::new()), |l: &Tensor| to_host(&model.pass(), l))?;
        let logits = model.join_logits(&rows, &logits)?;
        let mut grads = GradBuffer::new(model.params.specs());
        // What the pass before has counted is not this one's.
        model.params.moe().map_or(Ok(()), |m| m.begin_step(&model.rank.compute))?;
        let losses = pass(StepMode::Train(&mut grads), true)?;
        let loss = losses.iter().map(|l| read_scalar(&model.rank, l)).sum::<ferrotron_core::Result<f64>>()?;
        let (mut aux, mut z) = (Vec::new(), Vec::new());
        if let Some(mixtures) = model.params.moe() {
            let counted = mixtures.end_step(&model.rank, 1, &case.mixing)?;
            let of_kinds = model.rank.compute.download::<f32>(&counted.losses)?;
            aux = of_kinds.chunks(AuxLossKind::ALL.len()).map(|c| c[0] / case.mixing.balance[0].1).collect();
            z = model.rank.compute.download::<f64>(&counted.z)?.chunks(2).map(|c| c[0] / c[1]).collect();
        }
        grads.reduce(&model.rank)?;
        let mut mine = Vec::new();
        for (i, spec) in model.params.specs().iter().enumerate().filter(|(_, spec)| !spec.mirror) {
            let values: Vec<f32> = model.rank.compute.download(&grads.get(ParamId(i))?)?;
            for (part, _, r) in spec.held() {
                let values = model.rank.gather_tensor(spec.experts, part, 1, &values[r])?;
                mine.push(LogicalValues { name: part.name.clone(), shape: part.shape.clone(), values });
            }
        }
        let all = gather_all_stages(&model.rank, &case.model, mine)?;
        let gradients = all.into_iter().map(|v| (v.name, v.values)).collect();
        Ok(Got { logits, loss, aux, z, gradients })
    };
    let mut all = on_threads(layout, || Ok(Rank::cpu(1, 1)?), work)
        .unwrap_or_else(|e| panic!("{} {layout}: {e}", case.name));
    // Each rank has the losses of its own tokens and stage.
    let loss = all.iter().map(|g| g.loss).sum::<f64>();
    let mut first = all.swap_remove(0);
    first.loss = loss / (layout.tp) as f64;
    first
}

fn most(ours: &[f32], theirs: &[f32]) -> (f64, f64) {
    assert_eq!(ours.len(), theirs.len());
    let apart = ours.iter().zip(theirs).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    (apart, theirs.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max))
}

fn check(case: &Case, what: &str, got: &Got, exact: bool) {
    let label = |name: &str| format!("{} {what} {name}", case.name);
    let e = &case.expected;
    let logits = floats(e, "logits");
    let l2 = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    if exact {
        let inside = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-4 + 2e-4 * b.abs();
        assert!(got.logits.iter().zip(&logits).all(inside), "{}", label("logits"));
    } else {
        let apart = l2(&mut got.logits.iter().zip(&logits).map(|(a, b)| f64::from(a - b)));
        assert!(apart <= 2e-2 * l2(&mut logits.iter().map(|x| f64::from(*x))), "{}", label("logits"));
    }
    let loss = f64::from(floats(e, "loss")[0]);
    let room = if exact { 2e-5 } else { 2e-2 * loss };
    assert!((got.loss - loss).abs() <= room, "{}: {} instead of {loss}", label("loss"), got.loss);
    for t in e.tensors().iter().filter(|t| t.name.starts_with("grad.")) {
        let theirs = ours(&case.model, &t.name["grad.".len()..], &floats(e, &t.name));
        for (name, theirs) in theirs {
            let mine = got.gradients.get(&name).unwrap_or_else(|| panic!("no gradient of {name}"));
            let (apart, size) = most(mine, &theirs);
            if exact {
                assert!(apart <= 1e-4 * size + 1e-6, "{}: {apart:.2e} of {size:.2e}", label(&name));
            } else if size > 0.0 {
                let dot: f64 = mine.iter().zip(&theirs).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let norms = l2(&mut mine.iter().map(|x| f64::from(*x)))
                    * l2(&mut theirs.iter().map(|x| f64::from(*x)));
                assert!(dot >= 0.995 * norms, "{}: cosine {}", label(&name), dot / norms);
            }
        }
    }
    assert_eq!(
        got.gradients.len(),
        case.weights.len(),
        "{}: gradients of all that has weights",
        label("gradients")
    );
}

/// Total loss as the folder has it, and each layer's part of it.
#[test]
fn golden_megatron_on_one_rank() {
    for case in cases() {
        let got = run(&case, DType::F32, &Ranks::default());
        check(&case, "f32", &got, true);
        let json = std::fs::read_to_string(folder().join(&case.name).join("config.json")).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let mixtures: Vec<usize> =
            (0..case.model.layers).filter(|i| case.model.moe_layer(*i).is_some()).collect();
        let mut total = got.loss;
        if let Some((_, coefficient)) = case.mixing.balance.first() {
            let logged = floats(&case.expected, "logged.load_balancing_loss");
            assert_eq!(got.aux.len(), mixtures.len());
            for (i, aux) in mixtures.iter().zip(&got.aux) {
                assert!(
                    (aux - logged[*i]).abs() <= 1e-5 * logged[*i].abs(),
                    "aux of layer {i}: {aux} {}",
                    logged[*i]
                );
                total += f64::from(coefficient * aux);
            }
        }
        if case.mixing.z_loss > 0.0 {
            let logged = floats(&case.expected, "logged.z_loss");
            for (i, z) in mixtures.iter().zip(&got.z) {
                let theirs = f64::from(logged[*i]);
                assert!((z - theirs).abs() <= 1e-5 * theirs.abs(), "z of layer {i}: {z} {theirs}");
                total += f64::from(case.mixing.z_loss) * z;
            }
        }
        let theirs = json["total_loss"].as_f64().unwrap();
        assert!((total - theirs).abs() <= 2e-5, "{}: {total} instead of {theirs}", case.name);
        check(&case, "bf16", &run(&case, DType::BF16, &Ranks::default()), false);
        println!("covered: {}", case.name);
    }
}

#[test]
fn golden_megatron_under_layouts() {
    let plain = ["tp=2", "cp=2", "pp=2", "tp=2,cp=2", "tp=2,pp=2", "pp=3,cp=2"];
    let experts = [
        "cp=2,ep=2",
        "tp=2,ep=2,etp=1",
        "tp=2,cp=2,ep=4,etp=1",
        "cp=2,ep=1,etp=2",
        "pp=2,cp=2,ep=2",
        "tp=2,cp=4,ep=8,etp=1",
    ];
    for case in cases() {
        let more = if case.model.moe.is_some() { &experts[..] } else { &[] };
        for text in plain.iter().chain(more) {
            let layout: Ranks = text.parse().unwrap();
            check(&case, text, &run(&case, DType::F32, &layout), true);
        }
    }
}
