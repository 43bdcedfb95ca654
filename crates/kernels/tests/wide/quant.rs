//! FP8 quantization in both orientations.

use super::scene::Scene;
use ferrotron_kernels::{Fp8Tensor, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::{Category, DType, Tensor};
use std::ops::Range;

/// Part of one row of a matrix.
fn line(t: &Tensor, row: usize, columns: &Range<usize>) -> Tensor {
    t.narrow(0, row, 1).unwrap().narrow(1, columns.start, columns.len()).unwrap()
}

fn host(h: &Scene, t: &Tensor) -> Vec<u8> {
    h.cpu.s.download::<u8>(&t.as_bytes().unwrap()).unwrap()
}

/// 128 rows at a time, which hold whole scaling blocks, in every scaling mode.
pub fn both_orientations(h: &Scene) {
    let (k, s, cpu) = (&h.large.k, &h.large.s, &h.cpu);
    let width = h.size(28_672, 128);
    let rows = h.rows(width, 1);
    let x = h.random(DType::BF16, [rows, width], 1);
    let groups = h.ranges(rows, width, 128, 128);
    let columns = [0, 1, width / 2, width - 2, width - 1];
    for scaling in [ScalingMode::Block1x128, ScalingMode::Block128x128, ScalingMode::PerTensor] {
        let empty = |shape| Fp8Tensor::empty(s, shape, DType::E4M3, scaling, Category::Workspace).unwrap();
        let (by_row, by_column) = (empty([rows, width]), empty([width, rows]));
        let [scale, cpu_scale] = h.both(&[64f32], &[1]);
        let [amax, cpu_amax] = h.both(&[0f32], &[1]);
        quantize(h, true, &x, (scaling, &scale, &amax), [&by_row, &by_column]);
        for g in &groups {
            let what = format!("{scaling:?} of rows {g:?}");
            let part = h.fetch(&x.narrow(0, g.start, g.len()).unwrap());
            let empty =
                |shape| Fp8Tensor::empty(&cpu.s, shape, DType::E4M3, scaling, Category::Workspace).unwrap();
            let (rows8, columns8) = (empty([g.len(), width]), empty([width, g.len()]));
            quantize(h, false, &part, (scaling, &cpu_scale, &cpu_amax), [&rows8, &columns8]);
            h.same(&what, &by_row.data, std::slice::from_ref(g), &rows8.data);
            for c in columns {
                let want = host(h, &columns8.data.narrow(0, c, 1).unwrap());
                assert_eq!(h.bytes(&line(&by_column.data, c, g)), want, "{what}, column {c}");
            }
            // Scales of the first and of the last block of columns.
            if scaling == ScalingMode::Block1x128 {
                for block in [0, width / 128 - 1] {
                    let want = host(h, &rows8.scale_inv.narrow(0, block, 1).unwrap());
                    assert_eq!(h.bytes(&line(&by_row.scale_inv, block, g)), want, "{what}, scales {block}");
                }
                let block = g.start / 128;
                let want = host(h, &columns8.scale_inv.narrow(0, 0, 1).unwrap());
                let ours = h.bytes(&by_column.scale_inv.narrow(0, block, 1).unwrap());
                assert_eq!(ours, want, "{what}, scales of columns");
            }
        }
        if scaling != ScalingMode::PerTensor {
            continue;
        }
        let most = s.zeros(&[1], DType::F32, Category::Workspace).unwrap();
        k.amax(s, &x, &most).unwrap();
        assert_eq!(h.number(&amax), h.number(&most), "amax while quantizing");

        // With one scale, the transpose of one orientation is the other.
        let transposed = empty([width, rows]);
        k.fp8_transpose(s, &by_row, &transposed).unwrap();
        for (c, g) in columns.iter().flat_map(|c| groups.iter().map(move |g| (*c, g))) {
            let [ours, want] = [&transposed, &by_column].map(|t| h.bytes(&line(&t.data, c, g)));
            assert_eq!(ours, want, "fp8_transpose, column {c} of rows {g:?}");
        }
        drop((transposed, by_column));
        let back = h.empty(DType::BF16, &[rows, width]);
        k.dequantize(s, &by_row, &back).unwrap();
        let data = h.gather(&by_row.data, &groups);
        let wanted = h.cpu_empty(DType::BF16, data.shape());
        let q = Fp8Tensor { data, scale_inv: h.fetch(&by_row.scale_inv), scaling, cols: width, pow2: false };
        cpu.k.dequantize(&cpu.s, &q, &wanted).unwrap();
        h.same("dequantize", &back, &groups, &wanted);
    }
}

/// Quantizes with scales of blocks, or with a given one.
fn quantize(
    h: &Scene,
    large: bool,
    x: &Tensor,
    (scaling, scale, amax): (ScalingMode, &Tensor, &Tensor),
    [rows, columns]: [&Fp8Tensor; 2],
) {
    let side = if large { &h.large } else { &h.cpu };
    let range = match scaling {
        ScalingMode::PerTensor => ScaleSource::Given { scale, amax },
        _ => ScaleSource::Blocks { pow2: false },
    };
    let q = Quantize { x, range, rows: Some(rows), cols: Some(columns), sums: None };
    side.k.quantize(&side.s, &q).unwrap();
}
