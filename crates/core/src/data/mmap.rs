//! Read-only memory maps of whole files.

use std::path::Path;

use memmap2::Mmap;

use crate::fs::open_regular;
use crate::{Error, Result};

/// The bytes of a file, mapped read-only.
#[derive(Debug)]
pub(crate) struct MappedFile {
    /// `None` for an empty file, which cannot be mapped on every system.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps `path`. Fails for a folder, a missing or an unreadable file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path)?;
        let meta = file.metadata().map_err(Error::io(path))?;
        if meta.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the map is read-only and only exposed as bytes, for which every pattern is valid. A dataset that
        // another process rewrites in place during training is beyond what a map can guard against; our own writer
        // only renames finished files into place.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        Ok(Self { map: Some(map) })
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
