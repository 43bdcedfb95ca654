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
