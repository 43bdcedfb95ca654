//! Compares the token ids of a run's data with its model and tokenizer, before any step is made.

use super::{DatasetInfo, IndexedDataset, TokenizerInfo};
use crate::config::Resolved;
use crate::{Error, Result};

/// Bytes of a `.bin` without a description that are read to find ids outside the vocabulary. Larger files are sampled evenly.
const SCAN_BYTES: u64 = 16 << 30;
/// A model's vocabulary is padded to multiples that GEMMs like; more than this fraction beyond the data's is no padding.
const PADDING: f64 = 0.1;

/// Checks every dataset of a recipe. `tokenizer` is the one that the recipe names. Returns notes for the user.
///
/// Ids outside the vocabulary are an error. So is data of another tokenizer, unless `data.check_tokenizer` is false.
pub fn check(r: &Resolved, tokenizer: Option<&TokenizerInfo>) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    if r.config.data.is_embedded() {
        return Ok(notes);
    }
    for prefix in &r.pairs {
        let data = IndexedDataset::open(prefix)?;
        match DatasetInfo::of(&data)? {
            Some(info) => {
                covers(&info, tokenizer, r)?;
                within(&data, 0, info.largest_id.into(), r.model.vocab)?;
                if r.config.data.check_tokenizer {
                    notes.extend(same_tokenizer(&data, &info.tokenizer, tokenizer, r.model.vocab)?);
                }
            }
            None => {
                let (smallest, largest, read) = data.id_range(SCAN_BYTES)?;
                within(&data, smallest, largest, r.model.vocab)?;
                if read < data.tokens() {
                    notes.push(format!(
                        "{prefix}: {read} of {} token ids were compared with the vocabulary",
                        data.tokens()
                    ));
                }
            }
        }
    }
    Ok(notes)
}

/// A tokenizer that the run and its data share, and that has more ids than the model: the model is the one to change.
fn covers(info: &DatasetInfo, run: Option<&TokenizerInfo>, r: &Resolved) -> Result<()> {
    let (ids, vocab) = (info.tokenizer.vocab, r.model.vocab);
    let is_shared = match run {
        Some(run) => run.digest == info.tokenizer.digest,
        None => info.tokenizer.digest.is_none(),
    };
    if !is_shared || (info.largest_id as usize) < vocab {
        return Ok(());
    }
    let way_out = match &r.config.model.hf {
        Some(_) => "take the tokenizer of the model's folder (leave data.tokenizer out)".into(),
        None => format!("set it to {ids}"),
    };
    let what = format!(
        "the data holds token {}, outside the vocabulary of {vocab}: its tokenizer has {ids} ids; {way_out}",
        info.largest_id
    );
    Err(Error::Config { file: None, line: None, key: Some("model.vocab".into()), what, hint: None })
}

fn within(data: &IndexedDataset, smallest: i64, largest: i64, vocab: usize) -> Result<()> {
    let outside =
        [smallest, largest].into_iter().find(|id| usize::try_from(*id).map_or(true, |id| id >= vocab));
    match outside.filter(|_| data.tokens() > 0) {
        None => Ok(()),
        Some(id) => Err(Error::damaged(
            data.path(),
            format!(
                "holds token {id}, outside the vocabulary of {vocab} (model.vocab); the data was made with another \
                 tokenizer: build it again with the model's"
            ),
        )),
    }
}

/// Compares the tokenizer of the data with that of the run; returns a note if there is a doubt but no contradiction.
fn same_tokenizer(
    data: &IndexedDataset,
    made_with: &TokenizerInfo,
    run: Option<&TokenizerInfo>,
    vocab: usize,
) -> Result<Option<String>> {
    let differs = |with: String| {
        Err(Error::damaged(
            data.path(),
            format!(
                "was made with {}, but {with}; name its tokenizer with data.tokenizer (a pair of `data build`: build it again \
                 with --tokenizer), or set data.check_tokenizer=false to train on it as it is",
                made_with.describe()
            ),
        ))
    };
    match run {
        Some(run) if run.digest != made_with.digest => {
            differs(format!("the tokenizer of this run is {}", run.describe()))
        }
        None if made_with.digest.is_none() && vocab as f64 > 256.0 * (1.0 + PADDING) => {
            differs(format!("model.vocab is {vocab}"))
        }
        _ if vocab as f64 > f64::from(made_with.vocab) * (1.0 + PADDING) => Ok(Some(format!(
            "{}: its tokenizer has {} ids, model.vocab is {vocab}: the ids beyond are never trained",
            data.path().display(),
            made_with.vocab
        ))),
        _ => Ok(None),
    }
}
