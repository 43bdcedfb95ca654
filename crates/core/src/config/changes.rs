//! What it means for a run to resume with another value of a key.

use super::{Config, KEYS, KeyInfo, write};
use std::collections::BTreeMap;

/// What another value does to a resumed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeEffect {
    /// The samples that were consumed are no longer those before the data position: some would be repeated, others never
    /// seen. Refused unless it is allowed by name.
    DataPosition,
    /// Training goes on differently from here: told and allowed. (Another architecture or seed cannot resume at all, which
    /// the checkpoint's tensors and state decide.)
    Training,
    /// The same is learned, up to rounding: layout, logging, evaluation, checkpoints. Or the value is a path, whose contents
    /// are compared instead. Not recorded.
    None,
}

/// Keys and sections (`eval.`) whose change is not [`ChangeEffect::Training`].
const EFFECTS: &[(&str, ChangeEffect)] = &[
    ("data.weights", ChangeEffect::DataPosition),
    ("data.split", ChangeEffect::DataPosition),
    ("data.seq_len", ChangeEffect::DataPosition),
    ("data.packing", ChangeEffect::DataPosition),
    ("data.seed", ChangeEffect::DataPosition),
    ("data.truncation", ChangeEffect::DataPosition),
    ("train.global_batch", ChangeEffect::DataPosition),
    ("train.ramp", ChangeEffect::DataPosition),
    ("data.path", ChangeEffect::None), // its contents are compared as DATA_CONTENT
    ("data.tokenizer", ChangeEffect::None),
    ("data.format", ChangeEffect::None), // the tokens are compared
    ("data.field", ChangeEffect::None),
    ("data.chat_template", ChangeEffect::None),
    ("data.cache", ChangeEffect::None),
    ("model.hf", ChangeEffect::None), // only of a fresh run
    ("lora.adapter", ChangeEffect::None),
    ("model.preset", ChangeEffect::None),
    ("moe.dispatcher", ChangeEffect::None),
    ("moe.log", ChangeEffect::None),
    ("moe.record", ChangeEffect::None),
    ("moe.replay", ChangeEffect::None),
    ("train.tokens", ChangeEffect::None), // the steps are compared
    ("train.epochs", ChangeEffect::None),
    ("train.log_every", ChangeEffect::None),
    ("train.log_num_zeros", ChangeEffect::None),
    ("train.energy", ChangeEffect::None),
    ("train.exit_after", ChangeEffect::None),
    ("train.cuda_graph", ChangeEffect::None),
    ("train.recompute", ChangeEffect::None),
    ("train.loss_chunk", ChangeEffect::None),
    ("train.mlp_chunk", ChangeEffect::None),
    ("precision.stats_every", ChangeEffect::None),
    ("logging.", ChangeEffect::None),
    ("eval.", ChangeEffect::None),
    ("checkpoint.", ChangeEffect::None),
    ("parallel.", ChangeEffect::None),
    ("generate.", ChangeEffect::None),
    ("offload.", ChangeEffect::None),
    ("fault.", ChangeEffect::None),
];

/// The name under which a change of the contents of `data.path` is reported and allowed.
pub const DATA_CONTENT: &str = "data.path";
/// The name under which another order of equal data is reported and allowed.
pub const DATA_ORDER: &str = "data.order";

/// What another value of `key` does to a resumed run.
pub fn change_effect(key: &str) -> ChangeEffect {
    let covers = |name: &str| key == name || (name.ends_with('.') && key.starts_with(name));
    EFFECTS.iter().find(|(name, _)| covers(name)).map_or(ChangeEffect::Training, |(_, effect)| *effect)
}

/// Names whose change is refused unless it is allowed.
pub fn refused_changes() -> impl Iterator<Item = &'static str> {
    let keys =
        EFFECTS.iter().filter(|(_, effect)| *effect == ChangeEffect::DataPosition).map(|(name, _)| *name);
    keys.chain([DATA_CONTENT, DATA_ORDER])
}

impl Config {
    /// The values that decide what is learned, by key, in TOML: what a checkpoint records of its configuration.
    pub fn recorded(&self) -> BTreeMap<String, String> {
        let recorded = KEYS.iter().filter(|k| change_effect(k.key) != ChangeEffect::None);
        recorded.filter_map(|k| Some((k.key.to_string(), shown(self, k)?))).collect()
    }
}

impl Config {
    /// Keys whose values differ from those of `other`, with both values in TOML.
    pub fn differing(&self, other: &Config) -> Vec<(&'static str, String, String)> {
        let value = |c: &Config, k: &KeyInfo| shown(c, k).unwrap_or_else(|| "unset".into());
        let all = KEYS.iter().map(|k| (k.key, value(self, k), value(other, k)));
        all.filter(|(_, a, b)| a != b).collect()
    }
}

/// The value of a key in TOML; none if it is unset.
fn shown(c: &Config, k: &KeyInfo) -> Option<String> {
    c.get(k.section, k.name).map(|v| write::value(&v))
}

/// The keys whose recorded values differ, each with its old and new value. A key that only one side knows, because another
/// version wrote the other, has its default there.
pub fn differences(
    old: &BTreeMap<String, String>,
    new: &BTreeMap<String, String>,
) -> Vec<(&'static str, String, String)> {
    let defaults = Config::default();
    let value = |of: &BTreeMap<String, String>, k: &KeyInfo| {
        of.get(k.key).cloned().or_else(|| shown(&defaults, k)).unwrap_or_else(|| "unset".into())
    };
    KEYS.iter()
        .filter(|k| change_effect(k.key) != ChangeEffect::None)
        .map(|k| (k.key, value(old, k), value(new, k)))
        .filter(|(_, old, new)| old != new)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_keys_that_exist() {
        for (name, _) in EFFECTS {
            let exists =
                KEYS.iter().any(|k| k.key == *name || (name.ends_with('.') && k.key.starts_with(name)));
            assert!(exists, "{name}");
        }
        assert_eq!(change_effect("optimizer.lr"), ChangeEffect::Training);
        assert_eq!(change_effect("parallel.tp"), ChangeEffect::None);
        assert_eq!(change_effect("data.seed"), ChangeEffect::DataPosition);
    }

    #[test]
    fn a_key_that_an_older_version_did_not_know_has_its_default() {
        let c = Config::default();
        let new = c.recorded();
        let mut old = new.clone();
        old.remove("optimizer.eps");
        old.insert("optimizer.gone".into(), "1".into());
        assert_eq!(differences(&old, &new), []);
        old.insert("optimizer.eps".into(), "0.5".into());
        let changed = differences(&old, &new);
        assert_eq!(changed, [("optimizer.eps", "0.5".to_string(), "1e-8".to_string())]);
    }
}
