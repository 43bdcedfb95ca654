//! Reading bytes of a logical tensor from its parts.

use super::slice::PartLayout;
use crate::error::{Error, Result};
use crate::tensorfile::{TensorDecl, TensorFile};
use std::ops::Range;
use std::path::Path;

/// Largest read that is scattered to several places.
const SCATTER_BYTES: u64 = 4 << 20;

/// A logical tensor and where its bytes are.
#[derive(Debug)]
pub(super) struct Assembled {
    pub decl: TensorDecl,
    pub parts: Vec<Part>,
}

/// A part of a tensor: its file and the first of its bytes there.
#[derive(Debug)]
pub(super) struct Part {
    pub file: usize,
    pub begin: u64,
    pub layout: PartLayout,
}

/// Bytes of a file, adjacent there, and the places they go to.
#[derive(Default)]
struct Batch {
    at: u64,
    bytes: u64,
    places: Vec<Range<usize>>,
}

impl Batch {
    /// Adds bytes that follow the last ones in the file; false if they do not, or if it is full.
    fn extend(&mut self, at: u64, to: Range<usize>) -> bool {
        if self.bytes == 0 {
            (self.at, self.bytes) = (at, to.len() as u64);
            self.places = vec![to];
            return true;
        }
        let adjacent = self.at + self.bytes == at;
        match self.places.last_mut() {
            Some(last) if adjacent && last.end == to.start => {
                self.bytes += to.len() as u64;
                last.end = to.end;
                true
            }
            _ if adjacent && self.bytes + to.len() as u64 <= SCATTER_BYTES => {
                self.bytes += to.len() as u64;
                self.places.push(to);
                true
            }
            _ => false,
        }
    }

    fn read(&mut self, file: &TensorFile, out: &mut [u8], scratch: &mut Vec<u8>) -> Result<()> {
        let Batch { at, bytes, places } = std::mem::take(self);
        if let [place] = &places[..] {
            return file.read_data(&mut out[place.clone()], at);
        }
        scratch.resize(bytes as usize, 0);
        file.read_data(scratch, at)?;
        let mut from = 0;
        for place in places {
            let to = &mut out[place];
            to.copy_from_slice(&scratch[from..from + to.len()]);
            from += to.len();
        }
        Ok(())
    }
}

impl Assembled {
    /// Fills `out` with byte ranges of the tensor, concatenated. Reads these bytes only, in as few reads as the parts
    /// allow, and holds a few MiB besides `out`.
    pub fn read(&self, files: &[TensorFile], runs: &[Range<u64>], out: &mut [u8]) -> Result<()> {
        let mut scratch = Vec::new();
        for part in &self.parts {
            let Some(file) = files.get(part.file) else { continue };
            let (mut batch, mut start) = (Batch::default(), 0);
            for run in runs {
                for shared in part.layout.shared(run.clone()) {
                    // Inside `out`, so it fits in usize.
                    let to = start + shared.range as usize;
                    let to = to..to + shared.bytes as usize;
                    if !batch.extend(part.begin + shared.part, to.clone()) {
                        batch.read(file, out, &mut scratch)?;
                        batch.extend(part.begin + shared.part, to);
                    }
                }
                start += (run.end - run.start) as usize;
            }
            if batch.bytes > 0 {
                batch.read(file, out, &mut scratch)?;
            }
        }
        Ok(())
    }

    /// The number of bytes of `runs`, which must be inside the tensor.
    pub fn length(&self, folder: &Path, runs: &[Range<u64>]) -> Result<usize> {
        let name = &self.decl.name;
        let refuse = |what: String| Error::Invalid(format!("{}: {what}", folder.display()));
        let mut bytes = 0usize;
        for r in runs {
            let has = self.decl.bytes();
            if r.start > r.end || r.end > has {
                let asked = format!("bytes {}..{} of tensor {name:?} were asked for", r.start, r.end);
                return Err(refuse(format!("{asked}, but it has {has}")));
            }
            // Ranges may repeat, so their sum is not bounded by the tensor's size.
            bytes = usize::try_from(r.end - r.start)
                .ok()
                .and_then(|n| bytes.checked_add(n))
                .ok_or_else(|| refuse(format!("the ranges of tensor {name:?} do not fit in memory")))?;
        }
        Ok(bytes)
    }
}
