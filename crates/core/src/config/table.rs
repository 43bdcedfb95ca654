//! The machinery behind the table of keys: what a key is, what a value may be, and the macro that turns one
//! declaration per key into structs, defaults and the table that `explain` and the error messages read.

use serde::{Serialize, de::DeserializeOwned};

/// One key of a recipe, as `explain` shows it.
#[derive(Clone, Copy, Debug)]
pub struct KeyInfo {
    /// The whole name, `train.steps`.
    pub key: &'static str,
    /// The section, `train`.
    pub section: &'static str,
    /// The name inside the section, `steps`.
    pub name: &'static str,
    /// One or two sentences of meaning.
    pub doc: &'static str,
    /// Names in other frameworks. Never accepted as keys; they become hints.
    pub aliases: &'static [&'static str],
    /// The values it takes, in words.
    pub expects: fn() -> String,
}

impl KeyInfo {
    /// The key of that whole name.
    pub fn find(key: &str) -> Option<&'static KeyInfo> {
        super::KEYS.iter().find(|k| k.key == key)
    }

    /// The built-in default in TOML, or `None` when the key is unset until a recipe sets it or it is derived.
    pub fn default(&self) -> Option<String> {
        let value = super::Config::default().get(self.section, self.name)?;
        Some(super::write::value(&value))
    }
}

/// A section of a recipe.
#[derive(Clone, Copy, Debug)]
pub struct SectionInfo {
    /// Its name.
    pub name: &'static str,
    /// One sentence about it.
    pub doc: &'static str,
}

/// A type a key may have. Reading and writing is serde's; this says in words what is expected.
pub trait KeyType: Serialize + DeserializeOwned {
    /// "a whole number", "one of f32, bf16", …
    fn expects() -> String;
}

macro_rules! expects {
    ($($ty:ty => $words:literal),+ $(,)?) => { $(
        impl KeyType for $ty {
            fn expects() -> String {
                $words.into()
            }
        }
    )+ };
}
expects! {
    bool => "true or false",
    u32 => "a whole number",
    u64 => "a whole number",
    usize => "a whole number",
    f64 => "a number",
    String => "text",
    Vec<f64> => "a list of numbers",
    Vec<usize> => "a list of whole numbers",
    [usize; 2] => "a list of 2 whole numbers",
    [f64; 2] => "a list of 2 numbers",
    [u64; 3] => "a list of 3 whole numbers",
}

impl<T: KeyType> KeyType for Option<T> {
    fn expects() -> String {
        T::expects()
    }
}

/// Reads a value as the type of a key; the error says what was expected and what was found.
pub(super) fn read<T: KeyType>(value: toml::Value) -> Result<T, String> {
    if !finite(&value) {
        return Err(format!("expected {}, found {}, which is not finite", T::expects(), found(&value)));
    }
    T::deserialize(value.clone()).map_err(|_| format!("expected {}, found {}", T::expects(), found(&value)))
}

/// TOML has `nan` and `inf`; no key has a use for them.
fn finite(value: &toml::Value) -> bool {
    match value {
        toml::Value::Float(x) => x.is_finite(),
        toml::Value::Array(items) => items.iter().all(finite),
        toml::Value::Table(table) => table.values().all(finite),
        _ => true,
    }
}

fn found(value: &toml::Value) -> String {
    const LONGEST: usize = 60;
    let text = super::write::value(value).replace('\n', " ");
    let short: String = text.chars().take(LONGEST).collect();
    if short.len() < text.len() { format!("{short}…") } else { short }
}

/// Declares sections and keys. One line per key: documentation, name, type, default, names known elsewhere.
macro_rules! keys {
    ($(
        $(#[doc = $section_doc:literal])+
        $section:ident : $Section:ident {
            $( $(#[doc = $doc:literal])+ $key:ident : $ty:ty = $default:expr $(, $alias:literal)* ; )+
        }
    )+) => {
        $(
            $(#[doc = $section_doc])+
            #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
            #[serde(deny_unknown_fields, default)]
            pub struct $Section { $( $(#[doc = $doc])+ pub $key: $ty, )+ }

            impl Default for $Section {
                fn default() -> Self {
                    Self { $( $key: $default, )+ }
                }
            }
        )+

        /// The values of every key. Unset optional keys are derived by [`super::Recipe::resolve`].
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Config { $( $(#[doc = $section_doc])+ pub $section: $Section, )+ }

        /// Every section, in the order of a recipe file.
        pub const SECTIONS: &[SectionInfo] = &[ $(
            SectionInfo { name: stringify!($section), doc: concat!($($section_doc),+).trim_ascii() },
        )+ ];

        /// Every key, in the order of a recipe file.
        pub const KEYS: &[KeyInfo] = &[ $( $( KeyInfo {
            key: concat!(stringify!($section), ".", stringify!($key)),
            section: stringify!($section),
            name: stringify!($key),
            doc: concat!($($doc),+).trim_ascii(),
            aliases: &[$($alias),*],
            expects: <$ty as KeyType>::expects,
        }, )+ )+ ];

        impl Config {
            /// Writes one key; the error is "expected …, found …". Unknown keys are the caller's to refuse.
            pub(super) fn put(&mut self, key: &KeyInfo, value: toml::Value) -> Result<(), String> {
                $( $( if key.section == stringify!($section) && key.name == stringify!($key) {
                    self.$section.$key = read::<$ty>(value)?;
                    return Ok(());
                } )+ )+
                Err("no such key".into())
            }

            /// Puts one key back to its default.
            pub(super) fn clear(&mut self, key: &KeyInfo) {
                $( $( if key.section == stringify!($section) && key.name == stringify!($key) {
                    self.$section.$key = $default;
                } )+ )+
            }

            /// The value of one key, or `None` when it is unset or no such key exists.
            pub fn get(&self, section: &str, name: &str) -> Option<toml::Value> {
                $( $( if section == stringify!($section) && name == stringify!($key) {
                    return toml::Value::try_from(&self.$section.$key).ok();
                } )+ )+
                None
            }
        }
    };
}
pub(super) use keys;
