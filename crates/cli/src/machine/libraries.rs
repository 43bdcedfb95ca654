//! Finds the CUDA libraries by their file names.

use ferrotron_kernels::cuda::library_folders;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::read_dir;
use std::path::{Path, PathBuf};

/// File name, purpose, and whether GPU compute needs it.
const WANTED: [(&str, &str, bool); 5] = [
    ("libcuda.so", "the GPU driver", true),
    ("libnvrtc.so", "compiles the CUDA kernels", true),
    ("libcublasLt.so", "GPU GEMMs", true),
    ("libnccl.so", "GPU-to-GPU communication", false),
    ("libcudnn.so", "NVIDIA's attention", false),
];

/// A library and where it was found.
#[derive(Debug, Serialize)]
pub struct Library {
    /// Its file name without version.
    pub file: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// GPU compute needs it.
    pub needed: bool,
    /// Where it is.
    pub path: Option<PathBuf>,
    /// Its version, as its file name says.
    pub version: Option<String>,
}

impl Library {
    /// What the library is for, and what its absence costs.
    pub fn meaning(&self) -> String {
        match (&self.path, self.needed) {
            (Some(_), true) => self.purpose.into(),
            (None, true) => format!("{}; without it everything runs on the CPU", self.purpose),
            (_, false) => format!("{}; not used by this version", self.purpose),
        }
    }
}

/// The GPU libraries.
#[derive(Debug, Serialize)]
pub struct Libraries {
    /// Every library, found or not.
    pub list: Vec<Library>,
    /// The folders that were searched.
    pub looked_in: Vec<PathBuf>,
}

impl Libraries {
    /// Searches the folders that kernels and collectives load libraries from.
    pub fn look() -> Libraries {
        let folders = library_folders();
        Libraries { list: find(&folders), looked_in: folders }
    }
}

fn find(folders: &[PathBuf]) -> Vec<Library> {
    let mut found: BTreeMap<&str, PathBuf> = BTreeMap::new();
    for folder in folders {
        let mut names: Vec<OsString> =
            read_dir(folder).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
        // Sorted: the unversioned name comes first, whatever order the folder is read in.
        names.sort();
        for name in names {
            let Some(text) = name.to_str() else { continue };
            // libcuda.so and libcuda.so.1, but not libcudart.so.
            let stem =
                |w: &str| text.strip_prefix(w).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            if let Some((wanted, ..)) = WANTED.iter().find(|(w, ..)| stem(w)) {
                found.entry(wanted).or_insert_with(|| folder.join(text));
            }
        }
    }
    let library = |(file, purpose, needed)| {
        let path = found.remove(file);
        let version = path.as_deref().and_then(version);
        Library { file, purpose, needed, path, version }
    };
    WANTED.map(library).into()
}

/// `13.0.88` of a link to `libnvrtc.so.13.0.88`.
fn version(path: &Path) -> Option<String> {
    let real = path.canonicalize().ok()?;
    let (_, version) = real.file_name()?.to_str()?.split_once(".so.")?;
    Some(version.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_with_their_versions() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let touch = |path: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        };
        touch("lib/libcuda.so.1");
        touch("lib/libcudart.so.12");
        touch("first/libnccl.so.2");
        touch("second/libnccl.so");
        touch("second/libnvrtc.so.13.0.88");
        std::os::unix::fs::symlink("libnvrtc.so.13.0.88", root.join("second/libnvrtc.so.13")).unwrap();
        let list = find(&["lib", "first", "second"].map(|f| root.join(f)));
        let at = |file: &str| list.iter().find(|l| l.file == file).unwrap();
        assert_eq!(at("libcuda.so").path, Some(root.join("lib/libcuda.so.1")));
        assert_eq!(at("libnccl.so").path, Some(root.join("first/libnccl.so.2")));
        assert_eq!(at("libnvrtc.so").version.as_deref(), Some("13.0.88"));
        assert_eq!(at("libcublasLt.so").path, None);
    }
}
