//! Bytes that every rank sends in a step, by process group: counted and described, exactly.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_comm::OpKind;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::cost::{ByGroup, Traffic, step_volume};
use ferrotron_core::data::source;
use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::model::description::{ModelDescription, ParallelRanks, StepShape};
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::Trainer;

use ferrotron_engine::Rank;

const SEQ: usize = 24;
const MICRO: usize = 2;
const BATCH: usize = 16;
const BLOCKS: &str = "train.recompute=[\"attention\", \"mlp\"]";
const PARTS: &str = "train.recompute=[\"norm\", \"activation\"]";

fn recipe(layout: &RankLayout, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    let model = format!(
        "[model]\nlayers = 4\nhidden = 32\nheads = 4\nkv_heads = 2\nffn = 48\nvocab = 259\nmax_positions = 64\n\
         qkv_bias = true\nproj_bias = true\ntied = true\n[data]\npath = \"embedded\"\nseq_len = {SEQ}\n\
         [train]\nglobal_batch = {BATCH}\nmicro_batch = {MICRO}\n[precision]\ndtype = \"f32\"\n[generate]\ntokens = 0\n\
         [parallel]\nzero = 0\n"
    );
    recipe.add("model.toml", &model).unwrap();
    let sizes = [
        ("tp", layout.tp),
        ("cp", layout.cp),
        ("pp", layout.pp),
        ("vp", layout.vp),
        ("ep", layout.ep),
        ("etp", layout.etp()),
        ("dp", layout.dp.unwrap_or(1)),
    ];
    for (key, size) in sizes {
        recipe.set(&format!("parallel.{key}={size}")).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

/// Checks every rank; gives back what the first one sends.
fn check_volume(layout: &str, set: &[&str]) -> ByGroup {
    let layout: RankLayout = layout.parse().unwrap();
    let layout = RankLayout { dp: layout.dp.or(Some(1)), ..layout };
    let resolved = recipe(&layout, set);
    let layout = RankLayout { instances: resolved.config.parallel.layout().instances, ..layout };
    let work = |rank: Rank| {
        let sources = source::open(&resolved)?;
        let mut trainer = Trainer::new(rank.clone(), &resolved)?;
        // The first step of ZeRO-3 adds the memory that units are gathered into.
        if resolved.config.parallel.zero == 3 {
            trainer.train_step(&*sources.train)?;
        }
        let before = Traffic::of(&rank);
        trainer.train_step(&*sources.train)?;
        let sent = Traffic::of(&rank).since(&before);
        let shape = StepShape::of(&resolved, ParallelRanks::of(&rank))?;
        let rank_of = format!("rank {} of {layout} {set:?}", rank.world.rank());
        assert!(ModelDescription::params(&shape)? == trainer.model.params.specs(), "parameters of {rank_of}");
        assert_eq!(sent.by_group(), step_volume(&shape)?, "{rank_of}");
        let planned = ParallelRanks::at(&Grid::of(layout.clone())?, rank.world.rank())?;
        assert_eq!(sent.by_group(), step_volume(&StepShape::of(&resolved, planned)?)?, "planned: {rank_of}");
        assert_eq!(sent.total() > 0, rank.world.size() > 1);
        Ok(sent.by_group())
    };
    on_threads(&layout, || Ok(Rank::cpu(1, 1234)?), work).unwrap().swap_remove(0)
}

#[test]
fn tensor_and_data_parallel() {
    for layout in ["tp=1", "tp=2", "tp=4", "dp=2", "dp=4", "tp=2,dp=2", "tp=4,dp=2"] {
        check_volume(layout, &[]);
    }
    check_volume("tp=2,dp=2", &["precision.dtype=bf16"]);
    check_volume("tp=2", &["parallel.overlap=false"]);
    check_volume("tp=2", &["train.recompute=full"]);
    check_volume("tp=2", &["model.tied=false", "model.positions=learned"]);
}

#[test]
fn zero_1_and_2() {
    for zero in ["parallel.zero=1", "parallel.zero=2"] {
        for layout in ["tp=2", "dp=2", "dp=4", "tp=2,dp=2", "cp=2,dp=2", "pp=2,dp=2", "tp=2,pp=2,dp=2"] {
            check_volume(layout, &[zero]);
        }
        check_volume("tp=4,dp=2", &[zero, "precision.dtype=bf16"]);
    }
    // ZeRO-1 sends what an all-reduce sends where weights are f32; ZeRO-2 reduces gradients in every micro-batch.
    let [none, state, gradients] =
        [0, 1, 2].map(|z| check_volume("dp=2", &[&format!("parallel.zero={z}")])["dp_cp"]);
    assert!(state - none < 64 && gradients > 2 * state, "{none} {state} {gradients}");
}

const ZERO_3: &str = "parallel.zero=3";
/// Budgets with which nothing is gathered ahead, a layer, and everything.
const BUDGETS: [&str; 3] = ["parallel.comm_unit=1", "parallel.comm_unit=60000", "parallel.comm_unit=1GB"];

/// Units are gathered for forward and again for backward, unless they are there still.
#[test]
fn zero_3() {
    for budget in BUDGETS {
        for layout in ["dp=2", "tp=2,dp=2", "cp=2,dp=2", "pp=2,dp=2", "pp=2,vp=2,dp=2"] {
            for set in [
                &["model.tied=true"][..],
                &["model.tied=false", "model.positions=learned", "train.recompute=full"],
                &["precision.dtype=bf16", "parallel.overlap=false", PARTS],
            ] {
                check_volume(layout, &[&[ZERO_3, budget], set].concat());
            }
        }
        check_volume("dp=3", &[ZERO_3, budget, "train.global_batch=12", "optimizer.kind=muon"]);
        for schedule in ["parallel.schedule=zero-bubble", "parallel.schedule=1f1b"] {
            check_volume("pp=2,dp=2", &[ZERO_3, budget, schedule, "train.loss_chunk=20"]);
        }
        for mtp in [&["mtp.layers=2"][..], &["mtp.layers=2", "mtp.shared_layer=true", "mtp.detach=true"]] {
            for tied in ["model.tied=true", "model.tied=false"] {
                check_volume("dp=2", &[&[ZERO_3, budget, tied], mtp].concat());
                check_volume("pp=2,dp=2", &[&[ZERO_3, budget, tied], mtp].concat());
            }
        }
    }
    check_volume("dp=2", &[ZERO_3]);
    // Gathered twice in each of four micro-batches, or with room for all once a step.
    let sent = |budget: &str| check_volume("dp=2", &[ZERO_3, budget, "model.tied=false"])["dp_cp"];
    let [none, all] = [BUDGETS[0], BUDGETS[2]].map(sent);
    let gathers = check_volume("dp=2", &["parallel.zero=1", "model.tied=false"])["dp_cp"] / 2;
    assert!(none - all > 5 * gathers && none - all < 7 * gathers, "{none} {all} {gathers}");
}

/// Shards inside a group, and an all-reduce of gradient shards between groups.
#[test]
fn hsdp() {
    for budget in &BUDGETS[1..2] {
        for group in ["parallel.fsdp_group=1", "parallel.fsdp_group=2", "parallel.fsdp_group=4"] {
            for layout in ["dp=4", "tp=2,dp=4", "cp=2,dp=2", "pp=2,dp=4"] {
                check_volume(layout, &[ZERO_3, budget, group]);
            }
            check_volume("dp=4", &[ZERO_3, budget, group, "optimizer.kind=muon", "train.recompute=full"]);
        }
    }
    // Optimizer state over the groups too: gradient shards are reduce-scattered, updated weights all-gathered.
    for group in ["parallel.fsdp_group=1", "parallel.fsdp_group=2", "parallel.fsdp_group=4"] {
        let hfsdp = [ZERO_3, group, "parallel.fsdp_outer=optimizer"];
        for layout in ["dp=4", "tp=2,dp=4", "cp=2,dp=2", "pp=2,dp=4"] {
            check_volume(layout, &hfsdp);
            check_volume(layout, &[&hfsdp[..], &["precision.dtype=bf16", "optimizer.kind=muon"]].concat());
        }
        let experts = if group.ends_with('1') { "dp=4" } else { "ep=2,dp=4" };
        check_volume(experts, &[&hfsdp[..], &BALANCED].concat());
        for scaling in ["fp8-current", "fp8-delayed", "fp8-block"] {
            let recipe = format!("precision.recipe={scaling}");
            let sizes = ["precision.dtype=bf16", "model.hidden=64", "model.ffn=144"];
            let fp8 = [&hfsdp[..], &sizes, &[&recipe, "precision.fp8_params=true"]].concat();
            check_volume("dp=4", &fp8);
        }
    }
    let sent = check_volume("dp=4", &[ZERO_3, "parallel.fsdp_group=2"]);
    assert!(sent.contains_key("fsdp") && sent.contains_key("fsdp_replicas"), "{sent:?}");
}

/// Experts are sharded over their own group; the paired schedule holds two layers at a time.
#[test]
fn zero_3_moe() {
    for budget in &BUDGETS[..2] {
        for layout in ["dp=2", "ep=2,dp=4", "tp=2,ep=2,etp=1,dp=2", "tp=2,etp=1,dp=2", "pp=2,ep=2,dp=2"] {
            for set in [
                &["moe.shared_ffn=24", "moe.dense_layers=[0]"][..],
                &["moe.latent=16", "train.recompute=full"],
                &["mtp.layers=1", BLOCKS],
            ] {
                check_volume(layout, &[&[ZERO_3, budget], &BALANCED[..], set].concat());
            }
        }
        for layout in ["ep=2", "ep=2,dp=2", "pp=2,ep=2,dp=2", "pp=2,vp=2,ep=2"] {
            for set in [&[][..], &["train.recompute=full"], &[BLOCKS], &["moe.latent=16", "mtp.layers=1"]] {
                let paired = [ZERO_3, budget, "parallel.schedule=paired"];
                check_volume(layout, &[&paired[..], &BALANCED, set].concat());
            }
        }
        for group in ["parallel.fsdp_group=1", "parallel.fsdp_group=2"] {
            let experts = if group.ends_with('1') { "dp=4" } else { "ep=2,dp=4" };
            check_volume(experts, &[&[ZERO_3, budget, group], &BALANCED[..]].concat());
            check_volume("tp=2,etp=1,dp=4", &[&[ZERO_3, budget, group], &BALANCED[..]].concat());
        }
    }
}

/// FP8 weights are gathered as FP8 by every pass; block-scaled ones are quantized from gathered values before.
#[test]
fn zero_3_fp8_params() {
    const SIZES: [&str; 4] =
        ["precision.dtype=bf16", "model.hidden=64", "model.ffn=144", "precision.fp8_params=true"];
    for scaling in ["fp8-current", "fp8-delayed", "fp8-block"] {
        let scaling = format!("precision.recipe={scaling}");
        for budget in BUDGETS {
            let set = [&SIZES[..], &[&scaling, ZERO_3, budget]].concat();
            check_volume("dp=2", &set);
            check_volume("pp=2,dp=2", &[&set[..], &["train.recompute=full"]].concat());
            check_volume("dp=4", &[&set[..], &["parallel.fsdp_group=2"]].concat());
        }
    }
}

/// FP8 weights are gathered as FP8.
#[test]
fn fp8_params() {
    const SIZES: [&str; 3] = ["precision.dtype=bf16", "model.hidden=64", "model.ffn=144"];
    for scaling in ["fp8-current", "fp8-delayed", "fp8-block"] {
        let scaling = format!("precision.recipe={scaling}");
        let sent = [false, true].map(|weights| {
            let weights = format!("precision.fp8_params={weights}");
            let set = [&SIZES[..], &[&scaling, &weights]].concat();
            check_volume("dp=2", &set);
            check_volume("pp=2,dp=2", &[&set[..], &["parallel.zero=2", "parallel.comm_unit=160000"]].concat());
            check_volume("cp=2,dp=2", &[&set[..], &["parallel.zero=1"]].concat());
            check_volume("dp=4", &[&set[..], &["parallel.zero=1", "parallel.comm_unit=72000"]].concat())["dp_cp"]
        });
        let less = 1.0 - sent[1] as f64 / sent[0] as f64;
        // Nearly one of 4 + 2 bytes per parameter.
        let wanted = if scaling.contains("fp8-block") { -0.01..0.01 } else { 0.12..0.17 };
        assert!(wanted.contains(&less), "{scaling}: {less} less");
    }
}

#[test]
fn pipelines() {
    for layout in ["pp=2", "pp=4", "pp=2,vp=2", "tp=2,pp=2", "pp=2,dp=2", "tp=2,pp=2,dp=2"] {
        check_volume(layout, &[]);
    }
    check_volume("pp=2", &["model.tied=false"]);
    check_volume("pp=2", &["parallel.schedule=zero-bubble"]);
    check_volume("tp=2,pp=2", &["precision.dtype=bf16"]);
}

#[test]
fn context_parallel() {
    for layout in ["cp=2", "cp=4", "tp=2,cp=2", "cp=2,dp=2", "cp=2,pp=2", "tp=2,cp=2,pp=2"] {
        check_volume(layout, &[]);
    }
    check_volume("cp=2", &["precision.dtype=bf16"]);
    // With a sliding window: all-to-all where the heads divide by cp, else all-gather.
    for layout in ["cp=2", "cp=4", "tp=2,cp=2"] {
        assert_ne!(
            check_volume(layout, &["model.window=8"])["cp"],
            check_volume(layout, &[])["cp"],
            "{layout}"
        );
    }
}

/// MLA gathers low-rank rows instead of the residual stream; attention sinks send nothing.
#[test]
fn latent_attention() {
    const LATENT: [&str; 2] = [
        "model.kv_heads=4",
        "model.mla={ q_lora_rank = 16, kv_lora_rank = 32, nope_dim = 16, rope_dim = 16, v_dim = 16 }",
    ];
    const STREAM: [&str; 2] =
        ["model.kv_heads=4", "model.mla={ kv_lora_rank = 16, nope_dim = 16, rope_dim = 16, v_dim = 16 }"];
    for latent in [LATENT, STREAM] {
        for layout in ["tp=2", "tp=4", "cp=2", "tp=2,cp=2", "tp=2,pp=2,dp=2"] {
            check_volume(layout, &latent);
        }
        for more in [&["train.recompute=full"][..], &[BLOCKS], &[PARTS], &["precision.dtype=bf16"]] {
            check_volume("tp=2", &[&latent[..], more].concat());
        }
        check_volume("tp=2,cp=2", &[&latent[..], &["model.window=8"]].concat());
        for scaling in
            ["precision.recipe=fp8-current", "precision.recipe=fp8-delayed", "precision.recipe=fp8-block"]
        {
            let set = [&latent[..], &["precision.dtype=bf16", "model.ffn=64", scaling]].concat();
            check_volume("tp=2", &set);
            check_volume("tp=2", &[&set[..], &["train.recompute=full"]].concat());
        }
    }
    for layout in ["cp=2", "cp=4", "tp=2,cp=2"] {
        let [with, without] =
            ["true", "false"].map(|on| check_volume(layout, &[&format!("model.attn_sink={on}")]));
        assert_eq!(with["cp"], without["cp"], "{layout}");
    }
}

/// MTP layers add a layer, an embedding and an LM head each; first and last pipeline stage share embedding tables.
#[test]
fn multi_token_prediction() {
    for layout in ["tp=1", "tp=2", "dp=2", "cp=2", "pp=2", "pp=2,vp=2", "tp=2,cp=2", "tp=2,pp=2,dp=2"] {
        for set in [
            &["mtp.layers=2"][..],
            &["mtp.layers=2", "mtp.shared_layer=true", "model.tied=false", "model.positions=learned"],
            &["mtp.layers=1", "parallel.zero=2", "train.recompute=full", "precision.dtype=bf16"],
        ] {
            check_volume(layout, set);
        }
    }
    let eight = ["precision.dtype=bf16", "model.head_dim=16", "model.ffn=64", "precision.recipe=fp8-current"];
    check_volume("tp=2", &[&eight[..], &["mtp.layers=2", "mtp.shared_layer=true"]].concat());
    check_volume("tp=2,pp=2", &[&eight[..], &["mtp.layers=2"]].concat());
    let more = check_volume("pp=2", &["mtp.layers=1", "model.tied=false"]);
    assert!(
        more.contains_key("embedding")
            && !check_volume("pp=2", &["model.tied=false"]).contains_key("embedding")
    );
}

/// Per-tensor scaling gathers FP8 activations, and all-reduces their amax.
#[test]
fn fp8_gemms() {
    let set = |more: &[&'static str]| {
        let base = ["precision.dtype=bf16", "model.head_dim=16", "model.ffn=64"];
        [&base[..], more].concat()
    };
    let none = |layout: &str| check_volume(layout, &set(&[]))["tp"];
    for scaling in ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"] {
        let scaling: &'static str = match scaling {
            "fp8-current" => "precision.recipe=fp8-current",
            "fp8-delayed" => "precision.recipe=fp8-delayed",
            "fp8-block" => "precision.recipe=fp8-block",
            "mxfp8" => "precision.recipe=mxfp8",
            _ => "precision.recipe=nvfp4",
        };
        for layout in ["tp=2", "tp=4", "tp=2,dp=2", "tp=2,pp=2", "tp=2,cp=2", "dp=2", "cp=2,dp=2"] {
            let sent = check_volume(layout, &set(&[scaling]));
            if layout == "tp=2" {
                let bytes = ["fp8-current", "fp8-delayed", "fp8-block"].iter().any(|s| scaling.contains(s));
                assert_eq!(sent["tp"] < none(layout), bytes, "{scaling}");
                assert!(bytes || sent["tp"] == none(layout), "{scaling}");
            }
        }
        for more in [
            &["train.recompute=full"][..],
            &[BLOCKS],
            &[PARTS],
            &["parallel.overlap=false"],
            &["precision.skip=mlp.down"],
            &["precision.skip=attn.q:output"],
            &["precision.skip=mlp.up:weight_grad"],
            &["precision.skip=mlp.down:weight_grad"],
            &["precision.skip=mlp.down:input_grad"],
            &["precision.skip=attn.out:output"],
        ] {
            check_volume("tp=2", &set(&[&[scaling], more].concat()));
        }
        const HEAD: [&str; 2] = ["precision.fp8_lm_head=true", "model.vocab=256"];
        for more in
            [&[][..], &["train.recompute=full"], &["model.tied=false"], &["precision.skip=head:output"]]
        {
            check_volume("tp=2", &set(&[&HEAD[..], &[scaling], more].concat()));
        }
        check_volume("tp=2,pp=2", &set(&[&HEAD[..], &[scaling]].concat()));
        check_volume("tp=2", &set(&[&HEAD[..], &[scaling, "mtp.layers=2"]].concat()));
    }
    const ATTENTION: [&str; 2] = ["precision.fp8_attention=true", "precision.skip=layers.0.attn.scores"];
    for layout in ["tp=2", "cp=2", "tp=2,cp=2,pp=2", "tp=4"] {
        check_volume(layout, &set(&ATTENTION[..1]));
        check_volume(layout, &set(&ATTENTION));
        check_volume(layout, &set(&[ATTENTION[0], "train.recompute=full", "precision.recipe=fp8-current"]));
    }
    check_volume("tp=2,cp=2", &set(&[ATTENTION[0], "mtp.layers=2", BLOCKS]));
    // Ranks with multiples of 128 tokens gather columnwise FP8, too.
    const LONG: [&str; 3] = ["precision.recipe=fp8-block", "data.seq_len=128", "model.max_positions=128"];
    let bf16 = check_volume("tp=2", &set(&LONG[1..]))["tp"];
    let fp8 = check_volume("tp=2", &set(&LONG))["tp"];
    assert!((fp8 as f64) < 0.9 * bf16 as f64, "{fp8} {bf16}");
    for more in [
        &["train.recompute=full"][..],
        &["parallel.overlap=false"],
        &["precision.skip=mlp.down:weight_grad"],
        &["precision.skip=attn.out:input_grad"],
        &["precision.skip=mlp.up:output"],
        &["precision.fp8_lm_head=true", "model.vocab=256"],
    ] {
        check_volume("tp=2", &set(&[&LONG[..], more].concat()));
    }
}

/// The logits of a chunk are formed twice, and so are the softmax statistics that tensor-parallel ranks exchange.
#[test]
fn loss_in_chunks() {
    const CHUNK: &str = "train.loss_chunk=20";
    let [all, chunks] = ["train.loss_chunk=0", CHUNK].map(|set| check_volume("tp=2", &[set])["tp"]);
    let statistics = (BATCH / MICRO * SEQ * MICRO * 4 * 4) as u64;
    assert_eq!(chunks, all + statistics);
    for layout in ["tp=2,cp=2", "tp=2,pp=2", "tp=4,dp=2"] {
        check_volume(layout, &[CHUNK]);
    }
    for more in [&["mtp.layers=2"][..], &["mtp.layers=1", "mtp.detach=true"], &["model.tied=false"]] {
        check_volume("tp=2", &[&[CHUNK], more].concat());
        check_volume("tp=2", &[&["train.loss_chunk=0"], more].concat());
    }
}

/// Layouts of experts: ep inside dp, ep over tp, etp, both, beside cp and on a pipeline.
const EXPERT_LAYOUTS: [&str; 9] = [
    "ep=2",
    "ep=4",
    "tp=2,ep=2,etp=1",
    "ep=2,etp=2",
    "tp=2,etp=2,ep=2",
    "tp=2,ep=4,etp=1,dp=2",
    "cp=2,ep=2",
    "pp=2,ep=2",
    "tp=2,etp=1,dp=2",
];
const MOE: [&str; 3] = ["moe.experts=4", "moe.topk=2", "moe.ffn=16"];
/// Every token goes to every expert, so that routing is balanced.
const BALANCED: [&str; 3] = ["moe.experts=4", "moe.topk=4", "moe.ffn=16"];
const PADDED: [&str; 3] = ["moe.capacity=1.25", "moe.capacity_per_rank=true", "moe.pad_to_capacity=true"];
const ALL_GATHER: &str = "moe.dispatcher=all_gather";

#[test]
fn moe_all_to_all() {
    for layout in EXPERT_LAYOUTS {
        let sent = check_volume(layout, &BALANCED);
        assert_eq!(sent.contains_key("etp_ep"), layout.contains("ep=") && !layout.starts_with("tp=2,ep=2"));
        check_volume(layout, &[&MOE[..], &PADDED].concat());
        check_volume(layout, &[&BALANCED[..], &["moe.capacity=0.5", "moe.capacity_per_rank=true"]].concat());
    }
    // A capacity of the micro-batch: no token is over it.
    check_volume("tp=2,ep=2,etp=1", &[&BALANCED[..], &["moe.capacity=1"]].concat());
}

#[test]
fn moe_all_gather() {
    for layout in EXPERT_LAYOUTS {
        check_volume(layout, &[&MOE[..], &[ALL_GATHER]].concat());
    }
    check_volume("cp=2,ep=2", &[&MOE[..], &[ALL_GATHER, "moe.capacity=0.5"]].concat());
}

/// What an MoE layer sends besides tokens: shared expert, latent projections, losses of the router, MTP layers.
#[test]
fn moe_layers() {
    for layout in ["ep=2", "tp=2,ep=2,etp=1", "tp=2,etp=2,ep=2", "cp=2,ep=2", "pp=2,ep=2"] {
        for model in [
            &["moe.shared_ffn=24", "moe.dense_layers=[0]"][..],
            &["moe.shared_ffn=24", "moe.shared_gate=true", "moe.latent=16"],
            &["moe.bias=true", "moe.router_bias=true", "model.gated=false"],
            &["moe.balance=[\"aux\", \"seq_aux\", \"global_aux\"]", "moe.z_loss=0.001"],
            &["moe.expert_bias=true", "moe.score_function=sigmoid", "moe.jitter=0.01"],
            &["mtp.layers=2", "model.tied=false"],
            &["mtp.layers=2", "mtp.shared_layer=true"],
            &["train.recompute=full"],
            &[BLOCKS],
            &[PARTS],
            &["precision.dtype=bf16", "parallel.zero=1"],
            &["parallel.zero=2", "parallel.comm_unit=72000"],
        ] {
            for dispatch in [&BALANCED[..], &[MOE[0], MOE[1], MOE[2], ALL_GATHER]] {
                check_volume(layout, &[dispatch, model].concat());
            }
            check_volume(layout, &[&MOE[..], &PADDED, model].concat());
        }
        check_volume(layout, &[&MOE[..], &PADDED[..0], &[ALL_GATHER, "moe.balance=quantile"]].concat());
    }
}

/// Forward of one micro-batch beside backward of another sends the same bytes.
#[test]
fn moe_paired_schedule() {
    for layout in ["ep=2", "tp=2,ep=2,etp=1", "pp=2,ep=2", "pp=2,vp=2,ep=2", "tp=2,etp=2,ep=2"] {
        for set in [&BALANCED[..], &[&MOE[..], &PADDED].concat()] {
            let schedules = ["1f1b", "paired"].map(|name| format!("parallel.schedule={name}"));
            let [plain, paired] =
                schedules.map(|s| check_volume(layout, &[set, &[s.as_str(), "moe.shared_ffn=24"]].concat()));
            assert_eq!(plain, paired, "{layout}");
        }
    }
}

/// FP8 tokens are dispatched with per-tensor scaling, and their amax is all-reduced.
#[test]
fn moe_fp8() {
    const SIZES: [&str; 6] = [
        "precision.dtype=bf16",
        "model.layers=2",
        "model.hidden=128",
        "model.ffn=64",
        "moe.ffn=256",
        "train.global_batch=8",
    ];
    for scaling in ["fp8-current", "fp8-delayed", "fp8-block"] {
        let scaling = format!("precision.recipe={scaling}");
        for layout in ["ep=2", "tp=2,ep=2,etp=1", "tp=2,etp=2,ep=2", "tp=2,etp=1,dp=2", "ep=2,dp=2"] {
            for more in [
                &[][..],
                &["train.recompute=full"],
                &["precision.skip=experts"],
                &["precision.skip=down:weight_grad"],
                &["precision.fp8_params=true"],
                &["precision.fp8_params=true", "parallel.zero=1"],
            ] {
                let set = [&SIZES[..], &[scaling.as_str()], more].concat();
                check_volume(layout, &[&BALANCED[..2], &set].concat());
                if more.is_empty() {
                    check_volume(layout, &[&MOE[..2], &set, &[ALL_GATHER]].concat());
                }
            }
        }
    }
}

/// Calls and launches of one step of the first rank.
fn calls_and_launches(layout: &str, set: &[&str]) -> (u64, u64) {
    let layout: RankLayout = layout.parse().unwrap();
    let resolved = recipe(&layout, set);
    let work = |rank: Rank| {
        let sources = source::open(&resolved)?;
        let mut trainer = Trainer::new(rank.clone(), &resolved)?;
        let before = rank.world.volume();
        trainer.train_step(&*sources.train)?;
        let sent = rank.world.volume().since(&before);
        Ok((OpKind::ALL.iter().map(|k| sent.calls(*k)).sum::<u64>(), sent.launches()))
    };
    let found = on_threads(&layout, || Ok(Rank::cpu(1, 1234)?), work).unwrap().swap_remove(0);
    eprintln!("{layout} {set:?}: {} collectives and messages in {} launches", found.0, found.1);
    found
}

#[test]
fn small_collectives_in_a_row_are_launched_together() {
    // dp·ep = 4 ranks share the batch.
    let (layers, micro_batches) = (4, (BATCH / MICRO / 4) as u64);
    let (calls, launches) = calls_and_launches("tp=2,dp=2", &[]);
    assert_eq!(calls, launches, "a dense step has none");
    // At the end of a step four counters; in every layer the counts of the balancing loss and the sums of the z-loss.
    let losses = ["moe.balance=[\"aux\"]", "moe.z_loss=0.001"];
    let (calls, launches) = calls_and_launches("tp=2,ep=2,dp=2", &[&MOE[..], &losses].concat());
    assert_eq!(calls - launches, 3 + layers * micro_batches);
    // In FP8 with block scaling, values and their scales, where every rank has whole blocks of tokens.
    let fp8 = ["precision.dtype=bf16", "precision.recipe=fp8-block", "model.hidden=256", "model.ffn=512"];
    let fp8 = [&fp8[..], &["data.seq_len=256", "model.max_positions=256"]].concat();
    let (calls, launches) = calls_and_launches("tp=2,dp=2", &fp8);
    assert!(calls > launches, "{calls} calls in {launches} launches");
}

/// Muon gathers updates, or sums Gram matrices, over tensor-parallel ranks, and updated matrices go from their owners to all.
#[test]
fn muon() {
    const KIND: &str = "optimizer.kind=muon";
    let keys = |text: &str| format!("optimizer.muon={{ {text} }}");
    let modes = ["duplicated", "distributed", "blockwise"].map(|m| format!("tp_mode = \"{m}\""));
    for mode in &modes {
        for split in ["split_qkv = true", "split_qkv = false"] {
            let muon = keys(&format!("{mode}, {split}"));
            for layout in ["tp=2", "tp=4", "tp=2,dp=2"] {
                check_volume(layout, &[KIND, &muon, "parallel.zero=1"]);
            }
        }
        let muon = keys(mode);
        for layout in ["ep=2,etp=2", "tp=2,etp=1,ep=2", "dp=2,etp=2"] {
            check_volume(layout, &[&BALANCED[..], &[KIND, &muon, "parallel.zero=1"]].concat());
        }
    }
    for layout in ["dp=2", "dp=3,tp=2", "dp=4"] {
        for zero in ["parallel.zero=0", "parallel.zero=1", "parallel.zero=2"] {
            check_volume(
                layout,
                &[KIND, zero, "parallel.comm_unit=24000", "train.global_batch=12", "train.micro_batch=1"],
            );
        }
    }
    let sent = modes.each_ref().map(|m| check_volume("tp=2", &[KIND, &keys(m)])["tp"]);
    assert!(sent[0] > sent[2] && sent[1] > sent[2], "{sent:?}");
}
