//! Rank grids and groups against Megatron Core.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

mod common;

use common::{assert_known_files, cases, flag, json, list, text, uint};
use ferrotron_core::grid::{Grid, RankLayout};
use serde_json::Value;

#[test]
fn golden_ranks_folder_is_known() {
    assert_known_files("ranks", |f| ["README.md", "ranks.json"].contains(&f));
}

fn size(case: &Value, key: &str) -> usize {
    uint(&case[key]) as usize
}

fn ranks(v: &Value) -> Vec<usize> {
    list(v, |r| uint(r) as usize)
}

fn grid(case: &Value) -> ferrotron_core::Result<Grid> {
    let layout = RankLayout {
        tp: size(case, "tp"),
        cp: size(case, "cp"),
        pp: size(case, "pp"),
        ep: size(case, "ep"),
        etp: Some(size(case, "etp")),
        order: text(&case["order"]).into(),
        instances: case["dist_opt_instances"].as_u64().unwrap_or(1) as usize,
        cp_levels: if case["hcp"].is_null() { vec![] } else { ranks(&case["hcp"]) },
        ..RankLayout::default()
    };
    Grid::new(layout, size(case, "world_size"))
}

/// Their name of a group to ours, for those that differ.
fn ours(theirs: &str) -> &str {
    match theirs {
        "expt_tp" => "etp",
        "expt_dp" => "edp",
        "tp_ep" => "etp-ep",
        "tp_ep_pp" => "etp-ep-pp",
        "intra_dist_opt_instance" => "instance",
        "intra_expt_dp" => "intra-edp",
        "inter_expt_dp" => "inter-edp",
        same => same,
    }
}

#[test]
fn golden_ranks_groups() {
    for case in cases(&json("ranks", "ranks.json"), "cases") {
        let name = text(&case["name"]);
        let grid = grid(&case).unwrap();
        assert_eq!([grid.dp(), grid.edp()], [size(&case, "dp"), size(&case, "edp")], "{name}");
        assert_eq!(grid.dense().order(), text(&case["dense_order_used"]), "{name}");
        for (which, axes) in [("dense", grid.dense()), ("expert", grid.expert())] {
            let tokens = case[which].as_object().unwrap();
            assert!(!tokens.is_empty());
            for (token, groups) in tokens {
                assert_eq!(axes.groups_of(token).unwrap(), list(groups, ranks), "{name} {which} {token}");
            }
        }
        for (token, groups) in case["dense"].as_object().unwrap() {
            assert_eq!(grid.groups(token).unwrap(), list(groups, ranks), "{name} {token}");
        }
    }
}

#[test]
fn golden_ranks_views() {
    for case in cases(&json("ranks", "ranks.json"), "cases") {
        let (name, grid) = (text(&case["name"]), grid(&case).unwrap());
        for view in cases(&case, "ranks") {
            let rank = size(&view, "rank");
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
                        assert_eq!(at.pp == 0, flag(theirs), "{name} rank {rank}");
                        continue;
                    }
                    "is_last_stage" => {
                        assert_eq!(at.pp + 1 == grid.layout().pp, flag(theirs), "{name} rank {rank}");
                        continue;
                    }
                    other => panic!("unknown index {other}"),
                };
                assert_eq!(ours as u64, uint(theirs), "{name} rank {rank} {key}");
            }
            for (key, theirs) in view["groups"].as_object().unwrap() {
                if key == "hcp" {
                    for (level, theirs) in theirs.as_array().unwrap().iter().enumerate() {
                        let group = grid.cp_level(level).into_iter().find(|g| g.contains(&rank));
                        assert_eq!(group, Some(ranks(theirs)), "{name} rank {rank} level {level}");
                    }
                    continue;
                }
                let group = grid.group(ours(key), rank).unwrap();
                let theirs = (!theirs.is_null()).then(|| ranks(theirs));
                assert_eq!(group, theirs, "{name} rank {rank} {key}");
            }
        }
    }
}

#[test]
fn golden_ranks_rejected() {
    for case in cases(&json("ranks", "ranks.json"), "rejected") {
        let error = grid(&case).expect_err(&case.to_string()).to_string();
        println!("{error}");
        assert!(error.contains("; take ") || error.contains("; put "), "{error} gives no way out");
    }
}
