//! Runs a model over given tokens: logits, loss and gradients under their Hugging Face names, to
//! check the numerics against another system.

use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::expected::hf_tensors;
use crate::logical::load_dtype;
use crate::weights::{Weights, to_core};
use ferrotron_core::fs::{TargetLock, parent, rename, sync_folder};
use ferrotron_core::grid::{ModelSizes, RankLayout};
use ferrotron_core::model::generate::to_host;
use ferrotron_core::model::{Model, ModelConfig, PipelineLayout};
use ferrotron_core::parity::{Outcome, TensorKind, move_one_ulp};
use ferrotron_core::pipeline::{PipelinePlan, ScheduleKind};
use ferrotron_core::tensorfile::{FileDType, TensorDecl, TensorFile, TensorFileWriter};
use ferrotron_core::train::{
    LogicalValues, MicroBatch, StepMode, execute, gather_all_stages, read_scalar, upload_targets,
};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{GradBuffer, ParamId, Rank};
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{DType, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

/// Tokens and labels of the input file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardInput {
    /// `[batch·sequence]`
    pub ids: Vec<i32>,
    /// Not shifted: position t predicts `labels[t+1]`.
    pub labels: Option<Vec<i32>>,
    /// Positions, if not counted from 0 in each row.
    pub positions: Option<Vec<i32>>,
    /// `cu_seqlens`: sequence boundaries of one packed row.
    pub offsets: Option<Vec<i32>>,
    /// Rows.
    pub batch: usize,
    /// Tokens per row.
    pub sequence: usize,
}

/// Name, shape and values of a gradient.
pub type Gradient = (String, Vec<usize>, Vec<f32>);

/// Logits `[batch, sequence, V]`, loss and gradients.
#[derive(Clone, Debug)]
pub struct ForwardOutput {
    /// f32, row-major.
    pub logits: Vec<f32>,
    /// `[batch, sequence, V]`
    pub shape: Vec<usize>,
    /// Mean cross-entropy over valid shifted labels; absent without labels.
    pub loss: Option<f32>,
    /// Name, shape and values of every gradient; empty without backward.
    pub gradients: Vec<Gradient>,
    /// Tokens per expert of every MoE layer; empty without backward.
    pub loads: Vec<(usize, Vec<f32>)>,
}

/// Reads `input_ids` and, where present, `labels`, `position_ids`, `cu_seqlens` (i64 or i32).
pub fn read_input(path: &Path) -> Result<ForwardInput> {
    let file = TensorFile::open(path)?;
    let origin = path.display().to_string();
    let integers = |name: &str| -> Result<Option<Vec<i32>>> {
        let Some(info) = file.get(name) else { return Ok(None) };
        let bytes = file.read(name)?;
        let wide: Vec<i64> = match info.dtype.native() {
            Some(DType::I64) => {
                bytes.chunks_exact(8).map(|c| i64::from_le_bytes(c.try_into().unwrap_or_default())).collect()
            }
            Some(DType::I32) => bytes
                .chunks_exact(4)
                .map(|c| i64::from(i32::from_le_bytes(c.try_into().unwrap_or_default())))
                .collect(),
            _ => {
                return Err(Error::config(&origin, format!("{name} must be I64 or I32, not {}", info.dtype)));
            }
        };
        let narrow = wide.iter().map(|x| i32::try_from(*x)).collect::<Result<_, _>>();
        narrow.map(Some).map_err(|_| Error::config(&origin, format!("{name} holds a value beyond 32 bits")))
    };
    let Some(info) = file.get("input_ids") else {
        return Err(Error::config(&origin, "has no tensor input_ids [batch, sequence]"));
    };
    let [batch, sequence] = info.shape[..] else {
        return Err(Error::config(&origin, format!("input_ids is {:?}, not [batch, sequence]", info.shape)));
    };
    for (name, wanted) in
        [("labels", Some(&info.shape)), ("position_ids", Some(&info.shape)), ("cu_seqlens", None)]
    {
        let Some(shape) = file.get(name).map(|t| &t.shape) else { continue };
        if wanted.map_or(shape.len() != 1, |w| w != shape) {
            let wanted = wanted.map_or("[sequences + 1]".into(), |w| format!("{w:?} as input_ids"));
            return Err(Error::config(&origin, format!("{name} is {shape:?}, not {wanted}")));
        }
    }
    let input = ForwardInput {
        ids: integers("input_ids")?.unwrap_or_default(),
        labels: integers("labels")?,
        positions: integers("position_ids")?,
        offsets: integers("cu_seqlens")?,
        batch,
        sequence,
    };
    if let Some(negative) = input.positions.iter().flatten().find(|p| **p < 0) {
        return Err(Error::config(&origin, format!("position_ids holds {negative}; positions start at 0")));
    }
    // Masked tokens would silently be attended to.
    if integers("attention_mask")?.iter().flatten().any(|m| *m != 1) {
        let what = "attention_mask masks tokens, which forward does not; remove padding, or pack sequences with cu_seqlens";
        return Err(Error::config(&origin, what));
    }
    if input.ids.is_empty() {
        return Err(Error::config(&origin, "input_ids is empty"));
    }
    Ok(input)
}

/// The rows of a data-parallel rank: every `ranks`-th, from `rank` on. A rank without rows gets the first one with
/// all labels ignored, so that it takes part in the collectives.
fn rank_rows(input: &ForwardInput, rank: usize, ranks: usize) -> (ForwardInput, Vec<usize>) {
    let mine: Vec<usize> = (rank..input.batch).step_by(ranks).collect();
    let taken = if mine.is_empty() { vec![0] } else { mine.clone() };
    let pick = |x: &[i32]| -> Vec<i32> {
        taken.iter().flat_map(|r| &x[r * input.sequence..(r + 1) * input.sequence]).copied().collect()
    };
    let labels = input.labels.as_ref().map(|l| match mine.is_empty() {
        true => vec![IGNORE; input.sequence],
        false => pick(l),
    });
    let part = ForwardInput {
        ids: pick(&input.ids),
        labels,
        positions: input.positions.as_deref().map(pick),
        offsets: input.offsets.clone(),
        batch: taken.len(),
        sequence: input.sequence,
    };
    (part, mine)
}

/// Checks that the model can be split by `layout`, before any rank starts: tp, ep and etp must divide its heads, MLP
/// widths and experts. A dense model ignores ep and etp.
pub fn check_layout(model: &ModelConfig, layout: &RankLayout) -> Result<()> {
    let sizes = ModelSizes::of(model);
    let ep = if sizes.experts == 0 { 1 } else { layout.ep };
    Ok(RankLayout { ep, ..layout.clone() }.check_model(&sizes)?)
}

/// Checks that the model can compute in the dtype of `--dtype`, before any rank starts.
pub fn check_dtype(model: &ModelConfig, dtype: DType) -> Result<()> {
    let Some(what) = model.refused_dtype(dtype).map(String::from) else { return Ok(()) };
    let key = Some("--dtype".into());
    Err(ferrotron_core::Error::Config { file: None, line: None, key, what, hint: None }.into())
}

/// How a checkpoint is run.
#[derive(Clone, Debug)]
pub struct ForwardOptions {
    /// Dtype of weights and compute.
    pub dtype: DType,
    /// Pipeline stages.
    pub stages: PipelineLayout,
    /// Run a backward pass, too.
    pub backward: bool,
    /// Move every f32 weight by one unit in the last place, with the signs of this seed.
    pub ulp_seed: Option<u64>,
}

/// The logical tensor `name` as bytes of the dtype it is loaded in.
fn read_weight(weights: &Weights, name: &str, options: &ForwardOptions) -> Result<Vec<u8>> {
    let dtype = load_dtype(name, options.dtype);
    let mut bytes = weights.read_finite(name, dtype)?;
    if let (Some(seed), DType::F32) = (options.ulp_seed, dtype) {
        let mut values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        move_one_ulp(seed, name, &mut values);
        bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    }
    Ok(bytes)
}

/// Loads the weights and runs one forward pass, and a backward pass if asked for. Every rank returns the full output.
pub fn forward(
    rank: Rank,
    weights: &Weights,
    input: &ForwardInput,
    options: &ForwardOptions,
) -> Result<ForwardOutput> {
    let ForwardOptions { dtype, stages, backward, .. } = options;
    let (dtype, backward) = (*dtype, *backward);
    // As transformers: MTP modules take no part in the model's own logits and loss.
    let config = &ModelConfig { mtp: None, ..weights.model().clone() };
    let etp = rank.etp.size();
    let (tp, ep) = (rank.tp.size(), rank.etp_ep_group.size() / etp);
    check_layout(config, &RankLayout { tp, ep, etp: Some(etp), ..RankLayout::default() })?;
    let whole = input;
    let (part, mine) = rank_rows(whole, rank.dp.rank(), rank.dp.size());
    let input = &part;
    let longest = input.positions.iter().flatten().max().map_or(0, |p| *p as usize + 1);
    let source = |name: &str| read_weight(weights, name, options).map_err(to_core);
    let positions = longest.max(input.sequence);
    let model = weights.load_model(rank, config, (positions, dtype), stages, &source)?;
    let logits = run_pass(&model, input, None, StepMode::Logits)?;
    let logits = logits.first().map_or(Ok(Vec::new()), |l| to_host(&model.pass(), l))?;
    let logits = model.join_logits(&layout_of(input), &logits)?;
    let logits = gather_rows(&model.rank, whole, &mine, &logits, config.vocab)?;
    let mut out = ForwardOutput {
        logits,
        shape: vec![whole.batch, whole.sequence, config.vocab],
        loss: None,
        gradients: Vec::new(),
        loads: Vec::new(),
    };
    let Some(labels) = input.labels.as_ref().map(|l| shift(l, input.sequence)) else {
        if backward {
            return Err(Error::config("--backward", "needs labels in the input"));
        }
        return Ok(out);
    };
    if let Some(bad) = labels.iter().find(|l| **l != IGNORE && !(0..config.vocab as i32).contains(*l)) {
        return Err(Error::config(
            "labels",
            format!("label {bad} is not in a vocabulary of {}", config.vocab),
        ));
    }
    let all = whole.labels.as_ref().map(|l| shift(l, whole.sequence)).unwrap_or_default();
    let valid = all.iter().filter(|l| **l != IGNORE).count();
    let labels = Some((&labels[..], 1.0 / valid.max(1) as f32));
    let mut grads = GradBuffer::new(model.params.specs());
    // Tokens per expert are those of this pass, not of the pass for logits too.
    if let Some(moe) = model.step_state.moe() {
        moe.begin_step(&model.rank.compute).map_err(ferrotron_core::Error::from)?;
    }
    let aim = if backward { StepMode::Train(&mut grads) } else { StepMode::Loss };
    let losses = run_pass(&model, input, labels, aim)?;
    let mine = losses.iter().map(|l| read_scalar(&model.rank, l)).sum::<ferrotron_core::Result<f64>>()?;
    out.loss = Some(sum_over_ranks(&model.rank, mine)?);
    if backward {
        let values = logical_gradients(&model, &mut grads)?;
        let by_name = values.into_iter().map(|v| (v.name, v.values)).collect();
        out.gradients = hf_gradients(weights, &by_name)?;
        let counts = |(layer, load): (usize, Vec<i64>)| (layer, load.iter().map(|n| *n as f32).collect());
        out.loads = model.tokens_per_expert()?.into_iter().map(counts).collect();
    }
    Ok(out)
}

/// Runs all rows as one micro-batch through the pipeline; the last stage gets the outputs.
fn run_pass(
    model: &Model,
    input: &ForwardInput,
    labels: Option<(&[i32], f32)>,
    aim: StepMode,
) -> Result<Vec<Tensor>> {
    let placement = model.decoder.placement();
    let mode = if matches!(aim, StepMode::Train(_)) {
        ScheduleKind::OneForwardOneBackward
    } else {
        ScheduleKind::ForwardOnly
    };
    let schedule =
        PipelinePlan { kind: mode, ..PipelinePlan::new(placement.pp(), placement.vp(), 1) }.schedule()?;
    let mut load = |_| {
        let positions = input.positions.as_deref();
        let input = model.decoder.input(&model.rank, &input.ids, positions, layout_of(input))?;
        let on_device = |(labels, weight)| upload_targets(&model.rank, &input.tokens, labels, weight);
        let targets = labels.map(on_device).transpose()?;
        Ok(MicroBatch { input, targets, position: None })
    };
    Ok(execute(model.pass(), &model.decoder, &schedule, &mut load, aim)?)
}

fn layout_of(input: &ForwardInput) -> Layout {
    match &input.offsets {
        Some(offsets) => Layout::Packed { offsets: offsets.clone() },
        None => Layout::Rows { count: input.batch, len: input.sequence },
    }
}

/// Gradients of all logical tensors, reduced over ranks and gathered from all stages.
fn logical_gradients(model: &Model, grads: &mut GradBuffer) -> Result<Vec<LogicalValues>> {
    let tensor = ferrotron_core::Error::from;
    grads.reduce(&model.rank).map_err(tensor)?;
    let mut out = Vec::new();
    for (i, spec) in model.params.specs().iter().enumerate().filter(|(_, spec)| !spec.mirror) {
        let values: Vec<f32> =
            model.rank.compute.download(&grads.get(ParamId(i)).map_err(tensor)?).map_err(tensor)?;
        for (part, _, r) in spec.held() {
            let values = model.rank.gather_tensor(spec.experts, part, &values[r]).map_err(tensor)?;
            out.push(LogicalValues { name: part.name.clone(), shape: part.shape.clone(), values });
        }
    }
    Ok(gather_all_stages(&model.rank, model.decoder.config(), out)?)
}

/// Gathers the logits of all rows from the data-parallel ranks.
fn gather_rows(
    rank: &Rank,
    input: &ForwardInput,
    mine: &[usize],
    logits: &[f32],
    vocab: usize,
) -> Result<Vec<f32>> {
    if rank.dp.size() == 1 {
        return Ok(logits.to_vec());
    }
    let held = &logits[..mine.len() * input.sequence * vocab];
    let bytes: Vec<u8> = held.iter().flat_map(|x| x.to_le_bytes()).collect();
    let all = rank.dp.all_gather_bytes(&bytes, "logits").map_err(comm)?;
    let row = input.sequence * vocab;
    let mut out = vec![0f32; input.batch * row];
    for (r, bytes) in all.iter().enumerate() {
        let values = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>();
        for (at, part) in (r..input.batch).step_by(rank.dp.size()).zip(values.chunks(row.max(1))) {
            out[at * row..(at + 1) * row].copy_from_slice(part);
        }
    }
    Ok(out)
}

/// Sums the loss over data-parallel, context-parallel and pipeline ranks.
fn sum_over_ranks(rank: &Rank, mine: f64) -> Result<f32> {
    let mut sum = mine;
    for group in [&rank.dp_cp_group, &rank.pp] {
        let all = group.all_gather_bytes(&sum.to_le_bytes(), "loss").map_err(comm)?;
        sum = all.iter().map(|b| f64::from_le_bytes(b.as_slice().try_into().unwrap_or_default())).sum();
    }
    Ok(sum as f32)
}

fn comm(e: ferrotron_comm::Error) -> Error {
    ferrotron_core::Error::from(e).into()
}

/// Position t predicts label t+1; the last of a row predicts nothing.
fn shift(labels: &[i32], sequence: usize) -> Vec<i32> {
    labels.chunks(sequence).flat_map(|row| row[1..].iter().copied().chain([IGNORE])).collect()
}

/// Assembles the gradients of Hugging Face tensors from those of logical tensors.
fn hf_gradients(weights: &Weights, logical: &HashMap<String, Vec<f32>>) -> Result<Vec<Gradient>> {
    let mut out = Vec::new();
    let model = ModelConfig { mtp: None, ..weights.model().clone() };
    let all = match weights.base() {
        Weights::HuggingFace(checkpoint) => {
            hf_tensors(checkpoint.config().family(), &model, checkpoint.prefix())?
        }
        _ => HfConfig::from_model(&model, DType::F32)?.hf_tensors()?,
    };
    for t in all.into_iter().filter(|t| !t.is_buffer()) {
        let mut values = vec![0f32; t.shape.iter().product()];
        for part in &t.parts {
            let (name, shape) = (&part.tensor.name, &part.tensor.shape);
            let of_part = logical.get(name).ok_or_else(|| Error::tensor(name, "has no gradient"))?;
            let cols = shape.get(1).copied().unwrap_or(1);
            for (i, x) in of_part.iter().enumerate() {
                values[part.view.at(i / cols, i % cols)] = *x;
            }
        }
        out.push((t.name, t.shape, values));
    }
    Ok(out)
}

/// Fails if writing the file `output` would replace a file of the model or the input.
pub fn check_output(output: &Path, model: &Weights, input: &Path) -> Result<()> {
    let wrong = |what: &str| Err(Error::Output { path: output.into(), what: what.into() });
    if !parent(output).is_dir() {
        return wrong("is in a folder that does not exist; create it or choose another for the output");
    }
    let Ok(about) = output.metadata() else { return Ok(()) };
    if !about.is_file() {
        return wrong("already exists and is not a regular file; choose another name for the output");
    }
    let path = output.canonicalize().map_err(|e| Error::io(output, "open", e))?;
    let is_output = |p: &Path| p.canonicalize().is_ok_and(|p| p == path);
    if is_output(input) {
        return wrong("is the input; choose another name for the output");
    }
    let is_inside = |dir: &Path| dir.canonicalize().is_ok_and(|dir| path.starts_with(dir));
    let of_base = match model.base() {
        Weights::HuggingFace(folder) => folder.files()?.iter().any(|f| is_output(f)),
        Weights::Checkpoint(native) => is_inside(native.path()),
        Weights::Initial(_) | Weights::Adapted(_) => false,
    };
    let of_model = of_base || matches!(model, Weights::Adapted(a) if is_inside(&a.folder));
    match of_model {
        true => wrong("is a file of the model; choose another name for the output"),
        false => Ok(()),
    }
}

/// Writes `logits`, `loss`, `grad.<name>` and, for MoE layers, `expert_load.<layer>` (tokens per expert) as f32. The
/// file appears, or replaces an old one, only once it is complete.
pub fn write_output(path: &Path, out: &ForwardOutput) -> Result<()> {
    let lock = TargetLock::acquire(path, Duration::from_secs(60))?;
    lock.recover()?;
    let partial = lock.partial();
    let written = write_tensors(&partial, out).and_then(|()| Ok(rename(&partial, lock.target())?));
    if written.is_err() {
        // The first error is the one to report; the next start removes the file as well.
        drop(std::fs::remove_file(&partial));
    }
    written.and_then(|()| Ok(sync_folder(parent(lock.target()))?))
}

fn write_tensors(path: &Path, out: &ForwardOutput) -> Result<()> {
    let f32_type = FileDType::from(DType::F32);
    let mut tensors: Vec<(String, &[usize], &[f32])> = vec![("logits".into(), &out.shape, &out.logits)];
    let loss = out.loss.map(|l| [l]);
    tensors.extend(loss.as_ref().map(|l| ("loss".to_string(), &[][..], &l[..])));
    tensors.extend(out.gradients.iter().map(|(n, s, v)| (format!("grad.{n}"), &s[..], &v[..])));
    let sizes: Vec<[usize; 1]> = out.loads.iter().map(|(_, load)| [load.len()]).collect();
    let loads = out.loads.iter().zip(&sizes);
    tensors.extend(loads.map(|((i, load), n)| (format!("expert_load.{i}"), &n[..], &load[..])));
    let decls: Vec<TensorDecl> = tensors
        .iter()
        .map(|(name, shape, _)| TensorDecl { name: name.clone(), dtype: f32_type, shape: shape.to_vec() })
        .collect();
    let mut writer = TensorFileWriter::create_in_order(path, &decls, &BTreeMap::new())?;
    for (name, _, values) in tensors {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        writer.write(&name, &bytes)?;
    }
    writer.finish()?;
    Ok(())
}

impl From<ForwardOutput> for Outcome {
    /// As one side of `parity`.
    fn from(out: ForwardOutput) -> Outcome {
        let named = |(name, shape, values)| LogicalValues { name, shape, values };
        let logits = LogicalValues { name: "logits".into(), shape: out.shape, values: out.logits };
        let gradients = out.gradients.into_iter().map(named).collect();
        Outcome {
            loss: out.loss.map(f64::from),
            lr: 0.0,
            tensors: vec![(TensorKind::Logits, vec![logits]), (TensorKind::Gradient, gradients)],
        }
    }
}
