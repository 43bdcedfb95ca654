//! The secret by which the processes of a job know each other.
//!
//! | source | who else may know it |
//! |---|---|
//! | `FERROTRON_JOB_SECRET` | whoever the user gives it to |
//! | torchrun's store, a random value for every start | whoever can connect to torchrun's store, which has no password |
//! | one host: a file of mode 0600 that rank 0 writes, a random value for every start | nobody but this user |
//! | Slurm: derived from job, step and user id | users of the cluster who can list jobs |
//! | else: derived from port and world size | anybody; keeps out other jobs and scanners, not an attacker |

use super::Secret;
use crate::hmac_sha256::sha256;
use crate::launch_env::{LaunchEnv, Launcher};
use crate::{Error, Result};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Where the secret of a job without torchrun's store comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SecretSource {
    Known(Secret),
    /// Written by rank 0.
    File(PathBuf),
}

/// The file of a job's secret, removed when all ranks have joined.
pub(crate) struct SecretFile(PathBuf);

impl Drop for SecretFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl SecretSource {
    /// The source for a job whose rank 0 listens at `port`.
    pub(crate) fn of(job: &LaunchEnv, port: u16) -> Result<SecretSource> {
        if let Some(given) = &job.secret {
            return Ok(SecretSource::Known(given.clone()));
        }
        if job.one_host {
            return Ok(SecretSource::File(file_of(&own_folder()?, port)));
        }
        let user = match job.launcher {
            Launcher::Slurm | Launcher::SlurmMpi => rustix::process::getuid().as_raw(),
            _ => 0,
        };
        let text = format!("ferrotron job {}\nuser {user}\nport {port}\nsize {}", job.job, job.size);
        Ok(SecretSource::Known(Secret(sha256(text.as_bytes()))))
    }

    /// Rank 0: the secret, which the others can [`SecretSource::read`] from here on until the file is dropped.
    pub(crate) fn create(&self) -> Result<(Secret, Option<SecretFile>)> {
        match self {
            SecretSource::Known(secret) => Ok((secret.clone(), None)),
            SecretSource::File(path) => {
                let secret = Secret::random()?;
                let new = path.with_extension(std::process::id().to_string());
                let _ = std::fs::remove_file(&new);
                let written = std::fs::OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&new)
                    .and_then(|mut f| f.write_all(&secret.0))
                    .and_then(|()| std::fs::rename(&new, path));
                written.map_err(|e| failed(path, &e.to_string()))?;
                Ok((secret, Some(SecretFile(path.clone()))))
            }
        }
    }

    /// Other ranks: the secret, `None` as long as rank 0 has not written it.
    pub(crate) fn read(&self) -> Result<Option<Secret>> {
        match self {
            SecretSource::Known(secret) => Ok(Some(secret.clone())),
            SecretSource::File(path) => {
                let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
                let opened =
                    std::fs::OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path);
                let mut file = match opened {
                    Ok(file) => file,
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                    Err(e) => return Err(failed(path, &e.to_string())),
                };
                let about = file.metadata().map_err(|e| failed(path, &e.to_string()))?;
                if !about.is_file() || !is_private(&about) {
                    return Err(failed(path, "it is not a file that only this user can read"));
                }
                let mut secret = [0; 32];
                file.read_exact(&mut secret).map_err(|e| failed(path, &e.to_string()))?;
                Ok(Some(Secret(secret)))
            }
        }
    }
}

fn failed(path: &Path, what: &str) -> Error {
    let path = path.display();
    Error::Launch(format!("the job's secret {path}: {what}; or set FERROTRON_JOB_SECRET on all ranks"))
}

fn is_private(about: &std::fs::Metadata) -> bool {
    about.uid() == rustix::process::getuid().as_raw() && about.mode() & 0o077 == 0
}

/// A folder that only this user can enter, the same for all of the user's processes on this host.
fn own_folder() -> Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let session = PathBuf::from(format!("/run/user/{user}"));
    let has_session = std::fs::symlink_metadata(&session).is_ok_and(|m| m.is_dir() && is_private(&m));
    let above = if has_session { session } else { PathBuf::from("/tmp") };
    private_folder(above.join(format!("ferrotron-{user}")))
}

fn private_folder(folder: PathBuf) -> Result<PathBuf> {
    match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(failed(&folder, &e.to_string()));
        }
        _ => {}
    }
    // A link, or a folder that somebody else made first, is refused.
    match std::fs::symlink_metadata(&folder) {
        Ok(about) if about.is_dir() && is_private(&about) => Ok(folder),
        Ok(_) => Err(failed(&folder, "it is not a folder that only this user can enter; remove it")),
        Err(e) => Err(failed(&folder, &e.to_string())),
    }
}

/// The file of the job at `port`. Containers may share the folder but not the ports, so it names their network too.
fn file_of(folder: &Path, port: u16) -> PathBuf {
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let number: String = network.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    folder.join(format!("port-{port}-net-{number}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_file_is_private_and_goes_away() {
        let top = tempfile::tempdir().unwrap();
        let folder = private_folder(top.path().join("own")).unwrap();
        assert_eq!(private_folder(folder.clone()).unwrap(), folder, "a second job uses it too");
        let source = SecretSource::File(file_of(&folder, 29500));
        assert_eq!(source.read().unwrap(), None);
        let (secret, file) = source.create().unwrap();
        assert_eq!(source.read().unwrap(), Some(secret.clone()));
        let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
        let SecretSource::File(path) = &source else { unreachable!() };
        assert_eq!((mode(&folder), mode(path)), (0o700, 0o600));
        // The next job at this port replaces what a killed one has left.
        std::mem::forget(file);
        let (next, file) = source.create().unwrap();
        assert_ne!(next, secret);
        assert_eq!(source.read().unwrap(), Some(next));
        drop(file);
        assert_eq!(source.read().unwrap(), None);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn folders_and_files_of_others_are_refused() {
        let top = tempfile::tempdir().unwrap();
        let open = top.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o755)).unwrap();
        assert!(private_folder(open.clone()).unwrap_err().to_string().contains("only this user"));
        let link = top.path().join("link");
        std::os::unix::fs::symlink(top.path(), &link).unwrap();
        assert!(private_folder(link).is_err());
        assert!(private_folder(top.path().join("missing/own")).is_err());
        let file = open.join("port-1");
        std::fs::write(&file, [0; 32]).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        let error = SecretSource::File(file.clone()).read().unwrap_err().to_string();
        assert!(error.contains("only this user") && error.contains("FERROTRON_JOB_SECRET"), "{error}");
        std::os::unix::fs::symlink(&file, open.join("port-2")).unwrap();
        assert!(SecretSource::File(open.join("port-2")).read().is_err());
        std::fs::write(&file, [0; 5]).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        assert!(SecretSource::File(file).read().is_err(), "too short");
    }
}
