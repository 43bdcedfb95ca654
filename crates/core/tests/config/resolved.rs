//! Resolution of recipes: derived values, presets, embedded recipes.

use super::{TINY, add, fails, one_sentence};
use ferrotron_core::config::*;
use ferrotron_core::model::ModelConfig;

#[test]
fn every_recipe_resolves_and_its_resolution_is_stable() {
    for r in RECIPES {
        assert!(r.summary().len() > 20, "{}", r.name);
        let mut recipe = Recipe::named(r.name).unwrap();
        if recipe.config.data.path.0.is_empty() {
            recipe.set("data.path=corpus_text_document").unwrap();
        }
        let hf = Recipe::named("llama-1b").unwrap().model_config(None).unwrap();
        if ["finetune-hf", "sft", "lora"].contains(&r.name) {
            recipe.set("model.hf=/models/llama").unwrap();
        }
        if recipe.config.train.epochs.is_some() {
            recipe.set("train.steps=100").unwrap(); // epochs need the data
        }
        let resolved = recipe.resolve(Some(&hf)).unwrap_or_else(|e| panic!("{}: {e}", r.name));
        let text = resolved.config.to_toml();

        let again = add(&text).unwrap().resolve(Some(&hf)).unwrap();
        assert_eq!(again.config, resolved.config, "{}", r.name);
        assert_eq!(again.model, resolved.model, "{}", r.name);
        assert_eq!(again.plan, resolved.plan, "{}", r.name);
        assert_eq!(again.config.to_toml(), text, "{}", r.name);
        assert!(again.derived.is_empty(), "{}: {:?}", r.name, again.derived);

        // The same through serde alone.
        let plain: Config = toml::from_str(&text).unwrap();
        assert_eq!(plain, resolved.config);
        let json: Config = serde_json::from_str(&serde_json::to_string(&resolved.config).unwrap()).unwrap();
        assert_eq!(json, resolved.config);
    }
}

#[test]
fn the_default_recipe_is_the_yardstick() {
    assert_eq!(RECIPES[0].name, "tiny");
    let r = Recipe::named("tiny").unwrap().resolve(None).unwrap();
    let m = &r.model;
    assert_eq!((m.layers, m.hidden, m.heads, m.head_dim, m.ffn, m.vocab), (4, 256, 4, 64, 768, 256));
    assert!(m.tied && m.gated);
    assert_eq!((r.config.train.global_batch, r.plan.seq_len, r.plan.micro_batch), (16, 256, 16));
    assert_eq!(r.config.precision.dtype, Precision::Bf16);
    assert_eq!(r.config.checkpoint.every, 50);
    assert_eq!(r.plan.tokens, 120 * 16 * 256);
    // A shorter run must need no other key.
    for steps in [1, 2, 5, 11] {
        let mut short = Recipe::named("tiny").unwrap();
        short.put_key("train.steps", steps).unwrap();
        assert_eq!(short.resolve(None).unwrap().plan.steps, steps as u64);
    }
}

#[test]
fn derived_values_come_with_reasons() {
    let r =
        add("[model]\nlayers = 2\nhidden = 96\nheads = 3\nvocab = 256\n[train]\ntokens = 100_000\n").unwrap();
    let r = r.resolve(None).unwrap();
    let get = |key: &str| r.derived.iter().find(|d| d.key == key).map(|d| d.value.as_str());
    assert_eq!(get("model.kv_heads"), Some("3"));
    assert_eq!(get("model.head_dim"), Some("32"));
    assert_eq!(get("model.ffn"), Some("256"));
    assert_eq!(get("data.path"), Some("[\"embedded\"]"));
    assert_eq!(get("data.seq_len"), Some("1024"));
    assert_eq!(get("train.micro_batch"), Some("4"));
    // 32 x 1024 tokens per step.
    assert_eq!(get("train.steps"), Some("4"));
    assert_eq!(get("optimizer.min_lr"), Some("3e-5"));
    assert_eq!(get("schedule.decay_steps"), Some("4"));
    assert!(r.derived.iter().all(|d| d.reason.len() > 5));
    assert_eq!(r.model.attn_scale, (1.0 / 32f64.sqrt()) as f32);
}

/// Sinkhorn weights the only expert of a token by a sigmoid, which the model's users have to know too.
#[test]
fn sinkhorn_with_one_expert_per_token_has_sigmoid_scores() {
    let set = "[model]\npreset = \"tiny\"\n[moe]\nexperts = 4\ntopk = 1\nbalance = \"sinkhorn\"\n[train]\nsteps = 4\n";
    let r = add(set).unwrap().resolve(None).unwrap();
    assert_eq!(r.config.moe.score_function, Some(r.model.moe.as_ref().unwrap().score));
    assert!(r.config.to_toml().contains("score_function = \"sigmoid\""), "{}", r.config.to_toml());
    assert!(r.derived.iter().any(|d| d.key == "moe.score_function" && d.value == "\"sigmoid\""));
    add(&r.config.to_toml()).unwrap().resolve(None).unwrap();
}

/// Sinkhorn weights several experts of a token by a softmax over all. Stored recipes of runs that were trained before the
/// architecture said so contradict it; they are read as if they said nothing.
#[test]
fn sinkhorn_with_several_experts_per_token_has_a_softmax_over_all() {
    let set = "[model]\npreset = \"tiny\"\n[moe]\nexperts = 4\ntopk = 2\nbalance = \"sinkhorn\"\n[train]\nsteps = 4\n";
    let r = add(set).unwrap().resolve(None).unwrap();
    assert!(r.model.moe.as_ref().unwrap().pre_softmax);
    let text = r.config.to_toml();
    assert!(text.contains("pre_softmax = true"), "{text}");
    assert!(r.derived.iter().any(|d| d.key == "moe.pre_softmax"));
    assert_eq!(add(&text).unwrap().resolve(None).unwrap().model, r.model);
    let old = text.replace("pre_softmax = true", "pre_softmax = false");
    let refused = add(&old).unwrap().resolve(None).unwrap_err().to_string();
    assert!(refused.contains("moe.pre_softmax: sinkhorn weights several experts of a token"), "{refused}");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(&file, old).unwrap();
    assert_eq!(Recipe::read_stored(&file).unwrap().resolve(None).unwrap().model, r.model);
}

/// A pipeline needs several micro-batches for each stage, or it idles.
#[test]
fn derived_micro_batches_fill_a_pipeline() {
    let resolve = |set: &[&str]| {
        let mut recipe = Recipe::named("tiny").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        let r = recipe.resolve(None).unwrap();
        let count = r.config.train.global_batch / r.config.parallel.dp / r.plan.micro_batch;
        let reason = r.derived.into_iter().find(|d| d.key == "train.micro_batch").unwrap().reason;
        (r.plan.micro_batch, count, reason)
    };
    // One stage: as large as a pass may be.
    assert_eq!(resolve(&["parallel.dp=2"]).0, 8);
    // Sixteen sequences on two replicas cannot be four micro-batches for each of four stages.
    let (micro, count, reason) = resolve(&["parallel.pp=4", "parallel.dp=2"]);
    assert_eq!((micro, count), (1, 8));
    assert!(reason.contains("bubble of about 27 %"), "{reason}");
    let (micro, count, reason) = resolve(&["parallel.pp=4", "parallel.dp=2", "train.global_batch=256"]);
    assert_eq!((micro, count), (8, 16));
    assert!(reason.contains("bubble of about 16 %"), "{reason}");
    // A batch that fills the pipeline whatever the micro-batch keeps the micro-batch of one stage.
    let (micro, _, reason) = resolve(&["parallel.pp=2", "train.global_batch=1024"]);
    assert_eq!(micro, resolve(&["train.global_batch=1024"]).0);
    assert!(reason.contains("tokens"), "{reason}");
    assert_eq!(resolve(&["parallel.pp=2", "parallel.vp=2"]).0, 2);
}

/// A built-in recipe's warm-up fits the run that the user asks for; a user's own is taken as it is.
#[test]
fn the_warm_up_of_a_built_in_recipe_follows_the_length_of_the_run() {
    let hf = Recipe::named("llama-1b").unwrap().model_config(None).unwrap();
    let resolve = |set: &[&str]| {
        let mut recipe = Recipe::named("finetune-hf").unwrap();
        recipe.set_all(&["model.hf=/models/llama", "data.path=x"]).unwrap();
        recipe.set_all(set).unwrap();
        recipe.resolve(Some(&hf))
    };
    let warmup = |set: &[&str]| resolve(set).unwrap().config.schedule.warmup;
    assert_eq!(warmup(&[]), Some(50));
    assert_eq!(warmup(&["train.steps=500"]), Some(50));
    assert_eq!(warmup(&["train.steps=40"]), Some(4));
    let r = resolve(&["train.steps=40"]).unwrap();
    let reason = &r.derived.iter().find(|d| d.key == "schedule.warmup").unwrap().reason;
    assert_eq!(reason, "a tenth of the run, shorter than the recipe's 50 steps");
    assert_eq!(warmup(&["train.steps=40", "schedule.warmup=30"]), Some(30));
    assert!(resolve(&["train.steps=40", "schedule.warmup=50"]).is_err());
}

/// Betas that a recipe sets are those of Lion, also where Muon updates the matrices.
#[test]
fn betas_of_lion_are_derived_where_the_recipe_sets_none() {
    const RESTS: [&str; 2] = ["kind = \"lion\"", "kind = \"muon\"\nmuon = { rest = \"lion\" }"];
    for section in RESTS {
        let r = add(&format!("{TINY}[optimizer]\n{section}\n")).unwrap().resolve(None).unwrap();
        assert_eq!(r.config.optimizer.betas, [0.95, 0.98], "{section}");
        assert!(r.derived.iter().any(|d| d.key == "optimizer.betas"), "{section}");
        let own = format!("{TINY}[optimizer]\n{section}\nbetas = [0.5, 0.6]\n");
        let r = add(&own).unwrap().resolve(None).unwrap();
        assert_eq!(r.config.optimizer.betas, [0.5, 0.6], "{section}");
        assert!(r.derived.iter().all(|d| d.key != "optimizer.betas"), "{section}");
    }
}

/// A constant learning rate has no decay that the warm-up must end before.
#[test]
fn a_warm_up_may_last_longer_than_a_run_at_a_constant_rate() {
    let text = format!("{TINY}schedule.decay = \"constant\"\nschedule.warmup = 20\n");
    let r = add(&text).unwrap().resolve(None).unwrap();
    let lr = ferrotron_core::schedule::LrSchedule {
        max: r.config.optimizer.lr,
        min: r.plan.min_lr,
        init: r.config.schedule.init_lr,
        warmup: r.plan.warmup_samples,
        decay: r.plan.decay_samples,
        style: ferrotron_core::schedule::Decay::Constant,
        wsd: 0,
        wsd_style: Default::default(),
    };
    lr.check().unwrap();
    assert!((lr.at(r.plan.samples) - lr.max / 2.0).abs() < 1e-12);
}

#[test]
fn lengths_in_samples_follow_the_batch_ramp() {
    let text = "[train]\nsteps = 10\nglobal_batch = 8\nramp = [2, 2, 12]\n[schedule]\nwarmup = 3\ndecay = \"wsd\"\nwsd_steps = 2\n[model]\npreset = \"tiny\"\n";
    let p = add(text).unwrap().resolve(None).unwrap().plan;
    // Levels of 4 samples: batches 2 2 4 6 | 8 8 8 8 8 8.
    let batches = [2, 2, 4, 6, 8, 8, 8, 8, 8, 8];
    assert_eq!(p.samples, batches.iter().sum::<u64>());
    assert_eq!(p.warmup_samples, 8);
    assert_eq!((p.decay_samples, p.wsd_samples), (p.samples, 16));
    assert_eq!(p.micro_batch, 2);
    assert_eq!(p.tokens, p.samples * 256);
}

#[test]
fn presets_can_be_changed_by_explicit_sizes() {
    let model = |text: &str| add(&format!("{TINY}{text}")).unwrap().model_config(None).unwrap();
    let m = model("model.layers = 2\nmodel.head_dim = 32\nmodel.window = 16\nmodel.tied = false\n");
    assert_eq!((m.layers, m.head_dim, m.window, m.tied), (2, 32, Some(16), false));
    assert_eq!(m.local_layers, vec![true; 2]);
    assert_eq!(m.rope(0).unwrap().rotary_dim, 32);
    assert_eq!(m.attn_scale, (1.0 / 32f64.sqrt()) as f32);
    let m =
        model("model.positions = \"learned\"\nmodel.norm = \"layernorm\"\nmodel.activation = \"gelu_erf\"\n");
    assert!(m.rope(0).is_none());
    let hf = Recipe::named("qwen3-0.6b").unwrap().model_config(None).unwrap();
    let e = add("model.hf = \"d\"\nmodel.layers = 3\ntrain.steps = 1\ndata.path = \"x\"")
        .unwrap()
        .resolve(Some(&hf));
    assert_eq!(
        one_sentence(&e.unwrap_err()),
        "r.toml:2: model.layers: the weights of model.hf were made for 28; leave the key out"
    );
}

/// Weights of experts have their shapes, and a router was trained for what it computes.
#[test]
fn moe_keys_fit_the_weights_of_a_folder() {
    let with = |model: &ModelConfig, keys: &str| {
        let text = format!("model.hf = \"d\"\ntrain.steps = 1\ndata.path = \"x\"\ndata.seq_len = 16\n{keys}");
        add(&text).unwrap().resolve(Some(model)).map(|r| r.model).map_err(|e| one_sentence(&e))
    };
    let mixtral = Recipe::named("mixtral-8x7b").unwrap().model_config(None).unwrap();
    for (key, made_for) in [
        ("moe.experts = 4", "8"),
        ("moe.ffn = 64", "14336"),
        ("moe.score_function = \"sigmoid\"", "\"softmax\""),
        ("moe.pre_softmax = true", "false"),
        ("moe.latent = 64", "none"),
        ("moe.dense_layers = [0]", "none"),
    ] {
        let name = key.split(' ').next().unwrap();
        let want =
            format!("r.toml:5: {name}: the weights of model.hf were made for {made_for}; leave the key out");
        assert_eq!(with(&mixtral, key).unwrap_err(), want);
    }
    // Other keys decide how the experts are trained, and a stored recipe repeats what the folder says.
    let same =
        "moe.experts = 8\nmoe.ffn = 14336\nmoe.layer_freq = 1\nmoe.topk = 1\nmoe.balance = \"seq_aux\"";
    assert_eq!(with(&mixtral, same).unwrap().moe.unwrap().topk, 1);
    let sinkhorn = "moe.balance = \"sinkhorn\"\nmoe.pre_softmax = true";
    assert!(with(&mixtral, sinkhorn).unwrap().moe.unwrap().pre_softmax);
    let dense = Recipe::named("qwen3-0.6b").unwrap().model_config(None).unwrap();
    assert!(
        with(&dense, "moe.experts = 8").unwrap_err().contains("weights of model.hf are of a dense model")
    );
}

#[test]
fn mla_is_one_key() {
    const LATENT: &str = "{ kv_lora_rank = 24, nope_dim = 16, rope_dim = 8, v_dim = 12 }";
    let inline = add(&format!("{TINY}model.mla = {LATENT}\n")).unwrap();
    let section = format!("{TINY}[model.mla]\nkv_lora_rank = 24\nnope_dim = 16\nrope_dim = 8\nv_dim = 12\n");
    assert_eq!(inline.config, add(&section).unwrap().config);
    let mut set = add(TINY).unwrap();
    set.set(&format!("model.mla={LATENT}")).unwrap();
    assert_eq!(inline.config, set.config);
    let r = inline.resolve(None).unwrap();
    let (m, latent) = (&r.model, r.model.mla.unwrap());
    assert_eq!((m.head_dim, m.kv_heads, m.value_dim(), m.attn_sink), (24, 4, 12, false));
    assert_eq!((latent.q_lora_rank, latent.norm_eps), (None, 1e-6));
    let rope = m.rope(0).unwrap();
    assert_eq!((rope.rotary_dim, rope.interleaved), (8, true));
    assert_eq!(m.attn_scale, (1.0 / 24f64.sqrt()) as f32);
    // The written configuration parses to the same value.
    let text = r.config.to_toml();
    assert!(
        text.contains("\nmla = { kv_lora_rank = 24, nope_dim = 16, norm_eps = 1e-6, rope_dim = 8"),
        "{text}"
    );
    assert_eq!(add(&text).unwrap().resolve(None).unwrap().model, r.model);
    // From explicit sizes, head_dim follows from model.mla.
    let sizes = "model.layers = 2\nmodel.hidden = 30\nmodel.heads = 4\nmodel.vocab = 256\ntrain.steps = 1\n\
                 data.seq_len = 16\ndata.path = \"embedded\"\nmodel.attn_sink = true\n";
    let m = add(&format!("{sizes}model.mla = {LATENT}\n")).unwrap().resolve(None).unwrap().model;
    assert_eq!((m.head_dim, m.kv_heads, m.attn_sink), (24, 4, true));
    for (text, words) in [
        ("model.mla = 3", "expected a table such as { kv_lora_rank = 512"),
        ("model.mla = { kv_lora_rank = 24 }", "expected a table"),
        (
            "model.mla = { kv_lora_rank = 24, nope_dim = 16, rope_dim = 8, v_dim = 12, x = 1 }",
            "expected a table",
        ),
        (
            "model.mla = { kv_lora_rank = 0, nope_dim = 16, rope_dim = 8, v_dim = 12 }",
            "mla.kv_lora_rank is 0",
        ),
        ("model.mla = { kv_lora_rank = 8, nope_dim = 16, rope_dim = 7, v_dim = 12 }", "even number"),
        ("model.mla = { kv_lora_rank = 8, nope_dim = 16, rope_dim = 8, v_dim = 300 }", "mla.v_dim is 300"),
        (
            "model.mla = { kv_lora_rank = 8, nope_dim = 16, rope_dim = 8, v_dim = 12, norm_eps = 0.0 }",
            "norm_eps",
        ),
        (
            &format!("model.mla = {LATENT}\nmodel.head_dim = 32"),
            "model.head_dim: must be 24, nope_dim + rope_dim",
        ),
        (&format!("model.mla = {LATENT}\nmodel.kv_heads = 2"), "model.kv_heads: must be 4"),
        (&format!("model.mla = {LATENT}\nmodel.qk_norm = true"), "norms of its own"),
        (&format!("model.mla = {LATENT}\nmodel.positions = \"learned\""), "rotary"),
        ("model.kv_lora_rank = 24", "here it is model.mla"),
    ] {
        let e = fails(&format!("{TINY}{text}\n"));
        assert!(e.contains(words), "{text}: {e}");
    }
}
