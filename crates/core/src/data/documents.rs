//! Collections of documents: token ids, and which of them have a loss.

use std::ops::Range;
use std::sync::Arc;

use super::IndexedDataset;
use crate::Result;

/// A collection of documents.
pub trait Documents: Send + Sync {
    /// Number of documents.
    fn count(&self) -> usize;
    /// Number of tokens in a document.
    fn length(&self, document: usize) -> Result<usize>;
    /// Appends tokens `range` of a document.
    fn read(&self, document: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<()>;
    /// Whether some of their tokens have no loss.
    fn has_mask(&self) -> bool {
        false
    }
    /// Appends for each token of `range` whether its prediction has a loss.
    fn loss(&self, _document: usize, range: Range<usize>, out: &mut Vec<bool>) -> Result<()> {
        out.resize(out.len() + range.len(), true);
        Ok(())
    }
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
    /// They are conversations, whose sequences have a loss where their mode is 1.
    pub chat: bool,
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

    fn has_mask(&self) -> bool {
        self.chat
    }

    fn loss(&self, document: usize, range: Range<usize>, out: &mut Vec<bool>) -> Result<()> {
        if !self.chat {
            out.resize(out.len() + range.len(), true);
            return Ok(());
        }
        let mut before = 0;
        for s in self.data.document(self.range.start + document)? {
            let length = self.data.length(s)?;
            let part = range.start.max(before)..range.end.min(before + length);
            if !part.is_empty() {
                out.resize(out.len() + part.len(), self.data.mode(s)? == Some(1));
            }
            before += length;
        }
        Ok(())
    }

    fn name(&self) -> String {
        Documents::name(&*self.data)
    }
}
