//! Process grids and groups against golden vectors of Megatron Core (area `ranks`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

#[path = "../../../tests/support/golden.rs"]
mod golden;

use ferrotron_core::grid::{Grid, RankLayout};
use golden::{Area, count, counts, list, only_keys, text};
use serde_json::Value;

fn ranks(v: &Value) -> Vec<usize> {
    v.as_array().unwrap().iter().map(|r| golden::as_count(r).unwrap()).collect()
}

fn grid(case: &Value) -> ferrotron_core::Result<Grid> {
    let size = |key: &str| if case[key].is_null() { 1 } else { count(case, key) };
    let layout = RankLayout {
        tp: size("tp"),
        cp: size("cp"),
        pp: size("pp"),
        ep: size("ep"),
        etp: (!case["etp"].is_null()).then(|| count(case, "etp")),
        order: case["order"].as_str().unwrap_or("tp-cp-ep-dp-pp").into(),
        instances: size("dist_opt_instances"),
        cp_levels: counts(case, "hcp"),
        ..RankLayout::default()
    };
    Grid::new(layout, count(case, "world_size"))
}

/// Our name of a group that the peer names otherwise.
fn ours(theirs: &str) -> &str {
    match theirs {
        "expt_tp" => "etp",
        "expt_dp" => "edp",
        "tp_ep" => "etp-ep",
        "tp_ep_pp" => "etp-ep-pp",
        "intra_dist_opt_instance" => "instance",
        "intra_expt_dp" => "intra-edp",
        "inter_expt_dp" => "inter-edp",
        "tp" | "pp" | "cp" | "dp" | "dp_cp" | "tp_cp" | "tp_dp" | "tp_dp_cp" | "mp" | "embd" | "pos_embd"
        | "ep" | "intra_dp_cp" => theirs,
        other => panic!("the format has no group {other}"),
    }
}

const CONFIGURATION: [&str; 9] =
    ["world_size", "tp", "cp", "pp", "ep", "etp", "order", "dist_opt_instances", "hcp"];

#[test]
fn golden_ranks() {
    for area in Area::all("ranks") {
        area.known_files(|file| file == "ranks.json");
        let json = area.json("ranks.json");
        only_keys("ranks.json", &json, &["producer", "cases", "rejected"]);
        let mut report = area.report();
        for case in list(&json, "cases") {
            let name = text(case, "name");
            report.case(name, || {
                let results = ["name", "dp", "edp", "dense", "expert", "dense_order_used", "ranks"];
                only_keys(name, case, &[&CONFIGURATION[..], &results].concat());
                groups(case);
                views(case);
            });
        }
        for (i, case) in list(&json, "rejected").iter().enumerate() {
            report.case(&format!("rejected {i}"), || {
                only_keys("rejected", case, &[&CONFIGURATION[..], &["name", "dp", "edp", "error"]].concat());
                let error = grid(case).expect_err(&case.to_string()).to_string();
                println!("{error}");
                assert!(error.contains("; "), "{error} does not say what to change");
            });
        }
        report.finish();
    }
}

/// The lists of groups of both grids.
fn groups(case: &Value) {
    let grid = grid(case).unwrap();
    assert_eq!([grid.dp(), grid.edp()], [count(case, "dp"), count(case, "edp")]);
    assert_eq!(grid.dense().order(), text(case, "dense_order_used"));
    let lists = |v: &Value| v.as_array().unwrap().iter().map(ranks).collect::<Vec<_>>();
    for (which, axes) in [("dense", grid.dense()), ("expert", grid.expert())] {
        let tokens = case[which].as_object().unwrap();
        assert!(!tokens.is_empty());
        for (token, groups) in tokens {
            assert_eq!(axes.groups_of(token).unwrap(), lists(groups), "{which} {token}");
        }
    }
    for (token, groups) in case["dense"].as_object().unwrap() {
        assert_eq!(grid.groups(token).unwrap(), lists(groups), "{token}");
    }
}

/// What single ranks see: their index in each group, and its members.
fn views(case: &Value) {
    let grid = grid(case).unwrap();
    assert!(!list(case, "ranks").is_empty(), "no ranks");
    for view in list(case, "ranks") {
        only_keys("ranks", view, &["rank", "index", "groups"]);
        let rank = count(view, "rank");
        let at = grid.coordinates(rank).unwrap();
        for (key, theirs) in view["index"].as_object().unwrap() {
            let ours = match key.as_str() {
                "tp" => at.tp,
                "pp" => at.pp,
                "cp" => at.cp,
                "dp" => at.dp,
                "dp_cp" => at.dp_cp,
                "ep" => at.ep,
                "etp" => at.etp,
                "edp" => at.edp,
                "is_first_stage" => {
                    assert_eq!(Some(at.pp == 0), theirs.as_bool(), "rank {rank}");
                    continue;
                }
                "is_last_stage" => {
                    assert_eq!(Some(at.pp + 1 == grid.layout().pp), theirs.as_bool(), "rank {rank}");
                    continue;
                }
                other => panic!("the format has no index {other}"),
            };
            assert_eq!(Some(ours), golden::as_count(theirs), "rank {rank} {key}");
        }
        for (key, theirs) in view["groups"].as_object().unwrap() {
            if key == "hcp" {
                for (level, theirs) in theirs.as_array().unwrap().iter().enumerate() {
                    let group = grid.cp_level(level).into_iter().find(|g| g.contains(&rank));
                    assert_eq!(group, Some(ranks(theirs)), "rank {rank} level {level}");
                }
                continue;
            }
            let group = grid.group(ours(key), rank).unwrap();
            let theirs = (!theirs.is_null()).then(|| ranks(theirs));
            assert_eq!(group, theirs, "rank {rank} {key}");
        }
    }
}
