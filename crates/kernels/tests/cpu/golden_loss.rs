//! Cross-entropy against golden vectors (area `loss`), on one rank and with the vocabulary split over 2 to 4.

use super::golden::{Area, Tensors, bf16_ulps, bf16s, count, list, number_or, only_keys, text};
use super::support::each_isa;
use ferrotron_kernels::LabelSmoothing;
use ferrotron_kernels::cpu::cross_entropy::{
    Labels, RowStats, cross_entropy, cross_entropy_backward, cross_entropy_with_gradient, row_stats,
};
use ferrotron_kernels::cpu::loss_reduction::{Reduction, reduce_loss, row_weight, valid_rows};
use ferrotron_kernels::cpu::{rows::Rows, vocab::Shard};
use ferrotron_tensor::{DType, Float, bf16};
use serde_json::Value;

const KEYS: [&str; 10] = [
    "name",
    "tokens",
    "vocab",
    "label_smoothing",
    "smoothing_convention",
    "ignore_index",
    "reduction",
    "dloss",
    "dtype",
    "valid",
];

#[test]
fn golden_loss() {
    for area in Area::all("loss") {
        area.known_files(|file| ["loss.json", "loss.safetensors"].contains(&file));
        let (json, t) = (area.json("loss.json"), area.tensors("loss.safetensors"));
        let known = ["producer", "cases", "vocab_parallel_checks", "megatron_smoothing_tp_defect"];
        only_keys("loss.json", &json, &known);
        // Differences between layouts of the reference implementation, stored for information.
        for check in list(&json, "vocab_parallel_checks") {
            only_keys("vocab_parallel_checks", check, &["case", "tp", "max_loss_diff", "max_dlogits_diff"]);
        }
        if !json["megatron_smoothing_tp_defect"].is_null() {
            let known = ["tp1_loss", "tp2_loss_rank0", "tp2_loss_rank1"];
            only_keys("megatron_smoothing_tp_defect", &json["megatron_smoothing_tp_defect"], &known);
        }
        t.only_cases(list(&json, "cases"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            let name = text(case, "name");
            report.case(name, || {
                only_keys(name, case, &KEYS);
                match case["dtype"].as_str() {
                    None | Some("f32") => check(&t, case, t.f32(&format!("{name}/logits"))),
                    Some("bf16") => check(&t, case, bf16s(&t, &format!("{name}/logits"))),
                    Some(other) => panic!("the format has no dtype {other}"),
                }
                t.all_read(&format!("{name}/"));
            });
        }
        report.finish();
    }
}

fn check<T: Float>(golden: &Tensors, case: &Value, logits: Vec<T>) {
    let (name, tokens, vocab) = (text(case, "name"), count(case, "tokens"), count(case, "vocab"));
    assert_eq!(logits.len(), tokens * vocab, "{name}");
    let get = |part: &str| golden.f32(&format!("{name}/{part}"));
    let ids = golden.i64(&format!("{name}/labels"));
    let smooth = number_or(case, "label_smoothing", 0.0) as f32;
    let smoothing = match (case["smoothing_convention"].as_str(), smooth) {
        (None | Some("torch" | "megatron"), 0.0) => LabelSmoothing::None,
        (None | Some("torch"), _) => LabelSmoothing::Torch(smooth),
        (Some("megatron"), _) => LabelSmoothing::Megatron(smooth),
        (Some(other), _) => panic!("the format has no smoothing_convention {other}"),
    };
    let ignore = case["ignore_index"].as_i64().unwrap_or(i64::MIN);
    let (rows, dloss) = (Rows::dense(tokens, vocab), get("dloss"));
    let valid = valid_rows(&ids, ignore);
    if !case["valid"].is_null() {
        assert_eq!(valid, count(case, "valid"), "{name}: valid");
    }
    let reduction = match text(case, "reduction") {
        "none" => None,
        "sum" => Some(Reduction::Sum),
        "mean" => Some(Reduction::Mean),
        other => panic!("the format has no reduction {other}"),
    };
    let weights = match reduction {
        None => dloss.clone(),
        Some(r) => vec![row_weight(dloss[0], valid, r); tokens],
    };
    let labels = |shard| Labels { ids: &ids, ignore, smoothing, shard };
    let results = each_isa(|cpu| {
        let whole = labels(Shard::whole(vocab));
        let (mut loss, mut lse) = (vec![9f32; tokens], vec![9f32; tokens]);
        cross_entropy(cpu, &logits, rows, whole, &mut loss, &mut lse).unwrap();
        let (mut fused, mut fused_loss) = (logits.clone(), vec![9f32; tokens]);
        cross_entropy_with_gradient(cpu, &mut fused, rows, whole, &weights, &mut fused_loss).unwrap();
        assert_eq!(loss, fused_loss, "{name}");
        let mut later = logits.clone();
        let mut stats = vec![RowStats::EMPTY; tokens];
        row_stats(cpu, &logits, rows, whole, &mut stats).unwrap();
        cross_entropy_backward(cpu, &mut later, rows, whole, &stats, &weights).unwrap();
        let mut all = vec![(loss, fused), (fused_loss, later)];
        for parts in [2, 3, 4].into_iter().filter(|parts| *parts <= vocab) {
            // Each rank holds a shard of the vocabulary; statistics are merged in rank order, as in a tensor-parallel loss.
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
                row_stats(cpu, &columns(s), view, labels(*s), &mut stats).unwrap();
                merged.iter_mut().zip(stats).for_each(|(m, s)| *m = m.merge(s));
            }
            let kept = |i: usize, x: f32| if ids[i] == ignore { 0.0 } else { x };
            let loss: Vec<f32> =
                merged.iter().enumerate().map(|(i, m)| kept(i, m.loss(smoothing, vocab))).collect();
            let mut gradient = vec![T::from_f32(9.0); tokens * vocab];
            for s in &shards {
                let mut part = columns(s);
                let view = Rows::dense(tokens, s.len);
                cross_entropy_backward(cpu, &mut part, view, labels(*s), &merged, &weights).unwrap();
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
            // Without valid labels torch divides 0 by 0; here the count is at least 1.
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
