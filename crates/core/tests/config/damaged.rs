//! Recipes that are damaged, not text, or missing.

use super::{add, one_sentence};
use ferrotron_core::config::*;

/// A seeded generator good enough to damage files with.
struct Noise(u64);
impl Noise {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n.max(1)
    }
}

#[test]
fn damaged_files_are_errors_of_one_sentence_never_panics() {
    let pieces = [
        "[",
        "]",
        "=",
        "\"",
        "'''",
        "\n",
        ".",
        "1e999",
        "-1",
        "nan",
        "9223372036854775808",
        "0x",
        "#",
        "{",
        "}",
        ",",
        "\u{0}",
        "é",
        "[[train]]",
        "train",
        "1979-05-27",
        "[train]\n",
        "a.b.c=1\n",
        "true",
        "99999999999",
    ];
    let mut noise = Noise(7);
    let (mut good, mut bad) = (0, 0);
    for round in 0..6000 {
        let source = RECIPES[noise.below(RECIPES.len())].text;
        let mut text: Vec<char> = source.chars().collect();
        for _ in 0..1 + noise.below(4) {
            let at = noise.below(text.len());
            match noise.below(5) {
                0 => text.truncate(at),
                1 => _ = text.drain(at..(at + noise.below(12)).min(text.len())),
                2 => text.splice(at..at, pieces[noise.below(pieces.len())].chars()).for_each(drop),
                3 => {
                    let other: Vec<char> = text[at..(at + noise.below(30)).min(text.len())].to_vec();
                    let to = noise.below(text.len());
                    text.splice(to..to, other).for_each(drop);
                }
                _ if text.is_empty() => {}
                _ => text[at] = char::from(noise.below(128) as u8),
            }
        }
        let text: String = text.into_iter().collect();
        let mut recipe = Recipe::default();
        let result = recipe.add("r.toml", &text).and_then(|()| {
            recipe.set("train.steps=3")?;
            recipe.set("data.path=embedded")?;
            recipe.resolve(None)
        });
        match result {
            Ok(resolved) => {
                good += 1;
                let again = add(&resolved.config.to_toml()).unwrap().resolve(None);
                assert_eq!(again.unwrap().config, resolved.config, "round {round}:\n{text}");
            }
            Err(e) => {
                bad += 1;
                one_sentence(&e);
            }
        }
    }
    assert!(good > 200 && bad > 2000, "{good} good, {bad} bad: the damage is not what it was meant to be");
}

#[test]
fn files_that_are_not_text_or_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    std::fs::write(&path, b"[train]\nsteps = \xff\n").unwrap();
    let e = Recipe::read(&path).unwrap_err();
    assert!(
        one_sentence(&e).ends_with("r.toml:2: the file is not UTF-8 text; a recipe is a TOML file"),
        "{e}"
    );
    assert!(Recipe::read(dir.path()).is_err());
    let deep = format!("a = {}1{}", "[".repeat(5000), "]".repeat(5000));
    one_sentence(&add(&deep).unwrap_err());
    one_sentence(&add(&format!("{} = 1", vec!["a"; 5000].join("."))).unwrap_err());
    one_sentence(&Recipe::default().set(&format!("{}=1", "x".repeat(100_000))).unwrap_err());
}
