//! Opens the data that a recipe names.

use super::blend::{SURPLUS, member_samples};
use super::split::{normalize, split_matrix, split_range};
use super::validation::ValidationBlend;
use super::{
    Batches, Blend, DatasetInfo, DocumentRange, GptConfig, GptDataset, IndexedDataset, Packed, RowCounts,
    RowOptions, Split, corpus,
};
use crate::config::{Packing, Resolved, Truncation};
use crate::{Error, Result};
use std::ops::Range;
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
    /// Samples in one epoch of the training data and their mean length over tokens, where lengths vary.
    pub varying: Option<VaryingSamples>,
    /// What the user should know: members without validation data, many epochs, how densely documents are packed.
    pub notes: Vec<String>,
}

/// Training samples that are not padded to equal lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VaryingSamples {
    /// Samples of one epoch.
    pub count: u64,
    /// `Σ length² / Σ length`: what the FLOPs of attention for each token are proportional to.
    pub mean_length: f64,
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
        let train = Box::new(train);
        return Ok(Sources { train, eval: Some(eval), epoch_tokens, varying: None, notes: Vec::new() });
    }
    let matrix = split_matrix(&shares(r)?);
    if matrix[0].is_none() {
        return Err(nothing_to_train_on());
    }
    let mut notes = Vec::new();
    let (mut train, mut eval): (Vec<Box<dyn Batches>>, Vec<_>) = Default::default();
    let (mut epoch_tokens, mut filled) = (0u64, [0.0; 2]);
    let mut lengths: Vec<Lengths> = Vec::new();
    let paths = d.path.0.iter().zip(&r.pairs).zip(normalize(&weights(r))?);
    for ((prefix, tokenized), weight) in paths {
        let data = Arc::new(IndexedDataset::open(tokenized)?);
        let chat = DatasetInfo::of(&data)?.is_some_and(|info| info.chat);
        let pair = Pair { name: prefix.clone(), weight, data, chat };
        let member = pair.samples(r, Split::Train, &matrix)?.ok_or_else(|| pair.nothing_fits(r))?;
        notes.extend(member.note.clone());
        epoch_tokens = epoch_tokens.saturating_add(member.tokens);
        let wanted = (r.plan.samples as f64 * weight).max(1.0) * member.tokens_of_sample(seq);
        notes.extend(many_epochs(prefix, wanted / member.tokens.max(1) as f64, member.tokens));
        lengths.extend(member.lengths);
        if let Some([rows, used]) = member.filled {
            filled = [filled[0] + rows, filled[1] + used];
        }
        train.push(member.data);
        if matrix[1].is_none() {
            continue;
        }
        let has_sample = pair.has_sample(r, &matrix)?;
        let held_out = if has_sample { pair.samples(r, Split::Valid, &matrix)? } else { None };
        match held_out {
            Some(samples) => eval.push((prefix.clone(), weight, samples.data)),
            None if has_sample => notes.push(format!(
                "no evaluation on {prefix}: what data.split sets aside has no token with a loss within data.seq_len"
            )),
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
    let varying = Lengths::of_all(&lengths);
    notes.splice(0..0, varying.as_ref().map(|all| all.note(r.plan.micro_batch)));
    let varying = varying.map(|all| VaryingSamples { count: all.count, mean_length: all.mean });
    let train = if d.packing != Packing::None {
        Blend::weighted(train, &weights(r), r.plan.samples)?
    } else {
        // Slightly more than asked for, since members round up as Megatron's do.
        let weights = normalize(&weights(r))?;
        Blend::weighted(train, &weights, member_samples(&weights, r.plan.samples, 0.0).iter().sum())?
    };
    let train = Box::new(train);
    let goes_by_evaluations =
        [("checkpoint.best", r.config.checkpoint.best), ("eval.patience", r.config.eval.patience > 0)];
    if let Some((key, _)) = goes_by_evaluations.into_iter().find(|(_, is_set)| *is_set)
        && r.config.eval.every > 0
        && eval.is_empty()
    {
        let what = format!(
            "{key} goes by evaluations, and data.split leaves no validation data; give more documents or a larger second share, \
             or leave it out"
        );
        return Err(Error::Invalid(what));
    }
    let eval: Option<Box<dyn Batches>> = match eval.len() {
        0 => None,
        1 => {
            let only = eval.into_iter().map(|(_, _, data)| data).collect();
            Some(Box::new(Blend::weighted(only, &[1.0], eval_samples(r))?))
        }
        _ => Some(Box::new(ValidationBlend::new(eval)?)),
    };
    Ok(Sources { train, eval, epoch_tokens, varying, notes })
}

/// Tokens in one epoch of the training data of a recipe, and its samples, where their lengths vary.
pub fn epoch(r: &Resolved) -> Result<(u64, Option<VaryingSamples>)> {
    // The indices of one step are quickly built.
    let mut short = r.clone();
    short.plan.samples = 1;
    short.config.eval.every = 0;
    let sources = open(&short)?;
    Ok((sources.epoch_tokens, sources.varying))
}

/// The samples of one split of a pair.
struct Samples {
    data: Box<dyn Batches>,
    /// Tokens of one epoch.
    tokens: u64,
    /// Number of padded rows, and how many of them their tokens would fill.
    filled: Option<[f64; 2]>,
    /// Lengths of samples that are not padded.
    lengths: Option<Lengths>,
    /// What has become of conversations.
    note: Option<String>,
}

impl Samples {
    /// Mean number of tokens of a sample of at most `seq`.
    fn tokens_of_sample(&self, seq: usize) -> f64 {
        self.lengths.map_or(seq as f64, |l| l.tokens as f64 / (l.count as f64).max(1.0))
    }
}

/// Lengths of samples that are not padded.
#[derive(Clone, Copy)]
struct Lengths {
    count: u64,
    tokens: u64,
    shortest: u32,
    longest: u32,
    /// `Σ length² / Σ length`
    mean: f64,
}

impl Lengths {
    fn of(packed: &Packed) -> Lengths {
        let (shortest, longest, mean) = packed.lengths();
        Lengths { count: packed.samples(), tokens: packed.used(), shortest, longest, mean }
    }

    fn of_all(members: &[Lengths]) -> Option<Lengths> {
        let tokens = members.iter().map(|l| l.tokens).sum::<u64>();
        Some(Lengths {
            count: members.iter().map(|l| l.count).sum(),
            tokens,
            shortest: members.iter().map(|l| l.shortest).min()?,
            longest: members.iter().map(|l| l.longest).max()?,
            mean: members.iter().map(|l| l.mean * l.tokens as f64).sum::<f64>() / (tokens as f64).max(1.0),
        })
    }

    /// For the user.
    fn note(&self, micro_batch: usize) -> String {
        let mean = self.tokens as f64 / (self.count as f64).max(1.0);
        format!(
            "padding-free: samples of {} to {} tokens, {mean:.0} on average; {micro_batch} to a micro-batch (train.micro_batch)",
            self.shortest, self.longest
        )
    }
}

impl Pair {
    /// Enough samples of a split for this pair's weight in the blend; `None` if it is to hold conversations and none gives one.
    fn samples(&self, r: &Resolved, split: Split, matrix: &SplitMatrix) -> Result<Option<Samples>> {
        let (d, seq) = (&r.config.data, r.plan.seq_len);
        let [seed, vocab] = seed_and_vocab(r)?;
        if self.chat || d.packing != Packing::None {
            let range = self.documents(matrix, split);
            let documents = Box::new(DocumentRange { data: self.data.clone(), range, chat: self.chat });
            let truncation = if self.chat { d.truncation } else { Truncation::Split };
            let options = RowOptions { seq, vocab, seed: Some(seed), truncation, packing: d.packing };
            let Some(packed) = Packed::with(documents, options)? else { return Ok(None) };
            let (rows, padding_free) = (packed.samples(), d.packing == Packing::PaddingFree);
            let note = self.chat.then(|| self.conversations(&packed.counts(), packed.used()));
            return Ok(Some(Samples {
                tokens: if padding_free { packed.used() } else { rows * seq as u64 },
                filled: (!padding_free).then(|| [rows as f64, packed.fill() * rows as f64]),
                lengths: padding_free.then(|| Lengths::of(&packed)),
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
        let range = split_of(matrix, split, self.data.len());
        let tokens = self.tokens(range.clone())?;
        let data = Box::new(GptDataset::new(self.data.clone(), range, Some(wanted), split, config)?);
        Ok(Some(Samples { data, tokens, filled: None, lengths: None, note: None }))
    }

    /// What has become of the conversations, for the user.
    fn conversations(&self, counts: &RowCounts, tokens: u64) -> String {
        let mut note = format!(
            "{}: {} samples for training, loss on {} tokens ({:.0} %)",
            self.name,
            counts.samples,
            counts.labels,
            100.0 * counts.labels as f64 / (tokens as f64).max(1.0)
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

    /// The documents of a split. Validation gets one where its share rounds to none and training keeps another.
    fn documents(&self, matrix: &SplitMatrix, split: Split) -> Range<usize> {
        let of = |split| split_of(matrix, split, self.data.documents());
        let train = of(Split::Train);
        if matrix[1].is_none() || !of(Split::Valid).is_empty() || train.len() < 2 {
            return of(split);
        }
        let last = train.end - 1;
        if split == Split::Train { train.start..last } else { last..train.end }
    }

    /// Does the validation split hold at least one sample?
    fn has_sample(&self, r: &Resolved, matrix: &SplitMatrix) -> Result<bool> {
        if self.chat || r.config.data.packing != Packing::None {
            return Ok(!self.documents(matrix, Split::Valid).is_empty());
        }
        Ok(self.tokens(split_of(matrix, Split::Valid, self.data.len()))? > r.plan.seq_len as u64)
    }

    fn tokens(&self, sequences: Range<usize>) -> Result<u64> {
        sequences.into_iter().try_fold(0u64, |sum, i| Ok(sum + self.data.length(i)? as u64))
    }
}

/// The fractions of training, validation and test.
type SplitMatrix = [Option<(f64, f64)>; 3];

/// A split of `count` documents or sequences.
fn split_of(matrix: &SplitMatrix, split: Split, count: usize) -> Range<usize> {
    matrix[split as usize].map_or(0..0, |fractions| split_range(fractions, count))
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
    let shares = normalize(&r.config.data.split.0)?;
    Ok([shares[0], if r.config.eval.every > 0 { shares[1] } else { 0.0 }, 0.0])
}

fn nothing_to_train_on() -> Error {
    Error::Invalid("data.split leaves nothing to train on; give its first share more".into())
}
