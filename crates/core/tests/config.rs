//! Recipes: layers, suggestions, derived values, refusals, and damaged files.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::Error;
use ferrotron_core::config::*;
use std::collections::BTreeSet;

fn add(text: &str) -> Result<Recipe, Error> {
    let mut recipe = Recipe::default();
    recipe.add("r.toml", text).map(|()| recipe)
}

fn fails(text: &str) -> String {
    match add(text).and_then(|r| r.resolve(None)) {
        Ok(_) => panic!("should be refused:\n{text}"),
        Err(e) => one_sentence(&e),
    }
}

fn one_sentence(e: &Error) -> String {
    let text = e.to_string();
    assert!(!text.contains('\n') && !text.is_empty(), "{text:?}");
    assert!(e.hint().is_none_or(|h| !h.contains('\n')));
    text
}

const TINY: &str = "model.preset = \"tiny\"\ntrain.steps = 10\n";

#[test]
fn the_table_of_keys_is_sound() {
    // Those of mixtures and of further predictions are for models that have them: who trains a plain decoder has fewer than
    // a hundred.
    let apart = KEYS.iter().filter(|k| ["moe", "mtp"].contains(&k.section)).count();
    assert!(KEYS.len() - apart < 100 && apart < 40, "{} keys, {apart} of them apart", KEYS.len());
    let names: BTreeSet<_> = KEYS.iter().map(|k| k.key).collect();
    assert_eq!(names.len(), KEYS.len(), "a key is declared twice");
    for k in KEYS {
        assert_eq!(k.key, format!("{}.{}", k.section, k.name));
        assert!(k.doc.ends_with(['.', '?']) && k.doc.len() > 10, "{}: {}", k.key, k.doc);
        assert!(!(k.expects)().is_empty());
        for alias in k.aliases {
            assert!(!names.contains(alias), "{alias} is a key itself");
        }
        // Every alias leads to a key; with the section in front, to this one.
        for alias in k.aliases {
            assert_eq!(suggest(&format!("{}.{alias}", k.section)), Suggestion::Known(k.key), "{alias}");
            assert!(matches!(suggest(alias), Suggestion::Known(_)), "{alias}");
        }
    }
}

#[test]
fn every_recipe_resolves_and_its_resolution_is_stable() {
    for r in RECIPES {
        assert!(r.summary().len() > 20, "{}", r.name);
        let mut recipe = Recipe::named(r.name).unwrap();
        if recipe.config.data.path.0.is_empty() {
            recipe.set("data.path=corpus_text_document").unwrap();
        }
        let hf = Recipe::named("llama-1b").unwrap().model_config(None).unwrap();
        if r.name == "finetune-hf" {
            recipe.set("model.hf=/models/llama").unwrap();
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
    // A short trial of it must not need another key changed.
    for steps in [1, 2, 5, 11] {
        let mut short = Recipe::named("tiny").unwrap();
        short.put_key("train.steps", steps).unwrap();
        assert_eq!(short.resolve(None).unwrap().plan.steps, steps as u64);
    }
}

#[test]
fn later_layers_win_and_alternatives_replace_each_other() {
    let mut r = add("[train]\ntokens = \"1M\"\nglobal_batch = 4\n[model]\npreset = \"tiny\"\n").unwrap();
    assert_eq!(r.config.train.tokens, Some(Count(1_000_000)));
    r.set("train.steps=7").unwrap();
    assert_eq!((r.config.train.steps, r.config.train.tokens), (Some(7), None));
    r.set("train.tokens=2e6").unwrap();
    assert_eq!((r.config.train.steps, r.config.train.tokens), (None, Some(Count(2_000_000))));
    r.set("model.hf = /models/x y").unwrap();
    assert_eq!((r.config.model.preset.as_deref(), r.config.model.hf.as_deref()), (None, Some("/models/x y")));
    assert!(r.is_set("train.global_batch") && !r.is_set("train.seed"));
    let both = fails("model.preset = \"tiny\"\n[train]\nsteps = 1\ntokens = 2\n");
    assert_eq!(both, "r.toml:4: train.tokens: train.steps is set as well; keep one of the two");
}

#[test]
fn set_parses_values_by_type() {
    let ok = [
        ("train.steps=100", "steps = 100"),
        ("train.steps = 1_000", "steps = 1000"),
        ("optimizer.lr=1e-3", "lr = 0.001"),
        ("optimizer.lr=1", "lr = 1.0"),
        ("optimizer.eps=1e-9", "eps = 1e-9"),
        ("optimizer.betas=[0.8, 0.9]", "betas = [0.8, 0.9]"),
        ("precision.dtype=f32", "dtype = \"f32\""),
        ("precision.dtype=\"f32\"", "dtype = \"f32\""),
        ("data.path=a/b", "path = [\"a/b\"]"),
        ("data.path=[\"a\", \"b\"]", "path = [\"a\", \"b\"]"),
        ("data.split=90,5,5", "split = [90.0, 5.0, 5.0]"),
        ("train.tokens=\"3.5K\"", "tokens = 3500"),
        ("train.tokens=20B", "tokens = 20000000000"),
        ("train.recompute=full", "recompute = \"full\""),
        ("train.recompute=[\"norm\", \"mlp\"]", "recompute = [\"norm\", \"mlp\"]"),
        ("train.recompute=attention", "recompute = [\"attention\"]"),
        ("checkpoint.at_end=false", "at_end = false"),
        ("generate.prompt=Once upon = a time", "prompt = \"Once upon = a time\""),
        ("generate.prompt=a\nb = 2", "prompt = \"\"\"\na\nb = 2\"\"\""),
        ("model.activation=gelu_tanh", "activation = \"gelu_tanh\""),
        ("precision.loss_scale=65536", "loss_scale = 65536.0"),
        ("precision.loss_scale=[65536, 500]", "loss_scale = [65536.0, 500]"),
    ];
    for (set, line) in ok {
        let mut r = Recipe::default();
        r.set(set).unwrap_or_else(|e| panic!("{set}: {e}"));
        let text = r.config.to_toml();
        assert!(text.contains(&format!("{line}\n")), "{set}: {line} not in\n{text}");
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), r.config, "{set}");
    }
    let bad = [
        ("train.steps=abc", "--set: train.steps: expected a whole number, found \"abc\""),
        ("train.steps=-1", "--set: train.steps: expected a whole number, found -1"),
        ("train.steps=1.5", "--set: train.steps: expected a whole number, found 1.5"),
        (
            "train.tokens=20MB",
            "--set: train.tokens: expected a whole number such as 20000000, 2e7 or \"20M\", found \"20MB\"",
        ),
        ("optimizer.lr=nan", "--set: optimizer.lr: expected a number, found NaN, which is not finite"),
        (
            "precision.dtype=fp16",
            "--set: precision.dtype: expected one of \"f32\", \"bf16\", \"f16\", found \"fp16\"",
        ),
        ("optimizer.betas=[0.9]", "--set: optimizer.betas: expected a list of 2 numbers, found [0.9]"),
        (
            "train.recompute=mpl",
            "--set: train.recompute: expected \"none\", \"full\" or a list of \"norm\", \"attention\", \"activation\", \"mlp\", found \"mpl\"",
        ),
        ("train.steps", "--set: \"train.steps\" is not key=value; write for example --set train.steps=100"),
    ];
    for (set, message) in bad {
        assert_eq!(one_sentence(&Recipe::default().set(set).unwrap_err()), message);
    }
}

#[test]
fn unknown_names_get_the_nearest_one_or_advice() {
    let cases = [
        ("train.stpes", "did you mean train.steps?"),
        ("optimizer.weight_deacy", "did you mean optimizer.weight_decay?"),
        ("lr", "here it is optimizer.lr"),
        ("train.lr", "here it is optimizer.lr"),
        ("global_batch_size", "here it is train.global_batch"),
        ("model.num_layers", "here it is model.layers"),
        ("--micro-batch-size", "here it is train.micro_batch"),
        ("train.eval.every", "here it is eval.every"),
        ("trainer.max_steps", "here it is train.steps"),
        ("seed", "did you mean data.seed or train.seed?"),
        ("checkpoint.save_interval", "here it is checkpoint.every"),
        ("tensor_model_parallel_size", "here it is parallel.tp"),
        ("train.num_workers", "read without workers"),
        ("gradient_accumulation_steps", "train.global_batch / train.micro_batch"),
        ("model.num_moe_experts", "here it is moe.experts"),
        ("zzzzzzz", "`ferrotron explain` lists every key"),
    ];
    for (key, part) in cases {
        let e = Recipe::default().set(&format!("{key}=1")).unwrap_err();
        let text = one_sentence(&e);
        assert!(text.starts_with(&format!("--set: {key}: unknown key; ")) && text.contains(part), "{text}");
    }
    let e = add("# a\n[train]\nsteps = 1\nstpes = 2\n").unwrap_err();
    assert_eq!(one_sentence(&e), "r.toml:4: train.stpes: unknown key; did you mean train.steps?");
    let e = add("[optim]\nlr = 1\n").unwrap_err();
    assert!(one_sentence(&e).starts_with("r.toml:1: optim: unknown section; the sections are model, "));
    assert_eq!(e.hint(), Some("did you mean the section [optimizer]?"));
    let e = Recipe::open("tinny").unwrap_err();
    assert_eq!(e.hint(), Some("did you mean tiny?"));
    assert!(Recipe::open("missing/file.toml").unwrap_err().to_string().contains("missing/file.toml"));
}

#[test]
fn edit_distance_by_definition() {
    // The recursive definition, for short words.
    fn slow(a: &[u8], b: &[u8]) -> usize {
        let (Some(x), Some(y)) = (a.last(), b.last()) else { return a.len().max(b.len()) };
        let (a1, b1) = (&a[..a.len() - 1], &b[..b.len() - 1]);
        let mut d = (slow(a1, b) + 1).min(slow(a, b1) + 1).min(slow(a1, b1) + (x != y) as usize);
        if a.len() > 1 && b.len() > 1 && *x == b[b.len() - 2] && a[a.len() - 2] == *y {
            d = d.min(slow(&a[..a.len() - 2], &b[..b.len() - 2]) + 1);
        }
        d
    }
    let words = ["", "a", "ab", "ba", "abc", "acb", "steps", "stpes", "lr", "clip", "warmup"];
    for a in words {
        for b in words {
            assert_eq!(distance(a, b), slow(a.as_bytes(), b.as_bytes()), "{a} {b}");
        }
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
    // 32 x 1024 tokens a step.
    assert_eq!(get("train.steps"), Some("4"));
    assert_eq!(get("optimizer.min_lr"), Some("3e-5"));
    assert_eq!(get("schedule.decay_steps"), Some("4"));
    assert!(r.derived.iter().all(|d| d.reason.len() > 5));
    assert_eq!(r.model.attn_scale, (1.0 / 32f64.sqrt()) as f32);
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

#[test]
fn latent_attention_is_one_key() {
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
    // What is written out reads back.
    let text = r.config.to_toml();
    assert!(
        text.contains("\nmla = { kv_lora_rank = 24, nope_dim = 16, norm_eps = 1e-6, rope_dim = 8"),
        "{text}"
    );
    assert_eq!(add(&text).unwrap().resolve(None).unwrap().model, r.model);
    // From sizes alone, the width of heads is that of the key.
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

#[test]
fn impossible_combinations_are_refused_with_the_way_out() {
    let cases = [
        (
            "parallel.ep = 2",
            "r.toml:3: parallel.ep: ep=2 needs a mixture of experts, which this model is not; take ep=1",
        ),
        ("parallel.dp = 0", "r.toml:3: parallel.dp: must be at least 1"),
        ("parallel.vp = 2", "r.toml:3: parallel.vp: needs a pipeline"),
        ("parallel.stages = \"Et|L\"", "parallel.stages"),
        ("parallel.zero = 3", "r.toml:3: parallel.zero: must be 0, 1 or 2"),
        ("parallel.tp = 3", "parallel.tp: tp=3 does not divide"),
        (
            "train.micro_batch = 5",
            "r.toml:3: train.micro_batch: 5 does not divide train.global_batch = 32; change one",
        ),
        ("data.seq_len = 257", "r.toml:3: data.seq_len: 257 tokens are longer than the model's 256"),
        ("data.seq_len = 0", "at least 1"),
        ("model.kv_heads = 3", "r.toml:3: model.kv_heads: 3 key/value heads do not divide 4"),
        ("model.head_dim = 33", "even number of channels"),
        ("model.heads = 0", "model.heads: 0 is too small"),
        ("model.layers = 99999999", "too large"),
        ("model.window = 0", "a token sees itself"),
        ("model.vocab = 100\ndata.path = \"embedded\"", "256 bytes"),
        ("data.eod = 256", "outside the vocabulary"),
        ("data.weights = [1, 2]", "2 weights for 0 paths"),
        ("data.path = [\"a\", \"embedded\"]", "stands alone"),
        ("data.split = [0, 1, 0]", "above 0"),
        ("eval.every = 5\ndata.split = [1, 0, 0]", "no validation data"),
        ("eval.every = 5\neval.batches = 0", "r.toml:4: eval.batches: 0 is too small"),
        ("optimizer.lr = 0", "above 0"),
        ("optimizer.min_lr = 1", "between 0 and optimizer.lr"),
        ("optimizer.betas = [0.9, 1.0]", "below 1"),
        ("optimizer.clip = -1", "0 means no clipping"),
        ("schedule.warmup = 10", "r.toml:3: schedule.warmup: 10 steps of warm-up leave none"),
        ("schedule.decay = \"wsd\"\nschedule.wsd_steps = 10", "do not fit"),
        ("train.ramp = [3, 2, 10]", "do not lead from 3 to"),
        ("train.ramp = [64, 2, 10]", "above train.global_batch"),
        ("train.ramp = [8, 8, 0]", "at least 1"),
        ("train.ramp = [8, 8, 10]\ntrain.micro_batch = 16", "multiples of train.micro_batch"),
        ("dropout.hidden = 1.0", "below 1"),
        (
            "train.graph = \"on\"\ndropout.hidden = 0.1",
            "r.toml:3: train.graph: steps cannot be replayed: with dropout.hidden",
        ),
        ("train.graph = \"on\"\ndata.reset_at_documents = true", "with data.reset_at_documents"),
        ("train.graph = \"on\"\nparallel.dp = 2", "several ranks"),
        ("train.graph = \"maybe\"", "expected one of \"auto\", \"on\", \"off\", found \"maybe\""),
        ("generate.tokens = 256", "ask for fewer"),
        ("generate.top_p = 0", "at most 1"),
        ("train.global_batch = 99999999999999", "too large"),
        ("optimizer.master = \"bf16\"", "expected one of \"f32\", \"remainder\", found \"bf16\""),
        ("precision.master = \"f32\"", "optimizer.master"),
        ("optimizer.moments = \"fp4\"", "expected one of \"f32\", \"bf16\", \"f16\", \"fp8\""),
        ("optimizer.master = \"remainder\"\nprecision.dtype = \"f32\"", "their own masters"),
        ("precision.weights = \"fp8\"", "precision.weights: weights in bytes need 8-bit products"),
        ("precision.weights = \"fp8\"\nprecision.scaling = \"mxfp8\"", "emulated"),
        (
            "precision.weights = \"fp8\"\nprecision.scaling = \"block\"\nprecision.except = [\"attn\", \"mlp:output\"]",
            "precision.weights: no weight is in 8-bit products alone",
        ),
        ("precision.weights = \"fp8\"\nprecision.scaling = \"nvfp4\"", "emulated"),
        (
            "precision.weights = \"fp8\"\nprecision.scaling = \"current\"\noptimizer.master = \"remainder\"",
            "a remainder completes bf16 weights",
        ),
        ("precision.fp8_param_gather = true", "precision.weights"),
        ("model.rope_theta = 0", "above 0"),
        ("model.norm_eps = 1e-60", "above 0"),
    ];
    for (line, part) in cases {
        let text = fails(&format!("{TINY}{line}\n"));
        assert!(text.contains(part), "{line}: {text}");
    }
    assert!(fails("").contains("no model: set model.preset"));
    assert!(fails("model.layers = 2").contains("set model.hidden, model.heads, model.vocab as well"));
    assert!(fails("model.preset = \"tiny\"").contains("train.steps (or --steps) or train.tokens"));
    assert!(fails("model.preset = \"llama-1b\"\ntrain.steps = 1").contains("no data: set data.path"));
    assert!(fails("model.preset = \"tinny\"").contains("no preset is called \"tinny\""));
    assert!(
        fails(
            "model.preset = \"tiny\"\nmodel.positions = \"learned\"\nmodel.rope_theta = 1.0\ntrain.steps = 1"
        )
        .contains("positions are learned")
    );
}

/// A seeded generator good enough to damage files with.
struct Noise(u64);
impl Noise {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n.max(1)
    }
}

#[test]
fn damaged_files_are_errors_of_one_sentence_never_panics() {
    let pieces = [
        "[",
        "]",
        "=",
        "\"",
        "'''",
        "\n",
        ".",
        "1e999",
        "-1",
        "nan",
        "9223372036854775808",
        "0x",
        "#",
        "{",
        "}",
        ",",
        "\u{0}",
        "é",
        "[[train]]",
        "train",
        "1979-05-27",
        "[train]\n",
        "a.b.c=1\n",
        "true",
        "99999999999",
    ];
    let mut noise = Noise(7);
    let (mut good, mut bad) = (0, 0);
    for round in 0..6000 {
        let source = RECIPES[noise.below(RECIPES.len())].text;
        let mut text: Vec<char> = source.chars().collect();
        for _ in 0..1 + noise.below(4) {
            let at = noise.below(text.len());
            match noise.below(5) {
                0 => text.truncate(at),
                1 => _ = text.drain(at..(at + noise.below(12)).min(text.len())),
                2 => text.splice(at..at, pieces[noise.below(pieces.len())].chars()).for_each(drop),
                3 => {
                    let other: Vec<char> = text[at..(at + noise.below(30)).min(text.len())].to_vec();
                    let to = noise.below(text.len());
                    text.splice(to..to, other).for_each(drop);
                }
                _ if text.is_empty() => {}
                _ => text[at] = char::from(noise.below(128) as u8),
            }
        }
        let text: String = text.into_iter().collect();
        let mut recipe = Recipe::default();
        let result = recipe.add("r.toml", &text).and_then(|()| {
            recipe.set("train.steps=3")?;
            recipe.set("data.path=embedded")?;
            recipe.resolve(None)
        });
        match result {
            Ok(resolved) => {
                good += 1;
                let again = add(&resolved.config.to_toml()).unwrap().resolve(None);
                assert_eq!(again.unwrap().config, resolved.config, "round {round}:\n{text}");
            }
            Err(e) => {
                bad += 1;
                one_sentence(&e);
            }
        }
    }
    assert!(good > 200 && bad > 2000, "{good} good, {bad} bad: the damage is not what it was meant to be");
}

#[test]
fn files_that_are_not_text_or_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    std::fs::write(&path, b"[train]\nsteps = \xff\n").unwrap();
    let e = Recipe::read(&path).unwrap_err();
    assert!(
        one_sentence(&e).ends_with("r.toml:2: the file is not UTF-8 text; a recipe is a TOML file"),
        "{e}"
    );
    assert!(Recipe::read(dir.path()).is_err());
    let deep = format!("a = {}1{}", "[".repeat(5000), "]".repeat(5000));
    one_sentence(&add(&deep).unwrap_err());
    one_sentence(&add(&format!("{} = 1", vec!["a"; 5000].join("."))).unwrap_err());
    one_sentence(&Recipe::default().set(&format!("{}=1", "x".repeat(100_000))).unwrap_err());
}

#[test]
fn differences_name_the_keys() {
    let a = Recipe::named("tiny").unwrap();
    let mut b = a.clone();
    b.set("train.steps=500").unwrap();
    b.set("generate.prompt=hi").unwrap();
    let d = a.config.differences(&b.config);
    assert_eq!(
        d,
        vec![
            ("train.steps", "120".to_string(), "500".to_string()),
            ("generate.prompt", "unset".to_string(), "\"hi\"".to_string())
        ]
    );
}
