//! Learning rate, weight decay, batch size, pipeline schedules and layer placement against golden vectors of Megatron Core
//! (area `schedules`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

#[path = "../../../tests/support/golden.rs"]
mod golden;

use ferrotron_core::{
    pipeline::{
        Costs, LayerPlacement, LayerSplit, Matching, Payload, PipelinePlan, Schedule, ScheduleKind,
        ScheduleStep, Stage, Timeline, Transfer, check, interleaved_table,
    },
    schedule::{BatchSchedule, Decay, GroupOverride, LrSchedule, Rampup, WdIncrease, WdSchedule, WsdDecay},
};
use golden::{Area, as_count, count, counts, flag, list, number, only_keys, text};
use serde_json::Value;

const FILES: [&str; 4] = ["lr.json", "microbatches.json", "pipeline.json", "layers.json"];

#[test]
fn golden_schedules_files() {
    for area in Area::all("schedules") {
        area.known_files(|file| FILES.contains(&file));
        assert!(!area.present(&FILES).is_empty(), "{}/schedules has no cases", area.set);
    }
}

/// The area in every set that has the file; no set with it is a failure.
fn areas(file: &str) -> Vec<Area> {
    let mut areas = Area::all("schedules");
    areas.retain(|area| area.has(file));
    assert!(!areas.is_empty(), "no set has schedules/{file}");
    areas
}

fn uint(v: &Value) -> u64 {
    as_count(v).unwrap_or_else(|| panic!("{v} is not a count")) as u64
}

fn close(ours: f64, theirs: f64) -> bool {
    ours == theirs || (ours - theirs).abs() <= 1e-12 * theirs.abs()
}

#[test]
fn golden_schedules_lr_and_wd() {
    for area in areas("lr.json") {
        let json = area.json("lr.json");
        only_keys("lr.json", &json, &["producer", "groups", "cases"]);
        let mut report = area.report();
        for case in list(&json, "cases") {
            report.case(text(case, "name"), || lr_and_wd(case, text(&json, "groups")));
        }
        report.finish();
    }
}

/// Parameter groups as `0: defaults; 1: wd_mult 0; 2: max_lr*0.5, min_lr*0.1`: what each overrides.
fn parameter_groups(text: &str, max_lr: f64, min_lr: f64) -> Vec<GroupOverride> {
    let group = |(i, entry): (usize, &str)| {
        let (number, settings) = entry.split_once(':').unwrap_or_else(|| panic!("group {entry}"));
        assert_eq!(number.trim().parse(), Ok(i), "groups are numbered from 0: {text}");
        let mut group = GroupOverride::default();
        for setting in settings.split(',').map(str::trim) {
            let value =
                |x: &str| x.trim().parse::<f64>().unwrap_or_else(|_| panic!("group setting {setting}"));
            match setting.split_once([' ', '*']) {
                None if setting == "defaults" => {}
                Some(("wd_mult", x)) => group.wd_mult = value(x),
                Some(("max_lr", x)) => group.max_lr = Some(max_lr * value(x)),
                Some(("min_lr", x)) => group.min_lr = Some(min_lr * value(x)),
                _ => panic!("group setting {setting} is not known"),
            }
        }
        group
    };
    text.split(';').map(str::trim).enumerate().map(group).collect()
}

fn lr_and_wd(case: &Value, groups: &str) {
    let known = [
        "name",
        "init_lr",
        "max_lr",
        "min_lr",
        "lr_warmup_steps",
        "lr_decay_steps",
        "lr_decay_style",
        "wsd_decay_steps",
        "lr_wsd_decay_style",
        "start_wd",
        "end_wd",
        "wd_incr_steps",
        "wd_incr_style",
        "increment",
        "steps",
        "num_steps",
        "lr",
        "weight_decay",
    ];
    only_keys(text(case, "name"), case, &known);
    let (max, min) = (number(case, "max_lr"), number(case, "min_lr"));
    let lr = LrSchedule {
        max,
        min,
        init: number(case, "init_lr"),
        warmup: uint(&case["lr_warmup_steps"]),
        decay: uint(&case["lr_decay_steps"]),
        style: match text(case, "lr_decay_style") {
            "constant" => Decay::Constant,
            "linear" => Decay::Linear,
            "cosine" => Decay::Cosine,
            "inverse-square-root" => Decay::InverseSquareRoot,
            "WSD" => Decay::Wsd,
            other => panic!("the format has no lr_decay_style {other}"),
        },
        wsd: as_count(&case["wsd_decay_steps"]).unwrap_or(0) as u64,
        wsd_style: match case["lr_wsd_decay_style"].as_str() {
            None => WsdDecay::default(),
            Some("linear") => WsdDecay::Linear,
            Some("cosine") => WsdDecay::Cosine,
            Some("exponential") => WsdDecay::Exponential,
            Some("minus_sqrt") => WsdDecay::MinusSqrt,
            Some(other) => panic!("the format has no lr_wsd_decay_style {other}"),
        },
    };
    let wd = WdSchedule {
        start: number(case, "start_wd"),
        end: number(case, "end_wd"),
        samples: uint(&case["wd_incr_steps"]),
        style: match text(case, "wd_incr_style") {
            "constant" => WdIncrease::Constant,
            "linear" => WdIncrease::Linear,
            "cosine" => WdIncrease::Cosine,
            other => panic!("the format has no wd_incr_style {other}"),
        },
    };
    lr.check().unwrap();
    wd.check().unwrap();
    let groups = parameter_groups(groups, max, min);
    let (steps, increment) = (uint(&case["steps"]), uint(&case["increment"]));
    let counter: Vec<u64> = list(case, "num_steps").iter().map(uint).collect();
    assert_eq!(counter, (0..=steps).map(|k| k * increment).collect::<Vec<_>>());
    for (k, n) in counter.into_iter().enumerate() {
        for (g, group) in groups.iter().enumerate() {
            let theirs_lr = case["lr"][k][g].as_f64().unwrap();
            let theirs_wd = case["weight_decay"][k][g].as_f64().unwrap();
            let (ours_lr, ours_wd) = (lr.at_group(n, group), wd.at_group(n, group));
            assert!(close(ours_lr, theirs_lr), "step {n} group {g}: lr {ours_lr} instead of {theirs_lr}");
            assert!(close(ours_wd, theirs_wd), "step {n} group {g}: wd {ours_wd} instead of {theirs_wd}");
        }
    }
}

#[test]
fn golden_schedules_microbatches() {
    for area in areas("microbatches.json") {
        let json = area.json("microbatches.json");
        only_keys("microbatches.json", &json, &["producer", "cases"]);
        let mut report = area.report();
        for (i, case) in list(&json, "cases").iter().enumerate() {
            report.case(&format!("microbatches {i}"), || microbatches(case));
        }
        report.finish();
    }
}

fn microbatches(case: &Value) {
    let known = [
        "name",
        "kind",
        "global_batch",
        "micro_batch",
        "dp",
        "decrease_if_needed",
        "num_microbatches",
        "running_global_batch",
        "start",
        "increment",
        "rampup_samples",
        "trace",
    ];
    only_keys("microbatches", case, &known);
    let mut schedule = BatchSchedule::constant(uint(&case["global_batch"]), uint(&case["micro_batch"]));
    schedule.round_down = flag(case, "decrease_if_needed");
    let ranks = uint(&case["dp"]);
    match text(case, "kind") {
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
            assert!(!list(case, "trace").is_empty(), "no trace");
            for row in list(case, "trace") {
                let at = schedule.at(uint(&row[0]), ranks).unwrap();
                assert_eq!([at.global, at.running, at.count], [1, 2, 3].map(|k| uint(&row[k])), "{row}");
            }
        }
        other => panic!("the format has no kind {other}"),
    }
}

const PLAN: [&str; 5] = ["pp", "vpp", "microbatches", "group_size", "forward_only"];

fn plan(case: &Value) -> PipelinePlan {
    let optional = |key: &str| as_count(&case[key]);
    let mut plan =
        PipelinePlan::new(count(case, "pp"), optional("vpp").unwrap_or(1), count(case, "microbatches"));
    plan.group_size = optional("group_size");
    if flag(case, "forward_only") {
        plan.kind = ScheduleKind::ForwardOnly;
    }
    plan
}

/// A rank's schedule in the peer's notation.
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
    for area in areas("pipeline.json") {
        let json = area.json("pipeline.json");
        only_keys("pipeline.json", &json, &["producer", "cases", "rejected"]);
        let mut report = area.report();
        for case in list(&json, "cases") {
            report.case(text(case, "name"), || pipeline(case));
        }
        for (i, case) in list(&json, "rejected").iter().enumerate() {
            report.case(&format!("pipeline rejected {i}"), || {
                only_keys("rejected", case, &[&PLAN[..], &["name", "error"]].concat());
                let error = plan(case).schedule().expect_err(&case.to_string()).to_string();
                assert!(error.contains("; "), "{error} does not say what to change");
            });
        }
        report.finish();
    }
}

fn pipeline(case: &Value) {
    let results = [
        "name",
        "total",
        "all_in_warmup",
        "warmup",
        "remaining",
        "warmup_ep_overlap",
        "events",
        "schedule_table",
        "makespan_f1_b2",
    ];
    only_keys(text(case, "name"), case, &[&PLAN[..], &results].concat());
    let plan = plan(case);
    let schedule = plan.schedule().unwrap_or_else(|e| panic!("{e}"));
    check(&schedule, Matching::Blocking).unwrap();
    let theirs: Vec<&str> = list(case, "events").iter().map(|e| e.as_str().unwrap()).collect();
    assert_eq!(theirs.len(), plan.pp);
    for (rank, theirs) in theirs.iter().enumerate() {
        assert_eq!(&events(&schedule, rank), theirs, "rank {rank}");
        let warm = plan.warmup(rank, false).unwrap();
        let stated = ["total", "warmup", "remaining"].map(|key| uint(&case[key][rank]) as usize);
        assert_eq!([warm.total, warm.warmup, warm.remaining], stated, "rank {rank}");
        assert_eq!(Some(warm.all_in_warmup), case["all_in_warmup"][rank].as_bool(), "rank {rank}");
        if !case["warmup_ep_overlap"].is_null() {
            let overlapped = plan.warmup(rank, true).unwrap().warmup;
            assert_eq!(overlapped, counts(case, "warmup_ep_overlap")[rank], "rank {rank}");
        }
    }
    if !case["schedule_table"].is_null() {
        let pair = |row: &Value| (uint(&row[0]) as usize, uint(&row[1]) as usize);
        let theirs: Vec<_> = list(case, "schedule_table").iter().map(pair).collect();
        let ours = interleaved_table(plan.micro_batches, plan.vp, plan.group().unwrap());
        assert_eq!(ours, theirs);
    }
    let timeline = Timeline::new(&schedule, &Costs::default()).unwrap();
    assert_eq!(timeline.makespan(), number(case, "makespan_f1_b2"));
}

#[test]
fn golden_schedules_layers() {
    for area in areas("layers.json") {
        let json = area.json("layers.json");
        only_keys("layers.json", &json, &["producer", "cases", "layouts"]);
        let mut report = area.report();
        for case in list(&json, "cases") {
            report.case(text(case, "name"), || layers(case));
        }
        for case in list(&json, "layouts") {
            report.case(&layout_name(case), || layout(case));
        }
        report.finish();
    }
}

fn layers(case: &Value) {
    let mut split = LayerSplit::even(count(case, "num_layers"), 1, 1);
    for (key, _) in case.as_object().unwrap().iter().filter(|(_, value)| !value.is_null()) {
        match key.as_str() {
            "name" | "num_layers" | "stages" | "covers_all_layers_once" => {}
            "pipeline_model_parallel_size" => split.pp = count(case, key),
            "virtual_pipeline_model_parallel_size" => split.vp = count(case, key),
            "num_layers_in_first_pipeline_stage" => split.first = Some(count(case, key)),
            "num_layers_in_last_pipeline_stage" => split.last = Some(count(case, key)),
            "account_for_embedding_in_pipeline_split" => split.count_embedding = flag(case, key),
            "account_for_loss_in_pipeline_split" => split.count_loss = flag(case, key),
            other => panic!("the format has no key {other}"),
        }
    }
    let placement = split.place().unwrap();
    assert_eq!(placement.layers(), split.layers);
    if !flag(case, "covers_all_layers_once") {
        return; // a defect of the peer: nothing to compare with
    }
    let ours =
        |rank, chunk| placement.at(rank, chunk).map(|s| [s.layers.start as u64, s.layers.len() as u64]);
    assert_eq!(list(case, "stages").len(), split.pp);
    for (rank, chunks) in list(case, "stages").iter().enumerate() {
        for (chunk, theirs) in chunks.as_array().unwrap().iter().enumerate() {
            let theirs = [uint(&theirs[0]), uint(&theirs[1])];
            assert_eq!(ours(rank, chunk), Some(theirs), "rank {rank} chunk {chunk}");
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

/// The name of a layout's case. One that the peer rejects is not doubtful, whatever it lacks: refusing it is right.
fn layout_name(case: &Value) -> String {
    let kind = if flag(case, "rejected") { "rejected layout" } else { "layout" };
    format!("{kind} {}", text(case, "layout"))
}

#[test]
fn a_rejected_layout_is_not_doubtful() {
    let doubtful = |case: Value| golden::DOUBTFUL.iter().any(|d| (d.case)(&layout_name(&case)));
    assert!(doubtful(serde_json::json!({"layout": "tt|L"})));
    assert!(!doubtful(serde_json::json!({"layout": "tt|L", "rejected": true})));
    assert!(!doubtful(serde_json::json!({"layout": "Et|L"})));
}

fn layout(case: &Value) {
    let known = ["layout", "pp", "vpp", "stages", "decoder_ids", "num_stages", "rejected"];
    only_keys("layouts", case, &known);
    let (layout, pp) = (text(case, "layout"), count(case, "pp"));
    let placement = LayerPlacement::parse(layout, pp, None);
    if flag(case, "rejected") {
        let error = placement.expect_err(layout).to_string();
        assert!(error.contains(layout), "{error} does not name the layout");
        return;
    }
    let placement = placement.unwrap();
    assert_eq!(placement.vp(), count(case, "vpp"));
    assert_eq!(placement.stages().len(), count(case, "num_stages"));
    for (rank, chunks) in list(case, "stages").iter().enumerate() {
        for (chunk, theirs) in chunks.as_array().unwrap().iter().enumerate() {
            let ours = placement.at(rank, chunk).unwrap();
            let theirs: Vec<&str> = theirs.as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
            assert_eq!(contents(ours), theirs, "{rank} {chunk}");
            let ids: Vec<usize> = case["decoder_ids"][rank][chunk]
                .as_array()
                .unwrap()
                .iter()
                .map(|n| uint(n) as usize)
                .collect();
            assert_eq!(ours.layers.clone().collect::<Vec<_>>(), ids, "{rank} {chunk}");
        }
    }
}
