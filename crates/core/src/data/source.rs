//! Opens the data that a recipe names.

use super::blend::{SURPLUS, member_samples};
use super::split::{normalise, split_matrix, split_range};
use super::validation::ValidationBlend;
use super::{Batches, Blend, DocumentRange, GptConfig, GptDataset, IndexedDataset, Packed, Split, corpus};
use crate::config::{Packing, Resolved};
use crate::{Error, Result};
use std::sync::Arc;

/// A run that reads a dataset more often than this is told so: repeated data teaches less and less, and small models
/// begin to memorize it.
const MANY_EPOCHS: f64 = 4.0;

/// The data of a run.
pub struct Sources {
    /// Training samples.
    pub train: Box<dyn Batches>,
    /// Validation samples, if the recipe sets some aside.
    pub eval: Option<Box<dyn Batches>>,
    /// Tokens in one epoch of the training data.
    pub epoch_tokens: u64,
    /// What the user should know: members without validation data, many epochs, how densely documents are packed.
    pub notes: Vec<String>,
}

/// A member of the blend.
struct Pair {
    weight: f64,
    data: Arc<IndexedDataset>,
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
        let train = corpus::training(seq, d.seed)?;
        let eval = Box::new(corpus::held_out(seq, d.seed)?);
        let epoch_tokens = train.samples().saturating_mul(seq as u64);
        return Ok(Sources { train: Box::new(train), eval: Some(eval), epoch_tokens, notes: Vec::new() });
    }
    if d.eod.is_none() && (d.reset_at_documents || d.mask_eod_loss) && d.packing != Packing::Documents {
        let what = "data.eod is needed to see where documents end; set it to the tokenizer's end-of-text id";
        return Err(Error::Invalid(what.into()));
    }
    let matrix = split_matrix(&shares(r)?);
    let Some(train_fractions) = matrix[0] else { return Err(nothing_to_train_on()) };
    let mut notes = Vec::new();
    let (mut train, mut eval): (Vec<Box<dyn Batches>>, Vec<_>) = Default::default();
    let (mut epoch_tokens, mut filled) = (0u64, [0.0; 2]);
    for (prefix, weight) in d.path.0.iter().zip(normalise(&weights(r))?) {
        let pair = Pair { weight, data: Arc::new(IndexedDataset::open(prefix)?) };
        let member = pair.samples(r, Split::Train, train_fractions)?;
        epoch_tokens = epoch_tokens.saturating_add(member.tokens);
        let wanted = (r.plan.samples as f64 * weight).max(1.0) * seq as f64;
        notes.extend(many_epochs(prefix, wanted / member.tokens.max(1) as f64, member.tokens));
        if let Some([rows, used]) = member.filled {
            filled = [filled[0] + rows, filled[1] + used];
        }
        train.push(member.data);
        let Some(fractions) = matrix[1] else { continue };
        match pair.has_sample(r, fractions)? {
            true => eval.push((prefix.clone(), weight, pair.samples(r, Split::Valid, fractions)?.data)),
            false => notes.push(format!(
                "no evaluation on {prefix}: it has too few documents for data.split to set some of them aside"
            )),
        }
    }
    if d.packing == Packing::Documents {
        notes.insert(
            0,
            format!("packed documents: {:.1} % of positions hold tokens", 100.0 * filled[1] / filled[0]),
        );
    }
    let train = if d.packing == Packing::Documents {
        Blend::weighted(train, &weights(r), r.plan.samples)?
    } else {
        // Slightly more than asked for, since members round up as Megatron's do.
        let weights = normalise(&weights(r))?;
        Blend::weighted(train, &weights, member_samples(&weights, r.plan.samples, 0.0).iter().sum())?
    };
    let train = Box::new(train);
    let eval: Option<Box<dyn Batches>> = match eval.len() {
        0 => None,
        1 => {
            let only = eval.into_iter().map(|(_, _, data)| data).collect();
            Some(Box::new(Blend::weighted(only, &[1.0], eval_samples(r))?))
        }
        _ => Some(Box::new(ValidationBlend::new(eval)?)),
    };
    Ok(Sources { train, eval, epoch_tokens, notes })
}

/// Tokens in one epoch of the training data of a recipe.
pub fn epoch_tokens(r: &Resolved) -> Result<u64> {
    // The indices of one step are quickly built.
    let mut short = r.clone();
    short.plan.samples = 1;
    short.config.eval.every = 0;
    Ok(open(&short)?.epoch_tokens)
}

/// The samples of one split of a pair.
struct Samples {
    data: Box<dyn Batches>,
    /// Tokens of one epoch.
    tokens: u64,
    /// Number of packed rows, and how many of them their tokens would fill.
    filled: Option<[f64; 2]>,
}

impl Pair {
    /// Enough samples of a split for this pair's weight in the blend.
    fn samples(&self, r: &Resolved, split: Split, fractions: (f64, f64)) -> Result<Samples> {
        let (d, seq) = (&r.config.data, r.plan.seq_len);
        let [seed, vocab] = seed_and_vocab(r)?;
        if d.packing == Packing::Documents {
            let range = split_range(fractions, self.data.documents());
            let documents = DocumentRange { data: self.data.clone(), range };
            let packed = Packed::new(Box::new(documents), seq, vocab, Some(seed))?;
            let rows = packed.samples() as f64;
            let filled = Some([rows, packed.fill() * rows]);
            return Ok(Samples { tokens: packed.samples() * seq as u64, filled, data: Box::new(packed) });
        }
        let config = GptConfig {
            eod: d.eod.map(i64::from),
            reset_position_ids: d.reset_at_documents,
            reset_attention_mask: d.reset_at_documents,
            eod_mask_loss: d.mask_eod_loss,
            ..GptConfig::new(seq, seed, vocab)
        };
        let target = if split == Split::Train { r.plan.samples } else { eval_samples(r) };
        let wanted = member_samples(&[self.weight], target, SURPLUS)[0];
        let range = split_range(fractions, self.data.len());
        let tokens = self.tokens(range.clone())?;
        let data = Box::new(GptDataset::new(self.data.clone(), range, Some(wanted), split, config)?);
        Ok(Samples { data, tokens, filled: None })
    }

    /// Does a split hold at least one sample?
    fn has_sample(&self, r: &Resolved, fractions: (f64, f64)) -> Result<bool> {
        if r.config.data.packing == Packing::Documents {
            return Ok(!split_range(fractions, self.data.documents()).is_empty());
        }
        Ok(self.tokens(split_range(fractions, self.data.len()))? > r.plan.seq_len as u64)
    }

    fn tokens(&self, sequences: std::ops::Range<usize>) -> Result<u64> {
        sequences.into_iter().try_fold(0u64, |sum, i| Ok(sum + self.data.length(i)? as u64))
    }
}

fn many_epochs(prefix: &str, epochs: f64, tokens: u64) -> Option<String> {
    (epochs > MANY_EPOCHS).then(|| {
        format!(
            "{prefix}: the run reads its {tokens} training tokens {epochs:.1} times (epochs); the model may memorize \
             them: give more data, or train less (train.epochs)"
        )
    })
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

fn nothing_to_train_on() -> Error {
    Error::Invalid("data.split leaves nothing to train on; give its first share more".into())
}
