//! Compiled kernels on disk. An entry holds the whole of what it was made from, and is used only if that is equal
//! byte for byte and the code's checksum fits: anything truncated, damaged or foreign is made anew.

use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"FTcubin1";

/// Folder for compiled kernels: `FERROTRON_CACHE`, or the user's cache folder.
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

/// The code made from `key`, if it is there and whole.
pub(super) fn load(folder: &Path, name: &str, arch: &str, key: &[u8]) -> Option<Vec<u8>> {
    decode(&std::fs::read(path(folder, name, arch, key)).ok()?, key)
}

/// Keeps code for next time. A folder that cannot be written only costs time later.
pub(super) fn store(folder: &Path, name: &str, arch: &str, key: &[u8], code: &[u8]) {
    let to = path(folder, name, arch, key);
    // Written aside and renamed: a reader sees a whole entry or none.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_comes_back_whole_or_not_at_all() {
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
    fn entries_of_one_folder_do_not_mix() {
        let folder = std::env::temp_dir().join(format!("ferrotron-cache-{}", std::process::id()));
        store(&folder, "a", "sm_90a", b"one", b"code one");
        store(&folder, "a", "sm_80", b"two", b"code two");
        assert_eq!(load(&folder, "a", "sm_90a", b"one").as_deref(), Some(b"code one".as_slice()));
        assert_eq!(load(&folder, "a", "sm_80", b"two").as_deref(), Some(b"code two".as_slice()));
        assert_eq!(load(&folder, "a", "sm_90a", b"two"), None);
        let _ = std::fs::remove_dir_all(&folder);
    }
}
