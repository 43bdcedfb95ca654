//! The recipes inside the program.

/// A recipe inside the program.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedRecipe {
    /// Its name.
    pub name: &'static str,
    /// The whole TOML file.
    pub text: &'static str,
}

impl EmbeddedRecipe {
    /// The first comment line: what the recipe is for.
    pub fn summary(&self) -> &'static str {
        self.text.lines().next().unwrap_or_default().trim_start_matches('#').trim()
    }
}

macro_rules! recipes {
    ($($name:literal),+ $(,)?) => {
        /// Every recipe inside the program; the first is what `train` does without an argument.
        pub const RECIPES: &[EmbeddedRecipe] = &[ $(
            EmbeddedRecipe { name: $name, text: include_str!(concat!("recipes/", $name, ".toml")) },
        )+ ];
    };
}

recipes!(
    "tiny",
    "gpt2-124m",
    "llama-1b",
    "llama-8b",
    "llama-8b-256k",
    "qwen3-0.6b",
    "qwen3-14b-one-gpu",
    "finetune-hf",
    "sft"
);
