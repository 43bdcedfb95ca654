//! Writer of `.bin/.idx` pairs, byte-identical to Megatron's IndexedDatasetBuilder.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::indexed::{MAGIC, VERSION, beside};
use super::temp_file::TempFile;
use super::{DatasetInfo, IndexedDataset, TokenType};
use crate::fs::{parent, sync_folder};
use crate::{Error, Result};

/// Writes a dataset in bounded memory: tokens, lengths, document bounds and modes go straight to files next to the
/// destination. Nothing appears under the final names before [`IndexedWriter::finish`]; a writer that is dropped
/// leaves nothing behind.
#[derive(Debug)]
pub struct IndexedWriter {
    idx_path: PathBuf,
    bin_path: PathBuf,
    bin: TempFile,
    lengths: TempFile,
    documents: TempFile,
    modes: Option<TempFile>,
    token_type: TokenType,
    sequences: u64,
    bounds: u64,
    tokens: u64,
    /// Tokens of the sequence being written.
    open: u64,
    buffer: Vec<u8>,
}

impl IndexedWriter {
    /// Starts `prefix.bin` and `prefix.idx`. With `multimodal`, every sequence has a mode.
    pub fn create(prefix: impl AsRef<Path>, token_type: TokenType, multimodal: bool) -> Result<Self> {
        let idx_path = beside(prefix.as_ref(), ".idx");
        let bin_path = beside(prefix.as_ref(), ".bin");
        let part = |name| TempFile::create(&beside(prefix.as_ref(), name));
        let mut documents = part(".documents")?;
        documents.write(&0i64.to_le_bytes())?;
        Ok(Self {
            bin: TempFile::create(&bin_path)?,
            lengths: part(".lengths")?,
            documents,
            modes: if multimodal { Some(part(".modes")?) } else { None },
            idx_path,
            bin_path,
            token_type,
            sequences: 0,
            bounds: 1,
            tokens: 0,
            open: 0,
            buffer: Vec::new(),
        })
    }

    /// Appends a sequence of token ids to the open document. `mode` is used in multimodal files only.
    pub fn push(&mut self, tokens: impl IntoIterator<Item = i64>, mode: i8) -> Result<()> {
        self.push_part(tokens)?;
        self.end_sequence(mode)
    }

    /// Appends token ids to the open sequence.
    pub fn push_part(&mut self, tokens: impl IntoIterator<Item = i64>) -> Result<()> {
        self.buffer.clear();
        for token in tokens {
            self.token_type.encode(token, &mut self.buffer)?;
        }
        let bytes = std::mem::take(&mut self.buffer);
        let done = self.push_bytes(&bytes);
        self.buffer = bytes;
        done
    }

    /// Appends a sequence of values to a file of floats.
    pub fn push_values(&mut self, values: &[f64], mode: i8) -> Result<()> {
        let mut bytes = Vec::with_capacity(values.len() * self.token_type.size());
        self.token_type.encode_floats(values, &mut bytes)?;
        self.push_bytes(&bytes)?;
        self.end_sequence(mode)
    }

    fn push_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.bin.write(bytes)?;
        self.open += (bytes.len() / self.token_type.size()) as u64;
        Ok(())
    }

    /// Number of tokens in the open sequence.
    pub fn open_tokens(&self) -> u64 {
        self.open
    }

    /// Ends the open sequence.
    pub fn end_sequence(&mut self, mode: i8) -> Result<()> {
        let tokens = std::mem::take(&mut self.open);
        let length = i32::try_from(tokens).map_err(|_| {
            Error::damaged(&self.bin_path, format!("a sequence of {tokens} tokens is too long; cut it up"))
        })?;
        self.lengths.write(&length.to_le_bytes())?;
        if let Some(modes) = &mut self.modes {
            modes.write(&mode.to_le_bytes())?;
        }
        self.sequences += 1;
        self.tokens += tokens;
        Ok(())
    }

    /// Ends the open document.
    pub fn end_document(&mut self) -> Result<()> {
        self.documents.write(&(self.sequences as i64).to_le_bytes())?;
        self.bounds += 1;
        Ok(())
    }

    /// Appends a whole dataset of the same token type and modality, including its document bounds.
    pub fn append(&mut self, other: &IndexedDataset) -> Result<()> {
        if other.token_type() != self.token_type || other.is_multimodal() != self.modes.is_some() {
            return Err(Error::damaged(
                other.path(),
                format!(
                    "holds {}{} and cannot be appended to {}, which holds {}{}",
                    other.token_type().name(),
                    if other.is_multimodal() { " with modes" } else { "" },
                    self.idx_path.display(),
                    self.token_type.name(),
                    if self.modes.is_some() { " with modes" } else { "" },
                ),
            ));
        }
        for document in 0..other.documents() {
            for sequence in other.document(document)? {
                self.push_bytes(&other.bytes(sequence)?)?;
                self.end_sequence(other.mode(sequence)?.unwrap_or(0))?;
            }
            self.end_document()?;
        }
        Ok(())
    }

    /// Number of tokens written so far.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of sequences written so far.
    pub fn sequences(&self) -> u64 {
        self.sequences
    }

    /// Completes both files and renames them into place.
    pub fn finish(self) -> Result<()> {
        self.finish_with(None)
    }

    /// Completes both files, and their description if there is one, and renames them into place.
    pub fn finish_with(mut self, info: Option<&DatasetInfo>) -> Result<()> {
        let info_path = DatasetInfo::path(&self.idx_path);
        let info = info
            .map(|info| -> Result<TempFile> {
                let mut file = TempFile::create(&info_path)?;
                let text = serde_json::to_string_pretty(info).map_err(|e| Error::Invalid(e.to_string()))?;
                file.write(text.as_bytes())?;
                file.write(b"\n")?;
                file.sync()?;
                Ok(file)
            })
            .transpose()?;
        let mut idx = TempFile::create(&self.idx_path)?;
        idx.write(MAGIC)?;
        idx.write(&VERSION.to_le_bytes())?;
        idx.write(&[self.token_type.code()])?;
        idx.write(&self.sequences.to_le_bytes())?;
        idx.write(&self.bounds.to_le_bytes())?;
        idx.append(&mut self.lengths)?;
        let size = self.token_type.size() as i64;
        let (mut pointer, mut length) = (0i64, [0u8; 4]);
        let mut lengths = self.lengths.reread()?;
        for _ in 0..self.sequences {
            lengths.read_exact(&mut length).map_err(Error::io(&self.idx_path))?;
            idx.write(&pointer.to_le_bytes())?;
            pointer += i64::from(i32::from_le_bytes(length)) * size;
        }
        idx.append(&mut self.documents)?;
        if let Some(modes) = &mut self.modes {
            idx.append(modes)?;
        }
        self.bin.sync()?;
        idx.sync()?;
        // Remove the old index and description first: a crash between the renames must not leave them next to the new
        // tokens. Without an index there is no dataset.
        for path in [&self.idx_path, &info_path] {
            match fs::remove_file(path) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io(path)(e)),
                _ => {}
            }
        }
        self.bin.commit(&self.bin_path)?;
        if let Some(info) = info {
            info.commit(&info_path)?;
        }
        idx.commit(&self.idx_path)?;
        sync_folder(parent(&self.idx_path))
    }
}
