//! Finds the CUDA libraries by their file names.

use ferrotron_kernels::cuda::library_folders;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::read_dir;
use std::path::{Path, PathBuf};

const WITHOUT_GPU: &str = "everything runs on the CPU";

/// File name, purpose, whether GPU compute needs it, and what its absence costs; nothing for a library that is not used.
const WANTED: [(&str, &str, bool, Option<&str>); 5] = [
    ("libcuda.so", "the GPU driver", true, Some(WITHOUT_GPU)),
    ("libnvrtc.so", "compiles the CUDA kernels", true, Some(WITHOUT_GPU)),
    ("libcublasLt.so", "GPU GEMMs", true, Some(WITHOUT_GPU)),
    (
        "libnccl.so",
        "collectives between several GPUs, one process each",
        false,
        Some("ranks can only share a single GPU"),
    ),
    ("libcudnn.so", "NVIDIA's attention", false, None),
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
    /// What its absence costs; nothing if it is not used.
    pub without: Option<&'static str>,
    /// Where it is.
    pub path: Option<PathBuf>,
    /// Its version, as its file name says.
    pub version: Option<String>,
}

impl Library {
    /// What the library is for, and what its absence costs.
    pub fn meaning(&self) -> String {
        match (&self.path, self.without) {
            (Some(_), Some(_)) => self.purpose.into(),
            (None, Some(without)) => format!("{}; without it {without}", self.purpose),
            (_, None) => format!("{}; not used by this version", self.purpose),
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
    let library = |(file, purpose, needed, without)| {
        let path = found.remove(file);
        let version = path.as_deref().and_then(version);
        Library { file, purpose, needed, without, path, version }
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
        assert_eq!(at("libnccl.so").meaning(), "collectives between several GPUs, one process each");
        assert!(at("libcublasLt.so").meaning().ends_with("; without it everything runs on the CPU"));
        assert!(at("libcudnn.so").meaning().ends_with("; not used by this version"));
    }
}
