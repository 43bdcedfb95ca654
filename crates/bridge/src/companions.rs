//! The files that accompany the weights of a model: tokenizer, generation defaults, licence, code.

use crate::chat::{NAMED_TEMPLATES, TEMPLATE, named_files};
use crate::custom_code::copy_code;
use crate::error::{Error, Result};
use crate::staged_folder::StagedFolder;
use ferrotron_core::fs::{open_regular, remove, sync_folder};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest file that is copied; published tokenizers have up to 40 MB.
const MAX_BYTES: u64 = 1 << 30;

/// Files that come with the weights.
const OF_WEIGHTS: &[&str] = &[
    "LICENSE",
    "LICENSE-CODE",
    "LICENSE-MODEL",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.md",
    "NOTICE.txt",
    "generation_config.json",
];
/// Files of a tokenizer.
const OF_TOKENIZER: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// True for the names of such files.
pub(crate) fn is_companion(name: &str) -> bool {
    OF_WEIGHTS.contains(&name) || OF_TOKENIZER.contains(&name)
}

/// Writes the files beside the weights of a model: tokenizer and chat templates of the folder `tokenizer`; licences, generation defaults
/// and code of the folder `model`; then the texts `more` by name, in place of what was copied. Of one folder alone come all files.
pub(crate) fn write_companions(
    folder: &StagedFolder,
    (model, tokenizer): (Option<&Path>, Option<&Path>),
    more: &[(&str, &str)],
) -> Result<()> {
    match (model, tokenizer) {
        (Some(model), Some(tokenizer)) => {
            copy_named(model, OF_WEIGHTS, folder.dir())?;
            copy_tokenizer(tokenizer, folder.dir())?;
            copy_code(model, folder.dir())?;
            copy_code(tokenizer, folder.dir())?;
        }
        (one, other) => one.or(other).map_or(Ok(()), |dir| copy_companions(dir, folder.dir()))?,
    }
    more.iter().try_for_each(|(name, text)| match *name {
        TEMPLATE => write_template(text, folder),
        name => folder.write(name, text.as_bytes()),
    })
}

/// Copies tokenizer files, chat templates, generation defaults, licences, and the code that a `config.json` and `tokenizer_config.json` which
/// are then in `into` name.
pub(crate) fn copy_companions(from: &Path, into: &Path) -> Result<()> {
    copy_named(from, OF_WEIGHTS, into)?;
    copy_tokenizer(from, into)?;
    copy_code(from, into)
}

fn copy_tokenizer(from: &Path, into: &Path) -> Result<()> {
    copy_named(from, OF_TOKENIZER, into)?;
    copy_named_templates(from, into)
}

/// Copies the files of these names that a folder has.
fn copy_named(from: &Path, names: &[&str], into: &Path) -> Result<()> {
    let entries = std::fs::read_dir(from).map_err(|e| Error::io(from, "list", e))?;
    for entry in entries {
        let name = entry.map_err(|e| Error::io(from, "list", e))?.file_name();
        if let Some(name) = name.to_str().filter(|n| names.contains(n)) {
            copy_own(from, name, into)?;
        }
    }
    Ok(())
}

/// Copies the templates of [`NAMED_TEMPLATES`].
fn copy_named_templates(from: &Path, into: &Path) -> Result<()> {
    let names = named_files(from)?;
    if names.is_empty() {
        return Ok(());
    }
    own_file(from, NAMED_TEMPLATES)?;
    let folder = into.join(NAMED_TEMPLATES);
    std::fs::create_dir(&folder).map_err(|e| Error::io(&folder, "create", e))?;
    names.iter().try_for_each(|name| copy_own(from, &format!("{NAMED_TEMPLATES}/{name}"), into))?;
    Ok(sync_folder(&folder)?)
}

/// Writes the chat template of a folder, in place of all that were copied into it.
fn write_template(text: &str, folder: &StagedFolder) -> Result<()> {
    let named = folder.path(NAMED_TEMPLATES);
    if named.is_dir() {
        remove(&named)?;
    }
    folder.write(TEMPLATE, text.as_bytes())
}

/// Copies one file that belongs to the folder `from`.
pub(crate) fn copy_own(from: &Path, name: &str, into: &Path) -> Result<()> {
    let (path, to) = (own_file(from, name)?, into.join(name));
    let failed = |e| Error::io(&path, "copy", e);
    let mut source = open_regular(&path)?.take(MAX_BYTES + 1);
    let mut out = File::create_new(&to).map_err(|e| Error::io(&to, "create", e))?;
    if std::io::copy(&mut source, &mut out).map_err(failed)? > MAX_BYTES {
        let what = format!("is longer than {MAX_BYTES} bytes, which no tokenizer or licence is");
        return Err(Error::config(&path.display().to_string(), what));
    }
    out.sync_all().map_err(failed)
}

/// The path of a folder's file. A link must lead to another file of the folder, or, in a snapshot of the Hugging Face
/// cache (`models--ORG--NAME/snapshots/REVISION`), into the cache's `blobs`: a link to anywhere else would publish a
/// file of this machine with the model.
pub(crate) fn own_file(dir: &Path, name: &str) -> Result<PathBuf> {
    let path = dir.join(name);
    let is_link = path.symlink_metadata().map_err(|e| Error::io(&path, "open", e))?.is_symlink();
    if !is_link {
        return Ok(path);
    }
    let resolve = |p: &Path| p.canonicalize().map_err(|e| Error::io(p, "open", e));
    let (dir, target) = (resolve(dir)?, resolve(&path)?);
    let snapshots = dir.parent().filter(|p| p.ends_with("snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
    if target.starts_with(&dir) || blobs.is_some_and(|b| target.parent() == Some(&b)) {
        return Ok(target);
    }
    let what = "is a link to a file outside of its folder, which is not copied; put the file itself there";
    Err(Error::config(&path.display().to_string(), what))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_followed_inside_the_folder_and_the_cache_only() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let snapshot = at("models--a--b/snapshots/123");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(at("models--a--b/blobs")).unwrap();
        fs::create_dir_all(at("out")).unwrap();
        fs::write(at("models--a--b/blobs/abc"), "blob").unwrap();
        fs::write(at("secret"), "secret").unwrap();
        fs::write(snapshot.join("vocab.txt"), "own").unwrap();
        symlink("../../blobs/abc", snapshot.join("tokenizer.json")).unwrap();
        symlink("vocab.txt", snapshot.join("LICENSE")).unwrap();
        copy_companions(&snapshot, &at("out")).unwrap();
        let read = |name: &str| fs::read_to_string(at("out").join(name)).unwrap();
        assert_eq!([read("tokenizer.json"), read("LICENSE"), read("vocab.txt")], ["blob", "own", "own"]);
        let hostile = [
            at("secret"),
            "/etc/hostname".into(),
            "../../../secret".into(),
            "../../blobs/../../secret".into(),
        ];
        for target in hostile {
            let _ = fs::remove_dir_all(at("again"));
            fs::create_dir(at("again")).unwrap();
            let _ = fs::remove_file(snapshot.join("NOTICE"));
            symlink(&target, snapshot.join("NOTICE")).unwrap();
            let e = copy_companions(&snapshot, &at("again")).unwrap_err().to_string();
            assert!(e.contains("NOTICE") && e.contains("outside"), "{e}");
            assert!(!at("again/NOTICE").exists());
        }
        // Outside of a cache no `blobs` folder is special.
        let plain = at("x/y/plain");
        fs::create_dir_all(&plain).unwrap();
        fs::create_dir_all(at("x/blobs")).unwrap();
        fs::write(at("x/blobs/secret"), "secret").unwrap();
        symlink("../../blobs/secret", plain.join("NOTICE")).unwrap();
        assert!(copy_companions(&plain, &at("again")).is_err());
    }

    /// The folder of named templates is copied, and only they of what is in it.
    #[test]
    fn additional_chat_templates_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for folder in ["from/additional_chat_templates/deeper", "to", "again", "elsewhere"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        for name in ["tool_use.jinja", "notes.txt", "deeper/a.jinja"] {
            fs::write(at("from/additional_chat_templates").join(name), name).unwrap();
        }
        copy_companions(&at("from"), &at("to")).unwrap();
        let copied = fs::read_dir(at("to/additional_chat_templates")).unwrap();
        let copied: Vec<_> = copied.map(|e| e.unwrap().file_name()).collect();
        assert_eq!(copied, ["tool_use.jinja"]);
        // A link to another folder would publish its files.
        fs::write(at("elsewhere/secret.jinja"), "secret").unwrap();
        fs::remove_dir_all(at("from/additional_chat_templates")).unwrap();
        symlink("../elsewhere", at("from/additional_chat_templates")).unwrap();
        let e = copy_companions(&at("from"), &at("again")).unwrap_err().to_string();
        assert!(e.contains("additional_chat_templates") && e.contains("outside"), "{e}");
    }

    #[test]
    fn only_known_names_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|n| dir.path().join(n));
        for d in [&from, &to] {
            fs::create_dir(d).unwrap();
        }
        for name in ["tokenizer.json", "tokenizer_x", "LICENSE", "LICENSES.zip", "thesis.md", "config.json"] {
            fs::write(from.join(name), "x").unwrap();
        }
        copy_companions(&from, &to).unwrap();
        let mut copied: Vec<_> = fs::read_dir(&to).unwrap().map(|e| e.unwrap().file_name()).collect();
        copied.sort();
        assert_eq!(copied, ["LICENSE", "tokenizer.json"]);
    }
}
