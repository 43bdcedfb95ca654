//! Opens the data that a recipe names.

use super::blend::{SURPLUS, member_samples};
use super::split::{normalise, split_matrix, split_range};
use super::validation::ValidationBlend;
use super::{
    Batches, Blend, DatasetInfo, DocumentRange, GptConfig, GptDataset, IndexedDataset, Packed, RowCounts,
    RowOptions, Split, corpus,
};
use crate::config::{Packing, Resolved, Truncation};
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
    /// As `data.path` has it.
    name: String,
    weight: f64,
    data: Arc<IndexedDataset>,
    /// Its documents are conversations.
    chat: bool,
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
    let matrix = split_matrix(&shares(r)?);
    let Some(train_fractions) = matrix[0] else { return Err(nothing_to_train_on()) };
    let mut notes = Vec::new();
    let (mut train, mut eval): (Vec<Box<dyn Batches>>, Vec<_>) = Default::default();
    let (mut epoch_tokens, mut filled) = (0u64, [0.0; 2]);
    let paths = d.path.0.iter().zip(&r.pairs).zip(normalise(&weights(r))?);
    for ((prefix, tokenized), weight) in paths {
        let data = Arc::new(IndexedDataset::open(tokenized)?);
        let chat = DatasetInfo::of(&data)?.is_some_and(|info| info.chat);
        let pair = Pair { name: prefix.clone(), weight, data, chat };
        let member = pair.samples(r, Split::Train, train_fractions)?.ok_or_else(|| pair.nothing_fits(r))?;
        notes.extend(member.note.clone());
        epoch_tokens = epoch_tokens.saturating_add(member.tokens);
        let wanted = (r.plan.samples as f64 * weight).max(1.0) * seq as f64;
        notes.extend(many_epochs(prefix, wanted / member.tokens.max(1) as f64, member.tokens));
        if let Some([rows, used]) = member.filled {
            filled = [filled[0] + rows, filled[1] + used];
        }
        train.push(member.data);
        let Some(fractions) = matrix[1] else { continue };
        let held_out = match pair.has_sample(r, fractions)? {
            true => pair.samples(r, Split::Valid, fractions)?,
            false => None,
        };
        match held_out {
            Some(samples) => eval.push((prefix.clone(), weight, samples.data)),
            None => notes.push(format!(
                "no evaluation on {prefix}: it has too few documents for data.split to set some of them aside"
            )),
        }
    }
    if filled[0] > 0.0 {
        let what =
            if d.packing == Packing::Documents { "packed documents" } else { "one conversation per row" };
        notes.insert(0, format!("{what}: {:.1} % of positions hold tokens", 100.0 * filled[1] / filled[0]));
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
    /// What has become of conversations.
    note: Option<String>,
}

impl Pair {
    /// Enough samples of a split for this pair's weight in the blend; `None` if it is to hold conversations and none gives one.
    fn samples(&self, r: &Resolved, split: Split, fractions: (f64, f64)) -> Result<Option<Samples>> {
        let (d, seq) = (&r.config.data, r.plan.seq_len);
        let [seed, vocab] = seed_and_vocab(r)?;
        if self.chat || d.packing == Packing::Documents {
            let range = split_range(fractions, self.data.documents());
            let documents = Box::new(DocumentRange { data: self.data.clone(), range, chat: self.chat });
            let one_per_row = d.packing == Packing::None;
            let truncation = if self.chat { d.truncation } else { Truncation::Split };
            let options = RowOptions { seq, vocab, seed: Some(seed), truncation, one_per_row };
            let Some(packed) = Packed::with(documents, options)? else { return Ok(None) };
            let rows = packed.samples() as f64;
            let filled = Some([rows, packed.fill() * rows]);
            let note =
                self.chat.then(|| self.conversations(&packed.counts(), packed.fill() * rows * seq as f64));
            return Ok(Some(Samples {
                tokens: packed.samples() * seq as u64,
                filled,
                note,
                data: Box::new(packed),
            }));
        }
        if d.eod.is_none() && (d.reset_at_documents || d.mask_eod_loss) {
            let what =
                "data.eod is needed to see where documents end; set it to the tokenizer's end-of-text id";
            return Err(Error::Invalid(what.into()));
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
        Ok(Some(Samples { data, tokens, filled: None, note: None }))
    }

    /// What has become of the conversations, for the user.
    fn conversations(&self, counts: &RowCounts, tokens: f64) -> String {
        let mut note = format!(
            "{}: {} samples for training, loss on {} tokens ({:.0} %)",
            self.name,
            counts.samples,
            counts.labels,
            100.0 * counts.labels as f64 / tokens.max(1.0)
        );
        let more = [
            (counts.cut, "cut to data.seq_len"),
            (counts.dropped, "left out, longer than data.seq_len"),
            (counts.without_loss, "left out, no assistant's token within data.seq_len"),
        ];
        for (n, what) in more.into_iter().filter(|(n, _)| *n > 0) {
            note += &format!("; {n} {what}");
        }
        note
    }

    fn nothing_fits(&self, r: &Resolved) -> Error {
        let what = match self.chat {
            true => format!(
                "no conversation has an assistant's turn within data.seq_len = {} tokens; raise it, or set \
                 data.truncation=\"keep_end\"",
                r.plan.seq_len
            ),
            false => "no document has the two tokens a prediction needs".into(),
        };
        Error::Invalid(format!("{}: {what}", self.name))
    }

    /// Does a split hold at least one sample?
    fn has_sample(&self, r: &Resolved, fractions: (f64, f64)) -> Result<bool> {
        if self.chat || r.config.data.packing == Packing::Documents {
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
