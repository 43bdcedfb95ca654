//! Rank grids: properties of every layout, and the errors for invalid ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

use ferrotron_core::grid::{Axis, Grid, ModelSizes, RankLayout};
use proptest::prelude::*;

/// Groups that cover every rank exactly once.
const PARTITIONS: [&str; 18] = [
    "tp",
    "cp",
    "dp",
    "pp",
    "dp-cp",
    "tp-cp",
    "tp-dp",
    "tp-pp",
    "tp-dp-cp",
    "ep",
    "etp",
    "edp",
    "etp-ep",
    "etp-ep-pp",
    "intra-dp-cp",
    "intra-edp",
    "inter-edp",
    "instance",
];

fn size() -> impl Strategy<Value = usize> {
    prop::sample::select(vec![1usize, 2, 3, 4])
}

prop_compose! {
    fn layout()(
        tp in size(), cp in size(), pp in size(), ep in size(),
        etp in prop::option::of(size()), dp in prop::option::of(size()),
        order in prop::sample::select(vec!["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp", "tp-dp-cp-ep-pp", "dp-tp-ep-cp-pp"]),
    ) -> RankLayout {
        RankLayout { tp, cp, pp, ep, etp, dp, order: order.into(), ..RankLayout::default() }
    }
}

proptest! {
    /// Every group that covers the world partitions it into equal disjoint parts, and coordinates are positions in
    /// groups.
    #[test]
    fn groups_partition_the_world(layout in layout()) {
        let world = layout.world().unwrap();
        let Ok(grid) = Grid::new(layout.clone(), world) else {
            // Only an order that does not end in pp can be invalid for its own world.
            prop_assert!(!layout.order.ends_with("pp") && layout.pp > 1);
            return Ok(());
        };
        for name in PARTITIONS {
            let groups = grid.groups(name).unwrap();
            let mut all: Vec<usize> = groups.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..world).collect::<Vec<_>>(), "{}", name);
            prop_assert!(groups.iter().all(|g| g.len() == groups[0].len() && g.is_sorted()), "{}", name);
        }
        for rank in 0..world {
            let at = grid.coordinates(rank).unwrap();
            let place = |name| grid.group(name, rank).unwrap().unwrap().iter().position(|r| *r == rank).unwrap();
            let ours = [at.tp, at.cp, at.dp, at.dp_cp, at.pp, at.etp, at.ep, at.edp];
            prop_assert_eq!(ours, ["tp", "cp", "dp", "dp-cp", "pp", "etp", "ep", "edp"].map(place));
            let d = grid.dense();
            let back: usize = Axis::ALL.iter().map(|a| d.index(rank, *a) * d.stride(*a)).sum();
            prop_assert_eq!(back, rank);
        }
        prop_assert_eq!(grid.dense().groups(&[Axis::Pp]), grid.expert().groups(&[Axis::Pp]));
    }

    /// A layout is valid if it divides the world, and the numbers of ranks that an error suggests are valid.
    #[test]
    fn errors_suggest_valid_worlds(layout in layout(), world in 1usize..64) {
        let layout = RankLayout { dp: None, order: "tp-cp-ep-dp-pp".into(), ..layout };
        let (dense, expert) = (layout.tp * layout.cp * layout.pp, layout.etp() * layout.ep * layout.pp);
        let divides = world % dense == 0 && world % expert == 0;
        match Grid::new(layout.clone(), world) {
            Ok(grid) => {
                prop_assert!(divides);
                prop_assert_eq!([grid.dp() * dense, grid.edp() * expert], [world, world]);
            }
            Err(error) => {
                prop_assert!(!divides);
                let text = error.to_string();
                let advice = text.split("; take ").nth(1).unwrap();
                let mut named = 0;
                for part in advice.split(", or ") {
                    if let Some(worlds) = part.strip_suffix(" ranks") {
                        for near in worlds.split(" or ") {
                            Grid::new(layout.clone(), near.parse().unwrap()).unwrap();
                            named += 1;
                        }
                    } else {
                        let (key, values) = part.split_once('=').unwrap();
                        for value in values.split(" or ") {
                            let n = value.parse().unwrap();
                            let mut near = layout.clone();
                            match key {
                                "tp" => near.tp = n,
                                "cp" => near.cp = n,
                                "pp" => near.pp = n,
                                "ep" => near.ep = n,
                                "etp" => near.etp = Some(n),
                                other => panic!("{other}"),
                            }
                            Grid::new(near, world).unwrap();
                        }
                    }
                }
                prop_assert!(named > 0);
            }
        }
    }

    #[test]
    fn layouts_parse_as_displayed(layout in layout()) {
        let again: RankLayout = layout.to_string().parse().unwrap();
        prop_assert_eq!(again.world().unwrap(), layout.world().unwrap());
        prop_assert_eq!((again.tp, again.cp, again.pp, again.ep, again.etp(), again.order),
            (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp(), layout.order));
    }
}

fn refusal(layout: RankLayout, world: usize) -> String {
    Grid::new(layout, world).unwrap_err().to_string()
}

#[test]
fn errors_say_what_to_change() {
    let l = RankLayout::default;
    let cases = [
        (
            refusal(RankLayout { tp: 4, ..l() }, 6),
            "6 ranks do not divide by tp·cp·pp = 4·1·1 = 4; take 4 or 8 ranks, or tp=3 or 6",
        ),
        (
            refusal(RankLayout { tp: 2, ep: 8, ..l() }, 8),
            "8 ranks do not divide by etp·ep·pp = 2·8·1 = 16; take 16 ranks, or etp=1, or ep=4",
        ),
        (refusal(RankLayout { vp: 2, ..l() }, 1), "vp=2 needs a pipeline; set vp=1, or pp=2 or more"),
        (
            refusal(RankLayout { tp: 2, dp: Some(3), ..l() }, 8),
            "tp=2,dp=3 does not make 8 ranks; take 6 ranks or dp=4",
        ),
        (
            refusal(RankLayout { tp: 2, order: "cp-dp-pp".into(), ..l() }, 8),
            "the order \"cp-dp-pp\" leaves out tp, which is 2 here; add tp, as in tp-cp-ep-dp-pp",
        ),
        (
            refusal(RankLayout { order: "tp-xp".into(), ..l() }, 1),
            "the order \"tp-xp\": \"xp\" is not an axis; the axes are tp, cp, ep, dp and pp",
        ),
        (
            refusal(RankLayout { instances: 3, ..l() }, 8),
            "3 optimizer instances must divide the 8 ranks of dp·cp and the 8 replicas of each expert; take 2 or 4",
        ),
    ];
    for (ours, expected) in cases {
        assert_eq!(ours, expected);
    }
    for bad in [
        RankLayout { tp: 0, ..l() },
        RankLayout { dp: Some(0), ..l() },
        RankLayout { pp: usize::MAX, ep: 2, ..l() },
    ] {
        refusal(bad, 8);
    }
    refusal(l(), 0);
    assert!(Grid::new(l(), 2).unwrap().coordinates(2).is_err());
    assert!(Grid::new(l(), 2).unwrap().groups("tp-tp").is_err());
}

#[test]
fn layout_strings() {
    let layout: RankLayout = "tp=2, pp=2,ep=4,etp=1".parse().unwrap();
    assert_eq!((layout.tp, layout.pp, layout.ep, layout.etp, layout.dp), (2, 2, 4, Some(1), None));
    assert_eq!(layout.world().unwrap(), 8, "lcm(4, 8)");
    assert_eq!("tp=2,cp=2,dp=3".parse::<RankLayout>().unwrap().world().unwrap(), 12);
    // Expert-parallel ranks that the dense grid does not need become data-parallel ranks.
    assert_eq!(Grid::of("ep=4".parse().unwrap()).unwrap().dp(), 4);
    for bad in ["tp", "tp=0", "tp=x", "xp=2", "tp=2,tp=2", "tp=-1", "=3"] {
        assert!(bad.parse::<RankLayout>().is_err(), "{bad}");
    }
}

#[test]
fn the_model_must_be_divisible() {
    let model = ModelSizes { heads: 12, ffn: 32, experts: 8, expert_ffn: 16, ..ModelSizes::default() };
    let check = |l: RankLayout| l.check_model(&model).map_err(|e| e.to_string());
    assert_eq!(check(RankLayout { tp: 4, ep: 8, ..RankLayout::default() }), Ok(()));
    assert_eq!(
        check(RankLayout { tp: 3, ..RankLayout::default() }).unwrap_err(),
        "tp=3 does not divide the 32 MLP columns of the model; take tp=2 or 4"
    );
    assert_eq!(
        check(RankLayout { ep: 3, ..RankLayout::default() }).unwrap_err(),
        "ep=3 does not divide the 8 experts of the model; take ep=1, 2, 4 or 8"
    );
    assert_eq!(
        check(RankLayout { etp: Some(3), ..RankLayout::default() }).unwrap_err(),
        "etp=3 does not divide the 16 columns of an expert's MLP; take etp=2 or 4"
    );
}

/// Two grids over 16 ranks.
#[test]
fn two_grids_over_16_ranks() {
    let layout = RankLayout { tp: 2, cp: 2, pp: 2, ep: 4, etp: Some(1), ..RankLayout::default() };
    let grid = Grid::new(layout, 16).unwrap();
    assert_eq!(grid.groups("tp-pp").unwrap()[1], [2, 3, 10, 11]);
    assert_eq!(
        grid.groups("mp").unwrap(),
        grid.groups("pp-tp").unwrap(),
        "the order of axes in a name does not matter"
    );
    assert_eq!(grid.groups("tp_dp_cp").unwrap()[1], (8..16).collect::<Vec<_>>());
    assert_eq!(grid.groups("ep-tp-pp").unwrap()[0], [0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(grid.groups("edp").unwrap()[3], [3, 7]);
    assert_eq!(grid.group("embd", 9).unwrap(), Some(vec![1, 9]));
    assert_eq!(grid.group("pos-embd", 9).unwrap(), None);
}
