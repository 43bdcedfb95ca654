//! Text ↔ token ids, by a Hugging Face `tokenizer.json` or byte-level.

mod alignment;
mod byte_level;
mod charsmap;
mod consistency;
mod file;
mod limits;
mod named;
mod stream;

pub use byte_level::byte_tokenizer_json;
pub(crate) use file::token_text;
pub(crate) use named::NamedTokens;
pub use stream::TextStream;

use crate::error::{Error, Result};
use alignment::{Surfaces, overlaps};
use ferrotron_core::data::TokenizerInfo;
use limits::Growth;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use tokenizers::pipeline::{EncodeOptions, Override, PipelineTokenizer};

/// A tokenizer.
pub struct Tokenizer {
    kind: TokenizerKind,
    origin: String,
    vocab_size: usize,
    /// CRC-32C over all pairs of id and token; `None` for bytes.
    digest: Option<u32>,
    /// CRC-32C of the `tokenizer.json`, with what the files beside it add to it.
    file_digest: u32,
    /// Special tokens by their text.
    specials: Vec<(String, u32)>,
    bos: Option<u32>,
    eos: Vec<u32>,
}

enum TokenizerKind {
    /// Ids are bytes.
    Bytes,
    File(Box<PipelineTokenizer>, Growth, Surfaces),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} ids)", self.origin, self.vocab_size)
    }
}

impl Tokenizer {
    /// The built-in byte-level tokenizer: 256 ids, each a byte of UTF-8.
    pub fn bytes() -> Tokenizer {
        let (origin, specials) = ("byte tokenizer".into(), Vec::new());
        Tokenizer {
            kind: TokenizerKind::Bytes,
            origin,
            vocab_size: 256,
            digest: None,
            file_digest: 0,
            specials,
            bos: None,
            eos: Vec::new(),
        }
    }

    /// `tokenizer.json` of a folder, with the added, beginning and end tokens that its other files name.
    pub fn from_dir(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            if !dir.exists() {
                return Err(Error::absent(
                    dir,
                    "does not exist; name a folder with tokenizer.json, or the file",
                ));
            }
            let what = "has no tokenizer.json; save it as a fast tokenizer first".into();
            return Err(Error::Tokenizer { origin: dir.display().to_string(), what });
        }
        let text = crate::json::read_text(&path)?;
        let mut tokenizer = Tokenizer::build(&text, &path.display().to_string(), &NamedTokens::of(dir)?)?;
        tokenizer.add_ends(dir)?;
        Ok(tokenizer)
    }

    /// Adds the beginning and end tokens that the files of a model's folder name.
    pub(crate) fn add_ends(&mut self, dir: &Path) -> Result<()> {
        let ends = file::ends(dir, |key| self.named(key, dir))?;
        self.bos = self.bos.or(ends.bos);
        for id in ends.eos {
            if !self.eos.contains(&id) {
                self.eos.push(id);
            }
        }
        Ok(())
    }

    /// The id of a special token that the tokenizer's files in a folder name by key.
    fn named(&self, key: &str, dir: &Path) -> Result<Option<u32>> {
        let named = NamedTokens::of(dir)?;
        let Some(text) = named.special(key) else { return Ok(None) };
        let id = self.special(text);
        if id.is_none() && key == "eos_token" {
            return Err(self.wrong(format!(
                "has no token \"{text}\", which {} names as the end of a text (`eos_token`); add it to tokenizer.json, or give its \
                 id as `eos_token_id` in generation_config.json",
                dir.display()
            )));
        }
        Ok(id)
    }

    /// A file in the format of `tokenizer.json`, of this or an earlier version of the format.
    pub fn from_file(path: &Path) -> Result<Tokenizer> {
        Tokenizer::from_json(&crate::json::read_text(path)?, &path.display().to_string())
    }

    /// The text of a `tokenizer.json`; `origin` names it in errors.
    pub fn from_json(text: &str, origin: &str) -> Result<Tokenizer> {
        Tokenizer::build(text, origin, &NamedTokens::default())
    }

    fn build(text: &str, origin: &str, named: &NamedTokens) -> Result<Tokenizer> {
        let wrong = |what: String| Error::Tokenizer { origin: origin.into(), what };
        let mut checked = file::check(text).map_err(wrong)?;
        let mut file_digest = crc32c::crc32c(text.as_bytes());
        if let Some(text) = named.added_to(&checked) {
            checked = file::check(&text).map_err(wrong)?;
            file_digest = crc32c::crc32c(text.as_bytes());
        }
        let built = guard(|| {
            let mut value = checked.value;
            let surfaces = Surfaces::new(&value, checked.vocab_size);
            consistency::check_merges(&value["model"])?;
            consistency::settle_added_tokens(&mut value)?;
            tokenizers::canonicalize_value(&mut value).map_err(|e| e.to_string())?;
            let growth = limits::check(&value)?;
            consistency::check(&value)?;
            let built = tokenizers::from_json(&value.to_string()).map_err(|e| e.to_string())?;
            check_added_ids(&built, &checked.specials)?;
            Ok((built, growth, surfaces))
        });
        let (built, growth, surfaces) = built.map_err(wrong)?;
        Ok(Tokenizer {
            kind: TokenizerKind::File(Box::new(built), growth, surfaces),
            origin: origin.into(),
            vocab_size: checked.vocab_size,
            digest: Some(checked.digest),
            file_digest,
            specials: checked.specials,
            bos: None,
            eos: Vec::new(),
        })
    }

    /// Vocabulary size: one more than the largest id. A model's may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Its identity, which `data build` stores with a dataset and `train` compares.
    pub fn info(&self) -> TokenizerInfo {
        TokenizerInfo {
            vocab: u32::try_from(self.vocab_size).unwrap_or(u32::MAX),
            // A byte-level tokenizer.json, as `convert` writes it for models of bytes, is the byte-level tokenizer.
            digest: self.digest.filter(|d| Some(*d) != byte_level_digest()).map(|d| format!("{d:08x}")),
        }
    }

    /// Identifies all that the tokens of a text depend on, also where [`Tokenizer::info`] is the same: how added tokens are found, and what
    /// ends a text.
    pub(crate) fn text_digest(&self) -> u32 {
        let ends = self.eos.iter().flat_map(|id| id.to_le_bytes());
        crc32c::crc32c_append(self.file_digest, &ends.collect::<Vec<u8>>())
    }

    /// The id of a special or added token.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.specials.iter().find(|(t, _)| t == text).map(|&(_, id)| id)
    }

    /// The text of a token, if it has one of its own.
    pub(crate) fn text_of(&self, id: u32) -> Option<String> {
        let special = self.specials.iter().find(|&&(_, own)| own == id).map(|(text, _)| text.clone());
        special.or_else(|| self.decode_with_specials(&[id]).ok()).filter(|text| !text.is_empty())
    }

    /// The id that begins a text, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The ids that end a text; generation stops at any of them.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Encodes a text without adding special tokens. Special tokens spelled out in the text are recognized.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_as(text, false)
    }

    /// Encodes a text with the special tokens that the tokenizer adds, such as beginning of text. The post-processor in
    /// `tokenizer.json` says which: as in transformers 5, `add_bos_token` and `add_eos_token` in `tokenizer_config.json` do
    /// not count beside it.
    pub fn encode_framed(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_as(text, true)
    }

    /// Encodes a text as [`Tokenizer::encode`] does, and says for each token whether it lies, at least partly, in one of
    /// the ascending `spans` of bytes.
    pub fn encode_spans(&self, text: &str, spans: &[Range<usize>]) -> Result<(Vec<u32>, Vec<bool>)> {
        let ids = self.encode(text)?;
        let TokenizerKind::File(_, _, surfaces) = &self.kind else {
            let inside = (0..ids.len()).map(|i| overlaps(&(i..i + 1), spans)).collect();
            return Ok((ids, inside));
        };
        if let Some(tokens) = surfaces.align(text, &ids) {
            let inside = tokens.iter().map(|token| overlaps(token, spans)).collect();
            return Ok((ids, inside));
        }
        // A normalizer has changed the text. Where tokens end with the spans, as special tokens make them, the parts give the
        // same tokens as the whole.
        let (mut parts, mut inside, mut at) = (Vec::new(), Vec::new(), 0);
        for (range, is_span) in
            spans.iter().flat_map(|s| [(s.start, false), (s.end, true)]).chain([(text.len(), false)])
        {
            parts.extend(self.encode(text.get(at..range).unwrap_or_default())?);
            inside.resize(parts.len(), is_span);
            at = range;
        }
        match parts == ids {
            true => Ok((ids, inside)),
            false => Err(self.wrong(
                "it changes the text and makes tokens that reach across the border of an assistant's turn, so that they cannot \
                 be told apart"
                    .into(),
            )),
        }
    }

    fn encode_as(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let TokenizerKind::File(inner, growth, _) = &self.kind else {
            return Ok(text.bytes().map(u32::from).collect());
        };
        growth.check(text).map_err(|what| self.wrong(what))?;
        let options = EncodeOptions {
            add_special_tokens,
            encode_special_tokens: false,
            padding: Override::Off,
            truncation: Override::Off,
        };
        let mut out = Vec::new();
        guard(|| inner.encode_into(text, &options, &mut out).map_err(|e| e.to_string()))
            .map_err(|what| self.wrong(what))?;
        let ids: Vec<u32> = out.into_iter().map(|t| t.id()).collect();
        // The ids of a post-processor's template are as the file has them.
        match ids.iter().find(|id| **id as usize >= self.vocab_size) {
            Some(id) => {
                Err(self.wrong(format!("it adds the id {id}, and its vocabulary has {}", self.vocab_size)))
            }
            None => Ok(ids),
        }
    }

    /// Decodes ids without special tokens. Ids outside the vocabulary are skipped; invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_as(ids, true)
    }

    /// Decodes ids with special tokens spelled out.
    pub fn decode_with_specials(&self, ids: &[u32]) -> Result<String> {
        self.decode_as(ids, false)
    }

    fn decode_as(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        match &self.kind {
            TokenizerKind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            TokenizerKind::File(inner, ..) => {
                guard(|| match inner.decode_tokens(ids, skip_special_tokens).is_empty() {
                    // A decoder of the library subtracts one from the number of tokens.
                    true => Ok(String::new()),
                    false => inner.decode(ids, skip_special_tokens).map_err(|e| e.to_string()),
                })
                .map_err(|what| self.wrong(what))
            }
        }
    }

    /// A streaming decoder.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    fn wrong(&self, what: String) -> Error {
        Error::Tokenizer { origin: self.origin.clone(), what }
    }
}

/// The digest of the byte-level tokenizer as a `tokenizer.json`.
fn byte_level_digest() -> Option<u32> {
    file::check(&byte_tokenizer_json()).ok().map(|checked| checked.digest)
}

/// The library numbers added tokens itself, after the vocabulary. Text would become other ids than the file says.
fn check_added_ids(built: &PipelineTokenizer, declared: &[(String, u32)]) -> Result<(), String> {
    for (content, id) in declared {
        match built.get_added_vocabulary().token_to_id(content) {
            Some(got) if got != *id => {
                return Err(format!(
                    "added token {content:?} has the id {id} in the file and would get {got}: ids of added tokens follow \
                     the vocabulary without gaps"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Turns a panic of the tokenizers library, which trusts indices in the file, into an error.
fn guard<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the file is inconsistent: the tokenizers library panicked on it".into()))
}
