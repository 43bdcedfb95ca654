//! Files written under a temporary name beside their destination and renamed when complete.

use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A file under construction; removed again unless [`TempFile::commit`] is reached.
#[derive(Debug)]
pub(crate) struct TempFile {
    path: PathBuf,
    out: BufWriter<File>,
    committed: bool,
}

impl TempFile {
    /// Starts a file next to `destination`, on the same volume so that the rename is atomic.
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
                // Two writers of one process may be at work on the same destination.
                Err(e) if e.kind() == ErrorKind::AlreadyExists && attempt < 1000 => attempt += 1,
                Err(e) => return Err(Error::io(&path)(e)),
            }
        }
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(Error::io(&self.path))
    }

    /// Reads what has been written so far, from the start. Writing afterwards is not meant.
    pub(crate) fn reread(&mut self) -> Result<BufReader<&File>> {
        self.out.flush().map_err(Error::io(&self.path))?;
        let mut file = self.out.get_ref();
        file.seek(SeekFrom::Start(0)).map_err(Error::io(&self.path))?;
        Ok(BufReader::with_capacity(1 << 18, file))
    }

    /// Appends the whole content of another spool.
    pub(crate) fn append(&mut self, other: &mut TempFile) -> Result<()> {
        let mut from = other.reread()?;
        std::io::copy(&mut from, &mut self.out).map_err(Error::io(&self.path))?;
        Ok(())
    }

    /// Puts the bytes on disk.
    pub(crate) fn sync(&mut self) -> Result<()> {
        self.out.flush().map_err(Error::io(&self.path))?;
        self.out.get_ref().sync_all().map_err(Error::io(&self.path))
    }

    /// Gives the synced file its final name.
    pub(crate) fn commit(mut self, destination: &Path) -> Result<()> {
        fs::rename(&self.path, destination).map_err(Error::io(destination))?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing can be done about a failure here, and the leftover is only clutter.
            let _ = fs::remove_file(&self.path);
        }
    }
}
