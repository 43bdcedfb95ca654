//! Opening of shared libraries at run time, so that one binary runs with and without them.

use crate::{Error, Result};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::OsString;
use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// A folder to look in first, as for the libraries of the kernels crate.
const FOLDER_VARIABLE: &str = "FERROTRON_CUDA_LIB";

/// A library that is never closed: function pointers taken from it stay valid.
pub(crate) struct SharedLibrary {
    library: Library,
    name: &'static str,
}

impl SharedLibrary {
    /// Opens the first of `files` that the loader finds by name or in one of `folders`. `name` is used in messages.
    pub(crate) fn open(
        name: &'static str,
        files: &[&str],
        folders: &[PathBuf],
    ) -> Result<&'static SharedLibrary> {
        let mut refused = None;
        let near = files.iter().map(PathBuf::from);
        let far = folders.iter().flat_map(|folder| files.iter().map(|f| folder.join(f)));
        // A folder named by the user takes precedence over the loader's search path.
        let named = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from).filter(|_| !folders.is_empty());
        let first = named.iter().flat_map(|folder| files.iter().map(|f| folder.join(f)));
        for path in first.chain(near).chain(far.filter(|p| p.exists())) {
            // SAFETY: loading MPI or NCCL has no harmful effects. GLOBAL, because Open MPI's plugins look up its
            // symbols in the process.
            match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => return Ok(Box::leak(Box::new(SharedLibrary { library, name }))),
                // A file that exists but cannot be loaded is the more useful error.
                Err(error) if path.exists() || refused.is_none() => {
                    // The loader's message, which names the file.
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    refused = Some(source.unwrap_or_else(|| format!("{}: {error}", path.display())));
                }
                Err(_) => {}
            }
        }
        let what = refused.unwrap_or_else(|| "no file names to look for".into());
        Err(Error::Library { library: name, what })
    }

    /// The function `symbol` as a function pointer of type `F`.
    ///
    /// # Safety
    /// `F` must be the `extern "C"` function pointer type of that function.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F> {
        // SAFETY: guaranteed by the caller.
        match unsafe { self.library.get::<F>(symbol) } {
            Ok(f) => Ok(*f),
            Err(_) => Err(self.missing(symbol)),
        }
    }

    /// The address of a global variable.
    pub(crate) fn global(&self, symbol: &'static str) -> Result<usize> {
        // SAFETY: only the address is taken; nothing is read through it.
        match unsafe { self.library.get::<*const u8>(symbol) } {
            Ok(at) => Ok(at.as_raw_ptr() as usize),
            Err(_) => Err(self.missing(symbol)),
        }
    }

    fn missing(&self, symbol: &str) -> Error {
        let what = format!("it has no '{symbol}'; install another version of the library");
        Error::Library { library: self.name, what }
    }
}

/// Folders that may hold NVIDIA's libraries besides the loader's search path: those named by [`FOLDER_VARIABLE`],
/// CUDA's variables and the loader's configuration, then the usual places of installers and Python wheels.
pub(crate) fn nvidia_folders() -> Vec<PathBuf> {
    folders_in(&|name| std::env::var_os(name), Path::new("/"))
}

/// [`nvidia_folders`] with a given environment and root folder.
fn folders_in(env: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = env(FOLDER_VARIABLE).map(PathBuf::from).into_iter().collect();
    for home in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| env(name)) {
        out.extend(["lib64", "lib"].map(|lib| PathBuf::from(&home).join(lib)));
    }
    let mut configured = list(&root.join("etc/ld.so.conf.d"));
    configured.sort();
    for file in configured {
        let text = read_to_string(file).unwrap_or_default();
        out.extend(text.lines().map(str::trim).filter(|l| l.starts_with('/')).map(PathBuf::from));
    }
    out.extend(["usr/local/cuda/lib64", "usr/local/nvidia/lib64"].map(|f| root.join(f)));
    let mut pythons = vec![root.join("usr/local/lib"), root.join("usr/lib")];
    pythons.extend(env("VIRTUAL_ENV").map(|v| PathBuf::from(v).join("lib")));
    pythons.extend(env("HOME").map(|h| PathBuf::from(h).join(".local/lib")));
    for python in pythons.iter().flat_map(|lib| list(lib)) {
        for packages in ["site-packages", "dist-packages"] {
            let mut wheels = list(&python.join(packages).join("nvidia"));
            wheels.sort();
            out.extend(wheels.into_iter().map(|w| w.join("lib")));
        }
    }
    out
}

fn list(folder: &Path) -> Vec<PathBuf> {
    read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn wheels_and_configured_folders_are_looked_in() {
        let root = std::env::temp_dir().join(format!("ferrotron-comm-folders-{}", std::process::id()));
        let wheel = root.join("venv/lib/python3.12/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&wheel).unwrap();
        std::fs::create_dir_all(root.join("etc/ld.so.conf.d")).unwrap();
        std::fs::write(root.join("etc/ld.so.conf.d/cuda.conf"), "# where\n/opt/cuda/lib\n").unwrap();
        let env = |name: &str| match name {
            FOLDER_VARIABLE => Some(OsString::from("/mine")),
            "VIRTUAL_ENV" => Some(root.join("venv").into_os_string()),
            _ => None,
        };
        let found = folders_in(&env, &root);
        std::fs::remove_dir_all(&root).unwrap();
        let at = |f: &Path| found.iter().position(|x| x == f).unwrap();
        assert_eq!(at(Path::new("/mine")), 0);
        assert!(at(Path::new("/opt/cuda/lib")) < at(&wheel));
    }

    #[test]
    fn a_library_that_is_nowhere_is_an_error_with_its_name() {
        let error = SharedLibrary::open("Nothing", &["libferrotron-nothing.so.1"], &[]).err().unwrap();
        let text = error.to_string();
        assert!(text.contains("Nothing") && text.contains("libferrotron-nothing.so.1"), "{text}");
    }
}
