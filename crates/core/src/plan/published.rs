//! The cost model beside published throughput: NVIDIA's performance tables as rows of a CSV file.
//!
//! Columns: model, system, precision, seq, gpus, gbs, mbs, tp, pp, cp, vp, ep, fsdp, note, release, tokens_s_gpu, tflops_gpu, half.
//! Constants of the hardware descriptions may be fitted on rows whose half is `fit`; the others test them.

use super::hardware::{GemmDtype, Hardware};
use super::step_time::{Candidate, StepTime, Workload};
use crate::config::Recipe;
use crate::grid::RankLayout;
use crate::pipeline::ScheduleKind;
use crate::{Error, Result};
use ferrotron_engine::Recompute;
use serde::Deserialize;
use std::collections::BTreeMap;

/// One published row.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedRow {
    /// Columns by name.
    columns: BTreeMap<String, String>,
}

/// A row with what the cost model says of it.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The row.
    pub row: PublishedRow,
    /// Tokens per second and GPU by the cost model.
    pub predicted: f64,
    /// The time of a step, by part.
    pub time: StepTime,
    /// What was assumed to be recomputed.
    pub recompute: Recompute,
    /// Whether the memory estimate allows it.
    pub fits: bool,
}

impl PublishedRow {
    /// A column; empty if absent.
    pub fn text(&self, column: &str) -> &str {
        self.columns.get(column).map_or("", String::as_str)
    }

    fn number(&self, column: &str) -> Result<f64> {
        let text = self.text(column);
        text.parse()
            .map_err(|_| Error::Invalid(format!("published rows: {column} is {text:?}, not a number")))
    }

    fn size(&self, column: &str) -> Result<usize> {
        Ok(if self.text(column).is_empty() { 1 } else { self.number(column)? as usize })
    }

    /// Published tokens per second and GPU.
    pub fn tokens(&self) -> Result<f64> {
        self.number("tokens_s_gpu")
    }

    /// Everything but the release and what was measured.
    fn configuration(&self) -> String {
        let keys = [
            "model",
            "system",
            "precision",
            "seq",
            "gpus",
            "gbs",
            "mbs",
            "tp",
            "pp",
            "cp",
            "vp",
            "ep",
            "fsdp",
        ];
        keys.iter().map(|k| self.text(k)).chain([self.text("note")]).collect::<Vec<_>>().join(",")
    }

    /// What was measured, in one line.
    pub fn title(&self) -> String {
        let of = |k: &str| self.text(k).to_string();
        let layout: Vec<String> =
            ["tp", "pp", "cp", "vp", "ep"].iter().map(|k| format!("{k}{}", self.text(k))).collect();
        format!(
            "{} {} {} {}x mbs{} {} ({})",
            of("model"),
            of("system"),
            of("precision"),
            of("gpus"),
            of("mbs"),
            layout.join(" "),
            of("release")
        )
    }

    /// The preset of its model; none for families that Ferrotron does not train.
    fn preset(&self) -> Option<&'static str> {
        Some(match self.text("model") {
            "Llama3 8B" => "llama-8b",
            "Llama3 70B" | "Llama3 70B LoRA" | "Llama3 70B SFT" => "llama-70b",
            "Llama3.1 405B" => "llama-405b",
            "Qwen3 30B-A3B" => "qwen3-30b-a3b",
            "Qwen3 235B-A22B" => "qwen3-235b-a22b",
            "DeepSeek-V3" => "deepseek-v3",
            "GPT OSS 120B" => "gpt-oss-120b",
            "Kimi K2" => "kimi-k2",
            _ => return None,
        })
    }
}

/// Reads rows; of equal configurations the newest release counts.
pub fn read_rows(text: &str) -> Result<Vec<PublishedRow>> {
    let mut lines = text.lines().filter(|l| !l.trim().is_empty());
    let names: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let mut newest: BTreeMap<String, PublishedRow> = BTreeMap::new();
    for line in lines {
        let fields: Vec<&str> = line.split(',').collect();
        if fields.len() != names.len() {
            return Err(Error::Invalid(format!(
                "published rows: {} fields instead of {}: {line}",
                fields.len(),
                names.len()
            )));
        }
        let columns = names.iter().zip(fields).map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let row = PublishedRow { columns };
        let older = newest.get(&row.configuration()).is_none_or(|r| r.text("release") < row.text("release"));
        if older {
            newest.insert(row.configuration(), row);
        }
    }
    Ok(newest.into_values().collect())
}

/// How a range of releases of the published software differs from what the hardware descriptions say.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// Releases before this one, as year and month.
    before: f64,
    /// Time that a pass of an MoE layer waits for the host, in µs: on Hopper, on Blackwell with x86 hosts, and with Grace.
    moe_sync_us: [f64; 3],
    /// Factor on the exposed time of token dispatch.
    dispatch: f64,
    /// Factor on the rate of attention with sinks.
    sink_attention: f64,
}

/// Releases of the published software, in order of time.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Software {
    release: Vec<Release>,
}

impl Software {
    /// As fitted on the rows whose half is `fit`.
    pub fn embedded() -> Result<Software> {
        Software::parse(include_str!("hardware/published-software.toml"))
    }

    /// Reads a description.
    pub fn parse(text: &str) -> Result<Software> {
        toml::from_str(text).map_err(|e| Error::Invalid(format!("description of published software: {e}")))
    }

    /// A description of the hardware under the software of a row.
    fn applied(&self, hw: &Hardware, row: &PublishedRow, sinks: bool) -> Hardware {
        let month: f64 =
            row.text("release").split('.').take(2).collect::<Vec<_>>().join(".").parse().unwrap_or(f64::MAX);
        // Its dispatchers (DeepEP, HybridEP) send a token to each domain once.
        let mut hw = Hardware { dispatch_per_domain: true, ..hw.clone() };
        if let Some(r) = self.release.iter().find(|r| month < r.before) {
            let host = match hw.name.as_bytes() {
                [b'H', ..] => 0,
                [b'B', ..] => 1,
                _ => 2,
            };
            hw.moe_sync_us = r.moe_sync_us[host];
            hw.overlap.ep = 1.0 - ((1.0 - hw.overlap.ep) * r.dispatch).min(1.0);
            if sinks {
                hw.attention.forward *= r.sink_attention;
                hw.attention.backward *= r.sink_attention;
            }
        }
        hw
    }
}

/// What the cost model says of a row; none for families that Ferrotron does not train.
pub fn compare(row: &PublishedRow, hardware: &[Hardware], software: &Software) -> Result<Option<Comparison>> {
    let Some(preset) = row.preset() else { return Ok(None) };
    let system = row.text("system");
    let Some(hw) = hardware.iter().find(|h| h.name == system) else {
        return Err(Error::Invalid(format!("published rows: no hardware description of {system}")));
    };
    let lora = row.text("model").ends_with("LoRA");
    // The FLOPs of a token that the row implies say whether its MTP layer was on.
    let per_token = row.number("tflops_gpu")? * 1e12 / row.tokens()?;
    let mtp = preset == "deepseek-v3" && per_token > 255e9;
    let fsdp = row.size("fsdp")? > 1;
    let mut set = vec![
        format!("model.preset={preset}"),
        format!("data.seq_len={}", row.text("seq")),
        format!("train.global_batch={}", row.text("gbs")),
        "data.path=embedded".to_string(),
    ];
    let dtype = match row.text("precision") {
        "BF16" => GemmDtype::Bf16,
        "FP8" => GemmDtype::Fp8,
        "MXFP8" => GemmDtype::Mxfp8,
        "NVFP4" => GemmDtype::Nvfp4,
        other => return Err(Error::Invalid(format!("published rows: unknown precision {other:?}"))),
    };
    if dtype != GemmDtype::Bf16 {
        set.push("precision.recipe=fp8-current".into());
    }
    if mtp {
        set.push("mtp.layers=1".into());
    }
    if ["deepseek-v3", "kimi-k2"].contains(&preset) {
        // The published recipes keep moments in bf16.
        set.push("optimizer.state_dtype=bf16".into());
    }
    if lora {
        set.push("lora.rank=16".into());
    }
    let mut recipe = Recipe::named("llama-8b")?;
    set.iter().try_for_each(|s| recipe.set(s))?;
    let workload = Workload {
        recipe: recipe.resolve(None)?,
        gpus: row.size("gpus")?,
        // Recipes of fine-tuning sum gradients in f32, those of the other tables in bf16.
        gradient_bytes: if row.text("model").ends_with("SFT") { 4.0 } else { 2.0 },
        // MXFP8 weights are gathered in bf16, through the gradients' memory, and quantized before the next step.
        overlap_param_gather: dtype != GemmDtype::Mxfp8,
    };
    let hw = &software.applied(hw, row, workload.recipe.model.attn_sink);
    let layout = RankLayout {
        tp: row.size("tp")?,
        cp: row.size("cp")?,
        pp: row.size("pp")?,
        vp: row.size("vp")?,
        ep: row.size("ep")?,
        etp: Some(1),
        ..RankLayout::default()
    };
    let mut candidate = Candidate {
        layout,
        zero: if fsdp { 3 } else { 1 },
        micro_batch: row.size("mbs")?,
        recompute: Recompute::default(),
        schedule: ScheduleKind::OneForwardOneBackward,
        dtype,
    };
    // The rows do not say what was recomputed: the least that fits, with gradients in two bytes.
    let mut fits = false;
    // Where a row does not say FSDP, but nothing else would fit, it was.
    let stages =
        if candidate.zero == 1 && candidate.layout.pp == 1 { vec![1, 3] } else { vec![candidate.zero] };
    for (zero, recompute) in stages.iter().flat_map(|z| super::recompute_sets().map(|r| (*z, r))) {
        (candidate.zero, candidate.recompute) = (zero, recompute);
        let memory = workload.memory(&candidate)?;
        fits = memory.total() - memory.gradients / 2 <= hw.memory();
        if fits {
            break;
        }
    }
    let time = workload.step_time(hw, &candidate)?;
    let predicted = workload.tokens() / time.total / workload.gpus as f64;
    Ok(Some(Comparison { row: row.clone(), predicted, time, recompute: candidate.recompute, fits }))
}

/// All rows of families that Ferrotron trains, under the descriptions inside the program.
pub fn compare_all(rows: &[PublishedRow]) -> Result<Vec<Comparison>> {
    let (hardware, software) = (Hardware::embedded()?, Software::embedded()?);
    let all = rows.iter().map(|row| compare(row, &hardware, &software)).collect::<Result<Vec<_>>>()?;
    Ok(all.into_iter().flatten().collect())
}

impl Comparison {
    /// Relative error of the prediction.
    pub fn error(&self) -> Result<f64> {
        Ok(self.predicted / self.row.tokens()? - 1.0)
    }
}
