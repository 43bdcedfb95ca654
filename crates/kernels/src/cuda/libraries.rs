//! Finding NVIDIA's libraries at run time.
//!
//! A library that is already open is found again by its name, so opening it here by its full path lets the
//! bindings, which only know names, find it wherever it lies.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::path::PathBuf;

/// Folder to look in first.
pub const FOLDER_VARIABLE: &str = "FERROTRON_CUDA_LIB";

/// A library the kernels need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvidiaLibrary {
    /// The run-time compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
}

impl NvidiaLibrary {
    /// File names, the wanted one last; those before it must be open for it to work.
    fn files(self) -> &'static [&'static str] {
        match self {
            NvidiaLibrary::Nvrtc => &["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"],
            NvidiaLibrary::CublasLt => &["libcublasLt.so.13"],
        }
    }

    /// The file to look for, in messages.
    pub fn file(self) -> &'static str {
        self.files().last().copied().unwrap_or_default()
    }

    /// Opens it for good. False where it is nowhere.
    pub fn open(self) -> bool {
        let open = |path: PathBuf| {
            // SAFETY: NVIDIA's libraries do nothing harmful when loaded.
            match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => {
                    std::mem::forget(library);
                    true
                }
                Err(_) => false,
            }
        };
        let anywhere = |file: &str| {
            let named = std::iter::once(PathBuf::from(file));
            folders().into_iter().map(|f| f.join(file)).chain(named).any(open)
        };
        // A helper may be missing where the library brings its own: only the last one decides.
        self.files().iter().fold(false, |_, file| anywhere(file))
            // SAFETY: only tries to open the library by its usual names.
            || unsafe {
                match self {
                    NvidiaLibrary::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                    NvidiaLibrary::CublasLt => cudarc::cublaslt::sys::is_culib_present(),
                }
            }
    }
}

/// Where libraries are looked for beside the loader's own places.
pub fn folders() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from).into_iter().collect();
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    all.extend(
        homes
            .chain([PathBuf::from("/usr/local/cuda")])
            .flat_map(|h| ["lib64", "lib", "targets/x86_64-linux/lib"].map(|l| h.join(l))),
    );
    all
}
