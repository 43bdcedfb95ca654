//! Files written under a temporary name next to their destination and renamed when complete.

use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A file under construction; removed on drop unless committed with [`TempFile::commit`].
#[derive(Debug)]
pub(crate) struct TempFile {
    path: PathBuf,
    out: BufWriter<File>,
    committed: bool,
}

impl TempFile {
    /// Creates a file next to `destination`, on the same volume, so that the rename is atomic.
    pub(crate) fn create(destination: &Path) -> Result<Self> {
        let mut attempt = 0u32;
        loop {
            let mut name = destination.as_os_str().to_owned();
            name.push(format!(".{}.{attempt}.tmp", std::process::id()));
            let path = PathBuf::from(name);
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => {
                    let out = BufWriter::with_capacity(1 << 18, file);
                    return Ok(Self { path, out, committed: false });
                }
                // Another writer of this process may be writing the same destination.
                Err(e) if e.kind() == ErrorKind::AlreadyExists && attempt < 1000 => attempt += 1,
                Err(e) => return Err(Error::io_doing(&path, "create", e)),
            }
        }
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| self.failed(e))
    }

    /// Reads what was written so far, from the start. Not to be followed by writes.
    pub(crate) fn reread(&mut self) -> Result<BufReader<&File>> {
        self.out.flush().map_err(|e| self.failed(e))?;
        let mut file = self.out.get_ref();
        file.seek(SeekFrom::Start(0)).map_err(Error::io(&self.path))?;
        Ok(BufReader::with_capacity(1 << 18, file))
    }

    /// Appends the contents of another temporary file.
    pub(crate) fn append(&mut self, other: &mut TempFile) -> Result<()> {
        let mut from = other.reread()?;
        std::io::copy(&mut from, &mut self.out).map_err(|e| self.failed(e))?;
        Ok(())
    }

    /// Flushes and syncs the file to disk. An error if somebody has removed it: what it is to replace is still there.
    pub(crate) fn sync(&mut self) -> Result<()> {
        self.out.flush().map_err(|e| self.failed(e))?;
        self.out.get_ref().sync_all().map_err(|e| self.failed(e))?;
        fs::symlink_metadata(&self.path).map(drop).map_err(Error::io(&self.path))
    }

    fn failed(&self, e: std::io::Error) -> Error {
        Error::io_doing(&self.path, "write", e)
    }

    /// Renames the synced file to its destination.
    pub(crate) fn commit(mut self, destination: &Path) -> Result<()> {
        fs::rename(&self.path, destination).map_err(|e| Error::io_doing(destination, "replace", e))?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.committed {
            // A failure to remove it only leaves a stray file behind.
            let _ = fs::remove_file(&self.path);
        }
    }
}
