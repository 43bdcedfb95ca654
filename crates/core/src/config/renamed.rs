//! Keys of earlier versions: what each is called now, and what its old values mean.
//!
//! One table serves two readers. A recipe with an old key is refused with the new spelling; a configuration that an
//! earlier version stored in its run folder is translated, so that the run resumes.

use toml::Value;

/// An old key with the key that replaced it.
struct Renamed {
    old: &'static str,
    new: &'static str,
    value: Translation,
}

/// How an old value is translated to the new key.
enum Translation {
    /// Unchanged.
    Unchanged,
    /// These words have a new spelling; every other value is as before.
    Words(&'static [(&'static str, &'static str)]),
    /// A number, times this.
    Times(i64),
    /// The new key is a boolean: true for this word.
    IsWord(&'static str),
    /// The old key took a list of words; each became a boolean key of its own.
    Flags(&'static [(&'static str, &'static str)]),
}

use Translation::{Flags, IsWord, Times, Unchanged, Words};

const fn renamed(old: &'static str, new: &'static str) -> Renamed {
    Renamed { old, new, value: Unchanged }
}

const RENAMED: &[Renamed] = &[
    Renamed {
        old: "precision.scaling",
        new: "precision.recipe",
        value: Words(&[("current", "fp8-current"), ("delayed", "fp8-delayed"), ("block", "fp8-block")]),
    },
    Renamed {
        old: "precision.also",
        new: "precision.fp8_lm_head",
        value: Flags(&[("head", "precision.fp8_lm_head"), ("attention", "precision.fp8_attention")]),
    },
    Renamed { old: "precision.weights", new: "precision.fp8_params", value: IsWord("fp8") },
    renamed("precision.history", "precision.amax_history"),
    renamed("precision.power_of_two", "precision.pow2_scales"),
    renamed("precision.except", "precision.skip"),
    renamed("train.graph", "train.cuda_graph"),
    renamed("moe.score", "moe.score_function"),
    renamed("moe.keep", "moe.drop_policy"),
    renamed("moe.pad", "moe.pad_to_capacity"),
    renamed("moe.force", "moe.force_balance"),
    renamed("moe.every", "moe.layer_freq"),
    renamed("moe.dense", "moe.dense_layers"),
    renamed("moe.scale", "moe.route_scale"),
    renamed("mtp.factor", "mtp.loss_weight"),
    renamed("mtp.repeated", "mtp.shared_layer"),
    // Elements of a bucket; two buckets of f32 gradients are in flight.
    Renamed { old: "parallel.bucket", new: "parallel.comm_unit", value: Times(8) },
    renamed("optimizer.moments", "optimizer.state_dtype"),
    renamed("optimizer.master", "optimizer.master_dtype"),
];

impl Renamed {
    fn find(old: &str) -> Option<&'static Renamed> {
        RENAMED.iter().find(|r| r.old == old)
    }

    /// The new keys and values that say the same.
    fn translate(&self, value: &Value) -> Vec<(&'static str, Value)> {
        let is = |value: &Value, word: &str| value.as_str() == Some(word);
        let new = match self.value {
            Unchanged => value.clone(),
            Words(words) => match words.iter().find(|(old, _)| is(value, old)) {
                Some((_, new)) => Value::from(*new),
                None => value.clone(),
            },
            Times(factor) => match value.as_integer() {
                Some(n) => Value::from(n.saturating_mul(factor)),
                None => value.clone(),
            },
            IsWord(word) => Value::from(is(value, word)),
            Flags(flags) => {
                let has = |word: &str| match value {
                    Value::Array(list) => list.iter().any(|v| is(v, word)),
                    one => is(one, word),
                };
                let on = flags.iter().filter(|(word, _)| has(word));
                return on.map(|(_, key)| (*key, Value::from(true))).collect();
            }
        };
        vec![(self.new, new)]
    }
}

/// The new name of a key of an earlier version.
pub(super) fn new_name(old: &str) -> Option<&'static str> {
    Renamed::find(old).map(|r| r.new)
}

/// A key and value of an earlier version in today's keys; nothing if the key was not renamed.
pub(super) fn translate(old: &str, value: &Value) -> Option<Vec<(&'static str, Value)>> {
    Renamed::find(old).map(|r| r.translate(value))
}

/// What to write instead of a key and value of an earlier version: `precision.recipe = "fp8-current"`.
pub(super) fn replacement(old: &str, value: &Value) -> Option<String> {
    let list = translate(old, value)?;
    let written = list.iter().map(|(key, value)| format!("{key} = {}", super::write::value(value)));
    Some(match written.collect::<Vec<_>>() {
        none if none.is_empty() => new_name(old)?.to_string(),
        all => all.join(" and "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::KeyInfo;

    #[test]
    fn every_new_name_is_a_key_and_no_old_name_is() {
        for r in RENAMED {
            assert!(KeyInfo::find(r.new).is_some(), "{} is not a key", r.new);
            assert!(KeyInfo::find(r.old).is_none(), "{} is still a key", r.old);
        }
    }

    #[test]
    fn values_are_translated() {
        let one = |old: &str, value: Value| replacement(old, &value).unwrap();
        assert_eq!(one("precision.scaling", "current".into()), "precision.recipe = \"fp8-current\"");
        assert_eq!(one("precision.scaling", "mxfp8".into()), "precision.recipe = \"mxfp8\"");
        assert_eq!(one("precision.weights", "bf16".into()), "precision.fp8_params = false");
        assert_eq!(one("precision.weights", "fp8".into()), "precision.fp8_params = true");
        assert_eq!(one("precision.also", "attention".into()), "precision.fp8_attention = true");
        let both = Value::from(vec!["head", "attention"]);
        assert_eq!(
            one("precision.also", both),
            "precision.fp8_lm_head = true and precision.fp8_attention = true"
        );
        assert_eq!(one("precision.also", Value::Array(Vec::new())), "precision.fp8_lm_head");
        assert_eq!(one("moe.dense", vec![0].into()), "moe.dense_layers = [0]");
        assert_eq!(translate("train.steps", &3.into()), None);
    }
}
