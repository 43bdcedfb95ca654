//! Suggestions for unknown keys: names that other frameworks use, and misspellings.

use super::{KEYS, KeyInfo, SECTIONS, renamed};

/// Options of other frameworks that have no key here, and what to do instead.
const ELSEWHERE: &[(&[&str], &str)] = &[
    (
        &["save", "save_dir", "output_dir", "out_dir", "out", "checkpoint_dir", "log_dir"],
        "the run folder is given on the command line: --out DIR",
    ),
    (
        &["resume", "load_dir", "resume_from_checkpoint"],
        "the same command with the same --out resumes by itself",
    ),
    (&["device", "accelerator"], "the device is given on the command line: --device cpu"),
    (&["threads", "num_threads", "omp_num_threads"], "threads are given on the command line: --threads N"),
    (&["ranks", "nproc_per_node", "devices", "num_nodes"], "ranks are given on the command line: --ranks N"),
    (
        &["gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "num_microbatches"],
        "accumulation is train.global_batch / train.micro_batch; set those",
    ),
    (&["train_samples"], "a run's length is train.steps, train.tokens or train.epochs"),
    (
        &["num_workers", "dataloader_type", "dataloader_num_workers", "prefetch_factor", "mmap_bin_files"],
        "data is read without workers; leave it out",
    ),
    (
        &["deterministic", "deterministic_mode", "use_deterministic_algorithms"],
        "runs are always deterministic; leave it out",
    ),
    (
        &[
            "calculate_per_token_loss",
            "loss_reduction",
            "accumulate_allreduce_grads_in_fp32",
            "grad_reduce_in_fp32",
        ],
        "the loss is always the mean over tokens and gradients are always summed in f32; leave it out",
    ),
    (
        &["wandb", "wandb_project", "use_wandb", "log_wandb", "report_to"],
        "metrics are logged to events.jsonl in the run folder, and with logging.tensorboard = true to TensorBoard files; \
         leave it out",
    ),
    (
        &["lora", "use_lora", "use_peft", "lora_config"],
        "lora.rank above 0 trains LoRA adapters of that rank beside the frozen weights of model.hf; `ferrotron explain lora.rank` \
         says more",
    ),
    (&["sequence_parallel"], "sequence parallelism is on wherever parallel.tp is above 1; leave it out"),
    (&["use_megatron_fsdp", "fsdp"], "parallel.zero = 3 shards weights, gradients and optimizer state"),
    (
        &["data_parallel_replicate_degree", "data_parallel_shard_degree"],
        "set parallel.dp to replicate degree x shard degree; parallel.zero = 3 shards over all data-parallel ranks, and \
         parallel.fsdp_group = shard degree x parallel.cp over groups of them",
    ),
    (
        &["num_distributed_optimizer_instances"],
        "set parallel.zero = 3 and parallel.fsdp_group to the data-parallel ranks (parallel.dp x parallel.cp) divided by it",
    ),
    (
        &["num_layers_per_virtual_pipeline_stage"],
        "set parallel.vp to the number of layers divided by parallel.pp times that",
    ),
    (
        &["decoupled_min_lr", "embedding_lr", "embedding_learning_rate", "lm_head_lr", "lr_head", "embed_lr"],
        "optimizer.groups gives parameters learning rates of their own: { params = [\"embedding\", \"lm_head\"], lr_factor = 0.5 }",
    ),
    (
        &[
            "attn_softcap",
            "attn_logit_softcapping",
            "final_softcap",
            "final_logit_softcapping",
            "rope_scaling",
            "rotary_percent",
            "partial_rotary_factor",
            "embed_scale",
            "attn_scale",
            "query_pre_attn_scalar",
            "pre_norms",
            "post_norms",
            "no_rope_layers",
            "qk_norm_all_heads",
        ],
        "it comes with model.preset or model.hf and has no key of its own",
    ),
    (
        &["padded_vocab_size"],
        "set model.vocab to the size without padding; the vocabulary is padded in memory only, as GEMMs need it",
    ),
    (
        &["make_vocab_size_divisible_by", "should_pad_vocab"],
        "the vocabulary is padded in memory only, as GEMMs need it; leave it out",
    ),
    (
        &[
            "compile",
            "torch_compile",
            "flash_attention",
            "attn_implementation",
            "attention_backend",
            "use_flash_attn",
        ],
        "kernels are chosen automatically; leave it out",
    ),
];

/// Section names of other frameworks.
const SECTION_ALIASES: &[(&str, &str)] = &[
    ("dataset", "data"),
    ("training", "train"),
    ("trainer", "train"),
    ("metrics", "logging"),
    ("logger", "logging"),
    ("validation", "eval"),
    ("evaluation", "eval"),
    ("optim", "optimizer"),
    ("scheduler", "schedule"),
    ("lr_scheduler", "schedule"),
    ("mixed_precision", "precision"),
    ("dtype", "precision"),
    ("ckpt", "checkpoint"),
    ("checkpointing", "checkpoint"),
    ("parallelism", "parallel"),
    ("dist", "parallel"),
    ("ddp", "parallel"),
    ("sampling", "generate"),
    ("inference", "generate"),
];

/// A suggestion for an unknown key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Suggestion {
    /// The key that another framework calls so, or that is in another section.
    Known(&'static str),
    /// Keys of similar spelling.
    Near(Vec<&'static str>),
    /// There is no such key; what to do instead.
    Advice(&'static str),
    /// No suggestion.
    Nothing,
}

/// The suggestion for `key`, with or without a section.
pub fn suggest(key: &str) -> Suggestion {
    let key = key.trim().trim_start_matches('-').to_ascii_lowercase().replace('-', "_");
    let parts: Vec<&str> = key.split('.').collect();
    let name = parts.last().copied().unwrap_or_default();
    let section = parts.len().checked_sub(2).and_then(|i| parts.get(i)).copied().map(real_section);

    if let Some(new) = section.and_then(|section| renamed::new_name(&format!("{section}.{name}"))) {
        return Suggestion::Known(new);
    }
    // A key with a prefix (`cfg.train.steps`, `train.eval.every`), or with another framework's name of its section
    // (`trainer.steps`).
    if let Some(k) = KEYS.iter().find(|k| Some(k.section) == section && k.name == name) {
        return Suggestion::Known(k.key);
    }
    // Another framework's name; the section decides where several keys share it.
    let known = |k: &&KeyInfo| k.aliases.contains(&name);
    if let Some(k) = KEYS.iter().filter(known).max_by_key(|k| (Some(k.section) == section) as u8) {
        return Suggestion::Known(k.key);
    }
    if let Some((_, advice)) = ELSEWHERE.iter().find(|(names, _)| names.contains(&name)) {
        return Suggestion::Advice(advice);
    }
    // Nearly a key of the section that was named: `moe.top_k` is moe.topk rather than generate.top_k.
    let mut of_section = KEYS.iter().filter(|k| Some(k.section) == section);
    let near_enough = |k: &&KeyInfo| (3..64).contains(&name.len()) && distance(name, k.name) == 1;
    if let Some(k) = of_section.find(near_enough) {
        return Suggestion::Near(vec![k.key]);
    }
    // The right name without a section, or in a wrong one.
    let same: Vec<_> = KEYS.iter().filter(|k| k.name == name).map(|k| k.key).collect();
    match same.as_slice() {
        [] => {}
        [one] => return Suggestion::Known(one),
        _ => return Suggestion::Near(same),
    }
    near(&key, name)
}

fn near(key: &str, name: &str) -> Suggestion {
    // Long input is no misspelling, and computing the edit distance costs the product of both lengths.
    const LONGEST: usize = 64;
    if name.is_empty() || key.len() > LONGEST {
        return Suggestion::Nothing;
    }
    let whole = key.contains('.');
    let best = KEYS
        .iter()
        .map(|k| (if whole { distance(key, k.key) } else { distance(name, k.name) }, k.key))
        .min_by_key(|(d, _)| *d);
    match best {
        Some((d, k)) if d <= 2.min(1 + name.len() / 4).max(name.len() / 3) => Suggestion::Near(vec![k]),
        _ => Suggestion::Nothing,
    }
}

/// The section whose name is nearest to `name`, if one is near.
pub fn suggest_section(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let real = real_section(&name);
    let (d, best) = SECTIONS.iter().map(|s| (distance(real, s.name), s.name)).min_by_key(|(d, _)| *d)?;
    (d <= 2 && d < real.len()).then_some(best)
}

fn real_section(name: &str) -> &str {
    SECTION_ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, real)| real)
}

/// The name in `names` nearest to `name`, if one is near.
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let (d, best) = names.into_iter().map(|n| (distance(name, n), n)).min_by_key(|(d, _)| *d)?;
    (d <= 1 + name.chars().count() / 3).then_some(best)
}

/// Edit distance: insertions, deletions, replacements and swaps of neighbours, each counted one.
pub fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let same = a[i - 1] == b[j - 1];
            row[j] = (last[j] + 1).min(row[j - 1] + 1).min(last[j - 1] + !same as usize);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An alias of a key comes first: advice for the same name would never be shown.
    #[test]
    fn advice_is_for_names_that_no_key_answers_to() {
        for name in ELSEWHERE.iter().flat_map(|(names, _)| *names) {
            let known = KEYS.iter().find(|k| k.aliases.contains(name));
            assert!(known.is_none(), "{name} is an alias of {}", known.map_or("", |k| k.key));
        }
    }

    #[test]
    fn keys_that_advice_names_exist() {
        let word = |c: char| !(c.is_ascii_lowercase() || c == '_' || c == '.');
        let mut found = 0;
        for (_, advice) in ELSEWHERE {
            for key in advice.split(word).map(|w| w.trim_end_matches('.')) {
                let Some((section, _)) = key.split_once('.') else { continue };
                if SECTIONS.iter().any(|s| s.name == section) {
                    assert!(KeyInfo::find(key).is_some(), "{key}");
                    found += 1;
                }
            }
        }
        assert!(found > 5, "{found}");
    }

    #[test]
    fn adapters_and_learning_rates_of_groups_have_keys() {
        assert_eq!(suggest("peft"), Suggestion::Known("lora.rank"));
        assert!(matches!(suggest("use_lora"), Suggestion::Advice(text) if text.contains("lora.rank")));
        assert!(
            matches!(suggest("embedding_lr"), Suggestion::Advice(text) if text.contains("optimizer.groups"))
        );
    }

    /// Numbers that mean something else than those of our keys.
    #[test]
    fn names_whose_values_differ_get_advice() {
        for (name, key) in [
            ("parallelism.data_parallel_replicate_degree", "parallel.dp"),
            ("data_parallel_shard_degree", "parallel.fsdp_group"),
            ("--num-distributed-optimizer-instances", "parallel.fsdp_group"),
            ("padded_vocab_size", "model.vocab"),
        ] {
            let found = suggest(name);
            assert!(matches!(found, Suggestion::Advice(text) if text.contains(key)), "{name}: {found:?}");
        }
    }
}
