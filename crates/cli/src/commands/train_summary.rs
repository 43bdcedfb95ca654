//! The summary that `train` prints at the end: sample, losses and speed.

use crate::format;
use crate::output;
use ferrotron_core::data::synthetic;
use ferrotron_core::train::{Outcome, Run};
use ferrotron_tensor::format_bytes;
use std::time::Instant;

/// The summary.
pub fn text(run: &Run, outcome: &Outcome, started: Instant, sample: Option<&str>) -> String {
    let mut out = String::new();
    if let Some(sample) = sample {
        out += &format!("\na sample:\n{}\n", indent(&format::printable(sample)));
    }
    let mut rows = Vec::new();
    let mut row = |name: &str, value: String| rows.push(vec![format!("  {name}"), value]);
    if let Some(loss) = outcome.loss {
        row("last training loss", format::loss(loss));
    }
    if let Some(eval) = outcome.eval {
        let note = if run.resolved.config.data.is_embedded() {
            let floor = synthetic::entropy_rate();
            format!(
                "{} (held-out synthetic text; no model can be below {floor:.4}, this one is {:+.1} %)",
                format::loss(eval),
                (eval / floor - 1.0) * 1e2
            )
        } else {
            format::loss(eval)
        };
        row("validation loss", note);
    }
    if let Some(best) = run.trainer.best {
        let kept = if run.resolved.config.checkpoint.best { ", kept as checkpoints/best" } else { "" };
        row("best validation loss", format!("{} after step {}{kept}", format::loss(best.loss), best.step));
    }
    if outcome.stopped_early {
        let patience = run.resolved.config.eval.patience;
        let done = format::thousands(run.trainer.step());
        row("early stopping", format!("after step {done}: {patience} evaluations without improvement"));
    }
    if outcome.steps > 0 {
        let rate = outcome.tokens as f64 / outcome.seconds;
        row(
            "speed",
            format!(
                "{} tokens/s, {}",
                format::thousands(rate as u64),
                format::tflops(rate * run.flops_per_token / 1e12)
            ),
        );
        row(
            "time",
            format!("{} for {} steps", format::seconds(outcome.seconds), format::thousands(outcome.steps)),
        );
    }
    if let Some(first) = outcome.first {
        row(
            "first step",
            format!("{} after the process started", format::seconds((first - started).as_secs_f64())),
        );
    }
    if run.trainer.rank.device().gpu().is_some() && outcome.steps > 0 {
        let (replayed, choice) = (run.trainer.steps_replayed(), run.trainer.cuda_graph_decision());
        let of = format!("{} of {}", format::thousands(replayed), format::thousands(outcome.steps));
        row(
            "CUDA graph",
            format!("{of} steps replayed, train.cuda_graph {} ({})", choice.value, choice.reason),
        );
    }
    let sent = run.sent.total();
    if sent > 0 {
        let groups = run.sent.by_kind().into_iter().map(|(group, kinds)| {
            let kinds: Vec<String> = kinds
                .iter()
                .map(|(kind, bytes)| format!("{kind} {}", format_bytes(*bytes as usize)))
                .collect();
            format!("\n    {group}: {}", kinds.join(", "))
        });
        let each = groups.collect::<String>();
        row("communication", format!("{} sent per step by rank 0{each}", format_bytes(sent as usize)));
    }
    // The device's own account has since counted what a profile measures, and the sample.
    let [peak, reserved] = outcome.peak_memory.map(format_bytes);
    row("peak memory", format!("{peak} ({reserved} reserved)"));
    row("run folder", run.dir().display().to_string());
    out += &format!("\n{}", output::table(&rows));
    out
}

fn indent(text: &str) -> String {
    text.lines().map(|l| format!("  | {l}\n")).collect()
}
