//! HSDP and HFSDP: shards within groups of data-parallel ranks.

use super::{Case, equal, made, near};

/// HSDP: every instance of the shards has the same bits, and the steps of one rank up to the order of additions.
#[test]
fn hsdp_matches_ddp() {
    for set in [
        &["parallel.fsdp_group=2", "model.tied=true"][..],
        &["parallel.fsdp_group=2", "model.tied=false", "optimizer.kind=muon"],
        &["parallel.fsdp_group=1"],
        &["parallel.fsdp_group=4"],
    ] {
        for (tp, cp, pp, dp) in [(1, 1, 1, 4), (2, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 4)] {
            let case = |zero, set| Case { tp, cp, pp, dp, zero, overlap: true, set };
            let (hybrid, what) = (made(&case(3, set)), format!("tp{tp} cp{cp} pp{pp} dp{dp} {set:?}"));
            near(&what, &hybrid, &made(&case(2, &set[1..])), 1e-5);
            let away: &'static [&'static str] = Vec::leak([set, &["parallel.comm_unit=1GB"]].concat());
            equal(&what, &made(&Case { overlap: false, ..case(3, away) }), &hybrid);
        }
    }
}

/// HFSDP: groups that update a piece of a shard each have the bits of groups that update all of it.
#[test]
fn hfsdp_is_bit_equal_to_hsdp() {
    const OUTER: &str = "parallel.fsdp_outer=optimizer";
    for set in [
        &["parallel.fsdp_group=2", "model.tied=true"][..],
        &["parallel.fsdp_group=2", "model.tied=false", "optimizer.kind=muon"],
        &["parallel.fsdp_group=2", "precision.dtype=bf16", "optimizer.master_dtype=remainder"],
        &[
            "parallel.fsdp_group=2",
            "precision.dtype=bf16",
            "model.ffn=64",
            "precision.recipe=fp8-current",
            "precision.fp8_params=true",
        ],
        &[
            "parallel.fsdp_group=2",
            "precision.dtype=bf16",
            "model.ffn=64",
            "precision.recipe=fp8-delayed",
            "precision.fp8_params=true",
        ],
        &[
            "parallel.fsdp_group=2",
            "precision.dtype=bf16",
            "model.ffn=64",
            "precision.recipe=fp8-block",
            "precision.fp8_params=true",
        ],
        &["parallel.fsdp_group=1", "optimizer.state_dtype=bf16"],
        &["parallel.fsdp_group=4"],
    ] {
        let outer: &'static [&'static str] = Vec::leak([set, &[OUTER]].concat());
        for (tp, cp, pp, dp) in [(1, 1, 1, 4), (2, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 4)] {
            let case = |set, overlap| Case { tp, cp, pp, dp, zero: 3, overlap, set };
            let plain = made(&case(set, true));
            for overlap in [true, false] {
                let what = format!("tp{tp} cp{cp} pp{pp} dp{dp} overlap {overlap} {outer:?}");
                equal(&what, &made(&case(outer, overlap)), &plain);
            }
        }
    }
}
