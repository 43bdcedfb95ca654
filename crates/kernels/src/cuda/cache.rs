//! On-disk cache of compiled kernels and tuned GEMM algorithms. An entry holds its complete key, and is used only if
//! the key is equal byte for byte and the checksum matches: a truncated, damaged or foreign entry is recreated.

use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"FTcubin1";

/// Cache folder: `FERROTRON_CACHE`, or the user's cache folder.
pub fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    variable("FERROTRON_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|d| d.join("ferrotron")))
        .or_else(|| variable("HOME").map(|d| d.join(".cache").join("ferrotron")))
}

fn path(folder: &Path, name: &str, arch: &str, key: &[u8]) -> PathBuf {
    folder.join(format!("{name}-{arch}-{:08x}.cubin", crc32c::crc32c(key)))
}

fn encode(key: &[u8], code: &[u8]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend((key.len() as u64).to_le_bytes());
    out.extend(crc32c::crc32c(code).to_le_bytes());
    out.extend(key);
    out.extend(code);
    out
}

fn decode(entry: &[u8], key: &[u8]) -> Option<Vec<u8>> {
    let rest = entry.strip_prefix(MAGIC)?;
    let (length, rest) = rest.split_first_chunk::<8>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (found, code) = rest.split_at_checked(length)?;
    (found == key && !code.is_empty() && crc32c::crc32c(code) == u32::from_le_bytes(*sum))
        .then(|| code.to_vec())
}

/// The cubin stored under `key`, if it is complete.
pub(super) fn load(folder: &Path, name: &str, arch: &str, key: &[u8]) -> Option<Vec<u8>> {
    decode(&std::fs::read(path(folder, name, arch, key)).ok()?, key)
}

/// Stores a cubin. A folder that cannot be written only costs time later.
pub(super) fn store(folder: &Path, name: &str, arch: &str, key: &[u8], code: &[u8]) {
    let to = path(folder, name, arch, key);
    // Written to a temporary file and renamed: a reader sees a complete entry or none.
    let aside = to.with_extension(format!("{}.part", std::process::id()));
    let write = || {
        std::fs::create_dir_all(folder)?;
        std::fs::write(&aside, encode(key, code))?;
        std::fs::rename(&aside, &to)
    };
    if write().is_err() {
        let _ = std::fs::remove_file(&aside);
    }
}

/// The tuned choice stored under `key`, if it is complete.
pub(super) fn load_choice(folder: &Path, name: &str, key: &[u8]) -> Option<Vec<u8>> {
    decode(&std::fs::read(choice_path(folder, name, key)).ok()?, key)
}

fn choice_path(folder: &Path, name: &str, key: &[u8]) -> PathBuf {
    folder.join(format!("{name}-{:08x}.choice", crc32c::crc32c(key)))
}

/// Stores `value` under `key` unless there is a choice already, and returns the one that is stored. None where nothing
/// can be stored: then another run could choose differently.
pub(super) fn store_choice(folder: &Path, name: &str, key: &[u8], value: &[u8]) -> Option<Vec<u8>> {
    let to = choice_path(folder, name, key);
    let aside = to.with_extension(format!("{}-{:?}.part", std::process::id(), std::thread::current().id()));
    let write = || {
        std::fs::create_dir_all(folder)?;
        std::fs::write(&aside, encode(key, value))?;
        // A hard link fails if the file exists: of several processes that tune at once the first wins.
        match std::fs::hard_link(&aside, &to) {
            Err(_) if load_choice(folder, name, key).is_none() => std::fs::rename(&aside, &to),
            _ => std::fs::remove_file(&aside),
        }
    };
    if write().is_err() {
        let _ = std::fs::remove_file(&aside);
    }
    load_choice(folder, name, key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_entry_is_not_loaded() {
        let (key, code) = (b"source and options".as_slice(), b"machine code".as_slice());
        let entry = encode(key, code);
        assert_eq!(decode(&entry, key).as_deref(), Some(code));
        assert_eq!(decode(&entry, b"another source text"), None);
        for cut in 0..entry.len() {
            assert_eq!(decode(&entry[..cut], key), None, "cut at {cut}");
        }
        for at in 0..entry.len() {
            for bit in 0..8 {
                let mut damaged = entry.clone();
                damaged[at] ^= 1 << bit;
                assert_eq!(decode(&damaged, key), None, "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn entries_with_different_keys_do_not_collide() {
        let folder = std::env::temp_dir().join(format!("ferrotron-cache-{}", std::process::id()));
        store(&folder, "a", "sm_90a", b"one", b"code one");
        store(&folder, "a", "sm_80", b"two", b"code two");
        assert_eq!(load(&folder, "a", "sm_90a", b"one").as_deref(), Some(b"code one".as_slice()));
        assert_eq!(load(&folder, "a", "sm_80", b"two").as_deref(), Some(b"code two".as_slice()));
        assert_eq!(load(&folder, "a", "sm_90a", b"two"), None);
        let _ = std::fs::remove_dir_all(&folder);
    }

    #[test]
    fn a_stored_choice_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("created on demand");
        assert_eq!(load_choice(&at, "gemm", b"key"), None);
        assert_eq!(store_choice(&at, "gemm", b"key", b"one").as_deref(), Some(b"one".as_slice()));
        assert_eq!(store_choice(&at, "gemm", b"key", b"two").as_deref(), Some(b"one".as_slice()));
        assert_eq!(store_choice(&at, "gemm", b"other", b"two").as_deref(), Some(b"two".as_slice()));
        assert_eq!(load_choice(&at, "gemm", b"key").as_deref(), Some(b"one".as_slice()));
        assert_eq!(std::fs::read_dir(&at).unwrap().count(), 2, "no temporary file is left");
    }

    #[test]
    fn a_damaged_choice_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        store_choice(folder.path(), "gemm", b"key", b"one").unwrap();
        let file = choice_path(folder.path(), "gemm", b"key");
        let whole = std::fs::read(&file).unwrap();
        for damage in [&whole[..whole.len() - 1], b"", &whole[1..]] {
            std::fs::write(&file, damage).unwrap();
            assert_eq!(load_choice(folder.path(), "gemm", b"key"), None);
            assert_eq!(
                store_choice(folder.path(), "gemm", b"key", b"two").as_deref(),
                Some(b"two".as_slice())
            );
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn concurrent_tuners_agree_on_one_choice() {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<_> = std::thread::scope(|s| {
            let each = |i: u8| store_choice(folder.path(), "gemm", b"key", &[i; 40]).unwrap();
            let threads: Vec<_> = (0..8).map(|i| s.spawn(move || each(i))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(all.iter().all(|x| *x == all[0]), "{all:?}");
    }

    #[test]
    fn an_unwritable_folder_stores_no_choice() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"a file").unwrap();
        assert_eq!(store_choice(&file, "gemm", b"key", b"one"), None);
    }
}
