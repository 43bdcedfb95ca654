//! Finds NVIDIA's libraries at run time.
//!
//! The loader finds a library that is already loaded by its name, so loading it here by its full path lets the
//! bindings, which only know names, find it anywhere.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::OsString;
use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// Folder to search first.
pub const FOLDER_VARIABLE: &str = "FERROTRON_CUDA_LIB";

/// A library that the kernels need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvidiaLibrary {
    /// The runtime compiler.
    Nvrtc,
    /// GEMMs.
    CublasLt,
}

impl NvidiaLibrary {
    /// File names, the library last; those before it must be loaded for it to work.
    fn files(self) -> &'static [&'static str] {
        match self {
            NvidiaLibrary::Nvrtc => &["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"],
            NvidiaLibrary::CublasLt => &["libcublasLt.so.13"],
        }
    }

    /// The file to look for, for messages.
    pub fn file(self) -> &'static str {
        self.files().last().copied().unwrap_or_default()
    }

    /// Loads it for good. False where it is not found.
    pub fn open(self) -> bool {
        let open = |path: PathBuf| {
            // SAFETY: loading NVIDIA's libraries has no harmful side effects.
            match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => {
                    std::mem::forget(library);
                    true
                }
                Err(_) => false,
            }
        };
        let anywhere = |file: &str| {
            // The loader's search path, unless a folder is named.
            let named = std::env::var_os(FOLDER_VARIABLE).is_none().then(|| PathBuf::from(file));
            named.into_iter().chain(folders().into_iter().map(|f| f.join(file))).any(open)
        };
        // A dependency may be missing where the library contains it: only the last one decides.
        self.files().iter().fold(false, |_, file| anywhere(file))
            // SAFETY: only tries to load the library by its usual names.
            || unsafe {
                match self {
                    NvidiaLibrary::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                    NvidiaLibrary::CublasLt => cudarc::cublaslt::sys::is_culib_present(),
                }
            }
    }
}

/// Search path: the folders in `FERROTRON_CUDA_LIB` and `LD_LIBRARY_PATH`, then those of the loader, of CUDA's
/// installer and of Python wheels. Only folders that exist.
pub fn folders() -> Vec<PathBuf> {
    let mut all = folders_in(&|name| std::env::var_os(name), Path::new("/"));
    all.retain(|f| f.is_dir());
    all
}

/// The folders to search, in order. `root` is `/` except in tests.
fn folders_in(env: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = env(FOLDER_VARIABLE).map(PathBuf::from).into_iter().collect();
    if let Some(paths) = env("LD_LIBRARY_PATH") {
        out.extend(std::env::split_paths(&paths).filter(|p| !p.as_os_str().is_empty()));
    }
    for home in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| env(name)) {
        out.push(PathBuf::from(&home).join("lib64"));
        out.push(PathBuf::from(&home).join("lib"));
    }
    let mut configured: Vec<_> = list(&root.join("etc/ld.so.conf.d"));
    configured.sort();
    for file in configured {
        let text = read_to_string(file).unwrap_or_default();
        out.extend(text.lines().map(str::trim).filter(|l| l.starts_with('/')).map(PathBuf::from));
    }
    for fixed in [
        "usr/local/cuda/lib64",
        "usr/local/nvidia/lib64",
        "usr/lib/wsl/lib",
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu",
        "usr/lib64",
        "usr/lib",
    ] {
        out.push(root.join(fixed));
    }
    let mut pythons = vec![root.join("usr/local/lib"), root.join("usr/lib")];
    pythons.extend(env("VIRTUAL_ENV").map(|v| PathBuf::from(v).join("lib")));
    pythons.extend(env("HOME").map(|h| PathBuf::from(h).join(".local/lib")));
    for lib in pythons {
        for python in list(&lib).into_iter().filter(|p| named(p, "python3")) {
            for packages in ["site-packages", "dist-packages"] {
                let mut wheels = list(&python.join(packages).join("nvidia"));
                wheels.sort();
                out.extend(wheels.into_iter().map(|w| w.join("lib")));
            }
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    out.retain(|p| seen.insert(p.clone()));
    out
}

fn list(folder: &Path) -> Vec<PathBuf> {
    read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect()
}

fn named(path: &Path, start: &str) -> bool {
    path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn searches_loader_installer_and_wheel_folders() {
        let root = std::env::temp_dir().join(format!("ferrotron-folders-{}", std::process::id()));
        let wheel = root.join("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&wheel).unwrap();
        std::fs::create_dir_all(root.join("etc/ld.so.conf.d")).unwrap();
        std::fs::write(root.join("etc/ld.so.conf.d/cuda.conf"), "# where\n/opt/cuda/lib\n").unwrap();
        let env = |name: &str| match name {
            FOLDER_VARIABLE => Some(OsString::from("/mine")),
            "LD_LIBRARY_PATH" => Some(OsString::from("/first:/second")),
            "VIRTUAL_ENV" => Some(root.join("venv").into_os_string()),
            _ => None,
        };
        let found = folders_in(&env, &root);
        let _ = std::fs::remove_dir_all(&root);
        let at = |f: &Path| found.iter().position(|x| x == f).unwrap();
        assert_eq!(at(Path::new("/mine")), 0);
        assert!(at(Path::new("/first")) < at(Path::new("/second")));
        assert!(at(Path::new("/opt/cuda/lib")) < at(&root.join("usr/local/cuda/lib64")));
        assert!(found.contains(&wheel));
    }
}
