//! Placement of layers on pipeline stages.

use ferrotron_core::pipeline::{LayerPlacement, LayerSplit};
use proptest::prelude::*;

proptest! {
    #[test]
    fn every_layer_lives_once_and_shares_are_even(
        layers in 0usize..40, pp in 1usize..9, vp in 1usize..5, count_embedding: bool, count_loss: bool, mtp in 0usize..3,
    ) {
        let split = LayerSplit { count_embedding, count_loss, mtp, ..LayerSplit::even(layers, pp, vp) };
        let placement = split.place().unwrap();
        let stages = placement.stages();
        prop_assert_eq!((placement.pp(), placement.vp(), stages.len()), (pp, vp, pp * vp));
        let all: Vec<usize> = stages.iter().flat_map(|s| s.layers.clone()).collect();
        prop_assert_eq!(all, (0..layers).collect::<Vec<_>>());
        let load: Vec<usize> = stages
            .iter()
            .map(|s| s.layers.len() + usize::from(s.embedding && count_embedding) + usize::from(s.loss && count_loss))
            .collect();
        if stages.len() > 1 {
            prop_assert!(load.iter().max().unwrap() - load.iter().min().unwrap() <= 1, "{:?}", load);
        }
        for layer in 0..layers {
            let (rank, chunk) = placement.stage_of_layer(layer).unwrap();
            prop_assert!(placement.at(rank, chunk).unwrap().layers.contains(&layer));
        }
        prop_assert_eq!(placement.stage_of_layer(layers), None);
        let again = LayerPlacement::parse(&placement.to_string(), pp, Some(layers)).unwrap();
        prop_assert_eq!(again, placement);
    }

    #[test]
    fn ends_get_what_was_asked(first in 0usize..6, last in 0usize..6, rest in 0usize..20, pp in 3usize..7, vp in 1usize..4) {
        let split = LayerSplit { first: Some(first), last: Some(last), ..LayerSplit::even(first + last + rest, pp, vp) };
        let placement = split.place().unwrap();
        let of = |rank| (0..vp).map(|c| placement.at(rank, c).unwrap().layers.len()).sum::<usize>();
        prop_assert_eq!([of(0), of(pp - 1)], [first, last]);
        let middle: Vec<usize> = (1..pp - 1).flat_map(|r| (0..vp).map(move |c| (r, c)))
            .map(|(r, c)| placement.at(r, c).unwrap().layers.len()).collect();
        prop_assert!(middle.iter().max().unwrap() - middle.iter().min().unwrap() <= 1);
        prop_assert_eq!(placement.layers(), split.layers);
    }

    #[test]
    fn no_text_panics(text in "[EtmL|()*,0-9 x]{0,24}", pp in 0usize..5) {
        if let Ok(placement) = LayerPlacement::parse(&text, pp, None) {
            prop_assert!(placement.stages().len() % pp == 0);
        }
    }
}

#[test]
fn uneven_layers_go_to_middle_stages() {
    let text = |layers, pp, vp| LayerSplit::even(layers, pp, vp).place().unwrap().to_string();
    assert_eq!(text(10, 4, 1), "Ett|ttt|ttt|ttL");
    assert_eq!(text(2, 4, 1), "E|t|t|L");
    assert_eq!(text(5, 2, 2), "Et|tt|t|tL");
    assert_eq!(text(9, 1, 1), "Et*9L");
}

#[test]
fn layout_strings() {
    let placement = LayerPlacement::parse("Et*3|(tt|)*29,m|L", 16, Some(61)).unwrap();
    assert_eq!((placement.vp(), placement.layers()), (2, 61));
    assert_eq!(placement.at(14, 1).unwrap().mtp, 0..1);
    assert_eq!(placement.at(2, 0).unwrap().layers, 5..7);
    assert!(placement.at(16, 0).is_none());
    assert_eq!(LayerPlacement::parse("E((t|)*2,t|)*2L", 1, None).unwrap().to_string(), "Et|t|t|t|t|t|L");
    for (bad, pp, says) in [
        ("Et|tL", 3, "write 3"),
        ("t|tL", 2, "E once"),
        ("Et|t", 2, "L once"),
        ("Et|Et|tL", 3, "E once"),
        ("EtL|t", 2, "L once"),
        ("EtE|tL", 2, "out of place"),
        ("Em|tL", 2, "t after m"),
        ("Et|tm|tmL", 3, "one stage"),
        ("Et|m|tL", 3, "t after m"),
        ("Etm|t|t|tL", 2, "last chunk"),
        ("Et*|L", 2, "count"),
        ("*3", 1, "nothing to repeat"),
        ("Et,*3L", 1, "nothing to repeat"),
        ("E(t|L", 2, "not closed"),
        ("Et)|L", 2, "not open"),
        ("Ex|L", 2, "'x'"),
        ("E(((t*999)*999)*999)L", 1, "longer"),
        ("", 1, "E once"),
    ] {
        let error = LayerPlacement::parse(bad, pp, None).expect_err(bad).to_string();
        assert!(error.contains(says), "{bad}: {error}");
    }
    assert!(LayerPlacement::parse("Et|tL", 2, Some(3)).unwrap_err().to_string().contains("write 3 t"));
}

#[test]
fn contradictory_splits_are_refused() {
    let even = |layers, pp, vp| LayerSplit::even(layers, pp, vp);
    for split in [
        even(4, 0, 1),
        even(4, 1, 0),
        even(4, usize::MAX, 2),
        LayerSplit { first: Some(3), ..even(4, 1, 1) },
        LayerSplit { first: Some(3), last: Some(2), ..even(4, 4, 1) },
        LayerSplit { first: Some(1), last: Some(2), ..even(4, 2, 1) },
        LayerSplit { first: Some(1), count_loss: true, ..even(8, 4, 1) },
    ] {
        assert!(split.place().is_err(), "{split:?}");
    }
}
