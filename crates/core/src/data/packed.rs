//! Packing of whole documents into rows: positions and attention restart with each document, and no label crosses
//! from one document to the next.

use std::ops::Range;
use std::sync::Arc;

use super::batch::checked_id;
use super::mt19937::Mt19937;
use super::{Batches, IGNORE, IndexedDataset, Row};
use crate::{Error, Result};

/// Number of rows open at a time. More rows leave less padding and take longer to pack.
const OPEN_ROWS: usize = 64;

/// A collection of documents.
pub trait Documents: Send + Sync {
    /// Number of documents.
    fn count(&self) -> usize;
    /// Number of tokens in a document.
    fn length(&self, document: usize) -> Result<usize>;
    /// Appends tokens `range` of a document.
    fn read(&self, document: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<()>;
    /// Name for messages.
    fn name(&self) -> String;
}

impl Documents for IndexedDataset {
    fn count(&self) -> usize {
        self.documents()
    }

    fn length(&self, document: usize) -> Result<usize> {
        self.document(document)?.try_fold(0, |sum, s| Ok(sum + IndexedDataset::length(self, s)?))
    }

    fn read(&self, document: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<()> {
        let mut before = 0;
        for s in self.document(document)? {
            let length = IndexedDataset::length(self, s)?;
            let part = range.start.max(before)..range.end.min(before + length);
            if !part.is_empty() {
                IndexedDataset::read(self, s, part.start - before..part.end - before, out)?;
            }
            before += length;
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.path().display().to_string()
    }
}

impl Documents for Vec<Vec<i64>> {
    fn count(&self) -> usize {
        self.len()
    }

    fn length(&self, document: usize) -> Result<usize> {
        Ok(self[document].len())
    }

    fn read(&self, document: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<()> {
        out.extend_from_slice(&self[document][range]);
        Ok(())
    }

    fn name(&self) -> String {
        "documents in memory".into()
    }
}

/// Consecutive documents of a dataset, such as one of its splits.
pub struct DocumentRange {
    /// The dataset.
    pub data: Arc<IndexedDataset>,
    /// The documents.
    pub range: Range<usize>,
}

impl Documents for DocumentRange {
    fn count(&self) -> usize {
        self.range.len()
    }

    fn length(&self, document: usize) -> Result<usize> {
        Documents::length(&*self.data, self.range.start + document)
    }

    fn read(&self, document: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<()> {
        Documents::read(&*self.data, self.range.start + document, range, out)
    }

    fn name(&self) -> String {
        Documents::name(&*self.data)
    }
}

/// `length` inputs of a document from `offset` on; the labels are one token further.
#[derive(Clone, Copy, Debug)]
struct DocumentSlice {
    document: u32,
    offset: u32,
    length: u32,
}

/// Packed rows. A document longer than a row is cut into slices, which are treated as documents.
pub struct Packed {
    documents: Box<dyn Documents>,
    seq: usize,
    vocab: u32,
    slices: Vec<DocumentSlice>,
    /// Row r holds slices `rows[r] .. rows[r + 1]`.
    rows: Vec<u32>,
}

impl Packed {
    /// Packs all documents of at least two tokens, in an order shuffled by `seed`; `None` keeps their order.
    pub fn new(documents: Box<dyn Documents>, seq: usize, vocab: u32, seed: Option<u32>) -> Result<Self> {
        let name = documents.name();
        let too_big = || Error::Invalid(format!("{name}: too many documents to pack; split the file"));
        if seq == 0 || u32::try_from(seq).is_err() {
            return Err(Error::Invalid(format!("rows of {seq} tokens cannot be packed")));
        }
        let mut order: Vec<u32> = (0..u32::try_from(documents.count()).map_err(|_| too_big())?).collect();
        if let Some(seed) = seed {
            Mt19937::new(seed).shuffle(&mut order);
        }
        let mut packer = Packer { seq: seq as u32, open: Vec::new(), closed: Vec::new() };
        for document in order {
            let inputs = documents.length(document as usize)?.saturating_sub(1);
            let inputs = u32::try_from(inputs).map_err(|_| too_big())?;
            for offset in (0..inputs).step_by(seq) {
                packer.place(DocumentSlice { document, offset, length: (inputs - offset).min(seq as u32) });
            }
        }
        let packed = packer.finish();
        if packed.is_empty() {
            return Err(Error::Invalid(format!("{name}: no document has the two tokens a prediction needs")));
        }
        let (mut slices, mut rows) = (Vec::new(), vec![0]);
        for row in packed {
            slices.extend(row);
            rows.push(u32::try_from(slices.len()).map_err(|_| too_big())?);
        }
        Ok(Self { documents, seq, vocab, slices, rows })
    }

    /// Fraction of positions that are not padding.
    pub fn fill(&self) -> f64 {
        let used: u64 = self.slices.iter().map(|p| u64::from(p.length)).sum();
        used as f64 / (self.seq as f64 * self.samples() as f64)
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
    open: Vec<OpenRow>,
    closed: Vec<Vec<DocumentSlice>>,
}

impl Packer {
    fn place(&mut self, slice: DocumentSlice) {
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

    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let r = (n % self.samples()) as usize;
        let source = || format!("{} packed row {r}", self.documents.name());
        let mut text = Vec::new();
        for slice in &self.slices[self.rows[r] as usize..self.rows[r + 1] as usize] {
            let (offset, length) = (slice.offset as usize, slice.length as usize);
            text.clear();
            self.documents.read(slice.document as usize, offset..offset + length + 1, &mut text)?;
            row.starts.push(row.tokens.len());
            for pair in text.windows(2) {
                row.tokens.push(checked_id(pair[0], self.vocab, &source)?);
                row.labels.push(checked_id(pair[1], self.vocab, &source)?);
            }
            row.positions.extend(0..length as i32);
        }
        let padding = self.seq - row.tokens.len();
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
