//! Chunk maps, padded routing maps, and invalid maps.

use super::devices::*;
use super::permutation::{draws, ints};
use ferrotron_kernels::RowMap;
use ferrotron_tensor::{Category, DType, Tensor};

#[test]
fn chunk_map_reorders_chunks() {
    for h in devices() {
        for (n, most, behind) in
            [(0, 1, 3), (1, 4, 0), (4, 5, 0), (13, 1, 2), (64, 40, 7), (1030, 3, 5), (2500, 9, 0)]
        {
            let sizes = draws(1, n, 0, most + 1);
            let total: i32 = sizes.iter().sum();
            // A random permutation.
            let mut order: Vec<i32> = (0..n as i32).collect();
            for (i, j) in draws(2, n, 0, n as i32).into_iter().enumerate() {
                order.swap(i, j as usize);
            }
            let rows = (total + behind) as usize;
            let start = |c: i32| sizes[..c as usize].iter().sum::<i32>();
            let mut want: Vec<i32> =
                order.iter().flat_map(|c| (0..sizes[*c as usize]).map(move |i| start(*c) + i)).collect();
            want.extend(total..rows as i32);
            let mut inverse = vec![0; rows];
            want.iter().enumerate().for_each(|(to, from)| inverse[*from as usize] = to as i32);
            let (source, back) = (h.ids(&vec![-7; rows]), h.ids(&vec![-7; rows]));
            h.k.chunk_map(&h.s, &h.ids(&sizes), &h.ids(&order), &source, &back).unwrap();
            assert_eq!(h.s.download::<i32>(&source).unwrap(), want, "{} {n}", h.name);
            assert_eq!(h.s.download::<i32>(&back).unwrap(), inverse, "{} {n}", h.name);
        }
    }
}

#[test]
fn routing_maps_are_padded_to_the_alignment() {
    for h in devices() {
        for tokens in [0usize, 1, 15, 129, 1000] {
            for experts in [1usize, 4, 7, 130] {
                for align in [1usize, 8, 16, 128] {
                    let mut map: Vec<u8> =
                        draws(3, tokens * experts, 0, 5).iter().map(|d| u8::from(*d == 0)).collect();
                    // One expert has every token, one none, one all but the last.
                    for (i, on) in map.iter_mut().enumerate() {
                        match i % experts {
                            1 => *on = 1,
                            2 => *on = 0,
                            3 => *on = u8::from(i / experts + 1 < tokens),
                            _ => {}
                        }
                    }
                    let mut want = map.clone();
                    for e in 0..experts {
                        let count = map.iter().skip(e).step_by(experts).filter(|on| **on == 1).count();
                        let missing = count.next_multiple_of(align) - count;
                        let column = want.iter_mut().skip(e).step_by(experts);
                        column.filter(|on| **on == 0).take(missing).for_each(|on| *on = 1);
                    }
                    let t = h.s.upload(&map, &[tokens, experts], Category::Workspace).unwrap();
                    h.k.pad_routing_map(&h.s, align, &t).unwrap();
                    let what = format!("{} {tokens}x{experts} by {align}", h.name);
                    assert_eq!(h.s.download::<u8>(&t).unwrap(), want, "{what}");
                }
            }
        }
    }
}

#[test]
fn sorting_twice_gives_the_same_map() {
    for h in devices() {
        let index = ints(&h, &[3000, 4], &draws(9, 12000, -1, 64));
        let sorted = || {
            let junk = |n: usize| ints(&h, &[n], &vec![-9; n]);
            let map = RowMap {
                offsets: junk(65),
                counts: junk(64),
                rows: ints(&h, &[3000, 4], &[0; 12000]),
                source: junk(12000),
            };
            h.k.sort_by_expert(&h.s, &index, 0, 1, &map).unwrap();
            (h.s.download::<i32>(&map.rows).unwrap(), h.s.download::<i32>(&map.source).unwrap())
        };
        assert_eq!(sorted(), sorted(), "{}", h.name);
    }
}

#[test]
fn invalid_maps_are_errors() {
    for h in devices() {
        let (k, s) = (&h.k, &h.s);
        let i = |shape: &[usize]| ints(&h, shape, &vec![0; shape.iter().product()]);
        let f = |dtype, shape: &[usize]| h.tensor(dtype, shape, &vec![0.0; shape.iter().product()]);
        let refused = |what: &str, result: ferrotron_tensor::Result<()>| {
            let error = result.expect_err(&format!("{}: {what}", h.name)).to_string();
            assert!(error.len() > 15 && !error.contains('\n'), "{what}: {error}");
        };
        let map = |offsets: &[usize], counts: &[usize], rows: &[usize], source: usize| RowMap {
            offsets: i(offsets),
            counts: i(counts),
            rows: i(rows),
            source: i(&[source]),
        };
        let good = || map(&[4], &[3], &[5, 2], 10);
        refused("sort by 0", k.sort_by_expert(s, &i(&[5, 2]), 0, 0, &good()));
        refused("flat selections", k.sort_by_expert(s, &i(&[10]), 0, 1, &map(&[4], &[3], &[10], 10)));
        refused("short rows", k.sort_by_expert(s, &i(&[5, 2]), 0, 1, &map(&[4], &[3], &[4, 2], 10)));
        refused(
            "offsets of other experts",
            k.sort_by_expert(s, &i(&[5, 2]), 0, 1, &map(&[3], &[3], &[5, 2], 10)),
        );
        refused("too few rows", k.sort_by_expert(s, &i(&[5, 2]), 0, 1, &map(&[4], &[3], &[5, 2], 9)));
        refused(
            "too few aligned rows",
            k.sort_by_expert(s, &i(&[5, 2]), 0, 16, &map(&[4], &[3], &[5, 2], 47)),
        );
        k.sort_by_expert(s, &i(&[5, 2]), 0, 16, &map(&[4], &[3], &[5, 2], 48)).unwrap();
        refused("floats for selections", k.sort_by_expert(s, &f(DType::F32, &[5, 2]), 0, 1, &good()));
        refused(
            "transposed selections",
            k.sort_by_expert(s, &i(&[2, 5]).transpose(0, 1).unwrap(), 0, 1, &good()),
        );

        for dtype in DTYPES {
            let r = |shape: &[usize]| f(dtype, shape);
            let other =
                |shape: &[usize]| f(if dtype == DType::F32 { DType::BF16 } else { DType::F32 }, shape);
            refused("no selections", k.gather_rows(s, &r(&[5, 3]), &i(&[9]), 0, &r(&[9, 3])));
            refused("widths", k.gather_rows(s, &r(&[5, 3]), &i(&[9]), 2, &r(&[9, 4])));
            refused("rows", k.gather_rows(s, &r(&[5, 3]), &i(&[9]), 2, &r(&[8, 3])));
            refused("types", k.gather_rows(s, &r(&[5, 3]), &i(&[9]), 2, &other(&[9, 3])));
            refused("a float source", k.gather_rows(s, &r(&[5, 3]), &r(&[9]), 2, &r(&[9, 3])));
            let transposed = r(&[3, 5]).transpose(0, 1).unwrap();
            refused("transposed rows", k.gather_rows(s, &transposed, &i(&[9]), 2, &r(&[9, 3])));
            let x = r(&[9, 3]);
            refused("in place", k.gather_rows(s, &x, &i(&[9]), 1, &x));
            refused("tokens of a map", k.moe_permute(s, &r(&[4, 3]), &good(), &r(&[10, 3])));
            refused("rows of a map", k.moe_permute(s, &r(&[5, 3]), &good(), &r(&[9, 3])));
            refused("types of a map", k.moe_permute(s, &r(&[5, 3]), &good(), &other(&[10, 3])));
            let w = |shape: &[usize]| f(DType::F32, shape);
            refused("weights", k.moe_unpermute_backward(s, &r(&[5, 3]), &i(&[9]), &w(&[4, 2]), &r(&[9, 3])));
            refused(
                "16-bit weights",
                k.moe_unpermute_backward(s, &r(&[5, 3]), &i(&[9]), &f(DType::BF16, &[5, 2]), &r(&[9, 3])),
            );
            refused("sums of others", k.moe_unpermute(s, &r(&[9, 3]), &i(&[5, 2]), None, &r(&[4, 3])));
            refused("widths of sums", k.moe_unpermute(s, &r(&[9, 3]), &i(&[5, 2]), None, &r(&[5, 4])));
            refused(
                "weights of sums",
                k.moe_unpermute(s, &r(&[9, 3]), &i(&[5, 2]), Some(&w(&[5, 3])), &r(&[5, 3])),
            );
            refused(
                "dtype of dprobs",
                k.moe_unpermute_dprobs(s, &r(&[9, 3]), &i(&[5, 2]), &r(&[5, 3]), &f(DType::BF16, &[5, 2])),
            );
            refused(
                "shape of dprobs",
                k.moe_unpermute_dprobs(s, &r(&[9, 3]), &i(&[5, 2]), &r(&[5, 3]), &w(&[5, 3])),
            );
        }
        let bf16_out: Tensor = f(DType::BF16, &[5, 3]);
        refused(
            "bf16 sums of f32 rows",
            k.moe_unpermute(s, &f(DType::F32, &[9, 3]), &i(&[5, 2]), None, &bf16_out),
        );
        refused("f16 rows", k.gather_rows(s, &f(DType::F16, &[5, 3]), &i(&[9]), 2, &f(DType::F16, &[9, 3])));
        refused("values", k.gather_values(s, &f(DType::F32, &[5]), &i(&[9]), &f(DType::F32, &[8])));
        refused("types of values", k.gather_values(s, &f(DType::F32, &[5]), &i(&[9]), &i(&[9])));
        refused("16-bit values", k.gather_values(s, &f(DType::BF16, &[5]), &i(&[9]), &f(DType::BF16, &[9])));
        refused("chunks", k.chunk_map(s, &i(&[3]), &i(&[4]), &i(&[9]), &i(&[9])));
        refused("the inverse map", k.chunk_map(s, &i(&[3]), &i(&[3]), &i(&[9]), &i(&[8])));
        refused("a map of integers", k.pad_routing_map(s, 16, &i(&[5, 2])));
        let u = s.zeros(&[5, 2], DType::U8, Category::Workspace).unwrap();
        refused("multiples of 0", k.pad_routing_map(s, 0, &u));
        refused("a flat map", k.pad_routing_map(s, 16, &u.view(&[10]).unwrap()));
    }
}
