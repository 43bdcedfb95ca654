//! Reader of `.bin/.idx` pairs, the format of Megatron's IndexedDataset.
//!
//! `.bin` holds the tokens of all sequences, concatenated. `.idx`, little-endian: `MMIDIDX\0\0` | u64 version = 1 |
//! u8 token type | u64 n sequences | u64 d | i32 length\[n\] | i64 byte pointer\[n\] | i64 document\[d\] |
//! (multimodal) i8 mode\[n\]. `document` starts with 0, ends with n and holds the first sequence of each document, so
//! there are d − 1 documents.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::TokenType;
use super::mmap::MappedFile;
use crate::{Error, Result};

pub(crate) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(crate) const VERSION: u64 = 1;
/// Size of the header in bytes.
pub(crate) const HEADER: usize = 34;

/// `prefix` + `suffix`, where the prefix may already end in `.bin` or `.idx`.
pub(crate) fn beside(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name = match prefix.extension() {
        Some(e) if e == "bin" || e == "idx" => prefix.with_extension("").into_os_string(),
        _ => prefix.as_os_str().to_owned(),
    };
    name.push(suffix);
    PathBuf::from(name)
}

/// An open, fully checked dataset. Both files stay mapped; nothing is copied.
#[derive(Debug)]
pub struct IndexedDataset {
    idx_path: PathBuf,
    bin_path: PathBuf,
    idx: MappedFile,
    bin: MappedFile,
    token_type: TokenType,
    sequences: usize,
    boundaries: usize,
    multimodal: bool,
}

impl IndexedDataset {
    /// Opens `prefix.bin` and `prefix.idx` and checks every field of the index against both files.
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self> {
        let idx_path = beside(prefix.as_ref(), ".idx");
        let bin_path = beside(prefix.as_ref(), ".bin");
        let idx = MappedFile::open(&idx_path)?;
        let bin = MappedFile::open(&bin_path)?;
        let (token_type, sequences, boundaries, multimodal) =
            header(idx.bytes()).map_err(|what| Error::damaged(&idx_path, what))?;
        let it = Self { idx_path, bin_path, idx, bin, token_type, sequences, boundaries, multimodal };
        it.check_sequences()?;
        it.check_documents()?;
        Ok(it)
    }

    /// Checks that the sequences tile the `.bin` exactly, as every writer of this format produces them: anything else
    /// is a damaged index or the index of another file.
    fn check_sequences(&self) -> Result<()> {
        let size = self.token_type.size() as u64;
        let mut end = 0u64;
        for i in 0..self.sequences {
            let (length, pointer) = (i32::from_le_bytes(self.at(i, 0)), i64::from_le_bytes(self.at(i, 1)));
            let bad = |what: String| Err(Error::damaged(&self.idx_path, what));
            if length < 0 {
                return bad(format!("sequence {i} has the negative length {length}"));
            }
            if u64::try_from(pointer) != Ok(end) {
                return bad(format!(
                    "sequence {i} points at byte {pointer}, but the one before ends at {end}"
                ));
            }
            // `end` is at most the length of a file here and a sequence at most 2³⁴ bytes, so the sum fits in 64
            // bits.
            end += length as u64 * size;
            if end > self.bin.bytes().len() as u64 {
                return bad(format!(
                    "sequence {i} ends at byte {end}, but {} has only {} bytes",
                    self.bin_path.display(),
                    self.bin.bytes().len()
                ));
            }
        }
        if end != self.bin.bytes().len() as u64 {
            return Err(Error::damaged(
                &self.bin_path,
                format!("has {} bytes, but its index accounts for {end}", self.bin.bytes().len()),
            ));
        }
        Ok(())
    }

    fn check_documents(&self) -> Result<()> {
        let mut last = 0i64;
        for k in 0..self.boundaries {
            let at = i64::from_le_bytes(self.at(k, 2));
            if at < last || (k == 0 && at != 0) {
                return Err(Error::damaged(
                    &self.idx_path,
                    format!("document {k} starts at sequence {at}; starts begin with 0 and never fall"),
                ));
            }
            last = at;
        }
        if u64::try_from(last) != Ok(self.sequences as u64) {
            return Err(Error::damaged(
                &self.idx_path,
                format!("the last document ends at sequence {last}, not at {}", self.sequences),
            ));
        }
        Ok(())
    }

    /// Element `i` of array `which` (0 lengths, 1 pointers, 2 documents, 3 modes). The caller keeps `i` within the
    /// array, which `header` has checked to be inside the file.
    fn at<const N: usize>(&self, i: usize, which: usize) -> [u8; N] {
        let n = self.sequences;
        let start = HEADER + [0, 4 * n, 12 * n, 12 * n + 8 * self.boundaries][which] + i * N;
        self.idx.bytes()[start..].first_chunk::<N>().copied().unwrap_or([0; N])
    }

    fn in_range(&self, sequence: usize) -> Result<()> {
        if sequence < self.sequences {
            return Ok(());
        }
        let n = self.sequences;
        Err(Error::damaged(&self.idx_path, format!("there is no sequence {sequence}; the index has {n}")))
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.sequences
    }

    /// True if there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.sequences == 0
    }

    /// Number of documents; each has one or more sequences.
    pub fn documents(&self) -> usize {
        self.boundaries - 1
    }

    /// Total number of tokens.
    pub fn tokens(&self) -> u64 {
        (self.bin.bytes().len() / self.token_type.size()) as u64
    }

    /// Storage type of tokens.
    pub fn token_type(&self) -> TokenType {
        self.token_type
    }

    /// True if each sequence has a mode.
    pub fn is_multimodal(&self) -> bool {
        self.multimodal
    }

    /// The `.idx` file, for messages.
    pub fn path(&self) -> &Path {
        &self.idx_path
    }

    /// Number of tokens in a sequence.
    pub fn length(&self, sequence: usize) -> Result<usize> {
        self.in_range(sequence)?;
        Ok(i32::from_le_bytes(self.at(sequence, 0)) as usize)
    }

    /// The mode of a sequence (0 text, 1 image by convention); `None` in plain files.
    pub fn mode(&self, sequence: usize) -> Result<Option<i8>> {
        self.in_range(sequence)?;
        Ok(self.multimodal.then(|| i8::from_le_bytes(self.at(sequence, 3))))
    }

    /// The sequences of a document.
    pub fn document(&self, document: usize) -> Result<Range<usize>> {
        if document >= self.documents() {
            let d = self.documents();
            return Err(Error::damaged(
                &self.idx_path,
                format!("there is no document {document}; the index has {d}"),
            ));
        }
        let bound = |k| i64::from_le_bytes(self.at(k, 2)) as usize;
        Ok(bound(document)..bound(document + 1))
    }

    /// The stored bytes of a sequence.
    pub fn bytes(&self, sequence: usize) -> Result<&[u8]> {
        let bytes = self.length(sequence)? * self.token_type.size();
        let start = i64::from_le_bytes(self.at(sequence, 1)) as usize;
        self.bin.bytes().get(start..start + bytes).ok_or_else(|| {
            Error::damaged(&self.bin_path, format!("sequence {sequence} lies outside the file"))
        })
    }

    /// Appends tokens `range` of a sequence to `out`.
    pub fn read(&self, sequence: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<()> {
        if self.token_type.is_float() {
            let name = self.token_type.name();
            return Err(Error::damaged(&self.idx_path, format!("holds {name} values, not token ids")));
        }
        let size = self.token_type.size();
        let all = self.bytes(sequence)?;
        let part = range.start.checked_mul(size).zip(range.end.checked_mul(size));
        let Some(part) = part.and_then(|(a, b)| all.get(a..b)) else {
            let what = format!("tokens {range:?} of sequence {sequence}, which has {}", all.len() / size);
            return Err(Error::damaged(&self.idx_path, what));
        };
        self.token_type.decode(part, out);
        Ok(())
    }

    /// All tokens of a sequence.
    pub fn sequence(&self, sequence: usize) -> Result<Vec<i64>> {
        let mut out = Vec::new();
        self.read(sequence, 0..self.length(sequence)?, &mut out)?;
        Ok(out)
    }

    /// All values of a sequence as f64, whatever their storage type.
    pub fn values(&self, sequence: usize) -> Result<Vec<f64>> {
        Ok(self.token_type.decode_f64(self.bytes(sequence)?))
    }
}

/// Token type, n, d and multimodality; checks that all arrays are inside the index.
fn header(idx: &[u8]) -> Result<(TokenType, usize, usize, bool), String> {
    let Some(head) = idx.first_chunk::<HEADER>() else {
        return Err(format!("is {} bytes long; an index has at least {HEADER}", idx.len()));
    };
    if !head.starts_with(MAGIC) {
        return Err("does not start with MMIDIDX: not an index of this format".into());
    }
    let word = |at: usize| {
        let mut b = [0; 8];
        b.copy_from_slice(&head[at..at + 8]);
        u64::from_le_bytes(b)
    };
    if word(9) != VERSION {
        return Err(format!("has format version {}; this reader knows version {VERSION}", word(9)));
    }
    let token_type = TokenType::from_code(head[17])
        .ok_or_else(|| format!("has the unknown token type code {} (1 to 8 exist)", head[17]))?;
    let (n, d) = (word(18), word(26));
    // In u128, so that a corrupt header cannot wrap around.
    let plain = HEADER as u128 + 12 * u128::from(n) + 8 * u128::from(d);
    let len = idx.len() as u128;
    if len != plain && len != plain + u128::from(n) {
        return Err(format!(
            "is {len} bytes long, but {n} sequences and {d} document bounds take {plain} (or {} with modes)",
            plain + u128::from(n)
        ));
    }
    if d == 0 {
        return Err("has no document bounds; even an empty dataset has one".into());
    }
    // Both fit: they are smaller than the length of a mapped file.
    Ok((token_type, n as usize, d as usize, len != plain))
}
