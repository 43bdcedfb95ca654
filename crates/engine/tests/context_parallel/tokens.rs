//! Which tokens each context-parallel rank holds.

use super::golden::{self, Area, count, counts, list, only_keys};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{GroupRank, Tokens};
use serde_json::Value;

/// Tokens of every rank, as the set lists them and as we deal them out.
fn compare(case: &Value, key: &str, layout: &Layout) {
    let cp = count(case, "cp");
    assert_eq!(list(case, key).len(), cp, "{case}");
    for rank in 0..cp {
        let wanted: Vec<Option<usize>> =
            list(case, key)[rank].as_array().unwrap().iter().map(golden::as_count).collect();
        let tokens = Tokens::new(layout, GroupRank { rank, size: cp }, 1).unwrap();
        assert_eq!(tokens.rows(), wanted, "rank {rank} of {cp}");
    }
}

#[test]
fn golden_context_parallel_positions() {
    let mut seen = 0;
    for area in Area::all("attention").iter().filter(|area| area.has("rope.json")) {
        let json = area.json("rope.json");
        let plain = list(&json, "context_parallel");
        let packed = list(&json, "context_parallel_packed");
        if plain.is_empty() && packed.is_empty() {
            continue;
        }
        let mut report = area.report();
        for (i, case) in plain.iter().enumerate() {
            report.case(&format!("context_parallel {i}"), || {
                only_keys("context_parallel", case, &["cp", "seq", "positions"]);
                compare(case, "positions", &Layout::Rows { count: 1, len: count(case, "seq") });
            });
        }
        for (i, case) in packed.iter().enumerate() {
            report.case(&format!("context_parallel_packed {i}"), || {
                only_keys("context_parallel_packed", case, &["cp", "cu_seqlens", "token_ids"]);
                let offsets = counts(case, "cu_seqlens").into_iter().map(|n| n as i32).collect();
                compare(case, "token_ids", &Layout::Packed { offsets });
            });
        }
        seen += plain.len() + packed.len();
        report.finish();
    }
    assert!(seen > 0, "no set lists the positions of context-parallel ranks");
}

fn layouts() -> Vec<Layout> {
    vec![
        Layout::Rows { count: 3, len: 7 },
        Layout::Rows { count: 1, len: 0 },
        Layout::Rows { count: 0, len: 5 },
        Layout::Packed { offsets: vec![0] },
        Layout::Packed { offsets: vec![0, 0] },
        Layout::Packed { offsets: vec![0, 0, 1, 1, 4, 13, 20, 20] },
    ]
}

/// Every token is a row of exactly one rank; what is taken can be put back; padding is at the end of its sequence.
#[test]
fn every_token_is_held_once() {
    for layout in layouts() {
        for (size, tp) in [1, 2, 3, 4].into_iter().flat_map(|c| [1, 2, 4].map(|t| (c, t))) {
            let what = format!("{layout:?} over {size} with tp {tp}");
            let n = layout.tokens();
            let values: Vec<i64> = (0..2 * n as i64).collect();
            let mut joined = vec![-1; 2 * n];
            let mut total = 0;
            for rank in 0..size {
                let t = Tokens::new(&layout, GroupRank { rank, size }, tp).unwrap();
                assert_eq!(t.rows().len() % tp, 0, "{what}");
                let local = t.layout().tokens() / size;
                assert_eq!(t.rows().len(), local.next_multiple_of(tp), "{what}");
                assert!(t.rows()[local..].iter().all(Option::is_none), "{what}");
                let lengths = t.layout().lengths();
                assert!(size == 1 || lengths.iter().all(|n| n % (2 * size) == 0), "{what}");
                assert_eq!(lengths.iter().zip(layout.lengths()).filter(|(a, b)| **a < *b).count(), 0);
                total += t.rows().iter().flatten().count();
                let pairs: Vec<(i64, i64)> = values.chunks(2).map(|v| (v[0], v[1])).collect();
                let taken = t.take(&pairs, (-7, -7)).unwrap();
                for (row, token) in taken.iter().zip(t.rows()) {
                    assert_eq!(*row, token.map_or((-7, -7), |i| pairs[i]), "{what}");
                }
                let flat: Vec<i64> = taken.iter().flat_map(|(a, b)| [*a, *b]).collect();
                t.put(&flat, 2, &mut joined).unwrap();
                assert!(t.take(&[0; 500], 0).is_err() && t.put(&[0; 3], 2, &mut [0; 2]).is_err());
            }
            assert_eq!(total, n, "{what}");
            assert_eq!(joined, values, "{what}");
        }
    }
}

#[test]
fn one_rank_keeps_the_order() {
    for layout in layouts() {
        let t = Tokens::new(&layout, GroupRank::SINGLE, 4).unwrap();
        assert_eq!(t.layout(), &layout);
        let n = layout.tokens();
        let ids: Vec<usize> = (0..n).collect();
        let mut padded = ids.clone();
        padded.resize(n.next_multiple_of(4), 99);
        assert_eq!(t.take(&ids, 99).unwrap(), padded);
    }
}

#[test]
fn impossible_batches_are_refused() {
    let two = GroupRank { rank: 1, size: 2 };
    for layout in [
        Layout::Packed { offsets: vec![] },
        Layout::Packed { offsets: vec![0, 5, 3] },
        Layout::Packed { offsets: vec![2, 5] },
        Layout::Packed { offsets: vec![0, i32::MAX] },
        Layout::Rows { count: usize::MAX, len: 3 },
    ] {
        assert!(Tokens::new(&layout, two, 1).is_err(), "{layout:?}");
    }
    let fine = Layout::Rows { count: 1, len: 4 };
    assert!(Tokens::new(&fine, GroupRank { rank: 2, size: 2 }, 1).is_err());
    assert!(Tokens::new(&fine, two, 0).is_err());
    Tokens::new(&Layout::Rows { count: usize::MAX, len: 0 }, two, 1).unwrap();
}

/// Numbers of rows of micro-batches whose length varies: few, and little more than the tokens.
#[test]
fn varying_lengths_have_few_row_counts() {
    for tp in [1, 2, 3, 8] {
        let mut seen = std::collections::BTreeSet::new();
        for tokens in (1..=40_000usize).step_by(11) {
            let layout = Layout::Packed { offsets: vec![0, tokens as i32] };
            let all = Tokens::new(&layout, GroupRank { rank: 0, size: 1 }, tp).unwrap();
            let rows = all.clone().with_few_row_counts(tp);
            assert!(rows.rows().starts_with(all.rows()) && rows.layout() == all.layout());
            let (n, count) = (all.rows().len(), rows.rows().len());
            assert!(rows.rows()[n..].iter().all(Option::is_none));
            assert!(
                count.is_multiple_of(16 * tp) && count <= n + n / 16 + 16 * tp,
                "{tokens} tp {tp}: {count}"
            );
            seen.insert(count);
        }
        assert!(seen.len() <= 16 * 9, "{} row counts with tp {tp}", seen.len());
    }
}
