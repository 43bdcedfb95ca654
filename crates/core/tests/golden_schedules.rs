//! Learning rate, weight decay, batch size, pipelines and their layers against Megatron Core.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

mod common;

use common::{assert_known_files, cases, flag, float, json, list, text, uint};
use ferrotron_core::{
    pipeline::{
        Costs, LayerPlacement, LayerSplit, Matching, Payload, PipelinePlan, Schedule, ScheduleKind,
        ScheduleStep, Stage, Timeline, Transfer, check, interleaved_table,
    },
    schedule::{BatchSchedule, Decay, GroupOverride, LrSchedule, Rampup, WdIncrease, WdSchedule, WsdDecay},
};
use serde_json::Value;

#[test]
fn golden_schedules_folder_is_known() {
    let covered = ["README.md", "lr.json", "microbatches.json", "pipeline.json", "layers.json"];
    assert_known_files("schedules", |f| covered.contains(&f));
}

fn close(ours: f64, theirs: f64) -> bool {
    ours == theirs || (ours - theirs).abs() <= 1e-12 * theirs.abs()
}

#[test]
fn golden_schedules_lr_and_wd() {
    for case in cases(&json("schedules", "lr.json"), "cases") {
        let name = text(&case["name"]);
        let (max, min) = (float(&case["max_lr"]), float(&case["min_lr"]));
        let lr = LrSchedule {
            max,
            min,
            init: float(&case["init_lr"]),
            warmup: uint(&case["lr_warmup_steps"]),
            decay: uint(&case["lr_decay_steps"]),
            style: match text(&case["lr_decay_style"]) {
                "constant" => Decay::Constant,
                "linear" => Decay::Linear,
                "cosine" => Decay::Cosine,
                "inverse-square-root" => Decay::InverseSquareRoot,
                "WSD" => Decay::Wsd,
                other => panic!("{name}: unknown decay style {other}"),
            },
            wsd: case["wsd_decay_steps"].as_u64().unwrap_or(0),
            wsd_style: match case["lr_wsd_decay_style"].as_str() {
                None => WsdDecay::default(),
                Some("linear") => WsdDecay::Linear,
                Some("cosine") => WsdDecay::Cosine,
                Some("exponential") => WsdDecay::Exponential,
                Some("minus_sqrt") => WsdDecay::MinusSqrt,
                Some(other) => panic!("{name}: unknown WSD style {other}"),
            },
        };
        let wd = WdSchedule {
            start: float(&case["start_wd"]),
            end: float(&case["end_wd"]),
            samples: uint(&case["wd_incr_steps"]),
            style: match text(&case["wd_incr_style"]) {
                "constant" => WdIncrease::Constant,
                "linear" => WdIncrease::Linear,
                "cosine" => WdIncrease::Cosine,
                other => panic!("{name}: unknown increase style {other}"),
            },
        };
        lr.check().unwrap();
        wd.check().unwrap();
        let all = GroupOverride::default();
        let groups = [
            all.clone(),
            GroupOverride { wd_mult: 0.0, ..all.clone() },
            GroupOverride { max_lr: Some(max * 0.5), min_lr: Some(min * 0.1), ..all.clone() },
            GroupOverride { wd_mult: 0.25, ..all },
        ];
        let counts = list(&case["num_steps"], uint);
        assert_eq!(counts.len() as u64, uint(&case["steps"]) + 1);
        for (k, n) in counts.into_iter().enumerate() {
            for (g, group) in groups.iter().enumerate() {
                let (theirs_lr, theirs_wd) = (float(&case["lr"][k][g]), float(&case["weight_decay"][k][g]));
                let (ours_lr, ours_wd) = (lr.at_group(n, group), wd.at_group(n, group));
                assert!(close(ours_lr, theirs_lr), "{name} n {n} group {g}: lr {ours_lr} not {theirs_lr}");
                assert!(close(ours_wd, theirs_wd), "{name} n {n} group {g}: wd {ours_wd} not {theirs_wd}");
            }
        }
    }
}

#[test]
fn golden_schedules_microbatches() {
    for case in cases(&json("schedules", "microbatches.json"), "cases") {
        let mut schedule = BatchSchedule::constant(uint(&case["global_batch"]), uint(&case["micro_batch"]));
        schedule.round_down = flag(&case["decrease_if_needed"]);
        let ranks = uint(&case["dp"]);
        match text(&case["kind"]) {
            "constant" => {
                schedule.check().unwrap();
                let at = schedule.at(12345, ranks).unwrap();
                assert_eq!(at.global, schedule.global);
                assert_eq!(at.running, uint(&case["running_global_batch"]));
                assert_eq!(at.count, uint(&case["num_microbatches"]));
            }
            "rampup" => {
                schedule.rampup = Some(Rampup {
                    start: uint(&case["start"]),
                    increment: uint(&case["increment"]),
                    samples: uint(&case["rampup_samples"]),
                });
                schedule.check().unwrap();
                for row in cases(&case, "trace") {
                    let at = schedule.at(uint(&row[0]), ranks).unwrap();
                    assert_eq!([at.global, at.running, at.count], [1, 2, 3].map(|k| uint(&row[k])), "{row}");
                }
            }
            other => panic!("unknown kind {other}"),
        }
    }
}

fn plan(case: &Value) -> PipelinePlan {
    let count = |key: &str| case[key].as_u64().map(|n| n as usize);
    let mut plan =
        PipelinePlan::new(count("pp").unwrap(), count("vpp").unwrap_or(1), count("microbatches").unwrap());
    plan.group_size = count("group_size");
    if case["forward_only"].as_bool().unwrap_or(false) {
        plan.kind = ScheduleKind::ForwardOnly;
    }
    plan
}

/// A rank's list in their words.
fn events(schedule: &Schedule, rank: usize) -> String {
    let word = |t: &Transfer| match (t, t.message().payload) {
        (Transfer::Send(_), Payload::Activation) => "sf",
        (Transfer::Send(_), Payload::Gradient) => "sb",
        (Transfer::Receive(_), Payload::Activation) => "rf",
        (Transfer::Receive(_), Payload::Gradient) => "rb",
    };
    let entry = |step: &ScheduleStep| match step {
        ScheduleStep::Run(_) | ScheduleStep::Pair(..) => step.to_string(),
        ScheduleStep::Exchange(all) => all.iter().map(word).collect::<Vec<_>>().join("+"),
    };
    schedule.ranks[rank].iter().map(entry).collect::<Vec<_>>().join(" ")
}

#[test]
fn golden_schedules_pipeline() {
    for case in cases(&json("schedules", "pipeline.json"), "cases") {
        let (name, plan) = (text(&case["name"]), plan(&case));
        let schedule = plan.schedule().unwrap_or_else(|e| panic!("{name}: {e}"));
        check(&schedule, Matching::Blocking).unwrap();
        let theirs = list(&case["events"], |e| text(e).to_string());
        assert_eq!(theirs.len(), plan.pp);
        for (rank, theirs) in theirs.iter().enumerate() {
            assert_eq!(&events(&schedule, rank), theirs, "{name} rank {rank}");
            let warm = plan.warmup(rank, false).unwrap();
            let counts = ["total", "warmup", "remaining"].map(|key| uint(&case[key][rank]) as usize);
            assert_eq!([warm.total, warm.warmup, warm.remaining], counts, "{name} rank {rank}");
            assert_eq!(warm.all_in_warmup, flag(&case["all_in_warmup"][rank]), "{name} rank {rank}");
            if let Some(overlap) = case["warmup_ep_overlap"].as_array() {
                assert_eq!(
                    plan.warmup(rank, true).unwrap().warmup as u64,
                    uint(&overlap[rank]),
                    "{name} {rank}"
                );
            }
        }
        if let Some(table) = case["schedule_table"].as_array() {
            let theirs: Vec<_> =
                table.iter().map(|row| (uint(&row[0]) as usize, uint(&row[1]) as usize)).collect();
            let ours = interleaved_table(plan.micro_batches, plan.vp, plan.group().unwrap());
            assert_eq!(ours, theirs, "{name}");
        }
        let timeline = Timeline::new(&schedule, &Costs::default()).unwrap();
        assert_eq!(timeline.makespan(), float(&case["makespan_f1_b2"]), "{name}");
    }
}

#[test]
fn golden_schedules_pipeline_rejected() {
    for case in cases(&json("schedules", "pipeline.json"), "rejected") {
        let error = plan(&case).schedule().expect_err(&case.to_string()).to_string();
        assert!(error.contains("; take "), "{error} gives no way out");
    }
}

#[test]
fn golden_schedules_layers() {
    for case in cases(&json("schedules", "layers.json"), "cases") {
        let name = text(&case["name"]);
        let mut split = LayerSplit::even(uint(&case["num_layers"]) as usize, 1, 1);
        for (key, value) in case.as_object().unwrap() {
            let count = || uint(value) as usize;
            match key.as_str() {
                "name" | "num_layers" | "stages" | "covers_all_layers_once" => {}
                "pipeline_model_parallel_size" => split.pp = count(),
                "virtual_pipeline_model_parallel_size" => split.vp = count(),
                "num_layers_in_first_pipeline_stage" => split.first = Some(count()),
                "num_layers_in_last_pipeline_stage" => split.last = Some(count()),
                "account_for_embedding_in_pipeline_split" => split.count_embedding = flag(value),
                "account_for_loss_in_pipeline_split" => split.count_loss = flag(value),
                other => panic!("{name}: unknown key {other}"),
            }
        }
        let placement = split.place().unwrap();
        assert_eq!(placement.layers(), split.layers, "{name}");
        if !flag(&case["covers_all_layers_once"]) {
            continue;
        }
        let ours =
            |rank, chunk| placement.at(rank, chunk).map(|s| [s.layers.start as u64, s.layers.len() as u64]);
        for (rank, chunks) in cases(&case, "stages").iter().enumerate() {
            for (chunk, theirs) in chunks.as_array().unwrap().iter().enumerate() {
                assert_eq!(
                    ours(rank, chunk),
                    Some([uint(&theirs[0]), uint(&theirs[1])]),
                    "{name} {rank} {chunk}"
                );
            }
        }
    }
}

fn contents(stage: &Stage) -> Vec<&'static str> {
    let mut all = vec![];
    all.extend(stage.embedding.then_some("embedding"));
    all.extend(stage.layers.clone().map(|_| "decoder"));
    all.extend(stage.mtp.clone().map(|_| "mtp"));
    all.extend(stage.loss.then_some("loss"));
    all
}

#[test]
fn golden_schedules_layouts() {
    for case in cases(&json("schedules", "layers.json"), "layouts") {
        let (layout, pp) = (text(&case["layout"]), uint(&case["pp"]) as usize);
        let placement = LayerPlacement::parse(layout, pp, None);
        if case["rejected"].as_bool().unwrap_or(false) {
            let error = placement.expect_err(layout).to_string();
            assert!(error.contains("; write "), "{error} gives no way out");
            continue;
        }
        let placement = placement.unwrap();
        assert_eq!(placement.vp() as u64, uint(&case["vpp"]), "{layout}");
        assert_eq!(placement.stages().len() as u64, uint(&case["num_stages"]), "{layout}");
        for (rank, chunks) in cases(&case, "stages").iter().enumerate() {
            for (chunk, theirs) in chunks.as_array().unwrap().iter().enumerate() {
                let ours = placement.at(rank, chunk).unwrap();
                assert_eq!(contents(ours), list(theirs, |t| text(t).to_string()), "{layout} {rank} {chunk}");
                let ids = list(&case["decoder_ids"][rank][chunk], |n| uint(n) as usize);
                assert_eq!(ours.layers.clone().collect::<Vec<_>>(), ids, "{layout} {rank} {chunk}");
            }
        }
    }
}
