//! The key table, layered sources and `--set`, and unknown keys.

use super::{add, fails, one_sentence};
use ferrotron_core::config::*;
use std::collections::BTreeSet;

#[test]
fn the_key_table_is_consistent() {
    let names: BTreeSet<_> = KEYS.iter().map(|k| k.key).collect();
    assert_eq!(names.len(), KEYS.len(), "a key is declared twice");
    for k in KEYS {
        assert_eq!(k.key, format!("{}.{}", k.section, k.name));
        assert!(k.doc.ends_with(['.', '?']) && k.doc.len() > 10, "{}: {}", k.key, k.doc);
        assert!(!(k.expects)().is_empty());
        for alias in k.aliases {
            assert!(!names.contains(alias), "{alias} is a key itself");
        }
        // Every alias suggests a key; with its section, this one.
        for alias in k.aliases {
            assert_eq!(suggest(&format!("{}.{alias}", k.section)), Suggestion::Known(k.key), "{alias}");
            assert!(matches!(suggest(alias), Suggestion::Known(_)), "{alias}");
        }
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

/// Of two exclusive keys in one command line, neither is the one that was meant.
#[test]
fn one_command_line_cannot_set_exclusive_keys() {
    for (a, b) in [
        ("train.steps=7", "train.tokens=1M"),
        ("train.steps=7", "train.epochs=2"),
        ("train.tokens=1M", "train.epochs=2"),
        ("model.preset=tiny", "model.hf=/models/x"),
    ] {
        let [first, second] = [a, b].map(|s| s.split('=').next().unwrap());
        let mut r = add("[train]\nglobal_batch = 4\n").unwrap();
        let error = one_sentence(&r.set_all(&[a, b]).unwrap_err());
        assert_eq!(error, format!("--set: {second}: {first} is set as well; keep one of the two"));
        // The recipe's own is replaced, and the same key may come twice.
        let mut r = add("[train]\nsteps = 4\n").unwrap();
        r.set_all(&[b, b]).unwrap();
    }
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
