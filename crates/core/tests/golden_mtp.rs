//! Prediction of further tokens against Megatron Core: logits of both heads, losses, every gradient.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

mod common;

use common::{cases, flag, float, golden, json, text, uint};
use ferrotron_core::Result;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::{Batch, Batches, IGNORE, Row};
use ferrotron_core::model::ForwardMode;
use ferrotron_core::tensorfile::TensorFile;
use ferrotron_core::train::{Trainer, upload_mtp_inputs};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{Rank, StepContext};
use ferrotron_tensor::{Instrumentation, Tensor};
use std::collections::BTreeMap;

const AREA: &str = "megatron-model";

/// One batch for ever.
struct Only(Batch, usize);

impl Batches for Only {
    fn seq(&self) -> usize {
        self.1
    }
    fn samples(&self) -> u64 {
        u64::MAX
    }
    fn resets(&self) -> bool {
        self.0.cu_seqlens.is_some()
    }
    fn row(&self, _: u64, _: &mut Row) -> Result<()> {
        panic!("only the whole batch is asked for")
    }
    fn batch(&self, _: u64, _: usize) -> Result<Batch> {
        Ok(self.0.clone())
    }
}

fn floats(file: &TensorFile, name: &str) -> Vec<f32> {
    let bytes = file.read(name).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn ints(file: &TensorFile, name: &str) -> Vec<i32> {
    let bytes = file.read(name).unwrap();
    bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32).collect()
}

/// A model of the folder as a recipe. Keys that this does not know are a failure.
fn recipe(config: &serde_json::Value, batch: usize, seq: usize) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("base.toml", "[precision]\ndtype = \"f32\"\n[generate]\ntokens = 0\n").unwrap();
    let mut set = vec![
        format!("data.seq_len={seq}"),
        format!("model.max_positions={seq}"),
        format!("train.global_batch={batch}"),
        format!("train.micro_batch={batch}"),
        format!("model.norm_eps={}", float(&config["layernorm_epsilon"])),
        "data.eod=0".into(),
        "data.path=none_text_document".into(),
    ];
    let all =
        config["transformer_config"].as_object().unwrap().iter().chain(config["model"].as_object().unwrap());
    for (key, value) in all {
        set.push(match key.as_str() {
            "num_layers" => format!("model.layers={}", uint(value)),
            "hidden_size" => format!("model.hidden={}", uint(value)),
            "ffn_hidden_size" => format!("model.ffn={}", uint(value)),
            "num_attention_heads" => format!("model.heads={}", uint(value)),
            "num_query_groups" => format!("model.kv_heads={}", uint(value)),
            "kv_channels" => format!("model.head_dim={}", uint(value)),
            "mtp_num_layers" => format!("mtp.layers={}", uint(value)),
            "mtp_loss_scaling_factor" => format!("mtp.loss_weight={}", float(value)),
            "gated_linear_unit" => format!("model.gated={}", flag(value)),
            "add_bias_linear" => format!("model.mlp_bias={}", flag(value)),
            "vocab_size" => format!("model.vocab={}", uint(value)),
            "share_embeddings_and_output_weights" => format!("model.tied={}", flag(value)),
            "normalization" if text(value) == "RMSNorm" => "model.norm=rmsnorm".into(),
            "activation_func" if text(value) == "silu" => "model.activation=silu".into(),
            "position_embedding_type" if text(value) == "rope" => "model.positions=rope".into(),
            other => panic!("{other} = {value} is not known here"),
        });
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

/// Their tensor cut into ours: name and values.
fn ours(r: &Resolved, theirs: &str, values: &[f32]) -> Vec<(String, Vec<f32>)> {
    let m = &r.model;
    let whole = |name: &str| vec![(name.to_string(), values.to_vec())];
    let (layer, rest) = match theirs {
        "embedding.word_embeddings.weight" => return whole("embed.tokens"),
        "decoder.final_layernorm.weight" => return whole("final_norm.weight"),
        "output_layer.weight" => return whole("head.weight"),
        name => match name.strip_prefix("decoder.layers.").or(name.strip_prefix("mtp.layers.")) {
            None => panic!("{theirs} is not known here"),
            Some(rest) => rest.split_once('.').unwrap(),
        },
    };
    let prediction = theirs.starts_with("mtp");
    let (prefix, rest) = match (prediction, rest.strip_prefix("transformer_layer.")) {
        (true, Some(inner)) => (format!("mtp.{layer}.layer"), inner),
        (true, None) => (format!("mtp.{layer}"), rest),
        _ => (format!("layers.{layer}"), rest),
    };
    let own = |name: &str| vec![(format!("{prefix}.{name}"), values.to_vec())];
    match rest {
        "enorm.weight" | "hnorm.weight" => own(rest),
        "eh_proj.weight" => own("eh.weight"),
        "final_layernorm.weight" => own("norm.weight"),
        "input_layernorm.weight" => own("attn_norm.weight"),
        "pre_mlp_layernorm.weight" => own("mlp_norm.weight"),
        "self_attention.linear_proj.weight" => own("attn.out.weight"),
        "mlp.linear_fc2.weight" => own("mlp.down.weight"),
        "mlp.linear_fc1.weight" => {
            let (gate, up) = values.split_at(values.len() / 2);
            vec![
                (format!("{prefix}.mlp.gate.weight"), gate.to_vec()),
                (format!("{prefix}.mlp.up.weight"), up.to_vec()),
            ]
        }
        "self_attention.linear_qkv.weight" => {
            // Of each group its query heads, then its key, then its value.
            let (group, d) = (m.heads / m.kv_heads, m.head_dim * m.hidden);
            let mut parts = [Vec::new(), Vec::new(), Vec::new()];
            for g in values.chunks((group + 2) * d) {
                parts[0].extend(&g[..group * d]);
                parts[1].extend(&g[group * d..(group + 1) * d]);
                parts[2].extend(&g[(group + 1) * d..]);
            }
            ["q", "k", "v"].iter().zip(parts).map(|(n, p)| (format!("{prefix}.attn.{n}.weight"), p)).collect()
        }
        other => panic!("{other} is not known here"),
    }
}

fn near(what: &str, ours: &[f32], wanted: &[f32], absolute: f64, relative: f64) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (a, b)) in ours.iter().zip(wanted).map(|(a, b)| (f64::from(*a), f64::from(*b))).enumerate() {
        assert!((a - b).abs() <= absolute + relative * b.abs(), "{what} [{i}]: {a} instead of {b}");
    }
}

fn check(name: &str, batch: usize, seq: usize) {
    let file =
        |kind: &str| TensorFile::open(&golden(AREA).join(name).join(format!("{kind}.safetensors"))).unwrap();
    let (weights, expected) = (file("state_dict"), file("expected"));
    let resolved = recipe(&json(AREA, &format!("{name}/config.json")), batch, seq);
    let rank = match std::env::var("FERROTRON_TEST_DEVICE").as_deref() {
        Ok("cuda") => Rank::cuda(0, 1, 1, Instrumentation::default()).unwrap().0,
        _ => Rank::cpu(2, 1).unwrap(),
    };
    let mut trainer = Trainer::new(rank, &resolved).unwrap();

    let tensors = weights.tensors().iter();
    let all: BTreeMap<String, Vec<f32>> =
        tensors.flat_map(|t| ours(&resolved, &t.name, &floats(&weights, &t.name))).collect();
    trainer.import(&|name| Ok(all.get(name).unwrap_or_else(|| panic!("{name}")).clone())).unwrap();

    let (ids, mask) = (ints(&expected, "input_ids"), floats(&expected, "loss_mask"));
    let labels = ints(&expected, "labels");
    let labels = labels.iter().zip(&mask).map(|(l, m)| if *m == 0.0 { IGNORE } else { *l }).collect();
    let positions = (0..batch * seq).map(|i| (i % seq) as i32).collect();
    let made = Batch { tokens: ids, labels, positions, cu_seqlens: None, padding: None };

    // Logits.
    let (rank, pass) =
        (&trainer.rank, StepContext { train: false, ..StepContext::new(&trainer.rank, &trainer.params) });
    let rows = Layout::Rows { count: batch, len: seq };
    let mut input = trainer.decoder.input(rank, &made.tokens, None, rows).unwrap();
    let depth = resolved.model.mtp_depth();
    input.mtp = upload_mtp_inputs(rank, &trainer.decoder, &made, (seq, &input), &vec![1.0; depth]).unwrap();
    let chunk = &trainer.decoder.chunks()[0];
    let read = |t: &Tensor| rank.compute.download::<f32>(t).unwrap();
    let (logits, _) = chunk.forward(&pass, &input, None, ForwardMode::Logits).unwrap();
    near("logits", &read(&logits), &floats(&expected, "logits"), 2e-4, 2e-4);
    let further = chunk.mtp_logits(&pass, &input).unwrap();
    assert_eq!(further.len(), depth);
    for (d, logits) in further.iter().enumerate() {
        near("mtp logits", &read(logits), &floats(&expected, &format!("mtp_logits.{d}")), 2e-4, 2e-4);
    }

    // Losses and gradients of a step.
    let report = trainer.train_step(&Only(made, seq)).unwrap();
    let wanted = floats(&expected, "loss")[0];
    assert!((report.loss - f64::from(wanted)).abs() < 2e-5, "{} instead of {wanted}", report.loss);
    let logged = floats(&expected, "logged.mtp_loss");
    assert_eq!(report.mtp_losses.len(), logged.len());
    for (a, b) in report.mtp_losses.iter().zip(&logged) {
        assert!((a - f64::from(*b)).abs() < 2e-5, "{a} instead of {b}");
    }
    let gradients = trainer.gradients().unwrap();
    let mut wanted: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for t in expected.tensors() {
        if let Some(theirs) = t.name.strip_prefix("grad.") {
            wanted.extend(ours(&resolved, theirs, &floats(&expected, &t.name)));
        }
    }
    assert_eq!(gradients.len(), wanted.len());
    for g in &gradients {
        let w = &wanted[&g.name];
        let largest = w.iter().fold(0f32, |m, x| m.max(x.abs()));
        assert!(largest > 0.0, "{}", g.name);
        near(&g.name, &g.values, w, 1e-4 * f64::from(largest) + 1e-6, 0.0);
    }
}

#[test]
fn golden_predictions_of_further_tokens() {
    let mut found = 0;
    for case in cases(&json(AREA, "index.json"), "cases") {
        let name = text(&case["name"]);
        let folder = golden(AREA).join(name);
        // The index names models of other areas of the program too.
        if !folder.exists() {
            continue;
        }
        let config = json(AREA, &format!("{name}/config.json"));
        if config["transformer_config"]["mtp_num_layers"].is_null() {
            continue;
        }
        check(name, uint(&case["batch"]) as usize, uint(&case["seq"]) as usize);
        found += 1;
    }
    assert!(found > 0, "no model that predicts further tokens");
}
