//! Opens the data that a recipe names.

use super::split::{normalise, split_matrix, split_range};
use super::{Batches, Blend, DocumentRange, GptConfig, IndexedDataset, Packed, corpus};
use crate::config::{Packing, Resolved};
use crate::{Error, Result};
use std::sync::Arc;

/// The data of a run.
pub struct Sources {
    /// Training samples.
    pub train: Box<dyn Batches>,
    /// Validation samples, if the recipe sets some aside.
    pub eval: Option<Box<dyn Batches>>,
    /// What the user should know: why there is no evaluation, or how densely documents are packed.
    pub note: Option<String>,
}

/// Opens the data of a recipe: the embedded corpus, or a blend of `.bin/.idx` pairs.
pub fn open(r: &Resolved) -> Result<Sources> {
    let (d, seq) = (&r.config.data, r.plan.seq_len);
    if d.is_embedded() {
        if r.model.vocab < 256 {
            let what =
                format!("the embedded corpus is bytes, but model.vocab is {}; make it 256", r.model.vocab);
            return Err(Error::Invalid(what));
        }
        let eval = Box::new(corpus::held_out(seq, d.seed)?);
        return Ok(Sources { train: Box::new(corpus::training(seq, d.seed)?), eval: Some(eval), note: None });
    }
    if d.packing == Packing::Documents {
        return open_packed(r);
    }
    if d.eod.is_none() && (d.reset_at_documents || d.mask_eod_loss) {
        let what = "data.eod is needed to see where documents end; set it to the tokenizer's end-of-text id";
        return Err(Error::Invalid(what.into()));
    }
    let [seed, vocab] = seed_and_vocab(r)?;
    let config = GptConfig {
        eod: d.eod.map(i64::from),
        reset_position_ids: d.reset_at_documents,
        reset_attention_mask: d.reset_at_documents,
        eod_mask_loss: d.mask_eod_loss,
        ..GptConfig::new(seq, seed, vocab)
    };
    let samples = [Some(r.plan.samples), Some(eval_samples(r)), Some(0)];
    let mut note = None;
    let mut shares = shares(r)?;
    if let Some(prefix) = without_validation(&d.path.0, &shares, seq)? {
        note = Some(no_evaluation(&prefix));
        shares[1] = 0.0;
    }
    let [train, eval, _] = Blend::gpt(&d.path.0, Some(&weights(r)), &shares, samples, &config)?;
    let Some(train) = train else { return Err(nothing_to_train_on()) };
    Ok(Sources { train: Box::new(train), eval: eval.map(|e| Box::new(e) as Box<dyn Batches>), note })
}

/// [`open`] with `data.packing = "documents"`: each split of each pair is packed by itself.
fn open_packed(r: &Resolved) -> Result<Sources> {
    let (d, seq) = (&r.config.data, r.plan.seq_len);
    let [seed, vocab] = seed_and_vocab(r)?;
    let matrix = split_matrix(&shares(r)?);
    let mut members: [Vec<Packed>; 2] = Default::default();
    let mut lacking = None;
    for prefix in &d.path.0 {
        let data = Arc::new(IndexedDataset::open(prefix)?);
        for (k, members) in members.iter_mut().enumerate() {
            let Some(fractions) = matrix[k] else { continue };
            let range = split_range(fractions, data.documents());
            if k == 1 && range.is_empty() {
                lacking = Some(prefix);
                continue;
            }
            let documents = DocumentRange { data: data.clone(), range };
            members.push(Packed::new(Box::new(documents), seq, vocab, Some(seed))?);
        }
    }
    let [train, eval] = members;
    if train.is_empty() {
        return Err(nothing_to_train_on());
    }
    let [rows, used] = train
        .iter()
        .fold([0.0; 2], |[rows, used], p| [rows + p.samples() as f64, used + p.fill() * p.samples() as f64]);
    let mut note = format!("packed documents: {:.1} % of positions hold tokens", 100.0 * used / rows);
    if let Some(prefix) = lacking {
        note = format!("{note}; {}", no_evaluation(prefix));
    }
    let blend = |members: Vec<Packed>, samples: u64| -> Result<Box<dyn Batches>> {
        let members = members.into_iter().map(|p| Box::new(p) as Box<dyn Batches>).collect();
        Ok(Box::new(Blend::weighted(members, &weights(r), samples)?))
    };
    let eval = match lacking {
        None if !eval.is_empty() => Some(blend(eval, eval_samples(r))?),
        _ => None,
    };
    Ok(Sources { train: blend(train, r.plan.samples)?, eval, note: Some(note) })
}

/// `data.seed` and `model.vocab` as 32-bit numbers.
fn seed_and_vocab(r: &Resolved) -> Result<[u32; 2]> {
    let narrow = |key: &str, value: u64| {
        u32::try_from(value).map_err(|_| Error::Invalid(format!("{key} does not fit in 32 bits")))
    };
    Ok([narrow("data.seed", r.config.data.seed)?, narrow("model.vocab", r.model.vocab as u64)?])
}

fn eval_samples(r: &Resolved) -> u64 {
    r.config.eval.batches.saturating_mul(r.config.train.global_batch as u64)
}

fn weights(r: &Resolved) -> Vec<f64> {
    let d = &r.config.data;
    if d.weights.is_empty() { vec![1.0; d.path.0.len()] } else { d.weights.clone() }
}

/// Shares of training and validation. A split that is not read gets none, since a small corpus may have none to spare.
fn shares(r: &Resolved) -> Result<[f64; 3]> {
    let shares = normalise(&r.config.data.split.0)?;
    Ok([shares[0], if r.config.eval.every > 0 { shares[1] } else { 0.0 }, 0.0])
}

fn no_evaluation(prefix: &str) -> String {
    format!("no evaluation: {prefix} has too few documents for data.split to set some of them aside")
}

fn nothing_to_train_on() -> Error {
    Error::Invalid("data.split leaves nothing to train on; give its first share more".into())
}

/// The first of the pairs whose validation split is less than one sample.
fn without_validation(prefixes: &[String], shares: &[f64; 3], seq: usize) -> Result<Option<String>> {
    let Some(fractions) = split_matrix(shares)[1] else { return Ok(None) };
    for prefix in prefixes {
        let data = IndexedDataset::open(prefix)?;
        let mut tokens = 0u64;
        for i in split_range(fractions, data.len()) {
            tokens += data.length(i)? as u64;
        }
        if tokens <= seq as u64 {
            return Ok(Some(prefix.clone()));
        }
    }
    Ok(None)
}
