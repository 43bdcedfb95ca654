//! File-system operations for folders that may be hostile or may be left in any state by a crash: writes follow no link,
//! replacements are atomic and synced, and inputs are regular files.

mod stream_writer;
mod target_lock;

pub use stream_writer::{PageCache, StreamWriter};
pub use target_lock::TargetLock;

use crate::{Error, Result};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Ends the name of a file that is being written; what a crash leaves of it is removed at the next start.
pub const TEMPORARY: &str = ".tmp";

/// Creates a new file. An existing file or link of that name, even a dangling one, is an error.
pub fn create_new(path: &Path) -> Result<File> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    file.map_err(|e| Error::io_doing(path, "create", e))
}

/// Opens a file for reading and writing, creating it if necessary. A link or anything but a regular file is an error.
pub fn open_or_create(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    open_own(path, options.read(true).write(true).create(true).truncate(false))
}

/// Opens a file for appending, creating it if necessary. A link or anything but a regular file is an error.
pub fn open_append(path: &Path) -> Result<File> {
    open_own(path, OpenOptions::new().append(true).create(true))
}

/// Opens a file to be read, through links if there are any. Pipes, devices, sockets and folders are refused: a device
/// has no end, and a pipe may never begin.
pub fn open_regular(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Without O_NONBLOCK opening a FIFO waits for a writer. Regular files ignore it.
    #[cfg(unix)]
    set_flags(&mut options, rustix::fs::OFlags::NONBLOCK);
    let file = options.open(path).map_err(|e| Error::io_doing(path, "open", e))?;
    require_regular(path, &file)?;
    Ok(file)
}

/// The contents of a regular file, through links if there are any.
pub fn read_regular(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = open_regular(path)?.read_to_end(&mut bytes);
    read.map(|_| bytes).map_err(|e| Error::io_doing(path, "read", e))
}

/// The contents of a regular file of at most `max` bytes, through links if there are any.
pub fn read_limited(path: &Path, max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open_regular(path)?;
    std::io::Read::read_to_end(&mut std::io::Read::take(file, max + 1), &mut bytes)
        .map_err(|e| Error::io_doing(path, "read", e))?;
    if bytes.len() as u64 > max {
        return Err(Error::damaged(path, format!("is too long: at most {max} bytes are read")));
    }
    Ok(bytes)
}

/// True for a regular file that is no link.
pub fn is_regular_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_file())
}

/// True if there is anything of that name, a dangling link included.
pub fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Replaces or creates the file `path`: after a crash it has its old contents or the new ones. A link of that name is
/// replaced, its target stays as it is. One writer at a time.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let new = temporary(path);
    if exists(&new) {
        remove(&new)?;
    }
    let write = |mut file: File| {
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|e| Error::io_doing(path, "write", e))
    };
    create_new(&new).and_then(write).and_then(|()| rename(&new, path)).inspect_err(|_| {
        // The first error is the one to report; the next start removes the file as well.
        drop(fs::remove_file(&new));
    })?;
    sync_folder(parent(path))
}

/// Exchanges two existing files or folders of one file system in one step: at no time is either name without one of
/// them. [`ErrorKind::Unsupported`] where the system cannot do that.
pub fn exchange(a: &Path, b: &Path) -> std::io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).map_err(|e| {
            let e = std::io::Error::from(e);
            // A file system or kernel without it says EINVAL or ENOSYS.
            match e.kind() {
                ErrorKind::InvalidInput => std::io::Error::new(ErrorKind::Unsupported, e),
                _ => e,
            }
        })
    }
    #[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
    {
        let _ = (a, b);
        Err(ErrorKind::Unsupported.into())
    }
}

/// Renames a file or folder, replacing a file or an empty folder. A link is renamed, not followed.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    let doing = format!("rename to {}", to.file_name().unwrap_or_default().display());
    fs::rename(from, to).map_err(|e| Error::io_doing(from, &doing, e))
}

/// Deletes a file, a link (not its target) or a folder with everything in it.
pub fn remove(path: &Path) -> Result<()> {
    let is_dir = path.symlink_metadata().map(|m| m.is_dir());
    is_dir
        .and_then(|dir| if dir { fs::remove_dir_all(path) } else { fs::remove_file(path) })
        .map_err(|e| Error::io_doing(path, "delete", e))
}

/// Syncs a folder, so that its entries survive a power failure.
pub fn sync_folder(dir: &Path) -> Result<()> {
    if !cfg!(unix) {
        return Ok(()); // elsewhere folders cannot be opened for this, and the file system does it itself
    }
    match File::open(dir).and_then(|f| f.sync_all()) {
        // File systems without this operation return EINVAL, which is not a failure to write.
        Err(e) if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        done => done.map_err(|e| Error::io_doing(dir, "write the folder to disk", e)),
    }
}

/// Bytes that this user can still write to the file system of `path`; none where that is unknown.
pub fn free_bytes(path: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let s = rustix::fs::statvfs(path).ok()?;
        // Some network file systems report zeros.
        (s.f_blocks > 0).then(|| s.f_bavail.saturating_mul(s.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        None
    }
}

/// An exclusive lock on a file, held until it is dropped. The system releases it even after `kill -9`.
#[derive(Debug)]
pub struct FileLock {
    /// None on a file system without locks, where there is no protection.
    file: Option<File>,
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // The name of a process that has ended must not be taken for the next holder's.
        self.file.iter().for_each(|f| drop(f.set_len(0)));
    }
}

impl FileLock {
    /// Locks the file `path`, creating it if necessary, and writes into it which process holds it. If another process
    /// does, the error is [`Error::Locked`] and names it.
    pub fn take(path: &Path) -> Result<FileLock> {
        let mut file = open_or_create(path)?;
        let mut taken = file.try_lock();
        // A child process that is just being spawned anywhere in this program briefly holds every open file, including a
        // lock that was just released. Another process holds it for longer.
        for _ in 0..20 {
            if !matches!(taken, Err(TryLockError::WouldBlock)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(25));
            taken = file.try_lock();
        }
        match taken {
            Ok(()) => {
                let holder = format!("process {}{}\n", std::process::id(), host_name());
                // Only for the message of the next one who tries: a full disk must not keep a run from starting.
                // Other hosts see what is on the server.
                drop(
                    file.set_len(0)
                        .and_then(|()| file.write_all(holder.as_bytes()))
                        .and_then(|()| file.sync_data()),
                );
                Ok(FileLock { file: Some(file) })
            }
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                drop(Read::by_ref(&mut file).take(200).read_to_string(&mut holder));
                let holder = Some(holder.trim()).filter(|h| h.starts_with("process "));
                let holder = holder.unwrap_or("another process").escape_default().to_string();
                Err(Error::Locked { path: parent(path).to_path_buf(), holder })
            }
            // Some network file systems have no locks; run without one.
            Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => Ok(FileLock { file: None }),
            Err(TryLockError::Error(e)) => Err(Error::io_doing(path, "lock", e)),
        }
    }

    /// True if a process holds the lock on the file `path`, which is neither created nor written.
    pub fn is_held(path: &Path) -> bool {
        let file = open_regular(path);
        // A process that takes the lock meanwhile tries again.
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// True if the file `path` is no longer the one that was locked: it was deleted or replaced.
    pub fn is_lost(&self, path: &Path) -> bool {
        self.file.as_ref().is_some_and(|file| !is_at(file, path))
    }

    /// True if the file `path` is locked. After another holder has deleted and released it, it is not.
    fn is_of(&self, path: &Path) -> bool {
        self.file.as_ref().is_some_and(|file| is_at(file, path))
    }
}

/// True if `path` names this open file.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        file.metadata().and_then(|a| Ok(same(a, path.symlink_metadata()?))).unwrap_or(false)
    }
    #[cfg(not(unix))]
    {
        let _ = (file, path);
        true // an open file cannot be deleted there
    }
}

/// " on NAME" of this machine, for lock files that several machines see; empty where it is unknown.
pub(crate) fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { name } else { format!(" on {}", name.trim()) }
}

/// The folder that `path` is in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The name under which [`write_atomic`] writes: `.NAME.tmp` beside it.
fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(TEMPORARY);
    path.with_file_name(hidden)
}

/// Opens a file that is to be changed where it is.
fn open_own(path: &Path, options: &mut OpenOptions) -> Result<File> {
    #[cfg(unix)]
    set_flags(options, rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK);
    let file = options.open(path).map_err(|e| match path.symlink_metadata() {
        Ok(m) if m.is_symlink() => Error::Invalid(format!(
            "{}: is a link, and writing here would change the file it points to; remove the link",
            path.display()
        )),
        _ => Error::io_doing(path, "open", e),
    })?;
    require_regular(path, &file)?;
    Ok(file)
}

fn require_regular(path: &Path, file: &File) -> Result<()> {
    let m = file.metadata().map_err(|e| Error::io_doing(path, "open", e))?;
    let what = if m.is_dir() { "a folder" } else { "a pipe, device or socket" };
    if m.is_file() {
        return Ok(());
    }
    Err(Error::Invalid(format!("{}: is {what}, not a regular file", path.display())))
}

#[cfg(unix)]
fn set_flags(options: &mut OpenOptions, flags: rustix::fs::OFlags) {
    use std::os::unix::fs::OpenOptionsExt;
    options.custom_flags(flags.bits() as i32);
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn writes_follow_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("target"), "precious").unwrap();
        for target in ["target", "absent"] {
            let link = at(&format!("link to {target}"));
            symlink(at(target), &link).unwrap();
            assert!(create_new(&link).is_err());
            for opened in [open_or_create(&link), open_append(&link)] {
                let e = opened.unwrap_err().to_string();
                assert!(e.contains("is a link") && e.contains("remove the link"), "{e}");
            }
            assert!(exists(&link) && !is_regular_file(&link));
            // The temporary name may be a link as well.
            symlink(at("target"), temporary(&link)).unwrap();
            write_atomic(&link, b"new").unwrap();
            assert!(is_regular_file(&link) && fs::read(&link).unwrap() == b"new");
        }
        assert_eq!(fs::read(at("target")).unwrap(), b"precious");
        assert!(!at("absent").exists());
        symlink(at("target"), at("again")).unwrap();
        remove(&at("again")).unwrap();
        assert_eq!(read_regular(&at("target")).unwrap(), b"precious");
    }

    #[test]
    fn a_file_is_replaced_or_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        write_atomic(&file, b"one").unwrap();
        write_atomic(&file, b"two").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"two");
        fs::create_dir(dir.path().join("folder")).unwrap();
        fs::write(dir.path().join("folder/x"), "").unwrap();
        assert!(write_atomic(&dir.path().join("folder"), b"three").is_err());
        let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["config.toml", "folder"]);
    }

    #[test]
    fn devices_and_pipes_are_refused_without_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [Path::new("/dev/zero"), &pipe] {
            let e = open_regular(path).unwrap_err().to_string();
            assert!(e.contains("not a regular file"), "{e}");
            assert!(read_regular(path).is_err() && open_append(path).is_err());
        }
        assert!(open_regular(dir.path()).unwrap_err().to_string().contains("is a folder"));
        // A link to a regular file may be read.
        fs::write(dir.path().join("file"), "x").unwrap();
        symlink("file", dir.path().join("link")).unwrap();
        assert_eq!(read_regular(&dir.path().join("link")).unwrap(), b"x");
    }

    #[test]
    fn a_lock_names_its_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".lock");
        let held = FileLock::take(&path).unwrap();
        let e = FileLock::take(&path).unwrap_err();
        let me = format!("process {}", std::process::id());
        assert!(
            matches!(&e, Error::Locked { path, holder } if path == dir.path() && holder.starts_with(&me))
        );
        assert!(e.to_string().contains(&me), "{e}");
        assert!(FileLock::is_held(&path));
        drop(held);
        assert!(!FileLock::is_held(&path) && !FileLock::is_held(&dir.path().join("none")));
        assert_eq!(fs::read(&path).unwrap(), b"");
        FileLock::take(&path).unwrap();
    }

    #[test]
    fn two_folders_change_places() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|n| dir.path().join(n));
        for d in [&a, &b] {
            fs::create_dir(d).unwrap();
            fs::write(d.join("name"), d.file_name().unwrap().as_encoded_bytes()).unwrap();
        }
        match exchange(&a, &b) {
            Ok(()) => assert_eq!(fs::read(a.join("name")).unwrap(), b"b"),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Unsupported),
        }
        let e = exchange(&a, &dir.path().join("absent")).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Unsupported), "{e}");
        assert!(free_bytes(&a).is_some_and(|n| n > 0));
    }
}
