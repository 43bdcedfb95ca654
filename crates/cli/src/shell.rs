//! Words of a command line that a user can paste into a shell.

use std::path::Path;

/// A word as a POSIX shell must be given it: in single quotes unless every character stands for itself.
pub fn quote(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "_-+=:,./@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// A path, quoted; one that begins with a dash is not taken for an option.
pub fn path(path: &Path) -> String {
    let text = path.display().to_string();
    quote(&if text.starts_with('-') { format!("./{text}") } else { text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        for word in ["plain", "a b", "", "it's", "[99.0, 1.0]", "a\"b", "$HOME", "*", "~", "a\\b", "x;y", "ü"]
        {
            let script = format!("printf %s {}", quote(word));
            let out = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), word, "{script}");
        }
        assert_eq!((quote("runs/tiny"), quote("a b")), ("runs/tiny".into(), "'a b'".into()));
        assert_eq!(path(Path::new("-x")), "./-x");
    }
}
