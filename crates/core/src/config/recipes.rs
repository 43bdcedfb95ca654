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
    "llama-3b",
    "llama-8b",
    "llama-8b-one-gpu",
    "llama-8b-16k",
    "llama-8b-64k",
    "llama-8b-128k",
    "llama-8b-256k",
    "llama-70b",
    "llama-70b-fsdp",
    "llama-405b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-14b-one-gpu",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "deepseek-v3",
    "gemma2-2b",
    "gemma2-9b",
    "gemma2-27b",
    "gemma3-1b",
    "gemma3-4b",
    "gemma3-12b",
    "gemma3-27b",
    "finetune-hf",
    "sft",
    "lora",
);
