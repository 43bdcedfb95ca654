//! The Python files of a model with custom code: those that `auto_map` names, which `trust_remote_code` runs.

use crate::companions::{copy_own, own_file};
use crate::error::Result;
use crate::json::{parse_object, read_text};
use ferrotron_core::fs::read_limited;
use regex::Regex;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Longest file, and most of them; published models have up to ten of up to 100 kB.
const MAX_BYTES: u64 = 16 << 20;
const MAX_FILES: usize = 64;

/// Copies the code that the `config.json` and `tokenizer_config.json` in `into` name, as far as it is not there.
pub(crate) fn copy_code(from: &Path, into: &Path) -> Result<()> {
    let code = code_files(into, from)?;
    code.iter().filter(|name| !into.join(name).exists()).try_for_each(|name| copy_own(from, name, into))
}

/// The names of the files in `dir` that the configurations in the folder `configs` name, and of those that they import.
pub(crate) fn code_files(configs: &Path, dir: &Path) -> Result<BTreeSet<String>> {
    let mut modules = Vec::new();
    for name in ["config.json", "tokenizer_config.json"] {
        let path = configs.join(name);
        // One that cannot be read names nothing.
        let map = read_text(&path).and_then(|text| parse_object(&text, &path.display().to_string()));
        if let Some(classes) = map.ok().as_ref().and_then(|m| m.get("auto_map")) {
            modules_of(classes, &mut modules);
        }
    }
    let mut found = BTreeSet::new();
    while let Some(module) = modules.pop() {
        let name = format!("{module}.py");
        if found.contains(&name) || found.len() == MAX_FILES || !dir.join(&name).is_file() {
            continue;
        }
        let source = read_limited(&own_file(dir, &name)?, MAX_BYTES)?;
        modules.extend(imports(&String::from_utf8_lossy(&source)));
        found.insert(name);
    }
    Ok(found)
}

/// The modules of classes: `module.Class`, alone or in lists and objects. Those of another repository
/// (`owner/name--module.Class`) and names with a path in them are none of this folder.
fn modules_of(classes: &Value, out: &mut Vec<String>) {
    match classes {
        Value::String(class) => {
            let plain = |m: &&str| !m.is_empty() && m.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            out.extend(class.split_once('.').map(|(module, _)| module).filter(plain).map(String::from));
        }
        Value::Array(list) => list.iter().for_each(|class| modules_of(class, out)),
        Value::Object(map) => map.values().for_each(|class| modules_of(class, out)),
        _ => {}
    }
}

/// The modules that a source imports from its own folder (`from .module import …`).
fn imports(source: &str) -> Vec<String> {
    let Ok(import) = Regex::new(r"(?m)^[ \t]*(?:from|import)[ \t]+\.([A-Za-z0-9_]+)") else {
        return Vec::new();
    };
    import.captures_iter(source).map(|found| found[1].to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_files_that_auto_map_names_and_what_they_import_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|n| dir.path().join(n));
        for d in [&from, &to] {
            fs::create_dir(d).unwrap();
        }
        let write = |name: &str, text: &str| fs::write(from.join(name), text).unwrap();
        write("modeling_x.py", "import torch\nfrom .configuration_x import Config\n    from .ops import f\n");
        write("configuration_x.py", "from .modeling_x import Model\n");
        write("ops.py", "from .. import secrets\nfrom .gone import x\n");
        write("tokenization_x.py", "");
        write("setup.py", "import os\n");
        fs::write(dir.path().join("secrets.py"), "").unwrap();
        let config = r#"{"auto_map": {"AutoConfig": "configuration_x.Config", "AutoModel": "modeling_x.Model",
            "A": "owner/name--setup.Setup", "B": "../secrets.S", "C": "/etc/passwd", "D": "away.X", "E": 3}}"#;
        fs::write(to.join("config.json"), config).unwrap();
        let tokenizer = r#"{"auto_map": {"AutoTokenizer": ["tokenization_x.Tokenizer", null]}}"#;
        fs::write(to.join("tokenizer_config.json"), tokenizer).unwrap();
        copy_code(&from, &to).unwrap();
        let code = ["configuration_x.py", "modeling_x.py", "ops.py", "tokenization_x.py"];
        assert_eq!(code_files(&to, &to).unwrap(), code.map(String::from).into());
        for name in code {
            assert_eq!(fs::read(from.join(name)).unwrap(), fs::read(to.join(name)).unwrap());
        }
        assert_eq!(fs::read_dir(&to).unwrap().count(), code.len() + 2);
        // A configuration that names no code, and one that is none.
        fs::write(from.join("config.json"), "{}").unwrap();
        fs::write(from.join("tokenizer_config.json"), "no JSON").unwrap();
        assert!(code_files(&from, &from).unwrap().is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn code_outside_of_the_folder_is_not_copied() {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|n| dir.path().join(n));
        for d in [&from, &to] {
            fs::create_dir(d).unwrap();
        }
        fs::write(dir.path().join("secret"), "secret").unwrap();
        std::os::unix::fs::symlink("../secret", from.join("modeling_x.py")).unwrap();
        fs::write(to.join("config.json"), r#"{"auto_map": {"AutoModel": "modeling_x.Model"}}"#).unwrap();
        let e = copy_code(&from, &to).unwrap_err().to_string();
        assert!(e.contains("modeling_x.py") && e.contains("outside"), "{e}");
        assert!(!to.join("modeling_x.py").exists());
    }
}
