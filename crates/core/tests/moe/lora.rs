//! Adapters of experts under expert and expert tensor parallelism give the gradients of one rank.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::train::Trainer;

/// Gradients of the third step, by name; B is not zero any more.
fn gradients(on: &RankLayout, set: &[&str]) -> Vec<LogicalValues> {
    let base = ["lora.rank=3", "lora.alpha=6", "optimizer.kind=sgd", "optimizer.lr=0.5", "optimizer.clip=0"];
    let (resolved, on) = recipe(on, &keys(&[&base[..], set].concat()));
    let mut all = run(&on, |rank| {
        let sources = source::open(&resolved)?;
        let mut t = Trainer::new(rank, &resolved)?;
        for _ in 0..3 {
            t.train_step(&*sources.train)?;
        }
        t.gradients()
    })
    .unwrap()
    .swap_remove(0);
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

#[test]
fn adapters_of_experts_match_one_rank() {
    for set in [
        &[][..],
        &["lora.fused=true", "lora.exclude=[\"q_proj\", \"shared\"]"],
        &["lora.dora=true"],
        &["lora.dora=true", "lora.exclude=[\"up_proj\"]"],
    ] {
        let wanted = gradients(&one(), set);
        let moved = |kind: &str| {
            let found = wanted.iter().filter(|g| g.name.contains(".experts.") && g.name.contains(kind));
            found.flat_map(|g| &g.values).any(|x| *x != 0.0)
        };
        assert!(moved("lora_a") && moved("lora_b"), "{set:?}");
        assert_eq!(moved("lora_m"), set.contains(&"lora.dora=true"), "{set:?}");
        for text in ["ep=2", "ep=4,dp=4", "tp=2,ep=2,etp=1", "tp=2,ep=2,etp=2,dp=2", "ep=2,pp=2"] {
            if let Some(found) = difference(&gradients(&layout(text), set), &wanted, false) {
                panic!("{text} {set:?}: {found}");
            }
        }
    }
}

/// Four tokens with one expert each leave ranks without rows in many micro-batches.
#[test]
fn adapters_of_experts_without_rows() {
    let few = ["data.seq_len=4", "train.micro_batch=1", "moe.topk=1", "moe.pre_softmax=true"];
    for set in [&[][..], &["lora.dora=true"]] {
        for seed in 1..=4 {
            let seed = format!("train.seed={seed}");
            let set = [&few[..], set, &[&seed]].concat();
            let wanted = gradients(&one(), &set);
            if let Some(found) = difference(&gradients(&layout("ep=4,dp=4"), &set), &wanted, false) {
                panic!("{set:?}: {found}");
            }
        }
    }
}

/// Expert biases and quantiles belong to the router: they stay where its weight is frozen, and only those of the base model
/// of adapters are in no checkpoint, as a whole model's must be complete.
#[test]
fn tables_of_a_frozen_router_stay() {
    let bias = ["moe.score_function=sigmoid", "moe.expert_bias=true"];
    let frozen = "optimizer.groups=[{ params = \"router\", frozen = true }]";
    for (set, moves, saved) in
        [(&[][..], true, true), (&["lora.rank=3"], false, false), (&[frozen], false, true)]
    {
        for kind in [&bias[..], &["moe.balance=quantile"]] {
            let (resolved, on) = recipe(&one(), &keys(&[kind, set].concat()));
            let saves = run(&on, |rank| {
                let sources = source::open(&resolved)?;
                let mut t = Trainer::new(rank, &resolved)?;
                let moe = t.model.step_state.moe().unwrap();
                let start: Vec<f32> = (0..3 * 8).map(|i| i as f32 / 8.0).collect();
                for table in [&moe.expert_bias, &moe.quantiles] {
                    t.rank.compute.upload_into(table, &start)?;
                }
                (0..2).try_for_each(|_| t.train_step(&*sources.train).map(drop))?;
                let tables = t.expert_tables()?;
                assert_eq!(tables.len(), 3, "{kind:?}");
                let now: Vec<f32> = tables.iter().flat_map(|t| t.values.clone()).collect();
                assert_eq!(now != start, moves, "{kind:?} {set:?}: {now:?}");
                let names = t.snapshot()?.items.into_iter().map(|item| item.name);
                Ok(names.filter(|n| n.ends_with(".expert_bias") || n.ends_with(".quantiles")).count())
            });
            assert_eq!(saves.unwrap(), [if saved { 3 } else { 0 }], "{kind:?} {set:?}");
        }
    }
}
