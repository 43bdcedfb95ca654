//! Loading a checkpoint: everything is checked before any tensor is returned.

use super::assemble::{Assembled, Part};
use super::folder;
use super::manifest::{self, Manifest, StoredPart, StoredTensor};
use super::parallel_verify::{self, RankCheck};
use super::slice::Slice;
use crate::error::{Error, Result};
use crate::fs::open_regular;
use crate::tensorfile::{TensorDecl, TensorFile, TensorInfo};
use ferrotron_comm::Communicator;
use ferrotron_tensor::DType;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A fully checked checkpoint, open for reading.
#[derive(Debug)]
pub struct Loaded {
    path: PathBuf,
    step: u64,
    state: Value,
    files: Vec<TensorFile>,
    /// By name.
    tensors: BTreeMap<String, Assembled>,
    checked: u64,
}

/// Bytes this rank has read of a checkpoint's data files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BytesRead {
    /// Headers of all files, which every rank needs to find its tensors.
    pub headers: u64,
    /// This rank's part of the checksums.
    pub checked: u64,
    /// Tensor data.
    pub tensors: u64,
}

/// The result of [`verify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// Number of steps done.
    pub step: u64,
    /// Number of data files.
    pub files: usize,
    /// Number of tensors.
    pub tensors: usize,
    /// Size of the data files in bytes.
    pub bytes: u64,
}

/// Opens a checkpoint folder and checks all of it: the manifest's form, version and checksum, each file's size and
/// CRC-32C, and that its tensors are those listed in the manifest. Reads every byte once, in bounded memory. If it is
/// damaged, the error says how and names an older checkpoint that could be used instead, if there is one; the choice
/// is the caller's.
pub fn load(path: &Path) -> Result<Loaded> {
    load_parallel(path, &Communicator::solo())
}

/// [`load`] on all ranks of a group, which share the reading: each rank checks its stripe of every file, and the
/// checksums of the stripes combine to that of the file. An error found by one rank is returned on all. All ranks
/// must see the same folder, on several hosts through a shared file system.
pub fn load_parallel(path: &Path, group: &Communicator) -> Result<Loaded> {
    let (opened, mine) = match inspect(path, group.rank(), group.size()) {
        Ok((opened, word)) => (Ok(opened), word),
        Err(e) => {
            let word = RankCheck::Failed(e.to_string());
            (Err(e), word)
        }
    };
    let words = parallel_verify::exchange(&mine, group)?;
    // This rank's own error takes precedence: it is the most precise.
    opened.and_then(|opened| opened.finish(&words)).map_err(|e| with_older(path, e))
}

/// Adds to an error which older checkpoint could be used instead, unless nothing is wrong with this one.
pub(super) fn with_older(path: &Path, e: Error) -> Error {
    if e.is_too_many_files() {
        return e;
    }
    match older(path) {
        Some(name) => e.with_hint(&format!(
            "; the older checkpoint {name} is still there: to go on from it, move {} away",
            path.display()
        )),
        None => e,
    }
}

/// Checks a checkpoint as [`load`] does and returns what it holds.
pub fn verify(path: &Path) -> Result<VerifyReport> {
    let loaded = load(path)?;
    Ok(VerifyReport {
        step: loaded.step,
        files: loaded.files.len(),
        tensors: loaded.tensors.len(),
        bytes: loaded.files.iter().map(TensorFile::bytes).sum(),
    })
}

/// The state that a checkpoint's manifest holds, without a look at its data files.
pub fn state(path: &Path) -> Result<Value> {
    Ok(read_manifest(path)?.0.state)
}

impl Loaded {
    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of steps done.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The saved state.
    pub fn state(&self) -> &Value {
        &self.state
    }

    /// The tensors in order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorDecl> {
        self.tensors.values().map(|t| &t.decl)
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&TensorDecl> {
        self.tensors.get(name).map(|t| &t.decl)
    }

    /// All bytes of a tensor.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let bytes = self.want(name)?.decl.bytes();
        self.read_ranges(name, std::slice::from_ref(&(0..bytes)))
    }

    /// Fills `out` with the tensor's bytes from `start_byte` on, counted from the tensor's first byte.
    pub fn read_range(&self, name: &str, start_byte: u64, out: &mut [u8]) -> Result<()> {
        let tensor = self.want(name)?;
        let range = start_byte..start_byte.saturating_add(out.len() as u64);
        let runs = std::slice::from_ref(&range);
        tensor.length(&self.path, runs)?;
        tensor.read(&self.files, runs, out)
    }

    /// Byte ranges of a tensor, concatenated; offsets count from the tensor's first byte. Only these bytes are read.
    pub fn read_runs(&self, name: &str, runs: &[Range<usize>]) -> Result<Vec<u8>> {
        self.read_ranges(name, &runs.iter().map(|r| r.start as u64..r.end as u64).collect::<Vec<_>>())
    }

    fn read_ranges(&self, name: &str, runs: &[Range<u64>]) -> Result<Vec<u8>> {
        let tensor = self.want(name)?;
        let bytes = tensor.length(&self.path, runs)?;
        let mut out = Vec::new();
        out.try_reserve_exact(bytes).map_err(|_| {
            let path = self.path.display();
            Error::Invalid(format!("{path}: no memory for the {bytes} bytes of tensor {name:?}"))
        })?;
        out.resize(bytes, 0);
        tensor.read(&self.files, runs, &mut out)?;
        Ok(out)
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> BytesRead {
        BytesRead {
            headers: self.files.iter().map(TensorFile::header_bytes).sum(),
            checked: self.checked,
            tensors: self.files.iter().map(TensorFile::bytes_delivered).sum(),
        }
    }

    /// Checks that the tensors are exactly `expected`, before the first one is used, so that a checkpoint of another
    /// model is not loaded in part. The error names the first few that are missing, unexpected or different.
    pub fn check<'a>(&self, expected: impl IntoIterator<Item = (&'a str, DType, &'a [usize])>) -> Result<()> {
        let mut wrong = Vec::new();
        let mut known = BTreeSet::new();
        for (name, dtype, shape) in expected {
            known.insert(name);
            match self.get(name) {
                None => wrong.push(format!("{name} is missing")),
                Some(t) if t.dtype.native() != Some(dtype) || t.shape != shape => wrong.push(format!(
                    "{name} is {} {:?} where this run has {dtype} {shape:?}",
                    t.dtype.native().map_or(t.dtype.name(), DType::name),
                    t.shape
                )),
                Some(_) => {}
            }
        }
        let extra = self.tensors.keys().filter(|n| !known.contains(n.as_str()));
        wrong.extend(extra.map(|n| format!("{n} is unknown to this run")));
        if wrong.is_empty() {
            return Ok(());
        }
        let more = wrong.len().saturating_sub(3);
        wrong.truncate(3);
        let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        Err(Error::Missing {
            path: self.path.clone(),
            what: format!("holds another model or optimizer than this run's: {}{more}", wrong.join("; ")),
        })
    }

    fn want(&self, name: &str) -> Result<&Assembled> {
        self.tensors.get(name).ok_or_else(|| Error::Missing {
            path: self.path.clone(),
            what: format!("has no tensor {name:?}"),
        })
    }
}

/// A checkpoint whose files are open but whose checksums the ranks have not agreed on yet.
pub(super) struct Opened {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<TensorFile>,
    checked: u64,
}

/// Checks everything that needs no tensor data, and stripe `part` of `of` of every file.
pub(super) fn inspect(path: &Path, part: usize, of: usize) -> Result<(Opened, RankCheck)> {
    let (manifest, sum) = read_manifest(path)?;
    // A renamed folder would resume at one step with the data of another.
    if let Some(step) = path.file_name().and_then(folder::step_of).filter(|&s| s != manifest.step) {
        return Err(Error::damaged(
            path,
            format!("is named for step {step} but holds step {}", manifest.step),
        ));
    }
    // All files are open before the first is read, which takes long: a run may delete the checkpoint meanwhile, and
    // open files stay readable.
    let open = |(name, shard): (&String, &manifest::Shard)| {
        let file = path.join(name);
        check_size(&file, shard.bytes)
            .and_then(|()| TensorFile::open(&file))
            .map_err(|e| e.with_hint(&manifest.contents(name)))
    };
    let files = manifest.files.iter().map(open).collect::<Result<Vec<_>>>()?;
    let (mut stripes, mut checked) = (Vec::new(), 0);
    for opened in &files {
        let mine = parallel_verify::stripe(opened.bytes(), part, of);
        checked += mine.end - mine.start;
        stripes.push(opened.crc32c(mine)?);
    }
    let word = RankCheck::Checked { manifest: sum, stripes };
    Ok((Opened { path: path.to_path_buf(), manifest, files, checked }, word))
}

impl Opened {
    /// Returns the checkpoint if the results of all ranks match and its tensors are those listed in the manifest.
    pub(super) fn finish(self, words: &[RankCheck]) -> Result<Loaded> {
        let Opened { path, manifest, files, checked } = self;
        let sums = parallel_verify::join(&path, words, files.iter().map(TensorFile::bytes))?;
        for ((name, shard), (file, sum)) in manifest.files.iter().zip(files.iter().zip(sums)) {
            let (found, want) = (manifest::hex(sum), &shard.crc32c);
            if found != *want {
                let place = damaged_place(&manifest, name, file)?;
                let what = format!("is damaged in {place}: its checksum is {found} instead of {want}");
                return Err(Error::damaged(file.path(), what));
            }
        }
        let index: BTreeMap<&String, usize> = manifest.files.keys().zip(0..).collect();
        for (file, name) in files.iter().zip(manifest.files.keys()) {
            let listed = |t: &&TensorInfo| manifest.part(&t.name, name).is_none();
            if let Some(tensor) = file.tensors().iter().find(listed) {
                let what = format!("has tensor {:?}, which the manifest does not list there", tensor.name);
                return Err(Error::damaged(file.path(), what));
            }
        }
        let mut tensors = BTreeMap::new();
        for (name, stored) in &manifest.tensors {
            tensors.insert(name.clone(), assemble(&path, name, stored, &index, &files)?);
        }
        Ok(Loaded { path, step: manifest.step, state: manifest.state, files, tensors, checked })
    }
}

/// Finds the parts of a tensor in the files' headers.
fn assemble(
    path: &Path,
    name: &str,
    stored: &StoredTensor,
    index: &BTreeMap<&String, usize>,
    files: &[TensorFile],
) -> Result<Assembled> {
    let mut parts = Vec::new();
    let mut decl = None;
    for StoredPart { file, slice, .. } in &stored.parts {
        let found = index.get(file).and_then(|&i| Some((i, files.get(i)?.get(name)?)));
        let Some((i, info)) = found else {
            let what = format!("has no tensor {name:?}, though the manifest lists it there");
            return Err(Error::damaged(path.join(file), what));
        };
        let (dtype, shape) = stored.form.clone().unwrap_or((info.dtype, info.shape.clone()));
        let slice = slice.clone().unwrap_or_else(|| Slice::whole(&shape));
        let wanted = slice.stored_shape(&shape);
        if (info.dtype, &info.shape) != (dtype, &wanted) {
            let what = format!(
                "has {} {:?} of tensor {name:?} where the manifest lists {dtype} {wanted:?}",
                info.dtype, info.shape
            );
            return Err(Error::damaged(path.join(file), what));
        }
        let tensor = decl.get_or_insert_with(|| TensorDecl { name: name.into(), dtype, shape });
        let layout = slice.layout(dtype, &tensor.shape, tensor.bytes());
        parts.push(Part { file: i, begin: info.begin, layout });
    }
    match decl {
        Some(decl) => Ok(Assembled { decl, parts }),
        None => Err(Error::damaged(path, format!("has no part of tensor {name:?}"))),
    }
}

/// Which of the tensors in a damaged file differs from its checksum.
fn damaged_place(manifest: &Manifest, name: &str, file: &TensorFile) -> Result<String> {
    for tensor in file.tensors() {
        let Some(want) = manifest.part(&tensor.name, name).map(|p| &p.crc32c) else { continue };
        let Some(want) = want else { return Ok("its header or tensor data".into()) };
        if manifest::hex(file.crc32c(tensor.begin..tensor.end)?) != *want {
            return Ok(format!("tensor {:?}", tensor.name));
        }
    }
    Ok("its header".into())
}

impl Manifest {
    /// The part of a tensor in a file.
    fn part(&self, tensor: &str, file: &str) -> Option<&StoredPart> {
        self.tensors.get(tensor)?.parts.iter().find(|p| p.file == file)
    }

    /// Which tensors a file holds, to append to an error: the first by name, and how many.
    fn contents(&self, file: &str) -> String {
        let mut held =
            self.tensors.iter().filter(|(_, t)| t.parts.iter().any(|p| p.file == file)).map(|(n, _)| n);
        match (held.next(), held.count()) {
            (None, _) => String::new(),
            (Some(first), 0) => format!("; it holds tensor {first:?}"),
            (Some(first), more) => format!("; it holds tensor {first:?} and {more} more"),
        }
    }
}

/// Reads the manifest and the checksum of its text.
pub(super) fn read_manifest(path: &Path) -> Result<(Manifest, u32)> {
    let file = path.join(manifest::FILE);
    let mut bytes = Vec::new();
    let mut open = || -> Result<()> {
        let mut from = open_regular(&file)?.take(manifest::MAX_BYTES + 1);
        from.read_to_end(&mut bytes).map(drop).map_err(|e| Error::io_doing(&file, "read", e))
    };
    match open() {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            let what = if path.is_dir() {
                "has no manifest.json, so it is not a complete checkpoint"
            } else {
                "is not a checkpoint folder"
            };
            return Err(Error::Missing { path: path.to_path_buf(), what: what.into() });
        }
        other => other?,
    }
    if bytes.len() as u64 > manifest::MAX_BYTES {
        return Err(Error::damaged(&file, "is far too long for a manifest"));
    }
    let manifest = Manifest::parse(&bytes).map_err(|e| Error::damaged(&file, e))?;
    Ok((manifest, crc32c::crc32c(&bytes)))
}

fn check_size(file: &Path, want: u64) -> Result<()> {
    let found = match file.metadata() {
        Ok(about) => about.len(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let what = "is missing, though the manifest lists it".into();
            return Err(Error::Missing { path: file.to_path_buf(), what });
        }
        Err(e) => return Err(Error::io_doing(file, "read its size", e)),
    };
    match found.cmp(&want) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Less => {
            Err(Error::damaged(file, format!("is cut short: {found} of {want} bytes are there")))
        }
        std::cmp::Ordering::Greater => {
            Err(Error::damaged(file, format!("is too long: {found} bytes instead of {want}")))
        }
    }
}

/// The newest older checkpoint that looks complete: a valid manifest and files of the right size.
fn older(path: &Path) -> Option<String> {
    let name = path.file_name()?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let all = folder::list(parent).ok()?;
    let here = all.iter().position(|(_, p)| p.file_name() == Some(name))?;
    let looks_whole = |dir: &Path| {
        read_manifest(dir).is_ok_and(|(m, _)| {
            m.files.iter().all(|(name, shard)| check_size(&dir.join(name), shard.bytes).is_ok())
        })
    };
    let (_, dir) = all[..here].iter().rev().find(|(_, dir)| looks_whole(dir))?;
    Some(dir.file_name()?.display().to_string())
}
