//! Reader of `.bin/.idx` pairs, the format of Megatron's IndexedDataset.
//!
//! `.bin` holds the tokens of all sequences, concatenated. `.idx`, little-endian: `MMIDIDX\0\0` | u64 version = 1 |
//! u8 token type | u64 n sequences | u64 d | i32 length\[n\] | i64 byte pointer\[n\] | i64 document\[d\] |
//! (multimodal) i8 mode\[n\]. `document` starts with 0, ends with n and holds the first sequence of each document, so
//! there are d − 1 documents.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::TokenType;
use crate::{Error, Result, fs};

pub(crate) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(crate) const VERSION: u64 = 1;
/// Size of the header in bytes.
pub(crate) const HEADER: usize = 34;
/// The byte pointer of every `STRIDE`-th sequence is kept; those between follow from the lengths.
const STRIDE: usize = 64;

/// `prefix` + `suffix`, where the prefix may already end in `.bin` or `.idx`.
pub fn beside(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name = match prefix.extension() {
        Some(e) if e == "bin" || e == "idx" => prefix.with_extension("").into_os_string(),
        _ => prefix.as_os_str().to_owned(),
    };
    name.push(suffix);
    PathBuf::from(name)
}

/// An open, fully checked dataset. The index is in memory: 4 bytes a sequence and 8 a document. Tokens are read from the
/// file on demand rather than mapped, because a map of a file that somebody truncates ends the process with SIGBUS.
#[derive(Debug)]
pub struct IndexedDataset {
    idx_path: PathBuf,
    bin_path: PathBuf,
    bin: File,
    /// Length of `.bin` in bytes when it was opened.
    bin_len: u64,
    token_type: TokenType,
    lengths: Vec<i32>,
    /// Byte pointers of sequences 0, 64, 128, …
    pointers: Vec<u64>,
    /// First sequence of each document, and the end of the last.
    bounds: Vec<i64>,
    modes: Option<Vec<i8>>,
}

impl IndexedDataset {
    /// Opens `prefix.bin` and `prefix.idx` and checks every field of the index against both files.
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self> {
        let idx_path = beside(prefix.as_ref(), ".idx");
        let bin_path = beside(prefix.as_ref(), ".bin");
        let (idx, idx_len) = open_regular(&idx_path)?;
        let (bin, bin_len) = open_regular(&bin_path)?;
        let mut idx = IndexReader { path: &idx_path, file: BufReader::with_capacity(1 << 20, idx) };
        let mut head = [0; HEADER];
        if idx_len < HEADER as u64 {
            let what = format!("is {idx_len} bytes long; an index has at least {HEADER}");
            return Err(Error::damaged(&idx_path, what));
        }
        idx.fill(&mut head)?;
        let (token_type, n, d, multimodal) =
            header(&head, idx_len).map_err(|what| Error::damaged(&idx_path, what))?;
        let lengths = idx.array(n, i32::from_le_bytes)?;
        let mut it = Self {
            bin,
            bin_len,
            token_type,
            lengths,
            pointers: Vec::with_capacity(n.div_ceil(STRIDE)),
            bounds: Vec::new(),
            modes: None,
            idx_path: idx_path.clone(),
            bin_path,
        };
        it.check_sequences(&mut idx)?;
        it.bounds = idx.array(d, i64::from_le_bytes)?;
        it.check_documents()?;
        it.modes = multimodal.then(|| idx.array(n, i8::from_le_bytes)).transpose()?;
        Ok(it)
    }

    /// Reads the byte pointers and checks that the sequences tile the `.bin` exactly, as every writer of this format
    /// produces them: anything else is a damaged index or the index of another file.
    fn check_sequences(&mut self, idx: &mut IndexReader) -> Result<()> {
        let size = self.token_type.size() as u64;
        let bad = |what: String| Err(Error::damaged(&self.idx_path, what));
        let mut end = 0u64;
        for (i, &length) in self.lengths.iter().enumerate() {
            let mut pointer = [0; 8];
            idx.fill(&mut pointer)?;
            let pointer = i64::from_le_bytes(pointer);
            if length < 0 {
                return bad(format!("sequence {i} has the negative length {length}"));
            }
            if u64::try_from(pointer) != Ok(end) {
                return bad(format!(
                    "sequence {i} points at byte {pointer}, but the one before ends at {end}"
                ));
            }
            if i.is_multiple_of(STRIDE) {
                self.pointers.push(end);
            }
            // `end` is at most the length of a file here and a sequence at most 2³⁴ bytes, so the sum fits in 64
            // bits.
            end += length as u64 * size;
            if end > self.bin_len {
                return bad(format!(
                    "sequence {i} ends at byte {end}, but {} has only {} bytes",
                    self.bin_path.display(),
                    self.bin_len
                ));
            }
        }
        if end != self.bin_len {
            let what = format!("has {} bytes, but its index accounts for {end}", self.bin_len);
            return Err(Error::damaged(&self.bin_path, what));
        }
        Ok(())
    }

    fn check_documents(&self) -> Result<()> {
        let mut last = 0i64;
        for (k, &at) in self.bounds.iter().enumerate() {
            if at < last || (k == 0 && at != 0) {
                return Err(Error::damaged(
                    &self.idx_path,
                    format!("document {k} starts at sequence {at}; starts begin with 0 and never fall"),
                ));
            }
            last = at;
        }
        if u64::try_from(last) != Ok(self.lengths.len() as u64) {
            return Err(Error::damaged(
                &self.idx_path,
                format!("the last document ends at sequence {last}, not at {}", self.lengths.len()),
            ));
        }
        Ok(())
    }

    /// Reads bytes of the `.bin`. It had them when it was opened; if it does not any more, somebody cut it.
    fn read_bin(&self, out: &mut [u8], at: u64) -> Result<()> {
        self.bin.read_exact_at(out, at).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                let now = self.bin.metadata().map_or(0, |m| m.len());
                let what = format!(
                    "has {now} bytes, but had {} when it was opened: it was truncated while in use; restore it or \
                     build it again, then resume",
                    self.bin_len
                );
                Error::damaged(&self.bin_path, what)
            }
            _ => Error::io(&self.bin_path)(e),
        })
    }

    /// Byte pointer of a sequence, which the caller has checked to exist.
    fn pointer(&self, sequence: usize) -> u64 {
        let first = sequence / STRIDE * STRIDE;
        let between: u64 = self.lengths[first..sequence].iter().map(|&l| l as u64).sum();
        self.pointers[sequence / STRIDE] + between * self.token_type.size() as u64
    }

    fn in_range(&self, sequence: usize) -> Result<()> {
        let n = self.lengths.len();
        if sequence < n {
            return Ok(());
        }
        Err(Error::damaged(&self.idx_path, format!("there is no sequence {sequence}; the index has {n}")))
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// True if there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Number of documents; each has one or more sequences.
    pub fn documents(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Total number of tokens.
    pub fn tokens(&self) -> u64 {
        self.bin_len / self.token_type.size() as u64
    }

    /// Storage type of tokens.
    pub fn token_type(&self) -> TokenType {
        self.token_type
    }

    /// True if each sequence has a mode.
    pub fn is_multimodal(&self) -> bool {
        self.modes.is_some()
    }

    /// The `.idx` file, for messages.
    pub fn path(&self) -> &Path {
        &self.idx_path
    }

    /// Number of tokens in a sequence.
    pub fn length(&self, sequence: usize) -> Result<usize> {
        self.in_range(sequence)?;
        Ok(self.lengths[sequence] as usize)
    }

    /// The mode of a sequence (0 text, 1 image by convention); `None` in plain files.
    pub fn mode(&self, sequence: usize) -> Result<Option<i8>> {
        self.in_range(sequence)?;
        Ok(self.modes.as_ref().map(|m| m[sequence]))
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
        Ok(self.bounds[document] as usize..self.bounds[document + 1] as usize)
    }

    /// The stored bytes of tokens `range` of a sequence.
    fn stored(&self, sequence: usize, range: Range<usize>) -> Result<Vec<u8>> {
        let length = self.length(sequence)?;
        if range.start > range.end || range.end > length {
            let what = format!("tokens {range:?} of sequence {sequence}, which has {length}");
            return Err(Error::damaged(&self.idx_path, what));
        }
        let size = self.token_type.size();
        let mut bytes = vec![0; range.len() * size];
        self.read_bin(&mut bytes, self.pointer(sequence) + (range.start * size) as u64)?;
        Ok(bytes)
    }

    /// The stored bytes of a sequence.
    pub fn bytes(&self, sequence: usize) -> Result<Vec<u8>> {
        self.stored(sequence, 0..self.length(sequence)?)
    }

    /// Appends tokens `range` of a sequence to `out`.
    pub fn read(&self, sequence: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<()> {
        if self.token_type.is_float() {
            let name = self.token_type.name();
            return Err(Error::damaged(&self.idx_path, format!("holds {name} values, not token ids")));
        }
        self.token_type.decode(&self.stored(sequence, range)?, out);
        Ok(())
    }

    /// The smallest and the largest id, and how many tokens were read: all, or about `limit` bytes spread evenly over a
    /// larger file.
    pub fn id_range(&self, limit: u64) -> Result<(i64, i64, u64)> {
        const CHUNK: u64 = 4 << 20;
        if self.token_type.is_float() {
            let name = self.token_type.name();
            return Err(Error::damaged(&self.idx_path, format!("holds {name} values, not token ids")));
        }
        let chunks = self.bin_len.div_ceil(CHUNK);
        let stride = chunks.div_ceil((limit / CHUNK).max(1)).max(1);
        let (mut least, mut most, mut read) = (i64::MAX, i64::MIN, 0);
        let mut bytes = Vec::new();
        let mut ids = Vec::new();
        for chunk in (0..chunks).step_by(stride as usize) {
            let at = chunk * CHUNK;
            bytes.resize((self.bin_len - at).min(CHUNK) as usize, 0);
            self.read_bin(&mut bytes, at)?;
            ids.clear();
            self.token_type.decode(&bytes, &mut ids);
            least = ids.iter().copied().min().unwrap_or(least).min(least);
            most = ids.iter().copied().max().unwrap_or(most).max(most);
            read += ids.len() as u64;
        }
        Ok((least, most, read))
    }

    /// All tokens of a sequence.
    pub fn sequence(&self, sequence: usize) -> Result<Vec<i64>> {
        let mut out = Vec::new();
        self.read(sequence, 0..self.length(sequence)?, &mut out)?;
        Ok(out)
    }

    /// All values of a sequence as f64, whatever their storage type.
    pub fn values(&self, sequence: usize) -> Result<Vec<f64>> {
        Ok(self.token_type.decode_f64(&self.bytes(sequence)?))
    }
}

/// Opens a regular file and returns its length.
fn open_regular(path: &Path) -> Result<(File, u64)> {
    let file = fs::open_regular(path)?;
    let length = file.metadata().map_err(Error::io(path))?.len();
    Ok((file, length))
}

/// Reads an index front to back.
struct IndexReader<'a> {
    path: &'a Path,
    file: BufReader<File>,
}

impl IndexReader<'_> {
    fn fill(&mut self, out: &mut [u8]) -> Result<()> {
        self.file.read_exact(out).map_err(Error::io(self.path))
    }

    /// The next `n` elements. `header` has checked that the file is long enough for them.
    fn array<T, const N: usize>(&mut self, n: usize, element: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        let mut out = Vec::new();
        let too_large = |_| Error::damaged(self.path, format!("{n} entries do not fit in memory"));
        out.try_reserve_exact(n).map_err(too_large)?;
        let mut bytes = [0; N];
        for _ in 0..n {
            self.file.read_exact(&mut bytes).map_err(Error::io(self.path))?;
            out.push(element(bytes));
        }
        Ok(out)
    }
}

/// Token type, n, d and multimodality; checks that the arrays fill an index of `len` bytes.
fn header(head: &[u8; HEADER], len: u64) -> Result<(TokenType, usize, usize, bool), String> {
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
    let len = u128::from(len);
    if len != plain && len != plain + u128::from(n) {
        return Err(format!(
            "is {len} bytes long, but {n} sequences and {d} document bounds take {plain} (or {} with modes)",
            plain + u128::from(n)
        ));
    }
    if d == 0 {
        return Err("has no document bounds; even an empty dataset has one".into());
    }
    // Both fit: they are smaller than the length of a file.
    Ok((token_type, n as usize, d as usize, len != plain))
}
