//! Whole documents in rows, several packed into one or each in a row of its own, padded or not: positions and attention
//! restart with each document, and no label crosses from one document to the next.

use super::batch::checked_id;
use super::mt19937::Mt19937;
use super::shuffle::shuffled;
use super::{Batches, Documents, IGNORE, Row};
use crate::config::{Packing, Truncation};
use crate::{Error, Result};

/// Number of rows open at a time. More rows leave less padding and take longer to pack.
const OPEN_ROWS: usize = 64;

/// `length` inputs of a document from `offset` on; the labels are one token further.
#[derive(Clone, Copy, Debug)]
struct DocumentSlice {
    document: u32,
    offset: u32,
    length: u32,
}

/// How documents become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOptions {
    /// Tokens of a row, at most.
    pub seq: usize,
    /// Vocabulary size; larger ids are an error.
    pub vocab: u32,
    /// Seed of the order of documents, and of rows from the second epoch on; `None` keeps their order in every epoch.
    pub seed: Option<u32>,
    /// What becomes of documents longer than a row. Slices of a document are treated as documents.
    pub truncation: Truncation,
    /// As many documents in a row as fit, or each in a row of its own, padded (`None`) or not (`PaddingFree`).
    pub packing: Packing,
}

/// What has become of the documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Documents and slices of documents in rows.
    pub samples: u64,
    /// Documents that were cut or split.
    pub cut: u64,
    /// Documents left out for their length.
    pub dropped: u64,
    /// Documents and slices left out because no token of them has a loss.
    pub without_loss: u64,
    /// Labels.
    pub labels: u64,
}

/// Rows of documents.
pub struct Packed {
    documents: Box<dyn Documents>,
    seq: usize,
    vocab: u32,
    seed: Option<u32>,
    counts: RowCounts,
    /// Rows end with their last document.
    padding_free: bool,
    slices: Vec<DocumentSlice>,
    /// Row r holds slices `rows[r] .. rows[r + 1]`.
    rows: Vec<u32>,
}

impl Packed {
    /// Packs all documents of at least two tokens, in an order shuffled by `seed`; `None` keeps their order. Longer ones
    /// are split.
    pub fn new(documents: Box<dyn Documents>, seq: usize, vocab: u32, seed: Option<u32>) -> Result<Self> {
        let name = documents.name();
        let truncation = Truncation::Split;
        Self::with(documents, RowOptions { seq, vocab, seed, truncation, packing: Packing::Documents })?
            .ok_or_else(|| {
                Error::Invalid(format!("{name}: no document has the two tokens a prediction needs"))
            })
    }

    /// Rows of documents; `None` if no document gives a sample.
    pub fn with(documents: Box<dyn Documents>, options: RowOptions) -> Result<Option<Self>> {
        let RowOptions { seq, vocab, seed, packing, .. } = options;
        let one_per_row = packing != Packing::Documents;
        let name = documents.name();
        let too_big = || Error::Invalid(format!("{name}: too many documents to pack; split the file"));
        if seq == 0 || u32::try_from(seq).is_err() {
            return Err(Error::Invalid(format!("rows of {seq} tokens cannot be packed")));
        }
        let mut order: Vec<u32> = (0..u32::try_from(documents.count()).map_err(|_| too_big())?).collect();
        if let Some(seed) = seed {
            Mt19937::new(seed).shuffle(&mut order);
        }
        let mut packer = Packer { seq: seq as u32, one_per_row, open: Vec::new(), closed: Vec::new() };
        let mut counts = RowCounts::default();
        for document in order {
            let inputs = documents.length(document as usize)?.saturating_sub(1);
            let inputs = u32::try_from(inputs).map_err(|_| too_big())?;
            for slice in options.slices(document, inputs, &name, &mut counts)? {
                let labels = slice.labels(&*documents)?;
                match labels {
                    0 => counts.without_loss += 1,
                    _ => packer.place(slice),
                }
                counts.labels += labels;
            }
        }
        let packed = packer.finish();
        if packed.is_empty() {
            return Ok(None);
        }
        let (mut slices, mut rows) = (Vec::new(), vec![0]);
        for row in packed {
            slices.extend(row);
            rows.push(u32::try_from(slices.len()).map_err(|_| too_big())?);
        }
        counts.samples = slices.len() as u64;
        let padding_free = packing == Packing::PaddingFree;
        Ok(Some(Self { documents, seq, vocab, seed, counts, padding_free, slices, rows }))
    }

    /// What has become of the documents.
    pub fn counts(&self) -> RowCounts {
        self.counts
    }

    /// Tokens of all rows, without padding.
    pub fn used(&self) -> u64 {
        self.slices.iter().map(|p| u64::from(p.length)).sum()
    }

    /// Fraction of positions that are not padding.
    pub fn fill(&self) -> f64 {
        self.used() as f64 / (self.seq as f64 * self.samples() as f64)
    }

    /// Lengths of the documents and slices: the shortest, the longest, and the mean over their tokens, `Σ length² / Σ length`,
    /// which attention is proportional to.
    pub fn lengths(&self) -> (u32, u32, f64) {
        let lengths = || self.slices.iter().map(|p| p.length);
        let squares: f64 = lengths().map(|n| f64::from(n).powi(2)).sum();
        let mean = squares / (self.used() as f64).max(1.0);
        (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0), mean)
    }

    /// The row that is sample `n`. The first epoch has the order in which documents were packed; each later one is shuffled
    /// anew, so that the same rows do not always share a batch.
    fn row_of(&self, n: u64) -> usize {
        let (epoch, at) = (n / self.samples(), n % self.samples());
        match self.seed {
            // `with` checked that rows are numbered by u32.
            Some(seed) if epoch > 0 => shuffled(at, self.samples() as u32, seed, epoch) as usize,
            _ => at as usize,
        }
    }

    /// Documents and slices of row `r`.
    fn slices(&self, r: usize) -> &[DocumentSlice] {
        &self.slices[self.rows[r] as usize..self.rows[r + 1] as usize]
    }
}

impl RowOptions {
    /// The slices of a document of `inputs` + 1 tokens that become samples.
    fn slices(
        &self,
        document: u32,
        inputs: u32,
        name: &str,
        counts: &mut RowCounts,
    ) -> Result<Vec<DocumentSlice>> {
        let seq = self.seq as u32;
        if inputs <= seq {
            let whole = DocumentSlice { document, offset: 0, length: inputs };
            return Ok(if inputs > 0 { vec![whole] } else { Vec::new() });
        }
        counts.cut += 1;
        Ok(match self.truncation {
            Truncation::KeepStart => vec![DocumentSlice { document, offset: 0, length: seq }],
            Truncation::KeepEnd => vec![DocumentSlice { document, offset: inputs - seq, length: seq }],
            Truncation::Split => {
                let slice = |offset| DocumentSlice { document, offset, length: (inputs - offset).min(seq) };
                (0..inputs).step_by(self.seq).map(slice).collect()
            }
            Truncation::Drop => {
                counts.cut -= 1;
                counts.dropped += 1;
                Vec::new()
            }
            Truncation::Refuse => {
                return Err(Error::Invalid(format!(
                    "{name}: document {document} has {} tokens, more than data.seq_len = {seq} and one; raise it, or \
                     choose with data.truncation what becomes of longer ones",
                    u64::from(inputs) + 1
                )));
            }
        })
    }
}

impl DocumentSlice {
    /// Number of its labels.
    fn labels(&self, documents: &dyn Documents) -> Result<u64> {
        if !documents.has_mask() {
            return Ok(self.length.into());
        }
        let (first, mut loss) = (self.offset as usize + 1, Vec::new());
        documents.loss(self.document as usize, first..first + self.length as usize, &mut loss)?;
        Ok(loss.iter().filter(|l| **l).count() as u64)
    }
}

/// A row that still has space.
struct OpenRow {
    number: usize,
    room: u32,
    slices: Vec<DocumentSlice>,
}

/// Best-fit packing over a bounded number of open rows.
struct Packer {
    seq: u32,
    one_per_row: bool,
    open: Vec<OpenRow>,
    closed: Vec<Vec<DocumentSlice>>,
}

impl Packer {
    fn place(&mut self, slice: DocumentSlice) {
        if self.one_per_row {
            self.closed.push(vec![slice]);
            return;
        }
        let fits = self.open.iter_mut().filter(|o| o.room >= slice.length);
        if let Some(best) = fits.min_by_key(|o| o.room) {
            best.room -= slice.length;
            best.slices.push(slice);
            return;
        }
        if self.open.len() == OPEN_ROWS
            && let Some(fullest) = (0..OPEN_ROWS).min_by_key(|&k| self.open[k].room)
        {
            let row = self.open.swap_remove(fullest);
            self.closed[row.number] = row.slices;
        }
        // A row keeps its number, whenever it is closed.
        self.open.push(OpenRow {
            number: self.closed.len(),
            room: self.seq - slice.length,
            slices: vec![slice],
        });
        self.closed.push(Vec::new());
    }

    fn finish(mut self) -> Vec<Vec<DocumentSlice>> {
        for row in self.open {
            self.closed[row.number] = row.slices;
        }
        self.closed
    }
}

impl Batches for Packed {
    fn seq(&self) -> usize {
        self.seq
    }

    fn samples(&self) -> u64 {
        self.rows.len() as u64 - 1
    }

    fn resets(&self) -> bool {
        true
    }

    fn length(&self, n: u64) -> Result<Option<usize>> {
        let row = self.slices(self.row_of(n));
        Ok(self.padding_free.then(|| row.iter().map(|slice| slice.length as usize).sum()))
    }

    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let r = self.row_of(n);
        let source = || format!("{} packed row {r}", self.documents.name());
        let (mut text, mut loss) = (Vec::new(), Vec::new());
        for slice in self.slices(r) {
            let (offset, length) = (slice.offset as usize, slice.length as usize);
            let document = slice.document as usize;
            text.clear();
            loss.clear();
            self.documents.read(document, offset..offset + length + 1, &mut text)?;
            self.documents.loss(document, offset + 1..offset + length + 1, &mut loss)?;
            row.starts.push(row.tokens.len());
            for (pair, loss) in text.windows(2).zip(&loss) {
                row.tokens.push(checked_id(pair[0], self.vocab, &source)?);
                let label = checked_id(pair[1], self.vocab, &source)?;
                row.labels.push(if *loss { label } else { IGNORE });
            }
            row.positions.extend(0..length as i32);
        }
        let padding = if self.padding_free { 0 } else { self.seq - row.tokens.len() };
        if padding > 0 {
            row.starts.push(row.tokens.len());
            row.tokens.resize(self.seq, 0);
            row.labels.resize(self.seq, IGNORE);
            row.positions.extend(0..padding as i32);
            row.padding = padding;
        }
        Ok(())
    }
}
