//! GPT samples from a `.bin/.idx` pair, identical to Megatron's GPTDataset.

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::batch::checked_id;
use super::gpt_index::{GptIndex, IndexSpec};
use super::split::{split_matrix, split_range};
use super::{Batches, IGNORE, IndexedDataset, Row, Split};
use crate::{Error, Result};

/// Internal value of padding when the tokenizer has no padding token.
const NO_PAD: i64 = -1;

/// How samples are cut and masked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// Tokens per sample.
    pub seq: usize,
    /// Seed of all shuffles.
    pub seed: u32,
    /// Vocabulary size; larger ids in the data are an error.
    pub vocab: u32,
    /// The end-of-document token, for the three switches below.
    #[serde(default)]
    pub eod: Option<i64>,
    /// The tokenizer's padding token; padded positions have no loss.
    #[serde(default)]
    pub pad: Option<i64>,
    /// Restart positions after an end-of-document token.
    #[serde(default)]
    pub reset_position_ids: bool,
    /// Restart attention after an end-of-document token.
    #[serde(default)]
    pub reset_attention_mask: bool,
    /// Exclude the prediction made from an end-of-document token from the loss.
    #[serde(default)]
    pub eod_mask_loss: bool,
    /// Drop an incomplete last validation sample. Other splits always do.
    #[serde(default = "yes")]
    pub drop_last_partial_validation: bool,
    /// Draw samples one token longer, so that the last input has a label too.
    #[serde(default = "yes")]
    pub extra_token: bool,
}

fn yes() -> bool {
    true
}

impl GptConfig {
    /// Plain samples: no resets, full loss.
    pub fn new(seq: usize, seed: u32, vocab: u32) -> Self {
        Self {
            seq,
            seed,
            vocab,
            eod: None,
            pad: None,
            reset_position_ids: false,
            reset_attention_mask: false,
            eod_mask_loss: false,
            drop_last_partial_validation: true,
            extra_token: true,
        }
    }
}

/// One sample with its masks, all `[seq]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GptItem {
    /// Input ids.
    pub tokens: Vec<i64>,
    /// The ids that follow; 0 on padding.
    pub labels: Vec<i64>,
    /// 1 for positions with a loss, else 0.
    pub loss_mask: Vec<f32>,
    /// Positions.
    pub position_ids: Vec<i64>,
    /// Where sequences start, beginning with 0. Token i attends to j ≤ i with no start in (j, i].
    pub starts: Vec<usize>,
}

/// The samples of one split of one dataset.
#[derive(Debug)]
pub struct GptDataset {
    data: Arc<IndexedDataset>,
    config: GptConfig,
    index: GptIndex,
}

impl GptDataset {
    /// Samples from the sequences `range` of `data`: at least `samples` of them, or one epoch.
    pub fn new(
        data: Arc<IndexedDataset>,
        range: std::ops::Range<usize>,
        samples: Option<u64>,
        split: Split,
        config: GptConfig,
    ) -> Result<Self> {
        let name = data.path().display().to_string();
        let too_many = |_| Error::Invalid(format!("{name}: more than 2^32 sequences; split the file"));
        let range =
            u32::try_from(range.start).map_err(too_many)?..u32::try_from(range.end).map_err(too_many)?;
        let spec = IndexSpec {
            seq: config.seq,
            seed: config.seed,
            samples,
            extra: config.extra_token,
            drop_last: split != Split::Valid || config.drop_last_partial_validation,
        };
        let index = GptIndex::build(range, |d| data.length(d as usize), &spec, &name)?;
        if index.is_empty() {
            return Err(Error::Invalid(format!(
                "{name}: the {} split holds less than one sample of {} tokens; \
                 give more data, another split or a shorter sequence",
                split.name(),
                config.seq
            )));
        }
        Ok(Self { data, config, index })
    }

    /// The splits of `prefix` with a non-zero share. `shares` add up to 1; see [`super::split::normalize`].
    pub fn splits(
        prefix: impl AsRef<Path>,
        shares: &[f64; 3],
        samples: [Option<u64>; 3],
        config: &GptConfig,
    ) -> Result<[Option<Self>; 3]> {
        let data = Arc::new(IndexedDataset::open(prefix)?);
        let matrix = split_matrix(shares);
        let mut out = [None, None, None];
        for (k, split) in Split::ALL.into_iter().enumerate() {
            if let Some(fractions) = matrix[k] {
                let range = split_range(fractions, data.len());
                out[k] = Some(Self::new(data.clone(), range, samples[k], split, config.clone())?);
            }
        }
        Ok(out)
    }

    /// The document, sample and shuffle indices.
    pub fn index(&self) -> &GptIndex {
        &self.index
    }

    /// The `seq` (+ 1) tokens of the n-th drawn sample, padded at the end of the data.
    fn text(&self, n: u64) -> Result<Vec<i64>> {
        let x = usize::from(self.config.extra_token);
        let want = self.config.seq + x;
        let j = self.index.shuffle[(n % self.index.len() as u64) as usize] as usize;
        let ([first, from], [last, to]) = (self.index.starts[j], self.index.starts[j + 1]);
        let mut text = Vec::with_capacity(want);
        for position in first..=last {
            let document = self.index.documents[position as usize] as usize;
            let begin = if position == first { from as usize } else { 0 };
            let length = self.data.length(document)?;
            // An incomplete last sample may end in an empty document, which has no extra token.
            let end = if position == last { (to as usize + x).min(length) } else { length };
            self.data.read(document, begin..end, &mut text)?;
        }
        text.resize(want, self.config.pad.unwrap_or(NO_PAD));
        Ok(text)
    }

    /// The n-th drawn sample.
    pub fn item(&self, n: u64) -> Result<GptItem> {
        let c = &self.config;
        let pad = c.pad.unwrap_or(NO_PAD);
        let mut tokens = self.text(n)?;
        let mut labels = tokens[1..].to_vec();
        if c.extra_token {
            tokens.pop();
        } else {
            labels.push(pad);
        }
        let mut item = GptItem { loss_mask: vec![1.0; c.seq], starts: vec![0], ..GptItem::default() };
        let mut document_start = 0;
        for (i, &token) in tokens.iter().enumerate() {
            item.position_ids.push((i - if c.reset_position_ids { document_start } else { 0 }) as i64);
            if Some(token) == c.eod {
                document_start = i + 1;
                if c.reset_attention_mask && i + 1 < c.seq {
                    item.starts.push(i + 1);
                }
                if c.eod_mask_loss {
                    item.loss_mask[i] = 0.0;
                }
            }
        }
        for i in 0..c.seq {
            if labels[i] == pad {
                item.loss_mask[i] = 0.0;
                labels[i] = 0;
            }
            if tokens[i] == pad {
                // Any valid id will do.
                tokens[i] = 0;
            }
        }
        (item.tokens, item.labels) = (tokens, labels);
        Ok(item)
    }
}

impl Batches for GptDataset {
    fn seq(&self) -> usize {
        self.config.seq
    }

    fn samples(&self) -> u64 {
        self.index.len() as u64
    }

    fn resets(&self) -> bool {
        self.config.reset_attention_mask
    }

    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let item = self.item(n)?;
        let source = || format!("{} sample {n}", self.data.path().display());
        for i in 0..self.config.seq {
            row.tokens.push(checked_id(item.tokens[i], self.config.vocab, &source)?);
            let label = checked_id(item.labels[i], self.config.vocab, &source)?;
            row.labels.push(if item.loss_mask[i] == 0.0 { IGNORE } else { label });
            row.positions.push(item.position_ids[i] as i32);
        }
        row.starts.extend(&item.starts);
        Ok(())
    }
}
