//! Saved activations of a forward pass against the model's description: bytes by block, within 1 %.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::model::description::{Block, Lifetime, ModelDescription, ParallelRanks, StepShape};
use ferrotron_core::model::{ForwardMode, ModelConfig};
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Trainer, sequence_layout, upload_mtp_inputs, upload_targets};
use ferrotron_engine::moe::MoeBatch;
use ferrotron_engine::{Rank, StepContext, StepNumber};
use ferrotron_tensor::{Category, DType};
use std::collections::{BTreeMap, HashSet};

type ByBlock = BTreeMap<Block, usize>;

const SEQ: usize = 128;
const MICRO: usize = 2;
const BLOCKS: &str = "train.recompute=[\"attention\", \"mlp\"]";
const MODULES: &str = "train.recompute=[\"norm\", \"activation\"]";
const MOE: [&str; 3] = ["moe.experts=4", "moe.topk=2", "moe.ffn=128"];
const MLA: [&str; 2] = [
    "model.kv_heads=4",
    "model.mla={ q_lora_rank = 48, kv_lora_rank = 32, nope_dim = 16, rope_dim = 16, v_dim = 16 }",
];

fn recipe(layout: &RankLayout, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    let model = format!(
        "[model]\nlayers = 2\nhidden = 128\nheads = 4\nkv_heads = 2\nhead_dim = 32\nffn = 192\nvocab = 512\n\
         max_positions = {SEQ}\ntied = true\n[data]\npath = \"embedded\"\nseq_len = {SEQ}\n[train]\n\
         global_batch = 8\nmicro_batch = {MICRO}\n[precision]\ndtype = \"bf16\"\n[generate]\ntokens = 0\n\
         [parallel]\nzero = 0\n"
    );
    recipe.add("model.toml", &model).unwrap();
    let sizes = [("tp", layout.tp), ("cp", layout.cp), ("ep", layout.ep), ("etp", layout.etp())];
    for (key, size) in sizes.into_iter().chain([("dp", layout.dp.unwrap_or(1))]) {
        recipe.set(&format!("parallel.{key}={size}")).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

/// Bytes that a micro-batch saves for backward on this rank, each allocation once.
fn counted(rank: &Rank, resolved: &Resolved, shape: &StepShape) -> ferrotron_core::Result<ByBlock> {
    let trainer = Trainer::new(rank.clone(), resolved)?;
    let batch = source::open(resolved)?.train.batch((rank.dp.rank() * MICRO) as u64, MICRO)?;
    let layout = sequence_layout(&batch, SEQ)?;
    let mut input = trainer.model.decoder.input(rank, &batch.tokens, Some(&batch.positions), layout)?;
    let weights = vec![1.0; shape.model.mtp_depth()];
    input.mtp = upload_mtp_inputs(rank, &trainer.model.decoder, &batch, (SEQ, &input), &weights)?;
    let targets = upload_targets(rank, &input.tokens, &batch.labels, 1.0)?;
    let rows = rank.compute.zeros(&[input.rows], DType::I32, Category::Workspace)?;
    let moe = input.moe.as_ref().map(|moe| MoeBatch {
        input: moe,
        step: StepNumber::Known(0),
        rows: &rows,
        micro_batch_weight: 1.0,
    });
    let context = StepContext {
        recompute: shape.recompute,
        mlp_chunk: shape.mlp_chunk,
        moe,
        ..StepContext::new(rank, &trainer.model.params, &trainer.model.step_state)
    };
    let chunk = &trainer.model.decoder.chunks()[0];
    let (_, saved) = chunk.forward(&context, &input, None, ForwardMode::Train(&targets))?;
    let (mut bytes, mut seen) = (ByBlock::new(), HashSet::new());
    saved.unwrap().blocks(&mut |block, t| {
        if seen.insert(t.allocation_id()) {
            *bytes.entry(block).or_default() += t.allocation_bytes();
        }
    });
    Ok(bytes)
}

fn described(shape: &StepShape) -> ferrotron_core::Result<ByBlock> {
    let mut bytes = ByBlock::new();
    for layer in ModelDescription::new(shape)?.layers {
        for t in layer.saved.iter().filter(|t| t.lifetime == Lifetime::Stored) {
            *bytes.entry(t.block).or_default() += t.bytes();
        }
    }
    Ok(bytes)
}

/// Compares every rank of a layout; gives the bytes of the first.
fn check(layout: &str, set: &[&str]) -> ByBlock {
    check_model(layout, set, |_| {})
}

/// The same for a model that `edit` changes.
fn check_model(layout: &str, set: &[&str], edit: fn(&mut ModelConfig)) -> ByBlock {
    let layout: RankLayout = layout.parse().unwrap();
    let mut resolved = recipe(&layout, set);
    edit(&mut resolved.model);
    let resolved = resolved;
    let work = |rank: Rank| {
        let shape = StepShape::of(&resolved, ParallelRanks::of(&rank))?;
        let (counted, described) = (counted(&rank, &resolved, &shape)?, described(&shape)?);
        let blocks: HashSet<Block> = counted.keys().chain(described.keys()).copied().collect();
        for block in blocks {
            let [a, b] = [&counted, &described].map(|x| x.get(&block).copied().unwrap_or(0) as f64);
            // A few scalars (amax, statistics of attention) are not described.
            assert!(
                (a - b).abs() <= 0.01 * a + 64.0,
                "rank {} of {layout} {set:?}: {block:?} saves {a} bytes and is described with {b}: {counted:?} {described:?}",
                rank.world.rank()
            );
        }
        Ok(counted)
    };
    on_threads(&layout, || Ok(Rank::cpu(1, 1234)?), work).unwrap().swap_remove(0)
}

#[test]
fn dense_models() {
    let plain = check("tp=1", &[]);
    for set in [
        &["model.tied=false"][..],
        &["train.mlp_chunk=12"],
        &["model.qk_norm=true"],
        &["model.norm=layernorm", "model.positions=learned", "model.qkv_bias=true"],
        &["model.gated=false", "model.activation=gelu_tanh"],
        &["model.attn_sink=true"],
        &["precision.dtype=f32"],
        &MLA,
        &["model.kv_heads=4", "model.mla={ kv_lora_rank = 32, nope_dim = 16, rope_dim = 16, v_dim = 16 }"],
    ] {
        check("tp=1", set);
    }
    for layout in ["tp=2", "cp=2", "tp=2,cp=2", "dp=2"] {
        check(layout, &[]);
        check(layout, &MLA);
        check(layout, &["model.qk_norm=true"]);
        check(layout, &["model.window=16"]);
    }
    assert!(check("tp=2", &[])[&Block::Mlp] < plain[&Block::Mlp]);
}

/// Linears with adapters save their input and `[tokens, r]`, with DoRA their output too; frozen ones without, and the LM head, nothing.
#[test]
fn adapters() {
    let all: usize = check("tp=1", &[]).values().sum();
    for set in [
        &["lora.rank=8"][..],
        &["lora.rank=8", "lora.fused=true", "train.recompute=[\"norm\", \"activation\"]"],
        &["lora.rank=8", "lora.targets=[\"q_proj\", \"v_proj\"]"],
        &["lora.rank=8", "precision.recipe=fp8-current"],
        &["lora.rank=8", MOE[0], MOE[1], MOE[2]],
        &["lora.rank=8", "lora.dora=true"],
        &["lora.rank=8", "lora.dora=true", "lora.targets=[\"v_proj\", \"up_proj\"]"],
        &["lora.rank=8", "lora.dora=true", "precision.recipe=fp8-current", "train.recompute=[\"mlp\"]"],
        &["lora.rank=8", "lora.dora=true", MOE[0], MOE[1], MOE[2]],
    ] {
        for layout in ["tp=1", "tp=2", "cp=2"] {
            check(layout, set);
        }
    }
    let few: usize = check("tp=1", &["lora.rank=8", "lora.targets=v_proj"]).values().sum();
    assert!(few < all);
}

#[test]
fn recomputation() {
    for model in [&[][..], &MLA, &MOE, &["mtp.layers=1"]] {
        let all: usize = check("tp=1", model).values().sum();
        for mode in ["train.recompute=full", BLOCKS, MODULES] {
            for layout in ["tp=1", "tp=2"] {
                let set = [model, &[mode]].concat();
                let some: usize = check(layout, &set).values().sum();
                assert!(some < all, "{set:?}");
            }
        }
    }
}

#[test]
fn multi_token_prediction() {
    for layout in ["tp=1", "tp=2", "cp=2"] {
        check(layout, &["mtp.layers=2"]);
        check(layout, &["mtp.layers=2", "mtp.shared_layer=true", "model.tied=false"]);
    }
}

/// Dropless dispatch is described with balanced routing: exact where every token goes to every expert.
#[test]
fn moe_models() {
    const ALL: &str = "moe.topk=4";
    const SHARED: [&str; 2] = ["moe.shared_ffn=96", "moe.dense_layers=[0]"];
    for layout in ["tp=1", "tp=2", "dp=2"] {
        check(layout, &MOE);
        check(layout, &[&MOE[..], &SHARED].concat());
    }
    for layout in ["dp=2,ep=2", "tp=2,ep=2,etp=1", "tp=2,dp=2,ep=2,etp=2"] {
        check(layout, &[&MOE[..], &[ALL]].concat());
        check(layout, &[&MOE[..], &["moe.dispatcher=all_gather"]].concat());
    }
}

/// Tokens over capacity are dropped, padding takes the place of tokens that are missing.
#[test]
fn expert_capacity() {
    const PER_RANK: &str = "moe.capacity_per_rank=true";
    const PAD: &str = "moe.pad_to_capacity=true";
    const ALL: &str = "moe.topk=4";
    for layout in ["tp=1", "tp=2", "dp=2,ep=2", "tp=2,ep=2,etp=1", "tp=2,dp=2,ep=2,etp=2", "cp=2,ep=2"] {
        for factor in ["moe.capacity=0.5", "moe.capacity=1.5"] {
            check(layout, &[&MOE[..], &[factor, PER_RANK, PAD]].concat());
            check(layout, &[&MOE[..], &[ALL, factor, PER_RANK]].concat());
            check(layout, &[&MOE[..], &[factor, "moe.dispatcher=all_gather"]].concat());
        }
        // A capacity of the micro-batch.
        check(layout, &[&MOE[..], &[ALL, "moe.capacity=1.5", "moe.shared_ffn=96"]].concat());
    }
    let moe = |factor: &str| check("dp=2,ep=2", &[&MOE[..], &[factor, PER_RANK, PAD]].concat())[&Block::Moe];
    assert!(moe("moe.capacity=0.5") < moe("moe.capacity=1.5"));
}

/// In chunks, the gradient of the hidden states is saved instead of the logits'.
#[test]
fn loss_in_chunks() {
    for layout in ["tp=1", "tp=2", "cp=2"] {
        let [all, chunks] = ["train.loss_chunk=0", "train.loss_chunk=50"]
            .map(|chunk| check(layout, &[chunk, "mtp.layers=1"])[&Block::Output]);
        assert!(chunks < all, "{chunks} {all}");
    }
}

/// Norms after the blocks only, and a QK norm over all heads.
#[test]
fn norms_after_blocks_only() {
    let olmo2 = |m: &mut ModelConfig| {
        (m.pre_norms, m.post_norms, m.qk_norm, m.qk_norm_all_heads) = (false, true, true, true);
    };
    let moe = [&MOE[..], &["train.recompute=[\"norm\"]"]].concat();
    for layout in ["tp=1", "cp=2"] {
        for set in [
            &[][..],
            &[BLOCKS],
            &[MODULES],
            &["train.recompute=full"],
            &["train.mlp_chunk=12"],
            &["precision.recipe=fp8-current"],
            &["precision.recipe=fp8-block", MODULES],
            &MOE,
            &moe,
        ] {
            check_model(layout, set, olmo2);
        }
    }
}

/// Context-parallel ranks save the rounded operands of FP8 attention, which they exchange.
#[test]
fn fp8_attention_under_cp() {
    const FP8: &str = "precision.fp8_attention=true";
    for layout in ["cp=2", "tp=2,cp=2"] {
        // With a window: by heads where they divide, gathered where they do not.
        for model in [&[][..], &["model.qk_norm=true"], &["model.window=16"], &MLA] {
            check(layout, &[model, &[FP8]].concat());
        }
        check(layout, &["train.recompute=full", FP8]);
    }
}

#[test]
fn fp8_recipes() {
    for recipe in ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"] {
        let recipe = format!("precision.recipe={recipe}");
        for layout in ["tp=1", "tp=2"] {
            for more in [
                &[][..],
                &[MODULES],
                &["train.recompute=full"],
                &["precision.skip=mlp.down:weight_grad"],
                &["precision.fp8_lm_head=true"],
                &["precision.fp8_attention=true"],
                &MOE,
            ] {
                let is = |name: &str| recipe.ends_with(name);
                // Emulated recipes have no grouped GEMMs.
                if more == MOE && (is("mxfp8") || is("nvfp4")) {
                    continue;
                }
                // Block scaling needs expert widths that are multiples of 128 on every rank.
                let wide = if more == MOE && is("block") { &["moe.ffn=256"][..] } else { &[] };
                check(layout, &[&[recipe.as_str()], more, wide].concat());
            }
        }
    }
}
