use super::golden::{Golden, bf16_ulps, count, number, text};
use super::support::each_isa;
use ferrotron_kernels::LabelSmoothing;
use ferrotron_kernels::cpu::cross_entropy::{
    Labels, RowStats, cross_entropy, cross_entropy_backward, cross_entropy_with_gradient, row_stats,
};
use ferrotron_kernels::cpu::loss_reduction::{Reduction, reduce_loss, row_weight, valid_rows};
use ferrotron_kernels::cpu::{rows::Rows, vocab::Shard};
use ferrotron_tensor::{DType, Float, bf16};
use serde_json::Value;

#[test]
fn golden_loss() {
    let golden = Golden::open("loss", "loss");
    for case in golden.cases() {
        let name = text(case, "name");
        match text(case, "dtype") {
            "f32" => check(&golden, case, golden.f32(&format!("{name}/logits"))),
            "bf16" => check(&golden, case, golden.bf16(&format!("{name}/logits"))),
            other => panic!("{name}: unknown dtype {other}"),
        }
    }
}

fn check<T: Float>(golden: &Golden, case: &Value, logits: Vec<T>) {
    let (name, tokens, vocab) = (text(case, "name"), count(case, "tokens"), count(case, "vocab"));
    let get = |part: &str| golden.f32(&format!("{name}/{part}"));
    let ids = golden.i64(&format!("{name}/labels"));
    let smooth = number(case, "label_smoothing") as f32;
    let smoothing = match (smooth, text(case, "smoothing_convention")) {
        (0.0, _) => LabelSmoothing::None,
        (_, "torch") => LabelSmoothing::Torch(smooth),
        (_, "megatron") => LabelSmoothing::Megatron(smooth),
        (_, other) => panic!("{name}: unknown smoothing {other}"),
    };
    let ignore = case["ignore_index"].as_i64().unwrap_or(i64::MIN);
    let (rows, dloss) = (Rows::dense(tokens, vocab), get("dloss"));
    let valid = valid_rows(&ids, ignore);
    let reduction = match text(case, "reduction") {
        "none" => None,
        "sum" => Some(Reduction::Sum),
        "mean" => Some(Reduction::Mean),
        other => panic!("{name}: unknown reduction {other}"),
    };
    let weights = match reduction {
        None => dloss.clone(),
        Some(r) => vec![row_weight(dloss[0], valid, r); tokens],
    };
    let labels = |shard| Labels { ids: &ids, ignore, smoothing, shard };
    let results = each_isa(|threads, isa| {
        let whole = labels(Shard::whole(vocab));
        let (mut loss, mut lse) = (vec![9f32; tokens], vec![9f32; tokens]);
        cross_entropy(threads, isa, &logits, rows, whole, &mut loss, &mut lse).unwrap();
        let (mut fused, mut fused_loss) = (logits.clone(), vec![9f32; tokens]);
        cross_entropy_with_gradient(threads, isa, &mut fused, rows, whole, &weights, &mut fused_loss)
            .unwrap();
        assert_eq!(loss, fused_loss, "{name}");
        let mut later = logits.clone();
        let mut stats = vec![RowStats::EMPTY; tokens];
        row_stats(threads, isa, &logits, rows, whole, &mut stats).unwrap();
        cross_entropy_backward(threads, isa, &mut later, rows, whole, &stats, &weights).unwrap();
        let mut all = vec![(loss, fused), (fused_loss, later)];
        for parts in [2, 3, 4] {
            // Ranks with a share each, merged in order, as a tensor-parallel loss does.
            let shards: Vec<Shard> = (0..parts)
                .map(|p| (vocab * p / parts, vocab * (p + 1) / parts))
                .map(|(start, end)| Shard { start, len: end - start, total: vocab })
                .collect();
            let columns = |s: &Shard| -> Vec<T> {
                logits.chunks(vocab).flat_map(|r| r[s.start..s.start + s.len].to_vec()).collect()
            };
            let mut merged = vec![RowStats::EMPTY; tokens];
            for s in &shards {
                let mut stats = vec![RowStats::EMPTY; tokens];
                let view = Rows::dense(tokens, s.len);
                row_stats(threads, isa, &columns(s), view, labels(*s), &mut stats).unwrap();
                merged.iter_mut().zip(stats).for_each(|(m, s)| *m = m.merge(s));
            }
            let kept = |i: usize, x: f32| if ids[i] == ignore { 0.0 } else { x };
            let loss: Vec<f32> =
                merged.iter().enumerate().map(|(i, m)| kept(i, m.loss(smoothing, vocab))).collect();
            let mut gradient = vec![T::from_f32(9.0); tokens * vocab];
            for s in &shards {
                let mut part = columns(s);
                let view = Rows::dense(tokens, s.len);
                cross_entropy_backward(threads, isa, &mut part, view, labels(*s), &merged, &weights).unwrap();
                for (row, part) in gradient.chunks_mut(vocab).zip(part.chunks(s.len)) {
                    row[s.start..s.start + s.len].copy_from_slice(part);
                }
            }
            all.push((loss, gradient));
        }
        all
    });

    let is_f32 = T::DTYPE == DType::F32;
    let (per_token, reduced, dlogits) = (get("loss_per_token"), get("loss"), get("dlogits"));
    let close = |what: &str, ours: f32, wanted: f32| {
        let room = if is_f32 { 1e-6 * wanted.abs().max(1.0) } else { 1e-5 * wanted.abs() };
        assert!((ours - wanted).abs() <= room, "{name} {what}: {ours} instead of {wanted}");
    };
    let room = 1e-6 * dloss.iter().fold(1f32, |a, d| a.max(d.abs()));
    for (loss, gradient) in results.into_iter().flatten() {
        loss.iter().zip(&per_token).for_each(|(o, w)| close("loss per token", *o, *w));
        match reduction {
            None => loss.iter().zip(&reduced).for_each(|(o, w)| close("loss", *o, *w)),
            // Torch divides 0 by 0 where nothing is valid; the count is at least 1 here.
            Some(Reduction::Mean) if valid == 0 => {
                assert_eq!(reduce_loss(&loss, valid, Reduction::Mean), 0.0)
            }
            Some(r) => close("loss", reduce_loss(&loss, valid, r), reduced[0]),
        }
        for (i, (ours, wanted)) in gradient.iter().zip(&dlogits).enumerate() {
            let wanted = if ids[i / vocab] == ignore { 0.0 } else { *wanted };
            let ours = ours.to_f32();
            if is_f32 {
                assert!((ours - wanted).abs() <= room, "{name} dlogits[{i}]: {ours} instead of {wanted}");
            } else {
                let off = bf16_ulps(bf16::from_f32(ours), bf16::from_f32(wanted));
                assert!(off <= 1, "{name} dlogits[{i}]: {ours} instead of {wanted}");
            }
        }
    }
}
