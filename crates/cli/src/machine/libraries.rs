//! GPUs and the libraries that drive them, by looking for their files.

use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// Each library, and what it is for.
const WANTED: [(&str, &str); 5] = [
    ("libcuda.so", "the GPU driver"),
    ("libnvrtc.so", "compiles our GPU kernels"),
    ("libcublasLt.so", "GPU matrix products"),
    ("libnccl.so", "GPU-to-GPU communication"),
    ("libcudnn.so", "GPU attention"),
];

/// A library that was looked for.
#[derive(Debug, Serialize)]
pub struct Library {
    /// Its file name without version.
    pub file: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// Where it is.
    pub path: Option<PathBuf>,
}

impl Library {
    /// What having or missing it means.
    pub fn meaning(&self) -> String {
        match self.path {
            Some(_) => format!("{}; not used, this version computes on the CPU", self.purpose),
            None => format!("{}; missing costs nothing in this version", self.purpose),
        }
    }
}

/// The GPU libraries.
#[derive(Debug, Serialize)]
pub struct Libraries {
    /// Each one looked for.
    pub list: Vec<Library>,
    /// The folders looked in.
    pub looked_in: Vec<PathBuf>,
}

impl Libraries {
    /// Looks where the loader, CUDA's installer and Python wheels put them.
    pub fn look() -> Libraries {
        let mut folders = folders(&|name| std::env::var_os(name), Path::new("/"));
        folders.retain(|f| f.is_dir());
        Libraries { list: find(&folders), looked_in: folders }
    }
}

fn find(folders: &[PathBuf]) -> Vec<Library> {
    let mut found: BTreeMap<&str, PathBuf> = BTreeMap::new();
    for folder in folders {
        let mut names: Vec<OsString> =
            read_dir(folder).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
        // The plain name before versions, and the same answer whatever order the folder is read in.
        names.sort();
        for name in names {
            let Some(text) = name.to_str() else { continue };
            // libcuda.so and libcuda.so.1, but not libcudart.so.
            let stem =
                |w: &str| text.strip_prefix(w).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            if let Some((wanted, _)) = WANTED.iter().find(|(w, _)| stem(w)) {
                found.entry(wanted).or_insert_with(|| folder.join(text));
            }
        }
    }
    WANTED.map(|(file, purpose)| Library { file, purpose, path: found.remove(file) }).into()
}

/// The folders to look in, first come first served. `root` is `/` except in tests.
fn folders(env: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = Vec::new();
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

/// The GPUs the driver shows.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Gpus {
    /// One name each.
    pub names: Vec<String>,
}

impl Gpus {
    /// Reads what NVIDIA's driver writes under /proc.
    pub fn look() -> Gpus {
        Gpus { names: gpus(Path::new("/proc/driver/nvidia/gpus")) }
    }
}

fn gpus(folder: &Path) -> Vec<String> {
    let mut cards = list(folder);
    cards.sort();
    let name = |card: &PathBuf| {
        let text = read_to_string(card.join("information")).unwrap_or_default();
        let model = text.lines().find_map(|l| l.strip_prefix("Model:")).unwrap_or("unknown").trim();
        model.to_string()
    };
    cards.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }

    #[test]
    fn libraries_are_found_in_their_places() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        touch(&root.join("usr/lib/x86_64-linux-gnu/libcuda.so.1"));
        touch(&root.join("usr/lib/x86_64-linux-gnu/libcudart.so.12"));
        touch(&root.join("opt/first/libnccl.so.2"));
        touch(&root.join("opt/second/libnccl.so"));
        touch(&root.join("venv/lib/python3.12/site-packages/nvidia/cudnn/lib/libcudnn.so.9"));
        let env = |name: &str| match name {
            "LD_LIBRARY_PATH" => {
                Some(std::env::join_paths([root.join("opt/first"), root.join("opt/second")]).unwrap())
            }
            "VIRTUAL_ENV" => Some(root.join("venv").into_os_string()),
            _ => None,
        };
        let list = find(&folders(&env, root));
        let at = |file: &str| list.iter().find(|l| l.file == file).unwrap().path.clone();
        assert_eq!(at("libcuda.so"), Some(root.join("usr/lib/x86_64-linux-gnu/libcuda.so.1")));
        assert_eq!(at("libnccl.so"), Some(root.join("opt/first/libnccl.so.2")));
        assert!(at("libcudnn.so").unwrap().ends_with("nvidia/cudnn/lib/libcudnn.so.9"));
        assert_eq!(at("libnvrtc.so"), None);
        assert_eq!(at("libcublasLt.so"), None);
    }

    #[test]
    fn cards_by_name() {
        let dir = tempfile::tempdir().unwrap();
        assert!(gpus(dir.path()).is_empty());
        let card = dir.path().join("0000:01:00.0");
        std::fs::create_dir(&card).unwrap();
        std::fs::write(card.join("information"), "Model: \t NVIDIA H200\nIRQ: 1\n").unwrap();
        assert_eq!(gpus(dir.path()), ["NVIDIA H200"]);
        assert!(gpus(&dir.path().join("missing")).is_empty());
    }
}
