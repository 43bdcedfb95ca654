//! Metrics of events by name, for views that plot curves: TensorBoard, CSV, comparison of runs.
//!
//! A name is the path of a number in the event's line under a prefix that says where it comes from: `train/loss`,
//! `train/sent/tp/all-gather`, `moe/imbalance_layer_3`, `eval/loss`. A list of numbers (tokens per expert) is a distribution,
//! and so is a number that each of many operands or ranks has: `fp8/input/saturation`, `ranks/forward`.

use super::{Event, Precision, Sections};
use serde_json::Value;
use std::collections::BTreeMap;

/// Metrics of one event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// Numbers by name. What is not finite is NaN.
    pub scalars: Vec<(String, f64)>,
    /// Several numbers under one name: over experts, operands or ranks.
    pub distributions: Vec<(String, Vec<f64>)>,
}

impl Metrics {
    /// The metrics of an event; none of one that has no place in a curve.
    pub fn of(event: &Event) -> Metrics {
        let mut metrics = Metrics::default();
        match event {
            Event::Step(e) => metrics.add_fields("train", &json(e)),
            Event::Eval(e) => metrics.add_fields("eval", &json(e)),
            Event::Checkpoint(e) => metrics.add_fields("checkpoint", &json(e)),
            Event::Precision(e) => metrics.add_operands(e),
            Event::Sections(e) => metrics.add_ranks(e),
            _ => {}
        }
        metrics
    }

    /// Adds the numbers of an object under `prefix`; the step is the axis, not a metric.
    fn add_fields(&mut self, prefix: &str, object: &Value) {
        for (key, value) in object.as_object().into_iter().flatten().filter(|(key, _)| *key != "step") {
            // Metrics of MoE layers have their prefix.
            let name = if key.starts_with("moe/") { key.clone() } else { format!("{prefix}/{key}") };
            match value {
                Value::Object(_) => self.add_fields(&name, value),
                Value::Array(items) if !items.is_empty() && items.iter().all(|x| number(x).is_some()) => {
                    self.distributions.push((name, items.iter().filter_map(number).collect()));
                }
                _ => self.scalars.extend(number(value).map(|x| (name, x))),
            }
        }
    }

    /// The statistics of FP8 operands over all modules, for each role.
    fn add_operands(&mut self, e: &Precision) {
        let mut by_name: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for o in &e.operands {
            let statistics = [
                ("saturation", o.saturation),
                ("underflow", o.underflow),
                ("amax", o.amax),
                ("error", o.error),
            ];
            for (name, x) in statistics {
                by_name.entry(format!("fp8/{}/{name}", o.role)).or_default().push(x);
            }
        }
        self.distributions.extend(by_name);
    }

    /// Section times over ranks, and their medians.
    fn add_ranks(&mut self, e: &Sections) {
        self.add_fields("sections", &json(&e.median));
        let mut by_name: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for rank in &e.ranks {
            let fields = json(rank);
            for (key, x) in fields.as_object().into_iter().flatten().filter(|(key, _)| *key != "rank") {
                let numbers = number(x).into_iter().filter(|_| !x.is_null());
                by_name.entry(format!("ranks/{key}")).or_default().extend(numbers);
            }
        }
        self.distributions.extend(by_name.into_iter().filter(|(_, x)| !x.is_empty()));
    }
}

fn json(event: &impl serde::Serialize) -> Value {
    serde_json::to_value(event).unwrap_or_default()
}

/// A number of a line, where null stands for what is not finite.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Null => Some(f64::NAN),
        other => other.as_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Eval, Operand, Step};
    use super::*;
    use serde_json::json;

    #[test]
    fn a_step_has_its_numbers_by_path_and_lists_as_distributions() {
        let more = [
            ("imbalance", json!(1.5)),
            ("moe/load_layer_1", json!([3, 5])),
            ("moe/entropy_layer_1", json!(null)),
        ];
        let sent = BTreeMap::from([("tp".to_string(), BTreeMap::from([("all-gather".to_string(), 64)]))]);
        let more = more.map(|(k, v)| (k.to_string(), v)).into();
        let step = Step { step: 3, loss: f64::NAN, lr: 0.5, tokens: 7, sent, more, ..Step::default() };
        let m = Metrics::of(&Event::Step(step));
        let get = |name: &str| m.scalars.iter().find(|(n, _)| n == name).map(|(_, x)| *x);
        assert_eq!([get("train/lr"), get("train/tokens")], [Some(0.5), Some(7.0)]);
        assert_eq!([get("train/imbalance"), get("train/sent/tp/all-gather")], [Some(1.5), Some(64.0)]);
        assert!(get("train/loss").unwrap().is_nan() && get("moe/entropy_layer_1").unwrap().is_nan());
        assert_eq!(get("train/step"), None);
        assert_eq!(m.distributions, [("moe/load_layer_1".to_string(), vec![3.0, 5.0])]);
    }

    #[test]
    fn operands_are_distributions_by_role_and_other_events_have_none() {
        let operand =
            |role: &str, saturation| Operand { role: role.into(), saturation, ..Operand::default() };
        let operands = vec![operand("input", 1.0), operand("weight", 2.0), operand("input", 3.0)];
        let m = Metrics::of(&Event::Precision(Precision { step: 1, operands }));
        let get = |name: &str| m.distributions.iter().find(|(n, _)| n == name).map(|(_, x)| x.clone());
        assert_eq!(get("fp8/input/saturation"), Some(vec![1.0, 3.0]));
        assert_eq!(get("fp8/weight/saturation"), Some(vec![2.0]));
        let members = BTreeMap::from([("code".to_string(), 2.0)]);
        let eval = Metrics::of(&Event::Eval(Eval { loss: 1.0, members, ..Eval::default() }));
        assert!(eval.scalars.contains(&("eval/members/code".into(), 2.0)), "{eval:?}");
        assert_eq!(Metrics::of(&Event::RunEnd(Default::default())), Metrics::default());
    }
}
